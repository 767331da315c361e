"""What is put for a client comes back bit by bit, from memory, from disk and after a crash, within the budget."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from fedflat.errors import FedflatError
from fedflat.storage.client_store import ClientStore, parse_size

Bits = dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]


def bits(state: dict[str, Tensor]) -> Bits:
    """All there is to know of a state: NaNs are told apart, and so are zeros."""
    return {name: (v.dtype, tuple(v.shape), v.cpu().numpy().tobytes()) for name, v in state.items()}


def contents(store: ClientStore) -> dict[int, Bits]:
    return {client: bits(store.get(client)) for client in store.clients()}


def vector(seed: int, size: int = 50, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random bits: every kind of NaN, infinities, denormals."""
    data = random.Random(seed).randbytes(size * dtype.itemsize)
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


# -- against a dictionary --------------------------------------------------------------------------


class Compared(RuleBasedStateMachine):
    """A store and a dictionary that go through the same."""

    @initialize(budget=st.sampled_from([None, 0, 100, 500, 2000]))
    def begin(self, budget: int | None) -> None:
        self.home = tempfile.TemporaryDirectory()
        self.budget = budget
        self.store = ClientStore(self.home.name, budget)
        self.expected: dict[int, Bits] = {}
        self.checkpoints: dict[str, dict[int, Bits]] = {}

    @rule(
        client=st.integers(0, 9),
        seed=st.integers(0, 10**6),
        names=st.sets(st.sampled_from(["control", "dual", "ema"]), max_size=3),
        size=st.sampled_from([0, 20, 20, 20, 50]),
        dtype=st.sampled_from([torch.float32, torch.float64]),
        buffers=st.booleans(),
        copy=st.booleans(),
    )
    def replace(self, client, seed, names, size, dtype, buffers, copy) -> None:
        state = {name: vector(seed + number, size, dtype) for number, name in enumerate(sorted(names))}
        if buffers:
            state["buffers"] = vector(seed + 9, 3)
        self.store.put(client, state, copy)
        self.expected.pop(client, None)
        if state:
            self.expected[client] = bits(state)
        if copy:
            for given in state.values():
                given.fill_(7)  # the caller's memory is the caller's

    @rule(client=st.integers(0, 9), seed=st.integers(0, 10**6), name=st.sampled_from(["control", "ema"]))
    def change_one(self, client, seed, name) -> None:
        self.store.put(client, {**self.store.get(client), name: (new := vector(seed, 20))})
        self.expected.setdefault(client, {})[name] = bits({"": new})[""]

    @rule(client=st.integers(0, 11))
    def look(self, client) -> None:
        assert bits(self.store.get(client)) == self.expected.get(client, {})

    @rule(name=st.sampled_from(["a", "b", "c", "round-3"]))
    def checkpoint(self, name) -> None:
        self.store.checkpoint(name)
        before = dict(list(self.checkpoints.items())[-1:])
        before.pop(name, None)
        self.checkpoints = {**before, name: {client: dict(state) for client, state in self.expected.items()}}

    @precondition(lambda self: self.checkpoints)
    @rule(choice=st.integers(0, 1), closed=st.booleans())
    def crash(self, choice, closed) -> None:
        name = list(self.checkpoints)[choice % len(self.checkpoints)]
        if closed:
            self.store.close()
        self.store = ClientStore.restore(self.home.name, name, self.budget)
        self.expected = {client: dict(state) for client, state in self.checkpoints[name].items()}
        others = {other: kept for other, kept in self.checkpoints.items() if other != name}
        self.checkpoints = {**others, name: self.checkpoints[name]}

    @rule()
    def look_back(self) -> None:
        for name, kept in self.checkpoints.items():
            assert contents(ClientStore.restore(self.home.name, name)) == kept

    @invariant()
    def within_budget(self) -> None:
        if hasattr(self, "store"):
            assert self.store.clients() == sorted(self.expected)
            assert self.budget is None or self.store.bytes_in_memory <= self.budget
            assert {path.stem for path in Path(self.home.name).glob("*.table")} == set(self.checkpoints)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            assert contents(self.store) == self.expected
            self.look_back()
            self.store.close()
            self.home.cleanup()


TestCompared = Compared.TestCase
TestCompared.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, database=None)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_run_with_many_crashes(seed: int):
    """Both checkpoints stay whole however long one goes on, whichever one goes back to."""
    draw, run = random.Random(seed), Compared()
    run.begin(budget=draw.choice([0, 500]))
    for number in range(60):
        for _ in range(draw.randrange(6)):
            run.replace(draw.randrange(6), draw.randrange(10**6), {"control"}, 20, torch.float32, False, True)
        happens = draw.random()
        if happens < 0.5:
            run.checkpoint(f"round-{number}")
        elif happens < 0.75 and run.checkpoints:
            run.crash(draw.randrange(2), False)
        run.look_back()
    run.teardown()


# -- memory and disk -------------------------------------------------------------------------------


def test_without_a_limit_nothing_touches_the_disk(tmp_path: Path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a file was opened")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    monkeypatch.chdir(tmp_path)
    store = ClientStore()
    for client in range(1000):
        store.put(client, {"control": vector(client)})
    assert store.get(999).keys() == {"control"}
    assert store.bytes_in_memory == 1000 * 200
    assert not list(tmp_path.iterdir())
    with pytest.raises(FedflatError, match="needs a directory"):
        store.checkpoint("a")


def test_what_get_gives_is_a_dictionary_of_its_own():
    store = ClientStore()
    store.put(3, {"control": vector(0)})
    store.get(3).clear()
    assert bits(store.get(3)) == bits({"control": vector(0)})


def test_a_client_without_state_takes_no_room(tmp_path: Path):
    store = ClientStore(tmp_path, budget=0)
    store.put(10**12, {})
    assert store.get(10**15) == {}
    assert store.clients() == []
    assert not list(tmp_path.iterdir())
    store.put(10**12, {"control": vector(0)})
    store.put(10**12, {})
    assert store.clients() == []
    assert store.get(10**12) == {}


def test_the_least_recently_used_leave_memory():
    store = ClientStore(budget=3 * 200)
    for client in (0, 1, 2):
        store.put(client, {"control": vector(client)})
    first = store.get(0)["control"]
    store.put(3, {"control": vector(3)})  # in place of 1
    assert store.get(0)["control"] is first
    assert store.bytes_in_memory == 600
    one = store.get(1)["control"]  # in place of 2
    assert store.get(1)["control"] is one
    assert store.get(0)["control"] is first
    assert contents(store) == {client: bits({"control": vector(client)}) for client in range(4)}


def test_only_what_changed_is_written(tmp_path: Path):
    store = ClientStore(tmp_path, budget=200)
    written = tmp_path / "vectors-200.bin"
    store.put(0, {"control": vector(0)})
    for _ in range(10):
        store.put(1, {})
        store.get(0)
        store.put(0, store.get(0))  # the same vectors
        store.put(1, {"control": vector(1)})  # 0 leaves
    assert written.stat().st_size == 200  # 0 once; 1 never had to leave
    for number in range(10):
        store.put(number % 2, {"control": vector(number)})
    assert written.stat().st_size == 200  # no checkpoint refers to the older ones
    store = ClientStore(tmp_path / "other", budget=10**6)
    for number in range(20):
        for client in range(10):
            state = store.get(client)
            state.setdefault("ema", vector(client))
            store.put(client, {**state, "control": vector(number)})
        store.checkpoint(str(number))
    # ema once, control of the last two checkpoints and of the one being written
    assert (tmp_path / "other" / "vectors-200.bin").stat().st_size == (10 + 3 * 10) * 200


def test_bits_survive_eviction_and_views_are_copied():
    flat = vector(0, 100)
    store = ClientStore(budget=0)
    store.put(0, {"half": flat[::2], "shape": flat.view(4, 25), "none": flat[:0], "bits": flat.half()})
    expected = bits({"half": flat[::2], "shape": flat.view(4, 25), "none": flat[:0], "bits": flat.half()})
    flat.zero_()
    assert bits(store.get(0)) == expected
    assert store.bytes_in_memory == 0


def test_close_leaves_nothing_open_and_nothing_behind(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    store = ClientStore(budget=0)
    store.put(0, {"control": vector(0)})
    assert not list(tmp_path.iterdir())  # unnamed: even a kill leaves nothing
    store.close()
    store.close()
    forgotten = ClientStore(budget=0)
    forgotten.put(0, {"control": vector(0)})
    del forgotten
    assert before in (0, len(os.listdir("/proc/self/fd")))


MANY = """
from fedflat.storage.client_store import ClientStore
import torch

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

store, vector = ClientStore(budget=32 * 2**20), torch.arange(2000, dtype=torch.float32)
before = peak()
for client in range(100_000):
    vector[0] = client
    store.put(client, {"control": vector})
for client in range(0, 100_000, 20):
    assert store.get(client)["control"][0] == client
    store.put(client, {"control": vector})
print(peak() - before, store.bytes_in_memory, len(store.clients()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_of_100_000_clients():
    result = subprocess.run([sys.executable, "-c", MANY], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    grown, held, clients = map(int, result.stdout.split())
    assert clients == 100_000
    assert 31 * 2**20 < held <= 32 * 2**20
    # what is in memory takes little more than its vectors, what is on disk less than 400 bytes for each client
    assert grown < 1.2 * held + 400 * clients


# -- crashes ---------------------------------------------------------------------------------------


def step(number: int) -> tuple[int, dict[str, Tensor]]:
    """The client and the state of a step of the run that is killed."""
    dtype = torch.float64 if number % 3 == 0 else torch.float32
    return number * 7 % 23, {"control": vector(number, 500), "ema": vector(number + 1, 500, dtype)}


def run_until_killed(directory: Path, name: str | None, begin: int, log: int) -> None:
    """Put, checkpoint every few steps, and say so before and after."""
    store = ClientStore(directory, 20_000, name=name)
    for number in range(begin, 10**9):
        store.put(*step(number))
        if number % 5 == 4:
            os.write(log, b"<%06d " % (number + 1))
            store.checkpoint(f"after-{number + 1}")
            os.write(log, b"%06d> " % (number + 1))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_moment(tmp_path: Path):
    """Twelve processes in turn go on where the one before was killed; nothing is ever lost or half there."""
    draw, done = random.Random(0), 0
    for _ in range(12):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                run_until_killed(tmp_path, f"after-{done}" if done else None, done, writer)
            finally:
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader, "rb", buffering=0) as log:
            said = b""
            for _ in range(draw.randrange(2, 16)):  # a word before every checkpoint, and one after it
                said += log.read(8)
            time.sleep(draw.choice([0, draw.uniform(0, 0.01)]))
            os.kill(child, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
            words = (said + log.readall()).decode().split()
        done = max([done, *(int(word[:-1]) for word in words if word.endswith(">"))])
        begun = max([done, *(int(word[1:]) for word in words if word.startswith("<"))])
        for after in {done, done - 5, begun}:
            table = tmp_path / f"after-{after}.table"
            if after == done or table.exists():
                expected = {client: bits(state) for client, state in map(step, range(after))}
                assert contents(ClientStore.restore(tmp_path, table.stem)) == expected
    assert done >= 12 * 5


# -- damage ----------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with one checkpoint."""
    store = ClientStore(tmp_path / "state")
    for client in range(5):
        store.put(client, {"control": vector(client), "ema": vector(client)})
    store.checkpoint("round-5")
    store.close()
    return tmp_path / "state"


def test_every_damaged_byte_of_a_vector_is_noticed(saved: Path):
    path = saved / "vectors-200.bin"
    data = bytearray(path.read_bytes())
    data[4 * 400 + 3] ^= 1
    path.write_bytes(data)
    store = ClientStore.restore(saved, "round-5")
    assert bits(store.get(3)) == bits({"control": vector(3), "ema": vector(3)})
    with pytest.raises(
        FedflatError, match=r"client 4: its 'control' in .*vectors-200.bin is damaged: its checksum"
    ):
        store.get(4)


@pytest.mark.parametrize("length", [0, 1999])
def test_a_file_that_is_too_short_is_noticed_at_once(saved: Path, length: int):
    os.truncate(saved / "vectors-200.bin", length)
    with pytest.raises(
        FedflatError, match=r"client \d: .*vectors-200.bin is damaged: the file ends too early"
    ):
        ClientStore.restore(saved, "round-5")


def test_a_file_that_is_cut_later_is_noticed(saved: Path):
    store = ClientStore.restore(saved, "round-5")
    os.truncate(saved / "vectors-200.bin", 1900)
    with pytest.raises(FedflatError, match=r"client 4: its 'ema' .* ends too early"):
        store.get(4)


@pytest.mark.parametrize("length", [0, 3, 4, 50, -1])
def test_a_cut_table_is_noticed(saved: Path, length: int):
    path = saved / "round-5.table"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(FedflatError, match=r"round-5.table is damaged"):
        ClientStore.restore(saved, "round-5")
    ClientStore(saved).checkpoint("round-1")  # one can start anew beside it
    assert ClientStore.restore(saved, "round-1").clients() == []


def test_a_table_of_zeros_is_noticed(saved: Path):
    for length in (1, 4, 5, 4096):
        (saved / "round-5.table").write_bytes(bytes(length))
        with pytest.raises(FedflatError, match=r"round-5.table is damaged"):
            ClientStore.restore(saved, "round-5")


def test_every_damaged_byte_of_a_table_is_noticed(saved: Path):
    path = saved / "round-5.table"
    data = bytearray(path.read_bytes())
    for place in range(len(data)):
        data[place] ^= 16
        path.write_bytes(data)
        data[place] ^= 16
        with pytest.raises(FedflatError, match=r"round-5.table is damaged"):
            ClientStore.restore(saved, "round-5")


def test_a_checkpoint_that_fails_half_way_leaves_the_old_one_of_that_name(saved: Path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    expected = contents(ClientStore.restore(saved, "round-5"))
    for where, what in ((os, "fsync"), (Path, "replace")):
        store = ClientStore.restore(saved, "round-5")
        store.put(2, {"control": vector(77)})
        with monkeypatch.context() as patch:
            patch.setattr(where, what, fail)
            with pytest.raises(FedflatError, match="cannot be written: No space left on device"):
                store.checkpoint("round-5")
        assert contents(ClientStore.restore(saved, "round-5")) == expected
        assert bits(store.get(2)) == bits({"control": vector(77)})
    store.checkpoint("round-5")
    assert contents(ClientStore.restore(saved, "round-5")) == {**expected, 2: bits({"control": vector(77)})}


def test_names_of_checkpoints(saved: Path):
    with pytest.raises(
        FedflatError, match=r"no checkpoint 'round-6' of client states. Did you mean 'round-5'"
    ):
        ClientStore.restore(saved, "round-6")
    with pytest.raises(FedflatError, match="no checkpoint"):
        ClientStore.restore(saved / "nowhere", "a")
    assert not (saved / "nowhere").exists()
    with pytest.raises(FedflatError, match="cannot name a checkpoint"):
        ClientStore(saved).checkpoint("../a")


def test_a_full_disk_is_a_sentence_and_spoils_no_checkpoint(saved: Path):
    import resource

    store = ClientStore.restore(saved, "round-5", budget=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2100, hard))
        with pytest.raises(FedflatError, match=r"vectors-200.bin cannot be written: File too large"):
            store.put(1, {"control": vector(7), "ema": vector(8)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    kept = contents(ClientStore.restore(saved, "round-5"))
    assert kept == {client: bits({"control": vector(client), "ema": vector(client)}) for client in range(5)}


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("17", 17), ("1e9", 10**9), ("800MB", 800 * 10**6), ("512MiB", 512 * 2**20), ("2GiB", 2**31),
        ("1.5 gib", 3 * 2**29), (" 3kB ", 3000), ("2TB", 2 * 10**12), ("100B", 100), ("1e+3KiB", 1024000),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "2G", "many", "1e999", "nan", "inf", "1 2", "0x10", "5 PiB"]
)
def test_what_is_no_size(text: str):
    with pytest.raises(FedflatError, match=r"is not a size: .* such as 800MB or 2GiB"):
        parse_size(text)


def test_a_negative_budget():
    with pytest.raises(FedflatError, match="budget of -1 bytes"):
        ClientStore(budget=-1)
