"""A mixture of experts on two engines (data parallel), each with half of the experts: a live server."""

import asyncio

import pytest
import torch
from safetensors.torch import load_file
from server_fixture import make_tiny, start_server
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from vllm_client import ServerError, VLLMClient

PROMPT = list(range(100, 140))


def make_experts(folder):
    """A tiny random Qwen3-MoE of eight experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
        max_position_embeddings=512,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    AutoTokenizer.from_pretrained(make_tiny()).save_pretrained(folder)
    return folder


def test_experts_on_two_engines_take_a_push(tmp_path):
    """Every expert is found on the engine that has it; one that is on none of them is named."""
    folder = make_experts(tmp_path)
    flags = "--dtype float32 --max-model-len 256 --data-parallel-size 2 --enable-expert-parallel".split()
    live = start_server(folder, *flags)
    try:
        live.wait(400)
        client = VLLMClient([live.url], live.token, timeout=60)
        client.wait_ready(10)
        (info,) = client.server_info()
        assert info["world_size"] == 2 and info["devices"] == ["cpu", "cpu"]
        client.connect_weights("cpu")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * parameter.std(correction=0) / 2)
        model.save_pretrained(tmp_path / "edited")
        named = list(load_file(tmp_path / "edited" / "model.safetensors").items())  # names as published
        client.begin_push()
        client.send_bucket(named)
        client.finish_push(3)
        samples = asyncio.run(client.generate(PROMPT, n=8, max_tokens=8))  # on both engines
        for one in samples:
            ids = torch.tensor([one.prompt_ids + one.token_ids])
            with torch.no_grad():
                logprobs = model(ids).logits[0].log_softmax(-1)[len(PROMPT) - 1 : -1]
            expected = logprobs.gather(-1, torch.tensor(one.token_ids)[:, None])[:, 0]
            assert torch.allclose(expected, torch.tensor(one.logprobs), atol=1e-3)
            assert one.policy_version == 3
        client.begin_push()
        client.send_bucket([(n, t) for n, t in named if "layers.1.mlp.experts.7.up_proj" not in n])
        with pytest.raises(ServerError, match=r"missing: .*layers\.1\.mlp.*experts"):
            client.finish_push(4)
        client.close()
    finally:
        live.stop()
