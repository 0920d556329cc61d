"""Bytes moved in a step are those of the formula in docs/how.md, exactly.

Everything rests on disk and `ram` is the least, so an update of the largest unit fills it: nothing
but what the update uses is in RAM, and nothing is on its way. Bytes are counted from one such
moment to the next, where reading ahead cannot shift them from one step to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import zeepo
from zeepo.engine.tuning import tuned
from zeepo.engine.update import ChunkUpdate

NUM_STEPS = 7
NUM_WARM_UP = 3
"""The first step makes the states, the second has no forecast, the third the first whole one."""
ON_DISK = dict.fromkeys(("params", "grads", "optimizer_state"), "disk")
Moved = tuple[int, int]
"""Bytes read and written."""


# -- the formula ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Bytes of chunks: of the parameters of each unit, in the order of forward; of all states."""

    units: list[int]
    states: int
    not_in_backward: int = 0
    """Of the units between the first and the last, those whose values backward does not need."""


def formula(sizes: Sizes, update: str) -> Moved:
    """What a step reads and writes; docs/how.md tells why."""
    params = grads = sum(sizes.units)
    first, last = sizes.units[0], sizes.units[-1]
    if update == "backward":
        return 2 * params + sizes.states - first - last, params + sizes.states
    read = 2 * params + grads + sizes.states - 2 * first - last - sizes.not_in_backward
    return read, params + grads + sizes.states - first


def slot_bytes(nbytes: int) -> int:
    """A tensor's place in a chunk: whole 64 bytes."""
    return -(-nbytes // 64) * 64


# -- models ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.projection(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Its vocabulary makes its tokens and its head about as large as a block."""

    def __init__(self, num_positions: int = 8, *, checkpointing: bool = False):
        super().__init__()
        width = 44
        self.checkpointing = checkpointing
        self.vocabulary = 12 * width
        self.tokens = nn.Embedding(self.vocabulary, width)
        self.positions = nn.Embedding(num_positions, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(8))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Model:
    """How to make one, a loss of it, and which of its parameters are a unit."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any, int], Tensor]
    unit_of: Callable[[str], str]
    """Of a parameter's name."""
    not_in_backward: tuple[str, ...] = ()
    """Units that backward does not need, but the first."""


def loss_of_points(model: nn.Sequential, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(4, 101, generator=generator)).square().mean()  # type: ignore[no-any-return]


def loss_of_tokens(model: GPT, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(model.vocabulary, (1, 8), generator=generator)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[0, 1:])


def perceptron(*, bias: bool = True) -> nn.Module:
    return nn.Sequential(*(nn.Linear(101, 101, bias=bias) for _ in range(10)))


def unit_of_layers(name: str) -> str:
    return name.split(".")[0]


def unit_of_gpt(name: str) -> str:
    if name.startswith("blocks."):
        return name.split(".")[1]
    return "embeddings" if name.startswith(("tokens", "positions")) else "head"


def unit_of_large(name: str) -> str:
    """Of a GPT whose positions are as many as its tokens: too large for one unit."""
    return name if unit_of_gpt(name) == "embeddings" else unit_of_gpt(name)


MODELS = {
    "perceptron": Model(perceptron, loss_of_points, unit_of_layers),
    "one tensor a unit": Model(lambda: perceptron(bias=False), loss_of_points, unit_of_layers),
    "gpt": Model(GPT, loss_of_tokens, unit_of_gpt),
    "gpt, checkpointing": Model(lambda: GPT(checkpointing=True), loss_of_tokens, unit_of_gpt),
    "two embeddings": Model(
        lambda: GPT(528), loss_of_tokens, unit_of_large, not_in_backward=("positions.weight",)
    ),
}


# -- optimizers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """How to make an optimizer, and what its states take."""

    make: Callable[[Iterable[nn.Parameter]], Optimizer]
    state_bytes: Callable[[int], int]
    """Of one state of a parameter with so many elements."""
    num_states: int = 2


OPTIMIZERS = {
    "AdamW": Kind(lambda p: AdamW(p, lr=1e-3), lambda n: 4 * n),
    "AdamW, fused": Kind(lambda p: AdamW(p, lr=1e-3, fused=True), lambda n: 4 * n),
    "SGD": Kind(lambda p: SGD(p, lr=1e-3, momentum=0.9), lambda n: 4 * n, num_states=1),
    "own": Kind(lambda p: zeepo.optim.AdamW(p, lr=1e-3), lambda n: 4 * n),
    "bf16": Kind(lambda p: zeepo.optim.AdamW(p, lr=1e-3, state_dtype="bf16"), lambda n: 2 * n),
    "8bit": Kind(
        lambda p: zeepo.optim.AdamW(p, lr=1e-3, state_dtype="8bit"), lambda n: -(-n // 16) * 20
    ),
}


CASES = [("perceptron", kind) for kind in OPTIMIZERS] + [
    (model, kind) for model in list(MODELS)[1:] for kind in ("AdamW, fused", "SGD", "8bit")
]

SHORT = [("one tensor a unit", "SGD"), ("gpt, checkpointing", "AdamW, fused")]
"""The cases that always run."""


def sizes_of(model: nn.Module, shape: Model, kind: Kind) -> Sizes:
    """What the formula needs to know, from shapes alone."""
    units: dict[str, int] = {}
    states = 0
    for name, p in model.named_parameters():
        unit = shape.unit_of(name)
        units[unit] = units.get(unit, 0) + slot_bytes(p.nbytes)
        states += kind.num_states * slot_bytes(kind.state_bytes(p.numel()))
    return Sizes(list(units.values()), states, sum(units[u] for u in shape.not_in_backward))


# -- counting -------------------------------------------------------------------------------------


@contextmanager
def counted(session: zeepo.Session, unit: str) -> Iterator[list[Moved]]:
    """What was moved before each update of a unit, all it needs being there."""
    found: list[Moved] = []
    update_parts = ChunkUpdate._update_parts

    def counting(self: ChunkUpdate, *args: Any) -> None:
        if self.chunk.label == unit:
            moved = session.stats()["bytes_moved"]
            found.append((moved["disk->ram"], moved["ram->disk"]))
        update_parts(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkUpdate, "_update_parts", counting)
        yield found


def moved_by_steps(model: nn.Module, shape: Model, kind: Kind, update: str, disk: Path) -> Any:
    """Bytes of each step, and the plan."""
    optimizer = kind.make(model.parameters())
    with (
        tuned(estimate=False, least_ram=True),
        zeepo.init(model, optimizer, disk=disk, update=update, **ON_DISK) as session,
    ):
        plan = session.plan
        last_updated = plan.units[0 if update == "backward" else -1].name
        with counted(session, last_updated) as moved:
            for step in range(NUM_STEPS + (update == "step")):  # whose last update is put off
                shape.loss(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(moved)]
    assert len(steps) == NUM_STEPS - 1
    return steps[NUM_WARM_UP - 1 :], plan


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [case if case in SHORT else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_a_step_moves_what_the_formula_says(
    model: str, optimizer: str, update: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    shape, kind = MODELS[model], OPTIMIZERS[optimizer]
    built = shape.make()
    sizes = sizes_of(built, shape, kind)
    steps, plan = moved_by_steps(built, shape, kind, update, tmp_path)
    assert plan.num_units == len(sizes.units)
    assert steps == [formula(sizes, update)] * len(steps)
