"""The data of a node, and of the server: the file to change. Samples never leave the machine that `load` runs on."""

from collections.abc import Mapping
from typing import Any

import fedflat as ff


def load(node: Mapping[str, Any]) -> ff.Federation:
    """The samples of this node, and some to test on; `node` is what --node-config says.

    As it is, a demonstration: a part of the digits that ship with fedflat. Put your own in its place, say

        dataset = ff.read_table(node["data"], target="diagnosis")
        return ff.Federation([dataset.train], test=dataset.test)

    for a node that was started with --node-config "partition-id=0 data='/srv/hospital.csv'".
    """
    clients = int(node.get("num-partitions", 3))
    demo = ff.federate("digits", ff.Dirichlet(1.0), clients=clients, seed=0)
    inputs, targets = demo.client(int(node["partition-id"])).stored()
    kept = len(targets) // 5  # every fifth sample tests, and is not trained on
    return ff.Federation([(inputs[kept:], targets[kept:])], test=(inputs[:kept], targets[:kept]), classes=10)


def load_test() -> ff.Federation:
    """What the server tests on. Without any, leave out `test=load_test` in server.py: the clients test anyway."""
    return ff.federate("digits", ff.IID(), clients=1)
