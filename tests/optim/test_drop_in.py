"""zeepo.optim beside torch.optim: same names, arguments, states; with fp32 same bits."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeepo
from tests.optim.test_kernels import FORMATS, KINDS, gradients, values
from zeepo.errors import ConfigError, UnsupportedError, WeightsError

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adamw_amsgrad_maximize": ("AdamW", {"amsgrad": True, "maximize": True}),
    "adamw_small_betas": ("AdamW", {"betas": (0.3, 0.4), "eps": 1e-3}),
    "adam": ("Adam", {}),
    "adam_decay": ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    "sgd": ("SGD", {}),
    "sgd_momentum": ("SGD", {"momentum": 0.9, "dampening": 0.1, "weight_decay": 1e-2}),
    "sgd_nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "adagrad": ("Adagrad", {"lr_decay": 0.1, "weight_decay": 1e-2}),
    "adagrad_initial": ("Adagrad", {"initial_accumulator_value": 0.3, "maximize": True}),
}
every_case = pytest.mark.parametrize("case", CASES)
real_sqrt = Tensor.sqrt


def to_the_nearest_sqrt(tensor: Tensor) -> Tensor:
    return real_sqrt(tensor.double()).float()


def parameters() -> list[nn.Parameter]:
    shapes = [values(n) for n in (1, 3, 17, 257, 1000, 70001)]
    shapes += [values(31 * 17).view(31, 17).t(), values(24).view(1, 2, 3, 4).permute(0, 2, 3, 1)]
    shapes += [values(90).view(10, 9)[::2, ::3]]
    return [nn.Parameter(value.clone()) for value in shapes]


def run(optimizer: torch.optim.Optimizer, steps: int = 12) -> dict[str, Tensor]:
    """Parameters and states after some steps of a learning rate schedule."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(steps):
        for p in held:
            p.grad = gradients(p.numel(), step).view(p.shape)
        optimizer.step()
        schedule.step()
    seen = {f"{i}": p.detach().clone() for i, p in enumerate(held)}
    for i, p in enumerate(held):
        seen |= {f"{i}.{name}": v for name, v in optimizer.state[p].items() if v is not None}
    return seen


def differing(some: dict[str, Tensor], others: dict[str, Tensor]) -> list[str]:
    assert some.keys() == others.keys()
    return [name for name in some if not torch.equal(some[name], others[name])]


@every_case
def test_fp32_has_the_bits_of_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's single-tensor path, with a square root that is rounded to the nearest: its own is
    MKL's on most machines, which is not."""
    kind, options = CASES[case]
    ours = run(getattr(zeepo.optim, kind)(parameters(), lr=1e-2, **options))
    monkeypatch.setattr(Tensor, "sqrt", to_the_nearest_sqrt)
    theirs = run(getattr(torch.optim, kind)(parameters(), lr=1e-2, foreach=False, **options))
    assert differing(ours, theirs) == []


@every_case
def test_states_have_the_bits_of_torch_as_it_is(case: str) -> None:
    """Without the square root nothing differs: all of SGD, and one step of the others' states."""
    kind, options = CASES[case]
    options = {**options, "weight_decay": 0.0}
    ours = run(getattr(zeepo.optim, kind)(parameters(), lr=1e-2, **options))
    theirs = run(getattr(torch.optim, kind)(parameters(), lr=1e-2, foreach=False, **options))
    unequal = differing(ours, theirs)
    assert [name for name in unequal if "." in name] == []
    for name in unequal:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-7)
    assert kind != "SGD" or not unequal


@pytest.mark.parametrize("case", [c for c in CASES if "maximize" not in c])
def test_fp32_has_the_bits_of_torch_fused(case: str) -> None:
    """Of whole vectors; the last elements torch's fused kernels compute in another way."""
    kind, options = CASES[case]

    def made() -> list[nn.Parameter]:
        return [nn.Parameter(values(n)) for n in (16, 256, 4096)]

    ours = run(getattr(zeepo.optim, kind)(made(), lr=1e-2, **options))
    theirs = run(getattr(torch.optim, kind)(made(), lr=1e-2, fused=True, **options))
    assert differing(ours, theirs) == []


def test_lion_is_the_formula() -> None:
    p = nn.Parameter(values(100))
    optimizer = zeepo.optim.Lion([p], lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)
    expected, mean = p.detach().clone(), torch.zeros(100)
    for step in range(5):
        p.grad = gradients(100, step)
        optimizer.step()
        direction = (0.9 * mean.double() + 0.1 * p.grad.double()).sign()
        expected = expected * (1 - 0.1 * 0.1) - 0.1 * direction
        mean = 0.99 * mean + 0.01 * p.grad
    torch.testing.assert_close(p.detach(), expected.float())
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], mean)


@pytest.mark.parametrize("state_dtype", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_going_on_from_a_state_dict(kind: str, state_dtype: str) -> None:
    options = {**KINDS[kind], "state_dtype": state_dtype}
    first = getattr(zeepo.optim, kind)(parameters(), **options)
    run(first, 3)
    held = [nn.Parameter(p.detach().clone()) for p in first.param_groups[0]["params"]]
    second = getattr(zeepo.optim, kind)(held, **options)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    third = copy.deepcopy(second)
    assert pickle.loads(pickle.dumps(second)).clip_factor is None
    expected = run(first, 3)
    assert differing(expected, run(second, 3)) == []
    third.clip_factor = 0.5
    third.step()
    assert third.clip_factor is None


@pytest.mark.parametrize("state_dtype", FORMATS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Lion"])
def test_a_state_of_torch_is_loaded_and_goes_back(kind: str, state_dtype: str) -> None:
    theirs = getattr(torch.optim, kind)(parameters(), **KINDS[kind])
    run(theirs, 3)
    held = theirs.param_groups[0]["params"]
    ours = getattr(zeepo.optim, kind)(held, **KINDS[kind], state_dtype=state_dtype)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["state_dtype"] == state_dtype
    large = [n for n in ours.state[held[3]] if n != "step"]
    assert large
    for name in large:
        numel = {"8bit": 17 * 20}.get(state_dtype, 257)
        assert ours.state[held[3]][name].numel() == numel
    back = getattr(zeepo.optim, kind)(held, **KINDS[kind])
    back.load_state_dict(ours.state_dict())
    for p in held:
        for name in large:
            theirs_now = theirs.state[p][name]
            bound = {"fp32": 0.0, "bf16": 2**-8, "8bit": 0.02}[state_dtype]
            error = (back.state[p][name] - theirs_now).abs().max()
            assert error <= bound * theirs_now.abs().max()
    again = getattr(torch.optim, kind)(held, **KINDS[kind])
    again.load_state_dict(back.state_dict())
    run(again, 1)


def test_masters_keep_what_bf16_loses() -> None:
    p = nn.Parameter(torch.ones(50, dtype=torch.bfloat16))
    optimizer = zeepo.optim.SGD([p], lr=1e-4, master_weights=True)
    for _ in range(30):
        p.grad = torch.ones_like(p)
        optimizer.step()
    master = optimizer.state[p]["master"]
    assert master.dtype is torch.float32
    torch.testing.assert_close(master, torch.full((50,), 1 - 30e-4))
    assert torch.equal(p.detach(), master.bfloat16())
    q = nn.Parameter(p.detach().clone())
    other = zeepo.optim.SGD([q], lr=1e-4, master_weights=True)
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(other.state[q]["master"], master)


def test_scaler_unscales_and_skips() -> None:
    p, q = nn.Parameter(values(100)), nn.Parameter(values(100))
    ours, plain = zeepo.optim.AdamW([p], lr=1e-2), zeepo.optim.AdamW([q], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        grad = gradients(100, step)
        scaler.scale((p * grad).sum()).backward()
        if step == 1:
            p.grad[3] = float("inf")
            before = p.detach().clone()
        else:
            q.grad = grad
            plain.step()
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
        assert step != 1 or torch.equal(p, before)
    assert torch.equal(p, q)
    assert ours.state[p]["step"] == 2


def test_autograd_sees_the_change() -> None:
    p = nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    zeepo.optim.SGD([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_refusals() -> None:
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match="state_dtype='fp8'"):
        zeepo.optim.AdamW([p], state_dtype="fp8")
    with pytest.raises(ConfigError, match="betas"):
        zeepo.optim.Lion([p], betas=(1.0, 0.9))
    with pytest.raises(ConfigError, match="lr=-1"):
        zeepo.optim.SGD([p], lr=-1)
    with pytest.raises(UnsupportedError, match="capturable=True"):
        zeepo.optim.Adam([p], capturable=True)
    with pytest.raises(UnsupportedError, match="differentiable=True"):
        zeepo.optim.Adagrad([p], differentiable=True)
    wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
    wide.grad = torch.ones_like(wide)
    with pytest.raises(UnsupportedError, match=r"float64"):
        zeepo.optim.AdamW([wide]).step()
    layer = nn.Embedding(3, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="dense gradients only"):
        zeepo.optim.SGD(layer.parameters()).step()
    optimizer = zeepo.optim.AdamW([p])
    p.grad = torch.ones(3)
    optimizer.step()
    other = zeepo.optim.AdamW([nn.Parameter(torch.ones(4))])
    with pytest.raises(WeightsError, match="does not belong"):
        other.load_state_dict(optimizer.state_dict())


def test_a_first_step_that_is_skipped_leaves_no_states() -> None:
    """SGD's first step takes the gradient as it is; with dampening the second does not."""

    def run(kind: type[torch.optim.Optimizer]) -> float:
        p = torch.nn.Parameter(torch.ones(8))
        optimizer = kind([p], lr=0.1, momentum=0.9, dampening=0.5)  # type: ignore[call-arg]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for factor in (float("inf"), 1.0, 1.0):
            optimizer.zero_grad()
            scaler.scale((p * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return p[0].item()

    assert run(zeepo.optim.SGD) == run(torch.optim.SGD)
