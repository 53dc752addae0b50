"""Pushes edited weights from ddp, fsdp and fsdp2, with and without LoRA, to a live server. For test_runs.py."""

import asyncio
import os
import sys
from itertools import product
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import train_grpo as script  # noqa: E402
import utils  # noqa: E402
from config import TrainConfig  # noqa: E402
from rollouts import single_turn  # noqa: E402

ROWS = [{"prompt": [{"role": "user", "content": f"What is {n} + 7?"}]} for n in range(4)]


def edit(policy: torch.nn.Module, seed: int) -> None:
    """Change every trained weight by about a third: a push that does not arrive cannot go unnoticed."""
    torch.manual_seed(seed)  # alike on every rank, as ddp needs it
    for parameter in policy.parameters():
        if parameter.requires_grad and parameter.numel():
            local = parameter.data.to_local() if isinstance(parameter, DTensor) else parameter.data
            local.add_(torch.randn_like(local) * (local.std(correction=0) / 3 + 0.02))


def snapshot(policy) -> list[torch.Tensor]:
    return [script.full(p.detach()).clone() for p in policy.parameters()]


def difference(policy, cfg, generator) -> tuple[float, set[int]]:
    """Mean |trainer - server| log-prob over sampled tokens, and the versions the server says it sampled from."""
    trajectories = asyncio.run(single_turn(ROWS, generator, cfg))
    batch = script.collate(trajectories, 0, next(policy.parameters()).device)
    logprobs = script.all_logprobs(policy, batch, cfg)["logprobs"]
    total = ((logprobs - batch.sampling_logprobs).abs() * batch.loss_mask).sum() / batch.loss_mask.sum()
    return float(total), {t.policy_version for t in trajectories}


def connected(model_dir: str, url: str, compute_dtype: str, strategy: str, use_peft: bool, device):
    """(policy, its config, the client of the server)"""
    cfg = TrainConfig(
        model_id=model_dir,
        strategy=strategy,
        use_peft=use_peft,
        compute_dtype=compute_dtype,
        server_urls=[url],
        num_generations=4,
        max_completion_length=24,
        max_prompt_length=64,
        push_bucket_mb=4,
    )
    policy = script.load_policy(cfg, device)
    inner = script.unwrapped(policy)
    return policy, cfg, script.make_generator(cfg, inner.hf_model, script.load_processor(model_dir), device)


def one_case(version: int, *kind) -> dict:
    """Before and after a push of `version`. kind: as `connected` takes it."""
    policy, cfg, generator = connected(*kind)
    edit(policy, version)
    generator.run, run = None, generator.run  # the server still has other weights
    before, _ = difference(policy, cfg, generator)
    generator.run = run
    original = snapshot(policy)
    script.push_weights(policy, generator, version, cfg.push_bucket_mb)
    after, versions = difference(policy, cfg, generator)
    untouched = all(torch.equal(a, b) for a, b in zip(original, snapshot(policy), strict=True))
    utils.gather_objects(None)  # other ranks sample, too
    generator.close()
    name = f"{cfg.strategy}{' lora' if cfg.use_peft else ''}"
    return dict(case=name, before=before, after=after, version=versions == {version}, untouched=untouched)


CASES = list(product(("ddp", "fsdp", "fsdp2"), (False, True)))


def all_cases(model_dir: str, url: str, token: str, compute_dtype: str) -> list[dict]:
    os.environ["VLLM_SERVER_TOKEN"] = token
    rank, _, device = utils.init_distributed(60)
    return [one_case(100 + n, model_dir, url, compute_dtype, *case, device) for n, case in enumerate(CASES)]
