"""Where workers' sockets are, and whose they are.

Sockets lie in a folder that only the user may enter, and both ends ask the system who is on the other side: a socket
that somebody else made is never spoken to. Knows: folders, owners, permissions. Does not know: messages.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import struct
import tempfile
from pathlib import Path

from specgen.errors import SpecgenError
from specgen.paths import ensure_dir, runtime_dir

MAX_PATH_BYTES = 100
"""A socket's path must fit into 108 bytes with its end (sockaddr_un)."""

SUFFIX = ".sock"
_NAME_BYTES = 24


class ForeignError(SpecgenError):
    """Something belongs to another user, or may be changed by one."""


def socket_folder() -> Path:
    """The private folder, made when it is missing. ForeignError, or SpecgenError when it cannot be made."""
    folder = runtime_dir()
    if len(os.fsencode(folder)) + _NAME_BYTES > MAX_PATH_BYTES:
        short = hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
        folder = Path(tempfile.gettempdir()) / f"specgen-{os.geteuid()}-{short}"
    ensure_dir(folder)
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid():
        raise ForeignError(f"{folder} is no folder of yours", hint="remove it, or set SPECGEN_RUNTIME to another one")
    if state.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def socket_path(order: str) -> Path:
    """The socket of the worker for an order (its digest)."""
    return socket_folder() / f"{order[:16]}{SUFFIX}"


def sockets() -> list[Path]:
    """Every socket there is, of living workers and of dead ones."""
    return sorted(path for path in socket_folder().glob(f"*{SUFFIX}") if path.is_socket())


def connect(path: Path, timeout_s: float) -> socket.socket | None:
    """A connection to the worker at `path`; None when nobody listens. ForeignError when it is not ours."""
    try:
        state = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISSOCK(state.st_mode):
        return None
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise ForeignError(f"{path} is not yours alone", hint="remove it")
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(timeout_s)
        link.connect(os.fspath(path))
        check_peer(link)
    except (ConnectionRefusedError, FileNotFoundError):
        link.close()
        return None
    except BaseException:
        link.close()
        raise
    return link


def check_peer(link: socket.socket) -> int:
    """The process at the other end. ForeignError when it is another user's."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0  # macOS: the folder's permissions are all there is
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid != os.geteuid():
        raise ForeignError(f"the process {pid} at the other end belongs to another user")
    return int(pid)


def listen(path: Path) -> socket.socket:
    """A listening socket at `path` that only its owner may use; a dead worker's is replaced.

    Call it with the order's lock held: then whoever made the old socket is gone.
    """
    path.unlink(missing_ok=True)
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        link.bind(os.fspath(path))
    finally:
        os.umask(before)
    link.listen(64)
    return link
