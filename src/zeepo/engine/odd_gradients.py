"""Sparse and differentiable gradients, which are in no slot: the whole parameter is updated, as
torch would do it."""

from __future__ import annotations

from zeepo.engine.managed import Home, home_of, plain_torch, read_autograd_grad
from zeepo.engine.manager import Manager
from zeepo.engine.states import States
from zeepo.optim.shadow import Recipe, State


def update_with_odd_gradient(
    manager: Manager, states: States, recipe: Recipe, target: tuple[Home, int], visible: State
) -> None:
    """Update a parameter, of a group, whose states the user sees as `visible`."""
    home, group = target
    states.take_in_all(home, visible)
    chunks = {v.chunk.key: v.chunk for v in map(home_of, visible.values()) if v is not None}
    leased = [home.chunk, *chunks.values()]
    manager.store.lease(leased)
    try:
        with plain_torch():
            tensor = home.plain.detach()
            assert home.parameter is not None
            tensor.grad = read_autograd_grad(home.parameter)
            state = {k: h.plain if (h := home_of(v)) else v for k, v in visible.items()}
            new = recipe.run_on({group: [tensor]}, {tensor: state} if state else {})
        for changed in leased:
            manager.store.mark_changed(changed)
    finally:
        manager.store.release(leased)
    for name, value in new.get(tensor, {}).items():
        if home_of(visible.get(name)) is None:
            visible[name] = value
    states.take_in_all(home, visible)
