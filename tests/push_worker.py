"""Pushes edited weights from ddp, fsdp and fsdp2, with and without LoRA, to a live server. Run by test_push.py.

usage: push_worker.py MODEL_DIR URL COMPUTE_DTYPE OUT.json        (VLLM_SERVER_TOKEN in the environment)
"""

import asyncio
import ctypes
import json
import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from ragged import settled  # noqa: E402

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
            local = parameter.data.to_local() if isinstance(parameter, script.DTensor) else parameter.data
            local.add_(torch.randn_like(local) * (local.std(correction=0) / 3 + 0.02))


def peak_memory() -> float:
    """Highest resident memory in MiB since the last call to `reset_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def snapshot(policy) -> list[torch.Tensor]:
    return [script.full(p.detach()).clone() for p in policy.parameters()]


def difference(policy, cfg, generator) -> tuple[float, set[int]]:
    """Mean |trainer - server| log-prob over sampled tokens, and the versions the server says it sampled from."""
    trajectories = asyncio.run(single_turn(ROWS, generator, cfg))
    batch = script.collate(trajectories, 0, next(policy.parameters()).device)
    logprobs = script.all_logprobs(policy, batch, cfg)[0]
    total = ((logprobs - batch.sampling_logprobs).abs() * batch.loss_mask).sum() / batch.loss_mask.sum()
    return float(total), {t.policy_version for t in trajectories}


def connected(model_dir: str, url: str, compute_dtype: str, strategy: str, use_peft: bool, device, over="auto"):
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
        push_changes=True,
        push_over=over,
    )
    policy, inner = script.load_policy(cfg, device)
    cfg, tokenizer = settled(cfg, inner), script_tokenizer(model_dir)
    return policy, cfg, script.make_generator(cfg, inner.hf_model, tokenizer, device)


def one_case(version: int, *kind) -> dict:
    """Before and after a push of `version`, and one of changes. kind: as `connected` takes it."""
    policy, cfg, generator = connected(*kind)
    edit(policy, version)
    before, _ = difference(policy, cfg, generator)  # the server still has other weights
    original = snapshot(policy)
    script.push_weights(policy, generator, version, cfg.push_bucket_mb)
    after, versions = difference(policy, cfg, generator)
    untouched = all(torch.equal(a, b) for a, b in zip(original, snapshot(policy), strict=True))
    whole = generator.sent_bytes
    for name, parameter in policy.named_parameters():
        if "norm" in name:
            parameter.data.mul_(1.5)
    script.push_weights(policy, generator, version + 1, cfg.push_bucket_mb)  # only what has changed
    later, _ = difference(policy, cfg, generator)
    generator.close()
    return {
        "case": f"{cfg.strategy}{' lora' if cfg.use_peft else ''}",
        "before": before,
        "after": after,
        "later": later,
        "saved": utils.is_main() and generator.sent_bytes < whole,
        "version": versions == {version},
        "untouched": untouched,
    }


class Packer:
    """Takes a push as a client does, into a bucket for the wire, and drops it."""

    receives_weights, weight_dtype, changes, adapter = True, torch.float32, None, None

    def begin_push(self) -> None:
        self.received = 0

    def send_bucket(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self.received += torch.cat([tensor.reshape(-1) for _, tensor in named]).numel()

    def finish_push(self, version: int) -> None:
        assert self.received == WIDE_PARAMETERS, self.received


def wide_llama(cfg, dtype) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8)
    return LlamaForCausalLM(LlamaConfig(vocab_size=4096, tie_word_embeddings=True, **shape)).to(dtype)


WIDE_PARAMETERS = 43_004_416  # 164 MiB in fp32; the largest tensor has 8, a layer 13


def extra_memory(strategy: str, use_peft: bool) -> float:
    """MiB by which a push of a model much larger than a bucket raises this rank's peak."""
    cfg = TrainConfig(strategy=strategy, use_peft=use_peft, compute_dtype="float32", push_bucket_mb=4)
    original, script.load_hf_model = script.load_hf_model, wide_llama
    policy, _ = script.load_policy(cfg, torch.device("cpu"))
    script.load_hf_model = original
    script.push_weights(policy, Packer(), 0, cfg.push_bucket_mb)  # FSDP keeps buffers from its first gathering on
    reset_peak()
    before = peak_memory()
    script.push_weights(policy, Packer(), 0, cfg.push_bucket_mb)
    return peak_memory() - before


def script_tokenizer(model_dir: str):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


def main(model_dir: str, url: str, compute_dtype: str, out: str) -> None:
    rank, _, device = utils.init_distributed(60)
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD, bytes: what is freed goes back at once, so a peak is one
    cases = list(product(("ddp", "fsdp", "fsdp2"), (False, True)))
    # First: what others freed would be taken before the peak rises. Once is enough.
    extra = [extra_memory(*case) if compute_dtype == "float32" else 0.0 for case in cases]
    results = []
    for number, (case, megabytes) in enumerate(zip(cases, extra, strict=True)):
        results.append(one_case(100 + number, model_dir, url, compute_dtype, *case, device) | {"extra_mb": megabytes})
    if rank == 0:
        Path(out).write_text(json.dumps(results), encoding="utf-8")
    utils.end_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
