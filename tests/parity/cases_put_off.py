"""Between a step and the next use of what it changes: nobody can tell that an update waits.

Each program does one thing right after `optimizer.step()`, from the second step on, when updates
are put off.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from .harness import Observations, Start, case
from .models import HIDDEN, INPUTS, OUTPUTS, Perceptron, perceptron_loss, points

Between = Callable[[nn.Module, Optimizer, int], Any]


def _steps(
    model: nn.Module, optimizer: Optimizer, between: Between, num_steps: int = 6
) -> Iterator[tuple[str, Any]]:
    for step in range(num_steps):
        loss = perceptron_loss(model, step)
        loss.backward()
        optimizer.step()
        yield "between", between(model, optimizer, step)
        optimizer.zero_grad()
        yield "loss", loss


def _register(
    name: str, between: Between, *, in_a_tensor: bool = False, whole: bool = False, **options: Any
) -> None:
    @case(f"after_step_{name}", whole=whole)
    def program(start: Start) -> Observations:
        model = Perceptron()
        rate: Any = torch.tensor(1e-2) if in_a_tensor else 1e-2
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, **options)
        with start(model, optimizer):
            yield from _steps(model, optimizer, between)


def _change_settings(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group.update(lr=0.02 / (step + 1), betas=(0.5, 0.6), weight_decay=0.3, eps=1e-3)


def _change_rate_in_place(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"].fill_(0.02 / (step + 1))


def _read_some(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    chooser = random.Random(step)
    return [p.sum() for p in model.parameters() if chooser.random() < 0.4]


def _read_states(model: nn.Module, optimizer: Optimizer, step: int) -> list[Any]:
    chooser = random.Random(step)
    chosen = [s for s in optimizer.state.values() if chooser.random() < 0.5]
    return [(s["step"].item(), s["exp_avg"].norm(), s["exp_avg_sq"].norm()) for s in chosen]


def _read_counters_only(model: nn.Module, optimizer: Optimizer, step: int) -> list[float]:
    return [float(state["step"]) for state in optimizer.state.values()]


def _reset_states(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 2:
        optimizer.state = defaultdict(dict)
    if step == 4:
        optimizer.state.clear()


def _replace_some_states(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step in (2, 4):
        for p in list(model.parameters())[1::2]:
            optimizer.state[p]["exp_avg"] = torch.full_like(p, 0.1)
            optimizer.state[p]["step"] = torch.tensor(1.0)


def _zero_some_states(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for p in list(model.parameters())[::3]:
        optimizer.state[p]["exp_avg"].zero_()


def _load_old_states(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 1:
        optimizer.kept = copy.deepcopy(optimizer.state_dict())  # type: ignore[attr-defined]
    if step == 3:
        optimizer.load_state_dict(optimizer.kept)  # type: ignore[attr-defined]


def _load_old_weights(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 1:
        model.kept = copy.deepcopy(model.state_dict())
    if step == 3:
        model.load_state_dict(model.kept)


def _evaluate(model: nn.Module, optimizer: Optimizer, step: int) -> list[torch.Tensor]:
    with torch.inference_mode():
        first = perceptron_loss(model, 50 + step).clone()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        second = perceptron_loss(model, 60 + step)
    return [first, second]


def _count_operations(model: nn.Module, optimizer: Optimizer, step: int) -> int:
    with FlopCounterMode(display=False) as counter:
        perceptron_loss(model, step).backward()
    return int(counter.get_total_flops())


def _differentiate(model: nn.Module, optimizer: Optimizer, step: int) -> Any:
    """The first use is inside torch.func: through buffers and parameters given as arguments."""
    values = dict(model.first.named_parameters())  # type: ignore[union-attr,operator]

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model.first, parameters, points(step)[0]).square().mean()

    return torch.func.grad(loss)(values)


def _change_gradients_held(model: nn.Module, optimizer: Optimizer, step: int) -> float:
    """Gradients kept over zero_grad are the user's, to read and to change."""
    held = [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    gone = all(p.grad is None for p in model.parameters())
    for grad in held[::2]:
        assert grad is not None
        grad.mul_(3.0)
    return float(sum(grad.sum() for grad in held if grad is not None)) + gone


def _new_gradients_and_step(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Two updates of the same parameters with no forward between them."""
    for p in list(model.parameters())[1:]:
        p.grad = torch.full_like(p, 0.01 * (step + 1))
    optimizer.step()
    optimizer.step()


def _copy_model(model: nn.Module, optimizer: Optimizer, step: int) -> Any:
    twin = copy.deepcopy(model)
    return perceptron_loss(twin, step), [p.grad for p in twin.parameters()]


def _unfreeze_and_freeze(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """A frozen parameter keeps its gradient; whether it is updated depends on zero_grad alone."""
    for p in list(model.parameters())[2:4]:
        p.requires_grad_(step % 2 == 1)


_register("settings_change", _change_settings)
_register("rate_in_a_tensor_changes", _change_rate_in_place, in_a_tensor=True)
_register("some_are_read", _read_some)
_register("states_are_read", _read_states)
_register("counters_are_read", _read_counters_only)
_register("states_are_reset", _reset_states)
_register("states_are_replaced", _replace_some_states)
_register("states_are_zeroed", _zero_some_states, amsgrad=True)
_register("states_are_loaded", _load_old_states)
_register("weights_are_loaded", _load_old_weights)
_register("evaluation", _evaluate)
_register("a_mode_counts", _count_operations)
_register("a_function_transform", _differentiate, whole=True)
_register("gradients_are_held", _change_gradients_held)
_register("another_step", _new_gradients_and_step)
_register("deepcopy", _copy_model)
_register("freezing", _unfreeze_and_freeze)


def _numpy_holder() -> Between:
    held: dict[int, Any] = {}

    def between(model: nn.Module, optimizer: Optimizer, step: int) -> Any:
        """An array taken before the step shows the step's result at once."""
        sums = [float(array.sum()) for array in held.values()]
        held.clear()
        if step % 2:
            for index, p in enumerate(list(model.parameters())[:3]):
                held[index] = p.detach().numpy()
        return sums

    return between


@case("after_step_arrays_show_it", whole=True)  # raw addresses stay in ram beside the rest
def after_step_arrays_show_it(start: Start) -> Observations:
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        yield from _steps(model, optimizer, _numpy_holder(), 7)


@case("zero_grad_after_forward")
def zero_grad_after_forward(start: Start) -> Observations:
    """The old gradients stay until just before backward."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)
    with start(model, optimizer):
        for step in range(6):
            loss = perceptron_loss(model, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield "loss", loss


@case("two_optimizers_in_one_unit")
def two_optimizers_in_one_unit(start: Start) -> Observations:
    """Weights and biases have optimizers of their own, stepping at different times."""
    model = Perceptron()
    weights = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 2], lr=1e-2)
    biases = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=1e-1, momentum=0.5)
    with start(model, [weights, biases]):
        for step in range(6):
            loss = perceptron_loss(model, step)
            loss.backward()
            weights.step()
            weights.zero_grad()
            if step % 2:
                biases.step()
                biases.zero_grad()
            yield "loss", loss


@case("step_in_odd_contexts")
def step_in_odd_contexts(start: Start) -> Observations:
    """Inside autocast, inside enabled gradients, inside a mode that watches."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    contexts = [
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.enable_grad(),
        FlopCounterMode(display=False),
    ]
    with start(model, optimizer):
        for step in range(6):
            loss = perceptron_loss(model, step)
            loss.backward()
            with contexts[step % 3]:
                optimizer.step()
                optimizer.zero_grad()
            yield "loss", loss


@case("old_graph_after_step")
def old_graph_after_step(start: Start) -> Observations:
    """Backward through a graph made before the step is an error of autograd's, with its words."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(6):
            loss = perceptron_loss(model, step)
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            try:
                loss.backward()
            except RuntimeError as error:
                yield "refused", "modified by an inplace operation" in str(error)
            optimizer.zero_grad()
            yield "loss", loss


@case("one_element_parameters")
def one_element_parameters(start: Start) -> Observations:
    """A unit with a learnt scale: its states are as small as the counters."""

    class Scaled(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.linear = nn.Linear(inputs, outputs)
            self.scale = nn.Parameter(torch.ones(1))
            self.shift = nn.Parameter(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x) * self.scale + self.shift)

    model = nn.Sequential(
        Scaled(INPUTS, HIDDEN),
        *[Scaled(HIDDEN, HIDDEN) for _ in range(4)],
        nn.Linear(HIDDEN, OUTPUTS),
    )
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(6):
            x, target = points(step)
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss
