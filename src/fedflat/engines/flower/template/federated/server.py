"""The app on the server."""

from pathlib import Path

from fedflat.engines.flower import server_app

from .data import load_test

app = server_app(Path(__file__).with_name("experiment.yaml"), test=load_test)
