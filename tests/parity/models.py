"""Small models of odd sizes, and the data they train on.

Each has at least four layers, so that a buffer is reused while an earlier layer's graph still needs
its old contents, and layers of like size, so that the least ram does not hold them all (a 61 x 61
layer almost fills four pages). Data comes from its own generators: the global random state stays
untouched. `use_batches_of` gives each rank of several its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB = 101
WIDTH = 39
HEADS = 3
INPUTS, HIDDEN, OUTPUTS = 11, 61, 7
SEEDS_PER_RANK = 1_000_000

_rank = 0


def use_batches_of(rank: int) -> None:
    """From now on the data is that of another rank; rank 0's is that of one process."""
    global _rank
    _rank = rank


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(SEEDS_PER_RANK * _rank + seed)


def tokens(step: int, rows: int = 2, length: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of token numbers and the tokens that follow them."""
    generator = _generator(1000 + step)
    batch = torch.randint(0, VOCAB, (rows, length + 1), generator=generator)
    return batch[:, :-1], batch[:, 1:]


def points(step: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of input and target vectors."""
    generator = _generator(2000 + step)
    return (
        torch.randn(rows, INPUTS, generator=generator),
        torch.randn(rows, OUTPUTS, generator=generator),
    )


def images(step: int, rows: int = 3, channels: int = 3, size: int = 9) -> torch.Tensor:
    """A batch of square images."""
    generator = _generator(3000 + step)
    return torch.randn(rows, channels, size, size, generator=generator)


def sequences(step: int, width: int, rows: int = 3, length: int = 6) -> torch.Tensor:
    """A batch of sequences of vectors, rows first."""
    generator = _generator(4000 + step)
    return torch.randn(rows, length, width, generator=generator)


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend over the sequence."""
        rows, length, width = x.shape
        parts = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    """A transformer block: attention and a two-layer perceptron, each added to its input."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add attention, then the perceptron."""
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class LanguageModel(nn.Module):
    """A small GPT; `head` is "own", "tied" (a parameter of two modules) or "borrowed"."""

    def __init__(
        self,
        depth: int = 4,
        head: str = "own",
        dropout: float = 0.0,
        use_reentrant: bool | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.randn(16, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.use_reentrant = use_reentrant
        if head != "borrowed":
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if head == "tied":
            self.head.weight = self.embed.weight
        self.borrows = head == "borrowed"

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Call one block, checkpointed if this model was told to."""
        if self.use_reentrant is None or not self.training:
            return block(x)
        return checkpoint(block, x, use_reentrant=self.use_reentrant)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the next token from the last hidden states."""
        x = self.norm(x)
        return F.linear(x, self.embed.weight) if self.borrows else self.head(x)

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """The logits, or the loss if targets are given."""
        hidden = self.embed(x) + self.position[: x.shape[1]]
        for block in self.blocks:
            hidden = self.run(block, hidden)
        logits = self.logits(hidden)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Perceptron(nn.Module):
    """A chain of linear layers with dropout between them."""

    def __init__(self, depth: int = 5, dropout: float = 0.0, dtype: torch.dtype | None = None):
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN, dtype=dtype)
        self.middle = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, dtype=dtype) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(HIDDEN, OUTPUTS, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map inputs to outputs."""
        x = torch.tanh(self.first(x))
        for layer in self.middle:
            x = self.dropout(torch.tanh(layer(x)))
        return self.last(x)


def perceptron_loss(model: nn.Module, step: int, rows: int = 5) -> torch.Tensor:
    """The squared error of a perceptron on the batch of a step."""
    x, y = points(step, rows)
    return F.mse_loss(model(x), y)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> Iterator[tuple[str, torch.Tensor]]:
    """The plainest loop over a perceptron, for cases whose point is elsewhere."""
    for step in steps:
        loss = perceptron_loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield "loss", loss


def train_language(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> Iterator[tuple[str, torch.Tensor]]:
    """The plainest loop over a language model."""
    for step in steps:
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield "loss", loss
