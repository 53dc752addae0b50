"""The fault campaign: what is broken on purpose, one fault after another, against real processes on this machine.

    python tests/faults                      # all of them, about 25 minutes on two cores
    python tests/faults --turn 3/10          # every tenth, from the third on; /10: the commit says which
    python tests/faults --list               # names, and what is wanted of each
    python tests/faults --area server --only 'freeze|kill'

Real train scripts, vLLM servers, ranks, MCP servers and model-written code. Each fault has a time limit and runs in a
process of its own, which notices what is left behind. The areas are the files area_*.py here; case.py says what a fault
looks like. Results are kept in results.json with date and commit: a fault that is not run again keeps its last result,
marked as old when the code has changed since. The table is written to docs/reliability.md. `--turn` is what the
tests run: it writes neither of the two, and a fault that was not as wanted is tried once more with nothing beside it.
"""

import argparse
import collections
import contextlib
import ctypes
import datetime
import functools
import importlib
import inspect
import json
import multiprocessing
import os
import re
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import requests

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT), str(ROOT / "scripts")]
import case  # noqa: E402
import forks  # noqa: E402
import server_fixture  # noqa: E402
from turns import git, turn  # noqa: E402

RESULTS, TABLE = HERE / "results.json", ROOT / "docs" / "reliability.md"
AREAS = sorted(path.stem.removeprefix("area_") for path in HERE.glob("area_*.py"))
VERDICTS = ["survived", "named", "hung", "silent", "leaked", "ended", "skipped", "broken"]
CLOSING = 20  # seconds after a fault's limit in which it can still say what it saw
SUBREAPER, DIE_WITH_PARENT = 36, 1  # prctl
INTRODUCTION = """# Reliability: the fault campaign

Written by `python tests/faults`; do not edit. Every fault is injected into real processes on one machine, with
a time limit of its own; what it leaves behind is looked for. Many in one run, and thousands of steps:
[endurance.md](endurance.md).

* **survived**: the run or server went on and ended with a right result.
* **named**: it ended in time with a non-zero status and a message that names cause and remedy.
* **hung**: it took longer than its limit.
* **silent**: status 0, or a wrong result, without a word.
* **leaked**: processes, files in the temporary directory, secrets in the output, memory beyond its bound, or effects
  outside the sandbox were left.
* **ended**: it ended where it had to go on, or without naming cause and remedy.
* **skipped**: this machine lacks what the fault needs; **broken**: the fault itself does not run.

One thing cannot be had: an async function that has begun, and waits while another one blocks their event loop, is late
with it. Those that had not begun are moved (docs/limits.md, which has all that is not limited).
"""


@dataclass
class Fault:
    name: str  # AREA.function
    call: object
    done: str
    wanted: str
    limit: float
    needs: str  # "", "server", "doomed" (a server that it may kill), "eyes" (one of a vision model), "adapted"

    @property
    def area(self) -> str:
        return self.name.partition(".")[0]

    def accepts(self, verdict: str) -> bool:
        return verdict in re.findall(r"\w+", self.wanted.partition(":")[0])


@dataclass
class Running:
    fault: Fault
    pid: int
    reader: int
    folder: Path
    limit: float  # seconds until it is ended
    start: float = field(default_factory=time.monotonic)
    received: bytes = b""


NEEDS = ("server", "doomed", "eyes", "adapted")


def find_faults() -> list[Fault]:
    found = []
    for area in AREAS:
        for name, call in vars(importlib.import_module(f"area_{area}")).items():
            if not inspect.isfunction(call) or name[0] == "_" or call.__module__ != f"area_{area}":
                continue
            parameters = inspect.signature(call).parameters
            if next(iter(parameters), None) != "at":
                continue
            done, _, wanted = " ".join((call.__doc__ or "").split()).partition(" -> ")
            limit = parameters["limit"].default if "limit" in parameters else 60
            needs = next((n for n in NEEDS if n in parameters), "")
            found.append(Fault(f"{area}.{name}", call, done, wanted, limit, needs))
    return found


# ---- one fault, in a process of its own ------------------------------------------------------------------------------


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def environment(folder: Path, server) -> dict[str, str]:
    """Secrets that must not be seen again, and a temporary directory in which nothing must be left."""
    names = ("VLLM_SERVER_TOKEN", "JUDGE_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "HF_TOKEN")
    values = {name: f"canary-{secrets.token_hex(8)}" for name in names}
    if server:
        values["VLLM_SERVER_TOKEN"] = server.token
    return values | {"TMPDIR": str(folder / "temp")}


def inside(fault: Fault, folder: Path, server, patience: float, writer: int) -> None:
    """In the fault's process: run it, look for what it left, report."""
    os.setsid()
    here = os.getpid()
    prctl(SUBREAPER, 1)  # whatever is orphaned becomes this process's child, and is found
    prctl(DIE_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and so in whatever is started here
    output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    forks.FORKS = multiprocessing.get_context("fork")
    variables = environment(folder, server)
    os.environ.update(variables)
    at = case.Case(folder, fault.limit, server, patience)
    tempfile.tempdir = str(at.temp)
    hidden = [value for name, value in variables.items() if name != "TMPDIR"]
    arguments = {"at": at} | ({fault.needs: server} if fault.needs else {})
    try:
        seen = fault.call(**arguments)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is this fault's result
        traceback.print_exc()
        seen = case.Seen("broken", f"{type(error).__name__}: {error}")
    if os.getpid() != here:
        os._exit(0)  # a fault forked, and its child came back: this process has reported, or will
    try:
        at.close()
        seen = case.checked(at, seen, hidden) if seen.verdict != "skipped" else seen
    except BaseException as error:  # noqa: BLE001
        traceback.print_exc()
        seen = case.Seen("broken", f"while it was closed: {type(error).__name__}: {error}")
    text = json.dumps([seen.verdict, case.shorten(case.mask(seen.what, hidden), 240)])
    os.write(writer, text.encode("utf-8", "backslashreplace"))
    os.close(writer)
    os._exit(0)


def start_fault(fault: Fault, base: Path, server, patience: float) -> Running:
    folder = Path(tempfile.mkdtemp(prefix=f"{fault.name}_", dir=base))
    folder.chmod(0o755)
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.close(reader)
            inside(fault, folder, server, patience, writer)
        finally:
            os._exit(1)
    os.close(writer)
    return Running(fault, pid, reader, folder, fault.limit * patience + CLOSING)


def families(running: list[Running]) -> set[int]:
    """The processes of faults under way, and all below them."""
    found = {run.pid for run in running}
    for run in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {child.pid for child in psutil.Process(run.pid).children(recursive=True)}
    return found


def finish(run: Running, kept: set[int]) -> tuple[str, str]:
    """(verdict, what was seen) of a fault that has reported, died or overrun; nothing of it is left running."""
    overrun = time.monotonic() - run.start > run.limit
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(run.pid, 0)
    # Orphans of the killed are this process's own children now. What others start meanwhile is below those in `kept`.
    for orphan in (process for process in psutil.Process().children() if process.pid not in kept):
        with contextlib.suppress(psutil.NoSuchProcess):
            if orphan.create_time() > time.time() - (time.monotonic() - run.start):
                for process in [orphan, *orphan.children(recursive=True)]:
                    process.kill()
    os.close(run.reader)
    if run.received:
        return tuple(json.loads(run.received))
    logs = sorted(run.folder.glob("logs/*"), key=lambda path: path.stat().st_mtime)
    said = (logs[-1] if logs else run.folder / "output").read_text(errors="replace", encoding="utf-8").split()[-30:]
    return ("hung" if overrun else "broken"), " ".join(said)[-200:]


# ---- the shared servers ----------------------------------------------------------------------------------------------


def tiny_vision_model(folder: Path) -> Path:
    import tiny_vlms  # with it transformers

    return tiny_vlms.make("idefics3", folder)


class SharedServer:
    """One vLLM server for all faults that need one, started again after one of them killed it."""

    def __init__(self, make_model, *flags: str):
        self.make_model, self.flags, self.live = make_model, flags, None

    def begin(self) -> None:
        if self.live is None or self.live.process.poll() is not None:
            flags = ["--dtype", "float32", "--max-model-len", "512", *self.flags]
            self.live = server_fixture.start_server(self.make_model(), *flags)

    def ready(self) -> bool:
        if self.live is None or self.live.process.poll() is not None:
            return False
        return "vllm_server: ready" in self.live.log.read_text(encoding="utf-8")

    def family(self) -> set[int]:
        if self.live is None or self.live.process.poll() is not None:
            return set()
        parent = psutil.Process(self.live.process.pid)
        return {parent.pid, *(child.pid for child in parent.children(recursive=True))}

    def check(self) -> str | None:
        """After a fault: let it go on if it was stopped; what is wrong with it, and then it is ended."""
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        body = {"prompt_ids": [5, 6, 7], "max_tokens": 2}
        try:
            answer = self.live.request("POST", "/generate", json=body)
            fault = None if answer.status_code == 200 else f"answered {answer.status_code}: {answer.text[:100]}"
        except requests.RequestException as error:
            fault = f"did not answer: {type(error).__name__}"
        if fault:
            self.stop()
        return fault

    def stop(self) -> None:
        if self.live is not None:
            self.live.stop()


class Servers:
    """The servers by what a fault needs: of models/tiny, (`adapted`) the same with adapters, (`eyes`) of a small vision
    model. One is up at a time."""

    def __init__(self, base: Path):
        text = SharedServer(server_fixture.make_tiny)
        vision = SharedServer(lambda: tiny_vision_model(base / "vlm"))
        lora = SharedServer(server_fixture.make_tiny, "--enable-lora", "--max-loras", "8")
        self.of = {"server": text, "doomed": text, "eyes": vision, "adapted": lora}

    def prepare(self, pending: list[Fault]) -> None:
        """Start what the next faults need, stop what none needs any more."""
        wanted = next((self.of[fault.needs] for fault in pending if fault.needs), None)
        for server in {*self.of.values()} - {wanted}:
            server.stop()
        if wanted:
            wanted.begin()

    def family(self) -> set[int]:
        return set().union(*(server.family() for server in self.of.values()))

    def after(self, fault: Fault, verdict: str, what: str) -> tuple[str, str]:
        """The verdict, worse if the server was not sound after a fault that must not kill it."""
        server = self.of[fault.needs]
        alive = server.live.process.poll() is None
        if fault.needs == "doomed":
            if alive:
                server.check()  # ends it if it is not sound
        elif verdict != "skipped" and (wrong := server.check() if alive else "had ended"):
            return "ended", f"the shared server {wrong} afterwards ({verdict}: {what})"
        return verdict, what


# ---- the campaign ----------------------------------------------------------------------------------------------------


def next_fault(pending: list[Fault], running: list[Running], servers: Servers) -> Fault | None:
    """The first that can start now: faults on a server go one at a time, and wait while it loads."""
    taken = any(run.fault.needs for run in running)
    if not taken:
        servers.prepare(pending)
    return next((f for f in pending if not f.needs or (not taken and servers.of[f.needs].ready())), None)


def campaign(faults: list[Fault], base: Path, jobs: int, patience: float, record) -> None:
    servers, pending, running = Servers(base), list(faults), []
    try:
        while pending or running:
            while len(running) < jobs and (fault := next_fault(pending, running, servers)):
                pending.remove(fault)
                live = servers.of[fault.needs].live if fault.needs else None
                running.append(start_fault(fault, base, live, patience))
            readable, _, _ = select.select([run.reader for run in running], [], [], 0.2)
            for run in list(running):
                if run.reader in readable and (more := os.read(run.reader, 65536)):
                    run.received += more
                    continue
                if run.reader in readable or time.monotonic() - run.start > run.limit:
                    running.remove(run)
                    verdict, what = finish(run, servers.family() | families(running))
                    if run.fault.needs:
                        verdict, what = servers.after(run.fault, verdict, what)
                    record(run, verdict, what)
    finally:
        for run in running:
            finish(run, set())
        for server in servers.of.values():
            server.stop()


def without_places(text: str) -> str:
    """Paths by their last part alone: where this machine keeps things is of no interest, and differs each time."""
    return re.sub(r"/(?:root|work|home|tmp|usr)/[^\s'\",:;)]*?([^\s/'\",:;)]+)(?=[\s'\",:;)]|$)", r".../\1", text)


def commit() -> str:
    """The commit that is tested, with a + if files other than this program's results have been changed."""
    changed = git("status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(ROOT)}", f":!{TABLE.relative_to(ROOT)}")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


@functools.cache
def outdated(version: str) -> bool:
    """Whether the code has changed since that commit: a python file of the scripts or of their rooms, or a pinned
    version. True as well of a commit with changes beside it (+), and of one that this repository does not have.

    Which code a fault runs is not asked: nearly each runs a whole train script.
    """
    if version.endswith("+") or not git("rev-parse", "--verify", "--quiet", f"{version}^{{commit}}"):
        return True
    others = [f":!{folder}" for folder in ("benchmarks", "tests", "docs", "examples", "scripts")]
    return bool(git("diff", "--name-only", version, "--", "*.py", "requirements*.txt", *others))


def turn_of(text: str, faults: list[Fault]) -> list[Fault]:
    """The faults of a turn (turns.py)."""
    try:
        part = turn(text)
    except ValueError as error:
        raise SystemExit(error) from None
    print(f"turn {part.start}/{part.step}", flush=True)
    return faults[part]


def counts(results: dict) -> str:
    found = collections.Counter(result["verdict"] for result in results.values())
    return ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS if found[verdict])


def cell(text: str) -> str:
    return re.sub(r"[\x00-\x1f]", " ", text).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def write_table(results: dict, known: list[Fault]) -> None:
    order = {fault.name: place for place, fault in enumerate(known)}
    wrong = sum(not result["ok"] for result in results.values())
    old = sum(outdated(result["commit"]) for result in results.values())
    lines = [
        INTRODUCTION,
        f"**{len(results)} faults: {counts(results)}.** {wrong} were not as wanted (marked **!**).\n",
        f"**{old} rows are older than the code** (marked *old*): since they were measured a python file has changed\n"
        "outside of tests, benchmarks, examples and scripts, or a pinned version.\n",
    ]
    commits = sorted({(r["date"], r["commit"]) for r in results.values()})
    lines.append(f"Measured {commits[0][0]} to {commits[-1][0]}, at {', '.join(sorted({c for _, c in commits}))}.\n")
    for area in AREAS:
        rows = sorted((r for r in results.items() if r[1]["area"] == area), key=lambda item: order.get(item[0], 0))
        if rows:
            lines += [f"## {area}\n", "| fault | expected | seen | s | verdict |", "|---|---|---|---:|---|"]
        for _, r in rows:
            verdict = r["verdict"] + " **!**" * (not r["ok"]) + " *old*" * outdated(r["commit"])
            cells = (r["fault"], r["expected"], r["seen"])
            lines.append("| " + " | ".join([*map(cell, cells), f"{r['seconds']:.1f}", verdict]) + " |")
        lines += [""] if rows else []
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(lines), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        "python tests/faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="PATTERN", help="faults whose name or description matches")
    parser.add_argument("--area", choices=AREAS, help="faults of one area")
    parser.add_argument("--turn", metavar="K/N", help="every N-th fault from the K-th on; /N: the commit says which")
    parser.add_argument("--table", action="store_true", help="only write the table anew, nothing is run")
    parser.add_argument("--list", action="store_true", help="names and what is wanted, nothing is run")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time; seconds are measured best with 1")
    parser.add_argument("--patience", type=float, default=1.0, help="limits times this, on a busy machine")
    parser.add_argument("--missing", action="store_true", help="only faults without a result")
    parser.add_argument("--wrong", action="store_true", help="only faults whose last result was not as wanted")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the faults")
    args = parser.parse_args()
    known = find_faults()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    results = {fault.name: results[fault.name] for fault in known if fault.name in results}
    chosen = [f for f in known if not args.area or f.area == args.area]
    chosen = [
        f for f in chosen if not args.only or any(re.search(args.only, t, re.IGNORECASE) for t in (f.name, f.done))
    ]
    chosen = [f for f in chosen if not args.missing or f.name not in results]
    chosen = [f for f in chosen if not args.wrong or not results.get(f.name, {"ok": True})["ok"]]
    chosen = turn_of(args.turn, chosen) if args.turn else chosen
    if args.table:
        write_table(results, known)
        return 0
    if args.list:
        for fault in chosen:
            print(f"{fault.name:<50} {fault.done} -> {fault.wanted}")
        print(f"{len(chosen)} faults")
        return 0
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported; its retries take a minute
    import preloaded  # noqa: F401 - torch and the scripts, once for all the forks
    import torch

    torch.set_num_threads(1)  # what a fork of a process with threads of torch computes waits for them, for good

    prctl(SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    base, start, version = Path(tempfile.mkdtemp(prefix="faults_")), time.monotonic(), commit()
    base.chmod(0o755)
    tempfile.tempdir = os.environ["TMPDIR"] = str(base)

    again: list[Fault] = []

    def record(run: Running, verdict: str, what: str) -> None:
        fault, seconds, what = run.fault, time.monotonic() - run.start, without_places(what)
        mark = " " if fault.accepts(verdict) else "!"
        print(f"{mark} {verdict:<9}{seconds:6.1f} s  {fault.name}: {what}", flush=True)
        if not args.keep:
            shutil.rmtree(run.folder, ignore_errors=True)
        if args.turn:
            again.extend([fault] * (mark == "!" and verdict != "skipped"))
            return
        today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")
        with contextlib.suppress(OSError, ValueError):  # another campaign, of another area, may write there, too
            results.update(json.loads(RESULTS.read_text(encoding="utf-8")))
        results[fault.name] = dict(area=fault.area, fault=fault.done, expected=fault.wanted, seen=what)
        results[fault.name] |= dict(seconds=round(seconds, 1), verdict=verdict, ok=fault.accepts(verdict))
        results[fault.name] |= dict(date=today, commit=version)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    try:
        campaign(chosen, base, args.jobs, args.patience, record)
        if again:
            chosen, again = again, []
            print(f"{len(chosen)} not as wanted; once more, one at a time:", flush=True)
            campaign(chosen, base, 1, args.patience, record)
    finally:
        if results and not args.turn:
            write_table(results, known)
        if not args.keep:
            shutil.rmtree(base, ignore_errors=True)
    if args.turn:
        names = ", ".join(fault.name for fault in again) or "none"
        print(f"{(time.monotonic() - start) / 60:.1f} minutes; not as wanted: {names}", flush=True)
        return 1 if again else 0
    ran = {fault.name: results[fault.name] for fault in chosen if fault.name in results}
    print(f"{len(ran)} faults in {(time.monotonic() - start) / 60:.1f} minutes: {counts(ran)}")
    wrong = [name for name, result in ran.items() if not result["ok"] and result["verdict"] != "skipped"]
    return 1 if wrong else 0
