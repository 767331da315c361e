"""Commands that use a trained model: `fedflat predict`, `fedflat export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import USE, app, console

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that are there already.")]


@app.command(rich_help_panel=USE)
def predict(
    run: RunArgument,
    data: Annotated[
        Path, typer.Argument(help="New rows (.csv or .parquet), a folder of images, or an image.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where predictions go, .csv or .parquet.")] = Path(
        "predictions.csv"
    ),
    id_: Annotated[
        str | None, typer.Option("--id", help="A column of the table to pass on, such as a patient's number.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Predict classes with their probabilities, or numbers, for raw data like that which a run was trained on."""
    from rich.progress import Progress

    from ..experiments.predictions import predict_file
    from ..experiments.predictor import load

    predictor = load(run)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("predicting", total=None)
        predicted = predict_file(
            predictor,
            data,
            out,
            id_,
            overwrite,
            lambda done, total: bar.update(task, completed=done, total=total),
        )
    if predictor.task == "regression":
        found = f"from {predicted.min():.6g} to {predicted.max():.6g}, {predicted.mean():.6g} on average"
    else:
        counts = {name: int((predicted == name).sum()) for name in sorted(set(predicted.tolist()))}
        common = sorted(counts, key=lambda name: -counts[name])[:10]
        found = ", ".join(f"{counts[name]:,} {name}" for name in common)
        found += f" and {len(counts) - len(common)} more classes" if len(counts) > len(common) else ""
    console.print(
        f"{len(predicted):,} predictions by the model of {run} after round {predictor.round}: {found}.",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"Written to {out}", highlight=False, soft_wrap=True)


@app.command(rich_help_panel=USE)
def export(
    run: RunArgument,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            metavar="torchscript|onnx|pt2",
            help="What to write; onnx needs an extra of its name.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file; its preprocessing goes to FILE.json.")],
    overwrite: Overwrite = False,
) -> None:
    """Write a trained model as one file for programs without fedflat, and its preprocessing beside it."""
    from ..experiments.export import export as write
    from ..experiments.predictor import load

    for path in write(load(run), format_, out, overwrite):
        console.print(f"Written to {path}", highlight=False, soft_wrap=True)
