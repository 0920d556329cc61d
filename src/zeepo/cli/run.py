"""`zeepo run`: start a training program as several ranks, on one host or on several.

torchrun does the work. This adds a budget for the whole host (`--ram`, divided over its ranks),
threads that fit the cores, and the script's own exit status. Between hosts it finds the interface
that leads to the others by itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from zeepo.cli.route import Endpoint, Route, parse_endpoint, route_to
from zeepo.doctor.machine import num_cores
from zeepo.units import parse_bytes

MISUSE = 2
FROM_SIGNAL = 128
"""What a shell adds to the number of the signal that ended a program."""

_RAM_VARIABLE = "ZEEPO_RAM"
_THREADS_VARIABLE = "OMP_NUM_THREADS"
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


def add_command(commands: Any) -> None:
    """Add `run` to the command line."""
    parser = commands.add_parser(
        "run",
        help="start a training program as several ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: the script's; 2 for a wrong use; 128 and the signal that ended a rank",
    )
    parser.add_argument("script", help="a script, or with -m a module")
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        help="the script's own arguments: all that follows it",
    )
    parser.add_argument("-m", "--module", action="store_true", help="run a module, as python -m")
    parser.add_argument(
        "--nproc",
        "--nproc-per-node",
        metavar="N",
        help="ranks on this host (default: one for each accelerator, 1 without any)",
    )
    parser.add_argument(
        "--ram",
        metavar="SIZE",
        help="for all ranks of this host together, for example 8GiB; each gets its part, unless "
        "the script itself gives ram= to zeepo.init",
    )
    parser.add_argument(
        "--max-restarts",
        default="0",
        metavar="N",
        help="how often all ranks are started anew when one fails (default: %(default)s)",
    )
    hosts = parser.add_argument_group("several hosts", "start the same command on each of them")
    hosts.add_argument(
        "--nnodes", default="1", metavar="N", help="hosts, or MIN:MAX of them (default: 1)"
    )
    hosts.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT", help="where they meet: a free port of one of them"
    )
    hosts.add_argument(
        "--node-rank",
        metavar="K",
        help="number of this host, 0 on the endpoint's; without it they number themselves",
    )
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Launch:
    """What is to be started, checked."""

    script: str
    arguments: tuple[str, ...]
    is_module: bool
    num_ranks: int
    max_restarts: int
    ram_bytes: int | None
    """For each rank."""
    min_hosts: int
    max_hosts: int
    endpoint: Endpoint | None
    host_number: int | None


def run(arguments: argparse.Namespace) -> int:
    """Check, start, wait, and return the exit status."""
    try:
        launch = checked(arguments)
    except ValueError as error:
        _say(str(error))
        return MISUSE
    if arguments.nproc is None:
        _say(f"--nproc {launch.num_ranks}, for this host has {_accelerators()}")
    route = None if launch.endpoint is None else route_to(launch.endpoint)
    os.environ.update(variables(launch, route))
    return _start(launch, torchrun_options(launch, route))


def _say(text: str) -> None:
    print(f"zeepo run: {text}", file=sys.stderr, flush=True)


# ---- What was asked for


def checked(arguments: argparse.Namespace) -> Launch:
    """Read the command line; what makes no sense is a ValueError that says why."""
    if not arguments.module and not Path(arguments.script).exists():
        raise ValueError(f"there is no script {arguments.script}")
    num_ranks = _default_ranks()
    if arguments.nproc is not None:
        num_ranks = _number("--nproc", arguments.nproc, least=1)
    min_hosts, max_hosts = _hosts(arguments.nnodes)
    endpoint, host_number = _meeting(arguments, min_hosts, max_hosts)
    return Launch(
        script=arguments.script,
        arguments=tuple(arguments.arguments),
        is_module=arguments.module,
        num_ranks=num_ranks,
        max_restarts=_number("--max-restarts", arguments.max_restarts, least=0),
        ram_bytes=None if arguments.ram is None else _ram_of_a_rank(arguments.ram, num_ranks),
        min_hosts=min_hosts,
        max_hosts=max_hosts,
        endpoint=endpoint,
        host_number=host_number,
    )


def _number(option: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{option} {text}: expected a whole number, at least {least}")
    return int(text)


def _default_ranks() -> int:
    return max(1, torch.accelerator.device_count())


def _accelerators() -> str:
    count = torch.accelerator.device_count()
    return f"{count} accelerators" if count > 1 else "one accelerator" if count else "none"


def _ram_of_a_rank(text: str, num_ranks: int) -> int:
    try:
        ram_bytes = parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"--ram {text}: {error}") from error
    if ram_bytes < num_ranks:
        raise ValueError(f"--ram {text}: nothing is left for each of {num_ranks} ranks")
    return ram_bytes // num_ranks


def _hosts(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    min_hosts = _number("--nnodes", least, least=1)
    return min_hosts, _number("--nnodes", most, least=min_hosts) if colon else min_hosts


def _meeting(
    arguments: argparse.Namespace, min_hosts: int, max_hosts: int
) -> tuple[Endpoint | None, int | None]:
    if max_hosts == 1:
        for option in ("rdzv_endpoint", "node_rank"):
            if getattr(arguments, option) is not None:
                name = option.replace("_", "-")
                raise ValueError(f"--{name} is for several hosts: give --nnodes, or leave it out")
        return None, None
    if arguments.rdzv_endpoint is None:
        raise ValueError(
            f"--nnodes {arguments.nnodes} needs --rdzv-endpoint HOST:PORT: where the hosts meet"
        )
    endpoint = parse_endpoint(arguments.rdzv_endpoint)
    if arguments.node_rank is None:
        return endpoint, None
    if min_hosts != max_hosts:
        raise ValueError(
            f"--node-rank: hosts cannot be numbered when there are {min_hosts} to {max_hosts}"
        )
    number = _number("--node-rank", arguments.node_rank, least=0)
    if number >= max_hosts:
        raise ValueError(f"--node-rank {number}: {max_hosts} hosts are 0 to {max_hosts - 1}")
    return endpoint, number


# ---- What is started


def variables(launch: Launch, route: Route | None) -> dict[str, str]:
    """Of the ranks' environment, on top of ours. What the user has set stays, except the budget."""
    chosen = {}
    if launch.ram_bytes is not None:
        chosen[_RAM_VARIABLE] = str(launch.ram_bytes)
    if launch.num_ranks > 1 and _THREADS_VARIABLE not in os.environ:
        chosen[_THREADS_VARIABLE] = str(max(1, num_cores() // launch.num_ranks))
    if route is not None and route.interface and _INTERFACE_VARIABLE not in os.environ:
        chosen[_INTERFACE_VARIABLE] = route.interface
    return chosen


def torchrun_options(launch: Launch, route: Route | None) -> list[str]:
    """The options of torchrun that say the same."""
    options = [
        f"--nproc-per-node={launch.num_ranks}",
        f"--nnodes={launch.min_hosts}:{launch.max_hosts}",
        f"--max-restarts={launch.max_restarts}",
    ]
    if launch.is_module:
        options.append("--module")
    endpoint = launch.endpoint
    if endpoint is None:
        return [*options, "--standalone"]
    if route is not None and not route.is_loopback:
        options.append(f"--local-addr={route.address}")
    if launch.host_number is not None:
        return [
            *options,
            "--rdzv-backend=static",
            f"--node-rank={launch.host_number}",
            f"--master-addr={endpoint.host}",
            f"--master-port={endpoint.port}",
        ]
    options += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=zeepo"]
    if route is not None and not route.is_loopback:
        # torch would ask what this host's name resolves to, which may be nothing or a loopback.
        options.append(f"--rdzv-conf=is_host={int(route.is_here)}")
    return options


def _start(launch: Launch, options: list[str]) -> int:
    # Imported here: the other commands start faster without.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    torchrun: Any = import_module("torch.distributed.run")  # it has no types
    chosen = torchrun.parse_args([*options, launch.script])
    chosen.training_script_args = list(launch.arguments)  # as they are: nothing parses them here
    try:
        torchrun.run(chosen)
    except ChildFailedError as error:
        return _status_of_failure(error)
    except SignalException as error:
        _say(f"ended by {error.sigval.name}, and every rank of this host with it")
        return FROM_SIGNAL + error.sigval
    except KeyboardInterrupt:  # before the ranks were started
        return FROM_SIGNAL + signal.SIGINT
    return 0


def _status_of_failure(error: Any) -> int:
    """Say which ranks failed; the status of the one that did so first, as far as can be told.

    An exception is status 1, and one in a rank makes others raise too; those that still run then
    get a SIGTERM. So a rank that chose its status, or was killed otherwise, comes before both.
    """
    usual = [1, -signal.SIGTERM]
    failures = sorted(
        error.failures.items(),
        key=lambda item: (*[item[1].exitcode == status for status in reversed(usual)], item[0]),
    )
    for rank, failure in failures:
        _say(f"rank {rank} (process {failure.pid}) ended with {_ending(failure.exitcode)}")
    _say("what they said is above")
    first: int = failures[0][1].exitcode
    return first if first > 0 else FROM_SIGNAL - first


def _ending(status: int) -> str:
    return f"status {status}" if status >= 0 else signal.Signals(-status).name
