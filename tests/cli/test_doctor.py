"""`zeepo doctor`: facts, measurements through zeepo itself, and an exit status to rely on."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import zeepo
import zeepo.cli.doctor as command
from zeepo.cli import main
from zeepo.doctor import disk, machine, selftest, speed
from zeepo.doctor.finding import Finding, State
from zeepo.sabotage import sabotage
from zeepo.units import GiB, MiB


def by_name(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


# ---- The command


def finding(name: str, state: State = State.OK, advice: str = "") -> Finding:
    return Finding("Section", name, f"text of {name}", 5, state, advice)


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace every examination by these findings."""

    def replace(**findings: Finding) -> None:
        for name in ("machine", "disk", "system", "selftest", "speed"):
            found = findings.get(name, finding(name))
            monkeypatch.setattr(command, f"{name}_findings", lambda *_, f=found: iter([f]))

    replace()
    return replace


@pytest.mark.usefixtures("healthy")
def test_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "text of selftest" in out
    assert out.endswith("zeepo works here.\n")


def test_advice_stands_below_what_it_is_about(
    healthy: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    healthy(speed=finding("sluggish", State.SLOW, "Buy a faster one."))
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line == line.rstrip() for line in lines)
    (position,) = [i for i, line in enumerate(lines) if line.startswith("slow  sluggish")]
    assert lines[position + 1].strip() == "Buy a faster one."
    assert lines[-1] == "zeepo works here. Advice above: sluggish."


def test_a_failure_is_the_exit_status(
    healthy: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    healthy(selftest=finding("training", State.FAILED))
    assert main(["doctor"]) == 1
    assert "zeepo does not work here: training." in capsys.readouterr().out


def test_without_a_usable_disk_nothing_is_trained(
    healthy: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    healthy(disk=finding("disk", State.FAILED))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "text of selftest" not in out
    assert "self-test" in out
    assert "not run" in out


def test_json(healthy: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    healthy(disk=finding("disk", State.FAILED, "Another."))
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["works"] is False
    assert {
        "section": "Section",
        "name": "disk",
        "text": "text of disk",
        "value": 5,
        "state": "failed",
        "advice": "Another.",
    } in told["findings"]


def test_a_reader_that_has_enough_is_no_error() -> None:
    script = "from zeepo.cli import main; import sys; sys.exit(main(['doctor', '--json']))"
    patch = "import zeepo.cli.doctor as d; d._examine = lambda *_: iter(())"
    command = [sys.executable, "-c", f"{patch}; {script}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.close()
        said = program.stderr.read()
    assert said == b""
    assert program.returncode == 128 + signal.SIGPIPE


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "run       start a training program as several ranks" in out
    assert "verify    compare a training program" in out
    assert "doctor    what of zeepo works on this machine" in out


@pytest.mark.slow
def test_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--disk", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    values = {item["name"]: item["value"] for item in told["findings"]}
    assert told["works"] is True
    assert values["training"] is True
    assert values["RAM"]["total"] > values["RAM"]["available"] > 0
    assert values["reading"] > 0
    assert list(tmp_path.iterdir()) == []


# ---- The machine


def test_machine_facts() -> None:
    found = by_name(machine.machine_findings())
    assert found["cores"].value >= 1
    assert found["RAM"].value["total"] >= found["RAM"].value["available"] > 0
    assert {"python", "torch", "accelerator", "memory cgroup", "swap"} <= found.keys()
    assert {"huge pages", "mremap", "malloc_trim"} == by_name(machine.system_findings()).keys()


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_processors_of_a_container(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert machine._quota(tmp_path) == quota


def test_no_huge_pages_is_slow(tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    assert machine._huge_pages(setting).state is State.SLOW
    setting.write_text("always [madvise] never\n")
    assert machine._huge_pages(setting).state is State.OK
    assert machine._huge_pages(tmp_path / "absent").state is State.SLOW


def test_swap_in_use_is_slow() -> None:
    assert machine._swap(0, 0).state is State.OK
    assert machine._swap(8 * GiB, 8 * GiB).state is State.OK
    assert machine._swap(8 * GiB, 2 * GiB).state is State.SLOW


def test_threads_that_do_not_fit_the_cores_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads, state in ((3, State.SLOW), (4, State.OK), (8, State.SLOW)):
        monkeypatch.setattr(speed, "num_cores", lambda: 4)
        monkeypatch.setattr("torch.get_num_threads", lambda n=threads: n)
        assert speed._threads().state is state


# ---- The disk


MOUNTS = r"""22 1 0:21 / / rw - ext4 /dev/vda rw
23 22 0:22 / /mnt rw - xfs /dev/vdb rw
24 23 0:23 / /mnt/with\040space rw shared:1 - tmpfs tmpfs rw
25 23 0:24 / /mnt/twice rw - ext4 /dev/vdc rw
26 23 0:25 / /mnt/twice rw - nfs4 host:/x rw
"""


@pytest.mark.parametrize(
    ("directory", "kind"),
    [
        ("/", "ext4"),
        ("/mnt/below/it", "xfs"),
        ("/mntx", "ext4"),
        ("/mnt/with space/x", "tmpfs"),
        ("/mnt/twice", "nfs4"),
    ],
)
def test_file_system_type(tmp_path: Path, directory: str, kind: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert disk.file_system_type(Path(directory), mounts) == kind


def test_the_disk_is_measured_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "MEASURED_BYTES", 64 * MiB)
    found = by_name(disk.disk_findings(tmp_path))
    assert {"directory", "free", "direct I/O", "reading", "writing", "transfers"} == found.keys()
    assert found["reading"].value > 0
    assert found["writing"].value > 0
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_gets_advice() -> None:
    assert disk._speed_finding("reading", 0.2e9).state is State.SLOW
    assert disk._speed_finding("reading", 2e9).state is State.OK


def test_a_disk_without_room_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_free_bytes", lambda directory: MiB)
    assert by_name(disk.disk_findings(tmp_path))["speed"].state is State.WARNING


def test_a_directory_that_is_not_there_fails(tmp_path: Path) -> None:
    (found,) = disk.disk_findings(tmp_path / "absent")
    assert found.state is State.FAILED
    assert "does not exist" in found.text


@pytest.mark.parametrize(
    ("kind", "state"), [("tmpfs", State.WARNING), ("nfs4", State.SLOW), ("xfs", State.OK)]
)
def test_memory_and_networks_are_not_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, state: State
) -> None:
    monkeypatch.setattr(disk, "file_system_type", lambda directory: kind)
    assert disk._file_system(tmp_path).state is state


# ---- The self-test


@pytest.mark.parametrize("name", selftest.CHECKS)
def test_check_passes_here(name: str, tmp_path: Path) -> None:
    assert selftest.CHECKS[name](tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_training_check_sees_wrong_bits(tmp_path: Path) -> None:
    for check in (selftest.check_training, selftest.check_resizing):
        with sabotage("slot.offset"), pytest.raises(RuntimeError, match="differ from torch's"):
            check(tmp_path)


def test_export_check_sees_other_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_wrongly(model: nn.Module, path: Path) -> None:
        load_safetensors(model, path)
        with torch.no_grad():
            next(iter(model.parameters())).add_(1)

    load_safetensors = zeepo.load_safetensors
    monkeypatch.setattr(zeepo, "load_safetensors", load_wrongly)
    with pytest.raises(RuntimeError, match="1 of 8 losses and parameters differ"):
        selftest.check_export(tmp_path)


def test_activations_check_sees_that_nothing_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "tuned", lambda **_: contextlib.nullcontext())  # all stay in RAM
    with pytest.raises(RuntimeError, match="nothing was tested"):
        selftest.check_activations(tmp_path)
    zeepo.close()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("kill -SEGV $$", "ended with status -11: it printed nothing"),
        ("echo Trouble >&2; exit 3", "ended with status 3: Trouble"),
        ('echo \'{"training": {"works": false, "text": "wrong"}}\'', "wrong"),
    ],
)
def test_a_self_test_that_crashes_or_fails_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    failed = [f.text for f in selftest.selftest_findings(tmp_path) if f.state is State.FAILED]
    assert failed == [says]
