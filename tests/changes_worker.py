"""Pushes of what has changed from every kind of sharding: what the server holds, and what the ranks tell each other.

usage: changes_worker.py OUT.json        Run by test_push_changes.py on two ranks.
"""

import json
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent.parent))
import pipe_server  # noqa: E402

import train_grpo as script  # noqa: E402
import utils  # noqa: E402
from config import TrainConfig  # noqa: E402

CASES = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2, offload": {"strategy": "fsdp2", "offload": True},
    "fsdp2, two copies": {"strategy": "fsdp2", "shard_size": 1},
    "fsdp2, LoRA": {"strategy": "fsdp2", "use_peft": True},
    "ddp, LoRA": {"use_peft": True},
}


def llama(cfg, dtype) -> torch.nn.Module:
    """2.2 M parameters, and rows that two ranks cannot share evenly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(hidden_size=128, intermediate_size=385, num_hidden_layers=6, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(vocab_size=4097, tie_word_embeddings=True, **shape)).to(dtype)


class Traffic(TorchDispatchMode):
    """Bytes of the tensors that collectives of this rank are given, by operation."""

    def __init__(self):
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
            size = sum(leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            name = func.name().partition("::")[2]
            self.bytes[name] = self.bytes.get(name, 0) + size
        return func(*args, **(kwargs or {}))


def disturb(policy, share: float, seed: int) -> None:
    """Change this share of the trained weights, by a tenth or more."""
    torch.manual_seed(seed)
    for p in policy.parameters():
        if p.requires_grad:
            local = p.data.to_local() if isinstance(p, DTensor) else p.data
            local.add_((local * 0.1 + 1e-3) * (torch.rand_like(local) < share))


def one_case(flags: dict, pipe, rank: int) -> dict:
    cfg = TrainConfig(push_bucket_mb=1, push_changes=True, **flags)
    policy, _ = script.load_policy(cfg, torch.device("cpu"))

    def connect():
        """As utils.connect_servers: every rank has a client, the first of them talks to the server."""
        client = pipe_server.PipeClient(pipe, changes_only=True)
        client.receives_weights, client.weight_dtype = rank == 0, torch.bfloat16
        if rank == 0:
            client.connect_weights("cpu")
        return client

    def push(client, version):
        with Traffic() as traffic:
            script.push_weights(policy, client, version, cfg.push_bucket_mb)
        return {"sent": client.sent_bytes, "told": traffic.bytes}

    client, result = connect(), {}
    disturb(policy, 1.0, 0)  # adapters begin as zero
    result["whole"] = push(client, 0)
    result["nothing"] = push(client, 1)
    for step, share in enumerate((0.002, 0.02, 0.02, 0.9)):
        disturb(policy, share, step)
        result[str(share)] = push(client, 2 + step)
    held = client._call("", "", "kept") if rank == 0 else None
    client.close()
    fresh = connect()
    result["fresh"] = push(fresh, 9)
    result["equal"] = rank > 0 or held == fresh._call("", "", "kept")
    fresh.close()
    return result


def main(out: str) -> None:
    rank, _, _ = utils.init_distributed(60)
    script.load_hf_model = llama
    pipe = pipe_server.start() if rank == 0 else None
    results = {name: one_case(flags, pipe, rank) for name, flags in CASES.items()}
    if rank == 0:
        Path(out).write_text(json.dumps(results, indent=1), encoding="utf-8")
    utils.end_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
