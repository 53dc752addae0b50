"""What grows over ten thousand steps: memory, descriptors, threads, processes, files, seconds.  No GPU.

    python benchmarks/soak.py process --folder soak             # 20 minutes; the page beside it is asked all the while
    python benchmarks/soak.py server --folder soak --hours 3    # beside a live server, with a push a step
    python benchmarks/soak.py async --folder soak               # train_async.py, turns with an environment and its tool
    python benchmarks/soak.py two --folder soak                 # two runs with adapters on one server
    python benchmarks/soak.py async --learning_rate 1e-12       # and further flags, for the trainers
    python benchmarks/soak.py --table soak                      # slopes of all that are there, and a --picture

The tiny random model learns a toy whose goal moves (which last digit of a token earns reward), so that there is signal
until the end. look.py runs beside it, and its page is asked every five seconds for what an open page asks for. Every
100 steps a line with what each process holds goes to FOLDER/NAME.jsonl: trainer (its watchdog and tools are its
children), server, its workers, look.py. A run that is cut off by --hours counts as far as it came.

The table: least squares through the second half for memory that is no file's, since the system takes back pages of
files whenever it likes; last minus first of the second half for what is counted; medians of the first and last tenth
for seconds. Memory that a process has may be free: malloc keeps what lies between pieces in use. So at each score the
first trainer tells what malloc has given out (mallinfo2) and how many objects Python has, and the least of 100 steps
counts: what is under way at that time differs from step to step. Seconds of a CPU (user and system) depend less on what
else runs, yet they do, and on what the policy has learned: completions of different lengths take more. So beside the
last fifth of `process` and `server` the same command runs once more, with a server of its own, from its first step but
with the weights and the entropy coefficient that were learned until then, and the two are compared over the same
minutes; the tenths are of what came before.
"""

import argparse
import contextlib
import ctypes
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import linear_regression, median

import psutil
import requests

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from config import TrainConfig  # noqa: E402
from envs import Environment  # noqa: E402
from envs.tools import Call, Toolbox, from_function  # noqa: E402
from runlog.reading import phases, read_metrics  # noqa: E402
from safety.orphans import ends_with_us  # noqa: E402

SEED, EVERY, PERIOD = 0, 100, 250
TASK = (
    "--compute_dtype float32 --dataset_id benchmarks/toy.py:rows --learning_rate 3e-4 "
    "--reward_funcs benchmarks/soak.py:digit --max_prompt_length 64 --prompts_per_step 4 --num_generations 4 "
    f"--save_steps 100 --eval_steps 100 --print_samples_every 100 --seed {SEED} --server_timeout 600 "
    "--entropy_target 5 --entropy_coef_step 0.002 "
)
SERVER = "--num-gpu-blocks-override 256"  # a KV cache that is touched everywhere soon: what grows then is no cache
SHORT = "--max_completion_length 8 "
CASES = {  # name -> (script, flags, server's flags or None without one, how many trainers)
    "process": ("train_grpo.py", SHORT + "--generator hf", None, 1),
    "server": ("train_grpo.py", SHORT, "", 1),
    "async": (
        "train_async.py",
        "--prompts_per_step 2 --max_completion_length 96 --max_turn_length 16 --env benchmarks/soak.py:Asks",
        "",
        1,
    ),
    "two": ("train_grpo.py", SHORT + "--use_peft --lora_r 4 --push_lora adapters", "--enable-lora --max-loras 4", 2),
}


# ---- the task -------------------------------------------------------------------------------------------------------


class Heap(ctypes.Structure):
    """glibc's struct mallinfo2, of which two fields are used here."""

    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c mapped d e in_use free keepcost".split()]


def given_out() -> float:
    """Megabytes in use of malloc, in all its arenas and mappings."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Heap
    heap = ask()
    return (heap.in_use + heap.mapped) / 1e6


def digit(completion_ids, trainer_state, log_metric, **_) -> list[float]:
    """Share of tokens whose number ends in the digit that counts, another one every PERIOD steps."""
    log_metric("heap/megabytes", given_out())
    log_metric("heap/thousand_objects", sys.getallocatedblocks() / 1e3)
    wanted = trainer_state.global_step // PERIOD % 10
    return [sum(token % 10 == wanted for token in ids) / max(len(ids), 1) for ids in completion_ids]


def letters(text: str) -> int:
    """Counts letters.

    Args:
        text: of which
    """
    return sum(letter.isalpha() for letter in text)


class Asks(Environment):
    """Three turns. A random model writes no calls, so the environment calls the tool with what it wrote."""

    box, turns = None, 3

    def reset(self, row, seed):
        tool = from_function(letters)
        Asks.box = Asks.box or Toolbox({tool.name: tool}, TrainConfig())
        self.left = self.turns
        return row["prompt"]

    async def step(self, text):
        self.left -= 1
        messages, events = await self.box.run([Call("letters", {"text": text})], self.box.tools)
        return f"{messages[0]['content']} letters.", 0.0, self.left == 0, {"calls": events}


class Long(Asks):
    """As many turns as the completion's length allows (long_completions.py)."""

    turns = 1000


# ---- what each process holds ----------------------------------------------------------------------------------------


def own_memory(pid: int) -> int:
    """Bytes that are no file's. The system takes back pages of files (RSS falls) whenever it likes."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(re.search(r"RssAnon:\s+(\d+)", text)[1]) * 1024


def held(pid: int) -> dict[str, float]:
    """Of one process. `all_rss` is its memory with that of all its descendants."""
    process = psutil.Process(pid)
    with process.oneshot():
        cpu = process.cpu_times()
        mine = {"rss": process.memory_info().rss, "fds": process.num_fds(), "threads": process.num_threads()}
        mine |= {"cpu": cpu.user + cpu.system, "anon": own_memory(pid)}
    children = process.children(recursive=True)
    others = 0
    for child in children:
        with contextlib.suppress(psutil.Error):
            others += child.memory_info().rss
    return mine | {"children": len(children), "all_rss": mine["rss"] + others}


def seconds_of(*pids: int) -> float:
    """CPU seconds of processes and of all their descendants that live."""
    total = 0.0
    for pid in pids:
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
    return total


def folder_size(folder: Path) -> dict[str, float]:
    sizes = {"files": 0, "bytes": 0}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a checkpoint of those that go
            sizes["bytes"] += path.stat().st_size
            sizes["files"] += 1
    return sizes


class Page:
    """What an open page asks for, and how long it waits for it."""

    def __init__(self, folder: Path):
        command = [sys.executable, str(ROOT / "look.py"), str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8", preexec_fn=ends_with_us())
        self.known = {}  # what it has of each, as a browser does
        self.base, self.token = re.search(r"(http://\S+)/\?token=(\S+)", self.process.stdout.readline()).groups()

    def ask(self, name: str) -> dict[str, float]:
        seconds = {}
        for kind in ("runs", "run", "steps", "notes", "compare"):
            begun = time.monotonic()
            query = {"run": name, "token": self.token}
            headers = {"If-None-Match": self.known[kind]} if self.known.get(kind) else {}
            try:
                answer = requests.get(f"{self.base}/api/{kind}", params=query, headers=headers, timeout=60)
            except requests.Timeout:  # on a machine that gives it no core; the table shows the 60 s
                answer = None
            if answer is not None:
                answer.raise_for_status()
                self.known[kind] = answer.headers.get("ETag", "")
            seconds[kind] = time.monotonic() - begun
        return seconds


def last_step(run: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((run / "state.json").read_text(encoding="utf-8"))["step"]
    return 0


def watch(name: str, folder: Path, trainers: list, server, page: Page, until: float, late: float, start_fresh) -> None:
    """A line every EVERY steps of the first trainer, until all have ended or the time is over. From step `late` on,
    start_fresh(flags) runs beside it, from what `run` has learned: it gives the processes of that run."""
    run, next_line, begun, asked, slowest = folder / f"{name}-0", EVERY, time.monotonic(), 0.0, {}
    fresh = []
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as out:
        while any(trainer.poll() is None for trainer in trainers) and time.monotonic() < until:
            time.sleep(0.2)
            if time.monotonic() - asked > 5 and (run / "metrics.jsonl").exists():
                asked, times = time.monotonic(), page.ask(run.name)
                slowest = {kind: max(seconds, slowest.get(kind, 0)) for kind, seconds in times.items()}
            if (step := last_step(run)) < next_line:
                continue
            pids = {f"trainer {number}" if number else "trainer": one.pid for number, one in enumerate(trainers)}
            pids |= {"look.py": page.process.pid}
            if server:
                pids["server"] = server.process.pid
                for child in psutil.Process(server.process.pid).children(recursive=True):
                    words = " ".join(child.cmdline())
                    pids["helper" if "tracker" in words else f"worker {child.name()[:20]}"] = child.pid
            line = {"step": step, "seconds": time.monotonic() - begun, "page": slowest, "folder": folder_size(run)}
            for role, pid in pids.items():
                with contextlib.suppress(psutil.Error):
                    line[role] = held(pid)
            if fresh and fresh[0].poll() is None:
                old = [trainers[0].pid] + ([server.process.pid] if server else [])
                new = seconds_of(*(process.pid for process in fresh))
                line["fresh"] = {"step": last_step(folder / f"{name}-fresh"), "cpu": new, "old": seconds_of(*old)}
            elif step >= late:
                fresh = fresh or start_fresh(*as_learned(run, folder / "learned"))
            out.write(json.dumps(line) + "\n")
            out.flush()
            slowest, next_line = {}, (step // EVERY + 1) * EVERY
    for process in fresh:
        process.terminate()
        process.wait(120)


def as_learned(run: Path, copy: Path) -> list[str]:
    """Flags for a run that begins with the weights of the run's last checkpoint, and with its entropy coefficient."""
    newest = max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    shutil.copytree(newest, copy, ignore=shutil.ignore_patterns("trainer"))  # the run removes its own
    coef = next(line["entropy_coef"] for line in reversed(read_metrics(run)) if "entropy_coef" in line)
    return ["--model_id", str(copy), "--entropy_coef", str(coef)]


def model_for(name: str, folder: Path) -> Path:
    """models/tiny; for turns a copy with a quarter of its tokens as ends, as a turn that is cut ends the game: of each
    last digit as many. In 10,000 steps the policy still learned to end fewer turns."""
    if name != "async":
        return ROOT / "models" / "tiny"
    copy = shutil.copytree(ROOT / "models" / "tiny", folder / "tiny_that_ends", dirs_exist_ok=True)
    ends = json.dumps({"eos_token_id": [token for token in range(4096) if token == 2 or token // 10 % 4 == 1]})
    (copy / "generation_config.json").write_text(ends, encoding="utf-8")
    return copy


def soak(name: str, folder: Path, steps: int, hours: float, further: list[str]) -> int:
    from server_fixture import start_server

    script, flags, serve, count = CASES[name]
    folder.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    server, trainers, status, model = None, [], 0, model_for(name, folder)

    def new_server():
        return start_server(model, "--dtype", "float32", "--max-model-len", "512", *SERVER.split(), *serve.split())

    if serve is not None:
        server = new_server()
    page = Page(folder)
    try:

        def start(which: str, at, *more: str) -> subprocess.Popen:
            command = [sys.executable, script, *(TASK + flags).split(), *further, "--max_steps", str(steps)]
            command += ["--output_dir", str(folder), "--run_name", f"{name}-{which}"]
            command += more or ["--model_id", str(model)]
            if at:
                command += ["--server_urls", at.wait(600).url]
            mine = env | ({"VLLM_SERVER_TOKEN": at.token} if at else {})
            with (folder / f"{name}-{which}.log").open("w", encoding="utf-8") as log:
                how = dict(cwd=ROOT, env=mine, stdout=log, stderr=log, preexec_fn=ends_with_us())
                return subprocess.Popen(command, **how)

        def start_fresh(*more: str) -> list[subprocess.Popen]:
            own = new_server() if server else None
            return [start("fresh", own, *more)] + ([own.process] if own else [])

        trainers += [start(str(number), server) for number in range(count)]
        late = steps - steps // 5 if name in ("process", "server") else math.inf
        watch(name, folder, trainers, server, page, time.monotonic() + 3600 * hours, late, start_fresh)
    finally:
        for process in trainers:
            if process.poll() is None:  # the time is over
                process.terminate()
            status |= abs(process.wait(120))
        page.process.terminate()
        if server:
            server.stop()
    print(f"{name}: {last_step(folder / f'{name}-0')} steps, status {status}")
    return status


# ---- the table ------------------------------------------------------------------------------------------------------


def roles(lines: list[dict]) -> list[str]:
    return [key for key in lines[-1] if key not in ("step", "seconds", "page", "folder", "fresh")]


def beside_a_fresh_one(lines: list[dict]) -> str:
    """CPU seconds a step of the run and of one that has just begun, over the same minutes; "" without one."""
    both = [line for line in lines if line.get("fresh", {}).get("step", 0) >= EVERY]
    if len(both) < 2:
        return ""
    first, last = both[0], both[-1]
    old = (last["fresh"]["old"] - first["fresh"]["old"]) / (last["step"] - first["step"])
    new = (last["fresh"]["cpu"] - first["fresh"]["cpu"]) / (last["fresh"]["step"] - first["fresh"]["step"])
    steps = f"steps {first['step']:,} to {last['step']:,}, {first['fresh']['step']:,} to {last['fresh']['step']:,}"
    more = f"{old / new - 1:+.1%}"
    return f"Beside a new run from what was learned ({steps}): {old:.4f} and {new:.4f} CPU s a step, {more}.\n"


def memory_of(lines: list[dict], role: str) -> str:
    """The kind that was written down: memory of its own, or all that was resident."""
    return "anon" if "anon" in lines[-1][role] else "rss"


def slope(lines: list[dict], role: str, key: str) -> float:
    """Per 1,000 steps, by least squares."""
    points = [(line["step"], line[role][key]) for line in lines if key in line.get(role, ())]
    return 1000 * linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else float("nan")


def in_use(steps: list[dict]) -> str:
    """What the first trainer had in use in the second half, and how that grew."""
    told = []
    for name in ("heap/megabytes", "heap/thousand_objects"):
        seen = [(line["step"], line[name]) for line in steps if name in line]
        least = [min(seen[at : at + EVERY], key=lambda pair: pair[1]) for at in range(0, len(seen) - EVERY + 1, EVERY)]
        if len(half := least[len(least) // 2 :]) > 1:
            grew = 1000 * linear_regression(*zip(*half, strict=True)).slope
            told += [f"{half[0][1]:.2f} -> {half[-1][1]:.2f} {name} ({grew:+.3f} in 1,000 steps)"]
    return f"Least in use in {EVERY} steps, second half: {', '.join(told)}.\n" if told else ""


def cpu_by_tenth(lines: list[dict], role: str) -> tuple[float, float]:
    """CPU seconds a step, in the first tenth (but for the first line) and in the last."""
    tenth = max(2, len(lines) // 10)
    parts = (lines[1 : tenth + 1], lines[-tenth:])
    return tuple((p[-1][role]["cpu"] - p[0][role]["cpu"]) / (p[-1]["step"] - p[0]["step"]) for p in parts)


def table(folder: Path) -> str:
    text = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        half, name = lines[len(lines) // 2 :], path.stem
        fresh = next((line["step"] - EVERY for line in lines if "fresh" in line), math.inf)
        alone = [line for line in lines if line["step"] <= fresh]  # before the same command ran beside it
        hours = lines[-1]["seconds"] / 3600
        text += [f"**{name}**: {lines[-1]['step']:,} steps in {hours:.2f} h, seed {SEED}.\n"]
        text += [
            "| process | MB at half | MB at end | MB / 1,000 steps | descriptors | threads | children | CPU s / step |"
        ]
        text += ["|---|---:|---:|---:|---|---|---|---|"]
        for role in roles(lines):
            first, last = half[0][role], half[-1][role]
            counted = [f"{first[key]} -> {last[key]}" for key in ("fds", "threads", "children")]
            kind = memory_of(lines, role)
            begin = next(line[role][kind] for line in half if kind in line.get(role, ()))
            memory = [f"{begin / 1e6:.1f}", f"{last[kind] / 1e6:.1f}", f"{slope(half, role, kind) / 1e6:+.2f}"]
            cpu = "{:.4f} -> {:.4f}".format(*cpu_by_tenth(alone, role))
            text.append(f"| {role} | " + " | ".join([*memory, *counted, cpu]) + " |")
        steps = [line for line in read_metrics(folder / f"{name}-0") if "time/step" in line and line["step"] <= fresh]
        tenth = len(steps) // 10
        parts = [[phases(line) for line in part] for part in (steps[:tenth], steps[-tenth:])]
        names = dict.fromkeys(key for part in parts for line in part for key in line)
        values = [f"{n} {' -> '.join(f'{median(line.get(n, 0.0) for line in p):.4f}' for p in parts)}" for n in names]
        whole = " -> ".join(f"{median(line['time/step'] for line in p):.4f}" for p in (steps[:tenth], steps[-tenth:]))
        files, size = half[-1]["folder"]["files"], half[-1]["folder"]["bytes"] / 1e6
        page = {kind: max(line["page"].get(kind, 0) for line in half) for kind in half[-1]["page"]}
        text += [f"\nSeconds a step, medians of the first and the last tenth: **{whole}** ({', '.join(values)})."]
        text += [f"The run folder: {files:,} files, {size:.0f} MB. The page's slowest answers in the second half: "]
        text += [", ".join(f"{kind} {seconds:.2f} s" for kind, seconds in page.items()) + ".\n"]
        text += [in_use(steps), beside_a_fresh_one(lines)]
    return "\n".join(text)


def draw(folder: Path, path: Path) -> None:
    """Memory of each process less that at a tenth of the run, and CPU seconds a step, by step."""
    from matplotlib.figure import Figure

    files = sorted(folder.glob("*.jsonl"))
    figure = Figure(figsize=(9, 2.3 * len(files)), layout="constrained")
    axes = figure.subplots(len(files), 2, squeeze=False)
    for row, file in zip(axes, files, strict=True):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for role in roles(lines):
            own = [line for line in lines if role in line]
            kind = memory_of(lines, role)
            seen = [(line["step"], line[role][kind] / 1e6) for line in own if kind in line[role]]
            start = seen[len(seen) // 10][1]
            row[0].plot([step for step, _ in seen], [value - start for _, value in seen], label=role)
            pairs = list(zip(own, own[1:], strict=False))
            spent = [(b[role]["cpu"] - a[role]["cpu"]) / (b["step"] - a["step"]) for a, b in pairs]
            row[1].plot([b["step"] for _, b in pairs], spent, label=role)
        row[0].set_title(f"{file.stem}: MB more than at a tenth of the run", fontsize=9, loc="left")
        row[1].set_title(f"{file.stem}: CPU seconds a step", fontsize=9, loc="left")
        row[0].legend(frameon=False, fontsize=7)
        for one in row:
            one.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", choices=CASES)
    parser.add_argument("--folder", type=Path, default=Path("soak"))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--hours", type=float, default=3.0)
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the table, and draw the picture")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "images" / "soak.svg")
    given, further = parser.parse_known_args()
    if given.table:
        draw(given.table, given.picture)
        print(table(given.table))
    elif given.case:
        raise SystemExit(soak(given.case, given.folder.resolve(), given.steps, given.hours, further))
    else:
        parser.error("give a case or --table")


if __name__ == "__main__":
    main()
