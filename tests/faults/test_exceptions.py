"""Exceptions in the user's forward and backward: the next batch trains as if plainly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.faults.small import Deep, assert_same, batch, build, loss_of, open_at_minimum, train
from zeepo.errors import BudgetError

Training = Callable[[Deep, torch.optim.Optimizer], list[float]]


def fail_in_forward(model: Deep, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = train(model, optimizer, range(2))
    for at in (0, 3, 7):
        model.fail_at = at
        with pytest.raises(ValueError, match="fails"):
            train(model, optimizer, [2])
        model.fail_at = None
        losses += train(model, optimizer, [3 + at])
    return losses


def fail_in_backward(model: Deep, optimizer: torch.optim.Optimizer) -> list[float]:
    """A tensor hook raises; the gradients made before it stay, as torch leaves them."""
    losses = train(model, optimizer, range(2))

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("a hook fails")

    for at in (1, 4, 6):
        x = batch(at)
        for number, layer in enumerate(model.layers):
            x = torch.tanh(layer(x))
            if number == at:
                x.register_hook(fail)
        with pytest.raises(ValueError, match="a hook fails"):
            x.sum().backward()
        losses += train(model, optimizer, [10 + at])
    return losses


def fail_in_parameter_hook(model: Deep, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = train(model, optimizer, range(2))

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("a hook fails")

    for at in (1, 5):
        handle = model.layers[at].weight.register_hook(fail)
        with pytest.raises(ValueError, match="a hook fails"):
            loss_of(model, at).backward()
        handle.remove()
        losses += train(model, optimizer, [10 + at])
    handle = model.layers[2].weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError, match="a hook fails"):
        loss_of(model, 2).backward()
    handle.remove()
    return losses + train(model, optimizer, [20])


def fail_in_optimizer(model: Deep, optimizer: torch.optim.Optimizer) -> list[float]:
    """A step hook and a closure raise before anything is updated."""
    losses = train(model, optimizer, range(2))

    def fail(*_: object) -> None:
        raise ValueError("no step")

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(ValueError, match="no step"):
        train(model, optimizer, [2])
    handle.remove()
    with pytest.raises(ValueError, match="no step"):
        optimizer.step(fail)
    return losses + train(model, optimizer, [3])


def fail_with_wrong_shapes(model: Deep, optimizer: torch.optim.Optimizer) -> list[float]:
    """Errors that torch itself raises."""
    losses = train(model, optimizer, range(2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 5))
    with pytest.raises(RuntimeError, match="size"):
        model.layers[0].weight.detach().view(7, 7)
    loss = loss_of(model, 2)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    optimizer.zero_grad()
    return losses + train(model, optimizer, [3])


TRAININGS = [
    fail_in_forward,
    fail_in_backward,
    fail_in_parameter_hook,
    fail_in_optimizer,
    fail_with_wrong_shapes,
]


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.__name__)
def test_training_goes_on(tmp_path: Path, training: Training) -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    expected = training(plain, plain_optimizer)
    with open_at_minimum(model, optimizer, tmp_path) as session:
        assert training(model, optimizer) == expected
        assert_same(model, optimizer, plain, plain_optimizer)
        assert all(chunk.leases == 0 for chunk in session._store.chunks())
    assert_same(model, optimizer, plain, plain_optimizer)


def test_fast_path_of_the_transformer(tmp_path: Path) -> None:
    """An exception while parameters wear the ordinary class does not leave them so."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.ModuleDict({"body": nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    classes = [type(p) for p in model.parameters()]
    with open_at_minimum(model, optimizer, tmp_path):
        managed = [type(p) for p in model.parameters()]
        model.eval()
        with torch.no_grad(), pytest.raises((RuntimeError, AssertionError)):
            model["body"](torch.ones(1, 3, 7))
        assert [type(p) for p in model.parameters()] == managed
        with torch.no_grad():
            model["body"](torch.ones(1, 3, 16))
    assert [type(p) for p in model.parameters()] == classes


def test_budget_error_in_the_middle_does_not_end_the_session(tmp_path: Path) -> None:
    """What needs more at once than fits is refused, and the rest goes on."""
    model, optimizer = build()
    plain, plain_optimizer = build()
    train(plain, plain_optimizer, range(4))
    with open_at_minimum(model, optimizer, tmp_path) as session:
        train(model, optimizer, range(2))
        with pytest.raises(BudgetError, match="Raise ram"), session.gathered(model):
            pass
        with nullcontext():
            train(model, optimizer, range(2, 4))
        assert all(chunk.leases == 0 for chunk in session._store.chunks())
    assert_same(model, optimizer, plain, plain_optimizer)
