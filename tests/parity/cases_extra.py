"""Cases that the mutation tests asked for: what no other case does at the right moment."""

from __future__ import annotations

import torch

from .harness import Observations, Start, case
from .models import Perceptron, perceptron_loss, train


@case("plain_perceptron_adamw")
def plain_perceptron_adamw(start: Start) -> Observations:
    """The plainest loop there is."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        yield from train(model, optimizer, range(5))


@case("plain_perceptron_accumulates")
def plain_perceptron_accumulates(start: Start) -> Observations:
    """Three contributions to every gradient."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(5):
            for part in range(3):
                loss = perceptron_loss(model, 10 * step + part)
                loss.backward()
                yield "loss", loss
            optimizer.step()
            optimizer.zero_grad()


@case("writes_right_after_step")
def writes_right_after_step(start: Start) -> Observations:
    """Every parameter is changed while what the step did to it may still be on its way down."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(6):
            yield from train(model, optimizer, range(step, step + 1))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
