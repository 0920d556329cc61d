"""Training loops whose point is what only several ranks have: `no_sync`, values to agree on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeepo
from tests.dist.programs import Way
from tests.parity.harness import PLACEMENTS
from tests.parity.models import Perceptron, perceptron_loss, use_batches_of
from zeepo.engine.tuning import tuned
from zeepo.verify.record import Record, snapshot

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-1, momentum=0.9, foreach=True),
}
Sync = Callable[[], AbstractContextManager[None]]


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Sync, record: Record
) -> None:
    """Two batches without, one with reduction, in every step; gradients are kept as zeros."""
    use_batches_of(dist.get_rank())
    for step in range(4):
        for part in range(2):
            with no_sync():
                loss = perceptron_loss(model, 10 * step + part)
                loss.backward()
                record.observe("loss", loss)
        loss = perceptron_loss(model, 10 * step + 2)
        loss.backward()
        record.observe("loss", loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    use_batches_of(0)


def accumulate_under_ddp(optimizer_name: str) -> Record:
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    record = Record()
    wrapped = DistributedDataParallel(model)
    _train(wrapped, optimizer, wrapped.no_sync, record)
    record.after_close.append(snapshot([model], [optimizer]))
    return record


def accumulate_under_zeepo(optimizer_name: str, way: Way, disk: str) -> Record:
    """Built lazily from another seed on every rank: rank 0's values are everybody's."""
    torch.manual_seed(dist.get_rank())
    with zeepo.lazy(disk=disk):
        model = Perceptron()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    options: dict[str, Any] = {**PLACEMENTS[way.where], "stage": way.stage}
    if way.uses_disk:
        options["disk"] = disk
    record = Record()
    with tuned(estimate=False, least_ram=way.uses_disk, piece_bytes=way.piece_bytes):
        session = zeepo.init(model, optimizer, **options)
    _train(model, optimizer, session.no_sync, record)
    record.stats = dict(session.stats())
    session.close()
    record.after_close.append(snapshot([model], [optimizer]))
    return record
