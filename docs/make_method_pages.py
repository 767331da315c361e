"""Write what the code knows of each method into its page: `python docs/make_method_pages.py`.

A page is written by hand, but for the part between two comments: what the method is made of, what it costs, its
parameters, the papers' values and what was measured here. That part, and the table of all methods, is made from
`fedflat.METHODS`, from the papers' presets, and from the files in results/.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fedflat as ff
from fedflat.experiments.presets import find_preset, presets

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "methods"
BEGIN, END = "<!-- facts: made by docs/make_method_pages.py -->", "<!-- end of facts -->"

TITLES = {"fedgmt": "FedGMT", "fedwmsam": "FedWMSAM", "fednsam": "FedNSAM", "fedgf": "FedGF"}

MEANINGS = {
    "server_lr": "η_g, the server's learning rate",
    "rho": "ρ, length of the ascent",
    "mu": "μ, strength of the pull back",
    "beta": "β, penalty; 1/β is the strength of the pull",
    "prox": 'pull that grows with the distance, or of constant length ("norm")',
    "alpha": "α, weight of the client's own gradient",
    "gamma": "γ, weight of the additional loss",
    "tau": "τ, temperature",
    "momentum": "λ, of the server",
    "normalize": "whether the ascent has length ρ, or ρ times the gradient's",
    "mix": "a, weight of the second gradient",
    "dual_mean": "whose duals the server averages",
    "direction": "ascent along the client's own history, or along the server's last step",
    "threshold": "T_D, mean length of updates above which clients count as diverged",
    "window": "W, rounds over which that is averaged",
    "rho_global": "ρ_g, length of the server's ascent; None is ρ",
    "c": "a constant instead of the controller; None is the controller",
    "server_rule": 'lines 16 and 17 ("box"), or Eq. 13 ("active")',
    "first": "a client's first teacher: the model received, or the initial one",
    "decay": "λ, how fast α follows its estimate",
    "alpha_rule": "how α is estimated, see below",
    "sam": "ascent towards the momentum's target; off in an ablation",
    "weighted": "adaptive α; off in an ablation",
    "nesterov": "extrapolation; off in an ablation",
    "heavy_ball": "whether the server steps along the momentum",
    "eta": "η_a, added to |w|",
    "fedwmsam.momentum": "personal momentum; off in an ablation",
    "fedwmsam.alpha": "α in the first round",
    "fedgmt.alpha": "α, of the moving average of models",
    "fedgmt_v2.alpha": "α, of the moving average of models",
    "fedgmt.beta": "β, penalty of the duals; None is without duals",
    "fedgmt_v2.beta": "β, penalty of the duals; None is without duals",
    "fedsmoo.beta": "β, penalty; None is without the dynamic regulariser",
}
"""What a parameter is, by its name, or by method and name where it is something else there."""


# -- one method ------------------------------------------------------------------------------------


def facts(name: str) -> str:
    """Everything between the two comments of a method's page."""
    method = ff.METHODS[name]()
    parts = [
        made_of(name, method),
        cost(method),
        parameters(name, method),
        papers(name),
        measured(method),
    ]
    return "\n".join([BEGIN, "", *parts, END])


def made_of(name: str, method: ff.Method) -> str:
    lines = ["## Made of", "", f"Paper: {method.paper}. On the command line `{name.replace('_', '-')}`,"]
    lines += [f"in Python `ff.{name}()`, which is `{method}`.", ""]
    for mechanism in method.mechanisms:
        kind = type(mechanism)
        place = f"../api/mechanisms.md#{kind.__module__}.{kind.__name__}"
        lines.append(f"- [`{mechanism.name}`]({place}): {first_line(kind)}")
    if not method.mechanisms:
        lines.append("It needs no mechanism: it is what the training loop does by itself.")
    return "\n".join([*lines, ""])


def cost(method: ff.Method) -> str:
    each = [name for contract in method.contracts for name in contract.each]
    down = [name for name in method.down if name not in method.cost.down_scalars] + each
    numbers = [f"the number `{name}`" for name in method.cost.down_scalars]
    rows = [
        ("down, to an active client", ["the model", *code(down), *numbers]),
        ("up, from it", ["its update", *code(method.up)]),
        ("passes in a local step", [f"{method.cost.forward} forward, {method.cost.backward} backward"]),
        ("every client keeps", code(method.cost.client)),
        ("the server keeps beside the model", code(method.cost.server)),
        ("the server keeps for every client", code(method.cost.server_per_client)),
        ("vectors moved, times FedAvg's", [f"{(method.cost.down + method.cost.up) / 2:g}"]),
    ]
    lines = ["## Cost", "", "| what | how much |", "| --- | --- |"]
    lines += [f"| {label} | {', '.join(what) or 'nothing'} |" for label, what in rows]
    return "\n".join([*lines, ""])


def parameters(name: str, method: ff.Method) -> str:
    known = inspect.signature(ff.METHODS[name]).parameters
    if not known:
        return "## Parameters\n\nNone.\n"
    lines = ["## Parameters", "", "| name | default | range | what it is |", "| --- | ---: | --- | --- |"]
    for parameter in known.values():
        meaning = MEANINGS.get(f"{name}.{parameter.name}") or MEANINGS[parameter.name]
        allowed = range_of(method, parameter.name, parameter.default)
        shown = "`" + repr(parameter.default).replace("'", '"') + "`"
        lines.append(f"| `{parameter.name}` | {shown} | {allowed} | {meaning.replace('|', '&#124;')} |")
    return "\n".join([*lines, ""])


def range_of(method: ff.Method, name: str, default: Any) -> str:
    """What a parameter may be, as its mechanism declares it."""
    if isinstance(default, bool):
        return "true or false"
    aliases = {"direction": "source", "alpha_rule": "rule", "dual_mean": "mean"}
    fields = [
        f for m in method.mechanisms for f in dataclasses.fields(m) if f.name == aliases.get(name, name)
    ]
    if name == "server_lr":
        fields = list(dataclasses.fields(ff.ServerStep))
    if name == "server_rule":
        return "`box` or `active`"
    metadata = fields[0].metadata
    if "words" in metadata:
        return " or ".join(f"`{word}`" for word in metadata["words"])
    bounds = [f"{word} {bound:g}" for word, bound in metadata["bounds"].items() if bound is not None]
    return ", ".join([*bounds, *(["whole"] if metadata["whole"] else [])])


def papers(name: str) -> str:
    """The values with which the four papers measured the method, from their presets."""
    used: dict[tuple[str, str], Counter[str]] = {}
    for preset in presets():
        for cell in preset.cells():
            given = re.fullmatch(r"([\w-]+)\((.*)\)", str(cell.content["method"]))
            if given and given.group(1).replace("-", "_") == name:
                for value in given.group(2).split(","):
                    parameter, _, chosen = value.strip().partition("=")
                    used.setdefault((TITLES[preset.paper], parameter), Counter())[plain(chosen)] += 1
    lines = ["## The papers' values", ""]
    if not used:
        return "\n".join([*lines, "The four papers whose tables are presets give none for it.", ""])
    lines += [
        "As the presets of the four papers have them, ablations and sensitivity studies among them:",
        "",
    ]
    lines += ["| paper | parameter | most often | also |", "| --- | --- | ---: | --- |"]
    for (paper, parameter), values in used.items():
        (most, _), *rest = values.most_common()
        also = ", ".join(sorted(value for value, _ in rest)) or "–"
        lines.append(f"| {paper} | `{parameter}` | {most} | {also} |")
    return "\n".join([*lines, ""])


def plain(value: str) -> str:
    """A value without a needless `.0`."""
    return value.removesuffix(".0")


def measured(method: ff.Method) -> str:
    return "\n".join(["## Measured here", "", *accuracy(method), ""])


def accuracy(method: ff.Method) -> list[str]:
    """Accuracies of the full protocol, from results/fedwmsam-table1.json."""
    found = json.loads((ROOT / "results" / "fedwmsam-table1.json").read_text())
    published = {(c.row, c.column): c.published for c in find_preset("fedwmsam/table1").cells()}
    columns: dict[str, list[dict[str, Any]]] = {}
    for key, run in found.items():
        row, column, _ = key.split("|")
        if row == method.name:
            columns.setdefault(column, []).append(run)
    if not columns:
        return ["Accuracy: not measured yet."]
    lines = [
        "Test accuracy in percent, [full protocol of FedWMSAM's Table 1](../../results/fedwmsam-table1.md):",
        "",
    ]
    lines += [
        "| setting | seeds | best round | last 100 rounds | paper |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for column, runs in columns.items():
        paper = published.get((method.name, column))
        shown = "–" if paper is None else f"{100 * paper:.2f}"
        best, late = ([run[key] for run in runs] for key in ("max", "last100"))
        lines.append(f"| {column} | {len(runs)} | {spread(best)} | {spread(late)} | {shown} |")
    return lines


def spread(values: list[float]) -> str:
    """Percent: the mean, and the deviation over seeds if there are several."""
    mean = f"{100 * statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.2f}"


# -- all methods -----------------------------------------------------------------------------------


def family() -> str:
    """The table of all methods."""
    lines = ["| method | made of | down | up | F/B | a client keeps | the server keeps | paper |"]
    lines += ["| --- | --- | ---: | ---: | ---: | --- | --- | --- |"]
    for name, make in ff.METHODS.items():
        method = make()
        held = [f"{kept} of every client" for kept in method.cost.server_per_client]
        cells = [
            f"[{method.name}]({name}.md)",
            " + ".join(f"`{m.name}`" for m in method.mechanisms) or "–",
            " + ".join([str(method.cost.down), *method.cost.down_scalars]),
            str(method.cost.up),
            f"{method.cost.forward}/{method.cost.backward}",
            ", ".join(method.cost.client) or "–",
            ", ".join([*method.cost.server, *held]) or "–",
            method.paper,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([BEGIN, "", *lines, "", END])


def code(names: Any) -> list[str]:
    return [f"`{name}`" for name in names]


def first_line(thing: Any) -> str:
    return (thing.__doc__ or "").strip().split("\n")[0]


def renewed(text: str, made: Callable[[], str]) -> str:
    """A page with what is between the two comments made anew."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"A page of docs/methods lacks the comments {BEGIN} and {END}.")
    return before + made() + after


def pages() -> dict[Path, str]:
    """Every page of docs/methods as it should be."""
    made = {PAGES / "index.md": renewed((PAGES / "index.md").read_text("utf-8"), family)}
    for name in ff.METHODS:
        path = PAGES / f"{name}.md"
        made[path] = renewed(path.read_text("utf-8"), lambda name=name: facts(name))
    return made


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
