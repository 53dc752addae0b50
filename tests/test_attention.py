"""Attention of packed rows: the pairs of plain rows and no others, for all families that share prompts."""

from dataclasses import replace
from functools import partial

import pytest
import ragged
import torch
from families import saved
from tiers import by_default
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import modeling_flash_attention_utils as flash_utils

import train_grpo as script
from config import TrainConfig
from inputs import attention, packing, reach

pytestmark = pytest.mark.quick

SHAPE = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)
FAMILIES = {
    "qwen3": dict(head_dim=16),
    "qwen3_moe": dict(head_dim=16, **EXPERTS),
    "deepseek_v3": LATENT | EXPERTS | dict(n_routed_experts=4, n_group=1, topk_group=1, num_key_value_heads=4),
    "gemma": dict(head_dim=16),
    "gpt2": dict(n_inner=96),  # positions are learned
    "phi": {},
    "falcon": {},  # calls sdpa itself
}
# Layers that see the last tokens alone; capped scores; sinks. A window has 8 tokens, prompts and completions more.
WINDOWED = ["gemma2", "gemma3_text", "olmo3", "mistral", "cohere2", "exaone4", "gpt_oss", "afmoe", "modernbert-decoder"]


def family(name: str):
    """`load_hf_model` of a tiny model of this family."""

    def load(cfg, dtype, **_):
        torch.manual_seed(0)
        tokens = dict(vocab_size=1000, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **tokens | SHAPE | FAMILIES[name]))
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return model.to(dtype)

    return load


def logprobs_and_gradient(policy, batch, cfg) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T] and all gradients in one vector."""
    policy.zero_grad()
    logprobs = script.compute_logprobs(policy, batch, cfg)[0]
    (logprobs * torch.sin(batch.input_ids.float())).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    return logprobs.detach(), gradient.double()


def assert_equal_to_plain_rows(policy, cfg, tolerance: float) -> None:
    batch = ragged.local_batch(0, 1)
    logprobs, gradient = logprobs_and_gradient(policy, batch, cfg)
    plain_logprobs, plain_gradient = logprobs_and_gradient(policy, batch, replace(cfg, shared_prefix=False))
    assert (logprobs - plain_logprobs).abs().max() < tolerance * 10
    assert (gradient - plain_gradient).norm() < tolerance * plain_gradient.norm()


@pytest.mark.parametrize("name", by_default(["qwen3", "deepseek_v3", "gpt2", "falcon"], FAMILIES))
def test_families(name, monkeypatch):
    """Log-probs and gradients are those of plain rows; a family that cannot share says so."""
    monkeypatch.setattr(script, "load_hf_model", family(name))
    cfg = TrainConfig(compute_dtype="float32", beta=0.0)
    policy, inner = script.load_policy(cfg, torch.device("cpu"))
    reason = packing.why_not_shared(inner.hf_model, cfg)
    assert (reason is not None) == (name == "falcon"), reason
    if reason is None:
        assert_equal_to_plain_rows(policy, cfg, 1e-6)


@pytest.mark.parametrize("name", by_default(["gemma2", "mistral", "gpt_oss"], WINDOWED))
def test_windows(name, tmp_path):
    cfg = TrainConfig(model_id=str(saved(name, tmp_path)), compute_dtype="float32", beta=0.0)
    policy, inner = script.load_policy(cfg, torch.device("cpu"))
    assert packing.why_not_shared(inner.hf_model, cfg) is None
    assert 0 < max(layer.window for layer in reach.layers_of(inner.hf_model)) < 10
    assert_equal_to_plain_rows(policy, cfg, 2e-6)


SETTINGS = {
    "checkpointing": dict(gradient_checkpointing=True),
    "checkpointing, adapters": dict(gradient_checkpointing=True, use_peft=True),
    "bf16": dict(compute_dtype="bfloat16"),
    "flash-attn": dict(attn_implementation="flash_attention_2"),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings(settings, flash_attn, monkeypatch):
    monkeypatch.setattr(script, "load_hf_model", ragged.small_llama)
    cfg = TrainConfig(beta=0.0, **dict(compute_dtype="float32") | settings)
    policy, inner = script.load_policy(cfg, torch.device("cpu"))
    ragged.wake_adapters(inner)
    assert_equal_to_plain_rows(policy, cfg, 2e-2 if cfg.compute_dtype == "bfloat16" else 1e-6)
    assert bool(flash_attn) == (cfg.attn_implementation == "flash_attention_2")


# Two groups and a row of its own, segments of one token among them: prompts of 7, 2 and 4 tokens.
TABLE = torch.tensor(
    [[[[0, 7, 0, 0], [7, 8, 0, 7], [8, 13, 0, 7], [13, 16, 0, 7], [16, 18, 0, 0], [18, 24, 16, 18], [24, 28, 0, 0]]]]
)


def dense_mask(window: int = 0) -> torch.Tensor:
    """[28, 28]"""
    mask = torch.zeros(28, 28, dtype=torch.bool)
    for start, stop, first, end in TABLE[0, 0].tolist():
        seen = [*range(first, end), *range(start, stop)]  # as a plain row has them
        for place in range(start, stop):
            until = seen.index(place) + 1
            mask[place, seen[max(0, until - window) if window else 0 : until]] = True
    return mask


def drawn() -> list[torch.Tensor]:
    """query, key, value: four heads share two heads of keys"""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, 28, 8, generator=draw).requires_grad_() for heads in (4, 2, 2)]


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


@pytest.fixture
def flash_attn(monkeypatch):
    """In place of the package, what its documentation says of flash_attn_varlen_func; lengths of segments, by call."""
    calls = []

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0,
    ):  # fmt: skip
        assert causal and dropout_p == 0
        calls.append(cu_seqlens_q.diff().tolist())
        ends, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        return plain_varlen(q, k, v, *ends, *longest, scale=softmax_scale, window_size=window_size, enable_gqa=True)

    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *_, **__: (None, flash_attn_varlen_func, None, None, None))
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    return calls


@pytest.mark.parametrize("window", [0, 1, 3, 9])
@pytest.mark.parametrize("kernel", ["cpu", "gpu", "flash_attention_2"])
def test_equal_to_a_mask(kernel, window, flash_attn, monkeypatch):
    """Output and gradients are those of a dense mask, and no pair more is computed than it has entries."""
    monkeypatch.setattr(varlen, "varlen_attn", plain_varlen)
    layout = attention.layout_of(TABLE, window)
    in_one_call = partial(attention.attend_in_one_call, implementation="sdpa" if kernel == "gpu" else kernel)
    run = attention.Pieces.apply if kernel == "cpu" else in_one_call
    results = []
    for attend in (
        lambda q, k, v: run(q, k, v, None, layout, 0.3, None) if kernel == "cpu" else run(q, k, v, layout, 0.3),
        lambda q, k, v: scaled_dot_product_attention(q, k, v, dense_mask(window), scale=0.3, enable_gqa=True),
    ):
        tensors = drawn()
        out = attend(*tensors)
        out.backward(torch.cos(torch.arange(out.numel()).view(out.shape)))
        results.append([out, *(x.grad for x in tensors)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    sizes = [(q.count, q.size, k.size, in_order) for q, k, in_order in layout.pieces]
    pairs = sum(count * (n * (n + 1) // 2 if in_order else n * m) for count, n, m, in_order in sizes)
    assert pairs == dense_mask(window).sum()


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_sinks_and_capped_scores(window, cap):
    """Written out: a score is capped by tanh, and a sink is one more score of its head, whose value is 0."""
    results, ours, sinks = [], attention.attend_segments, torch.randn(4, generator=torch.Generator().manual_seed(1))

    def written_out(q, k, v, sinks):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = 0.3 * q @ k.transpose(-1, -2)
        scores = (cap * torch.tanh(scores / cap) if cap else scores).masked_fill(~dense_mask(window), -torch.inf)
        return torch.cat([scores, sinks.view(1, 4, 1, 1).expand(1, 4, 28, 1)], -1).softmax(-1)[..., :-1] @ v

    for attend in (
        lambda q, k, v, sinks: ours(q, k, v, TABLE, window, 0.3, "eager", sinks, cap).transpose(1, 2),
        written_out,
    ):
        tensors = [*drawn(), sinks.clone().requires_grad_()]
        out = attend(*tensors)
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
    following = inputs["input_ids"][rows, (columns + 1).clamp(max=length - 1)] == targets
    assert following.float().mean() > 0.8  # all but the first tokens of completions 2, 3, ...
    passes = packing.micro_batches(batch, replace(cfg, tokens_per_microbatch=length // 2 + 20))
    assert len(passes) == 2 and sorted(sum(passes, [])) == list(range(len(batch)))
    sizes = [packing.pack(batch.select(part), cfg)[0]["input_ids"].shape[1] for part in passes]
    assert sum(sizes) == length and max(sizes) <= length // 2 + 20
