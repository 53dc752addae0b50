"""Pushes adapters alone from ddp, fsdp and fsdp2 to a live server. Run by test_adapters_alone.py.

usage: adapters_worker.py MODEL_DIR URL OUT.json        (VLLM_SERVER_TOKEN in the environment)
"""

import functools
import json
import sys
from pathlib import Path
from unittest import mock

import torch
from peft import LoraConfig

sys.path.insert(0, str(Path(__file__).parent.parent))
from push_worker import difference, edit, script_tokenizer, snapshot  # noqa: E402

import train_grpo as script  # noqa: E402
import utils  # noqa: E402
from config import TrainConfig  # noqa: E402
from inputs import lora  # noqa: E402

CASES = [
    ("ddp", 32, 64.0, ["all-linear"]),
    ("fsdp", 32, 64.0, ["all-linear"]),
    ("fsdp2", 32, 64.0, ["all-linear"]),
    ("fsdp2", 64, 16.0, ["q_proj", "v_proj"]),  # a part of what the server merges
    ("fsdp", 8, 24.0, ["gate_proj", "o_proj"]),
    ("ddp", 16, 5.0, ["down_proj", "up_proj", "k_proj"], "gloo"),
    ("fsdp2", 16, 8.0, ["all-linear"], "gloo", True),
]


def one_case(model_dir: str, url: str, case: tuple, version: int) -> dict:
    """case: strategy, rank, alpha, layers; then how weights travel, and whether the scale is alpha / sqrt(rank), as
    somebody may set it who copies the script."""
    strategy, rank, alpha, targets, over, rank_stabilized = *case, *("auto", False)[len(case) - 4 :]
    cfg = TrainConfig(
        model_id=model_dir,
        strategy=strategy,
        use_peft=True,
        lora_r=rank,
        lora_alpha=alpha,
        lora_targets=targets,
        push_lora="adapters",
        push_over=over,
        compute_dtype="float32",
        server_urls=[url],
        num_generations=4,
        max_completion_length=24,
        max_prompt_length=64,
        push_bucket_mb=1,
    )
    with mock.patch("peft.LoraConfig", functools.partial(LoraConfig, use_rslora=rank_stabilized)):
        policy, inner = script.load_policy(cfg, torch.device("cpu"))
    scales = {layer.scaling["default"] for layer in lora.adapted(inner).values()}
    assert scales == {alpha / (rank**0.5 if rank_stabilized else rank)}, scales
    generator = script.make_generator(cfg, inner.hf_model, script_tokenizer(model_dir), torch.device("cpu"))
    script.push_weights(policy, generator, version, cfg.push_bucket_mb)
    edit(policy, version)
    before, _ = difference(policy, cfg, generator)  # the server still has other adapters
    original = snapshot(policy)
    script.push_weights(policy, generator, version + 1, cfg.push_bucket_mb)
    after, versions = difference(policy, cfg, generator)
    untouched = all(torch.equal(a, b) for a, b in zip(original, snapshot(policy), strict=True))
    generator.close()
    return {
        "case": [*case],
        "before": before,
        "after": after,
        "version": versions == {version + 1},
        "untouched": untouched,
        "bytes": generator.sent_bytes,
        "shapes": list(generator.adapter_shapes.values()),
    }


def main(model_dir: str, url: str, out: str) -> None:
    rank, _, _ = utils.init_distributed(60)
    results = [one_case(model_dir, url, case, 100 + 10 * number) for number, case in enumerate(CASES)]
    if rank == 0:
        Path(out).write_text(json.dumps(results), encoding="utf-8")
    utils.end_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
