"""Lion: the sign of an average of gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zeepo.optim.checks import at_least_zero, below_one, single
from zeepo.optim.elementwise import ElementwiseOptimizer, Group
from zeepo.optim.updates import Algorithm, Rule


class Lion(ElementwiseOptimizer):
    """Lion (Chen et al. 2023), with decoupled weight decay; torch has none. One state, `exp_avg`.

    `state_dtype` and `master_weights` as in `Adam`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: str = "fp32",
        master_weights: bool = False,
    ):
        single("lr", lr)
        at_least_zero(lr=lr, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "betas": below_one(betas),
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            state_dtype=state_dtype,
            master_weights=master_weights,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            differentiable=differentiable,
        )

    def state_names(self, group: Group) -> tuple[str | None, ...]:
        return ("exp_avg",)

    def rule(self, group: Group, step: int, is_first: bool) -> Rule:
        lr = single("lr", group["lr"])
        beta1, beta2 = (single("beta", beta) for beta in group["betas"])
        decays = group["weight_decay"] != 0
        return Rule(
            Algorithm.LION,
            rate=-lr,
            decay=1 - lr * group["weight_decay"] if decays else None,
            weight1=1 - beta1,
            weight2=1 - beta2,
            maximize=group["maximize"],
        )
