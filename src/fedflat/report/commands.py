"""How to get a run once more."""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from .published import cells_of
from .reading import RunFiles

OF_A_MACHINE = ("data", "download", "trackers")
"""What another person's machine has elsewhere, or does not want."""


def how_to_repeat(run: RunFiles) -> dict[str, Any]:
    """Commands, the experiment file they need, and the versions that it ran with."""
    environment = run.settings.get("environment")
    about = environment if isinstance(environment, dict) else {}
    return {
        "commands": _commands(run),
        "experiment": _file(run),
        "versions": {
            name: str(about[name])
            for name in ("fedflat", "python", "torch", "numpy", "system")
            if name in about
        },
        "commit": _commit(about.get("git")),
        "started": str(run.settings.get("started", "")),
        "finished": str(run.settings.get("finished", "")),
    }


def _commands(run: RunFiles) -> list[dict[str, str]]:
    if run.on_nodes:
        return [_flower(run)]
    if run.experiment is None:
        return []
    found = [
        {
            "what": "Save the experiment below as experiment.yaml, then",
            "command": "fedflat run experiment.yaml",
        }
    ]
    if not run.finished:
        place = shlex.quote(str(run.path))
        found.insert(0, {"what": "Resume it where it is", "command": f"fedflat resume {place}"})
    for preset, cell in cells_of(run.experiment):
        words = ["fedflat", "reproduce", preset.key, "--cells", cell.column, "--rows", cell.row]
        found.append(
            {"what": f"With {preset.where} of {preset.paper} beside it", "command": shlex.join(words)}
        )
    return found


def _flower(run: RunFiles) -> dict[str, str]:
    """The data is on nodes: only the Flower app can train on it."""
    words = ["flwr", "run", ".", "federation", "--stream"]
    if not run.finished:
        what = (
            "Resume it: start the server and the nodes where they have stopped; then, in the folder of its "
            "Flower app,"
        )
    else:
        words += ["--run-config", f'out="{run.path.name}-again"']
        what = (
            "Its data is on the clients' own nodes. With the same nodes, and the experiment below as the app's "
            "experiment.yaml, in the folder of its Flower app,"
        )
    return {"what": what, "command": shlex.join(words)}


def _file(run: RunFiles) -> str:
    if run.experiment is None:
        return ""
    content = {key: value for key, value in run.experiment.items() if key not in OF_A_MACHINE}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _commit(git: Any) -> str:
    if not isinstance(git, dict):
        return ""
    return f"{git.get('commit', '')}{', with changes' if git.get('changed') else ''}"
