"""`-o FILE`: the answer appears there whole, or not at all.

Knows: a temporary file in the same directory and a rename. Does not know: what is written. A device or a pipe is
written to directly, for it cannot be replaced.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from specgen.errors import SpecgenError, UsageError


class OutFile:
    """Checked before work begins, written once at the end."""

    def __init__(self, path: str) -> None:
        self.name = path
        try:
            self._path = Path(os.path.realpath(path))  # a symbolic link stays one
            self._mode = self._path.stat().st_mode if self._path.exists() else None
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot write {path!r}: {error}") from error
        if not path or (self._mode is not None and stat.S_ISDIR(self._mode)):
            raise UsageError(f"cannot write {path!r}: it is a directory", hint="-o wants the name of a file")
        self._check_access()

    @property
    def _direct(self) -> bool:
        return self._mode is not None and not stat.S_ISREG(self._mode)

    def _check_access(self) -> None:
        folder = self._path.parent
        if not folder.is_dir():
            raise UsageError(f"cannot write {self.name}: there is no directory {folder}", hint="create it first")
        target = self._path if self._mode is not None else folder
        if not os.access(target, os.W_OK) or not (self._direct or os.access(folder, os.W_OK | os.X_OK)):
            raise UsageError(f"cannot write {self.name}: no permission", hint="choose another place with -o")

    def write(self, data: bytes) -> None:
        """Replace the file by `data`; whatever was there before survives a failure."""
        try:
            if self._direct:
                self._path.write_bytes(data)
            else:
                self._replace(data)
        except OSError as error:
            raise SpecgenError(
                f"cannot write {self.name}: {error.strerror}", hint="the answer was not saved"
            ) from error

    def _replace(self, data: bytes) -> None:
        handle, temporary = tempfile.mkstemp(prefix=f".{self._path.name[:100]}.", dir=self._path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                os.fchmod(file.fileno(), stat.S_IMODE(self._mode) if self._mode is not None else 0o666 & ~_umask())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except BaseException:
            os.unlink(temporary)
            raise


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
