"""How far does a process grow, phase by phase, for models unlike those of `budget.py`?

Each run is a process of its own: the model is built inside `zeepo.lazy`, trained for three steps
with clipped gradients, and given back; a thread reads the resident size every millisecond. `ram` is
`plan.minimum_ram`, which a process with plenty of RAM tells beforehand, and 1.3 times that.

    python benchmarks/budget_growth.py                       # every model with two optimizers
    python benchmarks/budget_growth.py unet encoder --optimizers adagrad sgd --factors 1.0

No root and no cgroup are needed: this is the contract itself, growth against `ram`. Exit code 1
when a run grew by more than 2 % beyond it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MiB = 1 << 20
PLENTY = "8GiB"
TOLERATED = 1.02
STEPS = 3
PHASES = ("build", "init", "forward", "backward", "clip", "step", "close")


class ConvGruAttention(nn.Module):
    """A signal's classes: convolutions, a recurrent part, attention, a large head. 57M."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(16, 256, 5, padding=2), nn.ReLU(), nn.Conv1d(256, 512, 5, padding=2)
        )
        self.gru = nn.GRU(512, 512, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(512, 8, batch_first=True)
        self.head = nn.Linear(512, 100_000)

    def forward(self, signal: Tensor) -> Tensor:
        x = self.gru(self.conv(signal).transpose(1, 2))[0]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class Recommender(nn.Module):
    """Tables for bags of features, and a small network over their sums. 75M."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (400_000, 300_000, 200_000, 100_000)
        self.bags = nn.ModuleList(nn.EmbeddingBag(size, 64) for size in sizes)
        self.users = nn.Embedding(100_000, 64)
        self.mlp = nn.Sequential(
            nn.Linear(320, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1)
        )

    def forward(self, features: Tensor, user: Tensor) -> Tensor:
        sums = [bag(features % bag.num_embeddings) for bag in self.bags]
        return self.mlp(torch.cat([*sums, self.users(user)], 1))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Thirty narrow layers with dropout. 60M."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8000, 384)
        layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 30)
        self.head = nn.Linear(384, 8000)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(tokens)))  # type: ignore[no-any-return]


def _double_conv(channels_in: int, channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Down and up again, with skips. 49M."""

    def __init__(self, width: int = 80) -> None:
        super().__init__()
        widths = [width << level for level in range(5)]
        self.down = nn.ModuleList(
            _double_conv(a, b) for a, b in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(w * 2, w, 2, stride=2) for w in reversed(widths[:-1])
        )
        self.join = nn.ModuleList(_double_conv(w * 2, w) for w in reversed(widths[:-1]))
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, down in enumerate(self.down):
            image = down(F.max_pool2d(image, 2) if level else image)
            skips.append(image)
        skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            image = join(torch.cat([up(image), skips.pop()], 1))
        return self.out(image)  # type: ignore[no-any-return]


class OneLarge(nn.Module):
    """Small layers around one very large one. 72M."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 8192)
        self.large = nn.Linear(8192, 8192)
        self.last = nn.Sequential(nn.LayerNorm(8192), nn.Linear(8192, 256), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.large(F.gelu(self.first(x)))))  # type: ignore[no-any-return]


def _conv_gru_loss(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(torch.randn(16, 16, 96)), torch.randint(100_000, (16,)))


def _recommender_loss(model: nn.Module) -> Tensor:
    features, users = torch.randint(1 << 30, (2048, 8)), torch.randint(100_000, (2048,))
    return F.binary_cross_entropy_with_logits(model(features, users), torch.rand(2048, 1))


def _encoder_loss(model: nn.Module) -> Tensor:
    tokens = torch.randint(8000, (8, 129))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _unet_loss(model: nn.Module) -> Tensor:
    return F.mse_loss(model(torch.randn(2, 3, 96, 96)), torch.randn(2, 3, 96, 96))


def _one_large_loss(model: nn.Module) -> Tensor:
    return F.mse_loss(model(torch.randn(64, 256)), torch.randn(64, 256))


JOBS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "conv_gru": (ConvGruAttention, _conv_gru_loss),
    "recommender": (Recommender, _recommender_loss),
    "encoder": (Encoder, _encoder_loss),
    "unet": (UNet, _unet_loss),
    "one_large": (OneLarge, _one_large_loss),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, weight_decay=1e-4),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
}


@dataclass
class Watcher:
    """The largest growth seen in each phase, read by a thread."""

    start_bytes: int = 0
    phase: str = "build"
    peaks: dict[str, int] = field(default_factory=dict)

    def resident_bytes(self) -> int:
        return int(os.pread(self._statm, 128, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def start(self) -> None:
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self.start_bytes = self.resident_bytes()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.note()
            time.sleep(0.001)

    def note(self) -> None:
        phase, growth = self.phase, self.resident_bytes() - self.start_bytes
        self.peaks[phase] = max(self.peaks.get(phase, 0), growth)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        self.phase = phase
        yield
        self.note()


def child(name: str, optimizer_name: str, ram: str, disk: str) -> dict[str, Any]:
    """Train one model; what it needed and how far the process grew."""
    import zeepo

    watcher = Watcher()
    watcher.start()
    build, loss_of = JOBS[name]
    torch.manual_seed(0)
    nbytes: int | str = int(ram) if ram.isdigit() else ram
    with watcher.during("build"), zeepo.lazy(ram=nbytes, disk=disk):
        model = build()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    with watcher.during("init"):
        session = zeepo.init(model, optimizer, ram=nbytes, disk=disk)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    losses = []
    for _ in range(STEPS):
        with watcher.during("forward"):
            loss = loss_of(model)
        if ram == PLENTY:
            return {"minimum_ram": session.plan.minimum_ram, "moment": session.plan.moment()}
        with watcher.during("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        with watcher.during("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with watcher.during("step"):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item().hex())
        del loss
    with watcher.during("close"):
        session.close()
    return {"peaks": watcher.peaks, "losses": losses}


def run(name: str, optimizer_name: str, ram: str) -> dict[str, Any]:
    """One child; its answer."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as disk:
        command = [sys.executable, __file__, "--child", name, optimizer_name, ram, disk]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def measure(name: str, optimizer_name: str, factor: float, needed: dict[str, Any]) -> bool:
    """Whether a model stays inside its budget; prints how far each phase went."""
    ram = int(factor * needed["minimum_ram"])
    facts = run(name, optimizer_name, str(ram))
    share = max(facts["peaks"].values()) / ram
    phases = " ".join(f"{p} {facts['peaks'].get(p, 0) / MiB:.0f}" for p in PHASES)
    print(
        f"{name:<12} {optimizer_name:<12} ram {ram / MiB:>5.0f} MiB ({factor:g} x least): "
        f"grew {share:.1%}{' OVER' if share > TOLERATED else ''}; MiB: {phases} "
        f"[worst moment: {needed['moment']}]",
        flush=True,
    )
    return share <= TOLERATED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", default=list(JOBS))
    parser.add_argument("--optimizers", nargs="*", default=["adamw", "adamw_fused"])
    parser.add_argument("--factors", nargs="*", type=float, default=[1.0, 1.3])
    parser.add_argument("--child", nargs=4)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(*given.child)), flush=True)
        os._exit(0)  # the threads of a session that is still open have nothing to say
    is_inside = True
    for name in given.names:
        for optimizer_name in given.optimizers:
            needed = run(name, optimizer_name, PLENTY)
            for factor in given.factors:
                is_inside &= measure(name, optimizer_name, factor, needed)
    return 0 if is_inside else 1


if __name__ == "__main__":
    sys.exit(main())
