"""A model's tensors by name, looked at without bringing them in, and read or written in pieces.

Invariant: everything here works on ordinary tensors and on tensors whose bytes are elsewhere alike.
Names, shapes and memory are metadata and move nothing; a piece is brought in by whoever uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from zeepo.checkpoint.safetensors_file import NAMES
from zeepo.chunks.storages import address, is_dense
from zeepo.errors import UnsupportedError

PIECE_BYTES = 4 << 20
"""How much is copied at once: beyond a lease, this is all that export and load hold."""


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of `model.state_dict()`, the objects themselves; raises for what is no weight."""
    found: dict[str, Any] = dict(model.state_dict(keep_vars=True))
    for name, value in found.items():
        problem = _problem(value)
        if problem:
            raise UnsupportedError(
                f"{name} {problem}: safetensors holds dense tensors of known types only. Take it "
                "out of the model's state_dict(), or save that with torch.save."
            )
    return found


def _problem(value: Any) -> str | None:
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, not a tensor (extra state of a module)"
    if isinstance(value, (UninitializedParameter, UninitializedBuffer)):
        return "has no shape yet (a lazy module: run one forward first)"
    if value.layout is not torch.strided or value.is_quantized:
        return f"has layout {value.layout} and type {value.dtype}"
    if value.device.type == "meta":
        return "is on the meta device and has no values (build with zeepo.lazy() instead)"
    if value.dtype not in NAMES:
        return f"has type {value.dtype}"
    return None


# -- tensors in the same memory --------------------------------------------------------------------


@dataclass(frozen=True)
class _Extent:
    """The memory of a tensor: a storage, which may be without bytes now, and a range in it."""

    storage: int
    start: int
    stop: int
    is_dense: bool

    def covers(self, other: _Extent) -> bool:
        return (
            self.is_dense
            and self.storage == other.storage
            and self.start <= other.start
            and other.stop <= self.stop
        )


def _extent(tensor: Tensor) -> _Extent:
    with torch._C.DisableTorchFunctionSubclass():  # the storage object is metadata: no lease
        start = int(tensor.storage_offset())
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        stop = start + (1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0)
        itemsize = tensor.element_size()
        where = address(tensor.untyped_storage())
        return _Extent(where, start * itemsize, stop * itemsize, is_dense(tensor))


def find_covered(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Name -> the other names whose memory holds all of its bytes, in the model's order.

    Tied parameters cover each other; a view is covered by what it is a view of.
    """
    by_storage: dict[int, list[tuple[str, _Extent]]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            extent = _extent(tensor)
            by_storage.setdefault(extent.storage, []).append((name, extent))
    covered: dict[str, list[str]] = {}
    for group in by_storage.values():
        for name, extent in group:
            covering = [n for n, other in group if n != name and other.covers(extent)]
            if covering:
                covered[name] = covering
    return covered


def find_left_out(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> the name under which its bytes are written. Of tied names the model's first stays."""
    covered = find_covered(tensors)
    order = {name: place for place, name in enumerate(tensors)}
    left_out: dict[str, str] = {}
    for name, covering in covered.items():
        keepers = [
            other
            for other in covering
            if name not in covered.get(other, []) or order[other] < order[name]
        ]
        if keepers:
            left_out[name] = keepers[0]
    for name in left_out:  # a view of a tied name is found under the name that stays
        while left_out[name] in left_out:
            left_out[name] = left_out[left_out[name]]
    return left_out


# -- pieces ----------------------------------------------------------------------------------------


def in_pieces(tensor: Tensor, piece_numel: int) -> Iterator[Tensor]:
    """Views that together are the tensor's elements in logical order, whatever its strides.

    A contiguous tensor is cut anywhere, another one between its rows.
    """
    if tensor.numel() == 0:
        return
    values = tensor.detach()
    if values.is_contiguous():
        values = values.view(-1)
    num_rows = max(1, piece_numel * len(values) // values.numel())
    for start in range(0, len(values), num_rows):
        yield values[start : start + num_rows]


def bytes_in_order(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in logical order, copied piece by piece."""
    for piece in in_pieces(tensor, max(1, PIECE_BYTES // tensor.element_size())):
        copy = piece.resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
        array: Any = copy.view(-1).view(torch.uint8).numpy()
        yield memoryview(array)
