"""The C library's heap: what torch frees stays there until it is given back.

glibc keeps freed blocks of up to 32 MiB for itself. After state was created by torch and moved into
buffers, or a model left for the disk, that would count twice against the budget.
"""

import ctypes
from typing import NamedTuple

_LIBC = ctypes.CDLL(None)
_TRIM = getattr(_LIBC, "malloc_trim", None)


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`: ten sizes, of which we read three."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "mapped_bytes", "usmblks", "fsmblks",
            "used_bytes", "free_bytes", "keepcost",
        )
    ]  # fmt: skip


_INFO = getattr(_LIBC, "mallinfo2", None)
if _INFO is not None:
    _INFO.restype = _MallInfo


def give_back_free_memory() -> None:
    """Return the free pages of the heap to the system; a C library without this keeps them."""
    if _TRIM is not None:
        _TRIM(0)


class HeapUse(NamedTuple):
    """What the C library has handed out, and what it holds and nobody uses."""

    used_bytes: int
    free_bytes: int
    """Given back to the system already or not."""


def heap_use() -> HeapUse:
    """The state of the heap; zeros where it cannot be told."""
    if _INFO is None:
        return HeapUse(0, 0)
    info = _INFO()
    return HeapUse(int(info.used_bytes + info.mapped_bytes), int(info.free_bytes))


class FreedMemory:
    """Gives free heap memory back whenever enough was freed since the last time.

    Activations are freed while gradients come: without this both would be resident at the end of
    backward. Rarely, because what is given back has to be cleared again by the system.
    """

    def __init__(self, enough_bytes: int) -> None:
        self._enough_bytes = enough_bytes
        self._most_used_bytes = 0

    def look(self) -> None:
        """Cheap when there is nothing to do."""
        used = heap_use().used_bytes
        self._most_used_bytes = max(self._most_used_bytes, used)
        if self._most_used_bytes - used >= self._enough_bytes:
            give_back_free_memory()
            self._most_used_bytes = used
