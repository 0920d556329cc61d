"""Stochastic gradient descent, with momentum."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zeepo.errors import ConfigError
from zeepo.optim.checks import at_least_zero, single
from zeepo.optim.elementwise import ElementwiseOptimizer, Group
from zeepo.optim.updates import Algorithm, Rule


class SGD(ElementwiseOptimizer):
    """As `torch.optim.SGD` for dense gradients; `state_dtype` and `master_weights` as in `Adam`.

    With momentum that is not fp32 it counts its steps, for the rounding, in a state `step`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: str = "fp32",
        master_weights: bool = False,
    ):
        single("lr", lr)
        at_least_zero(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ConfigError("nesterov=True needs a momentum and no dampening.")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            state_dtype=state_dtype,
            master_weights=master_weights,
            foreach=foreach,
            fused=fused,
            differentiable=differentiable,
        )

    def state_names(self, group: Group) -> tuple[str | None, ...]:
        return ("momentum_buffer" if group["momentum"] != 0 else None,)

    def counts_steps(self, group: Group) -> bool:
        return bool(group["momentum"]) and group["state_dtype"] != "fp32"

    def rule(self, group: Group, step: int, is_first: bool) -> Rule:
        return Rule(
            Algorithm.SGD,
            rate=-single("lr", group["lr"]),
            weight_decay=group["weight_decay"],
            weight1=1 - group["dampening"],
            beta2=group["momentum"],
            maximize=group["maximize"],
            nesterov=group["nesterov"],
            is_first=is_first,
        )
