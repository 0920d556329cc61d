"""What is known about torch's functions: which only look at metadata, which work index by index.

A function that is in none of these tables is run with its managed arguments leased.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
_TENSOR: Any = Tensor  # torch's stubs type attributes of the class as values of an instance

_AUTOGRAD: Any = torch.autograd

LISTWISE = ("_foreach_", "_amp_foreach_", "_fused_")
"""Functions over lists of tensors that treat each index by itself."""


def _getters(*names: str) -> set[Function]:
    return {
        getattr(Tensor, name).__get__
        for name in names
        if hasattr(getattr(Tensor, name, None), "__get__")
    }


METADATA: set[Function] = _getters(
    *[
        "shape",
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "ndim",
        "names",
        "output_nr",
        "_version",
        "itemsize",
    ],
    *[
        "nbytes",
        "is_cpu",
        "is_cuda",
        "is_sparse",
        "is_mps",
        "is_meta",
        "is_quantized",
        "is_mkldnn",
        "is_nested",
        "is_xla",
    ],
    *[
        "_backward_hooks",
        "retains_grad",
        "_post_accumulate_grad_hooks",
        "_base",
        "name",
        "volatile",
    ],
)
METADATA |= {
    _TENSOR.requires_grad.__set__,
    _TENSOR._backward_hooks.__set__,
    _TENSOR._post_accumulate_grad_hooks.__set__,
}
METADATA |= {
    getattr(Tensor, name)
    for name in [
        "size",
        "stride",
        "dim",
        "numel",
        "nelement",
        "element_size",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_conj",
        "is_neg",
        "is_signed",
        "is_inference",
        "storage_offset",
        "get_device",
        "is_same_size",
        "__len__",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "has_names",
        "dim_order",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty_strided",
        "is_shared",
        "is_pinned",
        "sparse_dim",
        "dense_dim",
        "_is_view",
        "is_coalesced",
        "ndimension",
    ]
    if hasattr(Tensor, name)
}
METADATA |= {
    getattr(torch, name)
    for name in [
        "is_floating_point",
        "is_complex",
        "numel",
        "is_same_size",
        "result_type",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "is_signed",
        "is_conj",
        "is_neg",
        "is_inference",
        "get_device",
    ]
    if hasattr(torch, name)
}


def _never(*_: Any) -> bool:
    return False


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    """Torch's, or what stands in its place at this moment (ends_of_backward.py)."""
    return _AUTOGRAD._engine_run_backward(*args, **kwargs)


def _without_dispatch(function: Any) -> Function:
    """A copy of a function of torch's that does not ask whether its arguments intercept.

    Used where the function runs the user's code: that must not happen with interception off.
    """
    names = {**function.__globals__, "has_torch_function": _never}
    names["has_torch_function_unary"] = _never
    if "_engine_run_backward" in names:
        names["_engine_run_backward"] = _run_backward
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


RUNS_BACKWARD: dict[Function, Function] = {
    torch.autograd.grad: _without_dispatch(torch.autograd.grad),
    torch.autograd.backward: _without_dispatch(torch.autograd.backward),
    Tensor.backward: _without_dispatch(Tensor.backward),
}


def tensors_in(value: Any) -> Iterable[Tensor]:
    """The tensors in a function's result or arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def written_in_place(func: Function, args: Any, managed: Iterable[Tensor]) -> Iterable[Tensor]:
    """What a function changes, if its name says that it changes anything."""
    name = getattr(func, "__name__", "")
    if name.startswith("_fused_"):  # an optimizer's kernel: parameters, gradients and states
        return managed
    if name.endswith("_") and not name.endswith("__") and args:  # __getitem__ only reads
        return tensors_in(args[0])
    return ()
