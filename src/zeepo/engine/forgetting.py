"""Letting go of a managed tensor."""

from __future__ import annotations

import sys

from torch import Tensor

from zeepo.chunks.storages import num_users
from zeepo.chunks.store import ChunkStore
from zeepo.engine.managed import home_of, mark_ordinary, storage_of


def forget(store: ChunkStore, tensor: Tensor) -> None:
    """Empty a managed tensor's slot; if the user still holds the tensor it becomes ordinary.

    The caller's variable is expected to be the last reference but the user's own.
    """
    home = home_of(tensor)
    if home is None:
        return
    storage = storage_of(tensor)
    # References: the caller's, ours, getrefcount's. Users: tensor, plain, storage object.
    is_held = sys.getrefcount(tensor) > 3 or num_users(storage) > 3
    if is_held:
        store.free_from_store(home.chunk, home.index)
        mark_ordinary(tensor)
    else:
        store.drop(home.chunk, home.index)
    home.manager = None
