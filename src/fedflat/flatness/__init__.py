"""How flat a model's surroundings are: measures by name.

A measure takes a model and a federation (or, where clients do not matter, some samples) and returns a number or a
small dataclass of numbers, which `dataclasses.asdict` makes plain. It never changes the model.
"""

from __future__ import annotations

from .measure import Measure

_ALL = [
    Measure("sharpness", "rise of the loss one ascent step of length rho away (SAM)", "sharpness.sharpness"),
    Measure(
        "client-sharpness",
        "the same for every client's own loss",
        "client_sharpness.client_sharpness",
        federated=True,
    ),
    Measure(
        "worst-case",
        "highest rise of the loss within rho, by several projected ascent steps",
        "worst_case.worst_case_sharpness",
    ),
    Measure(
        "eigenvalues",
        "largest eigenvalues of the Hessian",
        "eigenvalues.hessian_eigenvalues",
        needs=("scipy", "flatness"),
    ),
    Measure("trace", "trace of the Hessian, with its interval", "trace.hessian_trace"),
    Measure("density", "density of the Hessian's eigenvalues", "density.spectral_density"),
    Measure("low-pass", "mean loss under Gaussian noise on the weights (LPF)", "low_pass.low_pass"),
    Measure(
        "radius", "loss at growing distance, in random directions and uphill", "radius.loss_along_radius"
    ),
    Measure(
        "distance",
        "mean squared distance of local models from their average (FedNSAM)",
        "distance.flatness_distance",
        federated=True,
    ),
    Measure(
        "discrepancy",
        "difference in sharpness between the global and the local models (FedGF)",
        "discrepancy.flatness_discrepancy",
        federated=True,
    ),
    Measure(
        "drift",
        "diversity of the clients' updates, and the cosines between them",
        "drift.update_drift",
        federated=True,
    ),
    Measure(
        "gradient-drift",
        "the same of the clients' gradients at the global model",
        "drift.gradient_drift",
        federated=True,
    ),
]

MEASURES = {measure.name: measure for measure in _ALL}
"""Every measure by the name it has in an experiment file and on the command line."""
