"""Starting the real scripts in tests: as processes, with a log each, ended with everything they started."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts"))

from forks import Fork, places  # noqa: E402
from orphans import ends_with_us  # noqa: E402

from runfiles.reading import read_metrics  # noqa: E402

# A random model of 6 M parameters, which learns by the reward.
SMALL = "--model_id models/tiny --generator hf --compute_dtype float32 --dataset_id examples/sums.py:rows "
SMALL += "--prompts_per_step 4 --num_generations 4 --max_prompt_length 64 --max_completion_length 8 "
SMALL += "--learning_rate 1e-3 --print_samples_every 0 --reward_funcs tests/even.py:even"


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
            self.members = [Fork(command, log, environment | place) for place in places(ranks)]
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

    def answer(self, url: str) -> None:
        """Wait until there is any answer from `url`."""
        import requests  # which a borrowed machine need not have (scripts/gpu_day.py)

        def answered() -> int | None:
            with contextlib.suppress(requests.ConnectionError):
                return requests.get(url, timeout=10).status_code

        self.until(answered)

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


@contextlib.contextmanager
def running(process: Process) -> Iterator[Process]:
    """Nothing of it is left behind, however the test ends."""
    try:
        yield process
    finally:
        process.kill()


def trained(folder: Path, flags: str, run: str = "run", **how) -> list[dict]:
    """The lines of metrics.jsonl of a run in folder/run that ends well; how: of `trainer`. Log: folder/run.log."""
    words = [*shlex.split(flags), "--output_dir", str(folder), "--run_name", run]
    with running(trainer(folder / f"{run}.log", *words, **how)) as process:
        assert process.end() == 0, process.text
    return read_metrics(folder / run)
