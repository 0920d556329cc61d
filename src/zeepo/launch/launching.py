"""`zeepo.init(num_gpus=4)` in a program that was started once: it becomes rank 0 of four.

The program is started three more times ([program]); each comes to `init` by itself, where they meet
in a store on the loopback interface. From then on they are ranks of torch.distributed like those of
any launcher, and training data is sliced ([slices]). They end together: the first waits for the
others, and the others look whether it lives.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from zeepo import events
from zeepo.errors import RankError
from zeepo.launch.others import LOOK_SECONDS, Others, report_exceptions
from zeepo.launch.program import FOLDER, command_again
from zeepo.launch.slices import Slices

FIRST_VARIABLE = "ZEEPO_LAUNCH_FIRST"
"""In a started rank: the process that started it."""
HOST = "127.0.0.1"
PATIENCE_SECONDS = 1800.0
TELL_AFTER_SECONDS = 20.0
GOOD_END_SECONDS = 20.0
"""The others get so long to come to the end of the program, when the first has."""
BAD_END_SECONDS = 0.5
"""...and when it failed."""
BLAME_SECONDS = 5.0
"""...and to say what failed, when the first has only lost another."""

ExceptionHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

slices: Slices | None = None
"""How this rank takes its part of the data; None unless zeepo has started the ranks."""


def is_started_by_launcher(environ: Mapping[str, str]) -> bool:
    """Whether a launcher decides how many ranks there are (or zeepo's own commands do)."""
    return any(name in environ for name in ("RANK", "WORLD_SIZE", "ZEEPO_VERIFY"))


def launch(num_ranks: int | None) -> None:
    """Be one of `num_ranks` ranks, and start the others if nobody has."""
    if slices is not None:
        slices.install()
        return
    if _is_started_here():
        _join_first()
    elif is_started_by_launcher(os.environ):
        _tell_of_other_number(num_ranks)
    elif num_ranks is not None and num_ranks > 1:
        _start_others(num_ranks)


def stop_slicing() -> None:
    """The session is over: loaders give whole batches again."""
    if slices is not None:
        slices.remove()


def _tell_of_other_number(num_ranks: int | None) -> None:
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks not in (None, started) and os.environ.get("RANK", "0") == "0":
        ranks = "1 rank" if started == 1 else f"{started} ranks"
        events.warn(f"num_gpus={num_ranks}, but the launcher has started {ranks}: that counts.")


# -- in the first rank ----------------------------------------------------------------------------


def _start_others(num_ranks: int) -> None:
    global _others
    command = command_again(num_ranks)
    num_threads = _share_processors(num_ranks)
    store = TCPStore(
        HOST,
        0,
        num_ranks,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=PATIENCE_SECONDS),
    )
    common = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store.port),
        "OMP_NUM_THREADS": str(num_threads),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    others = _others = Others()
    for rank in range(1, num_ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), FIRST_VARIABLE: str(os.getpid())}
        others.start(command, FOLDER, common | place)
    os.environ.update(common | {"RANK": "0", "LOCAL_RANK": "0"})
    show = sys.excepthook
    _show_right_exception(others, show)
    _await(others, store, num_ranks)
    _meet(store, 0, num_ranks)
    _show_right_exception(others, show)  # torch has put its own there, which prefixes every line


def _share_processors(num_ranks: int) -> int:
    """Threads of each rank; says what the ranks compute on."""
    num_cores = len(os.sched_getaffinity(0))
    num_threads = max(1, num_cores // num_ranks)
    num_threads = int(os.environ.get("OMP_NUM_THREADS", str(num_threads)))
    torch.set_num_threads(num_threads)
    num_devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    found = f"{num_devices} accelerators" if num_devices else "no accelerator"
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    events.warn(
        f"num_gpus={num_ranks}, and this machine has {found}: {num_ranks} ranks share its "
        f"{num_cores} CPU cores, {threads} each."
    )
    return num_threads


def _await(others: Others, store: Store, num_ranks: int) -> None:
    """Until every rank has run what comes before `init`."""
    missing = list(range(1, num_ranks))
    started = time.monotonic()
    is_told = False
    while missing:
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        others.refuse_the_ended(missing)
        waited = time.monotonic() - started
        if missing and waited > TELL_AFTER_SECONDS and not is_told:
            is_told = True
            ranks = ", ".join(map(str, missing))
            events.warn(f"waiting for ranks {ranks}, which run what comes before zeepo.init.")
        if waited > PATIENCE_SECONDS:
            raise RankError(f"ranks {missing} did not come to zeepo.init in {waited:.0f} s.")
        time.sleep(LOOK_SECONDS)


def _meet(store: Store, rank: int, num_ranks: int) -> None:
    global slices
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", store=PrefixStore("group", store), rank=rank, world_size=num_ranks
    )
    slices = Slices(rank, num_ranks, PrefixStore("slices", store))
    slices.install()


def _show_right_exception(others: Others, show: ExceptionHook) -> None:
    """Of the tracebacks of several ranks only the one that caused the others is shown."""
    process = os.getpid()

    def show_cause(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        global _has_failed
        if os.getpid() == process:
            _has_failed = True
            if isinstance(error, KeyboardInterrupt) and isinstance(error.__context__, RankError):
                error.__context__ = None  # the others were interrupted too
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends already, once is enough
            if isinstance(error, RankError) and (blamed := others.blame(BLAME_SECONDS)):
                _tell_blamed(*blamed)
                return
        show(kind, error, trace)

    sys.excepthook = show_cause


before_hard_end: Callable[[], None] | None = None
"""Cleans up for a program that may end without its finalizers."""
_others: Others | None = None
_process = os.getpid()
_has_failed = False
_is_interrupted = False


def _tell_blamed(rank: int, text: str) -> None:
    global _is_interrupted
    if text.splitlines()[-1].startswith("KeyboardInterrupt"):  # of all: the others saw it first
        _is_interrupted = True
        print("zeepo: interrupted; all ranks end.\nKeyboardInterrupt", file=sys.stderr, flush=True)
    else:
        print(f"zeepo: rank {rank} failed:\n{text}", file=sys.stderr, flush=True)


@atexit.register  # before the user's: what they do at the end is done when this is called
def _end_others() -> None:
    """At the end of the program: no rank outlives it, and one that failed is not lost."""
    if _others is None or os.getpid() != _process:
        return
    status, blamed = _others.end(BAD_END_SECONDS if _has_failed else GOOD_END_SECONDS)
    if (_has_failed or status) and before_hard_end is not None:
        before_hard_end()
    if _is_interrupted:
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(_process, signal.SIGINT)  # the status is that of any interrupted program
    if _has_failed and getattr(sys, "last_value", None) is None:
        status, blamed = 1, None  # failed only now, when the session was closed
    elif _has_failed:
        return
    if status:
        if blamed is not None:
            _tell_blamed(*blamed)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if status > 0 else 128 - status)


# -- in the others --------------------------------------------------------------------------------


def _join_first() -> None:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(
        HOST,
        int(os.environ["MASTER_PORT"]),
        num_ranks,
        is_master=False,
        timeout=timedelta(seconds=PATIENCE_SECONDS),
    )
    store.set(f"here/{rank}", "")
    _meet(store, rank, num_ranks)


def watch_first() -> None:
    """In a started rank: end when the first does, however it ends."""
    first = int(os.environ[FIRST_VARIABLE])
    process = os.getpid()
    report_exceptions()

    def watch() -> None:
        while os.getppid() == first:
            time.sleep(0.25)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGINT)  # so that it may clean up
        signal.alarm(2)  # the system's own: also when Python does not come to its end
        time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="zeepo-first-rank", daemon=True).start()


def _is_started_here() -> bool:
    """Whether this process is a rank that zeepo has started, and not a child of one."""
    return os.environ.get(FIRST_VARIABLE) == str(os.getppid())


if _is_started_here():
    watch_first()
