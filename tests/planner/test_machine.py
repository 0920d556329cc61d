"""What is left of the machine or of the cgroup, from files laid out as Linux does."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeepo.planner import machine
from zeepo.planner.machine import (
    available_ram_bytes,
    cgroup_available_bytes,
    machine_available_bytes,
)

MEMINFO = "MemTotal:       16303428 kB\nMemFree:          123456 kB\nMemAvailable:    8000000 kB\n"
V1_NO_LIMIT = 9223372036854771712


def put(path: Path, text: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
    return path


def test_available_is_read_not_free(tmp_path: Path) -> None:
    assert machine_available_bytes(put(tmp_path / "meminfo", MEMINFO)) == 8_000_000 * 1024


def test_no_meminfo(tmp_path: Path) -> None:
    assert machine_available_bytes(tmp_path / "none") is None
    assert machine_available_bytes(put(tmp_path / "meminfo", "MemTotal: 5 kB")) is None


def v2(root: Path, limit: object, used: object, path: str = "/user.slice/job") -> int | None:
    folder = root / "sys" / path.lstrip("/")
    put(folder / "memory.max", limit)
    put(folder / "memory.current", used)
    return cgroup_available_bytes(put(root / "cgroup", f"0::{path}"), root / "sys")


def v1(root: Path, limit: object, used: object, path: str = "/docker/abc") -> int | None:
    folder = root / "sys" / "memory" / path.lstrip("/")
    put(folder / "memory.limit_in_bytes", limit)
    put(folder / "memory.usage_in_bytes", used)
    lines = f"12:cpu,cpuacct:{path}\n7:memory:{path}\n1:name=systemd:{path}"
    return cgroup_available_bytes(put(root / "cgroup", lines), root / "sys")


@pytest.mark.parametrize("read", [v1, v2])
def test_limit_less_use(read: object, tmp_path: Path) -> None:
    assert read(tmp_path, 1 << 30, 300 << 20) == 724 << 20  # type: ignore[operator]


@pytest.mark.parametrize("read", [v1, v2])
def test_the_root_group_of_a_container(read: object, tmp_path: Path) -> None:
    assert read(tmp_path, 1 << 30, 0, "/") == 1 << 30  # type: ignore[operator]


@pytest.mark.parametrize("read", [v1, v2])
def test_over_the_limit_nothing_is_left(read: object, tmp_path: Path) -> None:
    assert read(tmp_path, 1 << 20, 1 << 21) == 0  # type: ignore[operator]


def test_no_limit(tmp_path: Path) -> None:
    assert v2(tmp_path / "2", "max", 5) is None
    assert v1(tmp_path / "1", V1_NO_LIMIT, 5) is None


def test_memory_among_other_controllers_of_version_1(tmp_path: Path) -> None:
    folder = tmp_path / "sys" / "memory" / "job"
    put(folder / "memory.limit_in_bytes", 1000)
    put(folder / "memory.usage_in_bytes", 1)
    lines = put(tmp_path / "cgroup", "5:cpuset,memory:/job")
    assert cgroup_available_bytes(lines, tmp_path / "sys") == 999


def test_both_versions_at_once_the_smaller_counts(tmp_path: Path) -> None:
    v2(tmp_path, 5000, 1000, "/job")
    v1(tmp_path, 3000, 1000, "/job")
    lines = put(tmp_path / "cgroup", "7:memory:/job\n0::/job")
    assert cgroup_available_bytes(lines, tmp_path / "sys") == 2000


def test_a_path_with_colons(tmp_path: Path) -> None:
    assert v2(tmp_path, 5000, 1000, "/a:b/c:d") == 4000


def test_missing_files(tmp_path: Path) -> None:
    assert cgroup_available_bytes(tmp_path / "none", tmp_path) is None
    assert cgroup_available_bytes(put(tmp_path / "cgroup", "0::/gone"), tmp_path) is None
    put(tmp_path / "half" / "memory.max", 100)
    assert cgroup_available_bytes(put(tmp_path / "cgroup", "0::/half"), tmp_path) is None


@given(st.one_of(st.none(), st.integers(0, 1 << 40)), st.one_of(st.none(), st.integers(0, 1 << 40)))
def test_the_default_budget_leaves_a_margin(whole: int | None, group: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "machine_available_bytes", lambda: whole)
        patch.setattr(machine, "cgroup_available_bytes", lambda: group)
        budget = available_ram_bytes()
    found = [n for n in (whole, group) if n is not None]
    if not found:
        assert budget == 4 << 30
    else:
        assert budget <= min(found)
        assert abs(budget - 0.9 * min(found)) <= 1


def test_this_machine() -> None:
    assert available_ram_bytes() > 0


def test_the_peak_keeps_what_was_given_back() -> None:
    before = machine.peak_resident_growth_bytes()
    block = bytearray(machine.resident_bytes() // 2 + (64 << 20))
    peak = machine.peak_resident_growth_bytes()
    assert peak >= machine.resident_growth_bytes()
    assert peak >= before
    del block
    assert machine.peak_resident_growth_bytes() >= peak - (1 << 20)  # the kernel counts in batches
    assert machine.resident_growth_bytes() < peak - (32 << 20)


def test_a_peak_that_cannot_be_read_is_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for status in (tmp_path / "absent", put(tmp_path / "status", "Name: x")):
        monkeypatch.setattr(machine, "_STATUS", machine._OwnFile(str(status), 1 << 10))
        assert machine.peak_resident_growth_bytes() == 0


def test_a_limit_that_changes_is_seen(tmp_path: Path) -> None:
    v1(tmp_path, 3000, 1000, "/job")
    read = machine.own_cgroup_limit(tmp_path / "cgroup", tmp_path / "sys")
    before = read()
    assert int(before) == 3000
    put(tmp_path / "sys" / "memory" / "job" / "memory.limit_in_bytes", 2000)
    assert int(read()) == 2000
    assert machine.own_cgroup_limit(tmp_path / "absent", tmp_path / "sys")() == b""


def test_limits_of_parents_are_listed(tmp_path: Path) -> None:
    v1(tmp_path, 3000, 1000, "/job")
    put(tmp_path / "sys" / "memory" / "memory.limit_in_bytes", 9000)
    put(tmp_path / "sys" / "memory" / "memory.usage_in_bytes", 2000)
    lines = put(tmp_path / "cgroup", "7:memory:/job")
    assert machine.cgroup_limits(lines, tmp_path / "sys") == [
        (1, 3000, 1000, 0),
        (1, 9000, 2000, 0),
    ]
