"""Messages are packed once for all transports: what is unpacked is what was packed."""

from dataclasses import fields

import pytest
import torch

import fedflat as ff
from fedflat.core.messages import (
    Download,
    Upload,
    convert,
    pack_download,
    pack_model,
    pack_upload,
    unpack_download,
    unpack_upload,
)
from fedflat.engines.ray.arrays import to_arrays, to_tensors
from fedflat.engines.workers.shared_memory import SharedMemory


def vector(number: float, size: int = 5) -> torch.Tensor:
    return torch.full((size,), float(number))


def download(buffers: bool = True) -> Download:
    values = {"control": vector(2), "own": vector(3), "c": 0.25, "beta": 4}
    return Download(7, 0.1, vector(1), values, vector(4, 2) if buffers else None)


def upload(**changes) -> Upload:
    given = {
        "vectors": {"control": vector(6)},
        "buffers": vector(7, 2),
        "state": {"control": vector(8)},
        "report": {"loss": 0.5, "samples": 9.0},
        "trained": vector(9),
    }
    return Upload(
        3,
        7,
        20,
        5,
        vector(5),
        loss=0.7,
        forward=6,
        backward=4,
        spared_forward=2,
        spared_backward=1,
        **given | changes,
    )


def alike(one: object, other: object) -> None:
    """The same type, and all fields the same."""
    assert type(one) is type(other)
    for field in fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, dict):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(theirs[n])) for n, v in mine.items())
        elif isinstance(mine, torch.Tensor):
            assert torch.equal(mine, theirs)
        else:
            assert mine == theirs, field.name


def shared_memory() -> SharedMemory:
    names = ["common start", "common control", "each own", "state control", "state other", "vectors update"]
    names += ["vectors control", "trained update", "model w"]
    buffers = {"2 common buffers": 2, "2 vectors buffers": 2, "2 model buffers": 2}
    return SharedMemory.make({**{f"2 {name}": 5 for name in names}, **buffers}, torch.float32)


@pytest.fixture(params=["nothing", "arrays", "shared memory"])
def carried(request):
    """What arrives of a message at the other end of a transport."""
    if request.param == "nothing":
        yield lambda parts: parts
    elif request.param == "arrays":
        yield lambda parts: to_tensors(to_arrays(parts), "cpu")
    else:
        memory = shared_memory()
        yield lambda parts: memory.load(memory.store(parts, 2), "cpu")
        memory.close()


@pytest.mark.parametrize("buffers", [True, False])
def test_downloads(carried, buffers):
    state = {"control": vector(10)}
    parts = pack_download(3, download(buffers), state, each={"own"})
    assert set(parts["common"]) == {"start", "control"} | ({"buffers"} if buffers else set())
    assert set(parts["each"]) == {"own"}
    client, received, kept = unpack_download(carried(parts))
    assert client == 3
    alike(received, download(buffers))
    assert kept.keys() == state.keys() and kept["control"].equal(state["control"])


@pytest.mark.parametrize(
    "changes", [{}, {"vectors": {}, "buffers": None, "state": {}, "report": {}, "trained": None}]
)
def test_uploads(carried, changes):
    sent = upload(**changes)
    alike(unpack_upload(carried(pack_upload(sent))), sent)
    assert unpack_upload(carried(pack_upload(sent)), borrowed=True).borrowed


def test_models(carried):
    assert carried(pack_model(vector(1), None))["model"].keys() == {"w"}
    assert carried(pack_model(vector(1), vector(4, 2)))["model"]["buffers"].equal(vector(4, 2))


def test_vectors_that_change_places_do_not_overwrite_each_other():
    """A client may keep under one name what it received under another."""
    memory = shared_memory()
    parts = memory.load(memory.store({"state": {"control": vector(1), "other": vector(2)}}, 2), "cpu")
    state = parts["state"]
    swapped = {
        "state": {"control": state["other"], "other": state["control"]},
        "vectors": {"update": state["other"]},
    }
    found = memory.load(memory.store(swapped, 2), "cpu")
    assert found["state"]["control"].equal(vector(2)) and found["state"]["other"].equal(vector(1))
    assert found["vectors"]["update"].equal(vector(2))
    memory.close()


def test_names_that_every_message_has_are_refused():
    for values in ({"start": vector(1)}, {"buffers": vector(1)}):
        message = Download(0, 0.1, vector(0), values, vector(4, 2))
        with pytest.raises(ff.FedflatError, match=f"vector named '{next(iter(values))}'.*rename"):
            pack_download(0, message, {}, ())
    with pytest.raises(ff.FedflatError, match=r"vector named 'update'.*rename"):
        pack_upload(upload(vectors={"update": vector(1)}))


def test_only_one_kind_is_converted():
    parts = {"a": {"x": vector(1), "n": 2}, "b": {}}
    assert convert(parts, torch.Tensor, lambda place, value: (place, len(value))) == {
        "a": {"x": ("a x", 5), "n": 2},
        "b": {},
    }
