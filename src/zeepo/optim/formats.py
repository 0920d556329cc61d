"""How an optimizer's states are kept: fp32, bf16, or 8-bit codes in blocks. In torch's operations.

Packed: each block of 16 elements is 16 codes and the fp32 scale of the block, 20 bytes, and the
blocks lie one behind the other in one flat uint8 tensor. A value is scale * (code / top)^2, so
small values beside large ones keep some digits; sums of squares have no sign and 255 codes, of
which one above zero never gets the code 0.

What does not fit a format is rounded up or down at random, so that it is right on average: a
moment that moves by less than a code's width each step still moves. The random bits are a hash of
the value, its gradient and the step: the same whichever slice of a tensor is updated, by how many
threads and with which instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from zeepo.errors import ConfigError

BLOCK = 16
BLOCK_BYTES = 20
_MASK = 0xFFFFFFFF


class Format(Enum):
    """How states are kept; the values are what users write."""

    FP32 = "fp32"
    BF16 = "bf16"
    PACKED = "8bit"

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self]

    @property
    def bytes_per_element(self) -> float:
        return BLOCK_BYTES / BLOCK if self is Format.PACKED else float(self.dtype.itemsize)


_DTYPES = {
    Format.FP32: torch.float32,
    Format.BF16: torch.bfloat16,
    Format.PACKED: torch.uint8,
}


def format_named(name: str) -> Format:
    """The format a user asked for."""
    try:
        return Format(name)
    except ValueError:
        names = ", ".join(f'"{f.value}"' for f in Format)
        raise ConfigError(f"state_dtype={name!r} is not one of {names}.") from None


@dataclass(frozen=True)
class Packing:
    """How many numbers a state has for a run of the parameter's elements.

    Every `block` elements, the last ones too if they are fewer, have `numbers` numbers.
    """

    block: int = 1
    numbers: int = 1

    def numel(self, elements: int) -> int:
        """Numbers for so many elements."""
        return -(-elements // self.block) * self.numbers


PLAIN = Packing()
"""A number for each element."""
BLOCKS = Packing(BLOCK, BLOCK_BYTES)


def bits_of(values: Tensor) -> Tensor:
    """The bits of fp32 values, as int64 without a sign."""
    return values.view(torch.int32).to(torch.int64) & _MASK


def of_bits(bits: Tensor) -> Tensor:
    """fp32 values of bits held in int64."""
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return signed.to(torch.int32).view(torch.float32)


def dither(values: Tensor, grads: Tensor, salt: int) -> Tensor:
    """32 random bits for each value, in int64."""
    h = bits_of(values) ^ ((bits_of(grads) * 0x9E3779B1) & _MASK) ^ salt
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK
    return h ^ (h >> 16)


def narrow_randomly(values: Tensor, grads: Tensor, salt: int) -> Tensor:
    """One of the two bf16 next to each fp32 value."""
    bits = bits_of(values)
    rounded = (bits + (dither(values, grads, salt) & 0xFFFF)) >> 16
    rounded = torch.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
    return of_bits(rounded << 16).to(torch.bfloat16)


def unpack(packed: Tensor, numel: int, *, is_signed: bool) -> Tensor:
    """The fp32 values of a packed state, flat."""
    blocks = packed.view(-1, BLOCK_BYTES)
    scales = blocks[:, BLOCK:].contiguous().view(torch.float32)
    if is_signed:
        codes = blocks[:, :BLOCK].contiguous().view(torch.int8).to(torch.int32)
        shares = (codes * codes.abs()).to(torch.float32) * (1 / 16129)
    else:
        codes = blocks[:, :BLOCK].to(torch.int32)
        shares = (codes * codes).to(torch.float32) * (1 / 65025)
    return (scales * shares).view(-1)[:numel]


def pack(values: Tensor, grads: Tensor, salt: int, *, is_signed: bool) -> Tensor:
    """Packed fp32 values, as one flat uint8 tensor."""
    padding = -values.numel() % BLOCK
    values = torch.nn.functional.pad(values, (0, padding)).view(-1, BLOCK)
    grads = torch.nn.functional.pad(grads, (0, padding)).view(-1, BLOCK)
    sizes = bits_of(values) & 0x7FFFFFFF
    if not values.numel():
        return torch.empty(0, dtype=torch.uint8)
    scales = of_bits(sizes.amax(dim=1, keepdim=True))
    shares = of_bits(sizes) / torch.where(scales == 0, 1.0, scales)
    squares = torch.where(shares <= 1.0, shares, 0.0) * (16129.0 if is_signed else 65025.0)
    low = squares.to(torch.float64).sqrt().to(torch.float32).to(torch.int32)  # to the nearest fp32
    chance = (dither(values, grads, salt) >> 8).to(torch.float32) * 2.0**-24
    above = squares - (low * low).to(torch.float32)
    codes = low + (chance * (2 * low + 1).to(torch.float32) < above)
    if is_signed:
        codes = torch.where(bits_of(values) >> 31 == 1, -codes, codes)
        bytes_ = codes.to(torch.int8).view(torch.uint8)
    else:
        bytes_ = torch.where(codes == 0, (values > 0).to(torch.int32), codes).to(torch.uint8)
    return torch.cat([bytes_, scales.contiguous().view(torch.uint8)], dim=1).view(-1)
