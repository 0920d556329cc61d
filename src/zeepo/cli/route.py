"""The way from this host to where the hosts meet: which of its addresses and interfaces lead there.

The name of a host often resolves to a loopback on itself, and then the others wait for it in vain.
The kernel's own choice of a source address does not depend on names.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from typing import Any

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 256
_ADDRESS_IN_REPLY = slice(20, 24)
_FAR_AWAY = "192.0.2.1"
"""An address that nobody has, reserved for examples: what leads there is the default route."""


@dataclass(frozen=True)
class Endpoint:
    """Where the hosts meet."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Route:
    """How this host reaches an endpoint."""

    address: str
    """Of this host, as the endpoint sees it."""
    interface: str
    """Which has that address; empty when it is a loopback or cannot be told."""
    is_here: bool
    """Whether the endpoint is on this host."""

    @property
    def is_loopback(self) -> bool:
        return _is_loopback(self.address)


def parse_endpoint(text: str) -> Endpoint:
    """Read HOST:PORT, or [ADDRESS]:PORT for IPv6."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"--rdzv-endpoint {text}: write an IPv6 address as [ADDRESS]:PORT")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"--rdzv-endpoint {text}: expected HOST:PORT, for example node0:29500")
    return Endpoint(host, int(port))


def route_to(endpoint: Endpoint) -> Route | None:
    """Ask the kernel; nothing is sent.

    None when the name has no address, or no way leads there: it may still appear, and torch waits.
    A name that is a loopback on its own host is reached by others through the default route.
    """
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)
        family, _, _, _, target = found[0]
        address = _source(family, target)
        if _is_loopback(address) and endpoint.host != "localhost" and endpoint.host != target[0]:
            address = _source(socket.AF_INET, (_FAR_AWAY, endpoint.port))
    except OSError:
        return None
    return Route(address, _interface_of(address), _is_ours(family, str(target[0])))


def _source(family: int, target: Any) -> str:
    """The address of ours that a packet to `target` would bear."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0]).partition("%")[0]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _is_ours(family: int, address: str) -> bool:
    """Only an address of this host can be bound."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _interface_of(address: str) -> str:
    """The name of the interface with this IPv4 address, or nothing."""
    if ":" in address or _is_loopback(address):
        return ""
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME_BYTES}s", name.encode())
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if reply[_ADDRESS_IN_REPLY] == wanted:
                return name
    return ""
