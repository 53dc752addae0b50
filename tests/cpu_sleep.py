"""What vLLM's sleep mode is on a CPU, as a plugin of vLLM: tests give it to a server.

vLLM's CPU worker answers `sleep` and `wake_up` with a warning, and its platform says that there is no sleep mode. These
three are replaced; all else is the real code. Asleep, weights and KV cache have no memory at all. What wakes after
level 2 is nan: whatever computes with it could not go unnoticed.

    start_server(model, "--enable-sleep-mode", **cpu_sleep.installed(folder))     # what it does: folder / "log"
"""

import multiprocessing
import os
import shutil
import time
from pathlib import Path

import torch


def installed(folder: Path, seconds: float = 0.5) -> dict[str, str]:
    """The environment of a server that has this plugin, put into `folder`. seconds: that falling asleep takes."""
    shutil.copy(__file__, folder)
    about = folder / "cpu_sleep-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-sleep\nVersion: 1.0\n", encoding="utf-8")
    plugin = "[vllm.general_plugins]\ncpu_sleep = cpu_sleep:register\n"
    (about / "entry_points.txt").write_text(plugin, encoding="utf-8")
    paths = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    return dict(PYTHONPATH=paths, CPU_SLEEP_LOG=str(folder / "log"), CPU_SLEEP_SECONDS=str(seconds))


def note(text: str) -> None:
    with open(os.environ["CPU_SLEEP_LOG"], "a", encoding="utf-8") as file:
        file.write(text + "\n")


def storages(worker, tag: str) -> list[torch.UntypedStorage]:
    runner = worker.model_runner
    tensors = runner.kv_caches if tag == "kv_cache" else runner.model.parameters()
    return list({s.data_ptr(): s for t in tensors if len(s := t.untyped_storage())}.values())


def sleep(self, level: int = 1) -> None:
    note(f"sleep {level}")
    time.sleep(float(os.environ["CPU_SLEEP_SECONDS"]))
    asleep = getattr(self, "dropped", {})  # the KV cache may be still
    awake = {tag: [(s, len(s), None) for s in storages(self, tag)] for tag in ("weights", "kv_cache")}
    self.dropped = awake | asleep
    if level == 2:  # vLLM's own worker does so, to have them when it wakes
        [buffer.cpu().clone() for buffer in self.model_runner.model.buffers()]
    if level == 1:
        self.dropped["weights"] = [(s, size, s.clone()) for s, size, _ in self.dropped["weights"]]
    for storage, _, _ in sum(self.dropped.values(), []):
        storage.resize_(0)


def wake_up(self, tags: list[str] | None = None) -> None:
    for tag in tags or list(self.dropped):
        note(f"wake {tag}")
        for storage, size, saved in self.dropped.pop(tag):
            storage.resize_(size)
            storage.copy_(saved) if saved is not None else storage.fill_(0xFF if tag == "weights" else 0)


def register() -> None:
    from vllm.platforms import current_platform

    type(current_platform).is_sleep_mode_available = lambda self: True
    if multiprocessing.parent_process() is not None:
        from vllm.v1.worker.cpu_worker import CPUWorker

        CPUWorker.sleep, CPUWorker.wake_up = sleep, wake_up
