"""`zeepo doctor`: what this machine has, what of zeepo works here, and what is slow.

Takes a few seconds. Writes 256 MiB to the directory, through zeepo's own disk tier, and removes
them. Everything that is not as it could be comes with advice.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zeepo.doctor.disk import disk_findings
from zeepo.doctor.finding import Finding, State
from zeepo.doctor.machine import machine_findings, system_findings
from zeepo.doctor.selftest import SECTION as SELFTEST
from zeepo.doctor.selftest import selftest_findings
from zeepo.doctor.speed import speed_findings

WORKS, FAILS = 0, 1

_WIDTH_OF_A_LOG = 100
_MARKS = {
    State.OK: ("ok", "green"),
    State.SLOW: ("slow", "yellow"),
    State.WARNING: ("note", "yellow"),
    State.FAILED: ("FAIL", "bold red"),
}


def add_command(commands: Any) -> None:
    """Add `doctor` to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="what of zeepo works on this machine, and what is slow",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 zeepo works here, 1 it does not",
    )
    parser.add_argument(
        "--disk",
        type=Path,
        default=_default_directory(),
        metavar="DIR",
        help="directory to examine as a disk (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def _default_directory() -> Path:
    lasting = Path("/var/tmp")
    return lasting if os.access(lasting, os.W_OK) else Path(tempfile.gettempdir())


def run(arguments: argparse.Namespace) -> int:
    """Examine, tell, and return the exit status."""
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if is_terminal else _WIDTH_OF_A_LOG)
    directory = arguments.disk.expanduser().absolute()
    findings = list(_examine(directory, Console(stderr=True)))
    works = all(finding.state is not State.FAILED for finding in findings)
    if arguments.json:
        print(json.dumps({"works": works, "findings": [asdict(f) for f in findings]}, indent=2))
    else:
        print_findings(console, findings)
        print_verdict(console, findings)
    return WORKS if works else FAILS


def _examine(directory: Path, progress: Console) -> Iterator[Finding]:
    with progress.status("looking at the machine") as status:
        yield from machine_findings()
        status.update("measuring the disk")
        disk = list(disk_findings(directory))
        yield from disk
        yield from system_findings()
        if all(finding.state is not State.FAILED for finding in disk):
            status.update("training a tiny model, plainly and under zeepo")
            yield from selftest_findings(directory)
        else:
            advice = "It needs a directory that can be used."
            yield Finding(SELFTEST, "self-test", "not run", None, State.WARNING, advice)
        status.update("measuring speed")
        yield from speed_findings()


def print_findings(console: Console, findings: list[Finding]) -> None:
    """A table per section; advice below what it is about."""
    width = max(len(finding.name) for finding in findings)
    for section, members in groupby(findings, key=lambda finding: finding.section):
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(width=4)
        table.add_column(width=width)
        table.add_column(overflow="fold")
        for finding in members:
            mark, style = _MARKS[finding.state]
            text = Text(finding.text)
            if finding.advice:
                text.append(f"\n{finding.advice}", style=style)
            table.add_row(Text(mark, style=style), Text(finding.name), text)
        console.print(Text(section, style="bold"))
        with console.capture() as capture:
            console.print(table)
        for line in capture.get().splitlines():  # rich fills the last column with blanks
            print(line.rstrip(), file=console.file)
        console.print()


def print_verdict(console: Console, findings: list[Finding]) -> None:
    """The last line: whether zeepo works here."""
    failed = [finding.name for finding in findings if finding.state is State.FAILED]
    advised = [finding.name for finding in findings if finding.advice]
    if failed:
        verdict = Text(f"zeepo does not work here: {', '.join(failed)}.", style="bold red")
    elif advised:
        verdict = Text(f"zeepo works here. Advice above: {', '.join(advised)}.", style="bold")
    else:
        verdict = Text("zeepo works here.", style="bold green")
    console.print(verdict)
