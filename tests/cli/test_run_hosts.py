"""`zeepo run` on several hosts: the commands of the page, in network namespaces as they stand."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.launching import (
    CLUSTER,
    commands_in,
    losses_expected,
    losses_printed,
    outcome_of,
    started,
)
from tests.dist.hosts import TwoHosts, can_make_hosts
from zeepo.cli import main, route, run
from zeepo.cli.route import Endpoint, Route, parse_endpoint, route_to

PAGE = CLUSTER / "README.md"
FIRST_ADDRESS = "10.213.7.1"
needs_namespaces = pytest.mark.skipif(
    not can_make_hosts(), reason="network namespaces need root and the command ip"
)


def commands_for_two_hosts() -> dict[str, list[str]]:
    """What the page tells to start on each of the two."""
    found = [line for line in commands_in(PAGE) if "--nnodes 2" in line]
    numbered = [line for line in found if "--node-rank" in line]
    (alike,) = [line for line in found if "--node-rank" not in line]
    assert len(numbered) == 2
    return {"numbered": numbered, "alike": [alike, alike]}


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("way", ["numbered", "alike"])
def test_two_hosts_train_as_one_process_does(way: str) -> None:
    with TwoHosts() as two_hosts, ExitStack() as stack:
        programs = []
        for host, command in zip(two_hosts.hosts, commands_for_two_hosts()[way], strict=True):
            inside = ["ip", "netns", "exec", host["namespace"], "bash", "-c", command]
            programs.append(stack.enter_context(started(inside, CLUSTER, FIRST=FIRST_ADDRESS)))
        done = [outcome_of(program) for program in programs]
        sent = [two_hosts.bytes_sent(number) for number in (0, 1)]
    assert [outcome.status for outcome in done] == [0, 0], done
    printed = losses_printed(done[0].out + done[1].out, 4)
    assert printed == pytest.approx(losses_expected(4, 5)[0], rel=1e-6)
    assert min(sent) > 20_000  # over the cable


@pytest.mark.slow
@needs_namespaces
def test_when_a_rank_fails_both_hosts_start_anew(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys, time\n"
        "with open('began', 'a') as file:\n"
        "    file.write(os.environ['RANK'])\n"
        "if not os.path.exists('failed'):\n"
        "    while os.environ['RANK'] == '0' or '0' not in open('began').read():\n"
        "        time.sleep(0.05)\n"  # the first rank does so until it is ended
        "    open('failed', 'w').close()\n"
        "    sys.exit(6)\n"
    )
    command = commands_for_two_hosts()["alike"][0].replace("--nproc 2", "--nproc 1")
    with TwoHosts() as two_hosts, ExitStack() as stack:
        programs = []
        for host in two_hosts.hosts:
            inside = ["ip", "netns", "exec", host["namespace"], "bash", "-c", command]
            programs.append(stack.enter_context(started(inside, tmp_path, FIRST=FIRST_ADDRESS)))
        done = [outcome_of(program) for program in programs]
    assert [outcome.status for outcome in done] == [0, 0], done
    assert sorted((tmp_path / "began").read_text()) == ["0", "0", "1", "1"]
    assert sum("exitcode: 6" in outcome.err for outcome in done) == 1


# ---- What torchrun is told


def options_for(monkeypatch: pytest.MonkeyPatch, found: Route | None, *more: str) -> list[str]:
    seen: list[list[str]] = []
    monkeypatch.setattr(run, "route_to", lambda endpoint: found)
    monkeypatch.setattr(run, "_start", lambda launch, options: seen.append(options) or 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = ["run", "--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", "node0:29500"]
    assert main([*command, *more, str(CLUSTER / "train.py")]) == 0
    return seen[0]


def test_names_that_are_loopbacks_mislead_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(run.os, "environ", environ := dict(run.os.environ))
    options = options_for(monkeypatch, Route("10.0.0.2", "eth7", is_here=False))
    assert "--local-addr=10.0.0.2" in options
    assert "--rdzv-conf=is_host=0" in options
    assert environ["GLOO_SOCKET_IFNAME"] == "eth7"
    options_for(monkeypatch, Route("10.0.0.2", "eth8", is_here=True))
    assert environ["GLOO_SOCKET_IFNAME"] == "eth7"  # it was set: it stays


def test_without_a_route_torch_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_for(monkeypatch, None)
    assert options[-3:] == [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=node0:29500",
        "--rdzv-id=zeepo",
    ]


def test_hosts_that_are_numbered_meet_statically(monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_for(monkeypatch, None, "--node-rank", "1")
    assert options[-4:] == [
        "--rdzv-backend=static",
        "--node-rank=1",
        "--master-addr=node0",
        "--master-port=29500",
    ]


# ---- The route


def test_endpoints() -> None:
    assert parse_endpoint("node0:29500") == Endpoint("node0", 29500)
    assert parse_endpoint("[fe80::1]:80") == Endpoint("fe80::1", 80)
    assert str(parse_endpoint("[fe80::1]:80")) == "[fe80::1]:80"
    assert str(parse_endpoint("node0:29500")) == "node0:29500"


def test_localhost_is_here_and_has_no_interface_for_others() -> None:
    found = route_to(Endpoint("127.0.0.1", 29500))
    assert found == Route("127.0.0.1", "", is_here=True)
    assert found.is_loopback
    assert route_to(Endpoint("no-such-host.invalid", 29500)) is None


def test_a_name_that_is_a_loopback_here_goes_by_the_default_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolved = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 29500))]
    monkeypatch.setattr(route.socket, "getaddrinfo", lambda *_, **__: resolved)
    monkeypatch.setattr(
        route, "_source", lambda _, target: "127.0.0.1" if target[0][:3] == "127" else "10.0.0.5"
    )
    monkeypatch.setattr(route, "_interface_of", lambda address: f"of {address}")
    assert route_to(Endpoint("node0", 29500)) == Route("10.0.0.5", "of 10.0.0.5", is_here=True)
