"""What one update of one tensor is made of: flat tensors and numbers, whoever carries it out.

The native kernels (kernels.py) and torch's operations (torch_updates.py) take the same `Update`
and give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from torch import Tensor

from zeepo.optim.formats import BLOCKS, PLAIN, Format, Packing


class Algorithm(IntEnum):
    """Numbers as in native/kernels.h."""

    ADAM = 0
    SGD = 1
    ADAGRAD = 2
    LION = 3


@dataclass(frozen=True)
class Rule:
    """The arithmetic of one step for one parameter group; numbers are rounded to fp32 when used."""

    algorithm: Algorithm
    rate: float
    """The negative step size."""
    weight_decay: float = 0.0
    """Times the parameter is added to the gradient."""
    decay: float | None = None
    """The parameter is multiplied by it before the update."""
    weight1: float = 0.0
    """1 - beta1; SGD: 1 - dampening."""
    weight2: float = 0.0
    """1 - beta2."""
    beta2: float = 0.0
    """SGD: momentum."""
    correction: float = 1.0
    """Square root of Adam's second bias correction."""
    eps: float = 0.0
    maximize: bool = False
    amsgrad: bool = False
    nesterov: bool = False
    is_first: bool = False
    """SGD: there is no momentum yet."""


@dataclass(frozen=True)
class Update:
    """A rule and the flat tensors, all in one order, that it is for."""

    rule: Rule
    values: Tensor | None
    """fp32 parameters, or the master of narrow ones."""
    narrow: Tensor | None
    """bf16 parameters."""
    grad: Tensor
    states: Sequence[Tensor | None]
    """As many as the algorithm has; None for one that this step does without."""
    format: Format
    step: int
    grad_scale: float | None = None
    clip_factor: float | None = None

    @property
    def numel(self) -> int:
        tensor = self.narrow if self.values is None else self.values
        assert tensor is not None
        return tensor.numel()

    def part(self, start: int, count: int) -> Update:
        """The update of some elements only, from a multiple of a block on."""

        def cut(tensor: Tensor | None, packing: Packing = PLAIN) -> Tensor | None:
            low, high = packing.numel(start), packing.numel(start + count)
            return None if tensor is None else tensor[low:high]

        packing = BLOCKS if self.format is Format.PACKED else PLAIN
        return replace(
            self,
            values=cut(self.values),
            narrow=cut(self.narrow),
            grad=self.grad[start : start + count],
            states=[cut(state, packing) for state in self.states],
        )

    def is_signed(self, index: int) -> bool:
        """Whether a state has both signs; the others are sums of squares."""
        return self.rule.algorithm is not Algorithm.ADAGRAD and index == 0

    def salt(self, index: int) -> int:
        """Makes the rounding of each state in each step another one; 32 bits."""
        return (self.step * 0x85EBCA6B + (index + 1) * 0xC2B2AE35) & 0xFFFFFFFF
