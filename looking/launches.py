"""Trainings that the page has started: processes of their own, which go on when the page, its terminal or browser is
gone. What was started stands in RUNS/.launched, so that the next page knows of it: NAME.launch (JSON) and NAME.log.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from cli import ConfigError
from safety.storable import text_of

KEPT = ".launched"
MOST_LOG = 200_000  # bytes of a log at a time
BOOT = Path("/proc/sys/kernel/random/boot_id")
SERVES = "scripts/serve_and_train.sh"


def born(pid: int) -> str | None:
    """When the process began, which tells it from a later one of that number; None if it has ended. On Linux in ticks
    since the boot, as the clock may be set meanwhile."""
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if not BOOT.is_file():
            return str(process.create_time())
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return f"{BOOT.read_text(encoding='ascii').strip()} {int(after_name[19])}"  # field 22 of `man proc_pid_stat`
    return None


class Launches:
    """folder: that scripts are started in; runs: that their run folders go to."""

    def __init__(self, folder: Path, runs: Path):
        self.folder, self.runs, self.lock = folder, runs, threading.Lock()
        self.started: dict[str, subprocess.Popen] = {}

    def all(self) -> list[dict]:
        """The newest first: {"name", "script", "command", "time", "alive", "status", "state", "can_resume", ...}."""
        found = []
        for path in (self.runs / KEPT).glob("*.launch"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if path.is_file():  # to open a FIFO waits for its writer
                    found.append(self._told(self._read(path.stem)))
        return sorted(found, key=lambda one: -one["time"])

    def _path(self, name: str, suffix: str) -> Path:
        if "/" in name or name in ("", ".", ".."):
            raise ConfigError(f"{name!r:.80} is no name of a run.")
        return self.runs / KEPT / f"{name}{suffix}"

    def _read(self, name: str) -> dict:
        return json.loads(self._path(name, ".launch").read_text(encoding="utf-8"))

    def _write(self, record: dict) -> None:
        path = self._path(record["name"], ".launch")
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1), encoding="utf-8")
        os.replace(partial, path)

    def get(self, name: str) -> dict:
        try:
            return self._read(name)
        except (OSError, ValueError):
            raise ConfigError(f"{name!r:.80} was not started from here.") from None

    def _told(self, record: dict) -> dict:
        name = record["name"]
        status = self._status(record)
        folder = Path(record["run_dir"]) / "checkpoints"
        state, step = self._state(record, status)
        return {
            **{key: record[key] for key in ("name", "script")},
            "time": round(record["time"]),  # a fraction would be cut to six digits
            "command": shlex.join(record["command"]),
            "run": os.path.relpath(record["run_dir"], self.runs),
            "alive": status is None,
            "status": status,
            "state": state,
            "step": step,
            "has_run": (Path(record["run_dir"]) / "state.json").is_file(),
            "why": self._last_line(name) if state == "failed" else "",
            "can_resume": status is not None and state != "finished" and folder.is_dir() and any(folder.iterdir()),
            "log": text_of(str(self._path(name, ".log"))),
            "settings": record.get("settings"),  # of the form; none of an older page's
        }

    def _last_line(self, name: str) -> str:
        lines = [line.strip() for line in self.log(name, 0)["text"].splitlines() if line.strip()]
        return text_of(lines[-1])[:500] if lines else ""

    def _state(self, record: dict, status: int | str | None) -> tuple[str, int]:
        """(running, stopping, finished, failed, interrupted or ended; steps done), as the run itself says it."""
        told = {}
        with contextlib.suppress(OSError, ValueError):
            file = Path(record["run_dir"], "state.json")
            told = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        told = told if isinstance(told, dict) and told.get("started", 0) >= record["time"] - 1 else {}
        step = told.get("step") if isinstance(told.get("step"), int) else 0
        if status is None:
            return "stopping" if record.get("stopping") else "running", step
        if told.get("state") in ("finished", "failed", "interrupted"):
            return told["state"], step
        return {0: "finished", "ended": "ended"}.get(status, "failed"), step

    def _status(self, record: dict) -> int | str | None:
        """None while it runs, else its exit status; "ended" where no page was there to see it."""
        with self.lock:
            process = self.started.get(record["name"])
            if process is not None and process.pid == record["pid"]:
                return process.poll()
        return None if record["born"] is not None and born(record["pid"]) == record["born"] else "ended"

    def start(self, script: str, told: dict) -> dict:
        """told: what bench.py's `check` says of settings without a fault."""
        flags, name, run_dir = told["flags"], told["run_name"], told["run_dir"]  # flags: the words of each
        if Path(run_dir).parent != self.runs:
            raise ConfigError(
                f"--output_dir: this page shows the runs in {self.runs}; start it as `python look.py "
                f"{Path(run_dir).parent} --prepare` for others."
            )
        python = [sys.executable]
        if told["serves"]:  # bash starts what stands in the environment
            if not (self.folder / SERVES).is_file() or self.runs != self.folder / "runs":
                raise ConfigError(f"{SERVES} starts a server for runs in {self.folder}/runs; look at these to use it.")
            own = ("--run_name", "--model_id", "--server_urls")
            rest = sum((words for words in flags if words[0].partition("=")[0] not in own), [])
            command = ["bash", SERVES, name, told["model_id"], str(told["window"]), script, *rest]
        else:
            several = [*python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={told['ranks']}"]
            command = [*(several if told["ranks"] > 1 else python), script, *sum(flags, [])]
        record = {"name": name, "script": script, "command": command, "run_dir": run_dir}
        record |= {"settings": {key: text for key, text in told["settings"].items() if key != "run_name"}}
        if Path(run_dir, "config.json").exists():
            raise ConfigError(f"--run_name={name}: there is a run of that name; give another, or resume it.")
        return self._run(record)

    def resume(self, name: str, scripts: list[str]) -> dict:
        record = self.get(name)
        if record["script"] not in scripts:
            raise ConfigError(f"{record['script']} is no train script in {self.folder} any more.")
        if "--resume" not in record["command"]:
            record["command"].append("--resume")
        return self._run(record)

    def _run(self, record: dict) -> dict:
        name = record["name"]
        (self.runs / KEPT).mkdir(parents=True, exist_ok=True)
        if self._path(name, ".launch").exists() and self._status(self.get(name)) is None:
            raise ConfigError(f"{name} runs already; stop it first.")
        try:
            with self.lock, open(self._path(name, ".log"), "ab") as log:
                how = dict(PYTHONUNBUFFERED="1", PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
                log.write(f"{time.strftime('%F %T')}  {shlex.join(record['command'])}\n".encode("utf-8", "replace"))
                log.flush()
                process = self.started[name] = subprocess.Popen(
                    record["command"],
                    **dict(cwd=self.folder, env=os.environ | how, start_new_session=True),
                    **dict(stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT),
                )
            record |= {"pid": process.pid, "born": born(process.pid), "time": time.time(), "stopping": False}
            self._write(record)
        except OSError as error:
            raise ConfigError(f"{name!r:.80} cannot be started: {error}") from None
        return self._told(record)

    def _signal(self, name: str, number: int) -> dict:
        record = self.get(name)
        if self._status(record) is not None:
            raise ConfigError(f"{name} does not run any more.")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(record["pid"], number)  # it leads a session, and so its process group
        return self._told(record)

    def stop(self, name: str) -> dict:
        """As Ctrl-C at its terminal: report and state are written."""
        self._signal(name, signal.SIGINT)
        self._write(record := self.get(name) | {"stopping": True})
        return self._told(record)

    def kill(self, name: str) -> dict:
        return self._signal(name, signal.SIGKILL)

    def log(self, name: str, start: int) -> dict:
        """{"text": what stands behind the first `start` bytes, at most MOST_LOG of its end, "end": bytes}."""
        try:
            with open(self._path(name, ".log"), "rb") as file:
                size = file.seek(0, os.SEEK_END)
                start = max(0 if start > size else start, size - MOST_LOG)
                file.seek(start)
                return {"text": file.read(size - start).decode("utf-8", "backslashreplace"), "from": start, "end": size}
        except OSError:
            return {"text": "", "from": 0, "end": 0}
