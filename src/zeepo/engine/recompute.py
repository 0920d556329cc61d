"""`activations="recompute"`: segments of the model keep their input and compute the rest again.

While a session is open, the `forward` of the segments' classes (planner/segments.py) is ours: a
call of a segment in which gradients are recorded runs in a frame (engine/frame.py), any other call
runs as always. Patched on the class, because what is set on the user's modules would be copied and
pickled along. A module's own hooks are outside its forward and fire once, as plainly; a segment
with the user's hooks inside runs plainly, since a second run would fire them again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext

from zeepo.engine.frame import Arguments, Frame
from zeepo.engine.regions import is_compiled
from zeepo.engine.structures import NotCopyableError
from zeepo.planner import footprint
from zeepo.planner.segments import Segment, find_segments


class Recompute:
    """The segments of a session."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Runner] = {}
        """id of a module that is a segment -> how it is run."""
        self._sequences: dict[int, _Sequence] = {}
        """id of an nn.Sequential with runs -> how it is run."""
        self._undo: list[Callable[[], None]] = []

    def install(self, models: Sequence[nn.Module]) -> None:
        segments = [segment for model in models for segment in find_segments(model, is_compiled)]
        for segment in segments:
            owner = segment.owner
            if segment.is_run:
                sequence = self._sequences.setdefault(id(owner), _Sequence(owner))
                sequence.add(_Runner(segment))
            else:
                self._blocks[id(owner)] = _Runner(segment)
        owners = [type(segment.owner) for segment in segments]
        for cls in dict.fromkeys(_class_of_forward(owner) for owner in owners):
            self._patch(cls)

    @property
    def is_installed(self) -> bool:
        return bool(self._undo)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def explain(self) -> str:
        """What is recomputed, and what is not although it was meant to be."""
        runners = [*self._blocks.values()]
        for sequence in self._sequences.values():
            runners += sequence.runners
        lines = [f"{len(runners)} segments are recomputed in backward"]
        lines += [f"  {r.name}: not recomputed, {r.obstacle}" for r in runners if r.obstacle]
        return "\n".join(lines)

    def _patch(self, cls: Any) -> None:
        recompute, original = self, cls.forward

        @functools.wraps(original)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not _may_recompute():
                return original(self, *args, **kwargs)
            runner = recompute._blocks.get(id(self))
            if runner is not None:
                return runner.run(functools.partial(original, self), args, kwargs)
            sequence = recompute._sequences.get(id(self))
            if sequence is not None and len(args) == 1 and sequence.is_as_it_was():
                return sequence.run(args[0])
            return original(self, *args, **kwargs)

        cls.forward = forward

        def undo() -> None:
            cls.forward = original

        self._undo.append(undo)


class _Runner:
    """Runs one segment."""

    def __init__(self, segment: Segment):
        self.name = segment.name
        self.obstacle = ""
        """Why it was last run plainly although gradients were recorded; empty if it was not."""
        self.segment = segment
        self._may_change_arguments = True
        """Until a call has shown that it does not."""

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        inside = [inner for module in self.segment.modules for inner in module.modules()]
        self.obstacle = self._hooks_inside(inside)
        if self.obstacle:
            return call(*args, **kwargs)
        try:
            arguments = Arguments(args, kwargs)
        except NotCopyableError as error:
            self.obstacle = f"its arguments cannot be kept ({error})"
            return call(*args, **kwargs)
        if self._may_change_arguments and arguments.share_memory():
            # Copies would not share it. Once it has left its arguments alone no copies are needed.
            result = call(*args, **kwargs)
            self._may_change_arguments = arguments.are_changed()
            self.obstacle = "it changes arguments that share memory" * self._may_change_arguments
            return result
        frame = Frame(self.name, call, inside, arguments)
        result = frame.run(args, kwargs, may_change_arguments=self._may_change_arguments)
        self._may_change_arguments = frame.changes_arguments
        return result

    def _hooks_inside(self, inside: Sequence[nn.Module]) -> str:
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return "there are hooks for all modules of the process"
        for module in inside:
            is_outside = module is self.segment.owner
            if not is_outside and (module._forward_hooks or module._forward_pre_hooks):
                hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
                if not all(type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks):
                    return f"a {type(module).__name__} in it has forward hooks"
        return ""


class _Sequence:
    """Runs an nn.Sequential some of whose children run together as segments."""

    def __init__(self, owner: nn.Module):
        self.runners: list[_Runner] = []
        self._owner = owner
        self._children = list(owner.children())
        self._starts: dict[int, tuple[_Runner, Segment]] = {}

    def add(self, runner: _Runner) -> None:
        segment = runner.segment
        self.runners.append(runner)
        self._starts[id(segment.modules[0])] = (runner, segment)

    def is_as_it_was(self) -> bool:
        now = self._owner._modules.values()
        return len(now) == len(self._children) and all(map(_is, now, self._children))

    def run(self, value: Any) -> Any:
        number = 0
        while number < len(self._children):
            child = self._children[number]
            if id(child) in self._starts:
                runner, segment = self._starts[id(child)]
                value = runner.run(functools.partial(_in_order, segment.modules), (value,), {})
                number += len(segment.modules)
            else:
                value = child(value)
                number += 1
        return value


def _in_order(modules: Sequence[nn.Module], value: Any) -> Any:
    for module in modules:
        value = module(value)
    return value


def _is(one: object, other: object) -> bool:
    return one is other


def _class_of_forward(cls: type) -> type:
    return next(base for base in cls.__mro__ if "forward" in base.__dict__)


def _may_recompute() -> bool:
    """Whether gradients are recorded and nobody else decides what becomes of what they need.

    In backward a forward runs only because somebody recomputes already, and inside saved-tensor
    hooks (the user's own checkpointing) it is theirs to say what is kept. A run on shapes does what
    a step will do.
    """
    autograd: Any = torch._C._autograd  # torch's stubs do not know these
    modes: Any = torch.overrides._get_current_function_mode_stack
    hooks = autograd._top_saved_tensors_default_hooks(True)
    is_simulation = hooks is not None and hooks[0].__module__ == footprint.__name__
    return (
        torch.is_grad_enabled()
        and torch._C._current_graph_task_id() == -1
        and autograd._saved_tensors_hooks_is_enabled()
        and (hooks is None or is_simulation)
        and torch._C._functorch.maybe_current_level() is None
        and torch.autograd.forward_ad._current_level < 0
        and (torch._C._len_torch_dispatch_stack() == 0 or is_simulation)
        and not torch._C._is_tracing()
        and not parametrize._cache_enabled
        and all(isinstance(mode, DeviceContext) for mode in modes())
    )
