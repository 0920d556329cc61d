"""Events: told to every listener, written as lines, and never in the way of the training."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeepo
from zeepo import events
from zeepo.errors import ConfigError, DiskError
from zeepo.events import Event, EventFile
from zeepo.units import MiB


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def names(self) -> list[str]:
        return [event["event"] for event in self.events]


@pytest.fixture
def heard() -> Iterator[Heard]:
    listener = Heard()
    events.listen(listener)
    yield listener
    events.stop_listening(listener)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    return model, torch.optim.AdamW(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def least_ram(disk: Path) -> int:
    with zeepo.init(*build(), disk=disk) as session:
        return session.plan.minimum_ram


# ---- The stream


def test_every_listener_hears_every_event(heard: Heard) -> None:
    second = Heard()
    events.listen(second)
    events.emit("one", number=1)
    events.stop_listening(second)
    events.emit("two")
    assert heard.names == ["one", "two"]
    assert second.events == heard.events[:1]
    assert second.events[0]["number"] == 1
    assert isinstance(second.events[0]["time"], float)


def test_nobody_listens_by_default() -> None:
    assert not events.is_heard()


def test_a_listener_that_fails_is_removed_and_named_once(
    heard: Heard, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(event: Event) -> None:
        raise KeyError("missing")

    events.listen(failing)
    events.emit("one")
    events.emit("two")
    assert heard.names == ["one", "two"]
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "failing" in said
    assert "KeyError('missing')" in said


# ---- The file


def test_lines_are_appended_and_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "of an earlier run"}\n')
    file = EventFile(path)
    file({"event": "one", "text": "two\nlines"})
    assert [line["event"] for line in lines_of(path)] == ["of an earlier run", "file_open", "one"]
    file.close()
    file.close()


@pytest.mark.parametrize("path", ["absent/events.jsonl", "."])
def test_a_path_that_cannot_be_a_file_is_refused(tmp_path: Path, path: str) -> None:
    model, optimizer = build()
    with pytest.raises(ConfigError, match=r"cannot write the events file .*Give events="):
        zeepo.init(model, optimizer, events=tmp_path / path)
    assert type(model[0].weight) is nn.Parameter  # type: ignore[index]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_refused_at_open() -> None:
    with pytest.raises(DiskError, match="No space left"):
        zeepo.init(*build(), events="/dev/full")
    assert not events.is_heard()


def test_a_write_that_fails_later_stops_the_file_and_not_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.jsonl"
    model, optimizer = build()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with zeepo.init(model, optimizer, events=path):
        train(model, optimizer, 1)
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
        try:
            train(model, optimizer, 3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size <= size + 10
    said = capsys.readouterr().err
    assert said.count("the events file") == 1
    assert "Training goes on" in said
    assert not events.is_heard()


# ---- What a session tells


def test_a_session_tells_open_steps_and_close(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    disk = tmp_path / "disk"
    disk.mkdir()
    ram = least_ram(disk)
    model, optimizer = build()
    with zeepo.init(model, optimizer, ram=ram, disk=disk, events=path) as session:
        train(model, optimizer, 3)
        stats = session.stats()
    told = lines_of(path)
    names = ["file_open", "session_open", "plan", *["step"] * 3, "closing", "close"]
    assert [e["event"] for e in told] == names
    _, opening, plan, *steps, _, close = told
    assert plan["saved_activation_bytes"] > 0
    assert plan["unknown_because"] == ""
    assert (opening["ram"], opening["minimum_ram"]) == (ram, ram)
    assert set(opening["units"]) == {str(number) for number in range(6)}
    assert opening["placement"]["params"] == "disk"
    assert opening["disk"] == [str(disk)]
    assert [step["number"] for step in steps] == [1, 2, 3]
    assert steps[0]["resident_growth_bytes"] <= steps[-1]["peak_resident_growth_bytes"]
    assert steps[-1]["bytes_now"]["ram"] <= steps[-1]["bytes_limit"]["ram"]
    for edge, total in stats.bytes_moved.items():
        assert 0 < sum(step["bytes_moved"][edge] for step in steps) <= total
        assert close["bytes_moved"][edge] >= total
    assert 0 < sum(step["evictions"] for step in steps) <= close["evictions"]
    assert sum(step["seconds"] for step in steps) <= close["seconds"]
    assert close["num_steps"] == 3
    assert close["minimum_ram"] == ram
    assert close["peak_resident_growth_bytes"] >= close["peak_resident_growth_at_open_bytes"]
    assert not events.is_heard()


def test_a_second_session_appends_and_a_refused_one_leaves_nobody_listening(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        with zeepo.init(*build(), events=path):
            pass
    with pytest.raises(zeepo.BudgetError):
        zeepo.init(*build(), events=path, ram=1)
    told = [line["event"] for line in lines_of(path)]
    assert told == ["file_open", "session_open", "closing", "close"] * 2 + ["file_open"]
    assert not events.is_heard()


def test_a_session_without_a_model_tells_when_it_adopts(heard: Heard) -> None:
    model, optimizer = build()
    zeepo.init()
    assert heard.names == []
    train(model, optimizer, 1)
    zeepo.close()
    assert heard.names == ["session_open", "step", "closing", "close"]


def test_the_plan_for_the_batch_is_told_and_is_that_of_the_close(
    tmp_path: Path, heard: Heard
) -> None:
    model, optimizer = build()
    with zeepo.init(model, optimizer, disk=tmp_path, activations="ram") as session:
        before = session.plan.minimum_ram
        model(torch.randn(1 << 16, 64)).square().mean().backward()
        after = session.plan.minimum_ram
        session.resize(ram=after + MiB)
    assert after > before
    told = {event["event"]: event for event in heard.events}
    assert told["session_open"]["minimum_ram"] == before
    assert told["plan"]["minimum_ram"] == after
    assert told["budget"]["new"] == after + MiB
    assert (told["close"]["ram"], told["close"]["minimum_ram"]) == (after + MiB, after)


def test_building_is_told(heard: Heard) -> None:
    with zeepo.lazy():
        build()
    assert heard.names[0] == "build"
    assert heard.names[-1] == "build_end"
    end = heard.events[-1]
    assert end["num_parameters"] == 12
    assert end["parameter_bytes"] == 6 * (64 * 64 + 64) * 4


def test_events_file_is_not_inherited(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "events.jsonl")
    assert not os.get_inheritable(file._descriptor)
    file.close()
