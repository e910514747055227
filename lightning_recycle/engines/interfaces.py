"""Network addresses of this machine, by interface or network, and its free ports.

Concept: a machine with several networks has several addresses, and which of them reaches the other workers is the
user's knowledge: the name of an interface (``ib0``), or a network in CIDR notation (``10.1.0.0/16``), which is the same
on machines whose interfaces have other names.

Contract: asks the system (Linux); what is not there is a :class:`~lightning_recycle.errors.ConfigurationError` that
says what is.

Must not know: the use of an address.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from lightning_recycle.errors import ConfigurationError

__all__ = ["address_at", "addresses", "family_of", "free_port", "own_address_towards"]

_SIOCGIFCONF = 0x8912
_IFREQ = struct.Struct("16s16s8x") if struct.calcsize("P") == 8 else struct.Struct("16s16s")  # name, sockaddr
_MOST = 1024  # addresses
_IPV6 = Path("/proc/net/if_inet6")
_LINK_LOCAL = "20"  # scope of an address that needs the name of an interface to be reached


def addresses() -> list[tuple[str, str]]:
    """(interface, address) of each address of this machine that others may reach it at, IPv4 first."""
    found = []
    buffer = array.array("B", bytes(_MOST * _IFREQ.size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        asked = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        (used,) = struct.unpack_from("i", fcntl.ioctl(sock, _SIOCGIFCONF, asked))
    for name, where in _IFREQ.iter_unpack(buffer.tobytes()[:used]):
        found.append((name.rstrip(b"\0").decode(), socket.inet_ntoa(where[4:8])))
    with contextlib.suppress(OSError):  # no IPv6 here
        for line in _IPV6.read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != _LINK_LOCAL:
                found.append((name, str(ipaddress.IPv6Address(bytes.fromhex(digits)))))
    return found


def address_at(interface: str, setting: str) -> str:
    """The first address of the interface of that name, or in that network.

    Args:
        interface: "eth0", or a network such as "10.1.0.0/16" or "fd00::/8".
        setting: the variable that the user gave it in.

    Raises:
        ConfigurationError: if there is none.
    """
    known = addresses()
    if "/" in interface:
        try:
            network = ipaddress.ip_network(interface, strict=False)
        except ValueError as error:
            raise ConfigurationError(
                f"{setting}={interface!r}: {error}. Give a network such as 10.1.0.0/16, or the name of an interface."
            ) from error
        fitting = [address for _, address in known if ipaddress.ip_address(address) in network]
    else:
        fitting = [address for name, address in known if name.partition(":")[0] == interface]
    if not fitting:
        there = ", ".join(f"{name} {address}" for name, address in known)
        raise ConfigurationError(
            f"{setting}={interface!r}: this machine ({socket.gethostname()}) has no such address. It has: {there}."
        )
    return fitting[0]


def family_of(host: str) -> socket.AddressFamily:
    """The family of the address ``host``."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def free_port(host: str) -> int:
    """A free port of ``host``, an address of this machine.

    Raises:
        OSError: if this machine has no such address.
    """
    with socket.socket(family_of(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def own_address_towards(host: str) -> str:
    """The address of this machine from which it reaches ``host``; nothing is sent.

    Raises:
        OSError: if there is no way to ``host``.
    """
    family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])
