"""The C library's heap: what torch frees stays there until it is given back.

glibc keeps freed blocks of up to 32 MiB for itself. After state was created by torch and moved into
buffers, or a model left for the disk, that would count twice against the budget.
"""

import ctypes
from collections.abc import Callable

_FIRST_SLACK_BYTES = 64 << 20
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back_free_memory() -> None:
    """Return the free pages of the heap to the system; a C library without this keeps them."""
    if _TRIM is not None:
        _TRIM(0)


class HeapKeeper:
    """Gives free memory back when the process is larger than it may be.

    Where that does not help (the memory is in use, by whoever it is) it is tried ever more seldom:
    pages given back have to be cleared again when they are next needed.
    """

    def __init__(self, limit_bytes: int, resident_bytes: Callable[[], int]) -> None:
        self._limit_bytes = limit_bytes
        self._resident_bytes = resident_bytes
        self._threshold_bytes = limit_bytes
        self._slack_bytes = _FIRST_SLACK_BYTES

    def check(self) -> None:
        if self._resident_bytes() <= self._threshold_bytes:
            return
        give_back_free_memory()
        left_bytes = self._resident_bytes()
        if left_bytes > self._limit_bytes:
            self._threshold_bytes = left_bytes + self._slack_bytes
            self._slack_bytes *= 2
