"""States that come from a file, in the format in which an optimizer keeps them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeepo.errors import WeightsError
from zeepo.optim.formats import BLOCKS, Format, pack, unpack
from zeepo.optim.memory_order import Flat, memory_order

States = dict[Any, dict[str, Any]]


def kept_apart(state_dict: dict[str, Any]) -> tuple[dict[str, Any], States]:
    """The state_dict without its large tensors, which torch would cast to the parameters' dtype;
    and those."""
    small: States = {}
    large: States = {}
    for number, state in state_dict["state"].items():
        large[number] = {k: v for k, v in state.items() if isinstance(v, Tensor) and k != "step"}
        small[number] = {k: v for k, v in state.items() if k not in large[number]}
    return {**state_dict, "state": small}, large


def converted(value: Tensor, p: Tensor, wanted: Format | None, *, is_signed: bool) -> Tensor:
    """A state of parameter `p` in the wanted format (None: fp32, as the master of a parameter)."""
    order = memory_order(p)
    is_packed = value.dtype is torch.uint8
    expected = BLOCKS.numel(p.numel()) if is_packed else p.numel()
    if value.numel() != expected:
        raise WeightsError(
            f"an optimizer state of {value.numel()} {value.dtype} numbers does not belong to a "
            f"parameter of shape {tuple(p.shape)}: {expected} were expected."
        )
    value = value.to(p.device)
    if wanted is Format.PACKED:
        if is_packed:
            return value
        flat = Flat(value.to(torch.float32).view(p.shape), order).flat
        return pack(flat, torch.zeros_like(flat), 0, is_signed=is_signed)
    dtype = torch.float32 if wanted is None else wanted.dtype
    if is_packed:
        flat = unpack(value, p.numel(), is_signed=is_signed).to(dtype)
        return flat.clone().as_strided(p.shape, order)
    return value.to(dtype)
