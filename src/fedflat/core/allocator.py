"""Memory that a training process keeps."""

from __future__ import annotations

import contextlib
import ctypes
import platform

# the numbers of <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGEST = 2**31 - 1
_LARGEST_IN_OLD_GLIBC = 2**25


def keep_memory() -> bool:
    """Let this process keep the memory of freed tensors for the next ones; whether that was possible.

    Every step of training allocates and frees the same activations and gradients. glibc hands large pieces back to
    the system, which then has to clear their pages again in every step. It does so in any case with the separate heap
    that a thread gets, so threads that are started later share one. Afterwards the process stays as large as it was
    at its largest. Other C libraries than glibc are left as they are.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt(_M_ARENA_MAX, 1)
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST) or mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_OLD_GLIBC)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, _LARGEST))


def give_back() -> None:
    """Give freed memory back to the system. glibc keeps vectors' worth of it between small things still in use."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # elsewhere there is no need
        ctypes.CDLL(None).malloc_trim(0)
