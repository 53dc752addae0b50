"""Scripts as forks of a process that has imported torch and transformers, which takes each process a core 6 s.

    run = Fork(["train_grpo.py", "--model_id", ...], Path("log"), os.environ | {"RANK": "0"})

For check.py and the tests, which start the scripts many times. On CPUs: CUDA does not survive a fork.
"""

import atexit
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

SCRIPTS = Path(__file__).resolve().parent
sys.path.append(str(SCRIPTS.parent))

from orphans import end_with  # noqa: E402

FORKS = multiprocessing.get_context("forkserver")
# No tensor is made by these: no thread runs. pandas: datasets and pyarrow want it.
IMPORTED = "pandas peft pyarrow.compute pyarrow.parquet torch.distributed.checkpoint torch.distributed.fsdp "
IMPORTED += "transformers.models.auto.modeling_auto transformers.models.auto.processing_auto "
IMPORTED += "transformers.models.llama.modeling_llama train_grpo"
FORKS.set_forkserver_preload(IMPORTED.split())


def get_ready() -> None:
    """Start the process that is forked, if it does not run yet; does not wait for its imports."""
    if FORKS.get_start_method() != "forkserver":  # a program that has imported everything forks itself
        return
    # Without PYTHONPATH it does not find train_grpo, in silence. Threads are counted when torch is imported.
    with mock.patch.dict(os.environ, PYTHONPATH=str(SCRIPTS.parent), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"):
        multiprocessing.forkserver.ensure_running()


def become(command: list[str], log: Path, env: dict[str, str], folder: Path) -> None:
    """In a fork: `python SCRIPT FLAGS` in `folder`, as far as the script can tell."""
    end_with(os.getppid())
    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell started this in the background
    sys.argv, sys.path[:] = command, [str((folder / command[0]).parent), *sys.path]
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its processes without


class Fork:
    """What subprocess.Popen is to a command, for a script that starts as a fork."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str], folder: Path | None = None):
        """Both outputs are appended to `log`. `folder`: where it runs; unset, the repository."""
        self.process = FORKS.Process(target=become, args=(command, log, env, folder or SCRIPTS.parent))
        get_ready()
        self.process.start()
        self.pid, self.kill, self.sentinel = self.process.pid, self.process.kill, self.process.sentinel

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, limit: float | None = None) -> int:
        self.process.join(limit)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", limit)
        return self.process.exitcode


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def places(ranks: int) -> list[dict[str, str]]:
    """torchrun's variables for each of `ranks` processes on this machine; none for one alone."""
    if ranks == 1:
        return [{}]
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{"RANK": str(r), "LOCAL_RANK": str(r)} | shared for r in range(ranks)]
