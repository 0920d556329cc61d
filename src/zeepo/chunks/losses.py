"""What is said and done when bytes do not come back from a tier.

The invariant: a storage that a tensor still uses is never left without memory, which would crash
the interpreter at the next touch. What cannot be read is filled with NaN and named.
"""

from __future__ import annotations

import ctypes

from zeepo.chunks.chunk import Chunk, Kind
from zeepo.chunks.storages import new_storage, num_users, swap_memory
from zeepo.errors import DiskError

LOST_BYTE = 0xFF
"""What lost values are filled with: NaN in every floating-point type, -1 in integers."""


def named(error: DiskError, chunk: Chunk) -> DiskError:
    """A tier's error with the names of what it concerns."""
    if chunk.label in str(error):
        return error
    names = chunk.layout.describe(0, chunk.layout.nbytes)
    return type(error)(f"{chunk.label!r} ({names}): {error}")


def give_up(chunk: Chunk, *, is_stale: bool = False) -> list[str]:
    """Let a chunk's storages go, those without memory with NaN in it; the names of what is lost.

    `is_stale`: what is in memory is not the current value either.
    """
    lost = []
    suffix = ".grad" if chunk.kind is Kind.GRAD else ""
    for index, storage in chunk.present():
        slot = chunk.layout.slots[index]
        is_lost = is_stale or storage.nbytes() < slot.nbytes
        if is_lost and slot.nbytes and num_users(storage) > 1:
            ordinary = new_storage(slot.nbytes)
            ctypes.memset(ordinary.data_ptr(), LOST_BYTE, slot.nbytes)
            swap_memory(storage, ordinary)
            lost.append(slot.name + suffix)
        chunk.storages[index] = None
    return lost


def loss_message(lost: list[tuple[str, Exception]]) -> str:
    """What closing a session has to say about tensors it could not bring back."""
    names = sorted((name for name, _ in lost), key=lambda name: name.count("."))
    listed = ", ".join(names[:50]) + (f" and {len(names) - 50} more" if len(names) > 50 else "")
    return (
        f"session.close: {len(names)} tensors could not be read back and are lost: {listed}. "
        "They are filled with NaN; every other tensor has its true value. "
        f"The first failure: {lost[0][1]}"
    )
