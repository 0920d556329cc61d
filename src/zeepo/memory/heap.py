"""The C library's heap: what torch frees stays there until it is given back.

glibc keeps freed blocks of up to 32 MiB for itself. After state was created by torch and moved into
buffers, or a model left for the disk, that would count twice against the budget.
"""

import ctypes

_LIBC = ctypes.CDLL(None)
_TRIM = getattr(_LIBC, "malloc_trim", None)


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`: ten sizes, of which we read the free bytes."""

    _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(8)] + [
        ("free_bytes", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


_INFO = getattr(_LIBC, "mallinfo2", None)
if _INFO is not None:
    _INFO.restype = _MallInfo


def give_back_free_memory() -> None:
    """Return the free pages of the heap to the system; a C library without this keeps them."""
    if _TRIM is not None:
        _TRIM(0)


def free_heap_bytes() -> int:
    """What the heap holds and nobody uses, given back already or not; 0 where it cannot be told."""
    return int(_INFO().free_bytes) if _INFO is not None else 0
