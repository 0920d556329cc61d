"""The command's side of the runs: starting, following, questioning and ending them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from zeepo.verify.job import Batch, Channel, Item, Job
from zeepo.verify.stage import MOST_BYTES
from zeepo.verify.values import Value

SABOTAGE_VARIABLE = "ZEEPO_VERIFY_SABOTAGE"
"""Names a site of zeepo/sabotage.py to break in the runs under zeepo; for the tests."""

_LOG_TAIL_LINES = 20


@dataclass(frozen=True)
class Failure:
    """How a run ended that did not reach its end."""

    step: int
    summary: str
    text: str
    """The program's traceback, or the last lines it printed."""
    is_refusal: bool = False
    """zeepo said that it does not do this."""


class Stage:
    """The runs of one command, in one temporary directory that is removed at the end."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="zeepo-verify-"))
        self._numbers = itertools.count()
        self._runs: list[Run] = []
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # SEQPACKET keeps a job and its descriptor together. A session of its own keeps Ctrl-C here.
        environ = {**os.environ, "PYTHONHASHSEED": "0"}
        environ.pop(SABOTAGE_VARIABLE, None)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "zeepo.verify.stage",
                str(theirs.fileno()),
                str(self.directory),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environ,
        )
        theirs.close()

    def start(self, job: Job) -> Run:
        """Start a run; its log and its disk are in the temporary directory."""
        number = next(self._numbers)
        disk = self.directory / f"disk{number}"
        disk.mkdir()
        placed = replace(job, log=str(self.directory / f"log{number}"), disk=str(disk))
        ours, theirs = socket.socketpair()
        with theirs:
            message = json.dumps({"job": placed.to_json()}).encode()
            socket.send_fds(self._control, [message], [theirs.fileno()])
            pid = int(self._reply()["pid"])
        run = Run(self, placed, pid, Channel(ours))
        self._runs.append(run)
        return run

    def wait(self, pid: int) -> int:
        """The exit status of a run's process; negative for a signal."""
        self._control.send(json.dumps({"pid": pid}).encode())
        return int(self._reply()["status"])

    def _reply(self) -> dict[str, Any]:
        data = self._control.recv(MOST_BYTES)
        if not data:
            raise RuntimeError("the process that starts the runs ended: see its message above")
        reply: dict[str, Any] = json.loads(data)
        return reply

    def stop_runs(self) -> None:
        """End every run that still stands or runs."""
        for run in self._runs:
            run.stop()
        self._runs.clear()

    def new_path(self) -> Path:
        return self.directory / f"value{next(self._numbers)}"

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            self.stop_runs()
        self._control.close()
        self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


class Run:
    """One run of the program, followed batch by batch."""

    def __init__(self, stage: Stage, job: Job, pid: int, channel: Channel):
        self.job = job
        self.batches: list[Batch] = []
        self.failure: Failure | None = None
        self.plan = ""
        """Under zeepo: how the session was planned, in words."""
        self._stage = stage
        self._pid = pid
        self._channel = channel
        self._is_waiting = False
        """It is stopped after a batch until it is told to go on."""
        self._is_over = False

    def at(self, index: int) -> Batch | None:
        """The batch with this number, or None if the run ended before it."""
        while len(self.batches) <= index and not self._is_over:
            self.resume()
            self._read()
        return self.batches[index] if index < len(self.batches) else None

    def resume(self) -> None:
        """Let it go on to its next batch."""
        if self._is_waiting:
            self._is_waiting = False
            with contextlib.suppress(OSError):
                self._channel.send({"type": "go"})

    def _read(self) -> None:
        message = self._channel.receive()
        kind = "lost" if message is None else message["type"]
        if message is None:
            self._lost()
        elif kind == "batch":
            batch = Batch.from_message(message)
            self.batches.append(batch)
            self._is_waiting = self.job.observe_all or batch.is_final
        elif kind == "plan":
            self.plan = message["text"]
        elif kind == "error":
            text = message["traceback"]
            self.failure = Failure(message["step"], message["summary"], text, message["is_refusal"])
            self._reap()
        elif kind == "end":
            self._reap()

    def value(self, item_index: int) -> Value | None:
        """The bytes of one item of the last batch, if the run still stands there."""
        if not self._is_waiting:
            return None
        path = self._stage.new_path()
        self._channel.send({"type": "send", "item": item_index, "path": str(path)})
        if self._channel.receive() is None:
            self._lost()
            return None
        item: Item = self.batches[-1].items[item_index]
        try:
            return Value(item.kind, item.shape, path.read_bytes())
        except FileNotFoundError:
            return None
        finally:
            path.unlink(missing_ok=True)

    def stop(self) -> None:
        """End the run: at once if it waits (it then closes its session), else by a signal."""
        if self._is_over:
            return
        if self._is_waiting:
            with contextlib.suppress(OSError):
                self._channel.send({"type": "stop"})
        else:
            os.kill(self._pid, signal.SIGKILL)
        self._reap()

    def _lost(self) -> None:
        """The process is gone without a word."""
        status = self._reap()
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        step = self.batches[-1].step if self.batches else 1
        self.failure = Failure(step, f"the process died with {how}", self._log_tail())

    def _reap(self) -> int:
        self._is_over = True
        self._is_waiting = False
        self._channel.close()
        return self._stage.wait(self._pid)

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            lines = Path(self.job.log).read_text(errors="replace").splitlines()
            return "\n".join(lines[-_LOG_TAIL_LINES:])
        return ""
