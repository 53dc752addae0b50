"""What an update really takes: bytes of the tensors that are alive, on rank 0. Run by scripts/gpu_check.py: on GPUs
CUDA's allocator counts.

usage: memory_worker.py OUT.json [flags of TrainConfig]      the model's weights are random, its config.json is enough

A list of [settings on top of the flags, whether there is a critic, {"kept", "update": bytes}].
"""

import gc
import json
import sys
import weakref
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent.parent))

import plan  # noqa: E402
import train_grpo as script  # noqa: E402
import train_ppo  # noqa: E402
import utils  # noqa: E402
from config import TrainConfig, load_config  # noqa: E402
from rollouts import Trajectory  # noqa: E402
from serving import wire  # noqa: E402
from vllm_client import VLLMClient  # noqa: E402


class Recorder(TorchDispatchMode):
    """Bytes of the storages made under it that are alive, in CUDA's blocks of 512, and the most there were."""

    def __init__(self):
        super().__init__()
        self.now, self.most, self.sizes = 0, 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returned = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(returned):
            if isinstance(tensor, torch.Tensor):  # of a DTensor its shard; of one that is still to arrive its place
                self.see(getattr(tensor, "_local_tensor", getattr(tensor, "elem", tensor)))
        return returned

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.sizes:
            weakref.finalize(storage, self.drop, storage._cdata)
            self.resize(storage._cdata, storage.nbytes())

    def __enter__(self):
        self.plain = plain = torch.UntypedStorage.resize_

        def resized(storage, size):  # FSDP2 frees what it has gathered in this way
            plain(storage, size)
            if storage._cdata in self.sizes:
                self.resize(storage._cdata, size)
            return storage

        torch.UntypedStorage.resize_ = resized
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.plain
        return super().__exit__(*error)

    def resize(self, key: int, size: int) -> None:
        size = -(-size // 512) * 512
        self.now += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.most = max(self.most, self.now)

    def drop(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def again(self) -> int:
        """Bytes there are; the most is counted anew from here."""
        gc.collect()
        self.most = self.now
        return self.now


class Allocated:
    """What `Recorder` is, by the counts of CUDA's allocator."""

    def __enter__(self):
        gc.collect()
        self.before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_):
        """Nothing to put back."""

    @property
    def most(self) -> int:
        return torch.cuda.max_memory_allocated() - self.before

    def again(self) -> int:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() - self.before


class Sender(VLLMClient):
    """The client's part of a push, to no server. Buckets are packed where weights lie, as with NCCL."""

    def __init__(self, rank: int):
        super().__init__(["http://127.0.0.1:9"])
        self.receives_weights, self.weight_dtype = rank == 0, torch.bfloat16

    def begin_push(self) -> None:
        """There is nobody to tell."""

    def send_bucket(self, named: list) -> None:
        if self.adapter is None:
            told = wire.announcement(named, self.weight_dtype)
            list(wire.pieces(told["dtype_names"], told["shapes"], named[0][1].device))

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


def measured(cfg: TrainConfig, critic: bool, world: int, device) -> dict[str, int]:
    """Bytes on this rank: kept between steps, and the peak of a second update."""
    batch = batch_of(cfg, world, device)
    own = train_ppo.TrainConfig(**{field.name: getattr(cfg, field.name) for field in fields(TrainConfig) if field.init})
    with Allocated() if device.type == "cuda" else Recorder() as seen:
        policy = script.load_policy(cfg, device)
        optimizer = script.make_optimizer(policy, cfg)
        trained = train_ppo.CriticTrainer(own, device) if critic else None
        for number in range(2):  # the first makes the optimizer's state
            kept = seen.again()
            if critic:
                trained.learn(batch, own, number)
            script.update(policy, optimizer, batch, cfg, number)
    return {"kept": kept, "update": seen.most}


def chunked(cfg: TrainConfig) -> TrainConfig:
    """On CPUs with a chunk of the output layer that is told: left open, plan.py takes a GPU's, which is larger."""
    return cfg if torch.cuda.is_available() else replace(cfg, logprob_chunk=256)


def predicted(cfg: TrainConfig, ranks: int, critic: bool) -> dict[str, int]:
    """What plan.py says of the same."""
    cfg = chunked(cfg)
    with torch.device("meta"):
        sizes = plan.sizes_of(script.empty_policy(cfg))
    need = plan.bytes_needed(sizes, cfg, ranks, critic)
    return {"kept": plan.kept_bytes(need), "update": plan.peak(need)}


CASES = [
    (dict(use_peft=False, gradient_checkpointing=False), False),
    (dict(use_peft=False, gradient_checkpointing=True), False),
    (dict(use_peft=True, gradient_checkpointing=True, dtype="bfloat16"), False),
    (dict(use_peft=False, gradient_checkpointing=False), True),
]


def main(out: str, argv: list[str]) -> None:
    """Rank 0 writes what it measured."""
    script.load_hf_model = random_model
    given = chunked(load_config(TrainConfig, ["--max_steps", "2", *argv]))
    rank, world, device = utils.init_distributed(120)
    found = [[more, critic, measured(replace(given, **more), critic, world, device)] for more, critic in CASES]
    if rank == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    utils.end_process(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
