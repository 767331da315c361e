"""What a person must know before comparing a run with a paper, as sentences.

About the data, a federation knows it (`caveats`); about the protocol, it is how an experiment differs from the
paper's. A run keeps both in its run.json; tables, reports and figures read them there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..methods.text import as_method
from ..storage.run_files import read_settings
from .build import make_partition
from .schema import Experiment
from .sweep import HOW

APART = (HOW - {"rounds"}) | {"seed", "measure"}
"""What may differ between a run and the cell of a table that it belongs to."""
MARK = "‡"
"""Of a difference to a paper that is not only the method's."""
MARKED = f"{MARK} data or protocol are not the paper's: see the notes"

Pair = tuple[Mapping[str, Any], Experiment]
"""A paper's experiment, as in a file, and what is run."""


def protocol_caveats(pairs: Iterable[Pair]) -> list[str]:
    """How runs differ from the papers' experiments: a sentence for models, one for everything else."""
    models: dict[str, None] = {}
    changes: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for content, experiment in pairs:
        paper = Experiment.model_validate(dict(content))
        theirs, ours = _settings(paper), _settings(experiment)
        if any(entry not in experiment.measure for entry in paper.measure):  # further ones do no harm
            theirs["measure"], ours["measure"] = str(paper.measure), str(experiment.measure)
        for key in (key for key in ours if ours[key] != theirs[key]):
            if key == "model":
                models[f"{ours[key]} stands in for {theirs[key]}"] = None
                continue
            here, there = changes.setdefault(key, ({}, {}))
            here[ours[key]], there[theirs[key]] = None, None
    told = [f"{key} {_listed(here)} ({_listed(there)})" for key, (here, there) in changes.items()]
    sentences = [f"Models: {', '.join(models)}."] if models else []
    return sentences + (
        [f"Settings that are not the paper's (in brackets): {', '.join(told)}."] if told else []
    )


def _settings(experiment: Experiment) -> dict[str, str]:
    """What a run's numbers depend on, by dotted keys, each as a text that is the same for the same thing."""
    filled = experiment.with_defaults()
    found = filled.model_dump(mode="json", exclude=APART | {"stand_in", "local", "method", "partition"})
    found |= {f"local.{key}": value for key, value in filled.local.model_dump(mode="json").items()}
    found |= {"method": str(as_method(filled.method)), "partition": str(make_partition(filled.partition))}
    return {key: "none" if value is None else str(value) for key, value in found.items()}


def _listed(values: Iterable[str]) -> str:
    return " / ".join(values)


def kept_caveats(run: str | Path) -> list[str]:
    """Those in a run's run.json; none where there is no run.json."""
    if not (Path(run) / "run.json").exists():
        return []
    found = read_settings(run).get("notes", [])
    return [str(sentence) for sentence in found] if isinstance(found, list) else []


def all_caveats(runs: Iterable[str | Path]) -> list[str]:
    """Those of several runs, each once."""
    return list(dict.fromkeys(sentence for run in runs for sentence in kept_caveats(run)))


def merged(*sentences: Sequence[str]) -> list[str]:
    """Each once, in order."""
    return list(dict.fromkeys(sentence for some in sentences for sentence in some))
