"""What looks on at a run: progress bars, trackers, run directories, measures, searches, and a person's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from ..core.messages import Upload
    from ..storage.run_directory import RunDirectory
    from .record import RoundRecord
    from .train import Run


class Callback:
    """Looks on at a run; override what you need.

    `begin` and `end` come once, `round` after every round. `run` is live: `run.history` grows, `run.server.w` is the
    global model, `run.settings` says how many rounds there are. Copy what you keep.
    """

    may_lag: ClassVar[bool] = False
    """whether `round` may come a round later, when `record.server` has moved, so that tests overlap with training"""

    def begin(self, run: Run) -> None:
        """Prepare, before the first round; a resumed run has rows in its history."""

    def working(self, what: str) -> None:
        """Hear what is being done: clients done of a round's clients, and what still runs after the last round."""

    def round(self, record: RoundRecord) -> bool | None:
        """Take note of a round; True ends the run there, with a checkpoint, and it can be resumed."""

    def end(self, run: Run) -> None:
        """Clean up: the run is done, was stopped, or failed. It comes after every `begin`."""


class RoundObserver(Callback):
    """Looks into rounds as well, while they happen."""

    seconds: float = 0.0
    """what it took of the time of the round"""

    def open(self, index: int) -> None:
        """Prepare for a round; the server has opened it."""

    def receive(self, upload: Upload) -> None:
        """Take what is needed of an accepted upload, which is not kept."""

    def close(self, record: RoundRecord) -> None:
        """Complete the record of a round; the server has closed it, and nothing is tested yet."""


class OnRound(Callback):
    """The short form: a function that is told of every round."""

    def __init__(self, function: Callable[[RoundRecord], object]) -> None:
        self._function = function

    def round(self, record: RoundRecord) -> None:
        self._function(record)


class RoundsOnDisk(Callback):
    """Adds every round to the metrics of a run directory."""

    may_lag = True

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def begin(self, run: Run) -> None:
        self._history = run.history

    def round(self, record: RoundRecord) -> None:
        self._directory.round(self._history[-1])


class Callbacks:
    """Several, told in their order."""

    def __init__(self, all_: Iterable[Callback]) -> None:
        self._all = list(all_)
        self.observers = [one for one in self._all if isinstance(one, RoundObserver)]
        self.may_lag = all(one.may_lag for one in self._all)

    @contextmanager
    def looking_on(self, run: Run) -> Iterator[None]:
        """Begin; end when the context does, however that is."""
        with ExitStack() as ends:
            for one in self._all:
                one.begin(run)
                ends.callback(one.end, run)
            yield

    def working(self, what: str) -> None:
        """Tell all what is being done."""
        for one in self._all:
            one.working(what)

    def round(self, record: RoundRecord) -> bool:
        """Tell all of a round; whether one of them ends the run."""
        said = [one.round(record) for one in self._all]
        return any(said)
