"""One run of the user's program, in a process of its own that `stage` forked.

The program runs as it would by itself (`__main__`, its own argv), from a fixed random state, until
the watcher has seen enough steps. Plainly, `zeepo` does nothing in it; under zeepo, the options of
the command override the program's, and a program that never calls `init` is adopted as if it had
called `init()` at its start.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy
import torch

import zeepo
import zeepo.engine.api
from zeepo.config import resolve_options
from zeepo.engine.session import Session
from zeepo.engine.tuning import tuned
from zeepo.errors import BudgetError, ConfigError, UnsupportedError
from zeepo.sabotage import sabotage
from zeepo.units import format_bytes
from zeepo.verify.job import Batch, Channel, Job
from zeepo.verify.standin import make_zeepo_do_nothing, replace_functions
from zeepo.verify.watch import Source, Watcher

_MOST_SECONDS_TO_CLOSE = 60
"""A session that cannot even close must not keep the command waiting."""


class Child:
    """The run, from the program's start to the end of the process."""

    def __init__(self, job: Job, channel: Channel):
        self._job = job
        self._channel = channel
        self._told_plan = False
        self._watcher = Watcher(self._emit, job.num_steps, job.observe_all, self._finish)

    def run(self) -> NoReturn:
        """Run the program and leave the process."""
        self._seed()
        self._watcher.install()
        with contextlib.ExitStack() as stack:
            if self._job.managed:
                if self._job.sabotage:
                    stack.enter_context(sabotage(self._job.sabotage))
                stack.enter_context(tuned(**{"least_ram": True, **self._job.tuning}))
            try:
                if self._job.managed:
                    ManagedZeepo(self._job).install()
                else:
                    make_zeepo_do_nothing()
                self._run_program()
            except SystemExit as error:
                if error.code not in (None, 0):
                    self._fail(error)
            except BaseException as error:
                self._fail(error)
            self._finish()

    def _seed(self) -> None:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)

    def _run_program(self) -> None:
        target, arguments = self._job.target, self._job.arguments
        sys.argv = [target, *arguments]
        if self._job.is_function:
            module_name, _, function_name = target.rpartition(":")
            sys.path.insert(0, os.getcwd())
            function: Any = importlib.import_module(module_name)
            for part in function_name.split("."):
                function = getattr(function, part)
            function()
        else:
            sys.path.insert(0, str(Path(target).resolve().parent))
            runpy.run_path(target, run_name="__main__")

    # -- talking ----------------------------------------------------------------------------------

    def _emit(self, batch: Batch, source: Source) -> None:
        """Tell the command what was observed; with `observe_all`, wait until it says to go on."""
        self._tell_plan()
        self._channel.send(batch.to_message())
        if not (self._job.observe_all or batch.is_final):
            return
        while True:
            message = self._channel.receive()
            if message is None or message["type"] == "stop":
                self._leave(0)
            if message["type"] == "go":
                return
            for number, (_, value) in enumerate(source()):
                if number == message["item"]:
                    Path(message["path"]).write_bytes(value.data)
            self._channel.send({"type": "sent"})

    def _tell_plan(self) -> None:
        session = zeepo.engine.api.current_session()
        if self._told_plan or not isinstance(session, Session) or not hasattr(session, "plan"):
            return
        self._told_plan = True
        plan = session.plan
        where = {"ram": "in ram", "disk": "on disk"}
        places = [f"{kind} {where[tier]}" for kind, tier in plan.placement.items()]
        where |= {"disk": "to disk when ram is short", "recompute": "recomputed"}
        places.append(f"activations {where[plan.activations]}")
        text = f"{plan.num_units} units, ram {format_bytes(plan.ram)}; {', '.join(places)}"
        self._channel.send({"type": "plan", "text": text})

    def _finish(self) -> NoReturn:
        """Enough was seen, or the program is over: close, show the last values, leave."""
        try:
            if self._job.managed:
                zeepo.close()
            self._watcher.at_the_end()
        except BaseException as error:
            self._fail(error)
        self._channel.send({"type": "end"})
        self._leave(0)

    def _fail(self, error: BaseException) -> NoReturn:
        self._channel.send(
            {
                "type": "error",
                "step": self._watcher.num_steps + 1,
                "summary": "".join(traceback.format_exception_only(error)).strip(),
                "traceback": _traceback_of_program(error),
                "is_refusal": _is_refusal(error),
            }
        )
        self._leave(1)

    def _leave(self, status: int) -> NoReturn:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_MOST_SECONDS_TO_CLOSE)
        with contextlib.suppress(BaseException):
            if self._job.managed:
                zeepo.close()  # removes scratch files from a disk of the user's
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


class ManagedZeepo:
    """`zeepo.init` as the command wants it: its options first, and never without a session."""

    def __init__(self, job: Job):
        self._job = job
        self._init: Callable[..., Session] = zeepo.engine.api.init
        self._automatic: Session | None = None

    def install(self) -> None:
        replace_functions({"init": self.init})
        self._automatic = self._init(**self._options({}, None))

    def init(
        self, model: Any = None, optimizer: Any = None, *, config: Any = None, **options: Any
    ) -> Session:
        """The program's own call: takes the place of the automatic session."""
        automatic, self._automatic = self._automatic, None
        if automatic is not None:
            automatic.close()
        chosen = self._options(options, config)
        return self._init(model, optimizer, config=config, **chosen)

    def _options(self, options: dict[str, Any], config: Any) -> dict[str, Any]:
        """The program's options, with a disk if it states neither budget nor disk, and ours."""
        stated = resolve_options(options, config_path=config)
        chosen = dict(options)
        wants_disk = "disk" in self._job.options.values()
        if not stated.disk and (stated.ram is None or wants_disk):
            chosen["disk"] = self._job.disk
        return {**chosen, **self._job.options}


def _is_refusal(error: BaseException) -> bool:
    """zeepo says that it does not do this, which is no defect to look for.

    A budget is refused before training; one that fails later was promised to be enough.
    """
    if isinstance(error, BudgetError):
        session = zeepo.engine.api.current_session()
        plan = None if session is None else session.plan
        return plan is None or plan.ram < plan.minimum_ram
    return isinstance(error, ConfigError | UnsupportedError)


def _traceback_of_program(error: BaseException) -> str:
    """The traceback from the program's first line on, as the program alone would show it."""
    frames = error.__traceback__
    ours = {__file__, runpy.__file__, "<frozen runpy>", importlib.__file__}
    while frames is not None and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    shown = frames if frames is not None else error.__traceback__
    return "".join(traceback.format_exception(type(error), error, shown))


def run_job(job: Job, channel: Channel) -> NoReturn:
    """In a freshly forked process: redirect what the program prints, and run it."""
    os.chdir(job.directory)
    os.environ["ZEEPO_VERIFY"] = "managed" if job.managed else "plain"
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    try:
        Child(job, channel).run()
    finally:
        os._exit(70)
