"""Bare loops: a client's round of a method in plain PyTorch, with nothing of fedflat around it.

A loop begins with what a client of fedflat received and kept, and takes the very batches that a client saw. It has
fedflat's module and the layout of its flat vector, memory that is kept, `autograd.grad`, and no more sweeps over
vectors than the formulas need. What a method computes once per round (a teacher's outputs, a constant shift, what the
client keeps and uploads) is computed once per round here too. A loop lacks what fedflat adds: shuffling, gathering
and augmentation, sending, checks, counts, other clients' states and aggregation.

Before a loop is timed, its update is compared with that of a client of fedflat in double precision, in a second
round in which no vector of the method is zero: a loop cannot leave out a part of its method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedflat as ff
from fedflat.core.allocator import keep_memory
from fedflat.models import build_model

from .pace import Processes, Steps
from .workloads import LR, Workload

Batches = list[tuple[Tensor, Tensor]]
"""Inputs and targets, in the order of the steps."""
Client = Callable[[], tuple[Tensor, ...]]
"""A client's round: the update, and what else the client uploads or keeps."""
TOLERANCE = 1e-9
"""relative difference of two updates in double precision"""
TEACHER_BATCH = 512


# -- what a client of fedflat has ------------------------------------------------------------------


@dataclass
class Seen:
    """What one client saw, received, kept and returned in one round."""

    start: Tensor
    received: dict[str, Any]
    state: dict[str, Tensor]
    batches: Batches = field(default_factory=list)
    update: Tensor = field(default_factory=lambda: torch.empty(0))


class Observer(ff.Mechanism):
    """A mechanism that only notes what the client's round has; the latest round counts."""

    seen: ClassVar[list[Seen]] = []

    def begin(self, local: Any) -> None:
        # the server goes on to change what it sent
        self.seen[:] = [Seen(local.start.clone(), _copies(local.received), _copies(local.state))]

    def direction(self, step: Any, d: Tensor) -> None:
        batch = getattr(step, "batch", step)
        self.seen[0].batches.append((batch.inputs, batch.targets))

    def end(self, local: Any) -> dict[str, Tensor]:
        self.seen[0].update = local.update.clone()
        return {}


def _copies(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in values.items()}


def observe(
    work: Workload, method: str, clients: int = 1, rounds: int = 1, dtype: torch.dtype = torch.float32
) -> Seen:
    """Train all clients of a small federation and return what the last one had in the last round."""
    work = replace(work, clients=clients, per_round=clients)
    federation = work.federation()
    observed = ff.METHODS[method]()
    watched = ff.Method(observed.name, [*observed.mechanisms, Observer()], observed.paper)
    module = build_model(work.model, federation, seed=0)
    ff.train(federation, module, watched, rounds=rounds, dtype=dtype, **work.settings)
    (seen,) = Observer.seen
    assert len(seen.batches) == work.steps // clients, "not the batches of a round"
    return seen


# -- a model as one vector -------------------------------------------------------------------------


class Flat(NamedTuple):
    """A vector and its views in the shapes of the parameters."""

    vector: Tensor
    views: list[Tensor]

    def add(self, gradients: tuple[Tensor, ...], scale: float) -> None:
        torch._foreach_add_(self.views, gradients, alpha=scale)


class Model:
    """A module whose parameters stand on one flat vector or another."""

    def __init__(self, work: Workload, dtype: torch.dtype = torch.float32) -> None:
        federation = replace(work, clients=1, samples=work.batch).federation()
        self.module = build_model(work.model, federation, seed=0).to(dtype).train()
        self.parameters = list(self.module.parameters())

    def flat(self, vector: Tensor) -> Flat:
        """Split a vector; a kernel lies there with its channels last, as in fedflat."""
        pieces = torch.split(vector, [p.numel() for p in self.parameters])
        return Flat(vector, [_view(*pair) for pair in zip(pieces, self.parameters, strict=True)])

    def stand(self, point: Flat) -> None:
        for parameter, view in zip(self.parameters, point.views, strict=True):
            parameter.data = view

    def gradients(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.cross_entropy(self.module(x), y), self.parameters)


def _view(piece: Tensor, parameter: Tensor) -> Tensor:
    if parameter.dim() != 4:
        return piece.view(parameter.shape)
    outputs, inputs, height, width = parameter.shape
    return piece.view(outputs, height, width, inputs).permute(0, 3, 1, 2)


# -- the methods -----------------------------------------------------------------------------------


def fedavg(model: Model, seen: Seen) -> Client:
    """`w ← w − η ∇ℓ(w)`."""
    w = model.flat(seen.start.clone())

    def client() -> tuple[Tensor, ...]:
        w.vector.copy_(seen.start)
        model.stand(w)
        for x, y in seen.batches:
            w.add(model.gradients(x, y), -LR)
        return (w.vector - seen.start,)

    return client


def fedavg_without_autograd(model: Model, seen: Seen) -> Client:
    """The same of a fully connected network, differentiated by hand: the update is a product that adds to w."""
    w = model.flat(seen.start.clone())
    layers = list(zip(w.views[::2], w.views[1::2], strict=True))
    assert all(isinstance(part, nn.Flatten | nn.Linear | nn.ReLU) for part in model.module.children())
    batches = [(x.flatten(1), F.one_hot(y, 10).to(x.dtype)) for x, y in seen.batches]
    ones = seen.start.new_ones(max(len(x) for x, _ in batches))

    def step(x: Tensor, wanted: Tensor) -> None:
        inputs = [x]
        for weight, bias in layers[:-1]:
            inputs.append(F.linear(inputs[-1], weight, bias).relu_())
        delta = torch.softmax(F.linear(inputs[-1], *layers[-1]), 1).sub_(wanted).div_(len(x))
        for a, (weight, bias) in zip(inputs[::-1], layers[::-1], strict=True):
            before = (delta @ weight).mul_(a > 0) if a is not x else delta
            weight.addmm_(delta.mT, a, alpha=-LR)
            bias.addmv_(delta.mT, ones[: len(x)], alpha=-LR)
            delta = before

    def client() -> tuple[Tensor, ...]:
        w.vector.copy_(seen.start)
        for batch in batches:
            step(*batch)
        return (w.vector - seen.start,)

    return client


def scaffold(model: Model, seen: Seen) -> Client:
    """`w ← w − η (∇ℓ(w) + c − c_i)`, then `c_i⁺ = c_i − c − Δ/(Kη)`."""
    w = model.flat(seen.start.clone())
    control, own = seen.received["control"], seen.state["control"]

    def client() -> tuple[Tensor, ...]:
        w.vector.copy_(seen.start)
        model.stand(w)
        lacking = control - own
        for x, y in seen.batches:
            w.add(model.gradients(x, y), -LR)
            w.vector.add_(lacking, alpha=-LR)
        update = w.vector - seen.start
        change = torch.add(control, update, alpha=1.0 / (len(seen.batches) * LR)).neg_()
        return update, change, own + change

    return client


def fedsam(model: Model, seen: Seen) -> Client:
    """`w ← w − η ∇ℓ(w + ρ ∇ℓ(w)/‖∇ℓ(w)‖)`."""
    w, point = model.flat(seen.start.clone()), model.flat(seen.start.clone())
    rho = parameter("fedsam", "local-ascent", "rho")

    def ascend(gradients: tuple[Tensor, ...]) -> None:
        scale = rho / math.hypot(*torch.stack(torch._foreach_norm(gradients)).tolist())
        for here, gradient, there in zip(w.views, gradients, point.views, strict=True):
            torch.add(here, gradient, alpha=scale, out=there)

    def client() -> tuple[Tensor, ...]:
        w.vector.copy_(seen.start)
        for x, y in seen.batches:
            model.stand(w)
            ascend(model.gradients(x, y))
            model.stand(point)
            w.add(model.gradients(x, y), -LR)
        return (w.vector - seen.start,)

    return client


def fedgmt(model: Model, seen: Seen) -> Client:
    """`w ← w − η (∇[ℓ + γτ² KL(f(e) ‖ f(w))] − u)` with the outputs of e once per round; `u⁺ = u − Δ/β`."""
    w, teacher = model.flat(seen.start.clone()), model.flat(seen.received["ema"])
    dual = seen.state["dual"]
    gamma, tau = (parameter("fedgmt", "trajectory-loss", name) for name in ("gamma", "tau"))
    beta = parameter("fedgmt", "dual-correction", "beta")
    everything = torch.cat([x for x, _ in seen.batches])
    rows, places = everything.flatten(1).unique(dim=0, return_inverse=True)
    samples = rows.view(-1, *everything.shape[1:])
    if samples.dim() == 4:
        samples = samples.contiguous(memory_format=torch.channels_last)
    sizes = [len(x) for x, _ in seen.batches]

    def teach() -> tuple[Tensor, ...]:
        model.stand(teacher)
        model.module.eval()
        with torch.no_grad():
            outputs = torch.cat([model.module(part) for part in samples.split(TEACHER_BATCH)])
        model.module.train()
        return torch.softmax(outputs / tau, 1).index_select(0, places).split(sizes)

    def client() -> tuple[Tensor, ...]:
        w.vector.copy_(seen.start)
        taught = teach()
        model.stand(w)
        for (x, y), wanted in zip(seen.batches, taught, strict=True):
            outputs = model.module(x)
            # the divergence up to a constant: a cross-entropy with probabilities as targets
            distilled = F.cross_entropy(outputs / tau, wanted)
            loss = torch.add(F.cross_entropy(outputs, y), distilled, alpha=gamma * tau**2)
            w.add(torch.autograd.grad(loss, model.parameters), -LR)
            w.vector.add_(dual, alpha=LR)
        update = w.vector - seen.start
        return update, torch.sub(dual, update, alpha=1.0 / beta)

    return client


def fedwmsam(model: Model, seen: Seen) -> Client:
    """`w ← w − η (α ∇ℓ(w + δ_b) + (1−α) g)` with `δ_b = ρ n(start + b g − w)`, 0 in the first step."""
    w, point = model.flat(seen.start.clone()), model.flat(seen.start.clone())
    alpha, momentum = seen.received["alpha"], seen.received["gradient"]
    rho = parameter("fedwmsam", "target-ascent", "rho")

    def ascend(b: int) -> None:
        torch.add(seen.start, momentum, alpha=b, out=point.vector).sub_(w.vector)
        scale = rho / torch.linalg.vector_norm(point.vector).item()
        torch.add(w.vector, point.vector, alpha=scale, out=point.vector)

    def client() -> tuple[Tensor, ...]:
        w.vector.copy_(seen.start)
        model.stand(w)
        for b, (x, y) in enumerate(seen.batches):
            if b == 1:
                model.stand(point)
            if b:
                ascend(b)
            w.add(model.gradients(x, y), -LR * alpha)
            w.vector.add_(momentum, alpha=-LR * (1.0 - alpha))
        return (w.vector - seen.start,)

    return client


def fednsam(model: Model, seen: Seen) -> Client:
    """`w ← w − η ∇ℓ(w + λm − ρ n(m))`: the shift is constant, so that the iterate makes it once."""
    w, momentum = model.flat(seen.start.clone()), seen.received["momentum"]
    rho = parameter("fednsam", "momentum-ascent", "rho")
    extrapolation = parameter("fednsam", "nesterov-momentum", "momentum")

    def client() -> tuple[Tensor, ...]:
        scale = extrapolation - rho / torch.linalg.vector_norm(momentum).item()
        start = torch.add(seen.start, momentum, alpha=scale)
        w.vector.copy_(start)
        model.stand(w)
        for x, y in seen.batches:
            w.add(model.gradients(x, y), -LR)
        return (w.vector - start,)

    return client


def fedsmoo(model: Model, seen: Seen) -> Client:
    """`ŝ = ρ n(∇ℓ(w) − μ − s)`, `μ ← μ + ŝ − s`, `w ← w − η (∇ℓ(w + ŝ) − u + (w − start)/β)`; `u⁺ = u − Δ/β`."""
    w, point, own = (model.flat(seen.start.clone()) for _ in range(3))
    shared, dual = seen.received["perturbation"], seen.state["dual"]
    rho = parameter("fedsmoo", "shared-perturbation", "rho")
    beta = parameter("fedsmoo", "dynamic-regulariser", "beta")
    offset = model.flat(seen.start.clone())

    def ascend(gradients: tuple[Tensor, ...]) -> float:
        for gradient, back, out in zip(gradients, offset.views, own.views, strict=True):
            torch.sub(gradient, back, out=out)
        scale = rho / torch.linalg.vector_norm(own.vector).item()
        offset.vector.add_(own.vector, alpha=scale).sub_(shared)
        torch.add(w.vector, own.vector, alpha=scale, out=point.vector)
        return scale

    def client() -> tuple[Tensor, ...]:
        w.vector.copy_(seen.start)
        torch.add(seen.state["multiplier"], shared, out=offset.vector)
        target = torch.add(seen.start, dual, alpha=beta)  # the dual and the pull are one step towards it
        for x, y in seen.batches:
            model.stand(w)
            scale = ascend(model.gradients(x, y))
            model.stand(point)
            gradients = model.gradients(x, y)
            w.vector.lerp_(target, LR / beta)
            w.add(gradients, -LR)
        update = w.vector - seen.start
        multiplier = offset.vector - shared
        uploaded = torch.sub(multiplier, own.vector, alpha=scale)
        return update, uploaded, multiplier, torch.sub(dual, update, alpha=1.0 / beta)

    return client


def parameter(method: str, mechanism: str, name: str) -> float:
    """Look up a parameter's default in the method."""
    (found,) = (m for m in ff.METHODS[method]().mechanisms if m.name == mechanism)
    value: float = getattr(found, name)
    return value


Loop = Callable[[Model, Seen], Client]
LOOPS: dict[str, Loop] = {
    loop.__name__: loop for loop in (fedavg, fedsam, fedgmt, scaffold, fedwmsam, fednsam, fedsmoo)
}


# -- as contenders ---------------------------------------------------------------------------------


def proven(work: Workload, loop: Loop, method: str) -> Seen:
    """Compare a loop's update with fedflat's on a small scale; return what the client had, in single precision."""
    small = replace(work, samples=30, batch=10, epochs=1, augment=False)
    seen = observe(small, method, clients=2, rounds=2, dtype=torch.float64)
    update, *_ = loop(Model(small, torch.float64), seen)()
    difference = _length(update - seen.update) / _length(seen.update)
    if not difference <= TOLERANCE:
        raise AssertionError(f"{loop.__name__}, {work.name}: not fedflat's update, by {difference:.1e} of it")
    return Seen(seen.start.float(), _single(seen.received), _single(seen.state))


def _length(vector: Tensor) -> float:
    return torch.linalg.vector_norm(vector).item()


def _single(values: dict[str, Any]) -> dict[str, Any]:
    return {name: v.float() if isinstance(v, Tensor) else v for name, v in values.items()}


def contender(work: Workload, method: str, batches: Batches, loop: Loop | None = None) -> Processes:
    """Let two processes take a loop's rounds, once it is proven to do the method's arithmetic."""
    chosen = loop or LOOPS[method]
    seen = replace(proven(work, chosen, method), batches=batches)
    assert work.steps % (2 * len(batches)) == 0, "a process takes whole clients' rounds"

    def prepare() -> Steps:
        keep_memory()
        client = chosen(Model(work), seen)

        def take(steps: int) -> None:
            for _ in range(steps // len(batches)):
                client()

        return take

    return Processes(prepare, work.steps)
