"""What a node insists on: terms below that are refused, whatever the server says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...client.round import ClientRound
from ...core.parameters import check_parameters, number
from ...errors import FedflatError, nearest
from ...experiments.files import load_experiment
from ...methods.method import noisy_mechanisms
from ...methods.text import as_method
from .privacy import leaving_buffers, steps_tell

WITHHELD = ("samples", "loss", "report", "buffers")
"""What a node may want to keep to itself."""


@dataclass(frozen=True)
class Require:
    """The least that a node takes part with; the server's terms decide everything above it.

    Args:
        noise: on every upload, with at least this multiplier, and nothing beside it that tells of the samples: all
            of `withheld`.
        clip: vectors of at most this length before the noise.
        withheld: what must not leave: the number of `samples` (or what tells it, such as a number of steps that comes
            from epochs), the training `loss`, the `report` of how the model did here, the `buffers` of BatchNorm.
    """

    noise: float | None = number(default=None, above=0, optional=True)
    clip: float | None = number(default=None, above=0, optional=True)
    withheld: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_parameters(self, "Require")
        words = (self.withheld,) if isinstance(self.withheld, str) else tuple(self.withheld)
        for word in words:
            if word not in WITHHELD:
                raise FedflatError(
                    f"Require: withheld has '{word}'; a node can withhold {', '.join(WITHHELD)}."
                )
        object.__setattr__(self, "withheld", words)

    @classmethod
    def promised_by(cls, experiment: str | Path) -> Require:
        """Insist on the noise and the clip that an experiment file promises, however a run changes it."""
        noise = as_method(load_experiment(experiment).method).noise
        if noise is None or not noise.noise:
            return cls()
        return cls(noise.noise, max(noise.clip, noise.clip_extra or 0.0))

    def and_of(self, node: Mapping[str, Any]) -> Require:
        """What an app and its node's config insist on together: the stricter of both."""
        theirs = _from_config(node)
        return replace(
            self,
            noise=max((r.noise for r in (self, theirs) if r.noise is not None), default=None),
            clip=min((r.clip for r in (self, theirs) if r.clip is not None), default=None),
            withheld=tuple(word for word in WITHHELD if word in self.withheld + theirs.withheld),
        )

    def withholds(self, word: str) -> bool:
        """Whether something must not leave."""
        return self.noise is not None or word in self.withheld

    def check(self, training: ClientRound, report: bool) -> None:
        """Refuse a training that would let out more; the one that is checked is the one that is run."""
        problems = self._noise_missing(training) + self._uncovered(training, report)
        if problems:
            raise FedflatError(
                f"This node insists on more privacy than the server's terms: {' '.join(problems)}"
            )

    def _noise_missing(self, training: ClientRound) -> list[str]:
        if self.noise is None and self.clip is None:
            return []
        private = training.method.noise
        if private is None:
            wanted = [f"{n}={v:g}" for n, v in (("clip", self.clip), ("noise", self.noise)) if v is not None]
            return [f"the method must end with {noisy_mechanisms()}({', '.join(wanted)})."]
        found = []
        if self.noise is not None and private.noise < self.noise:
            found.append(f"noise is {private.noise:g}, at least {self.noise:g} is needed.")
        longest = max(private.clip, private.clip_extra or 0.0)
        if self.clip is not None and longest > self.clip:
            found.append(f"clip is {longest:g}, at most {self.clip:g} is allowed.")
        return found

    def _uncovered(self, training: ClientRound, report: bool) -> list[str]:
        withheld = WITHHELD if self.noise is not None else self.withheld
        private = training.method.noise is not None
        found = []
        if "samples" in withheld and not private:
            found.append("the number of samples would leave.")
        if "samples" in withheld and steps_tell(training.optimiser):
            found.append("the number of steps would tell the number of samples: steps, not epochs.")
        if "loss" in withheld and not private:
            found.append("the training loss would leave.")
        if "report" in withheld and report and not private:
            found.append("a report would leave: report=false.")
        if "buffers" in withheld and leaving_buffers(training.buffers, training.initial_buffers is not None):
            found.append("BatchNorm statistics would leave: buffers=server.")
        return found


def _from_config(node: Mapping[str, Any]) -> Require:
    """What `--node-config "require-noise=1.0 require-clip=1.0 require-withheld='samples report'"` says."""
    known = {"require-noise": "noise", "require-clip": "clip", "require-withheld": "withheld"}
    given: dict[str, Any] = {}
    for key, value in node.items():
        if key.replace("_", "-").startswith("require"):
            if key not in known:
                raise FedflatError(f"The node's config has no setting '{key}'.{nearest(key, known)}")
            given[known[key]] = (
                tuple(str(value).replace(",", " ").split()) if known[key] == "withheld" else value
            )
    return Require(**given)
