"""Whether torch's functions do what they do by default here, and a place where they do.

An update that was put off runs in the middle of whatever the user's code is doing: inside autocast,
inference, a dispatch mode, `torch.func`. None of them may touch it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes


def is_ordinary_context() -> bool:
    """Whether nothing around the caller changes what torch's functions do."""
    return (
        not torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled("cpu")
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.maybe_current_level() is None
    )


@contextlib.contextmanager
def ordinary_context() -> Iterator[None]:
    """As if no mode were on, whatever the user's code is in the middle of."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        _disable_current_modes(),
        torch._C._DisableFuncTorch(),
        torch._C.DisableTorchFunction(),
    ):
        yield
