"""The app on every node."""

from pathlib import Path

from fedflat.engines.flower import Require, client_app

from .data import load

# A node refuses terms with less noise than the app's own experiment promises, whatever a run's settings say, and its
# log names all that leaves. A floor of your own, on all nodes: require=Require(noise=1.0, clip=1.0); on one node,
# where it is started: --node-config "... require-noise=1.0 require-clip=1.0".
app = client_app(load, require=Require.promised_by(Path(__file__).with_name("experiment.yaml")))
