"""Showing what a session does. Reads events only: nothing here knows the engine."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from zeepo.config import Options

if TYPE_CHECKING:
    from zeepo.report.progress import Progress


def observe(options: Options) -> Progress | None:
    """The progress display, if this session is to have one.

    "auto" is no display where nobody would look at it, and none in pytest and in the processes of
    `zeepo verify`, whose output is their own.
    """
    if options.progress == "auto":
        is_ours = not {"PYTEST_CURRENT_TEST", "ZEEPO_VERIFY"} & os.environ.keys()
        wanted = is_ours and sys.stderr is not None and sys.stderr.isatty()
    else:
        wanted = options.progress
    if not wanted:
        return None
    # Imported here: a session without a display does not pay for rich.
    from zeepo.report.progress import Progress

    return Progress()
