"""Figures in one style; each function returns a matplotlib Figure, which `save` writes.

What lies in run directories is read, not computed: where a measurement is missing, the error names the command that
makes it.
"""

from __future__ import annotations

from .clients import client_spread as client_spread
from .curves import learning_curves as learning_curves
from .density import spectral_densities as spectral_densities
from .embedding import embeddings as embeddings
from .interpolation import interpolations as interpolations
from .landscape import landscapes as landscapes
from .measured import measure_curves as measure_curves
from .partition import partitions as partitions
from .plane import trajectories as trajectories
from .radius import loss_by_radius as loss_by_radius
from .sensitivity import sensitivity as sensitivity
from .style import save as save
from .surface import surfaces as surfaces
from .target import cost_to_target as cost_to_target
from .traces import traces as traces
from .tuning import tuning as tuning
