"""`fedflat federate`: what a real federation begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import MissingExtra, require
from .app import FEDERATIONS, app, console

federate = typer.Typer(
    help="Set up a real federation over Flower, whose data stays on its nodes. The experiment file says what nodes "
    "are asked for; a node's config says what it insists on (require-noise=1.0 require-clip=1.0).",
    no_args_is_help=True,
)
app.add_typer(federate, name="federate", rich_help_panel=FEDERATIONS)


@federate.command("init")
def init(
    project: Annotated[Path, typer.Argument(help="The directory to make.")],
) -> None:
    """Write a small Flower app that trains with fedflat, on demonstration data until you put yours in."""
    from ..engines.flower.project import write_project

    for path in write_project(project):
        console.print(f"  {path}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"Your data goes into {project / 'federated' / 'data.py'}; {project / 'README.md'} says how to start.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        "`fedflat privacy` says what leaves a node; a node refuses less noise than its own --node-config asks for, "
        "such as require-noise=1.0.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    try:
        require("flwr", "flwr", "flower", "Starting it")
    except MissingExtra as missing:
        console.print(str(missing), style="yellow", markup=False, highlight=False, soft_wrap=True)


@federate.command("keys")
def keys(
    directory: Annotated[Path, typer.Argument(help="Where to write them; nothing is overwritten.")],
    nodes: Annotated[int, typer.Option(help="How many node keys.", min=1)] = 3,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="The server's name or address; repeat it for several. (default: 127.0.0.1, localhost)"
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="The server's port.", min=1, max=65535)] = 8443,
    days: Annotated[int, typer.Option(help="How long the certificates are valid.", min=1)] = 365,
) -> None:
    """Make an authority, a server certificate and a key for every node, to try a federation out."""
    from ..engines.flower.keys import make_keys

    for path in make_keys(directory, nodes, host or ["127.0.0.1", "localhost"], port, days):
        console.print(f"  {path}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        "Give a node ca.crt and its own key, nothing else. ca.key can make more certificates: keep it offline.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
