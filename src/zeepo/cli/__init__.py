"""The `zeepo` command. One file per subcommand stands beside this one."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version

from zeepo.cli import compare, doctor, run, verify


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="zeepo", description="Train PyTorch models bigger than memory."
    )
    parser.add_argument("--version", action="version", version=f"zeepo {version('zeepo')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    run.add_command(commands)
    verify.add_command(commands)
    compare.add_command(commands)
    doctor.add_command(commands)
    arguments = parser.parse_args(argv)
    if not hasattr(arguments, "run"):
        parser.print_help()
        return 0
    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # `zeepo doctor | head`: who reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status
