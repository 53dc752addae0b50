"""A server of several engines (data parallel): all of them are asked what arrived.

Experts divided over engines cannot compute on CPUs: vLLM's all-to-all is not implemented there. So a live server of two
engines has a dense model, and reports on experts are merged here, as engines with half of them each would send them.
"""

import asyncio

import pytest
import torch
from families import saved
from server_fixture import make_tiny, start_server
from transformers import AutoModelForCausalLM

from inputs.parameters import as_in_a_checkpoint
from vllm_client import ServerError, VLLMClient

pytestmark = pytest.mark.slow

PROMPT = list(range(100, 140))


def push(client: VLLMClient, named: list, version: int) -> None:
    client.begin_push()
    client.send_bucket(named)
    client.finish_push(version)


@torch.no_grad()
def move(model) -> None:
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)


@torch.no_grad()
def check_logprobs(client: VLLMClient, model, version: int, tolerance: float = 1e-4) -> None:
    async def several():  # of two engines each has some
        return await asyncio.gather(*(client.generate(PROMPT, max_tokens=8) for _ in range(8)))

    for (one,) in asyncio.run(several()):
        ids = torch.tensor([PROMPT + one.token_ids])
        logprobs = model(ids).logits[0].log_softmax(-1)[len(PROMPT) - 1 : -1]
        expected = logprobs.gather(-1, ids[0, len(PROMPT) :, None])[:, 0]
        assert torch.allclose(expected, torch.tensor(one.logprobs), atol=tolerance) and one.policy_version == version


def test_weights_of_a_mixture_arrive_as_they_were_sent(tmp_path):
    """What vLLM's reload on CPUs would lose: the order in which their kernel reads experts."""
    folder = saved("qwen3_moe", tmp_path, hidden_size=128, head_dim=32, moe_intermediate_size=64)
    live = start_server(folder, "--dtype", "float32", "--max-model-len", "256")
    try:
        live.wait(400)
        client = VLLMClient([live.url], live.token, timeout=60)
        client.connect_weights("cpu")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for version in (1, 2):
            push(client, as_in_a_checkpoint(model, list(model.named_parameters())), version)
            check_logprobs(client, model, version)
            move(model)
        client.close()
    finally:
        live.stop()


def test_two_engines_take_a_push():
    live = start_server(make_tiny(), "--dtype", "float32", "--max-model-len", "256", "--data-parallel-size", "2")
    try:
        live.wait(400)
        client = VLLMClient([live.url], live.token, timeout=60)
        (info,) = client.server_info()
        assert info.world_size == 2
        client.connect_weights("cpu")
        model = AutoModelForCausalLM.from_pretrained(make_tiny(), dtype=torch.float32)
        move(model)
        named = list(model.named_parameters())
        push(client, named, 3)
        check_logprobs(client, model, 3)
        client.begin_push()
        client.send_bucket(named[:-1])
        with pytest.raises(ServerError, match="left out weights"):
            client.finish_push(4)
        client.close()
    finally:
        live.stop()
