"""The public names and where they live; the package imports each when it is first asked for."""

from . import figures as figures
from .client.local import Local as Local
from .client.optimisers import LocalAdam as LocalAdam, LocalAdamW as LocalAdamW, LocalSGD as LocalSGD
from .client.step import Step as Step
from .core.flat import FlatModel as FlatModel
from .core.messages import Upload as Upload
from .core.metric import FunctionMetric as FunctionMetric, Metric as Metric
from .core.monitor import Monitor as Monitor
from .core.parameters import choice as choice, number as number
from .core.pull import Pull as Pull
from .data.augmentation import Augmentation as Augmentation, Images as Images
from .data.dataset import Dataset as Dataset
from .data.federate import federate as federate, load_dataset as load_dataset
from .data.federation import Federation as Federation
from .data.own import from_torch as from_torch, read_images as read_images, read_table as read_table
from .data.partitions import (
    IID as IID,
    ByDomain as ByDomain,
    ByUser as ByUser,
    Dirichlet as Dirichlet,
    LongTail as LongTail,
    Pathological as Pathological,
    Quantity as Quantity,
)
from .data.preprocessing import Preprocessing as Preprocessing
from .engines.inprocess import InProcess as InProcess
from .engines.ray.engine import Ray as Ray
from .engines.workers.engine import Workers as Workers
from .errors import Diverged as Diverged, FedflatError as FedflatError
from .experiments.export import export as export
from .experiments.load_run import TrainedModel as TrainedModel, load_run as load_run
from .experiments.predictor import Predictor as Predictor, load as load
from .flatness import MEASURES as MEASURES
from .flatness.client_sharpness import (
    ClientSharpness as ClientSharpness,
    client_sharpness as client_sharpness,
)
from .flatness.density import SpectralDensity as SpectralDensity, spectral_density as spectral_density
from .flatness.discrepancy import (
    Discrepancy as Discrepancy,
    LocalModel as LocalModel,
    flatness_discrepancy as flatness_discrepancy,
)
from .flatness.distance import FlatnessDistance as FlatnessDistance, flatness_distance as flatness_distance
from .flatness.drift import gradient_drift as gradient_drift, update_drift as update_drift
from .flatness.eigenvalues import Eigenvalues as Eigenvalues, hessian_eigenvalues as hessian_eigenvalues
from .flatness.embedding import (
    Embedding as Embedding,
    embed as embed,
    embedding as embedding,
    penultimate_features as penultimate_features,
)
from .flatness.estimate import Estimate as Estimate
from .flatness.landscape import (
    Landscape as Landscape,
    Plane as Plane,
    interpolation as interpolation,
    landscape as landscape,
    merged as merged,
    plane as plane,
)
from .flatness.local_round import RunState as RunState
from .flatness.low_pass import LowPass as LowPass, low_pass as low_pass
from .flatness.measure import Measure as Measure
from .flatness.radius import RadiusProfile as RadiusProfile, loss_along_radius as loss_along_radius
from .flatness.round_change import round_loss_change as round_loss_change
from .flatness.sharpness import sharpness as sharpness
from .flatness.surface import Surface as Surface
from .flatness.trace import hessian_trace as hessian_trace
from .flatness.trajectory import local_trajectory as local_trajectory
from .flatness.update_sums import Drift as Drift, UpdateSums as UpdateSums
from .flatness.worst_case import WorstCase as WorstCase, worst_case_sharpness as worst_case_sharpness
from .methods.mechanism import Contract as Contract, Correction as Correction, Mechanism as Mechanism
from .methods.mechanisms import (
    AdaptiveAscent as AdaptiveAscent,
    AdaptiveWeight as AdaptiveWeight,
    ControlVariates as ControlVariates,
    DualCorrection as DualCorrection,
    DynamicRegulariser as DynamicRegulariser,
    HistoryAscent as HistoryAscent,
    InterpolatedAscent as InterpolatedAscent,
    LocalAscent as LocalAscent,
    LookAheadMomentum as LookAheadMomentum,
    MomentumAscent as MomentumAscent,
    MomentumBlend as MomentumBlend,
    NesterovMomentum as NesterovMomentum,
    NotTrueDistillation as NotTrueDistillation,
    OwnTrajectoryLoss as OwnTrajectoryLoss,
    PersonalBlend as PersonalBlend,
    PrivateUploads as PrivateUploads,
    Proximal as Proximal,
    ServerMomentum as ServerMomentum,
    ServerStep as ServerStep,
    SharedPerturbation as SharedPerturbation,
    TargetAscent as TargetAscent,
    TrajectoryLoss as TrajectoryLoss,
)
from .methods.method import Method as Method
from .methods.named import (
    METHODS as METHODS,
    fedacg as fedacg,
    fedasam as fedasam,
    fedavg as fedavg,
    fedavg_nesterov as fedavg_nesterov,
    fedavgm as fedavgm,
    fedcm as fedcm,
    feddyn as feddyn,
    fedgamma as fedgamma,
    fedgf as fedgf,
    fedgmt as fedgmt,
    fedgmt_v2 as fedgmt_v2,
    fedlesam as fedlesam,
    fedlesam_d as fedlesam_d,
    fedlesam_s as fedlesam_s,
    fednsam as fednsam,
    fednsam_d as fednsam_d,
    fednsam_s as fednsam_s,
    fedntd as fedntd,
    fedprox as fedprox,
    fedsam as fedsam,
    fedsam_nesterov as fedsam_nesterov,
    fedsmoo as fedsmoo,
    fedspeed as fedspeed,
    fedwmsam as fedwmsam,
    mofedsam as mofedsam,
    scaffold as scaffold,
)
from .methods.text import as_method as as_method
from .server.participation import (
    Bernoulli as Bernoulli,
    Everyone as Everyone,
    Schedule as Schedule,
    Uniform as Uniform,
)
from .server.server import Server as Server
from .storage.metrics_file import read_metrics as read_metrics
from .training.callbacks import Callback as Callback
from .training.record import RoundRecord as RoundRecord
from .training.settings import TrainingSettings as TrainingSettings
from .training.train import Run as Run, train as train

__version__: str
