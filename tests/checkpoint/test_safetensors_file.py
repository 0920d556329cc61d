"""The format: the library's own bytes, and every damaged header refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save

from zeepo.checkpoint.model_tensors import bytes_in_order
from zeepo.checkpoint.safetensors_file import (
    DTYPES,
    LENGTH_BYTES,
    arrange,
    decode_header,
    encode_header,
    header_length,
)
from zeepo.errors import CorruptionError


def one_of_each_type() -> dict[str, torch.Tensor]:
    numbers = torch.arange(48, dtype=torch.uint8)
    tensors = {f"a.{name}": numbers.view(dtype).clone() for name, dtype in DTYPES.items()}
    tensors["a.BOOL"] = torch.tensor([[True], [False]])
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.zeros(3, 0, 2)
    tensors['é "\\\n\u2028'] = torch.ones(2, 3)
    tensors["Z"] = torch.ones(1, 2, 3, 1)
    return tensors


def file_of(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    entries = arrange((name, t.dtype, t.shape) for name, t in tensors.items())
    data = b"".join(bytes(part) for e in entries for part in bytes_in_order(tensors[e.name]))
    return encode_header(entries, metadata) + data


def decode(file: bytes) -> Any:
    length = header_length(file[:LENGTH_BYTES], len(file), "x")
    return decode_header(file[LENGTH_BYTES : LENGTH_BYTES + length], len(file), "x")


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}])
def test_the_bytes_are_the_library_s(metadata: dict[str, str]) -> None:
    tensors = one_of_each_type()
    assert file_of(tensors, metadata) == save(tensors, metadata or None)
    assert file_of({}, metadata) == save({}, metadata or None)


def test_the_bytes_of_a_small_file() -> None:
    header = (
        b'{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"U8","shape":[],"data_offsets":[8,9]}}'
    )
    header += b" " * (-len(header) % 8)
    expected = len(header).to_bytes(8, "little") + header + b"\0\0\x80?\0\0\0@\x07"
    tensors = {"a": torch.tensor(7, dtype=torch.uint8), "b": torch.tensor([1.0, 2.0])}
    assert file_of(tensors, {"format": "pt"}) == expected


def test_a_header_comes_back() -> None:
    tensors = one_of_each_type()
    file = file_of(tensors, {"format": "pt", "é": "ü"})
    header = decode(file)
    assert header.metadata == {"format": "pt", "é": "ü"}
    assert set(header.entries) == set(tensors)
    for name, tensor in tensors.items():
        entry = header.entries[name]
        assert (entry.dtype, entry.shape) == (tensor.dtype, tensor.shape)
        data = file[header.data_start + entry.start : header.data_start + entry.stop]
        assert data == b"".join(map(bytes, bytes_in_order(tensor)))


def framed(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DAMAGED = {
    "nothing": b"",
    "a length cut short": b"\1\0\0",
    "a length beyond the end": (1000).to_bytes(8, "little") + b"{}",
    "an enormous length": b"\xff" * 8 + b"{}",
    "no JSON": framed(b"not json"),
    "no text": framed(b"\xff\xfe"),
    "nested too deep": framed(b"[" * 100_000),
    "a list": framed([1]),
    "metadata that is no text": framed({"__metadata__": {"a": 1}}),
    "metadata that is a list": framed({"__metadata__": []}),
    "an entry that is a number": framed({"a": 1}),
    "an unknown type": framed({"a": entry("F99")}, b"1234"),
    "a type that is a number": framed({"a": entry(3)}, b"1234"),
    "a negative size": framed({"a": entry(shape=[-1])}, b"1234"),
    "a fractional size": framed({"a": entry(shape=[1.0])}, b"1234"),
    "a true size": framed({"a": entry(shape=[True])}, b"1234"),
    "no shape": framed({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234"),
    "one offset": framed({"a": entry(offsets=[4])}, b"1234"),
    "offsets that run backwards": framed({"a": entry(offsets=[4, 0])}, b"1234"),
    "offsets beyond the end": framed({"a": entry(offsets=[4, 8])}, b"1234"),
    "a shape that is too large": framed({"a": entry(shape=[2])}, b"1234"),
    "data cut short": framed({"a": entry()}, b"123"),
    "data that is too long": framed({"a": entry()}, b"12345"),
    "a hole": framed({"a": entry(), "b": entry(offsets=[8, 12])}, b"1" * 12),
    "an overlap": framed({"a": entry(), "b": entry(offsets=[0, 4])}, b"1234"),
    "an odd number of 4-bit values": framed({"a": entry("F4", [3], [0, 1])}, b"1"),
}


@pytest.mark.parametrize("file", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused_as_the_library_does(file: bytes) -> None:
    with pytest.raises(CorruptionError, match=r"^x is not a whole safetensors file: .*again\.$"):
        decode(file)
    with pytest.raises(SafetensorError):
        load(file)


def test_a_name_that_occurs_twice_is_refused() -> None:
    one = json.dumps(entry()).encode()
    with pytest.raises(CorruptionError, match="a name occurs twice"):
        decode(framed(b'{"a":%s,"a":%s}' % (one, one), b"1234"))


@given(st.integers(0, 400), st.integers(0, 255))
def test_any_changed_byte_is_refused_or_still_inside_the_file(place: int, value: int) -> None:
    file = bytearray(file_of({"a": torch.ones(3), "b": torch.ones(2, 2)}, {"format": "pt"}))
    file[place % len(file)] = value
    try:
        header = decode(bytes(file))
    except CorruptionError:
        return
    for found in header.entries.values():
        assert 0 <= found.start <= found.stop <= len(file) - header.data_start
