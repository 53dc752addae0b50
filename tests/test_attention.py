"""Packed rows: the log-probs and gradients of plain rows, for all families that take them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import ragged
import torch
from families import FAMILIES, config_of, model_of
from tiers import by_default
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, masking_utils

import train_grpo as script
from config import TrainConfig
from modeling import loading, packing
from modeling.attention import PackedMask, PackedRow, attend, attend_in_one_call

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")


def logprobs_and_gradient(policy, batch, cfg) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T] and all gradients in one vector."""
    policy.zero_grad()
    logprobs = script.compute_logprobs(policy, batch, cfg)["logprobs"]
    (logprobs * torch.sin(batch.input_ids.float())).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    return logprobs.detach(), gradient.double()


def assert_equal_to_plain_rows(policy, cfg, tolerance: float) -> None:
    batch = ragged.local_batch(0, 1)
    logprobs, gradient = logprobs_and_gradient(policy, batch, cfg)
    plain_logprobs, plain_gradient = logprobs_and_gradient(policy, batch, replace(cfg, shared_prefix=False))
    assert (logprobs - plain_logprobs).abs().max() < tolerance * 10
    assert (gradient - plain_gradient).norm() < tolerance * plain_gradient.norm()


# Plain, latent attention, learned positions, capped scores, windows (of 8 tokens), sinks; recurrent layers, Mamba
# alone, an attention that takes no other. Those after the first six take plain rows.
SOME = ["qwen3", "deepseek_v3", "gpt2", "gemma2", "mistral", "gpt_oss", "qwen3_5_text", "mamba", "falcon"]


@pytest.mark.parametrize("family", by_default(SOME, FAMILIES))
def test_families(family, monkeypatch, capsys):
    def load(cfg, dtype, **_):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(loading.without_noise(config_of(family)), dtype=dtype)
        loading.use_eager_where_capped(model)
        return model

    monkeypatch.setattr(script, "load_hf_model", load)
    policy = script.load_policy(cfg := TrainConfig(compute_dtype="float32", beta=0.0), CPU)
    inner = script.unwrapped(policy)
    cfg = ragged.settled(cfg, policy, inner)
    if family in SOME:
        assert cfg.shared_prefix == (family in SOME[:6])
    if cfg.shared_prefix:
        assert_equal_to_plain_rows(policy, cfg, 1e-5)
    else:
        assert "packed rows differ from" in capsys.readouterr().out
        assert inner.hf_model.config._attn_implementation == model_of(family).config._attn_implementation


@pytest.mark.parametrize("family", ["falcon_h1", "lfm2", "qwen3_next", "recurrent_gemma"])
def test_layers_with_a_state_take_plain_rows_in_bfloat16(family, monkeypatch):
    """Where log-probs of so small a model are within what bfloat16 does to them."""
    monkeypatch.setattr(script, "load_hf_model", lambda cfg, dtype, **_: model_of(family))
    policy = script.load_policy(cfg := TrainConfig(compute_dtype="bfloat16", beta=0.0), CPU)
    inner = script.unwrapped(policy)
    assert not ragged.settled(cfg, policy, inner).shared_prefix


SETTINGS = {
    "checkpointing": dict(gradient_checkpointing=True),
    "checkpointing, adapters": dict(gradient_checkpointing=True, use_peft=True),
    "bf16": dict(compute_dtype="bfloat16"),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings(settings, monkeypatch):
    monkeypatch.setattr(script, "load_hf_model", ragged.small_llama)
    cfg = TrainConfig(beta=0.0, **dict(compute_dtype="float32") | settings)
    policy = script.load_policy(cfg, CPU)
    inner = script.unwrapped(policy)
    ragged.wake_adapters(inner)
    assert_equal_to_plain_rows(policy, cfg, 2e-2 if cfg.compute_dtype == "bfloat16" else 1e-6)


# Two groups and a row of its own: prompts of 7, 2 and 4 tokens, segments of one token among them.
ROW = PackedRow([(7, None), (1, 0), (5, 0), (3, 0), (2, None), (6, 4), (4, None)], CPU)


def plain_varlen(query, key, value, query_ends, key_ends, *longest, scale, window_size, enable_gqa):
    """What torch's documentation says of varlen_attn, as a loop: the GPU's kernel does not run on a CPU."""
    assert longest == tuple(int(ends.diff().max()) for ends in (query_ends, key_ends))
    out = []
    for a, b, c, d in zip(query_ends, query_ends[1:], key_ends, key_ends[1:], strict=False):
        q, k, v = (x.transpose(0, 1) for x in (query[a:b], key[c:d], value[c:d]))
        last = d - c - (b - a)  # the last query sees the last key
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(last)
        mask &= mask.triu(last - window_size[0]) if window_size[0] >= 0 else mask
        out.append(scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("window", [0, 1, 3, 9])
def test_the_kernel_of_gpus_computes_the_same(window, monkeypatch):
    """Output and gradients are those of the loop over segments."""
    monkeypatch.setattr(varlen, "varlen_attn", plain_varlen)
    sees = masking_utils.sliding_window_causal_mask_function(window) if window else masking_utils.causal_mask_function
    mask, module = PackedMask(ROW, sees, window or None, None), SimpleNamespace(num_key_value_groups=2, is_causal=True)
    results = []
    for run in (
        lambda *tensors: attend(module, *tensors, mask, 0.3, name="sdpa")[0],
        lambda *tensors: attend_in_one_call(*tensors, mask, 0.3),
    ):
        draw = torch.Generator().manual_seed(0)
        tensors = [torch.randn(1, heads, 28, 8, generator=draw).requires_grad_() for heads in (4, 2, 2)]
        out = run(*tensors)
        out.backward(torch.cos(torch.arange(out.numel()).view(out.shape)))
        results.append([out, *(x.grad for x in tensors)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_no_padding():
    """Groups stand one behind the other; passes hold as many tokens as the budget allows."""
    batch, cfg = ragged.local_batch(0, 1), TrainConfig()
    inputs, rows, columns, targets = packing.pack(batch, cfg)
    lengths = batch.attention_mask.sum(1).long().tolist()
    prompts = [packing.shared_prefix(batch, members) for members in packing.sharing(batch)]
    length = sum(prompts) + sum(n - prompts[group] for n, group in zip(lengths, batch.groups.tolist(), strict=True))
    assert inputs["input_ids"].shape == inputs["position_ids"].shape == (1, length)
    assert sum(size for size, _ in inputs["segments"]) == length
    following = inputs["input_ids"][rows, (columns + 1).clamp(max=length - 1)] == targets
    assert following.float().mean() > 0.8  # all but the first tokens of completions 2, 3, ...
    passes = packing.micro_batches(batch, replace(cfg, tokens_per_microbatch=length // 2 + 20))
    assert len(passes) == 2 and sorted(sum(passes, [])) == list(range(len(batch)))
    sizes = [packing.pack(batch.select(part), cfg)[0]["input_ids"].shape[1] for part in passes]
    assert sum(sizes) == length and max(sizes) <= length // 2 + 20
