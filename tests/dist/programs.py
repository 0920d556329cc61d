"""The programs of tests/parity as ranks: each rank trains on its own batches.

A program only knows `start(model, optimizer)`. Under zeepo that is the session; under torch's DDP it
wraps the model and leads calls of it through the wrapper. DDP does not reduce what comes from a
second backward of one forward, or from a call of a submodule, and has other roundings when gradients
that were reduced before are added to. So there is a third way, "by hand": plain PyTorch, with every
backward's gradients averaged in the order of the ranks when it ends.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tests.parity.test_parity  # noqa: F401  (registers every program)
from tests.parity.harness import (
    CASES,
    PLACEMENTS,
    Models,
    Optimizers,
    as_list,
    probe_minimum_ram,
    run_program,
    run_zeepo,
)
from tests.parity.models import use_batches_of
from zeepo.engine.tuning import tuned
from zeepo.verify.record import Record, snapshot


@dataclass(frozen=True)
class Way:
    """How ranks run a program under zeepo."""

    stage: int
    where: str = "ram"
    """A name of PLACEMENTS; with any of it on disk, at the least ram the plan accepts."""
    piece_bytes: int = 32 << 20
    prefetch: bool = True

    @property
    def uses_disk(self) -> bool:
        return "disk" in PLACEMENTS[self.where].values()

    def __str__(self) -> str:
        return f"stage{self.stage}-{self.where}"


AMPLE_BYTES = 1 << 30
Reducing = Callable[[nn.Module], AbstractContextManager[None]]


def on_rank(name: str, way: Way | str, disk: str = "") -> Record:
    """What a program shows on this rank; `way` may also be a name of REDUCING."""
    use_batches_of(dist.get_rank())
    try:
        if isinstance(way, Way):
            return _under_zeepo(name, way, disk)
        return _plainly(name, REDUCING[way])
    finally:
        use_batches_of(0)


def _under_zeepo(name: str, way: Way, disk: str) -> Record:
    case = CASES[name]
    options: dict[str, Any] = {**PLACEMENTS[way.where], "stage": way.stage}
    if way.uses_disk:
        options["disk"] = disk
    with tuned(estimate=False, piece_bytes=way.piece_bytes, prefetch=way.prefetch):
        ram_bytes = probe_minimum_ram(case, options) if way.uses_disk else AMPLE_BYTES
        gc.collect()
        return run_zeepo(case, ram_bytes, options)


def _plainly(name: str, reducing: Reducing) -> Record:
    """Without zeepo; gradients are averaged by `reducing`."""
    record = Record()

    @contextmanager
    def start(models: Models, optimizers: Optimizers) -> Iterator[None]:
        held, steppers = as_list(models), as_list(optimizers)
        with ExitStack() as stack:
            for model in held:
                stack.enter_context(reducing(model))
            yield
        seen = snapshot(held, steppers)
        record.before_close.append(seen)
        record.after_close.append(seen)

    run_program(CASES[name], record, start)
    return record


@contextmanager
def called_through_ddp(model: nn.Module) -> Iterator[None]:
    """Whoever calls the model calls DDP.

    Buffers stay each rank's own, as under zeepo; DDP would send rank 0's to all at every forward.
    """
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)
    plain_forward: Callable[..., Any] = model.forward
    is_inside = False

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_inside
        if is_inside:
            return plain_forward(*args, **kwargs)
        is_inside = True
        try:
            return wrapped(*args, **kwargs)
        finally:
            is_inside = False

    model.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.forward


@contextmanager
def averaging_by_hand(model: nn.Module) -> Iterator[None]:
    """Every backward's gradients are averaged, then added to those there were."""
    plain_backward = torch.autograd.backward
    is_inside = False

    def backward(*args: Any, **kwargs: Any) -> None:
        nonlocal is_inside
        if is_inside:  # checkpointing computes a segment again
            return plain_backward(*args, **kwargs)
        parameters = list(model.parameters())
        earlier = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        is_inside = True
        try:
            plain_backward(*args, **kwargs)
        finally:
            is_inside = False
        for p, before in zip(parameters, earlier, strict=True):
            mean = _mean_over_ranks(p)
            p.grad = before if mean is None else mean if before is None else before.add_(mean)
        return None

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = plain_backward


def _mean_over_ranks(p: nn.Parameter) -> torch.Tensor | None:
    """Of the gradients, added in the order of the ranks; a rank without one adds zeros."""
    present = torch.zeros(dist.get_world_size(), dtype=torch.int32)
    present[dist.get_rank()] = p.grad is not None
    dist.all_reduce(present)
    if not present.any():
        return None
    mine = torch.zeros_like(p) if p.grad is None else p.grad
    parts = [torch.empty_like(mine) for _ in present]
    dist.all_gather(parts, mine.detach())
    share = 1.0 / len(parts)
    total = parts[0] * share
    for part in parts[1:]:
        total += part * share
    return total


@contextmanager
def not_at_all(model: nn.Module) -> Iterator[None]:
    """One rank has nothing to average."""
    assert dist.get_world_size() == 1, "ranks would go apart"
    yield


REDUCING: dict[str, Reducing] = {
    "ddp": called_through_ddp,
    "by hand": averaging_by_hand,
    "plain": not_at_all,
}
