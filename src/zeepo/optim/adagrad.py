"""Adagrad."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zeepo.optim.checks import at_least_zero, single
from zeepo.optim.elementwise import ElementwiseOptimizer, Group
from zeepo.optim.updates import Algorithm, Rule


class Adagrad(ElementwiseOptimizer):
    """As `torch.optim.Adagrad` for dense gradients; `state_dtype` and `master_weights` as in
    `Adam`. Its states are made by the first step and not before."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: str = "fp32",
        master_weights: bool = False,
    ):
        single("lr", lr)
        at_least_zero(
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
        )
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
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
        return ("sum",)

    def initial_value(self, group: Group) -> float:
        return float(group["initial_accumulator_value"])

    def rule(self, group: Group, step: int, is_first: bool) -> Rule:
        return Rule(
            Algorithm.ADAGRAD,
            rate=-(single("lr", group["lr"]) / (1 + (float(step) - 1) * group["lr_decay"])),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
