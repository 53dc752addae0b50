"""Whatever is trained on, evaluated or used as a baseline was sampled by the weights that were pushed last."""

from dataclasses import replace

import pytest
import torch
from server_fixture import TINY, make_tiny
from steps import collected
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_grpo as script
import utils
from config import TrainConfig
from hf_generator import HFGenerator
from vllm_client import ServerError, VLLMClient

ROWS = [{"prompt": f"{n} + 1 ="} for n in range(4)]
CFG = TrainConfig(
    prompts_per_step=2, num_generations=2, max_completion_length=4, reward_funcs=["length"], eval_generations=2
)


def length(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


class Sampler(HFGenerator):
    """The tiny model. `versions(temperature)` says which weights its completions claim to come from, first and last."""

    def __init__(self, versions):
        model = AutoModelForCausalLM.from_pretrained(make_tiny())
        super().__init__(model, AutoTokenizer.from_pretrained(TINY))
        self.versions = versions

    async def generate(self, prompt_ids, **options):
        first, last = self.versions(options.get("temperature", 1.0))
        samples = await super().generate(prompt_ids, **options)
        return [replace(sample, policy_version=first, policy_version_last=last) for sample in samples]


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    utils.init_distributed(60)


def evaluated(versions, step):
    return script.evaluate(ROWS, Sampler(versions), {"length": length}, CFG, step)


@pytest.mark.parametrize("first, last", [(0, 0), (7, 8), (6, 7)])
def test_evaluation_refuses_other_weights(first, last):
    with pytest.raises(RuntimeError, match="4 of 4|2 of 2"):
        evaluated(lambda _: (first, last), 7)
    metrics, _ = evaluated(lambda _: (7, 7), 7)
    assert metrics["eval/rows"] == 4


def test_a_sampler_that_knows_no_last_version_is_believed():
    metrics, _ = evaluated(lambda _: (7, None), 7)
    assert metrics["eval/rows"] == 4


def test_greedy_baselines_are_checked_too():
    cfg = replace(CFG, advantage="remax")
    sampler = script.PromptSampler(len(ROWS), 2, seed=0)
    generator = Sampler(lambda temperature: (3, 3) if temperature else (2, 2))
    with pytest.raises(RuntimeError, match="1 of 1 completions come from weights 2, not 3"):
        collected(ROWS, sampler, 3, generator, {"length": length}, cfg)


def pushed(server, version: int, shift: float = 0.0) -> VLLMClient:
    """A trainer that has sent the tiny model to the server, every weight shifted."""
    client = VLLMClient([server.url], server.token)
    client.wait_ready()
    client.tokenizer, client.rope_index = AutoTokenizer.from_pretrained(TINY), None
    client.connect_weights("cpu")
    with torch.no_grad():
        named = [(n, p + shift) for n, p in AutoModelForCausalLM.from_pretrained(TINY).named_parameters()]
    client.begin_push()
    client.send_bucket(named)
    client.finish_push(version)
    return client


def test_equal_numbers_of_another_trainer_are_no_equal_weights(server):
    """Two trainers at the same step push to one server: the version alone cannot tell."""
    mine = pushed(server, 3)
    assert script.evaluate(ROWS, mine, {"length": length}, CFG, 3)[0]["eval/rows"] == 4
    other = pushed(server, 3, shift=0.01)
    with pytest.raises(ServerError, match="was started anew, or another trainer has connected"):
        script.evaluate(ROWS, mine, {"length": length}, CFG, 3)
    other.close()
    mine.close()
