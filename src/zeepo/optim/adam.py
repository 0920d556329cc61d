"""Adam and AdamW."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zeepo.optim.checks import at_least_zero, below_one, single
from zeepo.optim.elementwise import ElementwiseOptimizer, Group
from zeepo.optim.updates import Algorithm, Rule


class Adam(ElementwiseOptimizer):
    """As `torch.optim.Adam`, in one pass over memory.

    `state_dtype`: "fp32", "bf16" or "8bit", how the moments are kept. `master_weights`: bf16
    parameters are updated in fp32, kept in the state `master`, and rounded to bf16.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: str = "fp32",
        master_weights: bool = False,
    ):
        single("lr", lr)
        at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "betas": below_one(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
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
        return "exp_avg", "exp_avg_sq", "max_exp_avg_sq" if group["amsgrad"] else None

    def rule(self, group: Group, step: int, is_first: bool) -> Rule:
        lr = single("lr", group["lr"])
        beta1, beta2 = (single("beta", beta) for beta in group["betas"])
        decays = group["weight_decay"] != 0
        is_decoupled = group["decoupled_weight_decay"]
        return Rule(
            Algorithm.ADAM,
            rate=-(lr / (1 - beta1 ** float(step))),
            weight_decay=group["weight_decay"] if decays and not is_decoupled else 0.0,
            decay=1 - lr * group["weight_decay"] if decays and is_decoupled else None,
            weight1=1 - beta1,
            weight2=1 - beta2,
            beta2=beta2,
            correction=(1 - beta2 ** float(step)) ** 0.5,
            eps=group["eps"],
            maximize=group["maximize"],
            amsgrad=group["amsgrad"],
        )


class AdamW(Adam):
    """As `torch.optim.AdamW`, in one pass over memory; see `Adam` for the other options."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: str = "fp32",
        master_weights: bool = False,
    ):
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            state_dtype=state_dtype,
            master_weights=master_weights,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True
