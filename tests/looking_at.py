"""look.py as a process, for tests: started on a free port, ended with the block."""

import contextlib
import re
import shutil
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
    log: Path
    process: subprocess.Popen

    @property
    def address(self) -> str:
        return f"{self.root}/?token={self.token}"

    @property
    def port(self) -> int:
        return int(self.root.rpartition(":")[2])

    def ask(self, path: str, headers: dict | None = None, **parameters) -> requests.Response:
        """GET with the token; the path is sent as it stands, with its dots."""
        given = {"Authorization": f"Bearer {self.token}"} | (headers or {})
        request = requests.Request("GET", self.root, params=parameters, headers=given)
        made = request.prepare()
        query = made.url.partition("?")[2]
        made.url = self.root + path + (f"{'&' if '?' in path else '?'}{query}" if query else "")
        with requests.Session() as session:
            return session.send(made, timeout=30)


def checkout(folder: Path) -> Path:
    """A copy of the repository's code, for what writes into the folder that look.py is started in."""
    wanted = "algorithms envs inputs looking runlog safety scoring serving examples recipes scripts".split()
    others = {path.name for path in ROOT.iterdir() if path.suffix != ".py" and path.name not in wanted}
    shutil.copytree(ROOT, folder, ignore=lambda where, _: others if Path(where) == ROOT else {"__pycache__"})
    (folder / "models").symlink_to((ROOT / "models").resolve())
    (folder / "runs").mkdir()
    return folder


@contextlib.contextmanager
def looking(folder: Path, *flags: str, cwd: Path = ROOT) -> Iterator[Page]:
    """`python look.py FOLDER --port 0 FLAGS`."""
    log = Path(folder).resolve().parent / f"look-{time.monotonic_ns()}.log"
    scheme = "https" if "--ssl-certfile" in flags else "http"
    with open(log, "w", encoding="utf-8") as file:
        command = [sys.executable, "look.py", str(folder), "--port", "0", *flags]
        process = subprocess.Popen(command, cwd=cwd, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 60
        while not (found := re.search(scheme + r"://[^/]+:(\d+)/\?token=([\w-]+)", log.read_text(encoding="utf-8"))):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(encoding="utf-8")
            time.sleep(0.02)
        page = Page(Path(folder), f"{scheme}://127.0.0.1:{found[1]}", found[2], log, process)
        while time.monotonic() < deadline:  # the address is printed before the server answers
            with contextlib.suppress(requests.ConnectionError):
                requests.get(page.root, timeout=10, verify=False)  # noqa: S501
                break
        yield page
        assert "Traceback" not in log.read_text(encoding="utf-8"), log.read_text(encoding="utf-8")
    finally:
        process.terminate()
        process.wait(20)
