"""Observing a training program from inside its process, the same way plainly and under zeepo.

Losses are what is given to backward; gradients are read before a step (after it when a closure
computes them inside), parameters, optimizer state and buffers after it, and once more at the end,
when the session is closed. torch's own global step hooks give the moments, so nothing of the
user's is replaced but `torch.autograd.backward`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zeepo.engine.late import live_models
from zeepo.engine.managed import home_of
from zeepo.verify.job import Batch, Item
from zeepo.verify.values import Value, values_of

Observation = tuple[Item, Value]
Source = Callable[[], Iterable[Observation]]
Emit = Callable[[Batch, Source], None]


@dataclass
class Watched:
    """An optimizer that has stepped, and the modules it trains."""

    number: int
    optimizer: Optimizer
    models: list[nn.Module]
    num_steps: int = 0


class Watcher:
    """Turns what a program does into batches, each given to `emit` with a way to read it again."""

    def __init__(self, emit: Emit, num_steps: int, observe_all: bool, finish: Callable[[], None]):
        self._emit = emit
        self._num_steps = num_steps
        self._observe_all = observe_all
        self._finish = finish
        """Called when enough steps were seen; does not return."""
        self._watched: dict[int, Watched] = {}
        self._losses: list[Tensor] = []
        self._in_backward = False
        self._names: dict[int, str] = {}

    def install(self) -> None:
        """Start observing this process."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            # Checkpointing calls backward inside backward: those are no losses.
            if self._in_backward:
                original(tensors, *args, **kwargs)
                return
            losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            self._losses += [loss.detach().clone() for loss in losses]
            self._in_backward = True
            try:
                original(tensors, *args, **kwargs)
            finally:
                self._in_backward = False

        torch.autograd.backward = backward

    @property
    def num_steps(self) -> int:
        """Steps of the optimizer that made the most."""
        return max((w.num_steps for w in self._watched.values()), default=0)

    # -- the moments ------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watched = self._watch(optimizer)
        if not _has_closure(args, kwargs):
            self._batch(watched, lambda: self._before_update(watched))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watched = self._watch(optimizer)
        if _has_closure(args, kwargs):
            self._batch(watched, lambda: self._before_update(watched))
        if self._observe_all:
            self._batch(watched, lambda: self._results(watched, watched.num_steps + 1, ""))
        watched.num_steps += 1
        if self._is_enough():
            self._finish()

    def at_the_end(self) -> None:
        """Every value once more; the session, if there was one, is closed."""
        self._send(self.num_steps, True, self._final_results)

    def _is_enough(self) -> bool:
        """Every optimizer in use made its steps, or one of them (a GAN's) twice as many."""
        counts = [w.num_steps for w in self._watched.values()]
        return min(counts) >= self._num_steps or max(counts) >= 2 * self._num_steps

    # -- batches ----------------------------------------------------------------------------------

    def _batch(self, watched: Watched, source: Source) -> None:
        self._send(watched.num_steps + 1, False, source)
        self._losses = []

    def _send(self, step: int, is_final: bool, source: Source) -> None:
        items = tuple(item for item, _ in source())
        if items or is_final:
            self._emit(Batch(step, is_final, items), source)

    def _before_update(self, watched: Watched) -> Iterator[Observation]:
        step = watched.num_steps + 1
        yield from self._read_losses(step)
        if self._observe_all:
            for key, p in _parameters(watched):
                name = self._name(p, key)
                yield from _observe("gradient", step, key, name, unit_of(p), p.grad)

    def _read_losses(self, step: int) -> Iterator[Observation]:
        for number, loss in enumerate(self._losses):
            name = "loss" if len(self._losses) == 1 else f"loss {number}"
            yield from _observe("loss", step, f"loss{number}", name, "", loss)

    def _results(self, watched: Watched, step: int, when: str) -> Iterator[Observation]:
        """Parameters, optimizer state, settings and buffers."""
        optimizer = watched.optimizer
        for key, p in _parameters(watched):
            name = self._name(p, key)
            yield from _observe("parameter" + when, step, key, name, unit_of(p), p)
        for key, p in _parameters(watched):
            for part, value in optimizer.state[p].items() if p in optimizer.state else ():
                name, key_part = f"{self._name(p, key)}: {part}", f"{key}.{part}"
                yield from _observe(
                    "optimizer state" + when, step, key_part, name, unit_of(p), value
                )
        for index, group in enumerate(optimizer.param_groups):
            settings = {name: value for name, value in group.items() if name != "params"}
            key, name = f"optimizer{watched.number}.group{index}", f"group {index}"
            yield from _observe("optimizer state" + when, step, key, name, "", settings)
        for number, model in enumerate(watched.models):
            for name, buffer in model.named_buffers():
                key = f"optimizer{watched.number}.model{number}.{name}"
                yield from _observe("buffer" + when, step, key, name, "", buffer)

    def _final_results(self) -> Iterator[Observation]:
        yield from self._read_losses(self.num_steps + 1)
        when = " at the end"
        for watched in self._watched.values():
            yield from self._results(watched, watched.num_steps, when)
        trained = {id(p) for w in self._watched.values() for _, p in _parameters(w)}
        for watched in self._watched.values():
            for number, model in enumerate(watched.models):
                for name, p in model.named_parameters():
                    if id(p) not in trained:
                        key = f"optimizer{watched.number}.model{number}.{name}"
                        yield from _observe("parameter" + when, watched.num_steps, key, name, "", p)

    def _watch(self, optimizer: Optimizer) -> Watched:
        watched = self._watched.get(id(optimizer))
        if watched is None:
            number = len(self._watched)
            watched = Watched(number, optimizer, _trained_by(optimizer))
            self._watched[id(optimizer)] = watched
            for model in watched.models:
                for name, p in model.named_parameters():
                    self._names.setdefault(id(p), name)
        return watched

    def _name(self, parameter: Tensor, key: str) -> str:
        """The user's name of a parameter, or its place in the optimizer."""
        return self._names.get(id(parameter), key)


def _observe(
    phase: str, step: int, key: str, name: str, unit: str, value: Any
) -> Iterator[Observation]:
    for path, part in values_of("", value):
        digest = xxhash.xxh3_128_hexdigest(part.data)
        item = Item(phase, step, key + path, name + path, unit, part.kind, part.shape, digest)
        yield item, part


def _parameters(watched: Watched) -> Iterator[tuple[str, Tensor]]:
    for group_index, group in enumerate(watched.optimizer.param_groups):
        for index, p in enumerate(group["params"]):
            yield f"optimizer{watched.number}.group{group_index}.{index}", p


def _trained_by(optimizer: Optimizer) -> list[nn.Module]:
    """The outermost modules with this optimizer's parameters, in the order of the parameters."""
    order = {id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}

    def place(model: nn.Module) -> tuple[int, int, str]:
        places = [order[id(p)] for p in model.parameters() if id(p) in order]
        return min(places), -len(places), type(model).__qualname__

    return sorted(live_models([optimizer]), key=place)


def unit_of(value: object) -> str:
    """The unit that holds a managed tensor; empty for an ordinary one."""
    home = home_of(value)
    return home.chunk.label if home is not None else ""


def _has_closure(args: Any, kwargs: Any) -> bool:
    return any(callable(value) for value in (*args[1:], *kwargs.values()))
