"""What every accepted table promises."""

from __future__ import annotations

from typing import Any

import torch


def verify(dataset: Any, grouped: bool) -> None:
    """Samples are whole and finite; classes and clients are numbered without gaps, and none is a gap itself."""
    labels = torch.cat([dataset.train[1], dataset.test[1]])
    for x, y in (dataset.train, dataset.test):
        assert len(x) == len(y) > 0 and torch.isfinite(x).all()
    assert sorted(set(labels.tolist())) == list(range(dataset.classes))
    names = [*dataset.class_names, *dataset.group_names]
    assert not {"", "nan", "na", "none", "null"} & {name.strip().lower() for name in names}, "a gap is a name"
    if grouped:
        owners = {*dataset.groups.tolist(), *dataset.test_groups.tolist()}
        assert sorted(owners) == list(range(len(dataset.group_names)))
