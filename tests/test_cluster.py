"""examples/cluster: what can be run of it without a cluster is run, the rest is read."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.cli.launching import (
    CLUSTER,
    ROOT,
    commands_in,
    launch,
    losses_expected,
    losses_printed,
    outcome_of,
    started,
)
from zeepo.cli import main, run
from zeepo.config import resolve_options
from zeepo.units import GiB, parse_bytes

# ---- Slurm

SRUN = """#!/bin/bash
echo "$@" > "$STUBS/srun.arguments"
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do "$@" & nodes+=($!); done
for node in "${nodes[@]}"; do wait "$node" || status=$?; done
exit "${status:-0}"
"""

SCONTROL = """#!/bin/bash
[[ "$*" == "show hostnames node[0-1]" ]] && printf 'localhost\\nlocalhost\\n'
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """What a job of two nodes sees, with commands that stand in for Slurm's."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {
        "STUBS": str(tmp_path),
        "SLURM_JOB_ID": str(tmp_path.stat().st_ino),
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": "2",
    }


def sbatch(slurm: dict[str, str], cwd: Path = CLUSTER) -> Any:
    script = shlex.quote(str(CLUSTER / "train.sbatch"))
    return launch("bash", "-c", f'PATH="$STUBS:$PATH" exec bash {script}', cwd=cwd, **slurm)


def directives() -> dict[str, str]:
    text = (CLUSTER / "train.sbatch").read_text()
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))


def test_sbatch_is_a_script_and_asks_for_what_it_uses() -> None:
    script = CLUSTER / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    asked, text = directives(), script.read_text()
    assert asked["ntasks-per-node"] == "1"  # one `zeepo run` for a node
    (ram,) = re.findall(r"--ram (\d\S+)", text)
    assert parse_bytes(ram) < parse_bytes(asked["mem"] + "iB")
    assert "sbatch train.sbatch" in commands_in(CLUSTER / "README.md")


@pytest.mark.slow
def test_sbatch_trains(slurm: dict[str, str]) -> None:
    done = sbatch(slurm)
    assert done.status == 0, done.err
    assert losses_printed(done.out, 4) == pytest.approx(losses_expected(4, 5)[0], rel=1e-6)


@pytest.mark.slow
def test_a_job_that_fails_says_so(slurm: dict[str, str], tmp_path: Path) -> None:
    """No train.py here: `zeepo run` refuses on both nodes, and that is the job's status."""
    done = sbatch(slurm, cwd=tmp_path)
    assert done.status == 2
    assert done.err.count("zeepo run: there is no script train.py") == 2
    (tmp_path / "scontrol").write_text("#!/bin/bash\nexit 4\n")
    assert sbatch(slurm, cwd=tmp_path).status == 4


# ---- Kubernetes


@pytest.fixture
def job() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CLUSTER / "pytorchjob.yaml").read_text())
    return found


def pods(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The specification of every pod, the master's first."""
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert list(roles) == ["Master", "Worker"]
    assert roles["Master"]["replicas"] == 1
    return [r["template"]["spec"] for r in roles.values() for _ in range(r["replicas"])]


def filled_in(words: list[str], number: int) -> list[str]:
    """With what the operator tells a pod; a name that it does not tell is an error."""
    told = {"RANK": str(number), "MASTER_ADDR": "localhost", "MASTER_PORT": "23456"}
    return [re.sub(r"\$\((\w+)\)", lambda match: told[match[1]], word) for word in words]


def launch_of(command: list[str], monkeypatch: pytest.MonkeyPatch) -> run.Launch:
    """What `zeepo run` understands of a command."""
    seen: list[run.Launch] = []
    monkeypatch.chdir(CLUSTER)
    monkeypatch.setattr(run, "_start", lambda launch, options: seen.append(launch) or 0)
    monkeypatch.setattr(run.os, "environ", dict(run.os.environ))
    assert command[0] == "zeepo"
    assert main(command[1:]) == 0
    return seen[0]


def test_every_pod_is_a_host(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    for number, pod in enumerate(pods(job)):
        (container,) = pod["containers"]
        launched = launch_of(filled_in(container["command"], number), monkeypatch)
        assert launched.max_hosts == len(pods(job))
        assert launched.host_number == number
        assert container["name"] == "pytorch"
        limit = parse_bytes(container["resources"]["limits"]["memory"] + "B")
        assert launched.ram_bytes is not None
        assert launched.ram_bytes * launched.num_ranks <= limit - 2 * GiB
        given = {item["name"]: item["value"] for item in container["env"]}
        (mount,) = container["volumeMounts"]
        assert resolve_options({}, environ=given).disk == (Path(mount["mountPath"]),)
        assert [volume["name"] for volume in pod["volumes"]] == [mount["name"]]


@pytest.mark.slow
def test_the_pods_commands_train(job: dict[str, Any], tmp_path: Path) -> None:
    with ExitStack() as stack:
        programs = []
        for number, pod in enumerate(pods(job)):
            command = filled_in(pod["containers"][0]["command"], number)
            program = started(command, CLUSTER, ZEEPO_DISK=str(tmp_path))
            programs.append(stack.enter_context(program))
        done = [outcome_of(program) for program in programs]
    assert [outcome.status for outcome in done] == [0, 0], done
    assert losses_printed(done[0].out, 4) == pytest.approx(losses_expected(4, 5)[0], rel=1e-6)


# ---- Docker


def instructions() -> list[tuple[str, str]]:
    text = (CLUSTER / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2]) for line in lines]


def copy_as_told(target: Path) -> None:
    """What the COPY instructions bring into the image; they stop at what does not exist."""
    for name, rest in instructions():
        if name == "COPY":
            *sources, place = rest.split()
            for source in sources:
                origin = ROOT / source
                if origin.is_dir():
                    shutil.copytree(
                        origin, target / place, ignore=shutil.ignore_patterns("*.egg-info")
                    )
                else:
                    shutil.copy(origin, target / place)


def test_the_image_has_what_its_command_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [name for name, _ in instructions()]
    assert kinds[0] == "FROM"
    assert set(kinds) == {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "CMD"}
    copy_as_told(tmp_path)
    launched = launch_of(json.loads(instructions()[-1][1]), monkeypatch)
    assert (tmp_path / launched.script).is_file()
    for name, rest in instructions():
        if name == "RUN":
            assert (tmp_path / rest.split("--constraint ")[1].split()[0]).is_file()


@pytest.mark.slow
def test_what_is_copied_is_enough_to_build(tmp_path: Path) -> None:
    image, wheels = tmp_path / "image", tmp_path / "wheels"
    image.mkdir()
    copy_as_told(image)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel"]
    command = [*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), "."]
    done = subprocess.run(command, cwd=image, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [path.name.split("-")[0] for path in wheels.iterdir()] == ["zeepo"]


# ---- Ray


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install '.[ray]'")
def test_ray_trains(tmp_path: Path) -> None:
    (command,) = [line for line in commands_in(CLUSTER / "README.md") if "ray_train.py" in line]
    words = shlex.split(command)
    words[-1] = str(tmp_path / words[-1])  # results are not left in the repository
    done = launch(*words, cwd=CLUSTER, HOME=str(tmp_path), RAY_USAGE_STATS_ENABLED="0")
    assert done.status == 0, done.err
    losses, parameters = losses_expected(2, 5)
    assert f"step 4, 2 ranks, loss {losses[-1]!r}\n" in done.out
    (weights,) = re.findall(r"^weights: (.+)$", done.out, re.MULTILINE)
    trained = torch.load(weights)
    assert trained.keys() == parameters.keys()
    for name, values in trained.items():
        assert torch.equal(values, parameters[name]), name
