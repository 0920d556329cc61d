"""The program that is running: whether it can be started once more, and how.

A rank that `zeepo.init(num_gpus=...)` starts is the same command again, so it must be one that can
be given again: a script or a module of its own, not a notebook, not a test run.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

from zeepo.errors import UnsupportedError

FOLDER = os.getcwd()
"""Where the program was started, as far as that is known: scripts rarely move before `import`."""
INSTEAD = "Start it with a launcher instead: zeepo run --nproc {num_ranks} script.py (or torchrun)."


def command_again(num_ranks: int) -> list[str]:
    """The command of this process; UnsupportedError when it cannot be given again."""
    reason = _why_not()
    if reason:
        raise UnsupportedError(
            f"num_gpus={num_ranks}: zeepo starts the other ranks by running this program again, "
            f"and {reason}. {INSTEAD.format(num_ranks=num_ranks)}"
        )
    return [sys.executable, *sys.orig_argv[1:]]


def _why_not() -> str:
    main = sys.modules.get("__main__")
    if "ipykernel" in sys.modules or hasattr(sys, "ps1"):
        return "a notebook or an interactive session cannot be run again"
    if "PYTEST_CURRENT_TEST" in os.environ and "_pytest" in sys.modules:  # not a child of it
        return "that would be the whole test run"
    if multiprocessing.parent_process() is not None:
        return "this is a process that multiprocessing started, not a program"
    if sys.argv[:1] == ["-c"]:
        return "it came with -c: save it as a script"
    path = getattr(main, "__file__", None)
    if path is None or sys.argv[:1] == ["-"]:
        return "it was not read from a file (a pipe, standard input, or an embedding program)"
    if not os.path.exists(os.path.join(FOLDER, path)):
        return f"its file {path} is not there any more"
    return ""
