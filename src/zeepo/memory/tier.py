"""What a tier promises, whatever it is made of.

Invariant: an extent is written whole (gaps become zeros) and read whole, and per extent requests
take effect in the order they were submitted: a read sees every write submitted before it, a write
waits for the reads submitted before it. Requests on different extents are independent and run
roughly in submission order. Every transfer returns a future; a transfer no longer touches the
caller's memory once its future is done, failed or not.

A future's callbacks run on an I/O thread: they must be short and must not wait for a transfer.
"""

import bisect
import ctypes
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from zeepo.errors import InternalError
from zeepo.memory.mapping import address_of
from zeepo.memory.transfers import Lane

Describe = Callable[[int, int], str]
"""Names what lies in bytes [low, high) of an extent, for error messages."""


class Extent:
    """A run of bytes in a tier, made by `Tier.allocate`."""

    def __init__(self, label: str, nbytes: int, describe: Describe | None) -> None:
        self.label = label
        self.nbytes = nbytes
        self.num_writes = 0
        """How many writes were submitted: the version that a read submitted now will see."""
        self.describe = describe
        self.lane = Lane()
        self.is_freed = False

    def name_range(self, low: int, high: int) -> str:
        """The extent's label, with what lies in bytes [low, high) if that is known."""
        if self.describe is None:
            return repr(self.label)
        return f"{self.label!r} ({self.describe(low, high)})"

    def __repr__(self) -> str:
        return f"Extent({self.label!r}, nbytes={self.nbytes}, num_writes={self.num_writes})"


class Tier(Protocol):
    name: str

    @property
    def used_bytes(self) -> int: ...

    @property
    def peak_bytes(self) -> int: ...

    @property
    def bytes_read(self) -> int: ...

    @property
    def bytes_written(self) -> int: ...

    @property
    def seconds_busy(self) -> float:
        """How long something was on its way."""
        ...

    def allocate(self, label: str, nbytes: int, describe: Describe | None = None) -> Extent:
        """Room for `nbytes`; transfers nothing. Raises when the tier's budget cannot hold it."""
        ...

    def write(self, extent: Extent, pieces: Sequence[tuple[int, memoryview]]) -> Future[None]:
        """Replace the extent by `pieces` (offset, bytes): sorted, not overlapping, gaps are zeros.

        The caller keeps the memory alive and unchanged until the future is done.
        """
        ...

    def read(self, extent: Extent, target: memoryview) -> Future[None]:
        """Read the whole extent into the first `extent.nbytes` bytes of `target`."""
        ...

    def free(self, extent: Extent) -> None:
        """Give the extent's room back, once the requests submitted on it are done."""
        ...

    def close(self) -> None: ...


class Piece:
    """One contiguous run of source bytes and where it goes in the extent."""

    __slots__ = ("address", "high", "low", "memory")

    def __init__(self, low: int, memory: memoryview) -> None:
        self.low = low
        self.high = low + memory.nbytes
        self.memory = memory
        self.address = address_of(memory)


def check_pieces(
    extent: Extent, pieces: Sequence[tuple[int, memoryview]], end_bytes: int | None = None
) -> list[Piece]:
    """The pieces as flat bytes with their addresses, empty ones dropped; raises if malformed.
    `end_bytes` is where they have to end, if not with the extent."""
    limit_bytes = extent.nbytes if end_bytes is None else end_bytes
    checked: list[Piece] = []
    end = 0
    for offset, memory in pieces:
        if memory.nbytes == 0:
            continue
        piece = Piece(offset, flat_bytes(extent, memory))
        if offset < end or piece.high > limit_bytes:
            raise InternalError(
                f"write of {extent.label!r} ({limit_bytes} bytes): piece at {offset} to "
                f"{piece.high} overlaps another, is out of order or passes the end"
            )
        checked.append(piece)
        end = piece.high
    return checked


def check_target(extent: Extent, target: memoryview) -> memoryview:
    """`target` as flat bytes, exactly the extent's length; raises if it cannot be read into."""
    if target.readonly or target.nbytes < extent.nbytes:
        raise InternalError(
            f"read of {extent.label!r} needs {extent.nbytes} writable bytes, the target has "
            f"{target.nbytes}{' and is read-only' if target.readonly else ''}"
        )
    return flat_bytes(extent, target)[: extent.nbytes]


def assemble(pieces: Sequence[Piece], low: int, high: int, address: int) -> None:
    """Copy bytes [low, high) of an extent made of `pieces` to `address`, zeros in the gaps.

    memmove and memset by address release the interpreter's lock, a memoryview copy would not.
    """
    position = low
    first = bisect.bisect_right(pieces, low, key=lambda piece: piece.high)
    for piece in itertools.islice(pieces, first, None):
        if piece.low >= high:
            break
        start, end = max(piece.low, low), min(piece.high, high)
        if start > position:
            ctypes.memset(address + position - low, 0, start - position)
        ctypes.memmove(address + start - low, piece.address + start - piece.low, end - start)
        position = end
    if position < high:
        ctypes.memset(address + position - low, 0, high - position)


def check_live(extent: Extent, to_read: bool = False) -> None:
    if extent.is_freed:
        raise InternalError(f"extent {extent.label!r} was used after it was freed")
    if to_read and extent.num_writes == 0:
        raise InternalError(f"extent {extent.label!r} was read before anything was written to it")


def flat_bytes(extent: Extent, memory: memoryview) -> memoryview:
    if not memory.c_contiguous:
        raise InternalError(f"a transfer of {extent.label!r} was given memory with gaps in it")
    if memory.format == "B" and memory.ndim == 1:
        return memory
    return memory.cast("B")
