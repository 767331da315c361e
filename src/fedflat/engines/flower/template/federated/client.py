"""The app on every node."""

from fedflat.engines.flower import client_app

from .data import load

# The server's terms decide what leaves a node, and every node's log names it. To refuse terms with less noise than
# this, whatever the server says, on all nodes:
#
#     from fedflat.engines.flower import Require
#     app = client_app(load, require=Require(noise=1.0, clip=1.0))
#
# or on one node, where it is started: --node-config "... require-noise=1.0 require-clip=1.0".
app = client_app(load)
