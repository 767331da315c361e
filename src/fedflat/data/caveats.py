"""What makes a copy of a dataset another one than was published, as sentences."""

from __future__ import annotations

from .official import OFFICIAL


def copy_caveats(name: str, train: int, test: int, classes: int, lossy: str = "") -> tuple[str, ...]:
    """Sentences on a copy of a dataset; `lossy` names the encoding that its images lost pixels to."""
    official = OFFICIAL.get(name)
    if official is None:
        return ()
    counts = [
        (train, official.train, "training samples"),
        (test, official.test, "test samples"),
        (classes, official.classes, "classes"),
    ]
    parts = [f"{here:,} of {there:,} {what}" for here, there, what in counts if here < there]
    more = [f"{here:,} {what} for {there:,}" for here, there, what in counts if here > there]
    found = []
    if parts:
        found.append(f"This copy of {name} is a part: {', '.join(parts)}.")
    if more:
        found.append(f"This copy of {name} has more than was published: {', '.join(more)}.")
    if lossy and official.lossless:
        found.append(
            f"The images of this copy of {name} are {lossy}; those published are stored without loss."
        )
    return tuple(found)


def stand_in_caveat(name: str) -> str:
    """Of made-up data."""
    return f"{name} is made up: the real dataset is not on this machine."
