"""Does all of this work on a machine with GPUs, and how fast? One page, gpu_check.md, in ten minutes by estimate.

    bash scripts/gpu_check.sh                            # installs what is missing, then everything below
    python scripts/gpu_check.py --only gradient resume   # checks whose names begin so
    python scripts/gpu_check.py --device cpu             # the checks themselves, where there is no GPU

Checks run in processes of their own, alike ones in the same, and have time limits, so that none ends the others by a
crash, a hang or want of memory. What trains on several GPUs is started by torchrun.
What this machine lacks (a second GPU, vLLM) is skipped and named. Without errors the exit status is 0.
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
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies every time limit, for slow machines")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)  # answers, names
    return parser


PARSER = command_line()
if __name__ == "__main__":
    PARSER.parse_args()

import faulthandler
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

import torch
from gpu_checks import CHECKS, TINY, Machine, Skipped, asked, called

import utils

START = 120  # seconds until a process has imported everything
SCRIPT = __file__  # that processes run; a script with checks of its own puts itself here


@dataclass
class Result:
    name: str
    verdict: str  # ok, failed, skipped
    said: str  # figures, or the cause
    seconds: float
    details: str = ""


# ---- running them ----------------------------------------------------------------------------------------------------


def cause_of(error: BaseException) -> str:
    """One line for the table: a failed assertion says it itself."""
    text = str(error).strip().split("\n")[0]
    return text if isinstance(error, AssertionError) and text else f"{type(error).__name__}: {text}"


def work(names: list[str], machine: Machine, answers: Path) -> None:
    """In a process of its own: one check after the other, up to the first that fails. A check that hangs ends it."""
    torch.set_num_threads(1)
    utils.init_distributed(60)
    for name in names:
        faulthandler.dump_traceback_later(CHECKS[name].seconds * machine.patience, exit=True)
        begin, verdict, details = time.monotonic(), "ok", ""
        try:
            said = CHECKS[name].run(machine)
        except Skipped as lacking:
            verdict, said = "skipped", str(lacking)
        except BaseException as error:  # whatever it is, it is the answer
            verdict, said, details = "failed", cause_of(error), traceback.format_exc()
        with open(answers, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(Result(name, verdict, said, time.monotonic() - begin, details))) + "\n")
        if verdict == "failed":  # what it leaves, such as a GPU in an error state, is not for the others
            break
    utils.end_process(0)


def run_group(names: list[str], machine: Machine, deadline: float) -> list[Result]:
    """Results of checks that share a process; a new one for those behind a check that ended it. deadline: of
    time.monotonic, at which what still runs is ended."""
    results: list[Result] = []
    while rest := names[len(results) :]:
        if (left := deadline - time.monotonic()) <= 0:
            return results + [Result(name, "skipped", "no time was left", 0.0) for name in rest]
        folder = Path(tempfile.mkdtemp(dir=machine.folder))
        answers, limit = folder / "answers", machine.patience * (START + sum(CHECKS[name].seconds for name in rest))
        words = ["--device", machine.device.type, "--patience", machine.patience, "--work", answers, *rest]
        env = {"CUDA_VISIBLE_DEVICES": ",".join(machine.ids), "TMPDIR": str(machine.folder)}
        status, log = called([sys.executable, SCRIPT, *words], folder / "log", min(limit, left), **env)
        found = answers.read_text(encoding="utf-8").splitlines() if answers.exists() else []
        for result in (Result(**json.loads(line)) for line in found):
            if result.verdict == "failed" or result.name == "machine":
                result.details += f"\n{log[-4000:]}"
            results.append(result)
        if len(found) < len(rest) and not (found and results[-1].verdict == "failed"):
            name = rest[len(found)]
            cause = f"not done in {CHECKS[name].seconds * machine.patience:.0f} s" if "Timeout (" in log else ""
            cause = cause or ("not done in time" if status is None else f"its process ended with status {status}")
            results.append(Result(name, "failed", f"{cause}; below, what it last said", 0.0, log[-6000:]))
    return results


def run_all(
    names: Iterable[str], machine: Machine, at_once: int = 1, seconds: float = float("inf")
) -> Iterator[Result]:
    """Every check's result, as they end; `at_once`: so many processes beside each other, for so many seconds."""
    deadline = time.monotonic() + seconds
    groups: dict[str, list[str]] = {}
    for name in names:
        if machine.gpu and CHECKS[name].gpus > len(machine.ids):
            yield Result(name, "skipped", f"wants {CHECKS[name].gpus} GPUs, here is {len(machine.ids)}", 0.0)
        else:
            groups.setdefault(CHECKS[name].group or name, []).append(name)
    with ThreadPoolExecutor(at_once) as pool:
        for done in as_completed([pool.submit(run_group, group, machine, deadline) for group in groups.values()]):
            yield from done.result()


def this_machine(device: str, patience: float) -> Machine:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = tuple(given.split(",") if given else map(str, range(torch.cuda.device_count()))) if device == "cuda" else ()
    folder = Path(tempfile.mkdtemp(prefix="gpu_check_"))
    return Machine(torch.device("cuda", 0) if device == "cuda" else torch.device("cpu"), ids, folder, patience)


# ---- the page --------------------------------------------------------------------------------------------------------

INTRODUCTION = """# GPU check

{machine}

Commit {commit}, {date}, `--device {device}`, {minutes:.0f} minutes: **{counts}**.

**ok**: it works, with the figures that were measured. **failed**: it does not; the cause is in the table, more is
below. **skipped**: this machine cannot try it.

**Please send us this page**, also if everything is ok: as an issue called "GPU check, NAME OF THE GPU". Paths and the
name of the host are left out; look it over all the same. For what failed, one thing helps most: the same check once
more, alone (`bash scripts/gpu_check.sh --only NAME`), and whether it fails again.

| check | what is tried | result | figures, or the cause | s |
|---|---|---|---|---|
"""


def clean(text: str) -> str:
    """Without what says whose machine it is."""
    for secret, instead in ((ROOT, "."), (Path.home(), "~"), (socket.gethostname(), "HOST")):
        text = text.replace(str(secret), instead)
    return text


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:500]


def page(results: list[Result], machine: Machine, begin: float) -> str:
    order = list(CHECKS)
    results = sorted(results, key=lambda result: order.index(result.name))
    verdicts = [result.verdict for result in results]
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in ("ok", "failed", "skipped"))
    about = next((result for result in results if result.name == "machine"), Result("", "", "", 0.0))
    commit = asked("git", "log", "-1", "--format=%h") or "unknown"
    commit += " with changes" if asked("git", "status", "--porcelain", "--untracked-files=no") else ""
    lines = [
        INTRODUCTION.format(
            machine=about.said,
            commit=commit,
            date=time.strftime("%Y-%m-%d"),
            device=machine.device.type,
            counts=counts,
            minutes=(time.monotonic() - begin) / 60,
        )
    ]
    for r in results:
        verdict = r.verdict if r.verdict in ("ok", "skipped") else f"**{r.verdict}**"
        lines.append(f"| {r.name} | {cell(CHECKS[r.name].says)} | {verdict} | {cell(r.said)} | {r.seconds:.0f} |\n")
    if "GPU0" in about.details:
        table = about.details[about.details.index("GPU0") :].strip()
        lines.append(f"\n## Connections (nvidia-smi topo -m)\n\n```\n{table}\n```\n")
    for r in results:
        if r.verdict == "failed":
            lines.append(f"\n## {r.name} failed\n\n```\n{r.details.replace('```', '')}\n```\n")
    return clean("".join(lines))


def main() -> int:
    parser = PARSER
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here. --device cpu tries the checks themselves; nvidia-smi says what the "
                     "driver sees, and bash scripts/install.sh gpu installs torch for CUDA.")  # fmt: skip
    machine = this_machine(args.device, args.patience)
    if args.work:
        work(args.work[1:], machine, Path(args.work[0]))
    for begin in args.only or ():
        if not any(name.startswith(begin) for name in CHECKS):
            parser.error(f"--only {begin}: no check begins so. There are: {', '.join(CHECKS)}")
    names = [name for name in CHECKS if name.startswith(("machine", *(args.only or [""])))]
    if not TINY.is_dir():
        subprocess.run([sys.executable, "scripts/make_models.py", "tiny", str(TINY)], cwd=ROOT, check=True)
    begin, results = time.monotonic(), []
    print(f"{len(names)} checks; what they say is in {machine.folder}", flush=True)
    for result in run_all(names, machine):
        print(f"{result.verdict:<8} {result.name}: {result.said} ({result.seconds:.0f} s)", flush=True)
        results.append(result)
        args.page.write_text(page(results, machine, begin), encoding="utf-8")  # also of a run that is stopped
    print(f"{args.page}: please send it to us as an issue, as it is")
    if not (failed := any(result.verdict == "failed" for result in results)):
        shutil.rmtree(machine.folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
