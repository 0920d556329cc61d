"""session.accumulate: micro-batches pass each unit together, with the same bits."""

from __future__ import annotations

import _thread
import contextvars
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeepo
from tests.parity.harness import ON_DISK
from zeepo.engine.tuning import tuned
from zeepo.errors import SessionError, UnsupportedError

WIDTH = 67
NUM_LAYERS = 7


class Blocks(nn.Module):
    """Blocks with batch statistics, and a weight that is used at both ends."""

    def __init__(self, how: str = "plain"):
        super().__init__()
        self.how = how
        self.ends = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), self.new_norm(), nn.Tanh())
            for _ in range(NUM_LAYERS)
        )

    def new_norm(self) -> nn.Module:
        has_buffers = self.how == "plain" or self.how.endswith("buffers")
        return nn.BatchNorm1d(WIDTH) if has_buffers else nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ends(x)
        for number, block in enumerate(self.blocks):
            if self.how == "dropout":
                x = nn.functional.dropout(x, 0.5)
            if self.how == "routed" and number == 2 and x.flatten()[0] > 0:
                continue
            if self.how.startswith("checkpoint"):
                shared = self.blocks[0] if self.how.endswith("shared") else block
                x = checkpoint(shared, x, use_reentrant="reentrant" in self.how)
            else:
                x = block(x)
        return self.ends(x).square().mean()


def make(how: str = "plain") -> tuple[Blocks, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Blocks(how)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def micro_batches(step: int, count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(5, WIDTH, generator=generator) for _ in range(count)]


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [v for state in optimizer.state.values() for v in state.values()]
    return [t.detach().clone() for t in [*model.parameters(), *model.buffers(), *states]]


def train_plainly(how: str, num_steps: int) -> tuple[list[float], list[Tensor]]:
    model, optimizer = make(how)
    losses = []
    for step in range(num_steps):
        for x in micro_batches(step):
            loss = model(x) / 4
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, values(model, optimizer)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("how", ["plain", "checkpoint", "checkpoint_reentrant"])
def test_same_bits(how: str, update: Any, tmp_path: Path) -> None:
    losses, expected = train_plainly(how, 4)
    model, optimizer = make(how)
    found: list[float] = []
    with tuned(least_ram=True, estimate=False, piece_bytes=5000):
        session = zeepo.init(model, optimizer, disk=tmp_path, update=update, **ON_DISK)
    with session:
        for step in range(4):
            some = session.accumulate(lambda x: model(x) / 4, micro_batches(step))
            found += [loss.item() for loss in some]
            optimizer.step()
            optimizer.zero_grad()
        assert session.stats()["evictions"] > 4 * NUM_LAYERS
    assert found == losses
    assert all(map(torch.equal, values(model, optimizer), expected))


def test_units_are_passed_together(tmp_path: Path) -> None:
    """Each unit is used by all micro-batches before the next one is used by any."""
    model, optimizer = make()
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path) as session:
        seen: list[int] = []
        for number, block in enumerate(model.blocks):
            block.register_forward_hook(lambda *_, number=number: seen.append(number))
        session.accumulate(model, micro_batches(0, 3))
    assert seen == [number for number in range(NUM_LAYERS) for _ in range(3)]


def test_parameters_are_read_once(tmp_path: Path) -> None:
    """Against one micro-batch after the other, where each reads what the budget cannot keep."""
    read: list[int] = []
    for together in (False, True):
        model, optimizer = make("checkpoint")
        with tuned(least_ram=True, estimate=False):
            session = zeepo.init(model, optimizer, disk=tmp_path, **ON_DISK)
        with session:
            for step in range(3):
                before = session.stats()["fetches"]
                if together:
                    session.accumulate(model, micro_batches(step, 8))
                else:
                    for x in micro_batches(step, 8):
                        model(x).backward()
                read.append(session.stats()["fetches"] - before)
                optimizer.step()
                optimizer.zero_grad()
    assert read[-1] < read[2] / 3


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("dropout", "draws random numbers"),
        ("routed", "took different ways"),
        ("checkpoint_buffers", "changes a buffer"),
        ("checkpoint_reentrant_shared", "two gradients from micro-batch"),
    ],
)
def test_what_would_change_numbers_is_refused(how: str, message: str, tmp_path: Path) -> None:
    model, optimizer = make(how)
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path) as session:
        batches = [x.requires_grad_() for x in micro_batches(0, 6)]
        with pytest.raises(UnsupportedError, match=message):
            session.accumulate(model, batches)
    assert not [t for t in threading.enumerate() if t.name.startswith("micro-batch")]


def test_an_error_is_the_users_own(tmp_path: Path) -> None:
    """One micro-batch fails: its error comes out, the others end, and the session goes on."""
    model, optimizer = make()

    def compute(x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise ValueError("a bad batch")
        return model(x)

    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path) as session:
        batches = micro_batches(0)
        batches[2] = batches[2][:3]
        with pytest.raises(ValueError, match="a bad batch"):
            session.accumulate(compute, batches)
        optimizer.zero_grad()
        session.accumulate(model, micro_batches(1))
        optimizer.step()
    assert not [t for t in threading.enumerate() if t.name.startswith("micro-batch")]


def test_interrupted_no_thread_goes_on(tmp_path: Path) -> None:
    """Ctrl-C reaches the caller, who must not get control while micro-batches still train."""
    model, optimizer = make()

    batches = micro_batches(0)

    def compute(x: Tensor) -> Tensor:
        if x is batches[0]:
            _thread.interrupt_main()
            time.sleep(0.5)  # the caller is waiting, and hears of it now
        return model(x)

    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path) as session:
        with pytest.raises(KeyboardInterrupt):
            session.accumulate(compute, batches)
        assert not [t for t in threading.enumerate() if t.name.startswith("micro-batch")]
        optimizer.zero_grad()
        session.accumulate(model, micro_batches(1))


def test_modes_and_closed_sessions_are_refused(tmp_path: Path) -> None:
    model, optimizer = make()
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path) as session:
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(UnsupportedError, match="inside autocast"),
        ):
            session.accumulate(model, micro_batches(0))
        assert session.accumulate(model, []) == []
    with pytest.raises(SessionError, match="closed"):
        session.accumulate(model, micro_batches(0))


def test_recompute_is_refused(tmp_path: Path) -> None:
    model, optimizer = make()
    with (
        zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path, activations="recompute") as session,
        pytest.raises(UnsupportedError, match="activations='recompute'"),
    ):
        session.accumulate(model, micro_batches(0))


class Drawing(nn.Module):
    """Layers whose outputs are scaled by numbers drawn in some way."""

    def __init__(self, draw: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.generator = torch.Generator().manual_seed(3)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.draw == "generator":
                x = x * torch.rand(1, generator=self.generator)
            elif self.draw == "python":
                x = x * random.random()
            elif self.draw == "backward" and x.requires_grad:
                x.register_hook(lambda grad: grad * torch.rand(1))
        return x


@pytest.mark.parametrize("draw", ["generator", "python", "backward"])
def test_random_numbers_are_refused_wherever_they_come_from(draw: str, tmp_path: Path) -> None:
    model = Drawing(draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path) as session,
        pytest.raises(UnsupportedError, match="random numbers"),
    ):
        session.accumulate(lambda x: model(x).square().mean(), [torch.ones(n, 8) for n in (3, 5)])


class OneNorm(nn.Module):
    """One batch norm behind every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.norm(layer(x))
        return x


def test_a_buffer_that_is_changed_in_another_order_is_refused(tmp_path: Path) -> None:
    model = OneNorm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path) as session,
        pytest.raises(UnsupportedError, match="changes a buffer"),
    ):
        session.accumulate(lambda x: model(x).square().mean(), [torch.randn(n, 8) for n in (3, 5)])


@pytest.mark.parametrize("what", ["accumulate", "step", "close"])
def test_what_cannot_be_done_inside_is_refused(what: str, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path) as session:

        def compute_loss(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            if what == "accumulate":
                session.accumulate(lambda y: model(y).mean(), [x])
            elif what == "step":
                optimizer.step()
            else:
                session.close()
            return loss

        with pytest.raises(SessionError, match="inside the function"):
            session.accumulate(compute_loss, [torch.ones(2, 8)] * 2)
        model(torch.ones(2, 8))


def test_context_variables_reach_the_micro_batches(tmp_path: Path) -> None:
    factor = contextvars.ContextVar("factor", default=1.0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    factor.set(3.0)
    seen: list[float] = []

    def compute_loss(x: torch.Tensor) -> torch.Tensor:
        seen.append(factor.get())
        return model(x).mean()

    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path) as session:
        session.accumulate(compute_loss, [torch.ones(2, 8)] * 2)
    assert seen == [3.0, 3.0]
