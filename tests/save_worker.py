"""Saves checkpoints one after the other until it is killed; each step's weights and Adam's moments are all the same
number, the step. Run by test_resume.py, which kills children of it at random moments.

usage: save_worker.py RUN_FOLDER SEED MOMENTS
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from runlog import checkpoints  # noqa: E402


def made() -> tuple:
    model = AutoModelForCausalLM.from_pretrained("models/tiny")
    return model, torch.optim.AdamW(model.parameters())


def fill(model, optimizer, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            optimizer.state[parameter] = {"step": torch.tensor(value)} | {
                name: torch.full_like(parameter, value) for name in ("exp_avg", "exp_avg_sq")
            }


def save_on_and_on(run_dir: Path, model, optimizer, tokenizer) -> None:
    saver = checkpoints.Saver(run_dir, keep=2)
    step = checkpoints.last_step(run_dir, or_none=True)
    while True:
        step += 1
        fill(model, optimizer, float(step))
        weights = [list(model.named_parameters())]
        saver.save(step, {"policy": (model, optimizer)}, model, weights, tokenizer, {}, {"step": step})


def check(run_dir: Path, model, optimizer) -> int:
    """That each checkpoint is whole; how many there are."""
    for step in checkpoints.steps_saved(run_dir):
        memory: dict = {}
        fill(model, optimizer, 0.5)
        assert checkpoints.load_checkpoint(run_dir, step, {"policy": (model, optimizer)}, memory)["step"] == step
        held = [t for p in model.parameters() for t in (p, *optimizer.state[p].values())]
        assert memory == {"step": step} and all((t == step).all() for t in held), step
        served = AutoModelForCausalLM.from_pretrained(checkpoints.folder_of(run_dir, step))
        assert all((p == step).all() for p in served.parameters()), step
    return len(checkpoints.steps_saved(run_dir))


def main(run_dir: Path, seed: int, moments: int) -> None:
    draw, (model, optimizer) = random.Random(seed), made()
    tokenizer, found, last = AutoTokenizer.from_pretrained("models/tiny"), 0, 0
    torch.set_num_threads(1)  # threads do not outlive a fork
    for _ in range(moments):
        if not (child := os.fork()):
            save_on_and_on(run_dir, model, optimizer, tokenizer)
        time.sleep(draw.uniform(0.05, 1.5))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert checkpoints.last_step(run_dir, or_none=True) >= last
        last = checkpoints.last_step(run_dir, or_none=True)
        found += len(list(run_dir.glob("checkpoints/incomplete_*")))
    print(f"{check(run_dir, model, optimizer)} whole, step {last}, {found} killed half-way")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
