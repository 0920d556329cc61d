"""update="backward": what it holds, and what it refuses."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeepo
from zeepo.engine.states import States
from zeepo.engine.update import ChunkUpdate
from zeepo.errors import DiskError, SessionError, UnsupportedError
from zeepo.memory.ledger import Ledger, Reservation

WIDTH = 40
NUM_LAYERS = 6
UNIT_BYTES = (WIDTH * WIDTH + WIDTH) * 4


def make(**options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    model, optimizer = make()
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path, update="backward") as session:
        yield model, optimizer, session


def test_gradients_leave_while_backward_runs(opened: Any) -> None:
    """When backward is at the first layer, the others' gradients are gone."""
    model, optimizer, session = opened
    held: list[int] = []

    def look(_: torch.Tensor) -> None:
        held.append(session.stats()["bytes_by_tag"].get("grads", 0))

    for step in range(3):
        loss = loss_of(model, step)
        model[0].weight.register_hook(look)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert max(held) <= 2 * UNIT_BYTES


USES_BEFORE_STEP: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "read": lambda model, _: model[0].weight.norm(),
    "change": lambda model, _: model[0].weight.data.mul_(0.99),
    "forward": lambda model, _: loss_of(model),
    "state": lambda _, optimizer: [
        value.sum() for state in optimizer.state.values() for value in state.values()
    ],
}


@pytest.mark.parametrize("use", USES_BEFORE_STEP)
def test_values_are_not_used_before_the_step(opened: Any, use: str) -> None:
    """Plain PyTorch still has the old ones there."""
    model, optimizer, _ = opened
    for _ in range(2):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_of(model).backward()
    with torch.no_grad(), pytest.raises(SessionError, match=r"between backward\(\) and"):
        USES_BEFORE_STEP[use](model, optimizer)
    optimizer.step()
    model[0].weight.norm()


@pytest.mark.parametrize("what", ["backward", "step"])
def test_gradients_of_the_last_step_are_cleared_first(opened: Any, what: str) -> None:
    """Torch would add to them, or use them once more."""
    model, optimizer, _ = opened
    loss_of(model).backward()
    optimizer.step()
    with pytest.raises(SessionError, match="zero_grad"):
        loss_of(model).backward() if what == "backward" else optimizer.step()
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


class OwnZeroGrad(torch.optim.AdamW):
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.num_calls = getattr(self, "num_calls", 0) + 1
        super().zero_grad(set_to_none)


def clear_by_hand(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = None


CLEARS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "model": lambda model, _: model.zero_grad(),
    "modules": lambda model, _: [layer.zero_grad(set_to_none=True) for layer in model],
    "own": lambda model, _: OwnZeroGrad(model.parameters()).zero_grad(),
    "by hand": clear_by_hand,
}


@pytest.mark.parametrize("clear", CLEARS)
def test_ways_to_clear_gradients(opened: Any, clear: str) -> None:
    model, optimizer, _ = opened
    for _ in range(3):
        loss_of(model).backward()
        optimizer.step()
        CLEARS[clear](model, optimizer)


def test_to_read_a_gradient_does_not_clear_it(opened: Any) -> None:
    model, optimizer, _ = opened
    loss_of(model).backward()
    optimizer.step()
    assert [p.grad for p in model.parameters() if p.grad is not None] == []  # a log, say
    with pytest.raises(SessionError, match="zero_grad"):
        loss_of(model).backward()


@pytest.mark.parametrize("who", ["optimizer", "model"])
def test_gradients_that_are_gone_are_not_filled_with_zeros(opened: Any, who: str) -> None:
    """Torch updates a parameter that a step does not use, if its gradient is zeros."""
    model, optimizer, _ = opened
    loss_of(model).backward()
    optimizer.step()
    who_clears = {"optimizer": optimizer, "model": model}[who]
    with pytest.raises(SessionError, match=r"zeros.*set_to_none=True"):
        who_clears.zero_grad(set_to_none=False)
    who_clears.zero_grad(set_to_none=True)
    loss_of(model).backward()
    optimizer.step()


def test_a_parameter_that_moves_to_another_group_is_noticed(tmp_path: Path) -> None:
    model, _ = make()
    halves = list(model.parameters())[::2], list(model.parameters())[1::2]
    optimizer = torch.optim.AdamW([{"params": half} for half in halves], lr=1e-2)
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path, update="backward"):
        loss_of(model).backward()
        first, second = optimizer.param_groups
        second["params"].append(first["params"].pop())
        with pytest.raises(SessionError, match="which parameters"):
            optimizer.step()


def test_an_update_that_fails_half_way_is_not_made_again(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, _ = opened
    model[1].bias.requires_grad_(False)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    model[1].bias.requires_grad_(True)  # without states: another batch of the same chunk
    batches: list[str] = []
    original = ChunkUpdate._update_batch

    def failing(self: ChunkUpdate, batch: Any) -> None:
        if self.chunk.label == "1":
            batches.append(self.chunk.label)
            if len(batches) == 2:
                raise DiskError("full for a moment")
        original(self, batch)

    monkeypatch.setattr(ChunkUpdate, "_update_batch", failing)
    with pytest.raises(DiskError, match="for a moment"):
        loss_of(model).backward()
    with pytest.raises(SessionError, match="half-way"):
        optimizer.step()


@pytest.mark.parametrize("update", ["backward", "step"])
def test_states_that_find_no_place_after_the_arithmetic_leave_a_torn_update(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters have changed by then: to update them again would be wrong."""
    model, optimizer = make()

    def refuse(*_: Any, **__: Any) -> None:
        raise DiskError("full for a moment")

    def step() -> None:
        loss_of(model).backward()
        optimizer.step()

    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path, update=update):
        with monkeypatch.context() as full:
            full.setattr(States, "take_in", refuse)
            with pytest.raises(DiskError, match="for a moment"):
                step()
        with pytest.raises(SessionError, match="half-way"):
            optimizer.step()


def test_accumulation_is_declared(tmp_path: Path) -> None:
    plain, plain_optimizer = make()
    model, optimizer = make()
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path, update="backward") as session:
        for step in range(3):
            for micro in range(3):
                loss_of(plain, step * 3 + micro).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            with session.no_sync():
                loss_of(model, step * 3).backward()
                loss_of(model, step * 3 + 1).backward()
            loss_of(model, step * 3 + 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q)


def test_undeclared_accumulation_is_refused(opened: Any) -> None:
    model, _, _ = opened
    loss_of(model).backward()
    with pytest.raises(SessionError, match=r"between backward\(\) and .*no_sync"):
        loss_of(model).backward()


def _clip(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _read(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    model[2].weight.grad.sum()


def _zero(_: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def _write(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    model[2].weight.grad = torch.zeros(WIDTH, WIDTH)


@pytest.mark.parametrize("use", [_clip, _read, _zero, _write])
def test_gradients_are_gone_before_the_step(opened: Any, use: Any) -> None:
    model, optimizer, _ = opened
    loss_of(model).backward()
    with pytest.raises(SessionError, match=r"gradient of .* is gone"):
        use(model, optimizer)


def test_changed_learning_rate_is_refused(opened: Any) -> None:
    model, optimizer, _ = opened
    loss_of(model).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(SessionError, match="hyperparameters changed"):
        optimizer.step()


def test_weight_needed_after_its_update_is_refused(tmp_path: Path) -> None:
    """The first layer's output also goes through the last weight, without a gradient for it."""
    model, optimizer = make()
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path, update="backward"):
        x = torch.randn(5, WIDTH)
        first = model[0](x)
        borrowed = nn.functional.linear(first, model[-1].weight.detach())
        with pytest.raises(SessionError, match="used in backward after it was updated"):
            model[1:](first).add(borrowed).square().mean().backward()


def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    one, two = make(), make()
    with pytest.raises(UnsupportedError, match="exactly one optimizer"):
        zeepo.init([one[0], two[0]], [one[1], two[1]], ram="1GiB", disk=tmp_path, update="backward")
    loss_of(one[0]).backward()  # nothing is left managed


def test_unknown_optimizer_is_refused(tmp_path: Path) -> None:
    class Own(torch.optim.AdamW):
        pass

    model, _ = make()
    with pytest.raises(UnsupportedError, match="cannot take Own apart"):
        zeepo.init(model, Own(model.parameters()), ram="1GiB", disk=tmp_path, update="backward")


def test_frozen_and_unused_parameters(tmp_path: Path) -> None:
    """What gets no gradient keeps its value; its unit is left to step()."""
    runs = []
    for managed in (False, True):
        model, optimizer = make()
        model[1].weight.requires_grad_(False)
        model[3].bias.requires_grad_(False)
        session = None
        if managed:
            session = zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path, update="backward")
        for step in range(4):
            layers = model if step % 2 else model[:-1]
            loss_of(layers, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        if session is not None:
            session.close()
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *runs))


def test_large_gradients_are_guests_unless_they_are_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stays until another backward takes room from the chunks, as everything that stays."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    plain = copy.deepcopy(model)
    x = torch.randn(2, 1024)
    admitted = Counter[int]()
    admit = Ledger.admit

    def counting(self: Ledger, tag: str, nbytes: int) -> Reservation:
        admitted[step] += nbytes
        return admit(self, tag, nbytes)

    monkeypatch.setattr(Ledger, "admit", counting)
    optimizer, plain_optimizer = (torch.optim.SGD(m.parameters(), 1e-3) for m in (model, plain))
    with zeepo.init(model, optimizer, ram="400MiB", disk=tmp_path, update="backward") as session:
        for step in range(4):
            if step == 2:
                with session.no_sync():
                    model(x).square().mean().backward()
                plain(x).square().mean().backward()
            for one, its_optimizer in ((model, optimizer), (plain, plain_optimizer)):
                one(x).square().mean().backward()
                its_optimizer.step()
                its_optimizer.zero_grad()
            assert session._ledger.guest_bytes == 0
    assert admitted == {1: 4 * 1024 * 1024 * 4, 3: 4 * 1024 * 1024 * 4}
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
