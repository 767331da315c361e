"""Commands for the papers' experiments: `fedflat papers`, `fedflat reproduce`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..errors import FedflatError, explained
from ..storage.files import replace_file
from .app import PAPERS, app, console, headed
from .options import DataDirectory, Download, KeepStates, Set
from .outcome import show_notes
from .sweeping import GridProgress, _seeds

if TYPE_CHECKING:
    from ..experiments.presets import Preset
    from ..experiments.reproduce import Planned
    from ..experiments.sweep import Cell

FIGURES = {
    "accuracy-by-round": ["fedflat figure curves {runs} -o {figure}"],
    "landscape": ["fedflat landscape {runs}", "fedflat figure surface {runs} -o {figure}"],
    "embedding": ["fedflat figure embedding {runs} -o {figure}"],
    "loss-by-radius": ["fedflat flatness {runs} -m radius", "fedflat figure radius {runs} -o {figure}"],
    "c": ["fedflat figure traces {runs} --name c -o {figure}"],
    "alpha": ["fedflat figure traces {runs} --name alpha -o {figure}"],
    "cosine": ["fedflat figure traces {runs} --name cosine --name one-minus-cosine -o {figure}"],
    "one-minus-cosine": ["fedflat figure traces {runs} --name one-minus-cosine --name cosine -o {figure}"],
    "communication-and-minutes-to": ["fedflat figure target {runs} -o {figure}"],
    "sharpness": ["fedflat figure sharpness {runs} -o {figure}"],
    "distance": ["fedflat figure sharpness {runs} --measure distance --measure sharpness -o {figure}"],
}
"""How a paper's figure is drawn, by what it shows; a preset may have commands of its own, `draw`."""
APART = ("accuracy-by-round", "loss-by-radius")
"""What has a panel for every setting in the papers, and so a file for every column here."""


@app.command("papers", rich_help_panel=PAPERS)
def list_papers(
    paper: Annotated[
        str | None, typer.Argument(help="Only this one: fedgmt, fedwmsam, fednsam, fedgf.")
    ] = None,
) -> None:
    """List the tables and figures of the papers that `fedflat reproduce` knows, with what they cost."""
    from ..experiments.presets import presets

    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("preset", no_wrap=True)
    table.add_column("what")
    for column in ("published", "runs", "core hours"):
        table.add_column(column, justify="right", no_wrap=True)
    for preset in presets(paper):
        runs, hours = preset.cost()
        published = sum(c.published is not None or bool(c.note) for c in preset.cells())
        table.add_row(preset.key, preset.title, str(published or "–"), str(runs), f"{hours:,.0f}")
    console.print(table)
    console.print(
        "published: numbers that the paper prints. Core hours: a rough estimate of training, testing and measuring,\n"
        "for one core of a usual machine. `fedflat reproduce fedwmsam/table1 --cells fashion-mnist` runs some\n"
        "cells, `--scale small` tries all of them in minutes.",
        style="dim",
        highlight=False,
    )


@app.command(rich_help_panel=PAPERS)
def reproduce(
    preset: Annotated[
        str, typer.Argument(help="A preset, for example fedwmsam/table1; `fedflat papers` lists them.")
    ],
    cells: Annotated[
        str | None, typer.Option(help="Only these columns, or those that begin so: fashion-mnist.")
    ] = None,
    rows: Annotated[str | None, typer.Option(help="Only these rows: FedAvg,FedSAM.")] = None,
    add: Annotated[
        str | None, typer.Option(help="Further methods, beside the paper's: fedgmt,fednsam.")
    ] = None,
    scale: Annotated[
        str, typer.Option(help="full, as in the paper, or small, to see in minutes that it runs.")
    ] = "full",
    set_: Set = None,
    seeds: Annotated[str, typer.Option(help="How many seeds, or which.")] = "1",
    jobs: Annotated[int, typer.Option(help="Runs at a time, each on a core of its own.", min=1)] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Directory for the runs. (default: runs/PRESET, or runs/PRESET-small)")
    ] = None,
    statistic: Annotated[
        str | None,
        typer.Option(
            help="Which accuracy of a run: max, last, mean:50 (of the last 50 tests) or low-tenth (what nine tenths "
            "of the tests from round 101 on exceed). (default: the preset's)"
        ),
    ] = None,
    data: DataDirectory = None,
    download: Download = False,
    keep_states: KeepStates = False,
) -> None:
    """Run cells of a paper's table and print ours beside theirs. Repeat the command to resume."""
    from ..experiments.build import fetch_missing
    from ..experiments.caveats import all_caveats, merged, protocol_caveats
    from ..experiments.changes import parse_changes
    from ..experiments.parsing import parse_value
    from ..experiments.presets import choose, find_preset
    from ..experiments.reproduce import added, plan_runs, tabulate
    from ..experiments.run import stopping_at_round_end
    from ..experiments.statistics import check_rounds, with_statistic
    from ..experiments.sweep import run_cells

    if scale not in ("full", "small"):
        raise FedflatError(f"--scale {scale}: write full or small.")
    found = find_preset(preset)
    wanted = [part for row in _words(rows) for part in _parts(found, row)]
    chosen = choose(found.cells(), _words(cells), wanted)
    chosen += added(chosen, _words(add))
    if statistic is not None:
        chosen = with_statistic(chosen, statistic)
    place = out or Path("runs") / (preset if scale == "full" else f"{preset}-small")
    settings = {key: parse_value(text) for key, text in parse_changes(set_ or []).items()}
    if data is not None:
        settings["data"] = str(data)
    if download:
        settings["download"] = True
    planned = plan_runs(chosen, place, scale, _seeds(seeds, 0), settings)
    check_rounds(planned)
    runs: dict[str, Cell] = {cell.name: cell for _, per_seed in planned for cell in per_seed}
    fetch_missing(cell.experiment for cell in runs.values())
    console.print(
        f"{found.where} of {found.paper}: {found.title}. {len(chosen)} cells, {len(runs)} runs.",
        soft_wrap=True,
    )
    with (
        GridProgress([cell.experiment.with_defaults().rounds or 1 for cell in runs.values()]) as progress,
        stopping_at_round_end(progress.announce_stop) as stop,
    ):
        kept = keep_states or bool(found.content.get("keep_states"))  # a figure may need them
        failed = run_cells(list(runs.values()), jobs, progress, stop, kept)
        interrupted = stop()
    results = tabulate(planned, found)
    with explained(f"{place / 'comparison.json'} cannot be written"):
        place.mkdir(parents=True, exist_ok=True)
        replace_file(place / "comparison.json", (json.dumps(results, indent=1) + "\n").encode())
    _show(results, scale)
    protocol = protocol_caveats(
        (cell.protocol(run.experiment.model), run.experiment)
        for cell, per_seed in planned
        for run in per_seed
    )
    of_cells = {sentence for run in runs.values() for sentence in run.notes}
    about_data = [note for note in all_caveats(run.out for run in runs.values()) if note not in of_cells]
    models = {run.experiment.model: cell for cell, per_seed in planned for run in per_seed}
    weights = [note for model, cell in models.items() if (note := cell.missing_weights(model)) is not None]
    show_notes(merged(about_data, protocol, weights))
    if commands := drawing(found, place, planned):
        console.print("Draw it:")
        for command in commands:
            console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)
    for note in [*found.notes, *(f"{c.row}, {c.column}: {c.misprint}" for c in chosen if c.misprint)]:
        console.print(f"• {note}", style="dim", highlight=False, markup=False, soft_wrap=True)
    for name, problem in failed.items():
        console.print(headed(f"{name}:", "red", problem), highlight=False, soft_wrap=True)
    if interrupted:
        console.print("Interrupted; repeat the command to resume.")
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


def _parts(preset: Preset, row: str) -> tuple[str, ...]:
    """The rows that a row is the best of, or itself."""
    best = {name.lower(): parts for name, parts in preset.best_rows().items()}
    return best.get(row.lower(), (row,))


def drawing(preset: Preset, place: Path, planned: Sequence[Planned]) -> list[str]:
    """The commands that draw a figure of planned runs, for a shell in the current directory."""
    from ..experiments.sweep import slug

    if not preset.name.startswith("figure"):
        return []
    shows, runs = preset.content["statistic"].get("of"), shlex.quote(str(place))
    given: list[str] = preset.content.get("draw") or FIGURES.get(shows, [])
    panels = {"figure.png": runs}
    if shows in APART and len(preset.content["columns"]) > 1:
        columns = dict.fromkeys(slug(cell.column) for cell, _ in planned)
        panels = {f"figure-{column}.png": f"{runs}/*/{column}" for column in columns}
    commands = [command.format(runs=r, figure=f) for f, r in panels.items() for command in given]
    for measure in _left_out(planned):
        commands = [command.replace(f" --measure {measure}", "") for command in commands]
    return commands


def _left_out(planned: Sequence[Planned]) -> set[str]:
    """What the paper measures and these runs do not, since it takes too long at a small scale."""
    theirs = {name for cell, _ in planned for name in _names(cell.content.get("measure", ()))}
    return theirs - {name for _, runs in planned for run in runs for name in _names(run.experiment.measure)}


def _names(measures: Iterable[str | Mapping[str, Any]]) -> list[str]:
    return [measure if isinstance(measure, str) else next(iter(measure)) for measure in measures]


def _words(text: str | None) -> list[str]:
    from ..experiments.changes import split_values

    return [str(word) for word in split_values(text)] if text else []


def _show(results: list[dict[str, Any]], scale: str) -> None:
    from ..experiments.caveats import MARK, MARKED

    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for column in ("method", "setting", "statistic"):
        table.add_column(column)
    for column in ("ours", "paper", "difference"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        ours, theirs = (
            _number(result["ours"], result["ours_std"]),
            _number(result["paper"], result["paper_std"]),
        )
        gap = None
        if result["ours"] is not None and result["paper"] is not None:
            gap = result["ours"] - result["paper"]
        note = result["ours_note"]
        table.add_row(
            result["row"] + (" †" if result["code_deviates"] else ""),
            result["column"],
            result["statistic"],
            ours if not note else note if result["ours"] is None else f"{ours} ({note})",
            (result["paper_note"] or theirs) + ("*" if result["misprint"] else ""),
            "–"
            if gap is None or scale == "small"
            else f"{gap:+.4g}" + (f" {MARK}" if result["notes"] else ""),
        )
    console.print(table)
    over = {result["ours_std_over"] for result in results} - {""}
    for what in sorted(over):
        reason = "the rounds of a mean, as the paper's" if what == "rounds" else "seeds"
        console.print(f"± of ours is the deviation over {reason}.", style="dim")
    if any(result["code_deviates"] for result in results):
        console.print(
            "† the paper's released code does something else here than its text: see below", style="dim"
        )
    if any(result["misprint"] for result in results):
        console.print("* a misprint, see below", style="dim")
    compared = [result for result in results if result["ours"] is not None and result["paper"] is not None]
    if scale != "small" and any(result["notes"] for result in compared):
        console.print(MARKED, style="dim")
    if scale == "small":
        console.print(
            "A small scale shows that everything runs; its numbers are not to be compared. Measures that take longer "
            "than the training, such as the flatness discrepancy, are left out.",
            style="dim",
        )


def _number(value: float | None, deviation: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" + (f" ± {deviation:.2g}" if deviation is not None else "")
