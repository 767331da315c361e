"""The order in which a round's clients are handed out, and the shares of a test set."""

import heapq
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from fedflat.core.metrics import BatchOutputs, InOrder, Metrics
from fedflat.engines.scheduling import ClientQueue, SharedTest


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 6), st.randoms())
def test_every_client_is_handed_out_once_and_folded_in_order(lengths, room, chance):
    queue, out, done, given_out = ClientQueue(lengths), set(), set(), []
    while not queue.done:
        while (position := queue.hand_out(room)) is not None:
            given_out.append(position)
            out.add(position)
            assert len(out | done) <= room
        assert out, "nothing could go on"
        finished = chance.choice(sorted(out))
        out.remove(finished)
        done.add(finished)
        while queue.next in done:
            done.remove(queue.next)
            queue.fold()
    assert sorted(given_out) == list(range(len(lengths)))


@given(st.lists(st.integers(1, 9), min_size=2, max_size=12), st.lists(st.integers(0, 5), min_size=40))
def test_a_pool_that_shrinks_stops_nothing(lengths, rooms):
    queue, out, done = ClientQueue(lengths), [], set()
    for number in range(10 * len(lengths)):
        room = rooms[number % len(rooms)]
        while (position := queue.hand_out(room)) is not None:
            out.append(position)
        assert queue.next in out or queue.next in done
        done.add(out.pop())
        while queue.next in done:
            done.remove(queue.next)
            queue.fold()
        if queue.done:
            return
    pytest.fail(f"stopped at {queue.next}")


def test_with_room_for_all_the_longest_go_first():
    queue = ClientQueue([3, 9, 1, 7])
    assert [queue.hand_out(5) for _ in range(5)] == [1, 3, 0, 2, None]


def makespan(lengths: list[int], workers: int, room: int) -> int:
    """When the last of some workers is done."""
    queue, busy, done, now = ClientQueue(lengths), [], set(), 0
    while not queue.done:
        while len(busy) < workers and (position := queue.hand_out(room)) is not None:
            heapq.heappush(busy, (now + lengths[position], position))
        now, position = heapq.heappop(busy)
        done.add(position)
        while queue.next in done:
            done.remove(queue.next)
            queue.fold()
    return now


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_workers_are_busy_although_clients_differ_in_size(workers):
    """Within a tenth of the ideal on average, with the room that workers have."""
    chance, found = random.Random(0), []
    for _ in range(100):
        lengths = [1 + int(chance.lognormvariate(2, 1)) for _ in range(40)]
        ideal = max(sum(lengths) / workers, max(lengths))
        found.append(makespan(lengths, workers, 8 * workers) / ideal)
    assert sum(found) / len(found) < 1.1


# -- a test set in shares --------------------------------------------------------------------------


class Numbers(InOrder):
    """The numbers of the batches that were scored, in order."""

    name = "numbers"

    def keep(self, batch):
        return batch.number

    def combine(self, kept):
        return list(kept)


def batch(number: int) -> BatchOutputs:
    return BatchOutputs(number, torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), None, F.cross_entropy)


@given(st.integers(0, 30), st.integers(1, 5), st.randoms())
def test_shares_cover_every_batch_once_whoever_has_them_and_dies(batches, workers, chance):
    metrics = Metrics([Numbers()])
    out: list[range] = []

    def work() -> None:
        while (share := shared.hand_out()) is not None:
            out.append(share)
        share = out.pop(chance.randrange(len(out)))
        if chance.random() < 0.2:
            before = losses.get(share, 0)
            losses[share] = shared.give_back(share)
            assert losses[share] == before + 1
            return
        found = {}
        for number in share:
            found = metrics.merge(found, metrics.score(batch(number)))
        shared.receive(share, found)

    losses: dict[range, int] = {}
    shared = SharedTest(metrics, batches, workers, work)
    assert shared.done() is (batches == 0)
    assert shared.result() == {"numbers": list(range(batches)) if batches else None}
    assert shared.done() and not out
    assert shared.result() == {"numbers": list(range(batches)) if batches else None}


def test_a_lost_client_is_handed_out_again():
    queue = ClientQueue([3, 9, 1])
    assert [queue.hand_out(2), queue.hand_out(2), queue.hand_out(2)] == [1, 0, None]
    assert queue.give_back(1) == 1
    assert queue.hand_out(1) is None, "there is room for the one that is folded next only"
    assert queue.hand_out(2) == 1
    assert queue.give_back(1) == 2
    assert queue.give_back(0) == 1
    queue.hand_out(1)
    queue.fold()
    assert queue.hand_out(1) == 1
