"""Modules that must see ordinary parameters while they run.

Two kinds of code look at a tensor's class and behave otherwise when it intercepts:
`torch.compile`, and the fast paths of torch's transformer modules in evaluation. While such a
module runs, all its parameters are leased and wear the ordinary class, and the backward nodes it
made get their leases when it returns.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from zeepo.chunks.store import Chunk
from zeepo.engine.activations import Activations
from zeepo.engine.entrances import watch_entrances
from zeepo.engine.managed import ManagedParameter, plain_torch
from zeepo.engine.manager import Manager

_FAST_PATHS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


def is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def largest_region_bytes(model: nn.Module) -> int:
    """Parameter bytes of the largest module that has to be whole while it runs."""
    sizes = [
        sum(p.numel() * p.element_size() for p in module.parameters())
        for module in model.modules()
        if isinstance(module, _FAST_PATHS) or is_compiled(module)
    ]
    return max(sizes, default=0)


class Region:
    """Parameters that are leased and wear the ordinary class for a while."""

    def __init__(self, manager: Manager, parameters: Iterable[nn.Parameter], *, lease: bool = True):
        self._manager = manager
        self._homes = [home for home in map(manager.home, parameters) if home is not None]
        self._changed = [
            home.parameter for home in self._homes if type(home.parameter) is ManagedParameter
        ]
        chunks = {home.chunk.key: home.chunk for home in self._homes} if lease else {}
        self._chunks: list[Chunk] = list(chunks.values())
        manager.store.lease(self._chunks)
        for p in self._changed:
            p.__class__ = nn.Parameter  # type: ignore[assignment]
        self._first_node = torch._C._autograd._get_sequence_nr()

    def leave(self, result: Any) -> None:
        for p in self._changed:
            p.__class__ = ManagedParameter
        try:
            if self._chunks:
                with plain_torch():
                    self._manager.finish(result, (), self._homes, self._chunks, self._first_node)
        finally:
            self._manager.store.release(self._chunks)


class Regions:
    """Region hooks of a session."""

    def __init__(
        self,
        manager: Manager,
        activations: Activations | None,
        before_compiled: Callable[[], None],
    ):
        self._manager = manager
        self._activations = activations
        self._before_compiled = before_compiled
        self._undo: list[Any] = []

    def install(self, models: Sequence[nn.Module]) -> None:
        for model in models:
            for module in model.modules():
                if module._compiled_call_impl is not None:
                    self._wrap_compiled(module)
        for cls in (*_FAST_PATHS, nn.TransformerEncoder):
            self._patch_fast_path(cls)
        self._patch_torch()
        self._undo.append(watch_entrances(self._manager))

    # -- torch's fast paths ------------------------------------------

    def _patch_fast_path(self, cls: Any) -> None:
        """Patched on the class: hooks on the user's modules would be copied and pickled along."""
        regions, original = self, cls.forward

        @functools.wraps(original)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.training or torch.compiler.is_compiling():
                return original(self, *args, **kwargs)
            region = regions._fast_path_region(self)
            result: Any = ()
            try:
                result = original(self, *args, **kwargs)
            finally:
                region.leave(result)
            return result

        cls.forward = forward

        def undo() -> None:
            cls.forward = original

        self._undo.append(undo)

    def _fast_path_region(self, module: nn.Module) -> Region:
        """An encoder only looks at its first layer; each layer is a region of its own."""
        if isinstance(module, nn.TransformerEncoder):
            first = module.layers[0] if len(module.layers) else module
            return Region(self._manager, first.parameters(), lease=False)
        return Region(self._manager, module.parameters())

    # -- torch.compile ------------------------------------------

    def _run_compiled(self, module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        self._before_compiled()
        region = Region(self._manager, module.parameters())
        result: Any = ()
        # The same graph as without zeepo: the compiler looks at saved-tensor hooks.
        paused = self._activations.paused() if self._activations else contextlib.nullcontext()
        try:
            with paused:
                result = call(*args, **kwargs)
        finally:
            region.leave(result)
        return result

    def _wrap_compiled(self, module: nn.Module) -> None:
        compiled = module._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._run_compiled(module, compiled, args, kwargs)

        module._compiled_call_impl = call

        def undo() -> None:
            module._compiled_call_impl = compiled

        self._undo.append(undo)

    def _patch_torch(self) -> None:
        """Modules compiled before or after init, wherever they are kept.

        Importing torch's compiler takes seconds and memory, so it is patched only once it is there.
        """
        if "torch._dynamo.eval_frame" in sys.modules:
            self._patch_compiled_modules()
            return
        regions, original = self, torch.compile

        def compile_and_patch(*args: Any, **kwargs: Any) -> Any:

            undo()
            regions._patch_compiled_modules()
            return original(*args, **kwargs)

        def undo() -> None:
            torch.compile = original

        torch.compile = compile_and_patch
        self._undo.append(undo)

    def _patch_compiled_modules(self) -> None:
        from torch._dynamo.eval_frame import OptimizedModule

        regions = self
        original_call = OptimizedModule.__call__
        original_compile = nn.Module.compile

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            def inner(*a: Any, **k: Any) -> Any:
                return original_call(self, *a, **k)

            return regions._run_compiled(self, inner, args, kwargs)

        def compile_in_place(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            original_compile(self, *args, **kwargs)
            regions._wrap_compiled(self)

        OptimizedModule.__call__ = call  # type: ignore[method-assign]
        nn.Module.compile = compile_in_place  # type: ignore[method-assign]

        def undo() -> None:
            OptimizedModule.__call__ = original_call  # type: ignore[method-assign]
            nn.Module.compile = original_compile  # type: ignore[method-assign]

        self._undo.append(undo)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()
