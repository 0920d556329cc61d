"""Wholes and parts: a chunk whose lower tier is other chunks, here or on other ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import xxhash

from zeepo.chunks.chunk import Chunk
from zeepo.chunks.storages import memory_of
from zeepo.chunks.store import ChunkStore
from zeepo.memory.mapping import address_of
from zeepo.memory.tier import Tier


def rest_on(store: ChunkStore, whole: Chunk, tier: Tier) -> None:
    """From now on a chunk rests on another tier, which holds its bytes already."""
    with store.lock:
        store.moves.settle(whole)
        if whole.extent is not None and whole.home is not None:
            whole.home.free(whole.extent)
        whole.home = tier
        be_copy(store, whole)
        whole.extent = tier.allocate(whole.label, whole.layout.nbytes, whole.layout.describe)
        whole.expected_writes = whole.extent.num_writes
        whole.lower_version = whole.version
        store.moves.end_loans(whole)  # others have what they asked for, but it may not be back yet
        store.moves.evict(whole)


def attach_lower(chunk: Chunk, index: int, storage: torch.UntypedStorage) -> None:
    """Give an empty chunk a slot whose bytes its home tier holds already."""
    assert chunk.home is not None
    chunk.extent = chunk.home.allocate(chunk.label, chunk.layout.nbytes, chunk.layout.describe)
    chunk.storages[index] = storage
    chunk.lower_version = chunk.version
    chunk.expected_writes = chunk.extent.num_writes


def be_copy(store: ChunkStore, whole: Chunk) -> None:
    """What is in RAM of this chunk are copies of parts: let go soon after their use."""
    whole.is_copy = True
    store.moves.copies.append(whole)


def forget_copy(store: ChunkStore, whole: Chunk) -> None:
    """The lower tier has newer bytes: what is here is let go, and fetched again when used."""
    with store.lock:
        if whole.extent is None:
            return
        whole.version += 1
        whole.lower_version = whole.version
        whole.expected_writes = whole.extent.num_writes
        if whole.is_resident or whole.fetching is not None:
            store.moves.evict(whole)


def renew_copy(store: ChunkStore, whole: Chunk) -> None:
    """The same; but what somebody holds by its address gets the newer bytes where it is."""
    if not whole.leases or not whole.is_resident:
        forget_copy(store, whole)
        return
    with store.lock:
        assert whole.home is not None
        assert whole.extent is not None
        assert whole.buffer is not None
        store.wait(whole.home.read(whole.extent, whole.buffer.memory))
        whole.version += 1
        whole.lower_version = whole.version
        whole.expected_writes = whole.extent.num_writes


def copy_resident(store: ChunkStore, part: Chunk, target: memoryview) -> None:
    """Copy a chunk that is here, or on its way, without a lease."""
    with store.lock:
        store.moves.finish_fetch(part)
        copy_into(target, part.pieces())


def copy_into(target: memoryview, pieces: Sequence[tuple[int, memoryview]]) -> None:
    """Put pieces, as (offset, bytes), at their places."""
    start = address_of(target)
    for offset, memory in pieces:
        ctypes.memmove(start + offset, address_of(memory), memory.nbytes)


def digest_of(chunk: Chunk) -> bytes:
    """Tells the resident bytes of chunks of one layout apart."""
    hasher = xxhash.xxh3_128()
    for _, storage in chunk.present():  # not what lies between the slots
        hasher.update(memory_of(storage))
    return hasher.digest()


def drop_parts(store: ChunkStore) -> None:
    """At the very end: parts of wholes that the user has got back."""
    with store.lock:
        for chunk in store.chunks():
            if chunk.is_part:
                chunk.leases = 0
                for index, _ in chunk.present():
                    store.drop(chunk, index)
