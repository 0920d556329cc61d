"""Where zeepo's own optimizers keep their states in a session, and what the plan bills."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import zeepo
from tests.optim.test_kernels import FORMATS, KINDS
from zeepo.engine.managed import home_of
from zeepo.engine.tuning import tuned
from zeepo.optim import kernels
from zeepo.optim.catalogue import (
    Grain,
    count_states,
    grain_of,
    largest_state_of,
    num_states_of,
    num_temporaries_of,
)

ON_DISK = {"params": "disk", "grads": "disk", "optimizer_state": "disk"}
WIDTH = 203


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(5)])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x.to(model[0].weight.dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("level", ["torch", *kernels.levels[-1:]])
@pytest.mark.parametrize("state_dtype", FORMATS)
def test_states_are_cut_and_leave_ram(tmp_path: Path, state_dtype: str, level: str) -> None:
    plain = model_of()
    train(plain, zeepo.optim.AdamW(plain.parameters(), lr=1e-2, state_dtype=state_dtype), 4)
    model = model_of()
    optimizer = zeepo.optim.AdamW(model.parameters(), lr=1e-2, state_dtype=state_dtype)
    with (
        kernels.forced(level),
        tuned(estimate=False, least_ram=True, piece_bytes=1 << 14),
        zeepo.init(model, optimizer, disk=str(tmp_path), **ON_DISK) as session,
    ):
        train(model, optimizer, 4)
        state = optimizer.state[model[2].weight]["exp_avg"]
        numel = WIDTH * WIDTH
        expected = {"fp32": 4 * numel, "bf16": 2 * numel, "8bit": -(-numel // 16) * 20}
        assert home_of(state) is not None
        assert home_of(state).chunk.home.name == "parts"
        assert state.numel() * state.element_size() == expected[state_dtype]
        assert session.stats().evictions >= 2 * session.plan.num_units
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    assert type(state) is torch.Tensor


def test_the_bill_is_smaller_with_smaller_states(tmp_path: Path) -> None:
    bills = {}
    for state_dtype in FORMATS:
        model = model_of()
        optimizer = zeepo.optim.AdamW(model.parameters(), state_dtype=state_dtype)
        with zeepo.init(model, optimizer, optimizer_state="ram", ram="1GiB") as session:
            bills[state_dtype] = session.plan.items()["optimizer state"]
            train(model, optimizer, 1)
            held = session.stats().bytes_by_tag["optimizer state"]
            assert 0.95 * held <= bills[state_dtype] <= 1.1 * held
    assert bills["bf16"] == bills["fp32"] / 2
    assert bills["8bit"] == pytest.approx(bills["fp32"] * 0.3125, rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_known_of_them(kind: str) -> None:
    p = nn.Parameter(torch.ones(40))
    q = nn.Parameter(torch.ones(40, dtype=torch.bfloat16))
    count = {"AdamW": 2, "Adam": 3, "SGD": 1, "Adagrad": 1, "Lion": 1}[kind]
    for state_dtype, size in (("fp32", 4.0), ("bf16", 2.0), ("8bit", 1.25)):
        options = {**KINDS[kind], "state_dtype": state_dtype}
        optimizer = getattr(zeepo.optim, kind)([p], **options)
        assert grain_of(optimizer) is Grain.ELEMENT
        assert num_states_of(optimizer) == count * size / 4
        assert largest_state_of(optimizer) == size / 4
        assert num_temporaries_of(optimizer) == 0
        both = getattr(zeepo.optim, kind)([p, q], **options, master_weights=True)
        assert num_states_of(both) == (count * size + 4) / 2
        assert largest_state_of(both) == 2
        group = both.param_groups[0]
        assert count_states(both, group, p.dtype) == count
        assert count_states(both, group, q.dtype) == count + 1


def test_a_subclass_runs_its_own_step(tmp_path: Path) -> None:
    """Nothing is known of it, so it meets managed tensors, and torch's operations update them."""

    class Louder(zeepo.optim.AdamW):
        pass

    plain = model_of()
    train(plain, Louder(plain.parameters(), lr=1e-2, state_dtype="8bit"), 3)
    model = model_of()
    optimizer = Louder(model.parameters(), lr=1e-2, state_dtype="8bit")
    assert grain_of(optimizer) is Grain.WHOLE
    with zeepo.init(model, optimizer, ram="200MiB", disk=str(tmp_path), **ON_DISK):
        train(model, optimizer, 3)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
