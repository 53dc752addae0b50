"""Starting the real scripts in tests: as processes, with a log each, ended with everything they started."""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import psutil
from server_fixture import free_port

from safety.orphans import end_with, ends_with_us

ROOT = Path(__file__).parent.parent

# A random model of 6 M parameters, and a reward by which it learns: about half of all token ids are even.
EVEN = (
    "def even(completion_ids, **_):\n    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]\n"
)
SMALL = "--model_id models/tiny --generator hf --compute_dtype float32 --dataset_id examples/sums.py:rows "
SMALL += "--prompts_per_step 4 --num_generations 4 --max_prompt_length 64 --max_completion_length 8 "
SMALL += "--learning_rate 1e-3 --print_samples_every 0"


# Most scripts here start as forks of a process that has imported what they need: importing torch and transformers
# takes a core 6 s, and the tests start some eighty of them.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["preloaded"])


def become(command: list[str], log: Path, env: dict[str, str]) -> None:
    """In a fork: `python SCRIPT FLAGS`, as far as the script can tell."""
    end_with(os.getppid())
    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell started the tests in the background
    exit_at_once = os._exit
    sys.argv, sys.path[:] = command, [str((ROOT / command[0]).parent), *sys.path]
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its processes without
        os._exit = exit_at_once  # which it calls, and a script refuses until it has ended


class Fork:
    """What subprocess.Popen is to a command, for a script that starts as a fork."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str]):
        self.process = FORKS.Process(target=become, args=(command, log, env))
        with mock.patch.dict(
            os.environ, PYTHONPATH=str(ROOT / "tests")
        ):  # else it does not find `preloaded`, in silence
            self.process.start()
        self.pid, self.kill = self.process.pid, self.process.kill

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, limit: float | None = None) -> int:
        self.process.join(limit)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", limit)
        return self.process.exitcode


class Process:
    """A command that runs, or the ranks of a script: `log` is the file of what they print."""

    def __init__(self, command: list[str], log: Path, ranks: int | None = None, **env: str):
        """ranks: so many forks of the script command[0], with torchrun's variables; None: any command, as it is."""
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("", encoding="utf-8")
        # One thread: sums in the same order, and the cores are shared anyway.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | env
        if ranks is None:
            with open(log, "a", encoding="utf-8") as file:
                how = dict(cwd=ROOT, env=environment, stdout=file, stderr=file, preexec_fn=ends_with_us())
                self.members = [subprocess.Popen(command, **how)]
        else:
            shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            places = [{"RANK": str(r), "LOCAL_RANK": str(r)} | shared for r in range(ranks)] if ranks > 1 else [{}]
            self.members = [Fork(command, log, environment | place) for place in places]
        # psutil knows their start: a later process of that number is another one.
        self.handles = [psutil.Process(member.pid) for member in self.members]

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace", encoding="utf-8")

    def children(self) -> list[psutil.Process]:
        found = []
        for handle in self.handles:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += handle.children(recursive=True)
        return found

    def until(self, condition: Callable[[], object], limit: float = 240) -> object:
        """Wait for `condition` to be true; AssertionError with the log if a process ends or `limit` passes."""
        deadline = time.monotonic() + limit
        while not (found := condition()):
            ended = any(member.poll() is not None for member in self.members)
            if (found := condition()) or ended or time.monotonic() > deadline:
                break
            time.sleep(0.002)
        assert found, f"{'ended' if ended else 'waited'} after {limit} s: {self.text[-4000:]}"
        return found

    def end(self, limit: float = 240) -> int:
        """Wait for the end; the largest exit status. A process that does not end fails the test."""
        deadline = time.monotonic() + limit
        try:
            return max(abs(member.wait(max(deadline - time.monotonic(), 0))) for member in self.members)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {limit} s: {self.text[-4000:]}") from None

    def kill(self) -> None:
        """kill -9, with all they started."""
        family = self.children()
        for member in self.members:
            member.kill()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
        for member in self.members:
            member.wait()
        psutil.wait_procs(family, timeout=10)


def trainer(log: Path, *flags: str, ranks: int = 1, script: str = "train_grpo.py", **env: str) -> Process:
    """A train script, on one rank or several."""
    return Process([script, *flags], log, ranks, **env)


def torchrun(log: Path, *command: str, **env: str) -> Process:
    """A script on two ranks, as users start it."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return Process([*launch, *command], log, **env)


@contextlib.contextmanager
def running(process: Process) -> Iterator[Process]:
    """Nothing of it is left behind, however the test ends."""
    try:
        yield process
    finally:
        process.kill()
