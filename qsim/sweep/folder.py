"""The output folder of a sweep: writable, and one sweep at a time has it. Knows nothing of what is in it."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from qsim.errors import OutputError

LOCK = ".lock"


def prepare_folder(out: Path, *, taken: tuple[str, ...] = ()) -> Path:
    """Make the folder and prove that a file can be written there; ``taken``: names that may be no folders."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except FileExistsError as error:
        raise OutputError(f"{str(out)!r} is a file, not a folder; give another --out") from error
    except OSError as error:
        raise OutputError(
            f"the output folder {str(out)!r} cannot be written: {error.strerror}; give another --out"
        ) from error
    for name in taken:
        if (out / name).is_dir():
            raise OutputError(f"{str(out / name)!r} is a folder where a file has to go; move it, or give another --out")
    return out


class FolderLock:
    """A lock that the operating system takes back when its process ends, however it ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, folder: Path) -> FolderLock:
        """Lock a folder, or raise OutputError where another sweep has it."""
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise OutputError(
                f"{str(folder / LOCK)!r} cannot be opened: {error.strerror}; give another --out"
            ) from error
        try:
            _lock(descriptor)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() if hasattr(os, "pread") else ""
            os.close(descriptor)
            raise OutputError(
                f"another sweep{f' (process {holder})' if holder else ''} is writing to {str(folder)!r}; "
                "wait for it, look at it with `status`, or give another --out"
            ) from error
        with contextlib.suppress(OSError):  # the number is only for the message
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        return cls(descriptor)

    def release(self) -> None:
        """Let go; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _lock(descriptor: int) -> None:
    """BlockingIOError where another process has it; file systems without locks have none."""
    if sys.platform == "win32":
        import msvcrt

        try:
            os.lseek(descriptor, 1 << 16, os.SEEK_SET)  # a byte far behind the process number, which stays readable
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError from error
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass
