"""What an update and a push really take: bytes of the tensors that are alive, on rank 0. Run by test_plan.py.

usage: memory_worker.py OUT.json [flags of TrainConfig]      the model's weights are random, its config.json is enough
"""

import gc
import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import memory  # noqa: E402
import train_grpo as script  # noqa: E402
import utils  # noqa: E402
from config import TrainConfig, load_config  # noqa: E402
from rollouts import Trajectory  # noqa: E402


class Recorder(memory.LiveBytes):
    """Bytes of real tensors; FSDP1 resizes their storages."""

    def __enter__(self):
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage, size):
            resize(storage, size)
            if storage._cdata in self.sizes:
                self.now["activations"] += size - self.sizes[storage._cdata][1]
                self.sizes[storage._cdata] = "activations", size
            if self.now.total() > self.most[self.place].total():
                self.most[self.place] = self.now.copy()
            return storage

        torch.UntypedStorage.resize_ = resize_and_count
        return super().__enter__()

    def next_phase(self, name: str) -> None:
        gc.collect()
        self.enter(name)


def random_model(cfg, dtype):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(cfg.model_id)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=cfg.attn_implementation)


def batch_of(cfg: TrainConfig, rank: int, world: int) -> script.Batch:
    """This rank's prompts and completions, all of them as long as they may be."""
    ids, rows = torch.arange(cfg.max_prompt_length), range(cfg.prompts_per_step // world)
    answer, known = (torch.arange(cfg.max_completion_length) % 50 + 5).tolist(), [1] * cfg.max_completion_length
    rows = [
        Trajectory({}, row, ((ids + row) % 50 + 5).tolist(), answer, known, [-1.0] * len(answer), [0.0] * len(answer))
        for row in rows
        for _ in range(cfg.num_generations)
    ]
    batch = script.collate(rows, 0, torch.device("cpu"))
    batch.advantages = torch.where(torch.arange(len(rows)) % 2 == 0, 1.0, -1.0)[:, None] * batch.loss_mask
    return batch


def measured(cfg: TrainConfig, rank: int, world: int, device) -> dict[str, int]:
    """Bytes on this rank: kept between steps, and the peaks of a second update and of a push."""
    batch, seen = batch_of(cfg, rank, world), Recorder()
    with seen:
        policy, _ = script.load_policy(cfg, device)
        optimizer = script.make_optimizer(policy, cfg)
        script.update(policy, optimizer, batch, cfg, 0)  # makes the optimizer's state
        seen.next_phase("update")
        script.update(policy, optimizer, batch, cfg, 1)
        kept = seen.now.total()
        seen.next_phase("push")
        for _ in script.weight_buckets(policy, cfg.push_bucket_mb * 2**20, torch.bfloat16, keep=rank == 0):
            pass
    return {"kept": kept} | {place: seen.most[place].total() for place in ("update", "push")}


def main(out: str, argv: list[str]) -> None:
    """All weights and LoRA, with and without gradient checkpointing; rank 0 writes what it measured."""
    script.load_hf_model = random_model
    given = load_config(TrainConfig, ["--max_steps", "2", *argv])
    rank, world, device = utils.init_distributed(120)
    found = []
    for use_peft, checkpointing in product((False, True), (False, True)):
        cfg = replace(given, use_peft=use_peft, gradient_checkpointing=checkpointing)
        found.append([use_peft, checkpointing, measured(cfg, rank, world, device)])
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    utils.end_process(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
