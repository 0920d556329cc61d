"""Two hosts made from network namespaces, with a cable between them that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType


def can_make_hosts() -> bool:
    """Whether this system lets us make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"zeepo{os.getpid()}t"
    is_made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if is_made:
        _ip("netns", "del", name)
    return is_made


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class TwoHosts:
    """A context manager; `hosts` is what a nursery wants to know of them."""

    INTERFACE = "cable"

    def __init__(self) -> None:
        self._names = [f"zeepo{os.getpid()}{letter}" for letter in "ab"]
        self.hosts = [{"namespace": name, "interface": self.INTERFACE} for name in self._names]

    def __enter__(self) -> TwoHosts:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def _make(self) -> None:
        for name in self._names:
            _ip("netns", "add", name)
        ends = [f"z{os.getpid()}{letter}" for letter in "ab"]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(self._names, ends, strict=True)):
            _ip("link", "set", end, "netns", name, "name", self.INTERFACE)
            _ip("-n", name, "addr", "add", f"10.213.7.{number + 1}/24", "dev", self.INTERFACE)
            _ip("-n", name, "link", "set", self.INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def cut(self) -> None:
        """Nothing passes the cable any more."""
        _ip("-n", self._names[0], "link", "set", self.INTERFACE, "down")

    def bytes_sent(self, number: int) -> int:
        """What a host has sent over the cable, by the interface's own counter."""
        shown = subprocess.run(
            ["ip", "netns", "exec", self._names[number], "cat", "/proc/net/dev"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        (line,) = [line for line in shown.splitlines() if line.strip().startswith(self.INTERFACE)]
        return int(line.split(":")[1].split()[8])

    def _remove(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()
