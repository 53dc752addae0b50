"""A run that meets one fault after another and has to end as if nothing had been. No GPU.

    python tests/chaos.py process --seeds 0 1 2      # sampled in the process, float32
    python tests/chaos.py ranks --seeds 0 1 2        # the same on two ranks
    python tests/chaos.py server --seeds 0 1 2       # beside a server that is ended, too, and starts again
    python tests/chaos.py tools --seeds 0 1 2        # turns with a tool of an MCP server that is ended, too

Outside stands what docs/runs.md shows: a loop that starts the run again until it has ended well. A seed says which
fault comes when: every few steps one, at a random time within a step, some while the run still loads, FAULTS in all.
Then the run is left alone and compared with the same run undisturbed: each step once in metrics and completions, with
the prompts it should have; whole checkpoints; `finished`; nothing left half-written. In the process, where a run in
float32 is repeatable, losses, gradients, tokens and the weights at the end must be equal bit for bit, on one rank and
on two.

The reward sleeps .1 s a group, so that faults meet steps. Where there is a C compiler the run's clock is set back, too,
by a minute to two hours, and stays so over restarts: clock_gettime, gettimeofday and time say so to all its processes.
(libfaketime 0.9.10 cannot leave the monotonic clock alone, by which waits are measured: time.sleep fails under it.)
"""

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import pyarrow.parquet

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from server_fixture import free_port  # noqa: E402

from config import ConfigError, TrainConfig  # noqa: E402
from envs import Environment  # noqa: E402
from envs.mcp_tools import get_tools  # noqa: E402
from envs.tools import Call, Toolbox  # noqa: E402
from runlog import checkpoints  # noqa: E402
from runlog.reading import read_metrics  # noqa: E402
from safety.orphans import ends_with_us  # noqa: E402

STEPS, FAULTS = 40, 10
FLAGS = "--model_id models/tiny --compute_dtype float32 --dataset_id examples/sums.py:rows --prompts_per_step 4 "
FLAGS += "--num_generations 4 --max_prompt_length 64 --max_completion_length 8 --learning_rate 1e-3 --seed 0 "
FLAGS += f"--max_steps {STEPS} --save_steps 5 --num_iterations 2 --print_samples_every 0 --dist_timeout 60 "
FLAGS += f"--reward_funcs {Path(__file__).resolve()}:reward --reward_timeout 20 "
LOOP = "until {command}; do [ $? = 2 ] && exit 2; sleep 1; done"
COMMANDS = {
    "process": f"python train_grpo.py --generator hf {FLAGS}",
    "ranks": f"python -m torch.distributed.run --standalone --nproc_per_node=2 train_grpo.py --generator hf {FLAGS}",
    "server": f"python train_grpo.py --server_timeout 240 {FLAGS}",
    "tools": f"python train_grpo.py --generator hf {FLAGS} --max_completion_length 120 --max_turn_length 24 "
    f"--env {Path(__file__).resolve()}:Asks --max_turns 3",
}
ORDERS = {"raises": 1, "nan": 1, "waits": 1}  # what the reward is told to do, once
ON_TRAINER = ("kill", "kill", "terminate", "stop", "full disk", "torn checkpoint", *ORDERS)
ON_SERVER = ("kill server", "kill worker", "stop server", "stop worker")
ON_TOOLS = ("kill tools", "kill tools", "stop tools")
if shutil.which("cc"):
    ON_TRAINER += ("clock back",)
CLOCK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *back; /* seconds, in a file that all processes share */
__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CHAOS_CLOCK"), O_RDONLY);
    void *found = file < 0 ? MAP_FAILED : mmap(0, sizeof *back, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) back = found;
    if (file >= 0) close(file);
}
int clock_gettime(clockid_t clock, struct timespec *t) {
    long failed = syscall(SYS_clock_gettime, clock, t);
    if (!failed && back && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) t->tv_sec -= *back;
    return failed;
}
int gettimeofday(struct timeval *t, void *zone) {
    long failed = syscall(SYS_gettimeofday, t, zone);
    if (!failed && back) t->tv_sec -= *back;
    return failed;
}
time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}
"""


def reward(completion_ids, **_) -> list[float]:
    """Share of even tokens; or what a file in CHAOS_FOLDER tells it to do, once."""
    order = Path(os.environ["CHAOS_FOLDER"]) / "order"
    told = ""
    with contextlib.suppress(FileNotFoundError):
        told = order.read_text(encoding="utf-8")
        order.unlink()
    time.sleep(3.0 if told == "waits" else 0.1)
    if told == "raises":
        raise ValueError("chaos")
    return [float("nan") if told == "nan" else sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]


class Asks(Environment):
    """Three turns. A random model writes no calls, so the environment calls the server's tool with what it wrote."""

    box = None

    def reset(self, row, seed):
        if Asks.box is None:
            cfg = TrainConfig(mcp_config=str(Path(os.environ["CHAOS_FOLDER"]) / "mcp.json"), tool_timeout=10)
            Asks.box = Toolbox(get_tools(cfg), cfg)
        self.left = 3
        return row["prompt"]

    async def step(self, text):
        self.left -= 1
        call = Call("odd_names", {"tool": "said", "server": str(len(text)), "self": "letters"})
        messages, events = await self.box.run([call], self.box.tools)
        return messages[0]["content"][:40], 0.0, self.left == 0, {"calls": events}


# ---- what happens to a run ------------------------------------------------------------------------------------------


def family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def named(pid: int, words: str) -> list[psutil.Process]:
    """Descendants whose command line has the words."""
    found = []
    for process in family(pid):
        with contextlib.suppress(psutil.Error):
            found += [process] * (words in " ".join(process.cmdline()))
    return found


def trainers(loop: subprocess.Popen) -> list[psutil.Process]:
    """The processes that train: no launcher, watchdog or helper."""
    found = []
    for process in named(loop.pid, "train_grpo.py"):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            found += [process] * any(word.endswith("train_grpo.py") for word in words[1:3])
    return found


def steps_done(run: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((run / "state.json").read_text(encoding="utf-8"))["step"]
    return 0


def inflict(fault: str, chance: random.Random, loop, server, run: Path) -> None:
    """One fault. Who is gone already is not looked for."""
    victims = trainers(loop)
    victim = chance.choice(victims) if victims else None
    if fault == "clock back":
        with (run.parent / "clock").open("r+b") as clock:  # in place: it is mapped
            back = int.from_bytes(clock.read(), "little") + chance.randint(60, 7200)
            clock.seek(0)
            clock.write(back.to_bytes(8, "little"))
    elif fault.endswith("tools"):
        for process in named(server.pid, "mcp_server.py")[:1]:
            act(process, fault.split()[0])
    elif fault in ORDERS:
        (run.parent / "order").write_text(fault, encoding="utf-8")
    elif fault == "torn checkpoint":
        for process in victims:
            process.kill()
        saved = checkpoints.steps_saved(run)
        files = sorted(p for p in checkpoints.folder_of(run, saved[-1]).rglob("*") if p.is_file()) if saved else []
        if files:
            torn = chance.choice([path for path in files if path.name != checkpoints.SUMS])
            os.truncate(torn, torn.stat().st_size // 2)
    elif "server" in fault or "worker" in fault:
        workers = [p for p in family(server.pid) if "EngineCore" in p.name() or "EngineCore" in " ".join(p.cmdline())]
        target = workers if "worker" in fault else named(server.pid, "vllm_server.py")
        for process in target[:1]:
            act(process, fault.split()[0])
    elif fault == "full disk" and victim:
        before = resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (0, before[1]))
        time.sleep(3)
        if victim.is_running():
            resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, before)
    elif victim:
        act(victim, fault)


def act(process: psutil.Process, fault: str) -> None:
    if fault == "stop":
        process.suspend()
        time.sleep(5)
        process.resume()
    else:
        process.kill() if fault == "kill" else process.terminate()


def model_that_ends(folder: Path) -> Path:
    """models/tiny with one token in twelve as an end: a turn that is cut ends the game."""
    copy = shutil.copytree(ROOT / "models" / "tiny", folder / "tiny_that_ends")
    ends = json.dumps({"eos_token_id": [2, *range(7, 4096, 12)]})
    (copy / "generation_config.json").write_text(ends, encoding="utf-8")
    return copy


def started(command: str, log: Path, env: dict[str, str]) -> subprocess.Popen:
    with log.open("a", encoding="utf-8") as out:
        how = dict(cwd=ROOT, env=os.environ | env, stdout=out, stderr=out, preexec_fn=ends_with_us())
        return subprocess.Popen(["bash", "-c", command], **how)


def ended(process: subprocess.Popen | None) -> None:
    for one in [*family(process.pid), psutil.Process(process.pid)] if process and process.poll() is None else []:
        with contextlib.suppress(psutil.Error):
            one.kill()
    if process:
        process.wait()


def live(mode: str, folder: Path, seed: int | None, limit: float) -> dict:
    """A run to its end, with the faults of a seed or undisturbed; what happened."""
    chance, done, begun, server = random.Random(seed), Counter(), time.monotonic(), None
    folder.mkdir(parents=True)
    env = {"CHAOS_FOLDER": str(folder), "OMP_NUM_THREADS": "1", "VLLM_SERVER_TOKEN": "chaos"}
    clock = {}  # of the trainer alone
    if "clock back" in ON_TRAINER:
        (folder / "clock").write_bytes(bytes(8))
        (folder / "clock.c").write_text(CLOCK, encoding="utf-8")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "clock.so", folder / "clock.c"], check=True)
        clock = {"LD_PRELOAD": str(folder / "clock.so"), "CHAOS_CLOCK": str(folder / "clock")}
    command = f"{COMMANDS[mode]} --output_dir {folder} --run_name run --resume --keep_going"
    if mode == "server":
        port = free_port()
        serve = f"python vllm_server.py --model models/tiny --dtype float32 --max-model-len 512 --port {port}"
        server = started(f"while true; do {serve}; sleep 1; done", folder / "server.log", env)
        command += f" --server_urls http://127.0.0.1:{port}"
    if mode == "tools":
        port = free_port()
        serves = {"mcpServers": {"tools": {"url": f"http://127.0.0.1:{port}/mcp"}}}
        (folder / "mcp.json").write_text(json.dumps(serves), encoding="utf-8")
        serve = f"python tests/mcp_server.py {port} streamable-http"
        server = started(f"while true; do {serve}; sleep 1; done", folder / "server.log", env)
        command += f" --model_id {model_that_ends(folder)}"
    loop = started(LOOP.format(command=command), folder / "log", env | clock)
    run, kinds = folder / "run", ON_TRAINER + {"server": ON_SERVER, "tools": ON_TOOLS}.get(mode, ())
    try:
        while seed is not None and sum(done.values()) < FAULTS and loop.poll() is None:
            # After some steps, at a random time within one; one in five while the run may still load.
            wait = chance.uniform(0, 8 if chance.random() < 0.2 else 0.4)
            target = min(steps_done(run) + chance.randint(2, 9), STEPS - 1)
            latest = time.monotonic() + (wait if wait > 0.4 else 120)
            while time.monotonic() < latest and not target <= steps_done(run) < STEPS and loop.poll() is None:
                time.sleep(0.02)
            time.sleep(min(wait, 0.4))
            fault = chance.choice(kinds)
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                inflict(fault, chance, loop, server, run)
                done[fault] += 1
        status = loop.wait(max(1.0, limit - (time.monotonic() - begun)))
    except subprocess.TimeoutExpired:
        status = None
    finally:
        ended(loop)
        ended(server)
    restarts = (folder / "log").read_text(encoding="utf-8", errors="replace").count("Resuming run after")
    return {"run": run, "status": status, "faults": done, "resumed": restarts, "seconds": time.monotonic() - begun}


# ---- whether it ended as it should ----------------------------------------------------------------------------------


def told(run: Path) -> dict:
    """{step: what must not depend on faults}: rows alone beside a server, numbers and tokens where runs repeat."""
    steps = {}
    for line in read_metrics(run):
        table = pyarrow.parquet.read_table(run / "completions" / f"step_{line['step']:06d}.parquet")
        exact = {key: line[key] for key in ("reward", "loss", "grad_norm", "num_tokens")}
        exact["tokens"] = table.column("token_ids").to_pylist()
        steps[line["step"]] = {"rows": sorted(table.column("row_number").to_pylist()), "exact": exact}
    return steps


def faults_of(result: dict, plain: dict, repeats: bool) -> list[str]:
    """What is not as it should be, in words."""
    run, wrong = result["run"], []
    if result["status"] != 0:
        return [f"the loop ended with {result['status']} after step {steps_done(run)}"]
    numbers = [line["step"] for line in read_metrics(run)]
    if numbers != [*range(1, STEPS + 1)]:
        wrong.append(f"metrics have the steps {numbers}")
    files = sorted(int(path.stem.removeprefix("step_")) for path in run.glob("completions/step_*.parquet"))
    if files != [*range(1, STEPS + 1)]:
        wrong.append(f"completions have the steps {files}")
    if (state := json.loads((run / "state.json").read_text(encoding="utf-8")))["state"] != "finished":
        wrong.append(f"state.json says {state['state']}")
    left = [
        path.name for pattern in ("checkpoints/incomplete*", "*.partial", "*/*.partial") for path in run.glob(pattern)
    ]
    if left:
        wrong.append(f"left behind: {left}")
    for step in checkpoints.steps_saved(run):
        try:
            checkpoints.check_sums(run, step)
        except ConfigError as error:
            wrong.append(str(error))
    if not (run / "report.html").exists():
        wrong.append("no report.html")
    if wrong:
        return wrong
    mine, theirs = told(run), told(plain["run"])
    if uneven := [step for step in theirs if mine[step]["rows"] != theirs[step]["rows"]]:
        wrong.append(f"other prompts in steps {uneven}")
    if repeats:
        if other := [step for step in theirs if mine[step]["exact"] != theirs[step]["exact"]]:
            wrong.append(f"other numbers or tokens from step {other[0]}")
        weights = [one / "checkpoints" / f"step_{STEPS}" / "model.safetensors" for one in (run, plain["run"])]
        if len({checkpoints.sha256(path) for path in weights}) > 1:
            wrong.append("other weights at the end")
    return wrong


def last_rewards(run: Path) -> float:
    lines = read_metrics(run)[-10:]
    return sum(line["reward"] for line in lines) / len(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=COMMANDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--folder", type=Path, help="for the runs, where an undisturbed one may be; unset: temporary")
    parser.add_argument("--limit", type=float, default=900, help="seconds of a run")
    given = parser.parse_args()
    folder = (given.folder or Path(tempfile.mkdtemp(prefix="chaos_"))).resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if (earlier := folder / "undisturbed" / "run").exists():
        plain = {"run": earlier, "status": 0, "seconds": 0.0}
    else:
        plain = live(given.mode, folder / "undisturbed", None, given.limit)
    if wrong := faults_of(plain, plain, True):
        print(f"the undisturbed run: {'; '.join(wrong)}; see {folder}", file=sys.stderr)
        return 1
    print(f"undisturbed: {plain['seconds']:.0f} s, reward of the last ten steps {last_rewards(plain['run']):.3f}\n")
    print(
        "| seed | faults | resumed | s | reward of the last ten | verdict |\n|---:|---|---:|---:|---:|---|", flush=True
    )
    failed = 0
    for seed in given.seeds:
        result = live(given.mode, folder / str(seed), seed, given.limit)
        wrong = faults_of(result, plain, given.mode in ("process", "ranks"))
        failed += bool(wrong)
        what = ", ".join(f"{name} {count}" if count > 1 else name for name, count in sorted(result["faults"].items()))
        score = f"{last_rewards(result['run']):.3f}" if not wrong else ""
        row = [seed, what, result["resumed"], f"{result['seconds']:.0f}", score, "; ".join(wrong) or "equal"]
        print(f"| {' | '.join(map(str, row))} |", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
