"""Where everything lies inside a chunk. Pure: values in, values out, no torch, no I/O.

A chunk is a flat run of slots. Slots start at multiples of 64 bytes so that vector loads are
aligned and so that a cut at a multiple of 64 bytes from a slot's start is a multiple of 16
float32 elements: the granularity at which torch's fused optimizers give the same bits whatever
the cut.

The invariant: slots are sorted, do not overlap and lie inside the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLOT_ALIGNMENT_BYTES = 64


def align_up(nbytes: int, alignment: int = SLOT_ALIGNMENT_BYTES) -> int:
    """The smallest multiple of `alignment` that is not less than `nbytes`."""
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True)
class Slot:
    """One tensor's place in a chunk."""

    name: str
    offset_bytes: int
    nbytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.nbytes


@dataclass(frozen=True)
class Layout:
    """The slots of one chunk, in order."""

    slots: tuple[Slot, ...]
    nbytes: int

    @property
    def largest_slot_bytes(self) -> int:
        return max((slot.nbytes for slot in self.slots), default=0)

    def describe(self, low: int, high: int) -> str:
        """Names of the slots that touch the bytes [low, high): for error messages."""
        names = [s.name for s in self.slots if s.offset_bytes < high and s.end_bytes > low]
        return ", ".join(names) if names else "padding"


def pack(sizes: Sequence[tuple[str, int]]) -> Layout:
    """Lay out tensors of the given (name, bytes) one behind the other."""
    slots = []
    offset = 0
    for name, nbytes in sizes:
        slots.append(Slot(name, offset, nbytes))
        offset = align_up(offset + nbytes)
    return Layout(tuple(slots), offset)


@dataclass(frozen=True)
class Cut:
    """A run of elements of one tensor: [start, start + numel)."""

    tensor: int
    start: int
    numel: int


def cut_into_pieces(
    numels: Sequence[int], itemsizes: Sequence[int], piece_bytes: int
) -> list[list[Cut]]:
    """Split tensors into pieces of at most about `piece_bytes`, whole tensors where they fit.

    A tensor larger than a piece is cut at multiples of 64 bytes from its own start and shares its
    pieces with no other tensor. Every element is in exactly one cut, in order.
    """
    limit = max(SLOT_ALIGNMENT_BYTES, piece_bytes // SLOT_ALIGNMENT_BYTES * SLOT_ALIGNMENT_BYTES)
    pieces: list[list[Cut]] = []
    open_piece: list[Cut] = []
    open_bytes = 0
    for index, (numel, itemsize) in enumerate(zip(numels, itemsizes, strict=True)):
        nbytes = align_up(numel * itemsize)
        if nbytes > limit:
            even_bytes = -(-nbytes // -(-nbytes // limit))  # equal pieces can use each other's room
            step = align_up(even_bytes) // itemsize
            pieces.extend(
                [Cut(index, start, min(step, numel - start))] for start in range(0, numel, step)
            )
            continue
        if open_piece and open_bytes + nbytes > limit:
            pieces.append(open_piece)
            open_piece, open_bytes = [], 0
        open_piece.append(Cut(index, 0, numel))
        open_bytes += nbytes
    if open_piece:
        pieces.append(open_piece)
    return pieces
