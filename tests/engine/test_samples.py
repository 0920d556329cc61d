"""How many samples a batch has, and what that means for the ranks' weights."""

from __future__ import annotations

import torch
from torch import nn

from zeepo.engine.samples import Samples, num_samples
from zeepo.engine.summing import UNKNOWN, weights_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * scale
        return out


def test_the_first_tensor_tells() -> None:
    x = torch.zeros(7, 3)
    assert num_samples([x]) == 7
    assert num_samples([None, torch.tensor(1.0), {"ids": x}]) == 7
    assert num_samples([[x], torch.zeros(2)]) == 7
    assert num_samples(["text", 3]) is None


def test_the_last_forward_before_a_backward_counts() -> None:
    original = Net.forward
    model, other = Net(), Net()
    samples = Samples()
    samples.watch([model])
    other(torch.zeros(9, 3))
    with torch.no_grad():
        model(torch.zeros(8, 3))
    model(x=torch.zeros(5, 3))
    model(torch.zeros(6, 3))
    assert samples.take() == 6
    assert samples.take() == 6, "a second backward of the same forward"
    model(torch.zeros(4, 3))
    assert samples.take() == 4
    samples.stop()
    assert Net.forward is original


def test_classes_without_a_forward_of_their_own_are_left_as_they_were() -> None:
    class Child(Net):
        pass

    samples = Samples()
    model = Child()
    samples.watch([model])
    model(torch.zeros(4, 3))
    assert samples.take() == 4
    samples.stop()
    assert "forward" not in vars(Child)


def test_time_first_models_are_not_counted() -> None:
    model = nn.Sequential(nn.LSTM(3, 2))
    samples = Samples()
    samples.watch([model])
    model(torch.zeros(11, 4, 3))
    assert samples.take() == UNKNOWN
    samples.stop()


def test_weights() -> None:
    assert weights_of([4, 4, 4]) == [1 / 3] * 3
    assert weights_of([UNKNOWN, 4]) == [0.5, 0.5]
    assert weights_of([0, 4]) == [0.0, 1.0]
    assert weights_of([5, 3]) == [5 / 8, 3 / 8]
