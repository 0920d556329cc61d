"""Updates by torch's operations: where there are no native kernels, or tensors are not ordinary.

The order of operations is that of torch's single-tensor optimizers and of native/body.inc. torch
multiplies and adds in one rounding where the machine can (AVX2, AVX-512, NEON), and so do the
kernels; with ATEN_CPU_CAPABILITY=default it does not, and then the last bits differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeepo.optim.formats import Format, narrow_randomly, pack, unpack
from zeepo.optim.updates import Algorithm, Rule, Update

SLICE = 1 << 16
"""Elements that are updated at once, so that temporaries are few; a multiple of a block."""


def run(update: Update) -> None:
    """Carry out an update."""
    for start in range(0, update.numel, SLICE):
        _run(update.part(start, SLICE) if update.numel > SLICE else update)


def _run(update: Update) -> None:
    values = update.values
    if values is None:
        assert update.narrow is not None
        values = update.narrow.to(torch.float32)
    grad = _grad(update, values)
    states = [_load(update, index) for index in range(len(update.states))]
    _UPDATES[update.rule.algorithm](update.rule, values, grad, states)
    for index, state in enumerate(states):
        _store(update, index, state, grad)
    if update.narrow is not None:
        update.narrow.copy_(values)


def _grad(update: Update, values: Tensor) -> Tensor:
    """The gradient as the update uses it: unscaled, clipped, with its sign and decay."""
    grad = update.grad.to(torch.float32)
    if update.grad_scale is not None:
        grad = grad / update.grad_scale
    if update.clip_factor is not None:
        grad = grad * update.clip_factor
    if update.rule.maximize:
        grad = -grad
    if update.rule.weight_decay:
        grad = grad.add(values, alpha=update.rule.weight_decay)
    return grad


def _load(update: Update, index: int) -> Tensor | None:
    state = update.states[index]
    if state is None or update.format is Format.FP32:
        return state
    if update.format is Format.BF16:
        return state.to(torch.float32)
    return unpack(state, update.numel, is_signed=update.is_signed(index))


def _store(update: Update, index: int, value: Tensor | None, grad: Tensor) -> None:
    state = update.states[index]
    if state is None or value is None or update.format is Format.FP32:
        return
    if update.format is Format.BF16:
        state.copy_(narrow_randomly(value, grad, update.salt(index)))
    else:
        is_signed = update.is_signed(index)
        state.copy_(pack(value, grad, update.salt(index), is_signed=is_signed))


def _sqrt(values: Tensor) -> Tensor:
    """To the nearest fp32. torch's own is MKL's, which is often one last digit off."""
    return values.to(torch.float64).sqrt_().to(torch.float32)


def _adam(rule: Rule, values: Tensor, grad: Tensor, states: list[Tensor | None]) -> None:
    mean, square, most = states
    assert mean is not None
    assert square is not None
    if rule.decay is not None:
        values.mul_(rule.decay)
    mean.lerp_(grad, rule.weight1)
    square.mul_(rule.beta2).addcmul_(grad, grad, value=rule.weight2)
    if most is not None:
        square = torch.maximum(most, square, out=most)
    denominator = (_sqrt(square) / rule.correction).add_(rule.eps)
    values.addcdiv_(mean, denominator, value=rule.rate)


def _sgd(rule: Rule, values: Tensor, grad: Tensor, states: list[Tensor | None]) -> None:
    momentum = states[0]
    if momentum is not None:
        if rule.is_first:
            momentum.copy_(grad)
        else:
            momentum.mul_(rule.beta2).add_(grad, alpha=rule.weight1)
        grad = grad.add(momentum, alpha=rule.beta2) if rule.nesterov else momentum
    values.add_(grad, alpha=rule.rate)


def _adagrad(rule: Rule, values: Tensor, grad: Tensor, states: list[Tensor | None]) -> None:
    total = states[0]
    assert total is not None
    total.addcmul_(grad, grad, value=1)
    values.addcdiv_(grad, _sqrt(total).add_(rule.eps), value=rule.rate)


def _lion(rule: Rule, values: Tensor, grad: Tensor, states: list[Tensor | None]) -> None:
    mean = states[0]
    assert mean is not None
    direction = mean.lerp(grad, rule.weight1).sign_()
    if rule.decay is not None:
        values.mul_(rule.decay)
    values.add_(direction, alpha=rule.rate)
    mean.lerp_(grad, rule.weight2)


_UPDATES = {
    Algorithm.ADAM: _adam,
    Algorithm.SGD: _sgd,
    Algorithm.ADAGRAD: _adagrad,
    Algorithm.LION: _lion,
}
