"""The app on every node."""

from fedflat.federation import client_app

from .data import load

app = client_app(load)
