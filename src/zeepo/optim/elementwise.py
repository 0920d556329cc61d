"""What zeepo's own optimizers have in common: one pass over memory for each parameter.

Unscaling (GradScaler), clipping by a factor, weight decay, the update, rounding of the states and
the bf16 copy of fp32 masters happen while a run of elements is in the cache. Names, arguments and
states are those of torch's optimizers; with fp32 states so are the bits, those of its
`foreach=False, fused=False` path.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeepo.errors import ConfigError, UnsupportedError
from zeepo.optim import kernels, torch_updates
from zeepo.optim.formats import BLOCKS, Format, format_named
from zeepo.optim.loading import converted, kept_apart
from zeepo.optim.memory_order import Flat, memory_order
from zeepo.optim.updates import Rule, Update

MASTER = "master"
OWN_OPTIONS = ("state_dtype", "master_weights")
_ORDINARY = (Tensor, nn.Parameter)

Group = dict[str, Any]
State = dict[str, Any]


class ElementwiseOptimizer(Optimizer):
    """An optimizer that treats every element alike.

    `clip_factor`: None, or a number (or tensor of one) that gradients are multiplied by, rounded to
    fp32, in the next step; that step consumes it. `p.grad` itself is not changed by it, nor by
    unscaling.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        state_dtype: str,
        master_weights: bool,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ):
        format_named(state_dtype)
        if foreach and fused:
            raise ConfigError("foreach=True and fused=True: give one of them; neither is needed.")
        self.clip_factor: float | Tensor | None = None
        self._step_supports_amp_scaling = True
        ways = {
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
        }
        own = {"state_dtype": state_dtype, "master_weights": master_weights}
        super().__init__(params, {**defaults, **ways, **own})
        self._settle()

    def _settle(self) -> None:
        """After the object is made, or made again from a pickle."""
        for group in self.param_groups:
            for name in ("capturable", "differentiable"):
                if group[name]:
                    raise UnsupportedError(
                        f"zeepo.optim.{type(self).__name__} does not support {name}=True: it works "
                        "on CPU memory, outside autograd. Use torch.optim's for that."
                    )
        hooks = self._optimizer_step_post_hooks.values()
        if not any(hook is _consume_clip_factor for hook in hooks):
            self.register_step_post_hook(_consume_clip_factor)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("clip_factor", None)
        self._step_supports_amp_scaling = True
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)  # what torch's optimizer does not know
        self._settle()

    # -- what each optimizer tells ----------------------------------------------------------------

    @abstractmethod
    def state_names(self, group: Group) -> tuple[str | None, ...]:
        """Names of the states, in the kernel's order; None for one that is not kept."""

    @abstractmethod
    def rule(self, group: Group, step: int, is_first: bool) -> Rule:
        """The arithmetic of a step; `step` counts from 1."""

    def counts_steps(self, group: Group) -> bool:
        """Whether there is a state `step`."""
        return True

    def initial_value(self, group: Group) -> float:
        """Of every state."""
        return 0.0

    # -- the step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = _number(getattr(self, "grad_scale", None))
        clip = _number(self.clip_factor)
        is_skipped = bool(_number(getattr(self, "found_inf", None)))
        for p in [p for group in self.param_groups for p in group["params"]]:
            if p.grad is not None:
                self._refuse(p, p.grad)
        if is_skipped:  # and no states are made: SGD's first step is another one
            return loss
        for group in self.param_groups:
            rules: dict[tuple[int, bool], Rule] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                is_first = self._make_states(group, p, self.state[p])
                step = self._count(group, self.state[p])
                if (step, is_first) not in rules:
                    rules[step, is_first] = self.rule(group, step, is_first)
                self._update(group, p, rules[step, is_first], step, scale, clip)
        return loss

    def _update(
        self,
        group: Group,
        p: Tensor,
        rule: Rule,
        step: int,
        scale: float | None,
        clip: float | None,
    ) -> None:
        grad = p.grad
        assert grad is not None
        state = self.state[p]
        names = self.state_names(group)
        order = memory_order(p)
        has_master = MASTER in state
        tensors = {name: Flat(state[name], order) for name in names if name is not None}
        if has_master:
            tensors[MASTER] = Flat(state[MASTER], order)
        tensors["p"] = Flat(p.detach(), order)
        values = tensors[MASTER].flat if has_master else tensors["p"].flat
        is_narrow = p.dtype is torch.bfloat16
        update = Update(
            rule=rule,
            values=values if has_master or not is_narrow else None,
            narrow=tensors["p"].flat if is_narrow else None,
            grad=Flat(grad.detach(), order).flat,
            states=[None if name is None else tensors[name].flat for name in names],
            format=format_named(group["state_dtype"]),
            step=step,
            grad_scale=scale,
            clip_factor=clip,
        )
        if kernels.in_use() and all(map(_is_ordinary, (p, grad, *state.values()))):
            kernels.run(update)
            if not p.is_inference():
                torch.autograd.graph.increment_version([p])
        else:
            torch_updates.run(update)
        for tensor in tensors.values():
            tensor.write_back()

    def _refuse(self, p: Tensor, grad: Tensor) -> None:
        name = f"zeepo.optim.{type(self).__name__}"
        dtypes = (torch.float32, torch.bfloat16)
        if grad.layout is not torch.strided or p.layout is not torch.strided:
            raise UnsupportedError(
                f"{name}: a gradient of layout {grad.layout}. It takes dense gradients only: make "
                "the layer with sparse=False, or use torch.optim's for this parameter."
            )
        if p.dtype not in dtypes or grad.dtype not in dtypes:
            raise UnsupportedError(
                f"{name}: a parameter of {p.dtype} with a gradient of {grad.dtype}. It updates "
                "float32 and bfloat16 parameters: use torch.optim's for others."
            )

    def _count(self, group: Group, state: State) -> int:
        if not self.counts_steps(group):
            return 0
        state["step"] += 1
        return int(state["step"].item())

    def _make_states(self, group: Group, p: Tensor, state: State) -> bool:
        """Make what is missing; whether it was the first state, which SGD fills itself."""
        if self.counts_steps(group) and "step" not in state:
            dtype = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
            state["step"] = torch.tensor(0.0, dtype=dtype)
        is_first = False
        format_ = format_named(group["state_dtype"])
        for name in self.state_names(group):
            if name is not None and state.get(name) is None:
                is_first = True
                state[name] = _new_state(p, format_, self.initial_value(group))
        if group["master_weights"] and p.dtype is torch.bfloat16 and state.get(MASTER) is None:
            state[MASTER] = torch.empty_strided(p.shape, memory_order(p)).copy_(p.detach())
        return is_first

    # -- loading ----------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer or of torch's own, whatever format its tensors have.

        How states are kept (`state_dtype`, `master_weights`) is this optimizer's choice, not the
        file's: they are converted.
        """
        own = [{name: group[name] for name in OWN_OPTIONS} for group in self.param_groups]
        small, large = kept_apart(state_dict)
        super().load_state_dict(small)
        for group, saved, options in zip(
            self.param_groups, state_dict["param_groups"], own, strict=True
        ):
            group.update(options)
            format_ = format_named(group["state_dtype"])
            names = self.state_names(group)
            for p, number in zip(group["params"], saved["params"], strict=True):
                for name, value in large.get(number, {}).items():
                    is_signed = names[:1] == (name,) and name != "sum"
                    wanted = format_ if name in names else None
                    self.state[p][name] = converted(value, p, wanted, is_signed=is_signed)


def _new_state(p: Tensor, format_: Format, value: float) -> Tensor:
    if format_ is not Format.PACKED:
        state = torch.empty_strided(p.shape, memory_order(p), dtype=format_.dtype, device=p.device)
        return state.fill_(value)
    if value == 0:
        return torch.zeros(BLOCKS.numel(p.numel()), dtype=torch.uint8, device=p.device)
    full = torch.full((p.numel(),), value, dtype=torch.float32)
    return converted(full, full, Format.PACKED, is_signed=value < 0)


def _number(value: float | Tensor | None) -> float | None:
    return value.item() if isinstance(value, Tensor) else value


def _is_ordinary(value: Any) -> bool:
    """Whether a state or tensor may be handed to the kernels by its address."""
    return not isinstance(value, Tensor) or (
        type(value) in _ORDINARY and value.device.type == "cpu"
    )


def _consume_clip_factor(optimizer: Any, args: Any, kwargs: Any) -> None:
    optimizer.clip_factor = None
