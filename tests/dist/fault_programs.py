"""What ranks do while something happens to them; and, as a script, the nursery that forks them."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

import zeepo
from tests.dist.faults import Whereabouts
from zeepo.engine.tuning import tuned

_CLONE_NEWNET = 0x40000000


class Stack(nn.Module):
    """Equal blocks, enough of them for every phase to take its time."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


class Trainee:
    """A session, trained step by step, that writes down where it is."""

    def __init__(
        self,
        rank: int,
        folder: Path,
        stage: int,
        disk: str | None = None,
        width: int = 48,
        depth: int = 6,
        patience: float = 20.0,
        outside_seconds: float = 0.0,
        piece_bytes: int = 1 << 12,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.model = Stack(width, depth)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.whereabouts = Whereabouts(folder / f"whereabouts{rank}")
        self.step = 0
        self.losses: list[float] = []
        self._width = width
        self._outside_seconds = outside_seconds
        with tuned(
            estimate=False,
            least_ram=disk is not None,
            piece_bytes=piece_bytes,
            rank_patience_seconds=patience,
        ):
            self.session = zeepo.init(self.model, self.optimizer, stage=stage, disk=disk, **options)
        ends = self.session._ends_of_backward
        reduce = ends._at_end

        def watched(roots: Any) -> None:
            self.at("reduction")
            reduce(roots)

        ends._at_end = watched

    def at(self, phase: str) -> None:
        self.whereabouts.write(self.step, phase)

    def forward(self) -> torch.Tensor:
        self.at("forward")
        random = torch.Generator().manual_seed(100 * self.step + self.rank)
        loss: torch.Tensor = self.model(torch.randn(8, self._width, generator=random))
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        self.at("backward")
        loss.backward()

    def update(self) -> None:
        self.at("optimizer.step")
        self.optimizer.step()

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step += 1
            self.at("outside")
            time.sleep(self._outside_seconds)
            loss = self.forward()
            self.backward(loss)
            self.losses.append(loss.item())
            self.update()
            self.at("outside")
            self.optimizer.zero_grad()

    def close(self) -> None:
        self.at("closing")
        self.session.close()
        self.at("end")

    def result(self) -> dict[str, Any]:
        hasher = xxhash.xxh3_128()
        for p in self.model.parameters():
            hasher.update(p.detach().numpy().tobytes())
        return {"losses": self.losses, "values": hasher.hexdigest()}


# -- programs --------------------------------------------------------------------------------------


def train(rank: int, folder: Path, num_steps: int, **options: Any) -> Any:
    """Train, close, and tell the result."""
    trainee = Trainee(rank, folder, **options)
    trainee.train(num_steps)
    stats = dict(trainee.session.stats())
    trainee.close()
    return {**trainee.result(), "stats": stats}


def slow_rank(rank: int, folder: Path, seconds: float, **options: Any) -> Any:
    """Rank 1 takes its time in one forward."""
    trainee = Trainee(rank, folder, **options)
    trainee.train(2)
    if rank == 1:
        time.sleep(seconds)
    trainee.train(1)
    trainee.close()
    return trainee.result()


def one_backward_more(rank: int, folder: Path, **options: Any) -> Any:
    """Rank 1 calls backward() twice where rank 0 does so once."""
    trainee = Trainee(rank, folder, **options)
    trainee.train(1)
    for _ in range(1 + rank):
        trainee.backward(trainee.forward())
    trainee.update()


def close_early(rank: int, folder: Path, **options: Any) -> Any:
    """Rank 1 has had enough after two steps."""
    trainee = Trainee(rank, folder, **options)
    with trainee.session:
        trainee.train(2 if rank == 1 else 4)


def mistake(rank: int, folder: Path, how: str, **options: Any) -> Any:
    """Rank 1's own code raises, with or without `with`, or is caught and the process goes on."""
    trainee = Trainee(rank, folder, **options)
    trainee.train(2)

    def loop() -> None:
        loss = trainee.forward()
        if rank == 1:
            raise ValueError("bad data in row 7")
        trainee.backward(loss)

    if how == "with":
        with trainee.session:
            loop()
    elif how == "script":
        loop()
    else:
        try:
            loop()
        except ValueError:
            if how == "exit":
                sys.exit(3)
            trainee.close()
            time.sleep(60.0)


def traffic(rank: int, folder: Path, num_steps: int, interface: str, **options: Any) -> Any:
    """What steps send: by the interface's counter, by the links' and by `session.stats()`."""
    trainee = Trainee(rank, folder, **options)
    network = trainee.session._ranks.network  # type: ignore[union-attr]

    def counters() -> dict[str, int]:
        dist.barrier()
        seen = 0  # what is read ahead may still be on its way
        while _bytes_sent_over(interface) - seen > 10_000:
            seen = _bytes_sent_over(interface)
            time.sleep(0.5)
        dist.barrier()
        sent = dict(trainee.session.stats().bytes_sent)
        return {"wire": _bytes_sent_over(interface), "links": network.bytes_posted, **sent}

    trainee.train(2)
    before = counters()
    trainee.train(num_steps)
    after = counters()
    trainee.close()
    numel = sum(p.numel() for p in trainee.model.parameters())
    return {
        "numel": numel,
        "per_step": {key: (after[key] - before.get(key, 0)) / num_steps for key in after},
    }


def _bytes_sent_over(interface: str) -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise LookupError(interface)


# -- the nursery -----------------------------------------------------------------------------------


def enter_host(name: str) -> None:
    """From now on this process uses the network of a namespace."""
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {name}")


def run(order: dict[str, Any]) -> None:
    """Be a rank."""
    rank, num_ranks, folder = order["rank"], order["num_ranks"], Path(order["folder"])
    if order["host"] is not None:
        enter_host(order["host"]["namespace"])
        os.environ["GLOO_SOCKET_IFNAME"] = order["host"]["interface"]
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    program: Callable[..., Any] = globals()[order["program"]]
    result = program(rank, folder, **order["options"])
    (folder / f"result{rank}").write_text(json.dumps(result, default=str))
    dist.destroy_process_group()


def warm_up() -> None:
    """What torch imports at the first step of an optimizer is imported before ranks are forked."""
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.zeros(3)
    torch.optim.AdamW([p]).step()


def nursery() -> None:
    """Fork a rank for every order; in the rank this returns, and the script goes on to its end."""
    warm_up()
    while line := sys.stdin.readline():
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            for target, name in ((1, "stdout"), (2, "stderr")):
                path = f"{order['folder']}/{name}{order['rank']}"
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), target)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            run(order)
            return
        print(json.dumps({"pid": pid}), flush=True)


if __name__ == "__main__":
    nursery()
