"""The process that forks the runs: it imports torch and zeepo once, and does nothing else.

Run as `python -m zeepo.verify.stage FD DIRECTORY`, FD being a socket on which jobs come, each with
the socket of its run. Forking is safe because nothing here starts a thread or computes anything.
When the command is gone, however it ended, so are its runs and its temporary directory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from typing import Any

import torch

from zeepo.verify.child import run_job
from zeepo.verify.job import Channel, Job

MOST_BYTES = 1 << 20
"""Of one message: a job, or a process to wait for."""


def warm_up() -> None:
    """The first optimizer makes torch import its compiler, which takes seconds: once is enough."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


def serve(control: socket.socket, running: set[int]) -> None:
    """Answer until the command closes its end; `running` are the processes not waited for."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, MOST_BYTES, 1)
        if not data:
            return
        message = json.loads(data)
        if descriptors:
            reply = _start(message, descriptors[0], control)
            running.add(reply["pid"])
        else:
            reply = _wait(message)
            running.discard(message["pid"])
        control.send(json.dumps(reply).encode())


def _start(message: dict[str, Any], descriptor: int, control: socket.socket) -> dict[str, int]:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        control.close()
        run_job(Job.from_json(message["job"]), Channel(socket.socket(fileno=descriptor)))
    os.close(descriptor)
    return {"pid": pid}


def _wait(message: dict[str, Any]) -> dict[str, int]:
    _, status = os.waitpid(message["pid"], 0)
    return {"status": os.waitstatus_to_exitcode(status)}


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    running: set[int] = set()
    warm_up()
    try:
        serve(control, running)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(sys.argv[2], ignore_errors=True)


if __name__ == "__main__":
    main()
