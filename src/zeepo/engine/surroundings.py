"""What a forward reads besides its arguments, so that it can be run again as it was.

Random numbers (torch's, Python's, numpy's), autocast, torch's settings, and the modules themselves:
their attributes, buffers, parameters and which of those require gradients. While a recomputation
runs, the modules have other `__dict__`s with copies of what they held before the forward, so
whatever it changes there (BatchNorm's statistics, a counter) is thrown away with them.

Out of reach, and so changed twice: globals, and objects that a module keeps which are neither
tensors nor containers nor generators.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from zeepo.engine.managed import home_of, plain_torch
from zeepo.engine.structures import StructureCopy
from zeepo.sabotage import sabotaged

SMALL_BUFFER_BYTES = 64 << 10
"""Copies of buffers up to this size are kept whether the forward changed them or not."""

_HOOKS = frozenset(nn.Module().__dict__) - {"training", "_parameters", "_buffers", "_modules"}

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
)


class Surroundings:
    """Those of one forward, taken before it."""

    def __init__(self, modules: Sequence[nn.Module]):
        self._random = _RandomState()
        self._autocast = _autocast_state()
        self._settings = [read() for read, _ in _SETTINGS]
        self._buffers: dict[int, tuple[Tensor, Tensor | None]] = {}
        """id of a buffer -> itself, and a copy unless the forward left it alone."""
        attributes = StructureCopy(self._keep, objects=False)
        self._attributes = [(module, _copied(module.__dict__, attributes)) for module in modules]
        self.parameters = list(
            {id(p): p for m in modules for p in m._parameters.values() if p is not None}.values()
        )
        with plain_torch():
            self._trainable = [p.requires_grad for p in self.parameters]

    def _keep(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or home_of(tensor) is not None:
            return tensor
        if tensor.requires_grad:  # not with its graph: that may hold the step before
            return tensor.detach().requires_grad_()
        self._buffers[id(tensor)] = (tensor, tensor.detach().clone())
        return tensor

    @property
    def buffers(self) -> list[Tensor]:
        return [buffer for buffer, _ in self._buffers.values()]

    def settle(self) -> None:
        """After the forward: copies of large buffers that it did not change are not needed."""
        for key, (buffer, before) in self._buffers.items():
            if before is None or before.nbytes <= SMALL_BUFFER_BYTES:
                continue
            # By value: BatchNorm's kernels do not count their changes of running statistics.
            # In a run on shapes there are no values; large buffers mostly are constants.
            if buffer.layout is torch.strided and (is_fake(buffer) or torch.equal(buffer, before)):
                self._buffers[key] = (buffer, None)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Everything as it was before the forward; afterwards as it is now."""
        now = _RandomState()
        settings = [read() for read, _ in _SETTINGS]
        dicts = [module.__dict__ for module, _ in self._attributes]
        with plain_torch():
            trainable = [p.requires_grad for p in self.parameters]
        fresh = StructureCopy(self._as_before, objects=False)
        try:
            _set_trainable(self.parameters, self._trainable)
            for module, attributes in self._attributes:
                if not sabotaged("recompute.modules"):
                    _set_dict(module, _copied(attributes, fresh))
            _apply(self._settings)
            if not sabotaged("recompute.random"):
                self._random.apply()
            enabled, dtype, cached = self._autocast
            with torch.autocast("cpu", dtype, enabled=enabled, cache_enabled=cached):
                yield
        finally:
            now.apply()
            _apply(settings)
            for (module, _), attributes in zip(self._attributes, dicts, strict=True):
                _set_dict(module, attributes)
            _set_trainable(self.parameters, trainable)

    def _as_before(self, tensor: Tensor) -> Tensor:
        _, before = self._buffers.get(id(tensor), (tensor, None))
        return tensor if before is None else before.clone()


class _RandomState:
    """The state of the process's random number generators."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = numpy.random.get_state()

    def apply(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)


def _copied(attributes: dict[str, Any], copies: StructureCopy) -> dict[str, Any]:
    return {
        name: value if name in _HOOKS else copies.of(value) for name, value in attributes.items()
    }


def _set_dict(module: nn.Module, attributes: dict[str, Any]) -> None:
    object.__setattr__(module, "__dict__", attributes)


def _set_trainable(parameters: Sequence[nn.Parameter], wanted: Sequence[bool]) -> None:
    with plain_torch():
        for p, requires_grad in zip(parameters, wanted, strict=True):
            if p.requires_grad != requires_grad:
                p.requires_grad_(requires_grad)


def _autocast_state() -> tuple[bool, torch.dtype, bool]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


def _apply(settings: Sequence[Any]) -> None:
    for (read, write), value in zip(_SETTINGS, settings, strict=True):
        if read() != value:
            write(value)
