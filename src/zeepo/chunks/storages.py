"""Torch storages: every use of torch's private storage interface is here.

`_swap_data_ptr_` exchanges memory and size of two storages. All tensors over a storage see the
exchange, which is how a chunk's memory comes and goes under tensors that stay.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, UntypedStorage


def new_storage(nbytes: int) -> UntypedStorage:
    """Ordinary memory, uninitialised."""
    return UntypedStorage(nbytes)  # type: ignore[no-untyped-call]


def swap_memory(storage: UntypedStorage, other: UntypedStorage) -> None:
    """Exchange the memory of two storages."""
    swap: Any = getattr(storage, "_swap_data_ptr_")  # noqa: B009 (not in torch's type stubs)
    swap(other)


def take_memory(storage: UntypedStorage) -> None:
    """Leave a storage without memory, with zero bytes."""
    swap_memory(storage, new_storage(0))


def address(storage: UntypedStorage) -> int:
    """Identity of the storage itself; does not change when its memory does."""
    return int(storage._cdata)


def num_users(storage: UntypedStorage) -> int:
    """How many tensors use a storage, plus one for the storage object we hold."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def memory_of(storage: UntypedStorage) -> memoryview:
    """The bytes of a storage. The caller keeps the storage alive."""
    array = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(array).cast("B")


def is_ordinary(storage: UntypedStorage) -> bool:
    """Whether the memory is torch's own, and not that of an array or a file."""
    return bool(storage.resizable()) and not storage.is_shared()


def is_in_backward() -> bool:
    """Whether this thread runs a backward node."""
    return torch._C._current_graph_task_id() != -1


def is_dense(tensor: Tensor) -> bool:
    """The elements fill their span of memory without overlap."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def fills_storage(tensor: Tensor) -> bool:
    """A dense tensor over the whole of a storage in ordinary memory."""
    storage = tensor.untyped_storage()
    return (
        tensor.storage_offset() == 0
        and storage.nbytes() == tensor.numel() * tensor.element_size()
        and is_dense(tensor)
        and storage.device.type == "cpu"
        and not storage.is_shared()
    )


def is_exclusive(tensor: Tensor) -> bool:
    """An ordinary tensor that fills a storage no other tensor uses: the store may take it over."""
    if type(tensor) is not Tensor or not fills_storage(tensor):
        return False
    return num_users(tensor.untyped_storage()) == 2
