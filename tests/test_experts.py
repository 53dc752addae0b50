"""A server of several workers or engines (tensor, data parallel): all of them get what is pushed.

Experts divided over engines cannot compute on CPUs: vLLM's all-to-all is not implemented there. So a live server of two
engines has a dense model, and reports on experts are merged here, as engines with half of them each would send them.
"""

import asyncio

import pytest
import torch
from families import saved
from server_fixture import make_tiny, start_server
from test_server import logprobs, moved, push
from transformers import AutoModelForCausalLM

from modeling.parameters import as_in_a_checkpoint
from vllm_client import ServerError, VLLMClient

pytestmark = pytest.mark.slow

PROMPT = list(range(100, 140))


def check_logprobs(client: VLLMClient, model, version: int) -> None:
    async def several():  # of two engines each has some
        return await asyncio.gather(*(client.generate(PROMPT, max_tokens=8) for _ in range(8)))

    for (one,) in asyncio.run(several()):
        apart = (logprobs(model, one) - torch.tensor(one.logprobs)).abs().max()
        assert apart < 1e-4 and one.policy_version == version


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
            model = moved(model, version)
        client.close()
    finally:
        live.stop()


@pytest.mark.parametrize("two", ["-dp 2", "-tp 2 --distributed-executor-backend mp"])
def test_two_workers_take_a_push(two):
    flags = f"--dtype float32 --max-model-len 256 {two}".split()
    live = start_server(make_tiny(), *flags, VLLM_CPU_OMP_THREADS_BIND="0|1")
    try:
        live.wait(400)
        client = VLLMClient([live.url], live.token, timeout=60)
        (info,) = client.server_info()
        assert info.world_size == 2
        client.connect_weights("cpu")
        model = moved(AutoModelForCausalLM.from_pretrained(make_tiny(), dtype=torch.float32), 3)
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
