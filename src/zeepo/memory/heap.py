"""The C library's heap: what torch frees stays there until it is given back.

glibc keeps freed blocks of up to 32 MiB for itself. After state was created by torch and moved into
buffers, or a model left for the disk, that would count twice against the budget.
"""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

from zeepo.units import MiB

WORTH_TRIMMING_BYTES = 16 * MiB

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


class KeptMemory:
    """What the heap of a growing process keeps of what was freed."""

    def __init__(self, growth_bytes: Callable[[], int], others_bytes: Callable[[], int]) -> None:
        self._growth_bytes = growth_bytes
        self._others_bytes = others_bytes
        """Of the growth, what was never the heap's."""
        self._least_bytes = 0
        """The least that torch had since the heap was last asked."""
        self._unused_bytes = 0
        """What nobody was seen to use when free heap memory was last given back, or less since:
        torch's code, and below zero what the heap had before the process was seen to grow."""

    def is_worth_asking(self, torch_bytes: int) -> bool:
        """Whether torch has taken more: to ask the heap takes longer than to look."""
        self._least_bytes = min(self._least_bytes, torch_bytes)
        if torch_bytes - self._least_bytes < WORTH_TRIMMING_BYTES:
            return False
        self._least_bytes = torch_bytes
        return True

    def find_bytes(self) -> int:
        """What the heap seems to have kept that was freed since it was last given back."""
        heap = heap_use()
        unused_bytes = self._find_unused_bytes(heap)
        self._unused_bytes = min(self._unused_bytes, unused_bytes)
        return min(unused_bytes - self._unused_bytes, heap.free_bytes)

    def _find_unused_bytes(self, heap: HeapUse) -> int:
        """The growth that is neither others' nor handed out by the heap."""
        return self._growth_bytes() - self._others_bytes() - heap.used_bytes

    def give_back(self) -> None:
        give_back_free_memory()
        self._unused_bytes = self._find_unused_bytes(heap_use())


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
