"""Router replay: experts as the generator chose them, with the layer's own scores and their gradient."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from ragged import local_batch
from test_attention import logprobs_and_gradient
from tiers import by_default
from transformers import AutoConfig, AutoModelForCausalLM

import hf_generator
import train_grpo as script
from config import ConfigError, TrainConfig
from inputs import trajectory as experts
from inputs.trajectory import Completion
from modeling import packing, router_replay

SHAPE = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4)
SMALL = dict(num_experts_per_tok=2, moe_intermediate_size=16)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, head_dim=8)
GROUPED = dict(n_routed_experts=8, n_group=2, topk_group=2, first_k_dense_replace=1)
FAMILIES = {
    "qwen3_moe": SMALL | dict(num_experts=8, head_dim=8, mlp_only_layers=[1]),
    "mixtral": dict(num_local_experts=8, num_experts_per_tok=2),
    "gpt_oss": dict(num_local_experts=8, num_experts_per_tok=2, head_dim=8, layer_types=["full_attention"] * 3),
    "deepseek_v3": SMALL | GROUPED | LATENT,
}


def made(name: str, dtype=torch.float32):
    torch.manual_seed(0)
    options = dict(vocab_size=1000, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = AutoConfig.for_model(name, **options | SHAPE | FAMILIES[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if name == "gpt_oss" else "sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)  # experts that differ
    return model.to(dtype).eval()


def random_choice(tokens: int, layers: int = 3) -> torch.Tensor:
    return torch.rand(tokens, layers, 8).argsort(-1)[..., :2].short()


def shared_choice(batch) -> torch.Tensor:
    rows, length = batch.input_ids.shape
    choice = random_choice(rows * length).view(rows, length, 3, 2)
    for members in packing.sharing(batch):  # a shared prompt went through its experts once
        prefix = packing.shared_prefix(batch, members)
        choice[members, :prefix] = choice[members[0], :prefix]
    return choice


@pytest.mark.parametrize("name", by_default(["qwen3_moe", "gpt_oss", "deepseek_v3"], FAMILIES))
@torch.no_grad()
def test_a_layer_takes_the_given_experts_and_no_others(name):
    """Own choices replayed change nothing; others are what the layers then note; -1 leaves the choice to them."""
    model = made(name)
    ids = torch.randint(3, 1000, (2, 9))
    plain = model(ids, use_cache=False).logits
    routes = router_replay.Routing(model)
    with routes.noting() as noted:
        assert torch.equal(model(ids, use_cache=False).logits, plain)
    own = routes.stacked_choices(noted)
    assert own.shape == (18, 3, 2) and {0, 1, 2} >= set(noted) >= {2}
    routes.choice = own
    assert torch.equal(model(ids, use_cache=False).logits, plain)
    assert routes.replay_counts().tolist() == [18 * len(noted), 0]
    other = random_choice(18)
    other[:9] = own[:9]  # of the second row alone
    routes.choice = other
    moved = model(ids, use_cache=False).logits
    assert torch.allclose(moved[0], plain[0], atol=1e-5) and (moved[1] - plain[1]).abs().max() > 1e-2
    assert routes.replay_counts()[1] > 9
    routes.choice = torch.full_like(other, -1)
    assert torch.equal(model(ids, use_cache=False).logits, plain) and routes.replay_counts().tolist() == [0, 0]


def test_weights_and_gradient_are_of_the_layers_own_scores():
    """Against Qwen3's router written out: softmax over all, gathered at the given experts, normalised."""
    model = made("qwen3_moe")
    routes, ids, given = router_replay.Routing(model), torch.randint(3, 1000, (1, 7)), random_choice(7)
    routes.choice = given
    model(ids, use_cache=False).logits.square().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    routes.choice = None
    for number, layer in enumerate(model.model.layers):
        if gate := getattr(layer.mlp, "gate", None):

            def forward(hidden, gate=gate, number=number):
                hidden = hidden.reshape(-1, 32)
                logits = hidden @ gate.weight.T
                at = given[:, number].long()
                weights = logits.softmax(-1).gather(1, at)
                return logits, weights / (weights.sum(1, keepdim=True) if gate.norm_topk_prob else 1), at

            gate.forward = forward
    model(ids, use_cache=False).logits.square().sum().backward()
    for name, p in model.named_parameters():
        assert torch.allclose(found[name], p.grad, rtol=1e-4, atol=1e-5 * float(p.grad.abs().max())), name
    assert found["model.layers.0.mlp.gate.weight"].abs().max() > 0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_cut_replays_the_same(checkpointing, monkeypatch):
    """Plain rows, shared prompts, micro-batches: one choice for each token; padding and the blank have none."""
    monkeypatch.setattr(script, "load_hf_model", lambda cfg, dtype, **_: made("qwen3_moe", dtype))
    cfg = TrainConfig(compute_dtype="float32", gradient_checkpointing=checkpointing)
    policy = script.load_policy(cfg, torch.device("cpu"))
    batch = local_batch(0, 1)
    own = logprobs_and_gradient(policy, batch, cfg)
    batch.routed_experts = shared_choice(batch)
    logprobs, gradient = logprobs_and_gradient(policy, batch, replace(cfg, shared_prefix=False))
    assert (logprobs - own[0]).abs().max() > 1e-2
    shared = logprobs_and_gradient(policy, batch, cfg)
    assert (shared[0] - logprobs).abs().max() < 1e-4
    assert (shared[1] - gradient).norm() < 1e-4 * gradient.norm()
    policy.zero_grad()
    parts = []
    for row in range(len(batch)):  # each by itself
        part = batch.select([row])
        found = script.compute_logprobs(policy, part, cfg)["logprobs"]
        (found * torch.sin(part.input_ids.float())).sum().backward()
        parts.append(found[0].detach())
    alone = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]).double()
    assert (alone - gradient).norm() < 1e-4 * gradient.norm()
    assert all((found - logprobs[row, : len(found)]).abs().max() < 1e-4 for row, found in enumerate(parts))


def test_generator_tells_what_its_tokens_went_through(monkeypatch):
    """Of each token but the last, in every layer; -1 where a layer has no experts."""
    monkeypatch.setattr(script, "load_hf_model", lambda cfg, dtype, **_: made("qwen3_moe", dtype))
    generator = hf_generator.HFGenerator(made("qwen3_moe", torch.bfloat16), SimpleNamespace(eos_token_id=2))
    cfg = TrainConfig(generator="hf", compute_dtype="float32")
    router_replay.ask(generator, generator.model, cfg)

    async def sampled():
        calls = (generator.generate(list(range(5, 9 + n)), n=3, max_tokens=20) for n in range(3))
        return sum(await asyncio.gather(*calls), [])

    completions = asyncio.run(sampled())
    for completion in completions:
        assert completion.routed_experts.shape == (len(completion.prompt_ids + completion.token_ids) - 1, 3, 2)
        assert (completion.routed_experts[:, 1] == -1).all() and (completion.routed_experts[:, 2] >= 0).all()


# ---- experts evenly used ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_balancing_is_transformers_loss(name, checkpointing, monkeypatch):
    """Gradient of an update in one pass, with the experts' own choice."""
    monkeypatch.setattr(script, "load_hf_model", lambda cfg, dtype, **_: made(name, dtype))
    cfg = TrainConfig(compute_dtype="float32", gradient_checkpointing=checkpointing, router_aux_coef=0.3, beta=0.0)
    cfg = replace(cfg, shared_prefix=False)
    policy = script.load_policy(cfg, torch.device("cpu"))
    inner = script.unwrapped(policy)
    batch = local_batch(0, 1)
    batch.advantages = torch.zeros_like(batch.advantages)
    sums = script.accumulate_gradients(policy, batch, cfg)
    found = {name: p.grad.clone() for name, p in inner.hf_model.named_parameters() if p.grad is not None}
    policy.zero_grad()
    mask, model = batch.attention_mask.long(), inner.hf_model
    out = model(batch.input_ids, attention_mask=mask, output_router_logits=True, use_cache=False)
    (0.3 * out.aux_loss).backward()
    assert float(sums["routing/aux_loss"] / sums["tokens"]) == pytest.approx(out.aux_loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert (found[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm() + 1e-7, name


# ---- on the way ------------------------------------------------------------------------------------------------------


def completion(prompt: int, tokens: int, choice) -> Completion:
    return Completion([5] * tokens, [-1.0] * tokens, "stop", 0, [6] * prompt, routed_experts=choice)


def test_a_turn_keeps_the_experts_it_was_sampled_with():
    first, second = (random_choice(n).numpy() for n in (6, 11))
    known = experts.joined_experts(None, completion(4, 3, first))
    assert known.shape == (7, 3, 2) and (known[:6] == first).all() and (known[6] == -1).all()
    both = experts.joined_experts(known, completion(9, 3, second))
    assert (both[:6] == first).all() and (both[6:11] == second[6:]).all() and (both[11] == -1).all()
    assert experts.joined_experts(known, completion(9, 3, None)) is None


def test_asked_for_what_nobody_can_tell():
    server = SimpleNamespace(can_tell_experts=lambda: False)
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=1000, **SHAPE))
    for model, message in ((made("mixtral"), "does not tell its experts"), (dense, "the model has no experts")):
        with pytest.raises(ConfigError, match=message):
            router_replay.ask(server, model, TrainConfig(router_replay="on"))
    server.can_tell_experts = lambda: True
    for model, wanted, told in ((made("mixtral"), "auto", 1), (made("mixtral"), "off", 0), (dense, "auto", 0)):
        router_replay.ask(server, model, TrainConfig(router_replay=wanted))
        assert server.tells_experts == bool(told)
