"""Layer-major accumulation: all micro-batches pass a unit while it is resident.

One after the other, micro-batches read every parameter once each. Here each micro-batch has a
thread, and exactly one of them runs: it hands its turn to the next when it is about to use another
unit than the one it is in. So the first goes through a unit, then the second, ..., and only then
does the first go on. Forwards and backwards interleave in the same way, and each parameter still
gets its gradients in the order of the micro-batches: the same bits as one after the other, while
parameters are read once per step.

What would change a number is refused: random numbers (they would be drawn in another order),
buffers that change while backward recomputes, and micro-batches that take different ways (gradients
would be added in another order).

[Note: order]
Autograd holds a lock while a gradient is accumulated, so a thread cannot wait there for the
others; it can only see that they were there before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeepo.engine.manager import Manager
from zeepo.engine.ordinary_context import is_ordinary_context
from zeepo.engine.recompute import Recompute
from zeepo.engine.turns import INSTEAD, Turns
from zeepo.errors import UnsupportedError


def run_layer_major(
    manager: Manager,
    recompute: Recompute,
    models: Sequence[nn.Module],
    compute_loss: Callable[..., Tensor],
    micro_batches: Sequence[Any],
) -> list[Tensor]:
    """Forward and backward of every micro-batch, unit by unit; returns their losses."""
    if manager.ranks is not None or recompute.is_installed:
        what = "several ranks" if manager.ranks is not None else "activations='recompute'"
        raise UnsupportedError(
            f"session.accumulate does not work with {what} in this version. {INSTEAD}."
        )
    if not is_ordinary_context() or not torch.is_grad_enabled():
        raise UnsupportedError(
            "session.accumulate was called inside autocast, no_grad or another mode, which its "
            "threads would not have. Enter the mode inside the function you give it."
        )
    losses: list[Tensor | None] = [None] * len(micro_batches)
    buffers = [buffer for model in models for buffer in model.buffers()]
    turns = Turns(len(micro_batches), buffers)
    num_threads = torch.get_num_threads()
    random_state = torch.get_rng_state()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def train(number: int) -> None:
        assert torch.get_num_threads() == num_threads
        batch = micro_batches[number]
        with _saving_as(hooks):
            loss = compute_loss(*(batch if isinstance(batch, tuple) else (batch,)))
            _refuse_random(random_state)
            loss.backward()  # type: ignore[no-untyped-call]
            losses[number] = loss.detach()

    threads = [
        threading.Thread(
            target=turns.run, args=(number, train), name=f"micro-batch {number}", daemon=True
        )
        for number in range(len(micro_batches))
    ]
    with _switching(manager, turns):
        for thread in threads:
            thread.start()
        try:
            _wait_for_micro_batches(threads)
        except BaseException as error:  # Ctrl-C comes to this thread: the others must not go on
            turns.failure = error
            _wait_for_micro_batches(threads)
            raise
    if turns.failure is not None:
        raise turns.failure
    return [loss for loss in losses if loss is not None]


def _wait_for_micro_batches(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def _switching(manager: Manager, turns: Turns) -> Iterator[None]:
    """Whoever is about to use another unit hands on its turn."""
    manager.node_leases.turns = turns
    manager.gradients.before_arrival = turns.contributes
    try:
        yield
    finally:
        manager.node_leases.turns = manager.gradients.before_arrival = None


@contextlib.contextmanager
def _saving_as(hooks: Any) -> Iterator[None]:
    """With the caller's hooks for what autograd saves: they belong to the thread that set them."""
    if hooks is None:
        yield
        return
    torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
    try:
        yield
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _refuse_random(before: Tensor) -> None:
    if not torch.equal(torch.get_rng_state(), before):
        raise UnsupportedError(
            "the model draws random numbers (dropout): session.accumulate would draw them in "
            f"another order than micro-batch after micro-batch. {INSTEAD}, or without dropout."
        )
