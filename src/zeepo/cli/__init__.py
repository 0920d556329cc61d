"""The `zeepo` command. One file per subcommand will stand beside this one; none is here yet."""

import argparse
from collections.abc import Sequence
from importlib.metadata import version


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="zeepo", description="Train PyTorch models bigger than memory."
    )
    parser.add_argument("--version", action="version", version=f"zeepo {version('zeepo')}")
    parser.parse_args(argv)
    parser.print_help()
    return 0
