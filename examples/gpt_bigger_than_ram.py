"""Train a GPT whose training state is several times larger than the RAM it gets.

    python examples/gpt_bigger_than_ram.py

An ordinary PyTorch program: a model, an optimizer, a loop. zeepo's are `zeepo.lazy`, `zeepo.init`
and what is printed at the end. The text is on every machine: Python's own language reference, as
`help()` shows it, a byte a token.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeepo

MiB = 2**20


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.attention(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, the next byte's logits out."""

    def __init__(self, num_layers: int, width: int, num_heads: int, length: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, num_heads) for _ in range(num_layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def memory(field: str) -> float:
    """A figure of the kernel's about this process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ram", default="250MiB", help="how much the process may grow by")
    parser.add_argument("--disk", default="/var/tmp", help="a folder for what does not fit")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=256, help="bytes in a row of a batch")
    args = parser.parse_args()

    imported = memory("VmRSS")
    text = torch.tensor(list("\n".join(topics.values()).encode()), dtype=torch.uint8)
    torch.manual_seed(0)
    with zeepo.lazy(ram=args.ram, disk=args.disk):
        model = GPT(args.layers, args.width, args.width // 64, args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    num_parameters = sum(p.numel() for p in model.parameters())
    state = 16 * num_parameters / MiB
    print(f"{num_parameters:,} parameters; with gradients and AdamW's state {state:,.0f} MiB")

    options = {"ram": args.ram, "disk": args.disk, "activations": "recompute"}
    with zeepo.init(model, optimizer, **options) as session:
        for step in range(args.steps):
            started = time.perf_counter()
            starts = torch.randint(len(text) - args.length, (2,))
            batch = torch.stack([text[s : s + args.length + 1] for s in starts.tolist()]).long()
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - started
            print(f"step {step:3}  loss {loss.item():.3f}  {seconds:.1f} s", flush=True)
        print(f"\n{session.plan.explain()}\n")
        peak = memory("VmHWM") - imported
    print(f"memory grew by {peak:,.0f} MiB at most; ram was {args.ram}, the state {state:,.0f} MiB")


if __name__ == "__main__":
    main()
