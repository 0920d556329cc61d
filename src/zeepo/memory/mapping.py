"""Private memory, anonymous at an aligned address or of a file, and the address of any buffer.

Invariant: a mapping is returned to the system only when nothing refers to it any more, neither the
`Mapping` nor any memoryview or tensor made from it; so no view can ever point at unmapped memory.
Pages can be handed from one mapping to another; the giver's addresses stay valid and read as zero.
Python's `mmap(-1, n)` is shared memory and gets no huge pages, hence the explicit flags.
"""

import contextlib
import ctypes
import mmap
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20

_LIBC = ctypes.CDLL(None, use_errno=True)
_MOVE_TO_FIXED_KEEPING_OLD = 1 | 2 | 4  # MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


def _move_pages(source: int, target: int, nbytes: int) -> bool:
    """Move pages from one mapped range to another; both are mapped afterwards, moved or not."""
    mremap, remap = _LIBC.mremap, _LIBC.mmap
    mremap.restype = remap.restype = ctypes.c_void_p
    size, flags = ctypes.c_size_t(nbytes), _MOVE_TO_FIXED_KEEPING_OLD
    moved = mremap(ctypes.c_void_p(source), size, size, flags, ctypes.c_void_p(target))
    if moved == target:
        return True
    # Some kernels unmap the target before they find that they cannot move.
    access = mmap.PROT_READ | mmap.PROT_WRITE
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    again = remap(ctypes.c_void_p(target), size, access, kind, -1, ctypes.c_size_t(0))
    if again != target:
        raise OSError(ctypes.get_errno(), "a buffer's address range could not be mapped again")
    return False


_can_move_pages = hasattr(_LIBC, "mremap")


def round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


def address_of(view: memoryview) -> int:
    """The address of a contiguous buffer's first byte, read-only buffers included; 0 if empty."""
    if view.nbytes == 0:
        return 0
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def map_file(fd: int, nbytes: int) -> "ctypes.Array[ctypes.c_char]":
    """A private mapping of a file's first `nbytes`, until nothing refers to the array any more.

    Python's own `mmap` keeps a file descriptor open for each mapping.
    """
    remap = _LIBC.mmap
    remap.restype = ctypes.c_void_p
    access = mmap.PROT_READ | mmap.PROT_WRITE
    size, start = ctypes.c_size_t(nbytes), ctypes.c_size_t(0)
    address = remap(None, size, access, mmap.MAP_PRIVATE, fd, start)
    if address is None or address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "the file could not be mapped")
    area = (ctypes.c_char * nbytes).from_address(address)
    unmap = weakref.finalize(area, _LIBC.munmap, ctypes.c_void_p(address), size)
    unmap.atexit = False  # what still uses it then goes with the process
    return area


class Mapping:
    """`nbytes` (rounded up to whole pages) of zeroed memory.

    From 2 MiB on the address is a multiple of 2 MiB and the system is asked for huge pages, which
    doubles the speed of direct I/O. The slack mapped to reach that alignment is never touched: it
    costs address space and no memory.
    """

    __slots__ = ("address", "memory", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES))
        huge = self.nbytes >= HUGE_PAGE_BYTES
        slack_bytes = HUGE_PAGE_BYTES if huge else 0
        area = mmap.mmap(-1, self.nbytes + slack_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = address_of(memoryview(area))
        start = round_up(base, HUGE_PAGE_BYTES) - base if huge else 0
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            # A kernel built without huge pages refuses: slower, and otherwise the same.
            with contextlib.suppress(OSError):
                area.madvise(mmap.MADV_HUGEPAGE, start, self.nbytes)
        self.memory = memoryview(area)[start : start + self.nbytes]
        self.address = base + start

    def take_pages(self, offset_bytes: int, giver: "Mapping", giver_offset_bytes: int = 0) -> int:
        """Move whole huge pages of `giver`, which nobody uses, to `offset_bytes` of this mapping.

        Returns how many bytes came; 0 where the system cannot do that. They are worth having
        because fresh ones have to be cleared.
        """
        room_bytes = min(self.nbytes - offset_bytes, giver.nbytes - giver_offset_bytes)
        nbytes = room_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        global _can_move_pages
        if not _can_move_pages or nbytes <= 0:
            return 0
        source, target = giver.address + giver_offset_bytes, self.address + offset_bytes
        _can_move_pages = _move_pages(source, target, nbytes)
        return nbytes if _can_move_pages else 0

    def shrink(self, nbytes: int) -> None:
        """The system gets back the memory of all but the first `nbytes`, rounded up to pages.

        Their addresses stay valid: views of the whole that somebody still has read zeros there.
        """
        kept_bytes = max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES))
        if kept_bytes >= self.nbytes:
            return
        tail, size = self.address + kept_bytes, ctypes.c_size_t(self.nbytes - kept_bytes)
        if _LIBC.madvise(ctypes.c_void_p(tail), size, ctypes.c_int(mmap.MADV_DONTNEED)):
            raise OSError(ctypes.get_errno(), "the end of a buffer could not be given back")
        self.memory = self.memory[:kept_bytes]
        self.nbytes = kept_bytes


_ENTRY_BYTES = 8
_IN_SWAP = np.uint64(1 << 62)
"""The bit of an entry in pagemap; the one above it says that the page is in memory."""


class SparsePages:
    """Zeros of which only the pages take memory that somebody has written to."""

    __slots__ = ("_area", "memory")

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._area = mmap.mmap(-1, max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES)), flags=flags)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._area.madvise(mmap.MADV_NOHUGEPAGE)
        self.memory = memoryview(self._area)

    def touched_pages(self) -> NDArray[np.bool_] | None:
        """Which pages were written to, or only read since; None where the system does not tell."""
        num_pages = len(self._area) // PAGE_BYTES
        if mmap.PAGESIZE != PAGE_BYTES:
            return None
        first = address_of(self.memory) // PAGE_BYTES
        try:
            with Path("/proc/self/pagemap").open("rb", buffering=0) as entries:
                entries.seek(first * _ENTRY_BYTES)
                found = entries.read(num_pages * _ENTRY_BYTES)
        except OSError:
            return None
        if len(found) != num_pages * _ENTRY_BYTES:
            return None
        touched: NDArray[np.bool_] = np.frombuffer(found, dtype=np.uint64) >= _IN_SWAP
        return touched.copy()

    def forget(self) -> None:
        """All of it is zeros again, and takes no memory."""
        self._area.madvise(mmap.MADV_DONTNEED)
