"""Files that are written whole or not at all, and a run that outlives a full disk.

What cannot be written now is kept and tried again, with a warning that names the file and what helps. It must be in its
file when a checkpoint is saved and when the run ends: otherwise that is an error, as a resumed run would not make it
again.
"""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from cli import NotNow

WARNED_EVERY = 60.0  # seconds between two warnings about the same file


def trouble(path: Path, error: OSError) -> str:
    """Why a file could not be written, and what helps."""
    why = error.strerror or str(error)
    try:
        why += f"; {shutil.disk_usage(path.parent).free / 2**20:.1f} MiB are free there"
    except OSError as other:
        why += f"; its folder cannot be reached: {other.strerror}"
    return f"{path} could not be written ({why}). Free some space, or raise the quota or limit on file sizes."


@contextlib.contextmanager
def at_start(folder: Path) -> Iterator[None]:
    """Before anything is sampled, a file that cannot be written ends the run."""
    try:
        yield
    except OSError as error:
        path = Path(error.filename) if isinstance(error.filename, str) else folder
        raise NotNow(f"{trouble(path, error)} Or give an --output_dir on another disk.") from None


class Warnings:
    """Warnings that are said once a minute, on stderr."""

    def __init__(self):
        self.said: dict[str, float] = {}

    def say(self, about: str, text: str) -> None:
        now = time.monotonic()
        if now - self.said.get(about, -WARNED_EVERY) < WARNED_EVERY:
            return
        self.said[about] = now
        with contextlib.suppress(OSError):  # stderr may be a file on that disk
            print(f"Warning: {text}", file=sys.stderr, flush=True)


class Lines:
    """A file that grows by whole lines. Those that do not fit wait, and come before the next."""

    def __init__(self, path: Path):
        self.path, self.waiting, self.torn = path, [], None  # torn: where half a line begins, that has to go
        self.file = open(path, "ab", buffering=0)

    def add(self, line: str) -> OSError | None:
        """The error if the line, or one before it, is not in the file yet."""
        self.waiting.append(line.encode() + b"\n")
        return self.retry()

    def retry(self) -> OSError | None:
        try:
            self._whole()
            while self.waiting:
                self.torn, left = os.fstat(self.file.fileno()).st_size, memoryview(self.waiting[0])
                while left:
                    left = left[self.file.write(left) :]
                self.torn = None
                self.waiting.pop(0)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._whole()
            return error
        return None

    def _whole(self) -> None:
        """Take away the half of a line that fitted: what follows it could not be read."""
        if self.torn is not None:
            self.file.truncate(self.torn)
            self.torn = None


def write_whole(path: Path, text: str | Iterable[bytes]) -> None:
    """Replace a file by one step. Raises OSError; the old one is still there then, and nothing half written."""
    partial = path.with_name(f"{path.name}.partial")
    parts = [text.encode("utf-8", "backslashreplace")] if isinstance(text, str) else text
    try:
        with open(partial, "wb") as file:
            file.writelines(parts)
        os.replace(partial, path)
    except OSError:
        remove(partial)
        raise


def write_over(path: Path, text: str) -> None:
    """Replace what a small file says without room for another one: in the block that it has. Raises OSError."""
    with open(path, "r+b", buffering=0) as file:
        data = text.encode("utf-8", "backslashreplace")
        file.write(data.ljust(os.fstat(file.fileno()).st_size))  # JSON may end with spaces
        file.truncate(len(data))


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
