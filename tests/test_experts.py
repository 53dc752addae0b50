"""A server of several engines (data parallel): all of them are asked what arrived.

Experts divided over engines cannot compute on CPUs: vLLM's all-to-all is not implemented there. So a live server of two
engines has a dense model, and reports on experts are merged here, as engines with half of them each would send them.
"""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from families import saved
from server_fixture import make_tiny, start_server
from transformers import AutoModelForCausalLM
from vllm.v1.engine.core_client import AsyncMPClient

from serving.transfer import ask_workers, check_coverage
from utils import as_in_a_checkpoint
from vllm_client import ServerError, VLLMClient

pytestmark = pytest.mark.in_turn

PROMPT = list(range(100, 140))
SENT = {"norm": 8, "experts.0.up": 64, "experts.1.up": 64}


def report(taken: dict, missing=(), sliced=False) -> dict:
    return {"sent": SENT, "taken": taken, "missing": list(missing), "checksum": 1, "sliced": sliced}


def covered(*engines: list[dict]) -> None:
    """`check_coverage` of what vLLM's own client collects from these engines."""

    async def answer(method, *args, engine):
        assert (method, args[0]) == ("collective_rpc", "report_weight_update")
        return engines[engine]

    core = SimpleNamespace(core_engines=range(len(engines)), _call_utility_async=answer)
    core.call_utility_all_async = lambda *args: AsyncMPClient.call_utility_all_async(core, *args)
    check_coverage(asyncio.run(ask_workers(SimpleNamespace(engine_core=core), "report_weight_update")))


def test_experts_are_found_on_the_engine_that_has_them():
    first, second = report({"norm": 8, "experts.0.up": 64}), report({"norm": 8, "experts.1.up": 64})
    covered([first], [second])
    with pytest.raises(ValueError, match=r"unknown to the server's model: experts\.1\.up$"):
        covered([first], [report({"norm": 8})])
    with pytest.raises(ValueError, match=r"missing: experts\.1\.up$"):
        covered([first], [report({"norm": 8, "experts.1.up": 64}, missing=["experts.1.up"])])


def test_slices_of_experts_add_up_over_engines_and_copies_do_not():
    half = report({"norm": 8, "experts.0.up": 32, "experts.1.up": 32}, sliced=True)
    covered([half], [half])
    too_large = report({"norm": 4, "experts.0.up": 64, "experts.1.up": 64})  # of each copy, half of what was sent
    with pytest.raises(ValueError, match=r"larger than the server's: norm$"):
        covered([too_large], [too_large])


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


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_moe", dict(hidden_size=128, head_dim=32, moe_intermediate_size=64)),
        ("gpt_oss", dict(hidden_size=128, head_dim=32, intermediate_size=128)),
        ("apertus", dict(hidden_size=128, intermediate_size=128)),
        ("phi", dict(hidden_size=128)),
        ("lfm2_moe", dict(hidden_size=128, moe_intermediate_size=64)),
    ],
)
def test_weights_arrive_as_they_were_sent(family, sizes, tmp_path):
    """What vLLM's reload loses: the order in which CPUs' kernel reads experts (pushing the weights that were there
    moved log-probs by .57 to 1.04); experts and sinks that gpt-oss copies without a loader; the constants of Apertus'
    activation, which are buffers that no trainer sends (.27); the bias of Phi's output layer, which vLLM makes anew
    each time. And LFM2's rotary embeddings, which vLLM's kernel computes wrongly (serving/kernels.py)."""
    folder = saved(family, tmp_path, **sizes)
    live = start_server(folder, "--dtype", "float32", "--max-model-len", "256")
    try:
        live.wait(400)
        client = VLLMClient([live.url], live.token, timeout=60)
        client.connect_weights("cpu")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for version in (1, 2):
            push(client, as_in_a_checkpoint(model, list(model.named_parameters())), version)
            check_logprobs(client, model, version, 1e-4 if family != "apertus" else 5e-3)  # whose activation is in bf16
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
        assert info["world_size"] == 2 and info["devices"] == ["cpu", "cpu"]
        client.connect_weights("cpu")
        model = AutoModelForCausalLM.from_pretrained(make_tiny(), dtype=torch.float32)
        move(model)
        named = list(model.named_parameters())
        push(client, named, 3)
        check_logprobs(client, model, 3)
        client.begin_push()
        client.send_bucket(named[:-1])
        with pytest.raises(ServerError, match="missing"):
            client.finish_push(4)
        client.close()
    finally:
        live.stop()
