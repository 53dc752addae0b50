"""What a fault is given: folders of its own, the real scripts as processes, and how their endings are judged.

A fault is a public function of an area_*.py file, `def name(at, limit=60)`: `at` is a Case, `limit` its seconds. Its
docstring reads "what is done -> what is wanted", and what is wanted begins with the verdicts that are right, such as
"survived", "named" or "survived or named: ...". A second argument `server` asks for the shared vLLM server, `doomed`
for one that it may kill. It returns a Seen: from goes_on, named or either for a run that has ended, or its own.

Modules of ours, and heavy ones, are imported within the faults: `--list` needs none of them.
"""

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import live
import psutil
import requests
from live import ROOT, SMALL, Process

from config import TrainConfig

HERE = Path(__file__).parent
BASE = "--reward_funcs length --max_steps 2 "
SCRIPTED = "--max_completion_length 3000 --max_prompt_length 1200 --prompts_per_step 1 --num_generations 2 "
SCRIPTED += "--max_steps 1 --logprob_diff_limit 1e9 --tool_timeout 5 "
MARKER = "canary"  # every secret of the campaign begins with it


@dataclass
class Seen:
    verdict: str  # survived, named, hung, silent, leaked; ended: where it had to go on, or without cause and remedy
    what: str = ""


@dataclass
class Ended:
    """A process that has ended, or was ended at its limit: then `status` is None."""

    status: int | None
    text: str
    seconds: float = 0.0
    run: Path = Path()  # the run's folder

    @property
    def tail(self) -> str:
        """What it said last, in a line."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        causes = [line for line in lines if re.match(r"(\[rank \d+\] )?[\w.]*(Error|Exception|error)\b.*:", line)]
        return shorten((causes or lines or ["nothing"])[-1])

    @property
    def steps(self) -> list[dict]:
        path = self.run / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
        return [line for line in lines if "reward" in line]

    def mean(self, key: str) -> float:
        return sum(step.get(key) or 0 for step in self.steps) / max(len(self.steps), 1)


def shorten(text: str, limit: int = 160) -> str:
    text = " ".join(str(text).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


# ---- verdicts -------------------------------------------------------------------------------------------------------


def goes_on(end: Ended, wrong: str | None = None, steps: int | None = None) -> Seen:
    """The run had to go on to its end, with the right result; `wrong`: what is wrong with it, if anything is."""
    if end.status is None:
        return Seen("hung", f"still running after {end.seconds:.0f} s: {end.tail}")
    if end.status:
        return Seen("ended", f"status {end.status}: {end.tail}")
    if steps is not None and len(end.steps) != steps:
        wrong = f"{len(end.steps)} of {steps} steps in metrics.jsonl"
    return Seen("silent", wrong) if wrong else Seen("survived", f"status 0, {len(end.steps)} steps")


def named(end: Ended, cause: str, remedy: str = "") -> Seen:
    """It had to end, with a message in which the patterns of cause and remedy are found."""
    text = message_of(end.text)
    if end.status is None:
        return Seen("hung", f"still running after {end.seconds:.0f} s: {end.tail}")
    if end.status == 0:
        return Seen("silent", "status 0, nothing said" if not says(text, cause) else f"said, status 0: {end.tail}")
    missing = [what for what, words in (("cause", cause), ("remedy", remedy)) if words and not says(text, words)]
    if missing:
        return Seen("ended", f"status {end.status} without {' and '.join(missing)}: {end.tail}")
    return Seen("named", f"status {end.status}: {end.tail}")


def message_of(text: str) -> str:
    """The end of an output without the frames of tracebacks: their file names and code explain nothing to a user."""
    lines = [line for line in text.splitlines() if not re.match(r'\s*File "|Traceback|    |\s*[\^~]+$', line)]
    return "\n".join(lines)[-3000:]


def either(end: Ended, cause: str, remedy: str = "", wrong: str | None = None) -> Seen:
    """Going on with the right result and ending with cause and remedy are both right."""
    return goes_on(end, wrong) if end.status == 0 else named(end, cause, remedy)


def lives(at: "Case", what: str = "refused") -> Seen:
    """The verdict of a fault that the shared server had to take without harm."""
    wrong = at.generates()
    return Seen("ended", wrong) if wrong else Seen("survived", what)


def says(text: str, pattern: str) -> bool:
    return re.search(pattern, text, re.IGNORECASE | re.DOTALL) is not None


def wait_until(condition: Callable[[], object], limit: float):
    """The first true value of `condition`, or its last one after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def option_known(name: str) -> bool:
    return name in {f.name for f in fields(TrainConfig)}


# ---- the case -------------------------------------------------------------------------------------------------------


class Case:
    """One fault under way."""

    def __init__(self, folder: Path, limit: float, server=None, patience: float = 1.0):
        self.folder, self.server, self.patience = folder, server, patience
        self.given, self.runs, self.temp, self.logs = (folder / n for n in ("given", "runs", "temp", "logs"))
        for path in (self.given, self.runs, self.temp, self.logs):
            path.mkdir()
        self.deadline = time.monotonic() + limit * patience
        self.started: list[Process] = []
        self.stack = contextlib.ExitStack()  # what the fault itself opened, and closes when it ends

    @property
    def remaining(self) -> float:
        """Seconds in which a process has to end, so that there is time to say that it did not."""
        return max(self.deadline - time.monotonic() - 3, 1)

    def file(self, name: str, content: str | bytes) -> Path:
        """An input of the fault. What lies there is not searched for secrets."""
        path = self.given / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content) if isinstance(content, bytes) else path.write_text(content, encoding="utf-8")
        return path

    def rows(self, rows: list[dict], name: str = "rows.jsonl") -> str:
        return "--dataset_id " + str(self.file(name, "".join(json.dumps(row) + "\n" for row in rows)))

    def known(self, flags: str) -> str:
        """Those of `--name value ...` that this version of the scripts has."""
        parts = re.findall(r"--(\w+)((?: (?!--)\S+)*)", flags)
        return " ".join(f"--{name}{value}" for name, value in parts if option_known(name)) + " "

    # ---- processes ----

    def start(self, flags: str, script: str = "train_grpo.py", ranks: int = 1, first=(), run="run", **env) -> Process:
        """A train script, started as a fork that has imported what it needs; `ranks` of them, as torchrun does it."""
        flags = f"{SMALL} {BASE}--output_dir {self.runs} --run_name {run} {flags}"
        command = [script, *first, *flags.split()]
        return self._keep(Process(command, self._log(), ranks, **env))

    def command(self, *command: str, **env: str) -> Process:
        """Any command, in the repository's root."""
        return self._keep(Process([str(part) for part in command], self._log(), **env))

    def _log(self) -> Path:
        return self.logs / f"{len(self.started)}.log"

    def _keep(self, process: Process) -> Process:
        self.started.append(process)
        return process

    def ended(self, process: Process, limit: float | None = None, run: str = "run") -> Ended:
        """Wait for its end, at most `limit` seconds, then end it."""
        start, limit = time.monotonic(), min((limit or self.remaining) * self.patience, self.remaining)
        over = wait_until(lambda: all(member.poll() is not None for member in process.members), limit)
        seconds = time.monotonic() - start
        status = max(abs(member.poll()) for member in process.members) if over else None
        if not over:
            process.kill()
        elif any(member.poll() < 0 for member in process.members):  # the watchdog says so half a second later
            wait_until(lambda: "ended without a word" in process.text, 2)
        return Ended(status, process.text, seconds, self.runs / run)

    def train(self, flags: str, limit: float | None = None, run: str = "run", **how) -> Ended:
        name = (["run"] + re.findall(r"--run_name (\S+)", f"--run_name {run} {flags}"))[-1]
        return self.ended(self.start(flags, run=run, **how), limit, name)

    def scripted(self, turns: list[str], flags: str, **how) -> Ended:
        """A run of one step whose model says these turns, the last one again and again."""
        path = self.file("turns.json", json.dumps(turns))
        return self.train(SCRIPTED + flags, script="tests/faults/scripted.py", first=(str(path),), **how)

    def python(self, code: str, limit: float | None = None, **env: str) -> Ended:
        """A python program of the fault's own, which imports the project's modules."""
        path = self.file(f"program_{len(self.started)}.py", f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}")
        return self.ended(self.command(sys.executable, path, **env), limit)

    def reached(self, process: Process, words: str, limit: float = 60) -> bool:
        """Whether the process said `words` before it ended."""
        over = lambda: re.search(words, process.text) or any(m.poll() is not None for m in process.members)  # noqa: E731
        wait_until(over, min(limit * self.patience, self.remaining))
        return re.search(words, process.text) is not None

    # ---- the shared server ----

    def request(self, method: str, path: str, timeout: float = 20, **more):
        headers = {"Authorization": f"Bearer {self.server.token}"} | more.pop("headers", {})
        return requests.request(method, self.server.url + path, headers=headers, timeout=timeout, **more)

    def generates(self) -> str | None:
        """None if the server still answers a request as it should, else what is wrong."""
        try:
            body = {"prompt_ids": [5, 6, 7], "max_tokens": 4, "min_tokens": 4}
            answer = self.request("POST", "/generate", json=body)
        except requests.RequestException as error:
            return f"the server no longer answers: {shorten(error, 80)}"
        if answer.status_code != 200 or len(answer.json()["samples"][0]["token_ids"]) != 4:
            return f"the server answers {answer.status_code}: {shorten(answer.text, 120)}"
        return None

    def family(self) -> list[psutil.Process]:
        """The server's processes, the HTTP process first."""
        parent = psutil.Process(self.server.process.pid)
        return [parent, *parent.children(recursive=True)]

    def served(self, flags: str = "", **how) -> Process:
        """A trainer on the shared server."""
        return self.start(f"--generator vllm --server_urls {self.server.url} {flags}", **how)

    # ---- the end ----

    def close(self) -> None:
        """End what still runs; of runs that have ended, what they left is left: `leftovers` finds it."""
        for process in self.started:
            if any(member.poll() is None for member in process.members):
                process.kill()
        with contextlib.suppress(OSError):
            self.stack.close()


def leftovers(grace: float = 5.0) -> list[str]:
    """Command lines of processes that this process's children left behind, which are then ended."""
    me = psutil.Process()
    wait_until(lambda: not [p for p in me.children(recursive=True) if alive(p)], grace)
    found = []
    for process in me.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if alive(process):
                found.append(shorten(" ".join(process.cmdline()) or process.name(), 80))
                process.kill()
    return found


# Not ours: torchrun's folder of logs stays when it is killed; libraries' caches are meant to stay.
KEPT = re.compile(r"torchelastic_|tmp\w+wandb-|torchinductor_|pymp-|pip-|matplotlib|\.ipcs?$|tmp\w+\.lock")


def forgotten_files(temp: Path) -> list[str]:
    return sorted(path.name for path in temp.iterdir() if not KEPT.match(path.name))


def secrets_in(folders: list[Path], secrets: list[str]) -> list[str]:
    """Files in which one of the secrets can be read."""
    found = []
    for path in (p for folder in folders for p in folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 2**26:
            content = path.read_bytes()
            found += [path.name for secret in secrets if secret.encode() in content]
    return sorted(set(found))


def checked(at: Case, seen: Seen, secrets: list[str]) -> Seen:
    """What no fault may leave, whatever else was seen: processes, files in the temporary directory, secrets."""
    left = []
    if processes := leftovers():
        left.append(f"{len(processes)} processes left: {processes[0]}")
    if files := forgotten_files(at.temp):
        left.append(f"left in the temporary directory: {', '.join(files[:4])}")
    if places := secrets_in([at.runs, at.logs], secrets):
        left.append(f"a secret is in {', '.join(places[:4])}")
    return Seen("leaked", shorten("; ".join([*left, f"({seen.verdict}: {seen.what})"]), 240)) if left else seen


def output_of(*command: str, seconds: float = 30) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, encoding="utf-8").stdout


def mask(text: str, secrets: list[str]) -> str:
    return re.sub("|".join(map(re.escape, secrets)), "***", text)


assert live.ROOT == ROOT
