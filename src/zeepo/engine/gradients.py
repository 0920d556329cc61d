"""Gradients: from autograd into their slots, and back to whoever reads `p.grad`.

Autograd leaves each new gradient on the parameter. `absorb` takes it from there: the first
contribution is adopted as it is (no copy), a later one is added in place, the very operation
autograd would have done. Between backward passes autograd's own field is empty, and `p.grad` is
answered from the slot.

Left on the parameter, as torch keeps them: sparse gradients, and those of
`backward(create_graph=True)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from zeepo.chunks.storages import is_exclusive, new_storage, take_memory
from zeepo.chunks.store import Chunk, ChunkStore
from zeepo.chunks.wholes import attach_lower, renew_copy
from zeepo.engine.forgetting import forget
from zeepo.engine.managed import (
    Home,
    Manager,
    home_of,
    mark_managed,
    plain_torch,
    read_autograd_grad,
    write_autograd_grad,
)
from zeepo.engine.reduction import Reduction
from zeepo.errors import UnsupportedError
from zeepo.sabotage import sabotaged


class Gradients:
    """Gradient slots of the managed parameters."""

    def __init__(self, manager: Manager, store: ChunkStore, chunk_for: Callable[[Home], Chunk]):
        self._manager = manager
        self._store = store
        self._chunk_for = chunk_for
        """The GRAD chunk that goes with a parameter's PARAM chunk; same slots."""
        self._reduction: Reduction | None = None
        self._unwanted: dict[int, list[Tensor]] = {}
        """GRAD chunk -> what was dropped while an update of the chunk waits that may need it."""
        self.before_arrival: Callable[[Home], None] | None = None
        """Told when autograd has accumulated into a parameter, before the slot is changed."""
        self.use_up: Callable[[Home], bool] | None = None
        """Asked before the slot is changed: whether what arrived was used up at once."""
        self.on_arrival: Callable[[Home], None] | None = None
        """Told afterwards: the slot has the sum."""
        self.check: Callable[[Home, bool], None] | None = None
        """Asked before the user gets at a gradient."""

    def take_over(self, home: Home) -> None:
        """Autograd has accumulated into a parameter."""
        if self.before_arrival is not None:
            self.before_arrival(home)
        if self.use_up is not None and self.use_up(home):
            return
        self.absorb(home)
        if self.on_arrival is not None:
            self.on_arrival(home)

    def absorb(self, home: Home) -> None:
        """Move what autograd left on the parameter into its slot."""
        parameter = home.parameter
        assert parameter is not None
        new = read_autograd_grad(parameter)
        if new is None:
            return
        with torch.no_grad(), plain_torch():
            if self._reduction is not None:
                _refuse_unreducible(home, new)
            if new.layout is not torch.strided or new.dtype != parameter.dtype:
                return
            if new.requires_grad:
                self._keep_differentiable(home, new)
                return
            write_autograd_grad(parameter, None)
            if self._reduction is not None:
                self._contribute(home, new)
            elif home.grad is None or sabotaged("grad.overwrite"):
                self.drop(home)
                try:
                    self._adopt(home, new)
                except BaseException:
                    write_autograd_grad(parameter, new)  # no room: the gradient is not lost
                    raise
            else:
                self._add(home.grad, new)

    def use_ranks(self, reduction: Reduction) -> None:
        """Gradients are contributions from now on, until they are reduced."""
        self._reduction = reduction

    def _contribute(self, home: Home, new: Tensor) -> None:
        """Keep what backward made, in the parameter's order in memory, until it is reduced."""
        assert self._reduction is not None
        self._reduction.proceed()
        if home.contribution is not None:
            self._add(home.contribution, new)
            self._reduction.contributed(home)
            return
        if new.stride() != home.plain.stride() or not is_exclusive(new):
            new = torch.empty_like(home.plain).copy_(new)
        chunk = self._reduction.contribution_chunk(home.chunk)
        self._store.adopt(chunk, home.index, new.untyped_storage())
        mark_managed(new, Home(self._manager, chunk, home.index, home.name + ".grad", new.detach()))
        home.contribution = new
        self._reduction.contributed(home)

    def reduce(self, slots: Mapping[int, Sequence[Home]]) -> None:
        """The end of a backward: the ranks' contributions have become everybody's gradients."""
        assert self._reduction is not None
        for homes in slots.values():
            for home in homes:  # backward(inputs=...) calls no hooks
                self.absorb(home)
        for key, indices in self._reduction.end_backward().items():
            grads = self._chunk_for(slots[key][0])
            renew_copy(self._store, grads)
            for home in slots[key]:
                if home.grad is None and home.index in indices:
                    home.grad = self._shell(home, grads)

    def _drop_contribution(self, home: Home) -> None:
        contribution, home.contribution = home.contribution, None
        if contribution is not None:
            forget(self._store, contribution)

    def _shell(self, home: Home, chunk: Chunk) -> Tensor:
        """A gradient whose bytes the ranks hold: gathered when somebody reads it."""
        with plain_torch():
            grad = torch.empty(0, dtype=home.plain.dtype)
            grad = grad.set_(new_storage(0), 0, home.plain.shape, home.plain.stride())
            storage = grad.untyped_storage()
        take_memory(storage)
        attach_lower(chunk, home.index, storage)
        name = home.name + ".grad"
        mark_managed(grad, Home(self._manager, chunk, home.index, name, grad.detach()))
        return grad

    def _add(self, to: Tensor | None, new: Tensor) -> None:
        grad_home = home_of(to)
        assert grad_home is not None
        if sabotaged("grad.drop"):
            return
        self._store.lease([grad_home.chunk])
        try:
            grad_home.plain.add_(new)
            self._store.mark_changed(grad_home.chunk)
        finally:
            self._store.release([grad_home.chunk])

    def _adopt(self, home: Home, new: Tensor) -> None:
        if not is_exclusive(new):
            new = new.clone(memory_format=torch.preserve_format)
            if not is_exclusive(new):
                new = new.contiguous().clone()
        chunk = self._chunk_for(home)
        self._store.adopt(chunk, home.index, new.untyped_storage())
        grad_home = Home(self._manager, chunk, home.index, home.name + ".grad", new.detach())
        mark_managed(new, grad_home)
        home.grad = new

    def _keep_differentiable(self, home: Home, new: Tensor) -> None:
        """`backward(create_graph=True)`: the sum carries a graph, so it stays with autograd."""
        grad_home = home_of(home.grad)
        if grad_home is None:
            return
        assert home.parameter is not None
        self._store.lease([grad_home.chunk])
        try:
            with torch.enable_grad():
                total = grad_home.plain + new
        finally:
            self._store.release([grad_home.chunk])
        self.drop(home)
        write_autograd_grad(home.parameter, total)

    def read(self, home: Home) -> Tensor | None:
        """What `p.grad` is."""
        if self.check is not None:
            self.check(home, False)
        return self.held(home)

    def held(self, home: Home) -> Tensor | None:
        """The gradient there is, wherever it is."""
        assert home.parameter is not None
        self.absorb(home)
        if home.contribution is not None:
            return home.contribution
        if home.grad is not None:
            return home.grad
        return read_autograd_grad(home.parameter)

    def write(self, home: Home, value: Tensor | None) -> None:
        """`p.grad = value`."""
        assert home.parameter is not None
        if self.check is not None:
            self.check(home, True)
        if value is not None and value is home.grad:
            return
        if value is not None and home_of(value) is not None:
            value = value.detach().clone(memory_format=torch.preserve_format)
        if value is None and sabotaged("zero.keep"):
            return
        write_autograd_grad(home.parameter, value)
        self.drop(home)
        if self._reduction is not None and value is not None:
            self._replace(home, self._reduction)
        else:
            self.absorb(home)

    def _replace(self, home: Home, reduction: Reduction) -> None:
        """`p.grad = value` with several ranks: the same on all of them, and reduced already."""
        assert home.parameter is not None
        value = read_autograd_grad(home.parameter)
        assert value is not None
        if value.layout is not torch.strided or value.dtype != home.plain.dtype:
            return
        write_autograd_grad(home.parameter, None)
        with torch.no_grad(), plain_torch():
            reduction.replace(home, torch.empty_like(home.plain).copy_(value))
            grads = self._chunk_for(home)
            renew_copy(self._store, grads)
            home.grad = self._shell(home, grads)

    def drop(self, home: Home) -> None:
        """Forget a gradient; one that the user still holds becomes an ordinary tensor."""
        self._drop_contribution(home)
        grad, home.grad = home.grad, None
        grad_home = home_of(grad)
        if grad is None or grad_home is None:
            return
        if grad_home.chunk.before_use is not None:
            self._unwanted.setdefault(grad_home.chunk.key, []).append(grad)
        else:
            forget(self._store, grad)

    def forget_unwanted(self, chunk: Chunk) -> None:
        """The update of a GRAD chunk is done: what was dropped before leaves its slot."""
        dropped = self._unwanted.pop(chunk.key, [])
        while dropped:
            grad = dropped.pop()
            forget(self._store, grad)


def _refuse_unreducible(home: Home, new: Tensor) -> None:
    """What would stay on the parameter would be this rank's own, and the update with it."""
    if new.layout is not torch.strided:
        what, advice = "a sparse gradient", "Use sparse=False for its nn.Embedding"
    elif new.requires_grad:
        what, advice = (
            "a gradient with a graph, from backward(create_graph=True)",
            "Use torch.autograd.grad(create_graph=True) for the inner derivative",
        )
    else:
        return
    raise UnsupportedError(
        f"{home.name} has {what}: this version cannot reduce it over several ranks. {advice}, or "
        "train on one rank."
    )
