"""The processes that train together, before they do: how many, which one this is, who takes what.

What is split over the ranks is split alike, unless every rank was given a `ram` and they differ:
then a rank with twice the memory takes twice as much.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from zeepo.config import launched_ranks
from zeepo.errors import ConfigError


@dataclass(frozen=True)
class Team:
    """All ranks, as far as planning needs to know them."""

    rank: int = 0
    weights: tuple[float, ...] = (1.0,)
    """By rank: how much of what is split it takes, in proportion."""
    group: Any = None
    """A process group for bytes in RAM; None for a rank that is alone."""

    @property
    def num_ranks(self) -> int:
        return len(self.weights)

    @property
    def share(self) -> float:
        """What this rank takes of what is split."""
        return self.weights[self.rank] / sum(self.weights)


def join_team(ram_bytes: int | None) -> Team:
    """Meet the others, if torch.distributed or its launcher says that there are any."""
    if not dist.is_available():
        return Team()
    if not dist.is_initialized() and launched_ranks(os.environ) > 1:
        _refuse_half_a_launcher()
        dist.init_process_group("gloo")
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Team()
    group = dist.new_group(backend="gloo")
    stated: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(stated, ram_bytes, group)
    return Team(dist.get_rank(), weights_of_ram(stated), group)


def _refuse_half_a_launcher() -> None:
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that there are several ranks, but "
            f"{', '.join(missing)} is not set. Start the ranks with a launcher (zeepo run, "
            "torchrun), or unset WORLD_SIZE."
        )


def weights_of_ram(stated: list[int | None]) -> tuple[float, ...]:
    """In proportion to what each rank was given; alike, when that was not said of all."""
    known = [float(ram) for ram in stated if ram is not None]
    if len(known) < len(stated) or len(set(known)) == 1:
        return (1.0,) * len(stated)
    return tuple(known)
