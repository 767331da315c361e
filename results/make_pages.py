"""Make the pages of results: `python results/make_pages.py RUNS`, with what `fedflat reproduce --out RUNS` wrote.

Every run becomes a few numbers and a thinned learning curve in `fedwmsam-table1.json`, which is kept here;
`fedwmsam-table1.md` shows it beside the published numbers. Without RUNS only the page is written again. What the text
says in numbers comes from the store too, `claims`.
"""

from __future__ import annotations

import json
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

from compare_statistics import GROUPS, Published, all_statistics, errors, missing, published, run_of

from fedflat.experiments.presets import PaperCell, choose, find_preset
from fedflat.experiments.reproduce import added
from fedflat.experiments.sweep import slug
from fedflat.storage.metrics_file import read_metrics
from fedflat.storage.run_files import read_settings

HERE = Path(__file__).parent
STORE = HERE / "fedwmsam-table1.json"
OURS = ["fedgmt", "fednsam", "fedgf"]
HEAD = ["method", "seeds", "best round", "last 100", "low tenth", "worst decile", "paper"]
HEAD += ["best − paper", "last 100 − paper", "low tenth − paper"]
SEED = "seed-0"
"""What every method has."""
THREE = ("max", "last100", "low_tenth")
DIRICHLET, SKEWED = "fashion-mnist/dirichlet-0.1", "fashion-mnist/pathological-3"
EARLY = 100
"""Rounds that do not count for the low tenth."""
FAR = 1.5
"""Points from which a difference wants an explanation."""


def collect(runs: Path) -> dict[str, Any]:
    """The finished runs, by row, column and seed."""
    found: dict[str, Any] = {}
    for cell in cells():
        place = runs / slug(cell.row) / slug(cell.column)
        for run in sorted(place.glob("seed-*")):
            if not (run / "model.safetensors").exists():
                continue
            rows = read_metrics(run)
            accuracy = [row["accuracy"] for row in rows]
            found[f"{cell.row}|{cell.column}|{run.name}"] = {
                "rounds": len(rows),
                "max": max(accuracy),
                "last50": statistics.fmean(accuracy[-50:]),
                "last100": statistics.fmean(accuracy[-100:]),
                "final": accuracy[-1],
                "low_tenth": statistics.quantiles(accuracy[EARLY:], n=10, method="inclusive")[0],
                "worst_decile": rows[-1]["client_accuracy"]["worst_decile"],
                "every10": [round(a, 4) for a in accuracy[9::10]],
                "torch": read_settings(run)["environment"]["torch"],
                "commit": commits(run),
            }
    return found


def commits(run: Path) -> list[str]:
    """The revisions of fedflat that a run was made with, in order; `?` for one that was not recorded."""
    about = read_settings(run)
    parts = [about["environment"], *(again["environment"] for again in about.get("resumed", ()))]
    found = [(part.get("source") or {}).get("commit", "?") for part in parts]
    return list(dict.fromkeys(found))


def cells() -> list[PaperCell]:
    theirs = choose(find_preset("fedwmsam/table1").cells(), ["fashion-mnist"], [])
    return theirs + added(theirs, OURS)


def page(found: dict[str, Any]) -> str:
    """One table per column, of the seed that all methods have; a second one where methods have more."""
    told = (HERE / "fedwmsam-table1-head.md").read_text().format(**claims(found))
    paragraphs = told.strip().split("\n\n")
    lines = ["\n\n".join(textwrap.fill(one, 118, break_on_hyphens=False) for one in paragraphs)]
    for column in dict.fromkeys(cell.column for cell in cells()):
        shown = [cell for cell in cells() if cell.column == column and runs_of(found, cell)]
        if not shown:
            continue
        lines += [f"\n## {column}\n", *head()]
        lines += [line(named(cell), runs_of(found, cell, SEED), cell.published) for cell in shown]
        lines += best_lines(found, column)
        several = [cell for cell in shown if len(runs_of(found, cell)) > 1]
        if several:
            lines += ["\nOver three seeds, with deviations:\n", *head()]
            lines += [line(named(cell), runs_of(found, cell), cell.published) for cell in several]
    return "\n".join(lines) + "\n"


def head() -> list[str]:
    return ["| " + " | ".join(HEAD) + " |", "| --- |" + " ---: |" * (len(HEAD) - 1)]


def named(cell: PaperCell) -> str:
    return cell.row + " †" * cell.code_deviates


# -- what the text says ----------------------------------------------------------------------------


def claims(found: dict[str, Any]) -> dict[str, str]:
    """The numbers in the text, in points, by the name that the text has for them."""
    numbers = published(found)
    first, easier, later = ([n for n in numbers if n.group == group] for group in GROUPS)
    error = errors(found)
    lacking = missing(found)
    by_error = {group: sorted(error, key=lambda name: error[name][group]) for group in GROUPS}

    def gaps(some: list[Published], key: str) -> list[float]:
        return [100 * (n.run[key] - n.paper) for n in some]

    def paired(some: list[Published]) -> list[tuple[Published, float]]:
        return list(zip(some, gaps(some, "low_tenth"), strict=True))

    def farthest(some: list[Published], key: str) -> str:
        return f"{max(map(abs, gaps(some, key))):.2f}"

    best = gaps(numbers, "max")
    far = [(n, gap) for n, gap in paired(numbers) if abs(gap) > FAR]
    return {
        "far": f"{FAR}",
        "after_early": f"{EARLY + 1}",
        "missing_count": words(len(lacking)),
        "all_count": str(len(lacking) + len(numbers)),
        "missing": grouped(lacking),
        "best_least": f"{min(best):.2f}",
        "best_most": f"{max(best):.2f}",
        "first_count": words(len(first)),
        "easier_count": words(len(easier)),
        "later_count": words(len(later)),
        "first_low": f"{error['low tenth'][GROUPS[0]]:.1f}",
        "first_best": f"{error['best round'][GROUPS[0]]:.1f}",
        "statistics": str(len(all_statistics())),
        "rank": str(by_error[GROUPS[0]].index("low tenth") + 1),
        "easier_low": f"{error['low tenth'][GROUPS[1]]:.1f}",
        "easier_best": f"{error['best round'][GROUPS[1]]:.1f}",
        "easier_late": f"{error['last 100'][GROUPS[1]]:.1f}",
        "easier_low_most": farthest(easier, "low_tenth"),
        "easier_best_most": farthest(easier, "max"),
        "easier_late_most": farthest(easier, "last100"),
        "easier_better": str(by_error[GROUPS[1]].index("low tenth")),
        "later_gaps": listed([f"{at(n)} is {gap:+.1f}" for n, gap in paired(later)]),
        "unexplained": listed([f"{at(n)} ({gap:+.1f})" for n, gap in far]),
        **seeds(found),
        **against_scaffold(found),
        **{
            name: listed(
                [f"{100 * (run_of(found, 'MoFedSAM', column)[key] - paper(column)):.1f}" for key in THREE]
            )
            for name, column in (("mofedsam_skewed", SKEWED), ("mofedsam_dirichlet", DIRICHLET))
        },
    }


def paper(column: str, row: str = "MoFedSAM") -> float:
    value: float = find_preset("fedwmsam/table1").content["rows"][row]["published"][column]
    return value


def seeds(found: dict[str, Any]) -> dict[str, str]:
    """Of the methods with three seeds at Dirichlet 0.1."""
    runs = {cell.row: runs_of(found, cell) for cell in cells() if cell.column == DIRICHLET}
    several = {row: mine for row, mine in runs.items() if len(mine) > 1}
    learns = [mine for row, mine in several.items() if row != "FedGF"]
    spreads = {
        key: [100 * statistics.stdev(run[key] for run in mine) for mine in learns]
        for key in ("low_tenth", "max")
    }
    highest = [
        row
        for row, mine in several.items()
        if run_of(found, row, DIRICHLET)["low_tenth"] == max(run["low_tenth"] for run in mine)
    ]
    over = [
        100 * (statistics.fmean(run["low_tenth"] for run in several[row]) - paper(DIRICHLET, row))
        for row in ("FedAvg", "FedSAM", "FedWMSAM")
    ]
    return {
        "low_spread": f"{min(spreads['low_tenth']):.1f} to {max(spreads['low_tenth']):.1f}",
        "best_spread": f"{min(spreads['max']):.1f} to {max(spreads['max']):.1f}",
        "first_highest": listed(highest),
        "three_seeds": listed([f"{gap:+.2f}" for gap in over]),
    }


def against_scaffold(found: dict[str, Any]) -> dict[str, str]:
    """In how many columns FedWMSAM is ahead, with the same seed."""
    columns = list(dict.fromkeys(cell.column for cell in cells()))
    leads = {
        key: [
            100 * (run_of(found, "FedWMSAM", column)[key] - run_of(found, "SCAFFOLD", column)[key])
            for column in columns
        ]
        for key in THREE
    }
    theirs = [paper(column, "FedWMSAM") - paper(column, "SCAFFOLD") for column in columns]
    ahead = {key: words(sum(lead > 0 for lead in some)) for key, some in leads.items()}
    return {
        "ahead_best": ahead["max"],
        "ahead_late": ahead["last100"],
        "ahead_low": ahead["low_tenth"],
        "ahead_most": f"{max(lead for some in leads.values() for lead in some):.2f}",
        "ahead_paper": words(sum(lead > 0 for lead in theirs)),
    }


def words(count: int) -> str:
    names = ["none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    return names[count] if count < len(names) else str(count)


def at(number: Published) -> str:
    return f"{number.row} at {spoken(number.column)}"


def grouped(places: list[tuple[str, str]]) -> str:
    """Rows and columns, the columns once where they are the same for all rows."""
    columns = {row: [spoken(column) for other, column in places if other == row] for row, _ in places}
    if len({tuple(some) for some in columns.values()}) == 1:
        return f"{listed(list(columns))}, each at {listed(next(iter(columns.values())))}"
    return listed([f"{row} at {listed(some)}" for row, some in columns.items()])


def spoken(column: str) -> str:
    """`fashion-mnist/dirichlet-0.1` as in a sentence."""
    name, _, value = column.rpartition("/")[2].rpartition("-")
    return f"{name.capitalize()} {value}"


def listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


# -- tables ----------------------------------------------------------------------------------------


def line(row: str, mine: list[dict[str, Any]], published: float | None) -> str:
    """One method: ours, the paper's, and the difference by three statistics."""
    best, late, low = ([run[key] for run in mine] for key in ("max", "last100", "low_tenth"))
    others = [spread([run[key] for run in mine]) for key in ("last100", "low_tenth", "worst_decile")]
    paper = "–" if published is None else f"{100 * published:.2f}"
    gaps = [gap(values, published) for values in (best, late, low)]
    entries = [row, str(len(mine)), spread(best), *others, paper, *gaps]
    return "| " + " | ".join(entries) + " |"


def best_lines(found: dict[str, Any], column: str) -> list[str]:
    """Where the paper has one row for the best of several methods."""
    preset = find_preset("fedwmsam/table1")
    found_runs = {row: run_of(found, row, column, SEED) for row in preset.best_rows()}
    rows = preset.content["rows"]
    return [
        line(row, [run], rows[row]["published"][column]) for row, run in found_runs.items() if run is not None
    ]


def runs_of(found: dict[str, Any], cell: PaperCell, seed: str = "seed-") -> list[dict[str, Any]]:
    return [run for key, run in found.items() if key.startswith(f"{cell.row}|{cell.column}|{seed}")]


def spread(values: list[float]) -> str:
    mean = f"{100 * statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.2f}"


def gap(values: list[float], published: float | None) -> str:
    if published is None:
        return "–"
    difference = 100 * (statistics.fmean(values) - published)
    return f"**{difference:+.2f}**" if abs(difference) > FAR else f"{difference:+.2f}"


def main() -> None:
    found = json.loads(STORE.read_text()) if STORE.exists() else {}
    if len(sys.argv) > 1:
        found |= collect(Path(sys.argv[1]))
        STORE.write_text(json.dumps(found, indent=0) + "\n")
    (HERE / "fedwmsam-table1.md").write_text(page(found))


if __name__ == "__main__":
    main()
