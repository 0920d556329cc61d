"""A snapshot is a mapping, and a few lines for people."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import zeepo
from zeepo.engine.stats import Stats
from zeepo.engine.tuning import tuned

STATS = Stats(
    bytes_now={"ram": 3 << 20, "disk": 0},
    bytes_peak={"ram": 5 << 20, "disk": 0},
    bytes_by_tag={"grads": 1 << 20, "params": 2 << 20, "staging": 0},
    bytes_kept={"params": 2 << 20},
    bytes_moved={"disk->ram": 0, "ram->disk": 0},
    evictions=4,
    fetches=6,
    prefetches=5,
    writes=7,
    buffer_reuses=8,
    seconds_waited=0.126,
)


def test_what_is_printed() -> None:
    expected = """\
in RAM     3.0 MiB, at most 5.0 MiB
of it      params 2.0 MiB, grads 1.0 MiB
resting    params 2.0 MiB
evictions  4, buffers reused 8
reads      6, 5 of them ahead; writes 7
waited     0.13 s for transfers"""
    assert str(STATS) == repr(STATS) == expected


def test_what_several_ranks_add() -> None:
    waited = {"layer0": 0.5, "layer1": 1.25}
    stats = Stats(
        **{**STATS, "bytes_sent": {"params": 1 << 10}, "seconds_waited_for_ranks": waited}
    )
    lines = dict(line.split("  ", 1) for line in str(stats).splitlines())
    assert lines["sent"].strip() == "params 1.0 KiB"
    assert lines["for ranks"].strip() == "waited 1.75 s, longest for layer1: 1.25 s"


def test_stats_of_nothing_are_printed_too() -> None:
    assert "evictions  0" in str(Stats({}, {}, {}, {}, {}, 0, 0, 0, 0, 0, 0.0))


def test_a_session_shows_them_and_they_stay_a_mapping(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(61, 61) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tuned(estimate=False, least_ram=True):
        session = zeepo.init(model, optimizer, disk=tmp_path)
    model(torch.ones(2, 61)).sum().backward()
    optimizer.step()
    stats = session.stats()
    session.close()
    text = str(stats)
    assert len(text.splitlines()) < 13
    assert f"evictions  {stats.evictions}," in text
    assert "ram->disk" in text
    assert dict(stats)["evictions"] == stats.evictions > 0
    assert {**stats}.keys() == set(stats)
