"""The kernels: every level gives the bits of torch's operations, however a tensor is sliced."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeepo
from zeepo.errors import ConfigError
from zeepo.optim import kernels

KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2},
    "Adam": {"lr": 1e-2, "amsgrad": True, "maximize": True, "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.1, "lr_decay": 0.1},
    "Lion": {"lr": 1e-2, "weight_decay": 0.1},
}
FORMATS = ("fp32", "bf16", "8bit")
SIZES = (1, 3, 17, 257, 1000, 5003)
every_format = pytest.mark.parametrize("state_dtype", FORMATS)
every_kind = pytest.mark.parametrize("kind", KINDS)
needs_kernels = pytest.mark.skipif(not kernels.available, reason="the kernels were not built")


def gradients(numel: int, step: int) -> Tensor:
    """Of every size, some of them zero."""
    random = torch.Generator().manual_seed(1000 * step + numel)
    sizes = 10.0 ** torch.randint(-12, 2, (numel,), generator=random)
    present = torch.rand(numel, generator=random) > 0.1
    return torch.randn(numel, generator=random) * sizes * present


def values(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def train(
    kind: str, parameters: list[nn.Parameter], grads: Any, steps: int = 8, **options: Any
) -> dict[str, Tensor]:
    """Parameters and states after some steps, some of which clip and unscale."""
    optimizer = getattr(zeepo.optim, kind)(parameters, **{**KINDS[kind], **options})
    for step in range(steps):
        for number, p in enumerate(parameters):
            p.grad = grads(number, step).to(p.dtype)
        optimizer.clip_factor = 0.37 if step % 2 else None
        optimizer.grad_scale = torch.tensor(3.0) if step % 3 == 1 else None
        optimizer.step()
        assert optimizer.clip_factor is None
    seen = {}
    for number, p in enumerate(parameters):
        seen[f"{number}"] = p.detach().clone()
        for name, value in optimizer.state[p].items():
            seen[f"{number}.{name}"] = value.clone()
    return seen


def same_bits(some: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert some.keys() == others.keys()
    assert [name for name in some if bits(some[name]) != bits(others[name])] == []


def bits(value: Tensor) -> tuple[torch.dtype, bytes]:
    return value.dtype, value.reshape(-1).view(torch.uint8).numpy().tobytes()


@needs_kernels
@every_format
@every_kind
@pytest.mark.parametrize(
    ("dtype", "master"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["fp32", "bf16", "master"],
)
def test_every_level_gives_the_bits_of_torch_operations(
    kind: str, state_dtype: str, dtype: torch.dtype, master: bool
) -> None:
    def run(level: str) -> dict[str, Tensor]:
        parameters = [nn.Parameter(values(n).to(dtype)) for n in SIZES]
        grads = [[gradients(n, step) for n in SIZES] for step in range(8)]
        options = {"state_dtype": state_dtype, "master_weights": master}
        with kernels.forced(level):
            assert kernels.in_use() is (level != "torch")
            return train(kind, parameters, lambda i, step: grads[step][i], **options)

    expected = run("torch")
    assert all(value.isfinite().all() for value in expected.values())
    for level in kernels.levels:
        same_bits(run(level), expected)


@every_format
@every_kind
@pytest.mark.parametrize("cut", [16, 48, 2000 // 16 * 16])
def test_slices_give_the_bits_of_the_whole(kind: str, state_dtype: str, cut: int) -> None:
    numel = 5003

    def run(cuts: list[int]) -> dict[str, Tensor]:
        bounds = [0, *cuts, numel]
        pairs = list(pairwise(bounds))
        parameters = [nn.Parameter(values(numel)[low:high].clone()) for low, high in pairs]

        def grads(number: int, step: int) -> Tensor:
            low, high = pairs[number]
            return gradients(numel, step)[low:high]

        seen = train(kind, parameters, grads, state_dtype=state_dtype)
        names = {name.split(".", 1)[1] for name in seen if "." in name} - {"step"}
        joined = {n: torch.cat([seen[f"{i}.{n}"] for i in range(len(pairs))]) for n in names}
        return joined | {"p": torch.cat([seen[f"{i}"] for i in range(len(pairs))])}

    same_bits(run([cut]), run([]))


@needs_kernels
@every_format
def test_threads_change_nothing(state_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numel = 5003

    def run(threads: int) -> dict[str, Tensor]:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        grads = lambda _, step: gradients(numel, step)  # noqa: E731
        return train("AdamW", [nn.Parameter(values(numel))], grads, state_dtype=state_dtype)

    alone = run(1)
    monkeypatch.setattr(kernels, "LEAST_PER_THREAD", 512)
    asked: list[int] = []
    threads_of = kernels._threads
    monkeypatch.setattr(kernels, "_threads", lambda n: asked.append(n) or threads_of(n))
    for threads in (2, 3, 7):
        same_bits(run(threads), alone)
    assert set(asked) == {1, 2, 6}  # 5003 elements are ten slices


def test_flushing_of_denormals_is_that_of_the_calling_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(kernels, "LEAST_PER_THREAD", 512)
    p = nn.Parameter(torch.zeros(100_003))
    p.grad = torch.full_like(p, 1e-40)
    optimizer = zeepo.optim.SGD([p], lr=1.0)
    optimizer.step()  # now there are threads, which do not flush
    assert p.detach().count_nonzero() == p.numel()
    p.grad.fill_(1e-30)
    assert torch.set_flush_denormal(True)
    try:
        for group in optimizer.param_groups:
            group["lr"] = 1e-10
        with torch.no_grad():
            p.zero_()
        optimizer.step()
    finally:
        torch.set_flush_denormal(False)
    assert p.detach().count_nonzero() == 0
    optimizer.step()
    assert p.detach().count_nonzero() == p.numel()


@every_format
def test_narrow_moments_are_right_on_average(state_dtype: str) -> None:
    """The same small change for very many steps arrives, although each is below a code's width."""
    numel = 4096
    p = nn.Parameter(torch.zeros(numel))
    optimizer = zeepo.optim.Adam([p], lr=0.0, betas=(0.99, 0.999), state_dtype=state_dtype)
    exact = zeepo.optim.Adam([q := nn.Parameter(torch.zeros(numel))], lr=0.0, betas=(0.99, 0.999))
    for step in range(300):
        random = torch.Generator().manual_seed(step)
        p.grad = q.grad = 1.0 + 0.1 * torch.randn(numel, generator=random)
        optimizer.step()
        exact.step()
    for name in ("exp_avg", "exp_avg_sq"):
        kept = exact.state[q][name].clone()
        loaded = zeepo.optim.Adam([q])
        loaded.load_state_dict({**exact.state_dict(), "state": optimizer.state_dict()["state"]})
        ratio = (loaded.state[q][name] / kept).mean().item()
        assert abs(ratio - 1) < 2e-3, name


def test_a_square_above_zero_never_becomes_zero() -> None:
    p = nn.Parameter(torch.zeros(32))
    p.grad = torch.full((32,), 1e-12)
    p.grad[0] = p.grad[16] = 1e3
    p.grad[17:] = 0
    optimizer = zeepo.optim.Adagrad([p], state_dtype="8bit")
    optimizer.step()
    codes = optimizer.state[p]["sum"].view(2, 20)[:, :16]
    assert codes[0, 0] == 255
    assert (codes[0, 1:] == 1).all()
    assert (codes[1, 1:] == 0).all()
    assert optimizer.state[p]["sum"].numel() == 40


@pytest.mark.parametrize("level", ["torch", *kernels.levels])
@every_format
def test_what_is_not_finite_stays_so(state_dtype: str, level: str) -> None:
    p = nn.Parameter(torch.zeros(4))
    p.grad = torch.tensor([float("nan"), float("inf"), 1.0, -float("inf")])
    with kernels.forced(level):
        optimizer = zeepo.optim.SGD([p], lr=1.0, momentum=0.9, state_dtype=state_dtype)
        optimizer.step()
        p.grad = torch.zeros(4)
        optimizer.step()
    assert not p[[0, 1, 3]].isfinite().any()
    assert state_dtype == "8bit" or p[2].isfinite()


def test_no_level_that_the_machine_has_not() -> None:
    with pytest.raises(ConfigError, match="no kernels for 'mmx'"), kernels.forced("mmx"):
        pass
