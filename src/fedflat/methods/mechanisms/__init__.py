"""One file per idea; a method is a list of these."""

from .control_variates import ControlVariates
from .dual_correction import DualCorrection, DynamicRegulariser
from .history_ascent import HistoryAscent
from .interpolated_ascent import InterpolatedAscent
from .local_ascent import AdaptiveAscent, LocalAscent
from .momentum_ascent import MomentumAscent
from .momentum_blend import AdaptiveWeight, MomentumBlend, PersonalBlend, TargetAscent
from .private_uploads import PrivateUploads
from .proximal import Proximal
from .server_momentum import LookAheadMomentum, NesterovMomentum, ServerMomentum
from .server_step import ServerStep
from .shared_perturbation import SharedPerturbation
from .teacher_loss import NotTrueDistillation, OwnTrajectoryLoss, TrajectoryLoss

__all__ = [
    "AdaptiveAscent",
    "AdaptiveWeight",
    "ControlVariates",
    "DualCorrection",
    "DynamicRegulariser",
    "HistoryAscent",
    "InterpolatedAscent",
    "LocalAscent",
    "LookAheadMomentum",
    "MomentumAscent",
    "MomentumBlend",
    "NesterovMomentum",
    "NotTrueDistillation",
    "OwnTrajectoryLoss",
    "PersonalBlend",
    "PrivateUploads",
    "Proximal",
    "ServerMomentum",
    "ServerStep",
    "SharedPerturbation",
    "TargetAscent",
    "TrajectoryLoss",
]
