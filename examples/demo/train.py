"""The training program of the demo, one run of it: plain PyTorch, or the same under zeepo.

It tells its parent what it does as JSON lines: a line for each phase (`build`, `train`, `close`,
`end`) and for each step. The first line has the resident memory after `import torch, zeepo`, from
which growth is counted; both runs import both, so both start from the same place.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zeepo
from benchmarks.gpt import GPT, GPTConfig


def tell(**record: Any) -> None:
    print(json.dumps({"clock": time.monotonic(), **record}), flush=True)


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def batches(path: Path, num_steps: int, batch: int, sequence: int) -> Any:
    """The same batches for whoever asks: places in the text, drawn from one seed."""
    tokens = torch.from_numpy(np.fromfile(path, dtype=np.int32))
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        starts = torch.randint(len(tokens) - sequence, (batch,), generator=generator)
        yield torch.stack([tokens[s : s + sequence + 1] for s in starts.tolist()]).long()


def train(args: argparse.Namespace) -> None:
    tell(phase="build", base=resident_bytes(), torch=torch.__version__)
    torch.manual_seed(args.seed)
    under_zeepo = args.run == "zeepo"
    options = {"ram": args.ram, "disk": args.disk, "progress": False}  # the parent shows progress
    with zeepo.lazy(**options) if under_zeepo else contextlib.nullcontext():
        model = GPT(GPTConfig(args.layers, args.width, args.heads, args.vocabulary, args.sequence))
    model.checkpointing = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    session = zeepo.init(model, optimizer, **options) if under_zeepo else None
    tell(phase="train", parameters=sum(p.numel() for p in model.parameters()))
    for tokens in batches(Path(args.tokens), args.steps, args.batch, args.sequence):
        started = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tell(loss=loss.item().hex(), seconds=time.perf_counter() - started)
    if session is None:
        tell(phase="end")
        return
    plan, stats = session.plan, dict(session.stats())
    tell(phase="close")
    session.close()
    tell(phase="end", stats=stats, ram_bytes=plan.ram, minimum_ram_bytes=plan.minimum_ram)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", choices=("plain", "zeepo"), required=True)
    parser.add_argument("--tokens", required=True, help="file of int32 tokens")
    parser.add_argument("--disk", required=True)
    parser.add_argument("--ram", required=True)
    for name in ("layers", "width", "heads", "vocabulary", "sequence", "batch", "steps", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
