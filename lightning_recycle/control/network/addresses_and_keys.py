"""Where a run's coordinator listens, and the secret that its workers share.

An address is ``host:port``, by a name, IPv4 or IPv6.

Contract: every mistake is a :class:`~lightning_recycle.errors.ConfigurationError` with the remedy: the address is
named, a key never. What may pass (a name that cannot be resolved yet, no route) is left to the side that connects.

``recycle-status`` finds this user's runs by Unix sockets in a folder of mode 0700: no port, no key, access by the file
system. A name begins with the process id. The next reader removes the socket that a killed process left. A folder that
is not this user's alone is neither used nor read.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_recycle.errors import ConfigurationError

log = logging.getLogger(__name__)

_ANY_IPV6 = "::"
_BACKLOG = 16
_CONNECT_SECONDS = 2.0
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
    """Address in ``RECYCLE_HTTP``, or None; ConfigurationError for any other value."""
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


KEY_BYTES = 16
"""The least that a key may have."""


def check_key(key: bytes, name: str) -> bytes:
    """``key`` of at least 16 bytes; else ConfigurationError with the setting ``name``."""
    if len(key) < KEY_BYTES:
        raise ConfigurationError(
            f"{name} has {len(key)} bytes, which can be guessed: give one of at least {KEY_BYTES}, for example"
            f' {name}="$(head -c 32 /dev/urandom | base64)".'
        )
    return key


_MOST_BYTES = 4096  # of a file with a key
_KEY, _KEY_FILE = "RECYCLE_KEY", "RECYCLE_KEY_FILE"


def key_from_environment(environ: Mapping[str, str] = os.environ, needed_by: str = "") -> bytes:
    """The secret of a run, from ``RECYCLE_KEY`` or else from the key file.

    ``needed_by``: a variable that is set, for the error.

    Raises ConfigurationError if neither variable is set, the key is shorter than 16 bytes, or others may read the file.
    """
    key, path = environ.get(_KEY, ""), environ.get(_KEY_FILE, "")
    if key and path:
        raise ConfigurationError(f"{_KEY} and {_KEY_FILE}={path} are both set: leave one out.")
    if key:
        return check_key(key.encode(), _KEY)
    if path:
        return check_key(_read(path), f"{_KEY_FILE}={path}")
    raise ConfigurationError(
        (f"{needed_by} is set, and " if needed_by else "")
        + "RECYCLE_KEY is not set: give the coordinator and all workers the same secret, for example"
        ' RECYCLE_KEY="$(head -c 32 /dev/urandom | base64)", or RECYCLE_KEY_FILE, a file with it.'
    )


def _read(path: str) -> bytes:
    """The key in the file at ``path``, stripped."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
                raise ConfigurationError(
                    f"{_KEY_FILE}={path}: others may read or write it (mode {stat.S_IMODE(status.st_mode):04o}), and"
                    f" anyone who knows the key can run code in the workers: chmod 600 {path}; for a secret that"
                    " Kubernetes mounts, defaultMode: 0400."
                )
            return file.read(_MOST_BYTES).strip()
    except OSError as error:
        raise ConfigurationError(f"{_KEY_FILE}={path} cannot be read: {error.strerror or error}.") from error


def _folders() -> Iterator[Path]:
    """Folders of runs, best first; environments of jobs and shells may differ."""
    user = os.geteuid()
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "lightning_recycle"
    yield Path(f"/run/user/{user}/lightning_recycle")
    yield Path(f"/tmp/lightning_recycle-{user}")  # not TMPDIR, which a job may have for itself


def _is_mine(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:  # there is none, or it cannot be reached
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _made(folder: Path) -> bool:
    with contextlib.suppress(OSError):  # it exists, or cannot be made: the next line looks
        folder.mkdir(mode=0o700)
    return _is_mine(folder)


@contextlib.contextmanager
def listen_here() -> Iterator[socket.socket]:
    """A socket where this user's runs are found; OSError if no such place can be used."""
    sockets()  # removes what killed processes left
    problem: OSError | None = None
    for folder in 2 * list(dict.fromkeys(_folders())):  # twice: a run that ends just now may remove its folder
        if not _made(folder):
            continue
        path = folder / f"{os.getpid()}-{secrets.token_hex(4)}.sock"
        listener = socket.socket(socket.AF_UNIX)
        try:
            # Under its name it always answers: who finds a socket that does not takes it for a dead one.
            hidden = path.with_suffix(".new")
            listener.bind(str(hidden))
            listener.listen(_BACKLOG)
            hidden.rename(path)
        except OSError as error:  # too long a path, for example
            listener.close()
            problem = error
            continue
        try:
            yield listener
        finally:
            listener.close()
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others are in it
                folder.rmdir()
        return
    raise problem or OSError(f"none of {', '.join(map(str, _folders()))} is a folder of this user alone")


def sockets() -> list[Path]:
    """Sockets of this user's runs, oldest first; removes those of dead processes."""
    live_sockets: dict[Path, float] = {}
    for folder in dict.fromkeys(_folders()):
        for path in folder.glob("*.sock") if _is_mine(folder) else ():
            try:
                began = path.stat().st_mtime
                connect_to(path).close()
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:  # it has just gone, or is too busy to be asked
                continue
            else:
                live_sockets[path] = began
    return sorted(live_sockets, key=lambda path: live_sockets[path])


def connect_to(path: Path) -> socket.socket:
    """A connection to the run at ``path``; raises OSError if it is gone."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_CONNECT_SECONDS)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection
