"""What is refused, by name, with the model as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeepo
from tests.faults.small import WIDTH, assert_same, build, open_at_minimum, scratch_files, train
from zeepo.errors import BudgetError, ConfigError, UnsupportedError


class _Special(nn.Parameter):
    """A parameter class of the user's."""


def _with(parameter: nn.Parameter | Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_parameter("weight", parameter)
    return model


def _scripted() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))


def _overlapping() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.detach())
    return model


def _half_overlapping() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    flat = torch.zeros(24)
    model[0].weight = nn.Parameter(flat[:16].view(4, 4))
    model[1].weight = nn.Parameter(flat[8:24].view(4, 4))
    return model


MODELS = {
    "TorchScript": (_scripted, "TorchScript"),
    "DataParallel": (lambda: nn.DataParallel(nn.Linear(4, 4)), r"DataParallel.*\.module"),
    "inner DataParallel": (
        lambda: nn.Sequential(nn.DataParallel(nn.Linear(4, 4))),
        r"0 is wrapped in DataParallel",
    ),
    "meta": (lambda: nn.Linear(4, 4, device="meta"), "weight is on meta"),
    "lazy": (lambda: nn.LazyLinear(4), "weight has no shape yet"),
    "sparse": (
        lambda: _with(nn.Parameter(torch.eye(4).to_sparse())),
        r"1\.weight is on cpu with layout torch\.sparse_coo",
    ),
    "subclass": (lambda: _with(_Special(torch.ones(4, 4))), r"1\.weight is a _Special"),
    "same memory": (_overlapping, r"0\.weight and 1\.weight are different parameters in the same"),
    "overlap": (_half_overlapping, r"0\.weight and 1\.weight are different parameters in the same"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_managed(tmp_path: Path, name: str) -> None:
    make, message = MODELS[name]
    model = make()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    types = [type(p) for p in model.parameters()]
    with pytest.raises(UnsupportedError, match=message):
        zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path)
    assert [type(p) for p in model.parameters()] == types
    assert zeepo.current_session() is None
    assert scratch_files(tmp_path) == []


def test_parameters_in_the_same_memory_over_two_models(tmp_path: Path) -> None:
    first = nn.Linear(4, 4)
    second = nn.Linear(4, 4)
    second.weight = nn.Parameter(first.weight.detach())
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with pytest.raises(UnsupportedError, match="same memory"):
        zeepo.init([first, second], optimizer, ram="1GiB", disk=tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        lambda: _Special(torch.ones(4)),
        lambda: nn.Parameter(torch.ones(4, device="meta")),
        lambda: nn.Parameter(torch.eye(4).to_sparse()),
        lambda: torch.ones(4, requires_grad=True),
    ],
    ids=["subclass", "meta", "sparse", "tensor"],
)
def test_loose_parameters_of_an_optimizer(tmp_path: Path, make: Any) -> None:
    """Parameters that are in the optimizer and in no module: refused, or trained like plainly."""
    model, _ = build()
    loose = make()
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1)
    with pytest.raises(UnsupportedError, match=r"optimizer0\.group0"):
        zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_lbfgs_and_its_subclasses(tmp_path: Path) -> None:
    model, _ = build()

    class Mine(torch.optim.LBFGS):
        pass

    for kind in (torch.optim.LBFGS, Mine):
        with pytest.raises(UnsupportedError, match=r"torch\.optim\.LBFGS cannot train.*AdamW"):
            zeepo.init(model, kind(model.parameters()), ram="1GiB", disk=tmp_path)


def test_the_budget_is_exact(tmp_path: Path) -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path) as session:
        minimum = session.plan.minimum_ram
        explained = session.plan.explain()
    assert isinstance(minimum, int)
    with pytest.raises(BudgetError) as refusal:
        zeepo.init(model, optimizer, ram=minimum - 1, disk=tmp_path)
    text = str(refusal.value)
    assert "too little" in text
    assert f"({minimum} bytes)" in text
    for line in ("torch itself", "staging", "params", "grads", "activations"):
        assert line in text, text
        assert line in explained
    assert "layers.0" in text
    with zeepo.init(model, optimizer, ram=minimum, disk=tmp_path) as session:
        assert train(model, optimizer, range(2)) == train(plain, plain_optimizer, range(2))
        assert session.stats().bytes_peak["ram"] <= session.plan.managed_bytes
    assert_same(model, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"durable": True},
        {"resume": "somewhere"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_later_versions(tmp_path: Path, options: dict[str, Any]) -> None:
    model, optimizer = build()
    with pytest.raises(UnsupportedError, match=next(iter(options))):
        zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path, **options)


def test_no_accelerator_and_no_model(tmp_path: Path) -> None:
    model, optimizer = build()
    with pytest.raises(ConfigError, match="device"):
        zeepo.init(model, optimizer, ram="1GiB", params="device", disk=tmp_path)
    with pytest.raises(ConfigError, match="without a model"):
        zeepo.init(None, optimizer, ram="1GiB", disk=tmp_path)


@pytest.mark.parametrize("bad", [3, "model", nn.Linear, None])
def test_arguments_that_are_no_model_or_optimizer(tmp_path: Path, bad: Any) -> None:
    model, optimizer = build()
    with pytest.raises(ConfigError, match="model"):
        zeepo.init(bad, optimizer, ram="1GiB", disk=tmp_path)
    if bad is not None:
        with pytest.raises(ConfigError, match="optimizer"):
            zeepo.init(model, bad, ram="1GiB", disk=tmp_path)
    with pytest.raises(ConfigError, match="model"):
        zeepo.init([model, bad], optimizer, ram="1GiB", disk=tmp_path)


CHANGES_OF_MEMORY: dict[str, tuple[Any, str]] = {
    "set_": (lambda p, m: p.detach().set_(torch.zeros(3)), r"set_ on layers\.1\.weight"),
    "resize_": (lambda p, m: p.detach().resize_(3), r"resize_ on layers\.1\.weight"),
    "resize_as_": (lambda p, m: p.detach().resize_as_(torch.ones(3)), "resize_as_ on layers.1"),
    "share_memory_": (lambda p, m: p.share_memory_(), r"share_memory_ on layers\.1\.weight"),
    "model.share_memory": (lambda p, m: m.share_memory(), r"share_memory_ on layers\.0\.weight"),
    "data of another size": (
        lambda p, m: setattr(p, "data", torch.zeros(3)),
        r"layers\.1\.weight cannot change.*\(32, 32\).*\(3,\)",
    ),
    "data of another dtype": (
        lambda p, m: setattr(p, "data", torch.zeros(WIDTH, WIDTH, dtype=torch.float64)),
        r"layers\.1\.weight cannot change.*float32.*float64",
    ),
    "half": (lambda p, m: m.half(), r"layers\.0\.weight.*float16"),
    "to dtype": (lambda p, m: m.to(torch.bfloat16), r"layers\.0\.weight.*bfloat16"),
    "sparse data": (
        lambda p, m: setattr(p, "data", torch.zeros(WIDTH, WIDTH).to_sparse()),
        "sparse",
    ),
}


_SET = "set_"


@pytest.mark.parametrize("name", [_SET, *(n for n in CHANGES_OF_MEMORY if n != "set_")])
def test_changes_of_managed_memory(tmp_path: Path, name: str) -> None:
    change, message = CHANGES_OF_MEMORY[name]
    model, optimizer = build()
    plain, plain_optimizer = build()
    with open_at_minimum(model, optimizer, tmp_path):
        train(model, optimizer, range(1))
        with pytest.raises(RuntimeError, match=message):  # UnsupportedError is one
            change(model.layers[1].weight, model)
        train(model, optimizer, range(1, 3))
    train(plain, plain_optimizer, range(3))
    assert_same(model, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize("is_other", [False, True])
def test_an_optimizer_of_another_model_is_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_other: bool
) -> None:
    """Plain PyTorch trains nothing then, without a word."""
    model, optimizer = build()
    if is_other:
        model, _ = build()
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path, progress=False):
        train(model, optimizer, range(1))
    said = capsys.readouterr().err
    assert ("none of them of the model given" in said) is is_other
