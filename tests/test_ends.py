"""Where an answer begins and ends by its chat template: an end of turn that no file of the model names ends it, and
what the template has begun is part of what rewards and parsers read."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from server_fixture import make_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

import rollouts
from config import TrainConfig
from envs import ToolEnvironment
from hf_generator import HFGenerator
from inputs.prompts import begun_in, end_ids, prompt_ids
from inputs.trajectory import Trajectory
from rewards import completion_text, score
from scoring.answers import format_tags

pytestmark = pytest.mark.quick
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LAST = "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} "
LAST += "{{ eos_token }}{% endif %}{% endfor %}"
OPENS = CHATML.replace("assistant\n", "assistant\n<think>\n")
SHUT = OPENS.replace("{{ m.content }}", "{{ 'TAGS' if m.role == 'assistant' }}{{ m.content }}")


def tokenizer_of(template, eos="<|endoftext|>"):
    tokenizer = AutoTokenizer.from_pretrained(make_tiny())
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    return tokenizer


@pytest.fixture(scope="module")
def base():
    """A base model: its files name <|endoftext|> alone."""
    model = AutoModelForCausalLM.from_pretrained(make_tiny(), dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer_of(CHATML).eos_token_id
    return model


@pytest.mark.parametrize("template, names", [(CHATML, "<|im_end|>"), (LAST, ""), (None, ""), ("{{ messages }}", "")])
def test_the_end_of_a_turn_is_found_in_the_template(base, template, names):
    tokenizer = tokenizer_of(template)
    expected = {tokenizer.eos_token_id} | {tokenizer.convert_tokens_to_ids(name) for name in names.split()}
    assert end_ids(base, tokenizer) == expected


def test_sampling_ends_with_the_turn_and_the_end_is_trained(base, monkeypatch):
    tokenizer = tokenizer_of(CHATML)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    generator = HFGenerator(base, tokenizer)
    monkeypatch.setattr(generator, "_draw", lambda scores: torch.full((len(scores), 1), end))
    cfg = TrainConfig(num_generations=2, max_completion_length=8)
    for t in asyncio.run(rollouts.single_turn([{"prompt": "Hi"}], generator, cfg)):
        assert (t.token_ids, t.loss_mask, t.finish_reason, t.info["completion"]) == ([end], [1], "stop", "")


def test_ctrl_c_while_a_batch_is_sampled_is_no_error_of_it(base, monkeypatch):
    generator, tasks = HFGenerator(base, tokenizer_of(CHATML)), []
    draw = generator._draw
    monkeypatch.setattr(generator, "_draw", lambda scores: tasks[0].cancel() and draw(scores))

    async def sample() -> list:
        tasks[:] = [asyncio.create_task(generator.generate([5, 6], max_tokens=2)) for _ in range(2)]
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)

    cancelled, other = asyncio.run(sample())
    assert isinstance(cancelled, asyncio.CancelledError) and len(other[0].token_ids) <= 2
    monkeypatch.setattr(generator, "_draw", lambda scores: tasks[0].cancel() and 1 / 0)
    cancelled, other = asyncio.run(sample())
    assert isinstance(cancelled, asyncio.CancelledError) and isinstance(other, ZeroDivisionError)


@pytest.mark.parametrize(
    "template, begun",
    [
        (CHATML, ""),
        (OPENS, "<think>\n"),
        (OPENS.replace("<think>\n", "<think>\n\n</think>\n\n"), "<think>\n\n</think>\n\n"),
        (SHUT.replace("TAGS", "</think>"), "<think>\n"),
        (SHUT.replace("TAGS", "<think></think>"), "<think>\n"),
    ],
)
def test_what_a_template_begins_answers_with(template, begun):
    tokenizer = tokenizer_of(template)
    assert begun_in(prompt_ids({"prompt": "Why?"}, tokenizer, TrainConfig()), tokenizer, TrainConfig()) == begun


@pytest.mark.parametrize("chat", [True, False])
def test_rewards_see_what_the_prompt_has_begun(base, chat):
    tokenizer = tokenizer_of(OPENS)
    prompt = [{"role": "user", "content": "Why?"}] if chat else "Why?"
    row, cfg = {"prompt": prompt}, TrainConfig(reward_funcs=["format"], num_generations=2)
    ids = tokenizer("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\n")["input_ids"]
    seen = []

    def sees(completions, **columns):
        seen.extend(completions)
        return [0.0] * len(completions)

    def played(text):
        tokens = tokenizer(text)["input_ids"]
        zeros = [0.0] * len(tokens)
        return Trajectory(row, 0, ids, tokens, [1] * len(tokens), zeros, [*zeros], info={"completion": text})

    texts = ["because</think> <answer>so</answer>", "<think>because</think> <answer>so</answer>"]
    generator = SimpleNamespace(tokenizer=tokenizer)
    trajectories = rollouts.checked_rollout([played(text) for text in texts], row, generator, cfg)
    asyncio.run(score(trajectories, {"format": format_tags, "sees": sees}, cfg))
    assert [t.info["reward"] for t in trajectories] == [1, 0]
    assert completion_text(seen[0]) == "<think>\n" + texts[0] and (not chat or seen[0][0]["begun"] == "<think>\n")


def test_parsers_see_it_too():
    """A call within thinking that the prompt has begun is none, even where thinking is opened once more."""
    environment = ToolEnvironment.__new__(ToolEnvironment)
    environment.tools, environment.parser, environment.begun = {}, "hermes", "<think>\n"
    said = 'I could <tool_call>{"name": "f", "arguments": {}}</tool_call> <think> no </think> It is 3.'
    assert asyncio.run(environment.step(said)) == ([], 0.0, True, {"calls": []})
