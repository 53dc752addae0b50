"""Live vLLM servers for tests: `server` (conftest.py) is shared by the whole session, `start_server` starts another.

The shared server holds whatever weights were pushed last: a test that compares log-probs pushes its own first.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "scripts"))
from forks import free_port  # noqa: E402
from orphans import ends_with_us  # noqa: E402

ROOT = Path(__file__).parent.parent
TINY = ROOT / "models" / "tiny"


@dataclass
class Server:
    url: str
    token: str
    model_dir: Path
    process: subprocess.Popen
    log: Path
    folder: tempfile.TemporaryDirectory  # of the log

    def request(self, method, path, token=None, **kwargs):
        """Any HTTP request with the right token, or with another one."""
        import requests

        headers = {"Authorization": f"Bearer {token or self.token}"} | kwargs.pop("headers", {})
        return requests.request(method, self.url + path, headers=headers, timeout=60, **kwargs)

    def wait(self, timeout=240):
        deadline = time.monotonic() + timeout
        while "vllm_server: ready" not in self.log.read_text(encoding="utf-8"):
            assert self.process.poll() is None, (
                f"the server ended while loading:\n{self.log.read_text(encoding='utf-8')[-4000:]}"
            )
            assert time.monotonic() < deadline, (
                f"not ready after {timeout} s:\n{self.log.read_text(encoding='utf-8')[-4000:]}"
            )
            time.sleep(0.2)
        return self

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.folder.cleanup()


def start_server(model_dir, *arguments, **env: str):
    """Start a server without waiting for it (`.wait()` does). env: on top of this process's environment."""
    port, token = free_port(), secrets.token_urlsafe(8)
    folder = tempfile.TemporaryDirectory(prefix="test_server_")
    log = Path(folder.name) / "log"
    command = [sys.executable, str(ROOT / "vllm_server.py"), "--model", str(model_dir), "--port", str(port)]
    command += ["--exit-with-parent"]
    # The engine computes in its own process, as on one GPU: a third process would import for 10 s of a core.
    command += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
    with open(log, "w", encoding="utf-8") as out:
        how = dict(stdout=out, stderr=out, preexec_fn=ends_with_us())
        process = subprocess.Popen([*command, *arguments], env=os.environ | {"VLLM_SERVER_TOKEN": token} | env, **how)
    return Server(f"http://127.0.0.1:{port}", token, Path(model_dir), process, log, folder)


def make_tiny():
    """models/tiny, made if it is not there (scripts/test.sh makes it beforehand)."""
    if not (TINY / "made_by.json").is_file():
        subprocess.run([sys.executable, str(ROOT / "scripts" / "make_models.py"), "tiny", str(TINY)], check=True)
    return TINY
