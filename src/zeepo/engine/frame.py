"""One forward of a segment whose inside is computed again when backward needs it.

[Note: recomputation]
While the forward runs, a pair of saved-tensor hooks sees everything that autograd wants to keep.
What is in memory anyway (inputs, parameters, buffers, views of them) is kept as it is; of the rest
only the number in the order of saving. The first node of backward that asks for one of those makes
the frame run the forward again, in the surroundings it had, up to the last number still wanted;
each value is handed out once and then forgotten, so a second backward computes again.

This is what `torch.utils.checkpoint` does without reentrance. It is not used because it would be
silent where it must not: about inputs and parameters that changed in between, about buffers and
attributes that the forward changes, about numpy's and Python's random numbers; and because it
refuses a `ctx.saved_tensors` that is read twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zeepo.chunks.storages import address
from zeepo.engine.managed import Home, home_of, plain_torch
from zeepo.engine.structures import StructureCopy
from zeepo.engine.surroundings import Surroundings
from zeepo.errors import UnsupportedError

_ELSE = "Use activations='ram' or 'disk' for this model."


class _Enough(BaseException):
    """Ends a recomputation that has all it is for; no error, so not to be caught as one."""


class _Dropped:
    """Stands in the graph for a tensor that is computed again."""

    __slots__ = ("__weakref__", "frame")

    def __init__(self, frame: Frame):
        self.frame = frame

    def unpack(self) -> Tensor:
        return self.frame.value_of(self)


class _Kept:
    """A tensor in memory that lives on without the graph."""

    __slots__ = ("home", "is_leased", "label", "tensor", "version")

    def __init__(self, label: str, tensor: Tensor, home: Home | None):
        self.label = label
        self.tensor = tensor.detach()
        self.version = _version(tensor)
        self.home = home
        """Where its bytes belong, if it is managed."""
        self.is_leased = False
        """Whether the node it was saved for leases it. Only one written in Python does not: its
        backward sees an ordinary tensor instead of the managed one that it would see plainly."""

    def unpack(self) -> Tensor:
        if self.home is not None and self.home.manager is not None and not self.is_leased:
            self.home.manager.lease_for_running_function(self.home)
            self.is_leased = True
        _refuse_changed(_version(self.tensor) != self.version, self.label, self.tensor)
        return self.tensor


class Arguments:
    """What a forward is called with, to be called with once more."""

    def __init__(self, args: Any, kwargs: Any):
        self._held: dict[int, Tensor] = {}
        """id of a tensor among the arguments -> the same values and version, without its graph."""
        self._structure = StructureCopy(self._hold, objects=True).of((args, kwargs))
        self._before: dict[int, Tensor] = {}
        """id of a held tensor -> its values before the forward."""
        self._versions = self._current_versions()

    def _hold(self, tensor: Tensor) -> Tensor:
        held = tensor
        if not isinstance(tensor, nn.Parameter) and home_of(tensor) is None:
            held = tensor.detach().requires_grad_(tensor.requires_grad)
        self._held[id(held)] = held
        return held

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._held.values())

    def share_memory(self) -> bool:
        """Whether two tensors among them are the same memory seen in different ways."""
        with plain_torch():
            storages = [address(t.untyped_storage()) for t in self.tensors if _is_dense(t)]
        return len(set(storages)) < len(storages)

    def keep_copies(self) -> None:
        """Before the forward: it may change its arguments."""
        self._before = {key: held.detach().clone() for key, held in self._held.items()}

    @property
    def has_copies(self) -> bool:
        return bool(self._before)

    def are_changed(self) -> bool:
        return self._versions != self._current_versions()

    def settle(self, *, changed: bool) -> None:
        """After the forward: copies are needed if it changed something, and only then."""
        if not changed:
            self._before = {}
        self._versions = self._current_versions()

    def again(self, label: str) -> tuple[Any, Any]:
        """The arguments as they were before the forward."""
        if self.has_copies:
            return StructureCopy(self._as_before, objects=True).of(self._structure)  # type: ignore[no-any-return]
        for held, version in zip(self.tensors, self._versions, strict=True):
            _refuse_changed(_version(held) != version, label, held)
        return StructureCopy(lambda tensor: tensor, objects=True).of(self._structure)  # type: ignore[no-any-return]

    def _as_before(self, held: Tensor) -> Tensor:
        """A clone of a leaf, because what requires a gradient must not be one to be changed."""
        with torch.enable_grad():
            return self._before[id(held)].requires_grad_(held.requires_grad).clone()

    def _current_versions(self) -> list[int]:
        with plain_torch():
            return [_version(held) for held in self._held.values()]


class Frame:
    """One forward of a segment."""

    def __init__(
        self,
        label: str,
        call: Callable[..., Any],
        modules: Sequence[nn.Module],
        arguments: Arguments,
    ):
        self._label = label
        self._call = call
        self._arguments = arguments
        self._surroundings = Surroundings(modules)
        self._numbers: weakref.WeakKeyDictionary[_Dropped, int] = weakref.WeakKeyDictionary()
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._values: weakref.WeakKeyDictionary[_Dropped, tuple[Tensor, int]]
        self._values = weakref.WeakKeyDictionary()
        self._parameter_versions: list[int | None] = []
        with plain_torch():
            surroundings = self._surroundings
            held = (*arguments.tensors, *surroundings.parameters, *surroundings.buffers)
            self._in_memory: dict[int, Home | None] = {
                address(t.untyped_storage()): home_of(t) for t in held if _is_dense(t)
            }
            """Storage of what lives on without the graph -> its home, if it is managed."""

    # -- the forward ------------------------------------------------------------------------------

    def run(self, args: Any, kwargs: Any, *, may_change_arguments: bool) -> Any:
        """The forward itself, as the user called it."""
        parameters = self._surroundings.parameters
        before = _settled_versions(parameters)
        if may_change_arguments:
            self._arguments.keep_copies()
        with saved_tensors_hooks(self._pack, _unpack):
            result = self._call(*args, **kwargs)
        changed = self._arguments.are_changed()
        if changed and not may_change_arguments:
            raise UnsupportedError(
                f"activations='recompute': {self._label} changed its input in place, which it had "
                f"not done in its calls before: it cannot be recomputed. {_ELSE}"
            )
        self._arguments.settle(changed=changed)
        self._surroundings.settle()
        self._parameter_versions = _settled_versions(parameters)
        for p, old, new in zip(parameters, before, self._parameter_versions, strict=True):
            if old is not None and old != new:
                raise UnsupportedError(
                    f"activations='recompute': the forward of {self._label} changes its own "
                    f"parameter of shape {tuple(p.shape)}: it cannot be recomputed. {_ELSE}"
                )
        return result

    @property
    def changes_arguments(self) -> bool:
        return self._arguments.has_copies

    def _pack(self, tensor: Tensor) -> _Kept | _Dropped:
        with plain_torch():
            number = len(self._shapes)
            self._shapes.append((tensor.shape, tensor.dtype))
            storage = address(tensor.untyped_storage()) if _is_dense(tensor) else 0
            if storage in self._in_memory:
                return _Kept(self._label, tensor, self._in_memory[storage])
            dropped = _Dropped(self)
            self._numbers[dropped] = number
            return dropped

    # -- backward ---------------------------------------------------------------------------------

    def value_of(self, dropped: _Dropped) -> Tensor:
        """What was saved under this number; computed again if it is not there any more."""
        if dropped not in self._values:
            self._recompute()
        tensor, version = self._values.pop(dropped)
        _refuse_changed(tensor._version != version, self._label, tensor)
        return tensor

    def _recompute(self) -> None:
        self._refuse_changed_parameters()
        args, kwargs = self._arguments.again(self._label)
        wanted = {number: dropped for dropped, number in self._numbers.items()}
        last = max(wanted)
        count = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            with plain_torch():
                number, count = count, count + 1
                if number > last:  # the user's code has caught what told it to stop
                    raise _Enough
                if (tensor.shape, tensor.dtype) != self._shapes[number]:
                    raise self._differs(f"{_text(tensor)} instead of {self._shapes[number]}")
                value = tensor.detach()
                if number in wanted:
                    self._values[wanted[number]] = (value, _version(tensor))
                if number == last:
                    raise _Enough
                return value

        self._forget_at_the_end()
        try:
            with (
                self._surroundings.restored(),
                saved_tensors_hooks(pack, lambda value: value),
                torch.enable_grad(),
            ):
                self._call(*args, **kwargs)
        except _Enough:
            pass
        if count <= last:
            raise self._differs(f"{count} tensors instead of {last + 1} or more")

    def _differs(self, how: str) -> UnsupportedError:
        return UnsupportedError(
            f"activations='recompute': {self._label} did something else when it was computed "
            f"again: it saved {how}. Its forward depends on something outside of the module and "
            f"its arguments that has changed. {_ELSE}"
        )

    def _refuse_changed_parameters(self) -> None:
        parameters = self._surroundings.parameters
        now = _settled_versions(parameters)
        for p, old, new in zip(parameters, self._parameter_versions, now, strict=False):
            _refuse_changed(old is not None and new != old, self._label, p)

    def _forget_at_the_end(self) -> None:
        """What this backward does not ask for is not kept until the next."""
        if torch._C._current_graph_task_id() == -1:
            return
        reference = weakref.ref(self)

        def forget() -> None:
            frame = reference()
            if frame is not None:
                frame._values.clear()

        torch.autograd.Variable._execution_engine.queue_callback(forget)


def _unpack(packed: _Kept | _Dropped) -> Tensor:
    return packed.unpack()


def _refuse_changed(is_changed: bool, label: str, tensor: Tensor) -> None:
    """Autograd's own words: it refuses the same, where it sees it."""
    if is_changed:
        raise UnsupportedError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {_text(tensor)}, which {label} computes with, after its forward and "
            f"before its backward. {_ELSE}"
        )


def _text(tensor: Tensor) -> str:
    with plain_torch():
        return f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"


def _settled_versions(parameters: Sequence[nn.Parameter]) -> list[int | None]:
    """The version of each; None if an update of it is put off: then nobody has used it yet."""
    with plain_torch():
        return [None if _awaits_update(p) else _version(p) for p in parameters]


def _awaits_update(parameter: nn.Parameter) -> bool:
    home = home_of(parameter)
    return home is not None and home.chunk.before_use is not None


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided
