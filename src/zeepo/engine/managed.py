"""Tensors whose bytes may be elsewhere: what the user holds while a session is open.

[Note: managed tensors]
`init` does not replace the user's parameters, it changes their class (`p.__class__`): the same
objects, in the module, in the optimizer and in any list collected before, now pass every torch
function that touches them through `__torch_function__`. There the chunk is leased for the length
of the call. Gradients and optimizer states are managed tensors too, and so is every view of one,
because a view shares the storage ([Note: storages] in chunks/chunk.py). What only looks at
metadata (shape, dtype, hooks) is passed on without a lease. What would hand out the raw address
keeps the chunk leased as long as it could be used.

The kernels of autograd do not call Python; `backward.py` leases for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeepo.chunks.chunk import Chunk
from zeepo.engine import interrupts
from zeepo.engine.torch_functions import LISTWISE, METADATA, RUNS_BACKWARD, Function
from zeepo.errors import UnsupportedError

_TENSOR: Any = Tensor  # torch's stubs type attributes of the class as values of an instance
plain_torch = torch._C.DisableTorchFunctionSubclass


class Manager(Protocol):
    """What managed tensors need of the engine."""

    is_building: bool

    def run(self, func: Function, args: Any, kwargs: Any, managed: list[Tensor]) -> Any: ...
    def lease_for_life_of(self, home: Home, obj: object) -> None: ...
    def lease_until_step(self, home: Home) -> None: ...
    def lease_for_running_function(self, home: Home) -> bool: ...
    def replace_data(self, home: Home, tensor: Tensor, value: Tensor) -> None: ...
    def read_grad(self, home: Home) -> Tensor | None: ...
    def write_grad(self, home: Home, value: Tensor | None) -> None: ...
    def copy_of(self, home: Home, tensor: Tensor) -> Tensor: ...
    def copied(self, original: Home, copy: Tensor) -> None: ...
    def hand_over(self, parameter: nn.Parameter) -> Home: ...


class Home:
    """Where a managed tensor's bytes belong: a slot of a chunk of a manager."""

    __slots__ = (
        "__weakref__", "chunk", "contribution", "grad", "index", "manager", "name", "parameter",
        "plain",
    )  # fmt: skip

    def __init__(self, manager: Manager, chunk: Chunk, index: int, name: str, plain: Tensor):
        self.manager: Manager | None = manager
        """None once the session is closed or the tensor left it: then it is an ordinary tensor."""
        self.chunk = chunk
        self.index = index
        self.name = name
        self.plain = plain
        """An ordinary tensor over the same storage, for use under a lease."""
        self.parameter: nn.Parameter | None = None
        self.grad: Tensor | None = None
        """The managed gradient (parameters only)."""
        self.contribution: Tensor | None = None
        """On several ranks: what backward made here and is not reduced yet."""


def home_of(value: object) -> Home | None:
    """The home of a managed tensor; None for anything else, or when its session is over."""
    if isinstance(value, (ManagedTensor, ManagedParameter)):
        home: Home | None = value.__dict__.get("_zeepo_home")
        if home is not None and home.manager is not None:
            return home
    return None


def find_managed(values: Iterable[Any], found: list[Tensor]) -> list[Tensor]:
    """All managed tensors among arguments, also inside lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            if home_of(value) is not None:
                found.append(value)
        elif isinstance(value, (list, tuple)):
            find_managed(value, found)
        elif isinstance(value, dict):
            find_managed(value.values(), found)
    return found


def _dispatch(func: Function, args: Any, kwargs: Any) -> Any:
    if func in METADATA:
        with plain_torch():
            return func(*args, **kwargs)
    if func in RUNS_BACKWARD:
        return RUNS_BACKWARD[func](*args, **kwargs)
    managed = find_managed(args, [])
    if kwargs:
        find_managed(kwargs.values(), managed)
    if not managed:
        with plain_torch():
            return func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    if name.startswith(LISTWISE):
        return _one_by_one(func, args, kwargs)
    special = SPECIAL.get(func)
    if special is not None:
        return special(func, args, kwargs, managed)
    home = home_of(managed[0])
    assert home is not None
    assert home.manager is not None
    return home.manager.run(func, args, kwargs, managed)


def _one_by_one(func: Function, args: Any, kwargs: Any) -> Any:
    """Run a listwise function index by index, so that only one tensor is leased at a time.

    On CPU these functions loop over the list themselves: the results are the same bits.
    """
    length = len(args[0])

    def pick(value: Any, index: int) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == length:
            return [value[index]]
        return value

    outputs: list[Any] = []
    for index in range(length):
        row_args = [pick(value, index) for value in args]
        row_kwargs = {key: pick(value, index) for key, value in kwargs.items()}
        managed = find_managed(row_args, [])
        find_managed(row_kwargs.values(), managed)
        home = home_of(managed[0]) if managed else None
        if home is None or home.manager is None:
            with plain_torch():
                out = func(*row_args, **row_kwargs)
        else:
            out = home.manager.run(func, row_args, row_kwargs, managed)
        if out is not None:
            outputs.extend(out)
    return outputs or None


class _Intercepting:
    """The part that managed parameters and other managed tensors share."""

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = _dispatch(func, args, kwargs or {})
        if interrupts.waiting:
            interrupts.deliver()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An ordinary tensor with the current values."""
        if id(self) in memo:
            return memo[id(self)]
        copy = ordinary_copy(self)  # type: ignore[arg-type]
        memo[id(self)] = copy
        home = home_of(self)
        if home is not None and home.manager is not None:
            home.manager.copied(home, copy)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as an ordinary tensor, so that plain PyTorch can load it."""
        copy: Any = ordinary_copy(self)  # type: ignore[arg-type]
        return copy.__reduce_ex__(protocol)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Torch does not dispatch it; on a managed tensor it would leave the slot behind.

        While a model is built (parametrizations use it) the values are copied, as for `.data`.
        """
        home = home_of(self)
        if home is not None and home.manager is not None:
            takes_values = home.manager.is_building and len(args) == 1 and not kwargs
            if not takes_values or not isinstance(args[0], Tensor):
                _refuse(Tensor.set_, (self, *args), kwargs, [self])  # type: ignore[list-item]
            home.manager.replace_data(home, self, args[0])  # type: ignore[arg-type]
            return self
        with plain_torch():
            return _TENSOR.set_(self, *args, **kwargs)

    def __format__(self, spec: str) -> str:
        return format(ordinary_copy(self), spec)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return repr(ordinary_copy(self))  # type: ignore[arg-type]


class ManagedTensor(_Intercepting, Tensor):  # type: ignore[misc]
    """A gradient, an optimizer state, or a view of something managed."""


class ManagedParameter(_Intercepting, nn.Parameter):  # type: ignore[misc]
    """A parameter of the user's, while a session is open."""

    @property
    def grad(self) -> Tensor | None:
        home = home_of(self)
        if home is None or home.manager is None:
            return read_autograd_grad(self)
        return home.manager.read_grad(home)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        home = home_of(self)
        if home is None or home.manager is None:
            write_autograd_grad(self, value)
        else:
            home.manager.write_grad(home, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def read_autograd_grad(tensor: Tensor) -> Tensor | None:
    """The gradient that autograd itself keeps for a tensor."""
    with plain_torch():
        grad: Tensor | None = _TENSOR.grad.__get__(tensor)
        return grad


def write_autograd_grad(tensor: Tensor, value: Tensor | None) -> None:
    with plain_torch():
        _TENSOR.grad.__set__(tensor, value)


def ordinary_copy(tensor: Tensor) -> Tensor:
    """An ordinary tensor (or parameter) with a copy of the values."""
    home = home_of(tensor)
    with torch.no_grad():
        if home is None or home.manager is None:
            copy = tensor.detach().clone(memory_format=torch.preserve_format)
        else:
            copy = home.manager.copy_of(home, tensor)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The storage object, without a lease."""
    with plain_torch():
        return tensor.untyped_storage()


def mark_managed(tensor: Tensor, home: Home) -> None:
    """Turn an ordinary tensor into a managed one, the same object."""
    tensor.__class__ = ManagedParameter if isinstance(tensor, nn.Parameter) else ManagedTensor
    tensor.__dict__["_zeepo_home"] = home


def mark_ordinary(tensor: Tensor) -> None:
    tensor.__dict__.pop("_zeepo_home", None)
    if type(tensor) is ManagedParameter:
        tensor.__class__ = nn.Parameter  # type: ignore[assignment]
    elif type(tensor) is ManagedTensor:
        tensor.__class__ = Tensor  # type: ignore[assignment]


# -- functions with a meaning of their own ---------------------------------------------------------


def _raw_object(func: Function, args: Any, kwargs: Any, managed: list[Tensor]) -> Any:
    """The result aliases the bytes outside torch: leased as long as it lives."""
    home = home_of(managed[0])
    assert home is not None
    assert home.manager is not None
    result = home.manager.run(func, args, kwargs, managed)
    if result is NotImplemented:
        return result
    home.manager.lease_for_life_of(home, result)
    return result


def _dlpack(func: Function, args: Any, kwargs: Any, managed: list[Tensor]) -> Any:
    """Exported through a numpy view, whose life is followed; narrow floats as integers."""
    tensor = managed[0].detach()
    dtype = tensor.dtype
    if dtype.is_floating_point and dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.view({1: torch.uint8, 2: torch.int16}[dtype.itemsize])
    view = torch.from_numpy(tensor.numpy()).view(dtype)
    return func(view, *args[1:], **kwargs)


def _raw_address(func: Function, args: Any, kwargs: Any, managed: list[Tensor]) -> Any:
    """An address or a storage cannot be followed: leased until the next optimizer step."""
    home = home_of(managed[0])
    assert home is not None
    assert home.manager is not None
    home.manager.lease_until_step(home)
    return home.manager.run(func, args, kwargs, managed)


def _detached(func: Function, args: Any, kwargs: Any, managed: list[Tensor]) -> Any:
    """A view needs no bytes: `state_dict()` makes one of each parameter."""
    home = home_of(managed[0])
    assert home is not None
    assert home.manager is not None
    is_watched = torch._C._functorch.maybe_current_level() is not None
    if is_watched or torch._C._len_torch_dispatch_stack():
        return home.manager.run(func, args, kwargs, managed)
    with plain_torch():
        view = func(*args, **kwargs)
    mark_managed(view, home)
    return view


def _set_data(func: Function, args: Any, kwargs: Any, managed: list[Tensor]) -> Any:
    target, value = args
    home = home_of(target)
    if home is None or home.manager is None:  # an ordinary tensor is given managed values
        with plain_torch():
            return func(target, ordinary_copy(value))
    home.manager.replace_data(home, target, value)
    return None


def _joined(func: Function, args: Any, kwargs: Any, managed: list[Tensor]) -> Any:
    """Joining copies its arguments: copy one at a time, so that not all are leased at once."""
    if len({id(home.chunk) for home in map(home_of, managed) if home is not None}) > 1:

        def copied(value: Any) -> Any:
            return value.clone() if home_of(value) is not None else value

        args = [[copied(v) for v in a] if isinstance(a, (list, tuple)) else a for a in args]
        kwargs = {
            key: [copied(v) for v in a] if isinstance(a, (list, tuple)) else a
            for key, a in kwargs.items()
        }
        return func(*args, **kwargs)
    home = home_of(managed[0])
    assert home is not None
    assert home.manager is not None
    return home.manager.run(func, args, kwargs, managed)


def _refuse(func: Function, args: Any, kwargs: Any, managed: list[Tensor]) -> Any:
    home = home_of(managed[0])
    assert home is not None
    raise UnsupportedError(
        f"{getattr(func, '__name__', func)} on {home.name}: its memory belongs to zeepo while the "
        "session is open. Do it before zeepo.init or after session.close(), or work on a clone()."
    )


SPECIAL: dict[Function, Callable[..., Any]] = {_TENSOR.data.__set__: _set_data}


def _specialise(owner: Any, names: str, handler: Callable[..., Any]) -> None:
    for name in names.split():
        if hasattr(owner, name):
            SPECIAL[getattr(owner, name)] = handler


_specialise(
    torch, "cat concat concatenate stack hstack vstack dstack row_stack column_stack", _joined
)
_specialise(Tensor, "detach", _detached)
_specialise(Tensor, "numpy __array__", _raw_object)
_specialise(Tensor, "__dlpack__", _dlpack)
_specialise(
    Tensor,
    "data_ptr const_data_ptr untyped_storage storage _typed_storage",
    _raw_address,
)
_specialise(Tensor, "set_ resize_ resize_as_ share_memory_ __setstate__", _refuse)
