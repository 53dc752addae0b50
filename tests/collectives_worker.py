"""The collectives of an update and of a push, each with its bytes. Run by test_collectives.py.

usage: collectives_worker.py OUT.pt [flags of TrainConfig]
"""

import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent.parent))
import gradient_worker  # noqa: E402
import sharding_worker  # noqa: E402

import train_grpo as script  # noqa: E402
import utils  # noqa: E402
from config import TrainConfig, load_config  # noqa: E402


class Collectives(TorchDispatchMode):
    """(operation, bytes that this rank puts in, kind of device) of each collective."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, int, str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        operation = func.name().partition("::")[2].partition(".")[0]
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in operation:
            sent = args[1] if operation.startswith(("_allgather", "allgather", "_reduce_scatter")) else args[0]
            sent = [leaf for leaf in tree_leaves(sent) if isinstance(leaf, torch.Tensor)]
            self.seen.append((operation, sum(t.nbytes for t in sent), sent[0].device.type))
        return func(*args, **(kwargs or {}))


def llama(cfg, dtype) -> torch.nn.Module:
    """Six layers, biases, and rows that the ranks cannot share evenly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=97, num_hidden_layers=6, num_attention_heads=4, attention_bias=True)
    return LlamaForCausalLM(LlamaConfig(vocab_size=1001, tie_word_embeddings=TIED, **shape)).to(dtype)


TIED = "tied" in sys.argv


def pushed_bytes(policy, dtype) -> dict:
    """What a push hands over, in few buckets."""
    buckets = list(script.weight_buckets(policy, 300_000, dtype))
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket} | {"buckets": len(buckets)}


def main(out: str, flags: list[str]) -> None:
    base = [
        "--compute_dtype",
        "float32",
        "--tokens_per_microbatch",
        "40",
        "--logprob_chunk",
        "4",
        "--prompts_per_step",
        "12",
    ]
    cfg = load_config(TrainConfig, [*base, *(flag for flag in flags if flag != "tied")])
    rank, world, device = utils.init_distributed(60)
    script.load_hf_model = llama
    policy, inner = script.load_policy(cfg, device)
    batch = sharding_worker.batch_of(rank, world, device)
    micro = max(utils.gather_objects(len(script.micro_batches(batch, cfg))))
    with Collectives() as update:
        gradient = gradient_worker.gradients(policy, inner, batch, cfg)
    whole = {
        script.clean_name(n): script.rounded(script.full(p.detach()), torch.bfloat16)
        for n, p in policy.named_parameters()
    }
    with Collectives() as push:
        pushed = pushed_bytes(policy, torch.bfloat16)
    if rank == 0:
        found = dict(gradient=gradient, update=update.seen, push=push.seen, micro=micro, pushed=pushed, whole=whole)
        torch.save(found, out)
    utils.end_process(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
