"""Addresses of coordinators and of this machine: read, shown, listened at.

An address is ``host:port``, by a name, IPv4 or IPv6.

Contract: every mistake in an address is a :class:`~lightning_recycle.errors.ConfigurationError` with address and
remedy. What may pass (a name that cannot be resolved yet, no route) is left to the side that connects.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from lightning_recycle.errors import ConfigurationError

log = logging.getLogger(__name__)

_ANY_IPV6 = "::"
_PAUSE_AFTER_ERROR = 0.1  # seconds


def machine_name(environ: Mapping[str, str] = os.environ) -> str:
    """Name of this machine; workers of one machine form one pipeline where possible."""
    return environ.get("RECYCLE_NODE") or socket.gethostname()


def address_from(text: str, name: str, *, least_port: int = 0, usual_host: str = "") -> tuple[str, int]:
    """(host, port) of ``host:port`` or ``[host]:port``, the latter for IPv6.

    ``usual_host``: that of a port alone. Raises ConfigurationError otherwise, with the setting ``name``.
    """
    host, colon, port = text.rpartition(":")
    is_number = port.isascii() and port.isdigit()
    given = f"{name[:-1]}={text!r})" if name.endswith(")") else f"{name}={text!r}"
    if usual_host and not colon and is_number:
        host = usual_host
    elif host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host and _is_name(host):
        host = ""
    elif ":" in host:
        raise ConfigurationError(f"{given}: put an IPv6 address into brackets, as in '[{host}]:{port}'.")
    if not host or not is_number or "/" in host:
        example = "'10.0.0.1:8265', or a port" if usual_host else "'10.0.0.1:29400'"
        raise ConfigurationError(f"{given}: give host:port, such as {example}.")
    if not least_port <= int(port) <= 65535:
        raise ConfigurationError(f"{given}: the port must be one of {least_port} to 65535.")
    return host, int(port)


def http_address(text: str, name: str) -> tuple[str, int]:
    """The address in ``text``: ``host:port``, or a port of the loopback interface.

    Raises ConfigurationError otherwise, with the setting ``name``.
    """
    return address_from(text, name, usual_host="127.0.0.1")


def http_address_from_environment() -> tuple[str, int] | None:
    """Address of page and metrics in ``RECYCLE_HTTP``; None without it.

    Raises ConfigurationError for other values.
    """
    wanted = os.environ.get("RECYCLE_HTTP")
    return http_address(wanted, "RECYCLE_HTTP") if wanted else None


def shown(address: tuple[str, int]) -> str:
    """``address`` as :func:`address_from` takes it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_at(address: tuple[str, int], backlog: int) -> socket.socket:
    """Socket that listens at ``address``; port 0: a free one; ``::``: also all IPv4.

    Raises ConfigurationError if that fails, or for a machine's name that stands for an address no other machine
    reaches.
    """
    host, port = address
    try:
        family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigurationError(
            f"A coordinator cannot listen at {shown(address)}: {host!r} cannot be resolved ({error.strerror}). Give an"
            " address of this machine, or 0.0.0.0 for all of them."
        ) from error
    numeric = str(resolved[0])
    if _is_name(host) and host != "localhost" and ipaddress.ip_address(numeric.partition("%")[0]).is_loopback:
        raise ConfigurationError(
            f"A coordinator at {shown(address)} could be reached from this machine only: {host!r} stands for {numeric}"
            " here, as /etc/hosts often says of a machine's own name. Give an address that other machines reach, or"
            f" 0.0.0.0 for all of them; if all workers are on this machine, {numeric}."
        )
    both = host == _ANY_IPV6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (numeric, port), family=socket.AddressFamily(family), backlog=backlog, dualstack_ipv6=both
        )
    except OSError as error:
        remedies = {
            errno.EADDRINUSE: "another process listens there, perhaps a coordinator that was started before: end it, or"
            " give another port",
            errno.EADDRNOTAVAIL: f"this machine has no address {numeric}: give one of its own, or 0.0.0.0",
            errno.EACCES: "ports below 1024 need privileges: give another one",
        }
        remedy = remedies.get(error.errno or 0, "give another address")
        reason = os.strerror(error.errno) if error.errno else error  # create_server adds the address to the error's
        raise ConfigurationError(f"A coordinator cannot listen at {shown(address)} ({reason}): {remedy}.") from error


def accept(listening: socket.socket, who: str) -> tuple[socket.socket, Any] | None:
    """The next connection at ``listening``, with its address.

    None if it has gone, or cannot be accepted, for example without free descriptors: then ``who`` is named in a
    warning, and a moment passes.
    """
    try:
        return listening.accept()
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EINVAL):  # it has gone again; or nobody listens any more
            return None
        log.warning("%s could not accept a connection: %s", who, error)
        time.sleep(_PAUSE_AFTER_ERROR)
        return None


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return True
    return False


def family_of(host: str) -> socket.AddressFamily:
    """The family of the address ``host``."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def free_port(host: str) -> int:
    """A free port of ``host``; OSError if this machine has no such address."""
    with socket.socket(family_of(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def own_address_towards(host: str) -> str:
    """This machine's address towards ``host``, found without sending; or OSError."""
    family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])
