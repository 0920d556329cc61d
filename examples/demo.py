"""The main job in its first form: the same GPT, trained plainly and under zeepo, side by side.

Two processes train the same model on the same text (the Python standard library's own sources),
one with plain PyTorch, one with zeepo and everything on disk. The losses are compared bit for bit,
and the growth of resident memory since before the model was built is read from the system.

    python examples/demo.py [--steps 8] [--width 512] [--layers 16]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

BATCH, SEQUENCE, VOCABULARY = 2, 128, 8192


def read_text(nbytes: int) -> bytes:
    """Text that is on every machine."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b""
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= nbytes:
            break
    return text


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class PeakMemory:
    """Watches the growth of resident memory from a thread."""

    def __init__(self) -> None:
        self.base = self.peak = resident_bytes()
        self._done = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self.peak = max(self.peak, resident_bytes())

    def growth(self) -> int:
        return max(self.peak, resident_bytes()) - self.base


def train(args: argparse.Namespace) -> None:
    """One of the two runs; prints a JSON line per step."""
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
    from gpt import GPT, GPTConfig

    import zeepo

    text = torch.frombuffer(bytearray(read_text(1 << 20)), dtype=torch.uint8).long()
    pairs = text[:-1] * 31 + text[1:]  # two bytes make a token of a larger vocabulary
    tokens = pairs % VOCABULARY
    memory = PeakMemory()
    torch.manual_seed(0)
    config = GPTConfig(args.layers, args.width, args.width // 64, VOCABULARY, SEQUENCE)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    if args.role == "zeepo":
        session = zeepo.init(model, optimizer, ram=args.ram, disk=args.disk)
    generator = torch.Generator().manual_seed(1)
    for step in range(args.steps):
        started = time.perf_counter()
        starts = torch.randint(len(tokens) - SEQUENCE - 1, (BATCH,), generator=generator)
        batch = torch.stack([tokens[s : s + SEQUENCE + 1] for s in starts])
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - started
        print(json.dumps({"step": step, "loss": loss.item().hex(), "seconds": seconds}), flush=True)
    result = {
        "growth": memory.growth(),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    if args.role == "zeepo":
        result["stats"] = dict(session.stats())
        session.close()
    print(json.dumps(result), flush=True)


def run(role: str, args: argparse.Namespace, disk: str) -> tuple[list[dict], dict]:
    """Start one run and show its progress."""
    command = [sys.executable, __file__, "--role", role, "--disk", disk, "--ram", args.ram]
    command += ["--steps", str(args.steps), "--width", str(args.width)]
    command += ["--layers", str(args.layers)]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            record = json.loads(line)
            lines.append(record)
            if "step" in record:
                loss = float.fromhex(record["loss"])
                print(
                    f"  {role:>6} step {record['step'] + 1}/{args.steps}: loss {loss:.6f}, "
                    f"{record['seconds']:.2f} s",
                    flush=True,
                )
    if process.returncode:
        raise SystemExit(f"the {role} run failed with exit code {process.returncode}")
    return lines[:-1], lines[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--ram", default="256MiB")
    parser.add_argument("--disk", default=None)
    parser.add_argument("--role", choices=("plain", "zeepo"), default=None)
    args = parser.parse_args()
    if args.role:
        train(args)
        return
    with tempfile.TemporaryDirectory(dir=args.disk) as disk:
        plain_steps, plain = run("plain", args, disk)
        zeepo_steps, zeepo = run("zeepo", args, disk)
    same = [s["loss"] for s in plain_steps] == [s["loss"] for s in zeepo_steps]
    print(f"\n{plain['parameters'] / 1e6:.0f}M parameters, {args.steps} steps")
    for name, steps, result in (("plain", plain_steps, plain), ("zeepo", zeepo_steps, zeepo)):
        fastest = sorted(s["seconds"] for s in steps)[len(steps) // 2]
        grown = result["growth"] / 2**20
        print(f"  {name:>6}: {fastest:5.2f} s/step, resident memory grew by {grown:7.1f} MiB")
    print(f"  losses bit for bit equal: {same}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
