"""An observed value as type, shape and bytes, and how two of them differ.

Two values are equal when their bytes are, so a NaN equals itself and -0.0 does not equal 0.0.
Nothing here knows a session or a test.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch


@dataclass(frozen=True)
class Value:
    """One observed value: a tensor, a number or a name, as bytes."""

    kind: str
    shape: tuple[int, ...]
    data: bytes
    stride: tuple[int, ...] | None = None

    def elements(self) -> torch.Tensor | None:
        """The values as a flat tensor, or None if this was no tensor."""
        if not self.kind.startswith("torch.") or not self.data:
            return None
        dtype = getattr(torch, self.kind.removeprefix("torch."))
        return torch.frombuffer(bytearray(self.data), dtype=dtype)


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _tensor_values(path: str, tensor: torch.Tensor, stride: bool) -> Iterator[tuple[str, Value]]:
    copy = tensor.detach().clone()
    if type(copy) is not torch.Tensor:
        name = f"copy of type {type(copy).__name__}"
        yield path, Value(name, tuple(copy.shape), b"")
    elif copy.layout is torch.sparse_coo:
        yield f"{path}.is_coalesced", Value("bool", (), repr(copy.is_coalesced()).encode())
        yield from _tensor_values(f"{path}.indices", copy._indices(), stride)
        yield from _tensor_values(f"{path}.values", copy._values(), stride)
    else:
        steps = tuple(tensor.stride()) if stride else None
        yield path, Value(str(copy.dtype), tuple(copy.shape), _tensor_bytes(copy), steps)


def values_of(path: str, item: Any, *, stride: bool = False) -> Iterator[tuple[str, Value]]:
    """Every tensor and number inside `item`, with its path."""
    if isinstance(item, torch.Tensor):
        yield from _tensor_values(path, item, stride)
    elif isinstance(item, Mapping):
        for key, part in item.items():
            yield from values_of(f"{path}.{key}", part, stride=stride)
    elif isinstance(item, list | tuple):
        for index, part in enumerate(item):
            yield from values_of(f"{path}.{index}", part, stride=stride)
    elif isinstance(item, float):
        yield path, Value("float", (), struct.pack("<d", item))
    elif item is None or isinstance(item, bool | int | str):
        yield path, Value(type(item).__name__, (), repr(item).encode())
    else:
        yield path, Value(type(item).__name__, (), b"")


def how_different(expected: Value, actual: Value) -> str | None:
    """How two values differ, in words and a few numbers, or None."""
    if expected.kind != actual.kind:
        return f"expected {expected.kind}, got {actual.kind}"
    if expected.shape != actual.shape:
        return f"expected shape {expected.shape}, got {actual.shape}"
    if expected.stride != actual.stride:
        return f"expected stride {expected.stride}, got {actual.stride}"
    if expected.data == actual.data:
        return None
    left, right = expected.elements(), actual.elements()
    if left is None or right is None:
        if expected.kind == "float":
            (before,), (after,) = (struct.unpack("<d", v.data) for v in (expected, actual))
            return f"expected {before!r}, got {after!r}"
        return f"expected {expected.data.decode()}, got {actual.data.decode()}"
    one, two = (numpy.frombuffer(v.data, numpy.uint8) for v in (expected, actual))
    width = left.element_size()
    unequal = numpy.flatnonzero((one.reshape(-1, width) != two.reshape(-1, width)).any(axis=1))
    first = int(unequal[0])
    return (
        f"{len(unequal)} of {left.numel()} elements differ, first at flat index {first}: "
        f"expected {left[first].item()!r}, got {right[first].item()!r}"
    )
