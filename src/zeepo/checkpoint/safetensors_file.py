"""The safetensors format: what a file's header says. Pure: takes values, returns values.

A file is 8 bytes with the length of the header (little endian), the header (JSON, padded with
spaces so that the data begins at a multiple of 8), and the data: all tensors in logical order, one
after the other without gaps, wide types first. `encode_header` gives the bytes that the safetensors
library gives (tests pin them); `decode_header` accepts only what that library accepts, so an offset
in an `Entry` always lies inside the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from zeepo.errors import CorruptionError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The library's limit: a damaged length must not make us read the whole file as a header."""

METADATA_KEY = "__metadata__"

# In the order in which the library places them in a file.
DTYPES: dict[str, torch.dtype] = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F4": torch.float4_e2m1fn_x2,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PLACES = {dtype: place for place, dtype in enumerate(DTYPES.values())}


@dataclass(frozen=True)
class Entry:
    """One tensor in a file: its bytes are [start, stop) of the data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """What a file holds. `data_start` counts from the beginning of the file."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int


def nbytes_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize


def arrange(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> list[Entry]:
    """Where each tensor goes: wide types first, then by name, as the library does."""
    entries = []
    position = 0
    for name, dtype, shape in sorted(tensors, key=lambda spec: (_PLACES[spec[1]], spec[0])):
        stop = position + nbytes_of(dtype, shape)
        entries.append(Entry(name, dtype, tuple(shape), position, stop))
        position = stop
    return entries


def encode_header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """Everything that comes before the data."""
    header: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    for entry in entries:
        header[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": _counted_in_elements(entry.dtype, entry.shape),
            "data_offsets": [entry.start, entry.stop],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _counted_in_elements(dtype: torch.dtype, shape: tuple[int, ...]) -> list[int]:
    """Torch counts pairs of 4-bit floats, the file counts floats."""
    if dtype is torch.float4_e2m1fn_x2 and shape:
        return [*shape[:-1], shape[-1] * 2]
    return list(shape)


def header_length(first_bytes: bytes, file_bytes: int, where: str) -> int:
    """The length of the header, from the first 8 bytes of a file of `file_bytes` bytes."""
    length = int.from_bytes(first_bytes, "little")
    if len(first_bytes) < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise malformed(where, f"it has {file_bytes} bytes and no whole header")
    return length


def decode_header(text: bytes, file_bytes: int, where: str) -> Header:
    """Read a header that was `text` in a file of `file_bytes` bytes; `where` is for errors."""
    try:
        raw = json.loads(text.decode(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise malformed(where, f"its header is not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise malformed(where, "its header is not a table of tensors")
    metadata = raw.pop(METADATA_KEY, {})
    if not _is_text_table(metadata):
        raise malformed(where, "its metadata is not a table of texts")
    entries = {name: _decode_entry(name, value, where) for name, value in raw.items()}
    _check_no_gaps(entries.values(), file_bytes - LENGTH_BYTES - len(text), where)
    return Header(entries, metadata, LENGTH_BYTES + len(text))


def _decode_entry(name: str, value: Any, where: str) -> Entry:
    fields = value if isinstance(value, dict) else {}
    shape, offsets = fields.get("shape"), fields.get("data_offsets")
    if not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise malformed(where, f"the entry of {name!r} has no shape and place")
    dtype = DTYPES.get(str(fields.get("dtype")))
    if dtype is None:
        raise malformed(where, f"{name!r} is of type {fields.get('dtype')!r}, which is not known")
    if dtype is torch.float4_e2m1fn_x2 and shape:
        if shape[-1] % 2:
            raise malformed(where, f"{name!r} has an odd number of 4-bit values in a row")
        shape = [*shape[:-1], shape[-1] // 2]
    start, stop = offsets
    if stop - start != nbytes_of(dtype, shape):
        raise malformed(
            where, f"{name!r} of shape {tuple(shape)} and {dtype} has {stop - start} bytes"
        )
    return Entry(name, dtype, tuple(shape), start, stop)


def _check_no_gaps(entries: Iterable[Entry], data_bytes: int, where: str) -> None:
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != position:
            raise malformed(where, f"{entry.name!r} begins at {entry.start}, not at {position}")
        position = entry.stop
    if position != data_bytes:
        raise malformed(where, f"its tensors take {position} bytes, the file has {data_bytes}")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _is_text_table(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def malformed(where: str, what: str) -> CorruptionError:
    return CorruptionError(
        f"{where} is not a whole safetensors file: {what}. It was cut short, damaged, or is "
        "something else: write or download it again."
    )
