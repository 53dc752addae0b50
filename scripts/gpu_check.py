"""Does all of this work on a machine with GPUs, and how fast? One page, gpu_check.md, in ten minutes by estimate.

    bash scripts/gpu_check.sh                            # installs what is missing, then everything below
    python scripts/gpu_check.py --only gradient "push"   # checks whose names begin so
    python scripts/gpu_check.py --device cpu             # the checks themselves, where there is no GPU

Checks run in processes of their own, alike ones in the same, and have time limits, so that none ends the others by a
crash, a hang or want of memory. One that fails ends its process, and the next begins a new one. Those beside a server
share it. What trains on several GPUs is started by torchrun.
What this machine lacks (a second GPU, vLLM) is skipped and named. Without errors the exit status is 0.

The last checks measure how fast the GPUs are. plan.py reads that from a file (--rates), and speaks of this machine.
The page names no user, host, token or home folder: send it as it is.
"""

# ruff: noqa: E402 - the command line is parsed before torch is imported, so that --help answers at once

import argparse
import sys
from pathlib import Path


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="checks whose names begin so")
    parser.add_argument("--page", type=Path, default=Path("gpu_check.md"))
    parser.add_argument("--rates", type=Path, help="where plan.py looks for them; unset, on GPUs: its own place")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies every time limit, for slow machines")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)  # answers, names
    return parser


PARSER = command_line()
if __name__ == "__main__":
    PARSER.parse_args()

import contextlib
import faulthandler
import functools
import json
import os
import re
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

import torch
from gpu_checks import CHECKS, CLOSE, RATES, SLOW, TINY, Machine, Skipped, Slower, asked
from live import Process, running

import utils
from safety import secrets

START = 120  # seconds until a process has imported everything


@dataclass
class Result:
    name: str
    verdict: str  # ok, failed, slower than planned, skipped
    said: str  # figures, or the cause
    seconds: float
    details: str = ""
    rates: dict[str, float] | None = None  # for plan.py


# ---- running them ----------------------------------------------------------------------------------------------------


def cause_of(error: BaseException) -> str:
    """One line for the table: a failed assertion says it itself."""
    text = str(error).strip().split("\n")[0]
    return text if isinstance(error, AssertionError) and text else f"{type(error).__name__}: {text}"


def work(names: list[str], machine: Machine, answers: Path) -> None:
    """In a process of its own: one check after the other, up to the first that fails."""
    torch.set_num_threads(1)
    utils.init_distributed(60)
    answers.write_text("{}\n", encoding="utf-8")
    for name in names:
        faulthandler.dump_traceback_later(0.95 * CHECKS[name].seconds * machine.patience)  # where it hangs
        begin, verdict, details = time.monotonic(), "ok", ""
        try:
            said = CHECKS[name].run(machine)
        except (Skipped, Slower) as other:
            verdict, said = "skipped" if isinstance(other, Skipped) else "slower than planned", str(other)
        except BaseException as error:  # whatever it is, it is the answer
            verdict, said, details = "failed", cause_of(error), traceback.format_exc()
        result = Result(name, verdict, said, time.monotonic() - begin, details, RATES)
        with open(answers, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        if verdict == "failed":  # what it leaves, such as a GPU in an error state, is not for the others
            break
    utils.end_process(0, lambda: [close() for close in CLOSE])


def run_together(names: list[str], machine: Machine) -> Iterator[Result]:
    """Results of checks that share a process; a new one for those behind a check that ended it."""
    while names:
        answers = Path(tempfile.mkdtemp(dir=machine.folder)) / "answers"
        answers.touch()
        command = [sys.executable, sys.argv[0], "--device", machine.device.type, "--patience", str(machine.patience)]
        env = machine.visible(machine.ids) or {"CUDA_VISIBLE_DEVICES": ""}
        process = Process([*command, "--work", str(answers), *names], answers.with_name("log"), **env)
        with running(process):
            cause = waited(process, answers, 1, START * machine.patience)  # the first line says that it has started
            for number, name in enumerate(list(names), 2):
                begin, names = time.monotonic(), names[1:]
                cause = cause or waited(process, answers, number, CHECKS[name].seconds * machine.patience)
                if cause:
                    yield Result(name, "failed", cause, time.monotonic() - begin, process.text[-6000:])
                    break
                result = Result(**json.loads(answers.read_text(encoding="utf-8").splitlines()[number - 1]))
                if result.verdict == "failed" or name == "machine":
                    result.details += f"\n{process.text[-4000:]}"
                yield result
                if result.verdict == "failed":
                    break
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.members[0].wait(40)  # it stops its server


def waited(process: Process, answers: Path, lines: int, limit: float) -> str:
    """Returns when the file has so many lines; then "", else why it has not."""
    deadline = time.monotonic() + limit
    while True:
        status = process.members[0].poll()
        if answers.read_text(encoding="utf-8").count("\n") >= lines:
            return ""
        if status is not None:
            return f"its process ended with status {status}; below, what it last said"
        if time.monotonic() > deadline:
            return f"not done in {limit:.0f} s; below, what it last said, and where it was"
        time.sleep(0.05)


def run_all(names: list[str], machine: Machine) -> Iterator[Result]:
    """Every check's result, in the order in which they end: those that share a process follow the first of them."""
    waiting = list(names)
    while waiting:
        first = CHECKS[waiting[0]]
        together = [n for n in waiting if n == waiting[0] or (first.shares and CHECKS[n].shares == first.shares)]
        waiting = [n for n in waiting if n not in together]
        lacking = [n for n in together if machine.gpu and CHECKS[n].gpus > len(machine.ids)]
        for name in lacking:
            yield Result(name, "skipped", f"wants {CHECKS[name].gpus} GPUs, here is {len(machine.ids)}", 0.0)
        yield from run_together([n for n in together if n not in lacking], machine)


# ---- the page --------------------------------------------------------------------------------------------------------

INTRODUCTION = """# GPU check

{machine}

Commit {commit}, {date}, `--device {device}`, {minutes:.0f} minutes: **{counts}**.

**ok**: it works, with the figures that were measured. **failed**: it does not; the cause is in the table, more is
[below](#what-failed). **slower than planned**: it works, and takes more than {slow:g} times what plan.py would say.
**skipped**: this machine cannot try it.

**Please send us this page**, also if everything is ok: as an issue called "GPU check, NAME OF THE GPU". It holds no
user, host, token or home folder; look it over all the same. For what failed, one thing helps most: the same check once
more, alone (`bash scripts/gpu_check.sh --only NAME`), and whether it fails again.

| check | what is tried | result | figures, or the cause | s |
|---|---|---|---|---|
"""


@functools.cache  # a name server may be asked
def private() -> dict[str, str]:
    """What must not stand on the page -> what stands there."""
    home = Path(os.path.expanduser("~"))
    names = {socket.getfqdn(), socket.gethostname(), socket.gethostname().split(".")[0]}
    users = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")} | {home.name}
    found = {str(ROOT): ".", str(home): "~", tempfile.gettempdir(): "/tmp"}
    found |= {name: "HOST" for name in names} | {name: "USER" for name in users - {"root"}}
    return {text: instead for text, instead in found.items() if len(text) > 1 and text != "localhost"}


def clean(text: str) -> str:
    """Text for the page: see `private`; secrets in the environment, other home folders and addresses go, too."""
    for name, value in os.environ.items():
        if secrets.NAME.search(name):
            secrets.learn(value)
    text = secrets.hide(text)
    for secret, instead in sorted(private().items(), key=lambda pair: -len(pair[0])):
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", instead, text)
    text = re.sub(r"(?<!\w)/(?:root(?!\w)|(?:home|Users)/[^/\s:'\"]+)", "~", text)
    return re.sub(r"\b(?!127\.0\.0\.1\b)\d{1,3}(?:\.\d{1,3}){3}\b(?=[:/\s])", "ADDRESS", text)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:500]


def page(results: list[Result], machine: Machine, begin: float, order: list[str]) -> str:
    results = sorted(results, key=lambda result: order.index(result.name))
    verdicts = [result.verdict for result in results]
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in dict.fromkeys(["ok", "failed", *verdicts]))
    about = next((result.said for result in results if result.name == "machine"), "")
    commit = asked("git", "log", "-1", "--format=%h") or "unknown"
    commit += " with changes" if asked("git", "status", "--porcelain", "--untracked-files=no") else ""
    lines = [INTRODUCTION.format(
        machine=about, commit=commit, date=time.strftime("%Y-%m-%d"), device=machine.device.type, counts=counts,
        minutes=(time.monotonic() - begin) / 60, slow=SLOW,
    )]  # fmt: skip
    for r in results:
        verdict = r.verdict if r.verdict in ("ok", "skipped") else f"**{r.verdict}**"
        said = cell(r.said)
        lines.append(f"| {r.name} | {cell(CHECKS[r.name].says)} | {verdict} | {said} | {r.seconds:.0f} |\n")
    if known := rates_of(results):
        words = " ".join(f"--{name} {value:g}" for name, value in known.items())
        lines.append(f"\n## Rates for plan.py\n\n`{words}`, measured. `--push_bandwidth` is not: a push of models as "
                     "small as these says little of a large one's.\n")  # fmt: skip
    topology = next(
        (r.details for r in results if r.name == "machine" and r.verdict == "ok" and "GPU0" in r.details), ""
    )
    if topology:
        table = topology[topology.index("GPU0") :]
        lines.append(f"\n## Connections (nvidia-smi topo -m)\n\n```\n{table.strip()}\n```\n")
    failed = [result for result in results if result.verdict == "failed"]
    lines += ["\n## What failed\n"] * bool(failed)
    for r in failed:
        lines.append(f"\n### {r.name}\n\nTried: {CHECKS[r.name].says}.\n\n```\n{r.details.replace('```', '')}\n```\n")
    return clean("".join(lines))


def rates_of(results: list[Result]) -> dict[str, float]:
    return {name: float(f"{rate:.4g}") for result in results for name, rate in (result.rates or {}).items()}


def hand_over(rates: dict[str, float], machine: Machine, to: Path | None) -> None:
    """The measured rates to `to`, or where plan.py looks for them."""
    import plan  # which imports the trainer

    to = to or plan.MEASURED
    about = torch.cuda.get_device_name() if machine.gpu else "CPUs"
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps({"measured on": about} | rates, indent=1), encoding="utf-8")
    print(f"rates: {to}, which plan.py reads")


def main() -> int:
    parser = PARSER
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here. --device cpu tries the checks themselves; nvidia-smi says what the "
                     "driver sees, and bash scripts/install.sh gpu installs torch for CUDA.")  # fmt: skip
    gpu = args.device == "cuda"
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = tuple(given.split(",") if given else map(str, range(torch.cuda.device_count()))) if gpu else ()
    how = SimpleNamespace(device=torch.device(*(("cuda", 0) if gpu else ("cpu",))), ids=ids, patience=args.patience)
    if args.work:
        answers = Path(args.work[0])
        work(args.work[1:], Machine(folder=answers.parent, **vars(how)), answers)
    for begin in args.only or ():
        if not any(name.startswith(begin) for name in CHECKS):
            parser.error(f"--only {begin}: no check begins so. There are: {', '.join(CHECKS)}")
    wanted = ("machine", *(args.only or [""]))
    names = [name for name in CHECKS if name.startswith(wanted)]
    if not TINY.is_dir():
        subprocess.run([sys.executable, "scripts/make_models.py", "tiny", str(TINY)], cwd=ROOT, check=True)
    begin, results = time.monotonic(), []
    machine = Machine(folder=Path(tempfile.mkdtemp(prefix="gpu_check_")), **vars(how))
    print(f"{len(names)} checks; what they say is in {machine.folder}", flush=True)
    for result in run_all(names, machine):
        print(f"{result.verdict:<8} {result.name}: {result.said} ({result.seconds:.0f} s)", flush=True)
        results.append(result)
        args.page.write_text(page(results, machine, begin, names), encoding="utf-8")  # also of a run that is stopped
    if (rates := rates_of(results)) and (args.rates or machine.gpu):
        hand_over(rates, machine, args.rates)
    print(f"{args.page}: please send it to us as an issue, as it is")
    return int(any(result.verdict == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
