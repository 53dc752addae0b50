"""look.py as a process, for tests: started on a free port, ended with the block."""

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from live import Process, running


@dataclass
class Page:
    folder: Path
    root: str  # http://127.0.0.1:PORT
    token: str

    @property
    def address(self) -> str:
        return f"{self.root}/?token={self.token}"


@contextlib.contextmanager
def looking(folder: Path) -> Iterator[Page]:
    """`python look.py FOLDER --port 0`."""
    command = [sys.executable, "look.py", str(folder), "--port", "0"]
    with running(Process(command, Path(folder).resolve().parent / "look.log")) as process:
        found = process.until(lambda: re.search(r"http://[^/]+:(\d+)/\?token=([\w-]+)", process.text))
        page = Page(Path(folder), f"http://127.0.0.1:{found[1]}", found[2])
        process.answer(page.root)  # the address is printed before it does
        yield page
        assert "Traceback" not in process.text, process.text
