"""Starting the real scripts in tests: as processes, with a log each, ended with everything they started."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent

# A random model of 6 M parameters, and a reward by which it learns: about half of all token ids are even.
EVEN = (
    "def even(completion_ids, **_):\n    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]\n"
)
SMALL = "--model_id models/tiny --generator hf --compute_dtype float32 --dataset_id examples/sums.py:rows "
SMALL += "--prompts_per_step 4 --num_generations 4 --max_prompt_length 64 --max_completion_length 8 "
SMALL += "--learning_rate 1e-3 --print_samples_every 0"


class Process:
    """A script that runs: `log` is the file of what it prints."""

    def __init__(self, command: list[str], log: Path, **env: str):
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "w") as file:  # one thread: sums in the same order, and the cores are shared anyway
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | env
            self.popen = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
        self.handle = psutil.Process(self.popen.pid)  # knows its start: a later process of that number is another one

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return self.handle.children(recursive=True)
        return []

    def until(self, condition: Callable[[], object], limit: float = 240) -> object:
        """Wait for `condition` to be true; AssertionError with the log if the process ends or `limit` passes."""
        deadline = time.monotonic() + limit
        while not (found := condition()):
            ended = self.popen.poll() is not None
            if (found := condition()) or ended or time.monotonic() > deadline:
                break
            time.sleep(0.002)
        assert found, f"{'ended' if ended else 'waited'} after {limit} s: {self.text[-4000:]}"
        return found

    def end(self, limit: float = 240) -> int:
        """Wait for the end; the exit status. A process that does not end fails the test."""
        try:
            return self.popen.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {limit} s: {self.text[-4000:]}") from None

    def kill(self) -> None:
        """kill -9, with all it started."""
        family = self.children()
        self.popen.kill()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
        self.popen.wait()
        psutil.wait_procs(family, timeout=10)


def trainer(log: Path, *flags: str, ranks: int = 1, script: str = "train_grpo.py", **env: str) -> Process:
    """A train script, by itself or under torchrun."""
    launch = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run"]
    launch += [] if ranks == 1 else ["--standalone", f"--nproc_per_node={ranks}"]
    return Process([*launch, script, *flags], log, **env)


@contextlib.contextmanager
def running(process: Process) -> Iterator[Process]:
    """Nothing of it is left behind, however the test ends."""
    try:
        yield process
    finally:
        process.kill()
