"""Bytes moved in a step are those of the formula in docs/how.md, exactly.

Everything rests on disk and `ram` is the least, so an update of the largest unit fills it: nothing
but what the update uses is in RAM, and nothing is on its way. Bytes are counted from one such
moment to the next, where reading ahead cannot shift them from one step to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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
from zeepo.engine import backward
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
def counted(
    session: zeepo.Session, unit: str, before: Callable[[], None] = lambda: None
) -> Iterator[list[Moved]]:
    """What was moved before each update of a unit, all it needs being there."""
    found: list[Moved] = []
    update_parts = ChunkUpdate._update_parts

    def counting(self: ChunkUpdate, *args: Any) -> None:
        if self.chunk.label == unit:
            before()
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


# -- embeddings by rows ---------------------------------------------------------------------------

NUM_TABLE_STEPS = 40
"""So that every page has had its turn, and the turns begin again."""
SIZE = 250


class ByRows(nn.Module):
    """Layers behind an embedding about as large as each, of which a step looks up few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(SIZE + 14, SIZE)
        self.layers = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(6)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.rows(tokens))  # type: ignore[no-any-return]


def tokens_of(step: int) -> Tensor:
    """The first comes again in the next step."""
    again = torch.randint(SIZE, (1,), generator=torch.Generator().manual_seed(step // 2))
    others = torch.randint(SIZE, (2,), generator=torch.Generator().manual_seed(1000 + step))
    return torch.cat([again, others])


class TableFormula:
    """What docs/how.md says of a table, in pages."""

    def __init__(self, nbytes: int, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._num_pages = -(-nbytes // 4096)
        self._num_done = [0] * self._num_pages
        self._num_updates = 0
        self._turn: dict[int, int] = {}
        """Pages on their way, and how many updates they have had."""
        self._next_page = 0

    def step(self, tokens: Tensor) -> tuple[int, int, int]:
        """Pages that a lookup reads, whose turn it is after its update, and that both write."""
        looked_up = set()
        for row in set(tokens.tolist()):
            first, end = row * self._row_bytes, (row + 1) * self._row_bytes
            looked_up.update(range(first // 4096, (end - 1) // 4096 + 1))
        for page in looked_up:
            self._num_done[page] = self._num_updates
        num_both = sum(self._num_done[page] != done for page, done in self._turn.items())
        num_written = len(looked_up) + len(self._turn) - num_both
        for page in self._turn:
            self._num_done[page] = self._num_updates
        self._num_updates += 1
        for page in looked_up:
            self._num_done[page] = self._num_updates
        end_page = self._next_page + -(-self._num_pages // 31)
        turn = range(self._next_page, min(self._num_pages, end_page))
        self._turn = {page: self._num_done[page] for page in turn}
        self._next_page = end_page if end_page < self._num_pages else 0
        return len(looked_up), len(turn), num_written


@pytest.mark.parametrize("optimizer", ["AdamW, fused", "SGD"])
def test_a_table_moves_what_the_formula_says(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(backward, "WORTH_EXPECTING_BYTES", 64 << 10)
    model, kind = ByRows(), OPTIMIZERS[optimizer]
    row_bytes = SIZE * 4
    told = TableFormula(model.rows.weight.nbytes, row_bytes)
    # It is a table from the second step on.
    pages = [told.step(tokens_of(step)) for step in range(1, NUM_TABLE_STEPS)]
    record_bytes = 4096 * (1 + kind.num_states)
    units = [slot_bytes(p.nbytes) for p in model.layers.parameters()]
    read, written = formula(Sizes(units, kind.num_states * sum(units)), "backward")
    expected = [
        (read + (coming + turn) * record_bytes, written + num_written * record_bytes)
        for (_, turn, num_written), (coming, _, _) in pairwise(pages)
    ]
    steps = moved_by_steps_with_table(model, kind, tmp_path)
    assert steps[NUM_WARM_UP:] == expected[NUM_WARM_UP - 1 :]
    assert len({written for _, written in steps[NUM_WARM_UP:]}) > 2


def moved_by_steps_with_table(model: ByRows, kind: Kind, disk: Path) -> list[Moved]:
    """From an update of the first layer to the next, with the update of the table between them and
    with the next lookup."""
    optimizer = kind.make(model.parameters())
    with (
        tuned(estimate=False, least_ram=True, table_bytes=64 << 10),
        zeepo.init(model, optimizer, disk=disk, update="backward", **ON_DISK) as session,
    ):
        settle = partial(settle_tables, session)
        with counted(session, session.plan.units[1].name, settle) as moved:
            for step in range(NUM_TABLE_STEPS):
                model(tokens_of(step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(moved)]


def settle_tables(session: Any) -> None:
    """What tables read and write may go on beside an update."""
    for table in session._backward_updates._tables._tables.values():
        table._settle(keep=0)
        if table._sweep is not None:
            table._sweep[0].result()
