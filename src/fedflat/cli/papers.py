"""Commands for the papers' experiments: `fedflat papers`, `fedflat reproduce`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..errors import FedflatError, explained
from ..files import replace_file
from .app import PAPERS, app, console
from .options import KeepStates, Set
from .sweeping import GridProgress, _seeds

if TYPE_CHECKING:
    from ..experiments.presets import Preset
    from ..experiments.sweep import Cell

FIGURES = {
    "accuracy-by-round": "fedflat figure curves {runs} -o figure.png",
    "landscape": "fedflat landscape {runs}; fedflat figure surface {runs} -o figure.png",
    "embedding": "fedflat figure embedding {runs} -o figure.png",
    "loss-by-radius": "fedflat flatness {runs} -m radius; fedflat figure radius {runs} -o figure.png",
    "c": "fedflat figure traces {runs} --name c -o figure.png",
    "alpha": "fedflat figure traces {runs} --name alpha -o figure.png",
    "cosine": "fedflat figure traces {runs} --name cosine -o figure.png",
    "one-minus-cosine": "fedflat figure traces {runs} --name cosine -o figure.png",
    "communication-and-minutes-to": "fedflat figure target {runs} --target ACCURACY -o figure.png",
    "sharpness": "fedflat figure sharpness {runs} -o figure.png",
    "distance": "fedflat figure sharpness {runs} --measure distance --measure sharpness -o figure.png",
    "discrepancy": "fedflat figure sensitivity {runs} --by partition --measure discrepancy -o figure.png",
}
"""How a paper's figure is drawn, by what it shows."""


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
        "published: numbers that the paper prints. Core hours: a rough estimate for one core of a usual\n"
        "machine. `fedflat reproduce fedwmsam/table1 --cells fashion-mnist` runs some cells, `--scale small` tries\n"
        "all of them in minutes.",
        style="dim",
        highlight=False,
    )


@app.command(rich_help_panel=PAPERS)
def reproduce(
    preset: Annotated[str, typer.Argument(help="Such as fedwmsam/table1; `fedflat papers` lists them.")],
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
    data: Annotated[Path | None, typer.Option(help="Directory that holds the datasets.")] = None,
    keep_states: KeepStates = False,
) -> None:
    """Run cells of a paper's table and print ours beside theirs. The same command goes on where it was stopped."""
    from ..experiments.changes import parse_changes
    from ..experiments.parsing import parse_value
    from ..experiments.presets import choose, find_preset
    from ..experiments.reproducing import added, plan_runs, tabulate
    from ..experiments.running import stopping_at_round_end
    from ..experiments.sweep import run_cells

    if scale not in ("full", "small"):
        raise FedflatError(f"--scale {scale}: write full or small.")
    found = find_preset(preset)
    wanted = [part for row in _words(rows) for part in _parts(found, row)]
    chosen = choose(found.cells(), _words(cells), wanted)
    chosen += added(chosen, _words(add))
    place = out or Path("runs") / (preset if scale == "full" else f"{preset}-small")
    settings = {key: parse_value(text) for key, text in parse_changes(set_ or []).items()}
    if data is not None:
        settings["data"] = str(data)
    planned = plan_runs(chosen, place, scale, _seeds(seeds, 0), settings)
    runs: dict[str, Cell] = {cell.name: cell for _, per_seed in planned for cell in per_seed}
    console.print(
        f"{found.where} of {found.paper}: {found.title}. {len(chosen)} cells, {len(runs)} runs.",
        soft_wrap=True,
    )
    with (
        GridProgress([cell.experiment.filled().rounds or 1 for cell in runs.values()]) as progress,
        stopping_at_round_end(progress.announce_stop) as stop,
    ):
        failed = run_cells(list(runs.values()), jobs, progress, stop, keep_states)
        interrupted = stop()
    results = tabulate(planned, found)
    with explained(f"{place / 'comparison.json'} cannot be written"):
        place.mkdir(parents=True, exist_ok=True)
        replace_file(place / "comparison.json", (json.dumps(results, indent=1) + "\n").encode())
    _show(results, scale)
    if (how := _drawing(found, place)) is not None:
        console.print(how, highlight=False, soft_wrap=True)
    for note in [*found.notes, *(f"{c.row}, {c.column}: {c.misprint}" for c in chosen if c.misprint)]:
        console.print(f"• {note}", style="dim", highlight=False, markup=False, soft_wrap=True)
    for name, problem in failed.items():
        console.print(f"[red]{name}:[/] {problem}", highlight=False, soft_wrap=True)
    if interrupted:
        console.print("Interrupted; the same command goes on where it was.")
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


def _parts(preset: Preset, row: str) -> tuple[str, ...]:
    """The rows that a row is the best of, or itself."""
    best = {name.lower(): parts for name, parts in preset.best_rows().items()}
    return best.get(row.lower(), (row,))


def _drawing(preset: Preset, runs: Path) -> str | None:
    """The commands that draw a figure of these runs."""
    shows = preset.content["statistic"].get("of")
    if not preset.name.startswith("figure") or shows not in FIGURES:
        return None
    return "Draw it: " + FIGURES[shows].format(runs=runs)


def _words(text: str | None) -> list[str]:
    from ..experiments.changes import split_values

    return [str(word) for word in split_values(text)] if text else []


def _show(results: list[dict[str, Any]], scale: str) -> None:
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
            "–" if gap is None or scale == "small" else f"{gap:+.4g}",
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
