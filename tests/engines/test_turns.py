"""The order in which a round's clients are handed out."""

import heapq
import random

import pytest
from hypothesis import given, strategies as st

from fedflat.engines.scheduling import Turns


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 6), st.randoms())
def test_every_client_is_handed_out_once_and_folded_in_order(lengths, room, chance):
    turns, out, done, given_out = Turns(lengths), set(), set(), []
    while turns.turn < len(lengths):
        while (position := turns.hand_out(room)) is not None:
            given_out.append(position)
            out.add(position)
            assert len(out | done) <= room
        assert out, "nothing could go on"
        finished = chance.choice(sorted(out))
        out.remove(finished)
        done.add(finished)
        while turns.turn in done:
            done.remove(turns.turn)
            turns.fold()
    assert sorted(given_out) == list(range(len(lengths)))


@given(st.lists(st.integers(1, 9), min_size=2, max_size=12), st.lists(st.integers(0, 5), min_size=40))
def test_a_pool_that_shrinks_stops_nothing(lengths, rooms):
    turns, out, done = Turns(lengths), [], set()
    for number in range(10 * len(lengths)):
        room = rooms[number % len(rooms)]
        while (position := turns.hand_out(room)) is not None:
            out.append(position)
        assert turns.turn in out or turns.turn in done
        done.add(out.pop())
        while turns.turn in done:
            done.remove(turns.turn)
            turns.fold()
        if turns.turn == len(lengths):
            return
    pytest.fail(f"stopped at {turns.turn}")


def test_with_room_for_all_the_longest_go_first():
    turns = Turns([3, 9, 1, 7])
    assert [turns.hand_out(5) for _ in range(5)] == [1, 3, 0, 2, None]


def makespan(lengths: list[int], workers: int, room: int) -> int:
    """When the last of some workers is done."""
    turns, busy, done, now = Turns(lengths), [], set(), 0
    while turns.turn < len(lengths):
        while len(busy) < workers and (position := turns.hand_out(room)) is not None:
            heapq.heappush(busy, (now + lengths[position], position))
        now, position = heapq.heappop(busy)
        done.add(position)
        while turns.turn in done:
            done.remove(turns.turn)
            turns.fold()
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
