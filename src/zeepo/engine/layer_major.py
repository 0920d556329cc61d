"""Layer-major accumulation: all micro-batches pass a unit while it is resident.

One after the other, micro-batches read every parameter once each. Here each micro-batch has a
thread, and exactly one of them runs: it hands its turn to the next when it is about to use another
unit than the one it is in. So the first goes through a unit, then the second, ..., and only then
does the first go on. Forwards and backwards interleave in the same way, and each parameter still
gets its gradients in the order of the micro-batches: the same bits as one after the other, while
parameters are read once per step.

What would change a number is refused: random numbers (they would be drawn in another order),
buffers that one micro-batch changes after a later one did, and micro-batches that take different
ways (gradients would be added in another order). Not seen: what a forward leaves for its later
layers in a buffer or an attribute of its own, `threading.local`, a generator nobody holds.

[Note: order]
Autograd holds a lock while a gradient is accumulated, so a thread cannot wait there for the
others; it can only see that they were there before.
"""

from __future__ import annotations

import contextlib
import contextvars
import random as pythons
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
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
    manager.node_leases.refuse_inside_accumulate("session.accumulate")
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
    random = RandomNumbers(models)
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def train(number: int) -> None:
        assert torch.get_num_threads() == num_threads
        batch = micro_batches[number]
        with _saving_as(hooks):
            loss = compute_loss(*(batch if isinstance(batch, tuple) else (batch,)))
            random.refuse_drawn()
            loss.backward()  # type: ignore[no-untyped-call]
            random.refuse_drawn()
            losses[number] = loss.detach()

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(turns.run, number, train),
            name=f"micro-batch {number}",
            daemon=True,
        )
        for number in range(len(micro_batches))
    ]
    with _switching(manager, turns):
        try:
            for thread in threads:
                thread.start()
            turns.begin()
            _wait_for_micro_batches(threads)
        except BaseException as error:  # Ctrl-C comes to this thread: the others must not go on
            alive = set(threading.enumerate())  # also one whose start was interrupted
            turns.stop(error, [thread in alive for thread in threads])
            _wait_for_micro_batches([thread for thread in threads if thread in alive])
            raise
        finally:  # of those that were stopped in the middle of a node
            manager.node_leases.give_back_of({thread.ident for thread in threads})
    if turns.failure is not None:
        raise turns.failure
    return [loss for loss in losses if loss is not None]


def _wait_for_micro_batches(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        while thread.ident is None:  # its start was interrupted: it is about to run
            time.sleep(0.001)
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


class RandomNumbers:
    """The generators that can be found: torch's own, Python's, numpy's, those that modules hold."""

    def __init__(self, models: Sequence[nn.Module]):
        held = [v for model in models for m in model.modules() for v in vars(m).values()]
        self._generators = [value for value in held if isinstance(value, torch.Generator)]
        self._before = self._states()

    def refuse_drawn(self) -> None:
        """Whoever draws now draws in another order than one micro-batch after the other."""
        if self._states() != self._before:
            raise UnsupportedError(
                "the model draws random numbers (dropout): session.accumulate would draw them in "
                f"another order than micro-batch after micro-batch. {INSTEAD}, or without dropout."
            )

    def _states(self) -> list[Any]:
        tensors = [torch.get_rng_state(), *(g.get_state() for g in self._generators)]
        state: Any = np.random.get_state()
        _, words, *rest = state
        return [
            *(tensor.numpy().tobytes() for tensor in tensors), pythons.getstate(),
            words.tobytes(), rest,
        ]  # fmt: skip
