"""look.py as a process, for tests: started on a free port, ended with the block."""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import requests

ROOT = Path(__file__).parent.parent


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
    log = Path(folder).resolve().parent / "look.log"
    with open(log, "w", encoding="utf-8") as file:
        command = [sys.executable, "look.py", str(folder), "--port", "0"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"http://[^/]+:(\d+)/\?token=([\w-]+)", log.read_text(encoding="utf-8"))):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(encoding="utf-8")
            time.sleep(0.05)
        page = Page(Path(folder), f"http://127.0.0.1:{found[1]}", found[2])
        while time.monotonic() < deadline:  # the address is printed before the server answers
            with contextlib.suppress(requests.ConnectionError):
                requests.get(page.root, timeout=10)
                break
        yield page
        assert "Traceback" not in log.read_text(encoding="utf-8"), log.read_text(encoding="utf-8")
    finally:
        process.terminate()
        process.wait(20)
