"""What an update and a push really take: bytes of the tensors that are alive, on rank 0. Run by test_plan.py, and by
scripts/gpu_check.py: on GPUs CUDA's allocator counts.

usage: memory_worker.py OUT.json [flags of TrainConfig]      the model's weights are random, its config.json is enough

A list of [settings on top of the flags, whether there is a critic, bytes by phase].
"""

import gc
import json
import sys
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import memory  # noqa: E402
import train_grpo as script  # noqa: E402
import train_ppo  # noqa: E402
import utils  # noqa: E402
from config import TrainConfig, load_config  # noqa: E402
from rollouts import Trajectory  # noqa: E402
from serving import wire  # noqa: E402
from vllm_client import VLLMClient  # noqa: E402


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


class Allocated:
    """What `Recorder` is, by the counts of CUDA's allocator."""

    def __init__(self):
        self.place, self.most = "start", {}

    def __enter__(self):
        gc.collect()
        self.before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *_):
        self.next_phase("end")

    @property
    def now(self) -> Counter:
        return Counter(bytes=torch.cuda.memory_allocated() - self.before)

    def next_phase(self, name: str) -> None:
        gc.collect()
        self.most[self.place] = Counter(bytes=torch.cuda.max_memory_allocated() - self.before)
        self.place = name
        torch.cuda.reset_peak_memory_stats()


class Sender(VLLMClient):
    """The client's part of a push, to no server. Buckets are packed where weights lie, as with NCCL."""

    def __init__(self, rank: int):
        super().__init__(["http://127.0.0.1:9"])
        self.receives_weights, self.weight_dtype = rank == 0, torch.bfloat16

    def begin_push(self) -> None:
        """There is nobody to tell."""

    def send_bucket(self, named: list) -> None:
        if self.adapter is None:
            wire.pack(named, self.weight_dtype, named[0][1].device)

    def finish_push(self, version: int) -> None:
        """There is nobody to tell."""


def random_model(cfg, dtype, config=None, **_):
    """On the GPU if there is one, where a billion random numbers take a second; on the meta device within it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config, here = AutoConfig.from_pretrained(cfg.model_id), torch.get_default_device()
    with torch.device("cuda" if here.type == "cpu" and torch.cuda.is_available() else here):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def batch_of(cfg: TrainConfig, world: int, device: torch.device) -> script.Batch:
    """This rank's prompts and completions, all of them as long as they may be."""
    ids, rows = torch.arange(cfg.max_prompt_length), range(cfg.prompts_per_step // world)
    answer, known = (torch.arange(cfg.max_completion_length) % 50 + 5).tolist(), [1] * cfg.max_completion_length
    rows = [
        Trajectory({}, row, ((ids + row) % 50 + 5).tolist(), answer, known, [-1.0] * len(answer), [0.0] * len(answer))
        for row in rows
        for _ in range(cfg.num_generations)
    ]
    batch = script.collate(rows, 0, device)
    signs = torch.where(torch.arange(len(rows), device=device) % 2 == 0, 1.0, -1.0)
    batch.advantages = signs[:, None] * batch.loss_mask
    return batch


def measured(cfg: TrainConfig, critic: bool, rank: int, world: int, device) -> dict[str, int]:
    """Bytes on this rank: kept between steps, and the peaks of a second update and of a push."""
    batch, seen = batch_of(cfg, world, device), Allocated() if device.type == "cuda" else Recorder()
    own = train_ppo.TrainConfig(**{field.name: getattr(cfg, field.name) for field in fields(TrainConfig) if field.init})
    with seen:
        policy, inner = script.load_policy(cfg, device)
        optimizer = script.make_optimizer(policy, cfg)
        trained = train_ppo.CriticTrainer(own, device) if critic else None

        def step(number: int) -> None:
            if critic:
                trained.learn(batch, own, number)
            script.update(policy, optimizer, batch, cfg, number)

        step(0)  # makes the optimizer's state
        seen.next_phase("update")
        step(1)
        kept = seen.now.total()
        seen.next_phase("push")
        sender = Sender(rank)
        sender.adapter = "policy" if cfg.load_in else None
        script.push_weights(policy, sender, 1, cfg.push_bucket_mb)
    return {"kept": kept} | {place: seen.most[place].total() for place in ("update", "push")}


def predicted(cfg: TrainConfig, ranks: int, critic: bool) -> dict[str, int]:
    """What memory.py says of the same. Here it is one memory in which shards are, offloaded or not."""
    need = memory.rank_bytes(
        script.empty_policy, replace(cfg, offload=False), ranks, critic, copies=torch.cuda.is_available()
    )
    kept = memory.kept(need)
    return {"kept": kept, "update": memory.update_peak(need), "push": kept + need["push"]}


CASES = [
    (dict(use_peft=False, gradient_checkpointing=False), False),
    (dict(use_peft=False, gradient_checkpointing=True), False),
    (dict(use_peft=True, gradient_checkpointing=False), False),
    (dict(use_peft=True, gradient_checkpointing=True, dtype="bfloat16"), False),
    (dict(use_peft=False, gradient_checkpointing=False), True),
]


def main(out: str, argv: list[str]) -> None:
    """Rank 0 writes what it measured."""
    script.load_hf_model = random_model
    given = load_config(TrainConfig, ["--max_steps", "2", *argv])
    rank, world, device = utils.init_distributed(120)
    offload = [(dict(use_peft=False, gradient_checkpointing=False, offload=True), False)]
    cases = CASES + offload * (given.strategy == "fsdp2")
    found = [[more, critic, measured(replace(given, **more), critic, rank, world, device)] for more, critic in cases]
    if rank == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    utils.end_process(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
