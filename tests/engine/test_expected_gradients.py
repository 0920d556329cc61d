"""Large gradients are announced before autograd makes them, once each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zeepo.engine.backward import large_gradient_bytes, new_nodes

WIDTH = 1024
USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w),
    "linear of three dimensions": lambda x, w: F.linear(x[None], w),
    "matmul with the transposed": lambda x, w: x @ w.t(),
    "matmul with views of it": lambda x, w: x @ w[None].view(1, WIDTH, WIDTH).squeeze(0).t(),
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "embedding": lambda x, w: F.embedding(torch.tensor([1, 2]), w),
    "addmm": lambda x, w: torch.addmm(x, x, w),
}


@pytest.mark.parametrize("use", USES)
def test_each_gradient_is_announced_once(use: str) -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    first = torch._C._autograd._get_sequence_nr()
    out = USES[use](torch.randn(3, WIDTH), weight)
    announced = [large_gradient_bytes(node) for node in new_nodes([out], first)]
    assert sum(announced) == weight.numel() * weight.element_size(), announced


def test_small_gradients_are_not() -> None:
    weight = torch.randn(WIDTH, 16, requires_grad=True)
    out = torch.randn(3, 16) @ weight.t()
    assert [large_gradient_bytes(node) for node in new_nodes([out], 0)] == [0, 0]
