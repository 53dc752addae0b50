"""Several turns: what was sampled is trained on token by token, what was answered never; nothing waits for others."""

import asyncio
import gc
import http.server
import json
import math
import random
import re
import threading
import time
import weakref
from pathlib import Path
from typing import Literal

import numpy
import pytest
import tiny_vlms
import torch
from server_fixture import make_tiny
from transformers import AutoTokenizer

import rewards
import train_grpo as script
from config import ConfigError, TrainConfig
from data import load_data
from envs import Environment, FrozenLake, ToolEnvironment, adapters
from envs.calls import call_environment
from envs.mcp_tools import get_tools
from envs.tools import PARSERS, Call, Tool, Toolbox, agent_tool, as_content, from_function, model_tool
from inputs import packing
from inputs.processor import load_processor
from rollouts import TrajectoryError, check_rollout, measure, multi_turn, play
from runlog.log import shown_turn
from vllm_client import Completion

pytestmark = pytest.mark.quick

TEMPLATES = Path(__file__).parent / "templates"
ENDS = {"smollm2": "<|im_end|>", "qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>"}


def tokenizer_of(template: str):
    tokenizer = AutoTokenizer.from_pretrained(make_tiny())
    names = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", ENDS[template]
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return tokenizer


class Scripted:
    """A sampler that says given turns, each in odd pieces as a model may spell it, and remembers what it was asked."""

    rope_index = None

    def __init__(self, tokenizer, turns: list[str], delays=None):
        self.tokenizer, self.turns, self.said, self.delays = tokenizer, turns, [], delays

    async def generate(self, sent, *, n, max_tokens, min_tokens=0, **options):
        assert min_tokens <= max_tokens, "a server refuses that"
        number = sum(1 for ids in self.said if sent[: len(ids["sent"])] == ids["sent"])
        text = self.turns[min(number, len(self.turns) - 1)]
        pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
        ids = [i for piece in pieces for i in self.tokenizer(piece, add_special_tokens=False)["input_ids"]]
        ids.append(self.tokenizer.eos_token_id)
        reason = "stop" if len(ids) <= max_tokens else "length"
        ids = ids[:max_tokens]
        self.said.append({"sent": sent, "ids": ids})
        if self.delays:
            await asyncio.sleep(self.delays.random() / 20)
        return [Completion(ids, [-0.5 - i for i in range(len(ids))], reason, 3, list(sent))]


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def config(**settings) -> TrainConfig:
    settings = dict(tools=["calculator"], max_completion_length=400, num_generations=1) | settings
    return TrainConfig(**settings)


CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
TURNS = [f"Let me see. {CALL}", CALL + CALL, "It is 5."]


def tool_environment(cfg, *functions) -> ToolEnvironment:
    tools = [f if isinstance(f, Tool) else from_function(f) for f in functions or (add,)]
    return ToolEnvironment(Toolbox({tool.name: tool for tool in tools}, cfg), cfg)


@pytest.mark.parametrize("template", ENDS)
def test_tokens_are_the_samplers_and_the_templates(template):
    """Under four kinds of templates: spans with mask 1 are what was sampled, id for id, and everything together is what
    the template writes for the whole conversation."""
    tokenizer, cfg = tokenizer_of(template), config(tokenization_check="strict")
    sampler = Scripted(tokenizer, TURNS)
    t = asyncio.run(play({"prompt": "What is 2 + 3?"}, 0, tool_environment(cfg), sampler, cfg))
    assert t.turns == 3 and t.finish_reason == "stop" and t.policy_version == 3
    spans, position = [], 0
    while position < len(t.token_ids):
        end = position
        while end < len(t.token_ids) and t.loss_mask[end] == t.loss_mask[position]:
            end += 1
        spans.append((t.loss_mask[position], t.token_ids[position:end], t.logprobs[position:end]))
        position = end
    assert [mask for mask, _, _ in spans] == [1, 0, 1, 0, 1]
    assert [ids for mask, ids, _ in spans if mask] == [turn["ids"] for turn in sampler.said]
    assert all(lp == 0 for mask, _, lps in spans if not mask for lp in lps)
    assert [lps[0] for mask, _, lps in spans if mask] == [-0.5, -0.5, -0.5]
    text = tokenizer.decode(t.prompt_ids + t.token_ids)
    assert text.count("5") >= 4 and "add" in text  # three results, the answer; the tool is described
    assert [m["role"] for m in t.info["messages"]] == ["assistant", "tool", "assistant", "tool", "tool", "assistant"]


@pytest.mark.parametrize("template", ["smollm2", "qwen2_5"])  # one writes no tools: the system message does
def test_the_system_prompt_stays_beside_tools(template):
    tokenizer, said = tokenizer_of(template), "Be brief and look it up."
    rows = [{"prompt": "?"}, {"prompt": [{"role": "user", "content": "?"}]}]
    for row in [*rows, {"prompt": [{"role": "system", "content": "The row's own."}, *rows[1]["prompt"]]}]:
        cfg = config(system_prompt=said)
        t = asyncio.run(play(row, 0, tool_environment(cfg), Scripted(tokenizer, ["5"]), cfg))
        text = tokenizer.decode(t.prompt_ids)
        assert text.count("add") >= 1 and text.count("<|im_start|>system") == 1
        first = "The row's own." if "row's own" in str(row) else said
        assert text.count(first) == 1 and text.index(first) < text.index("add")


def test_thinking_of_earlier_turns_stays(caplog, monkeypatch):
    """Qwen3's template takes it out of what came before; the model saw it, so it is trained on."""
    monkeypatch.setattr("safety.limits._WARNED", set())  # another test may have been warned of it
    tokenizer, cfg = tokenizer_of("qwen3"), config()
    turns = [f"<think>\nHm.\n</think>\n\n{CALL}", "It is 5."]
    t = asyncio.run(play({"prompt": "?"}, 0, tool_environment(cfg), Scripted(tokenizer, turns), cfg))
    assert "where the chat template writes" in caplog.text
    strict = config(tokenization_check="strict")
    with pytest.raises(RuntimeError, match="a trajectory reads .*Hm"):
        asyncio.run(play({"prompt": "?"}, 0, tool_environment(strict), Scripted(tokenizer, turns), strict))
    assert tokenizer.decode(t.token_ids).count("Hm.") == 1
    assert "<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n" in tokenizer.decode(t.token_ids)


def test_a_template_without_a_role_for_tools():
    tokenizer, cfg = tokenizer_of("smollm2"), config()
    refuses = "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('what?') }}{% endif %}{% endfor %}"
    tokenizer.chat_template = refuses + tokenizer.chat_template
    t = asyncio.run(play({"prompt": "?"}, 0, tool_environment(cfg), Scripted(tokenizer, [CALL, "It is 5."]), cfg))
    assert "<|im_start|>user\n5<|im_end|>\n<|im_start|>assistant\n" in tokenizer.decode(t.token_ids)


def test_a_template_whose_roles_have_to_alternate():
    """Two results of one turn are one message; a prompt that begins the answer is no fault of the template's."""
    tokenizer, cfg = tokenizer_of("smollm2"), config(tokenization_check="strict")
    rule = "{% for m in messages %}{% if m['role'] == 'tool' or (not loop.first and m['role'] == last.role) %}"
    rule = "{% set last = namespace(role='') %}" + rule + "{{ raise_exception('what?') }}{% endif %}"
    tokenizer.chat_template = rule + "{% set last.role = m['role'] %}{% endfor %}" + tokenizer.chat_template
    t = asyncio.run(play({"prompt": "?"}, 0, tool_environment(cfg), Scripted(tokenizer, [CALL * 2, "5."]), cfg))
    assert "<|im_start|>user\n5\n\n5<|im_end|>\n<|im_start|>assistant\n" in tokenizer.decode(t.token_ids)
    begun = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Let me"}]
    t = asyncio.run(
        play({"prompt": begun}, 0, tool_environment(cfg), Scripted(tokenizer, [f" see. {CALL}", "5."]), cfg)
    )
    assert tokenizer.decode(t.prompt_ids + t.token_ids).count("<|im_start|>assistant\nLet me see. <tool_call>") == 1


def test_an_environment_without_tools_announces_none():
    """Mistral's template writes the list of tools before the last message of a user, if there is a list."""

    class Talker(Environment):
        def reset(self, row, seed):
            return "Begin."

        def step(self, text):
            return "Go on.", 0.0, False, {}

    tokenizer, cfg = tokenizer_of("smollm2"), config(env="x", tools=[], max_turns=2, tokenization_check="strict")
    announced = "{% if tools is not none and message.role == 'user' %}[TOOLS]{{ tools }}{% endif %}"
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% endif %}<|im_start|>", f"{{% endif %}}{announced}<|im_start|>"
    )
    t = asyncio.run(play({"prompt": "?"}, 0, Talker(), Scripted(tokenizer, ["One.", "Two."]), cfg))
    assert "[TOOLS]" not in tokenizer.decode(t.prompt_ids + t.token_ids)


def test_an_environment_that_answers_nothing():
    class Silent(Environment):
        def reset(self, row, seed):
            return "Begin."

        def step(self, text):
            return [], 0.0, False, {}

    cfg = config(env="x", max_turns=3, tokenization_check="strict")
    t = asyncio.run(play({"prompt": "?"}, 0, Silent(), Scripted(tokenizer_of("qwen2_5"), ["One.", "Two."]), cfg))
    assert t.turns == 3 and sum(t.loss_mask) < len(t.loss_mask)


def test_a_turn_has_no_more_tokens_at_least_than_at_most():
    cfg = config(min_completion_length=50, max_turn_length=40)
    asyncio.run(play({"prompt": "?"}, 0, tool_environment(cfg), Scripted(tokenizer_of("smollm2"), ["5."]), cfg))


def test_an_answer_within_a_call_is_no_answer():
    cfg = config()
    said = '<tool_call>{"name": "submit", "arguments": {"text": "<answer>5</answer>"}}</tool_call>'
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    environment = tool_environment(cfg, Tool("submit", "", schema, lambda text: "Thanks."))
    environment.reset({"prompt": "?"}, 0)
    messages, _, done, _ = asyncio.run(environment.step(said))
    assert messages[0]["content"] == "Thanks." and not done
    assert asyncio.run(environment.step(said + "<answer>5</answer>"))[2]


THOUGHT = [
    ("<think>\nThe call goes within <tool_call></tool_call> tags.\n</think>\n\n" + CALL, 1),
    ("<think>\nNow a <tool_call> tag.\n</think>\n\n" + CALL, 1),
    ("<think>\nAt the end <answer>...</answer>, but first the tool.\n</think>\n\n" + CALL, 1),
    ("The prompt has begun this: <tool_call></tool_call>.\n</think>\n\n" + CALL, 1),
    (f"<think>\nI could say {CALL}, but I know it.\n</think>\n\nIt is 5.", 0),
    (f"<think>\nA.\n</think>{CALL}<think>\nB.\n</think>", 1),  # as of models that think between their calls
    (f"<think>\nThis has no end. {CALL}", 1),
    ("<|channel|>analysis<|message|>At the end <answer>...</answer>.<|end|><|start|>assistant" + CALL, 1),
]


@pytest.mark.parametrize("said, count", THOUGHT)
def test_what_is_thought_is_neither_a_call_nor_an_answer(said, count):
    """A template that describes tools names their tags, and thinking repeats them."""
    cfg = config()
    t = asyncio.run(
        play({"prompt": "?"}, 0, tool_environment(cfg), Scripted(tokenizer_of("qwen3"), [said, "It is 5."]), cfg)
    )
    calls = t.info["turns"][0]["info"]["calls"]
    assert [(call["name"], call["result"]) for call in calls] == [("add", "5")] * count
    assert t.turns == 1 + count and t.info["turns"][0]["text"] == said


def test_what_does_not_fit_is_left_out():
    """An answer beyond the budget ends the trajectory before it; a turn cut by its length ends it, too."""
    tokenizer = tokenizer_of("qwen2_5")

    def long(a: int) -> str:
        """Talks.

        Args:
            a: a number
        """
        return "word " * 500

    turns = ['<tool_call>{"name": "long", "arguments": {"a": 2}}</tool_call>', "Never said."]
    cfg = config(max_completion_length=100)
    sampler = Scripted(tokenizer, turns)
    t = asyncio.run(play({"prompt": "?"}, 0, tool_environment(cfg, long), sampler, cfg))
    assert t.finish_reason == "length" and t.turns == 1 and set(t.loss_mask) == {1} and len(sampler.said) == 1
    cut = config(max_turn_length=5)
    t = asyncio.run(play({"prompt": "?"}, 0, tool_environment(cut, long), Scripted(tokenizer, turns), cut))
    assert t.finish_reason == "length" and len(t.token_ids) == 5
    few = config(max_turns=2, max_tool_result=20)
    t = asyncio.run(play({"prompt": "?"}, 0, tool_environment(few, long), Scripted(tokenizer, turns[:1]), few))
    assert t.turns == 2 and t.finish_reason == "stop" and t.loss_mask[-1] == 1
    assert "word word word word ... (2480 more characters)" in tokenizer.decode(t.token_ids)


class Secret(Environment):
    """Each object has a secret of its own and says it, after a while of its own."""

    def reset(self, row, seed):
        self.secret, self.random, self.turn = random.random(), random.Random(), 0
        return [{"role": "user", "content": "Ask."}]

    async def step(self, text):
        await asyncio.sleep(self.random.random() / 20)
        self.turn += 1
        return [{"role": "user", "content": f"secret {self.secret}"}], self.turn / 10, False, {"asked": 1.0}

    def score(self):
        return 1.0

    def metrics(self):
        return {"secret": self.secret}


def test_answers_reach_whom_they_are_for_and_rewards_their_turns():
    """Sixteen at the same time, in any order; rewards stand at the end of each turn, the score at the last."""
    tokenizer = tokenizer_of("qwen2_5")
    cfg = config(env="x", max_turns=3, num_generations=8, reward_funcs=["environment"], reward_weights=[2.0])
    sampler = Scripted(tokenizer, ["More."], delays=random.Random(0))
    rows = [{"prompt": "a"}, {"prompt": "b"}]

    async def run():
        tasks = [play(row, group, Secret(), sampler, cfg) for group, row in enumerate(rows) for _ in range(8)]
        trajectories = await asyncio.gather(*tasks)
        await rewards.score(trajectories, {"environment": rewards.environment}, cfg)
        return trajectories

    trajectories = asyncio.run(run())
    assert len({t.info["metrics"]["secret"] for t in trajectories}) == 16
    for t in trajectories:
        text = tokenizer.decode(t.token_ids)
        assert text.count(f"secret {t.info['metrics']['secret']}") == text.count("secret") == 2
        earned = {place: reward for place, reward in enumerate(t.token_rewards) if reward}
        assert list(earned) == rewards.turn_ends(t.loss_mask) and len(earned) == 3
        assert list(earned.values()) == pytest.approx([0.2, 0.4, 2.6])
        assert t.info["reward"] == pytest.approx(3.2) and t.info["rewards"]["environment"] == pytest.approx(1.6)
        assert t.info["rewards"]["environment/asked"] == 1.0


def test_trajectories_do_not_wait_for_each_other():
    """One environment of sixteen takes 50 times as long; the others end long before it."""
    tokenizer, cfg, ended = tokenizer_of("qwen2_5"), config(env="x", max_turns=3), {}

    class Slow(Secret):
        def __init__(self, number):
            self.number = number

        async def step(self, text):
            await asyncio.sleep(0.5 if self.number == 0 else 0.01)
            return [{"role": "user", "content": "."}], 0.0, False, {}

    async def one(number):
        await play({"prompt": "a"}, 0, Slow(number), Scripted(tokenizer, ["More."]), cfg)
        ended[number] = time.perf_counter()

    async def run():
        await asyncio.gather(*(one(number) for number in range(16)))

    start = time.perf_counter()
    asyncio.run(run())
    assert max(ended[n] for n in range(1, 16)) - start < 0.8 < ended[0] - start


def test_a_prompt_that_its_tools_make_too_long(tmp_path):
    """Left out before training begins; one that its environment makes too long is known when it is played."""
    tokenizer, cfg = tokenizer_of("qwen2_5"), config(max_prompt_length=50)
    with pytest.raises(TrajectoryError, match="(?s)with what its environment adds the prompt has .*'What now\\?'"):
        asyncio.run(play({"prompt": "What now?"}, 0, tool_environment(cfg), Scripted(tokenizer, TURNS), cfg))
    rows = [{"prompt": "What now?", "tools": []}, {"prompt": "What now?", "tools": ["calculator"]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    cfg = config(dataset_id=f"{tmp_path}/rows.jsonl", tools=["calculator"], max_prompt_length=50)
    kept, _ = load_data(cfg, dict, lambda rows, name: measure(rows, name, tokenizer, cfg))
    assert [row["tools"] for row in kept] == [[]]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0] | {"tools": ["calculate"]}), encoding="utf-8")
    with pytest.raises(ConfigError, match="Did you mean 'calculator'"):
        load_data(cfg, dict, lambda rows, name: measure(rows, name, tokenizer, cfg))


@pytest.mark.parametrize("fault, message", [("raise", "raised ValueError"), ("hang", "took over 0.2 s")])
def test_an_environment_that_fails_is_named(fault, message):
    class Broken(Environment):
        async def step(self, text):
            if fault == "raise":
                raise ValueError("no more")
            time.sleep(5)  # blocks whatever event loop it runs on

    tokenizer, cfg = tokenizer_of("qwen2_5"), config(env="x", tool_timeout=0.2)
    with pytest.raises(TrajectoryError, match=rf"(?s)Broken.step\(\) {message}.*row with prompt 'hello'"):
        asyncio.run(play({"prompt": "hello"}, 0, Broken(), Scripted(tokenizer, ["More."]), cfg))


# ---- through the trainer ---------------------------------------------------------------------------------------------


def test_sampled_again_and_scored_again():
    """FrozenLake with a real model: the trainer's log-probs are the sampler's, also with the prompt shared, and only
    sampled tokens have logits at all - the loss has no gradient with respect to any other."""
    cfg = config(
        model_id=make_tiny(),
        env="frozenlake",
        tools=[],
        generator="hf",
        compute_dtype="float32",
        num_generations=4,
        max_turns=4,
        max_completion_length=300,
        beta=0.0,
        tokenization_check="off",
    )
    policy, inner = script.load_policy(cfg, torch.device("cpu"))
    generator = script.make_generator(cfg, inner.hf_model, load_processor(cfg.model_id), torch.device("cpu"))
    generator.eos_ids |= set(range(0, 4096, 12))  # a random model seldom ends a turn
    rows = [{"prompt": "lake", "seed": seed} for seed in range(3)]
    trajectories = asyncio.run(multi_turn(rows, generator, cfg))
    asyncio.run(rewards.score(trajectories, {"environment": rewards.environment}, cfg))
    assert [t.group for t in trajectories] == [0] * 4 + [1] * 4 + [2] * 4
    assert max(t.turns for t in trajectories) == 4
    for group in range(3):
        assert len({tuple(t.prompt_ids) for t in trajectories if t.group == group}) == 1
    batch = script.collate(trajectories, 0, torch.device("cpu"))
    for shared in (True, False):
        logprobs = script.all_logprobs(policy, batch, TrainConfig(**vars(cfg) | {"shared_prefix": shared}))[0]
        assert ((logprobs - batch.sampling_logprobs) * batch.loss_mask).abs().max() < 1e-4
        _, rows_of, columns, targets = packing.pack(batch, TrainConfig(**vars(cfg) | {"shared_prefix": shared}))
        assert len(targets) == sum(sum(t.loss_mask) for t in trajectories)
    sampled = [i for t in trajectories for i, mask in zip(t.token_ids, t.loss_mask, strict=True) if mask]
    assert sorted(targets.tolist()) == sorted(sampled)


# ---- images from an environment --------------------------------------------------------------------------------------


class Picture(Environment):
    """Answers every turn with a picture, or two, of its own."""

    def reset(self, row, seed):
        self.seed = 10 * random.randrange(1000)
        return super().reset(row, seed)

    async def step(self, text):
        self.seed += 1
        count = 1 + self.seed % 2
        parts = [{"type": "image", "image": tiny_vlms.picture(self.seed + n, 56 + 28 * n, 56)} for n in range(count)]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": "And now?"}]}], 0.0, False, {}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl", "llava", "gemma3", "gemma4"])
def test_images_of_an_environment(family, tmp_path):
    """Shown to the model in later turns and trained on as they were shown, beside rows that have none."""
    folder = str(tiny_vlms.make(family, tmp_path / "model"))
    settings = dict(model_id=folder, env="x", tools=[], generator="hf", compute_dtype="float32", num_generations=3)
    cfg = config(**settings, max_turns=3, max_completion_length=300, max_turn_length=40, beta=0.0)
    policy, inner = script.load_policy(cfg, torch.device("cpu"))
    cfg.shared_prefix = packing.why_not_shared(inner.hf_model, cfg) is None
    generator = script.make_generator(cfg, inner.hf_model, load_processor(folder), torch.device("cpu"))
    generator.eos_ids |= set(range(0, 4096, 8))
    rows = [{"prompt": "Look.", "image": tiny_vlms.picture(1)}, {"prompt": "Wait."}]

    async def run():
        tasks = [play(row, group, Picture(), generator, cfg) for group, row in enumerate(rows) for _ in range(3)]
        return await asyncio.gather(*tasks, play(rows[0], 2, Secret(), generator, cfg))

    trajectories = asyncio.run(run())
    assert max(len(t.images) for t in trajectories) >= 2 and len(trajectories[-1].images) == 1
    for t in trajectories:
        assert len(t.token_ids) == len(t.loss_mask) == len(t.logprobs)
    batch = script.collate(trajectories, 0, torch.device("cpu"))
    for shared in {cfg.shared_prefix, False}:
        for budget in (100_000, 200):
            cut = TrainConfig(**vars(cfg) | {"shared_prefix": shared, "tokens_per_microbatch": budget})
            logprobs = script.all_logprobs(policy, batch, cut)[0]
            assert ((logprobs - batch.sampling_logprobs) * batch.loss_mask).abs().max() < 1e-4, (shared, budget)


def test_frozen_lake():
    """The way is walked, holes and the goal end it, an invalid action costs and stays; the seed decides the map."""
    lake = FrozenLake()
    first = lake.reset({}, 7)[0]["content"]
    assert first == FrozenLake().reset({}, 7)[0]["content"] != FrozenLake().reset({}, 8)[0]["content"]
    _, reward, done, info = asyncio.run(lake.step("I go left"))
    assert (reward, done, info["valid"]) == (-0.1, False, 0.0)
    outcomes = set()
    for seed in range(30):
        lake = FrozenLake()
        lake.reset({}, seed)
        choose, done = random.Random(seed), False
        while not done:
            place = lake.place
            _, reward, done, info = asyncio.run(lake.step(choose.choice(lake.actions())))
            assert info["valid"] == 1.0 and info["effective"] == float(lake.place != place)
        assert reward == lake.metrics()["success"] == float(lake.place == lake.goal)
        outcomes.add(reward)
    assert outcomes == {0.0, 1.0}
    lake = FrozenLake(compass=True)
    lake.reset({}, 7)
    (row, column), (goal_row, goal_column) = lake.place, lake.goal
    ways = [("Down", goal_row - row), ("Up", row - goal_row), ("Right", goal_column - column)]
    ways = [f"{n} {way}" for way, n in [*ways, ("Left", column - goal_column)] if n > 0]
    assert lake.picture().splitlines()[-1] == f"To G: {', '.join(ways)}."
    slippery = FrozenLake(slippery=True)
    slippery.reset({}, 3)
    moved = {sum(abs(a - b) for a, b in zip(slippery.place, slippery.goal, strict=True))}
    assert moved


def test_mistakes_in_flags():
    with pytest.raises(ConfigError, match="unknown name 'frozenlak'.*Did you mean 'frozenlake'"):
        adapters.get_environment("frozenlak")
    with pytest.raises(ConfigError, match="argument of --env frozenlake: unknown name 'slipery'"):
        adapters.get_environment("frozenlake?slipery=true")
    with pytest.raises(ConfigError, match="unknown name 'calculater'"):
        get_tools(config(tools=["calculater"]))
    assert adapters.get_environment("frozenlake?slippery=true&size=6")().size == 6


# ---- tools -----------------------------------------------------------------------------------------------------------


def run_tools(cfg, calls, *tools):
    toolbox = Toolbox({tool.name: tool for tool in tools}, cfg)
    return asyncio.run(toolbox.run(calls, toolbox.tools))


def test_a_call_that_fails_is_answered():
    def broken(a: int) -> str:
        """Breaks.

        Args:
            a: a number
        """
        raise KeyError("nothing there")

    def slow(a: int) -> str:
        """Sleeps.

        Args:
            a: a number
        """
        time.sleep(5)

    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def odd(a: int) -> str:
        """Raises what cannot be shown.

        Args:
            a: a number
        """
        raise Odd

    calls = [
        Call("add", {"a": 1, "b": 2}),
        Call("add", {"a": 1}),
        Call("add", {"a": 1, "b": 2, "c": 3}),
        Call("sub", {}),
        Call("", {}, "not JSON"),
        Call("broken", {"a": 1}),
        Call("slow", {"a": 1}),
        Call("odd", {"a": 1}),
    ]
    start = time.perf_counter()
    messages, events = run_tools(config(tool_timeout=0.3), calls, *map(from_function, (add, broken, slow, odd)))
    assert time.perf_counter() - start < 2
    wanted = ["3", "add needs b", "takes a, b, not c", "no tool 'sub'; there are add, broken, slow, odd", "not JSON"]
    wanted += ["KeyError: 'nothing there'", "no answer within 0.3 s", "Error: Odd"]
    assert all(want in message["content"] for want, message in zip(wanted, messages, strict=True))
    assert [event["failed"] for event in events] == [0, 1, 1, 1, 1, 1, 1, 1]


def test_limits_and_cache():
    running, most, count = 0, 0, 0

    async def watched(a: int) -> str:
        nonlocal running, most, count
        running, count = running + 1, count + 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return str(a)

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    calls = [Call("watched", {"a": n % 4}) for n in range(8)]
    run_tools(config(tool_concurrency=3), calls, Tool("watched", "", schema, watched))
    assert most == 3 and count == 8
    most = count = 0
    run_tools(config(), calls, Tool("watched", "", schema, watched, concurrency=2))
    assert most == 2
    start = time.perf_counter()
    run_tools(config(), calls[:5], Tool("watched", "", schema, watched, rate=20.0))
    assert time.perf_counter() - start > 4 / 20
    count, cfg = 0, config(tool_cache=True)
    toolbox = Toolbox({"watched": Tool("watched", "", schema, watched)}, cfg)
    for _ in range(3):  # a new event loop each, as every training step has
        _, events = asyncio.run(toolbox.run(calls[:4], toolbox.tools))
    assert count == 4 and [event["cached"] for event in events] == [1] * 4
    count, toolbox = 0, Toolbox(toolbox.tools, cfg)
    _, events = asyncio.run(toolbox.run(calls, toolbox.tools))  # equal ones at the same time
    assert count == 4 and [event["cached"] for event in events] == [0] * 4 + [1] * 4


def test_loops_that_have_ended_are_forgotten():
    """Each step has one, and a semaphore that made somebody wait holds on to its own."""
    box = Toolbox({"add": from_function(add)}, config(tool_concurrency=1))
    loops = weakref.WeakSet()

    async def step():
        loops.add(asyncio.get_running_loop())
        _, events = await box.run([Call("add", {"a": n, "b": 0}) for n in range(3)], box.tools)
        assert not any(event["failed"] for event in events)

    for _ in range(5):
        asyncio.run(step())
    gc.collect()
    assert len(loops) == 1


def test_the_cache_keeps_what_was_asked_for_last(monkeypatch):
    monkeypatch.setattr("envs.tools.KEPT_RESULTS", 2)
    box = Toolbox({"add": from_function(add)}, config(tool_cache=True))

    async def cached(*firsts: int) -> list[int]:
        return [(await box._one(Call("add", {"a": a, "b": 0}), box.tools))[1]["cached"] for a in firsts]

    async def both() -> list[int]:
        found = await cached(1, 2, 1, 3, 1, 2)
        assert len(box._results) == 2 and not box._here.locks
        return found

    assert asyncio.run(both()) == [0, 0, 1, 0, 1, 0]


def object_of(**properties) -> dict:
    return {"type": "object", "properties": properties}


def test_a_call_that_is_cancelled_leaves_its_place():
    """While it runs, waits for its own place, or for one of all tools: sampling cancels groups it needs no more."""

    async def waits(n: int = 0) -> str:
        await asyncio.sleep(0.05 if n else 30)
        return str(n)

    async def calls():
        tools = {name: Tool(name, "", object_of(n={}), waits, concurrency=1) for name in "ab"}
        box = Toolbox(tools, config(tool_concurrency=1))
        tasks = [asyncio.create_task(box.run([Call(name)], tools)) for name in "baab"]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        answers, _ = await asyncio.wait_for(box.run([Call("a", {"n": 1}), Call("b", {"n": 2})], tools), 5)
        return ended, [answer["content"] for answer in answers]

    ended, answers = asyncio.run(calls())
    assert [type(end) for end in ended] == [asyncio.CancelledError] * 4 and answers == ["1", "2"]


def test_a_step_that_is_cancelled_says_so():
    async def waits() -> str:
        """Waits."""
        await asyncio.sleep(30)

    async def cancelled():
        environment = tool_environment(config(), waits)
        environment.reset({"prompt": "?"}, 0)
        text = '<tool_call>{"name": "waits", "arguments": {}}</tool_call>'
        step = asyncio.create_task(call_environment(environment, "step", {"prompt": "?"}, config(), text=text))
        await asyncio.sleep(0.05)
        step.cancel()
        await step

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_a_slow_rate_is_its_own_tools_alone():
    def one() -> str:
        return "1"

    async def calls():
        tools = {"rare": Tool("rare", "", object_of(), one, rate=2.0), "often": Tool("often", "", object_of(), one)}
        box, start, times = Toolbox(tools, config(tool_concurrency=2)), time.monotonic(), {}

        async def call(name: str):
            await box.run([Call(name)], tools)
            times.setdefault(name, []).append(time.monotonic() - start)

        await asyncio.gather(*map(call, ["rare"] * 3), *map(call, ["often"] * 3))
        return times

    times = asyncio.run(calls())
    assert max(times["often"]) < 0.3 and times["rare"][1] > 0.45 and times["rare"][2] > 0.95


@pytest.mark.parametrize(
    "schema, arguments, fault",
    [
        (object_of(n={"type": "number", "multipleOf": 0.01}), {"n": 10**400}, None),
        (object_of(n={"type": "number", "multipleOf": 0.01}), {"n": math.nan}, None),
        (object_of(n={"pattern": r"^(\w+\s?)*$"}), {"n": "a" * 40 + "!"}, None),
        (
            object_of() | {"patternProperties": {r"^(\w+\s?)*$": {}}, "additionalProperties": False},
            {"a" * 40 + "!": 1},
            None,
        ),
        (object_of(n={"$ref": "#/properties/n"}), {"n": 1}, None),
        (object_of(n=True), {"n": [1]}, None),
        (object_of(n=False), {"n": [1]}, "False schema"),
        ({"type": "object", "additionalProperties": True}, {"n": 1}, None),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"n": "1"}, "f, n: '1' is not of type"),
        ({"type": "object", "oneOf": [object_of(n={"type": "integer"})]}, {"n": 1}, None),
        ({"type": "object", "oneOf": [object_of(n={"type": "integer"})]}, {"n": "1"}, "not of type 'integer'"),
        (object_of() | {"additionalProperties": False}, {"n": 1}, "takes no arguments, not n"),
        (object_of(n={"type": "integer", "nullable": True}), {"n": None}, None),
        (object_of(n={"type": "integer", "nullable": True}), {"n": "1"}, "f, n: '1' is not of type 'integer'"),
        (object_of(nullable={"type": "integer"}), {"nullable": 1}, None),
    ],
)
def test_arguments_are_checked_by_their_schema(schema, arguments, fault):
    """As far as it can be: what cannot is the tool's to refuse. A regular expression may take for ever."""
    start = time.process_time()
    ((answer), _) = run_tools(config(), [Call("f", arguments)], Tool("f", "", schema, lambda **given: "fine"))
    assert re.search(fault or "^fine$", answer[0]["content"]) and time.process_time() - start < 1


def test_hints_that_allow_none():
    def several(a: int | list[int] | None, b: Literal["x", "y"] | None, c: list[int | None], d: str | None = None):
        """Takes some.

        Args:
            a: one or several
            b: which
            c: numbers
            d: text
        """
        return [a, b, c, d]

    given = {"a": None, "b": None, "c": [1, None], "d": None}
    wrong = ({"a": "1"}, {"b": "z"}, {"c": ["1"]}, {"d": 1})
    calls = [Call("several", given | one) for one in ({}, *wrong)]
    answers, events = run_tools(config(), calls, from_function(several))
    assert [event["failed"] for event in events] == [0, 1, 1, 1, 1]
    assert answers[0]["content"] == "[null, null, [1, null], null]" and "several, c.0: '1'" in answers[3]["content"]


def test_a_large_result_holds_nobody_up(monkeypatch):
    """It is made text in a thread, and of an array as little as is shown."""
    threads = []

    def noted_content(result):
        threads.append(threading.current_thread())
        return as_content(result)

    def large():
        return {"x": numpy.zeros(4_000_000)}

    monkeypatch.setattr("envs.tools.as_content", noted_content)
    ((answer,), _) = run_tools(config(), [Call("large")], Tool("large", "", object_of(), large))
    assert answer["content"].startswith('{"x": "[0. 0. 0.') and len(answer["content"]) < 100
    assert threads and threading.main_thread() not in threads


def test_rows_choose_tools_and_arguments():
    cfg = config()
    environment = tool_environment(cfg, add, from_function(models_of := add).__class__("other", "", {}, models_of))
    environment.reset({"prompt": "?", "tools": ["add"], "tools_kwargs": {"add": {"b": 10}}}, 0)
    assert list(environment.tools) == ["add"] and list(environment.tools["add"].parameters["properties"]) == ["a"]
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    messages, _, done, _ = asyncio.run(environment.step(text))
    assert messages[0]["content"] == "11" and not done
    with pytest.raises(ConfigError, match="unknown name 'sub'"):
        environment.reset({"prompt": "?", "tools": ["sub"]}, 0)
    free = Tool("free", "", {"type": "object", "properties": {"user": {}}, "additionalProperties": True}, dict)
    environment = tool_environment(cfg, free)
    environment.reset({"prompt": "?", "tools_kwargs": {"free": {"user": "me"}}}, 0)
    for given, wanted in (
        ({"x": 1}, '{"user": "me", "x": 1}'),
        ({"user": "you"}, "Error: free takes no arguments, not user"),
    ):
        text = json.dumps({"name": "free", "arguments": given})
        messages, *_ = asyncio.run(environment.step(f"<tool_call>{text}</tool_call>"))
        assert messages[0]["content"] == wanted, "what a row fixes is not the model's to give"


def test_the_cache_tells_what_rows_have_fixed():
    cfg = config(tool_cache=True)
    environment, found = tool_environment(cfg, add), []
    for b in (10, 20, 10):
        environment.reset({"prompt": "?", "tools_kwargs": {"add": {"b": b}}}, 0)
        text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        messages, _, _, info = asyncio.run(environment.step(text))
        found.append((messages[0]["content"], info["calls"][0]["cached"]))
    assert found == [("11", 0), ("21", 0), ("11", 1)]


def test_arguments_that_may_be_absent():
    """As transformers and as pydantic say Optional; and a schema that says nothing."""

    def look(q: str, page: int | None = None) -> str:
        """Looks.

        Args:
            q: for what
            page: on which page
        """
        return f"{q} {page}"

    def several(*words: str) -> str:
        """Takes some.

        Args:
            words: some
        """

    either = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    mcp = Tool("mcp", "", {"type": "object", "properties": {"n": either}}, lambda n: n)
    odd = Tool("odd", "", {"type": "object", "properties": {"n": {"type": "any"}}}, lambda n: n)
    lost = Tool("lost", "", {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}, lambda n: n)
    xml = PARSERS["xml"]("<function=mcp><parameter=n>5</parameter></function>", {"mcp": mcp})
    calls = [
        Call("look", {"q": "a", "page": None}),
        Call("look", {"q": "a", "page": "b"}),
        *xml,
        Call("odd", {"n": 1}),
        Call("lost", {"n": 2}),
    ]
    messages, events = run_tools(config(), calls, from_function(look), mcp, odd, lost)
    assert [message["content"] for message in messages][::2] == ["a None", "5", "2"] and messages[3]["content"] == "1"
    assert [event["failed"] for event in events] == [0, 1, 0, 0, 0]
    with pytest.raises(ConfigError, match=r"takes \*words"):
        from_function(several)


def test_an_object_runs_its_calls_in_order_and_no_more_than_allowed():
    class Notes:
        def __init__(self):
            self.written = ""

        def write(self, text: str) -> str:
            """Writes.

            Args:
                text: what
            """
            self.written += text
            return self.written

    cfg = config(max_calls_per_turn=3)
    environment = adapters.MethodsEnvironment(Notes(), Toolbox({}, cfg), cfg)
    environment.methods = {"write": environment.methods["write"]}
    calls = [Call("write", {"text": letter}) for letter in "abcde"]
    messages, events = asyncio.run(adapters.InOrder({}, cfg).run(calls, environment.methods))
    assert [message["content"] for message in messages[:3]] == ["a", "ab", "abc"] and len(events) == 4
    assert "only the first 3 were run" in messages[3]["content"]


def test_faults_are_cut_as_results_are():
    messages, _ = run_tools(config(max_tool_result=100), [Call("x" * 5000, {})], from_function(add))
    assert len(messages[0]["content"]) < 200


PARSED = [
    ("hermes", CALL, [("add", {"a": 2, "b": 3})]),
    ("hermes", CALL * 2, [("add", {"a": 2, "b": 3})] * 2),
    ("hermes", "<tool_call>{'name': add}</tool_call>", ["must be"]),
    ("hermes", '<tool_call>{"name": "add"', ["must be"]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [("add", {"a": 1})]),
    ("hermes", "It is 5.", []),
    (
        "xml",
        "<function=add><parameter=a>\n2\n</parameter><parameter=b>3</parameter></function>",
        [("add", {"a": 2, "b": 3})],
    ),
    ("xml", "<function=say><parameter=text>2</parameter></function>", [("say", {"text": "2"})]),
    ("xml", "<function=add><parameter=a>2</parameter>", ["must end"]),
    ("tags", "I <say>hello</say>", [("say", {"text": "hello"})]),
    ("tags", "<say>hello", ["must end"]),
    ("tags", "<other>hello</other>", []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', ["must be"]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', ["must be"]),
    ("xml", "<function=add><parameter=a>NaN</parameter></function>", [("add", {"a": "NaN"})]),
    ("xml", "<function=year><parameter=text>2024</parameter></function>", [("year", {"text": "2024"})]),
    ("xml", "<function=year><parameter=any>2024</parameter></function>", [("year", {"any": "2024"})]),
    ("harmony", 'to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>', [("add", {"a": 1})]),
    (
        "harmony",
        'to=functions.add <|message|>{"a": 1}<|call|>assistant to=functions.say<|message|>{"text": "to=functions.x"}',
        [("add", {"a": 1}), ("say", {"text": "to=functions.x"})],
    ),
    ("harmony", "to=functions.add <|end|>Well.<|message|>{}", []),
    ("harmony", "to=functions.add <|message|>[1]<|call|>", ["must be a JSON object"]),
]


@pytest.mark.parametrize("parser, text, wanted", PARSED)
def test_parsers(parser, text, wanted):
    say = Tool("say", "", {"type": "object", "properties": {"text": {"type": "string"}}}, print)
    either = {"text": {"type": ["string", "null"]}, "any": True}
    year = Tool("year", "", {"type": "object", "properties": either}, print)
    calls = PARSERS[parser](text, {"add": from_function(add), "say": say, "year": year})
    assert len(calls) == len(wanted)
    for call, want in zip(calls, wanted, strict=True):
        if isinstance(want, str):
            assert want in call.error
        else:
            assert (call.name, call.arguments, call.error) == (*want, None)


def test_a_function_without_docstring_is_no_tool():
    def nothing(a): ...

    with pytest.raises(ConfigError, match="the tool 'nothing' needs a type hint"):
        from_function(nothing)


class Talker(http.server.BaseHTTPRequestHandler):
    """Calls `add` until it has read a sum, then says it."""

    def do_POST(self):
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        Talker.seen = messages
        last = messages[-1]["content"]
        call = '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 22}}</tool_call>'
        said = f"It is {last}." if last.isdigit() else "Who knows." if len(messages) == 1 else call
        body = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        self.send_response(200 if self.headers["Authorization"] == "Bearer secret" else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args): ...


def test_a_model_and_an_agent_as_tools():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Talker)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, cfg = f"http://127.0.0.1:{server.server_address[1]}/v1", config(max_turns=3)
    tools = [
        model_tool("model", "", url, "m", "secret"),
        agent_tool("agent", "", [from_function(add)], cfg, url, "m", "secret"),
        model_tool("locked", "", url, "m", "wrong"),
    ]
    calls = [Call(tool.name, {"question": "What is 20 + 22?"}) for tool in tools]
    answers, events = run_tools(cfg, calls, *tools)
    assert [answer["content"] for answer in answers[:2]] == ["Who knows.", "It is 42."]
    assert "answered 401" in answers[2]["content"] and [event["failed"] for event in events] == [0, 0, 1]
    assert "add" in Talker.seen[0]["content"] and len(Talker.seen) in (1, 4)
    server.shutdown()


# ---- first mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "returned, message",
    [
        (("No.", 0.0, False), r"Odd.step\(\) must return \(messages, reward, done, info\); it returned"),
        (({"role": "user"}, 0.0, False, {}), r"Odd.step\(\) must give chat messages, such as"),
        (("No.", None, False, {}), r"Odd.step\(\) returned the reward None; it must be a finite number"),
        (("No.", 10**400, False, {}), r"Odd.step\(\) returned the reward 1000.*int too large"),
        (("No.", 1.0, torch.ones(2), {}), r"Odd.step\(\) returned done tensor\(\[1., 1.\]\): .*ambiguous"),
        (("No.", 1, True, None), None),
        (("No.", 1, True, {"calls": 2, "tool_calls": 3}), None),
    ],
)
def test_what_a_step_returns(returned, message):
    class Odd(Environment):
        def reset(self, row, seed):
            return "Begin."

        def step(self, text):
            return returned

    play_one = play({"prompt": "hello"}, 0, Odd(), Scripted(tokenizer_of("qwen2_5"), ["More."]), config(env="x"))
    if message:
        with pytest.raises(TrajectoryError, match=message):
            asyncio.run(play_one)
    else:
        trajectory = asyncio.run(play_one)
        assert trajectory.info["turns"][0]["reward"] == 1.0
        assert rewards.tool_use([trajectory]) == [None] and shown_turn(trajectory.info["turns"][0])["calls"] == []
        assert rewards.environment([trajectory])[0].get("calls") == (2.0 if returned[3] else None)
        assert trajectory.info["shown"] == [{"role": "user", "content": "Begin."}]


def test_what_a_tool_returns_and_is_given():
    def anything(kind: str, count: int = 1):
        """Returns something.

        Args:
            kind: what
            count: how often
        """
        return {"list": ["a"], "dicts": [{"title": "a"}], "parts": [{"type": "text", "text": "a"}]}[kind]

    arguments = [{"kind": "list"}, {"kind": "dicts"}, {"kind": "parts"}, {"kind": "list", "count": "2"}]
    answers, events = run_tools(config(), [Call("anything", a) for a in arguments], from_function(anything))
    contents = [answer["content"] for answer in answers]
    assert contents[:3] == ['["a"]', '[{"title": "a"}]', [{"type": "text", "text": "a"}]]
    assert contents[3] == "Error: anything, count: '2' is not of type 'integer'"
    assert [event["failed"] for event in events] == [0, 0, 0, 1]


def test_tools_of_a_row_that_are_wrong():
    environment = tool_environment(config(), add)
    environment.reset({"prompt": "?", "tools": []}, 0)
    assert environment.instructions == "" and environment.tools == {}
    environment.reset(
        {"prompt": "?", "tools_kwargs": {"add": {"a": 1, "b": None}, "other": None}}, 0
    )  # as parquet pads
    assert list(environment.tools["add"].parameters["properties"]) == ["b"]
    for row, message in (
        ({"tools": "add"}, "'add' is text; give a list of names"),
        ({"tools_kwargs": {"add": {"c": 1}}}, "unknown name 'c'"),
    ):
        with pytest.raises(ConfigError, match=message):
            environment.reset({"prompt": "?"} | row, 0)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(tools=["my_tools.py"], reward_funcs=["length"]), "which function of it"),
        (dict(env="frozenlake"), "brings its own tools"),
        (dict(rollout="single_turn", reward_funcs=["length"]), "asks no environment or tool"),
        (dict(reward_funcs=["environment"]), "there is no --env to give a reward"),
        (dict(dataset_id="rows.jsonl"), "tools bring no reward: give --reward_funcs"),
    ],
)
def test_flags_that_do_not_go_together(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_rollout(config(**settings))


def test_a_class_of_trls_without_a_reward(tmp_path):
    text = "class Silent:\n    def __init__(self, size):\n        pass\n\n    def reset(self):\n        pass\n\n"
    text += '    def look(self) -> str:\n        "Looks."\n        return ""\n'
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    cfg = config(tools=[], env="x")
    with pytest.raises(ConfigError, match="missing a required argument: 'size'; give it as"):
        adapters.get_environment(f"{tmp_path}/mine.py:Silent", cfg)
    with pytest.raises(ConfigError, match=r"has no get_reward\(\), so --reward_funcs"):
        adapters.get_environment(f"{tmp_path}/mine.py:Silent?size=1", cfg)
    with pytest.raises(ConfigError, match="has no 'Loud'; it has Silent"):
        adapters.get_environment(f"{tmp_path}/mine.py:Loud", cfg)


def test_string_prompts_have_all_that_was_said():
    sampler = Scripted(tokenizer_of("qwen2_5"), TURNS)
    trajectory = asyncio.run(play({"prompt": "hello"}, 0, tool_environment(config(), add), sampler, config()))
    (text,) = rewards.call_arguments([trajectory], config())["completions"]
    assert text.count("<tool_call>") == 3 and "It is 5." in text


@pytest.mark.parametrize("whole", [True, False])
def test_rewards_get_whole_groups(whole):
    """Of several turns, too, since a reward may compare completions; each as it ends where no reward does."""
    calls = []

    def compared(completions, **columns):
        calls.append(len(completions))
        return [float(len(calls))] * len(completions)

    if not whole:
        compared.per_trajectory = True
    cfg = config(tools=["calculator"], num_generations=4)
    rows = [{"prompt": "hello"}, {"prompt": "goodbye"}]
    sampler = Scripted(tokenizer_of("qwen2_5"), ["Good."])
    groups, _ = asyncio.run(script.rollout(rows, sampler, {"compared": compared}, cfg))
    assert calls == ([4, 4] if whole else [1] * 8) and [len(group) for group in groups] == [4, 4]
    assert [{t.row["prompt"] for t in group} for group in groups] == [{"hello"}, {"goodbye"}]


@pytest.mark.parametrize("prompt", ["hello", [{"role": "user", "content": "hello"}]])
def test_spans_count_in_what_the_model_said_in_all_turns(prompt):
    """Not in what tools answered; a span goes by its end, also where it begins in an earlier turn."""
    tokenizer, seen = tokenizer_of("qwen2_5"), []
    turns = ["Let me see 🦜. " + CALL, CALL + CALL, "It is 5, 日本. Done."]
    t = asyncio.run(play({"prompt": prompt}, 0, tool_environment(config(), add), Scripted(tokenizer, turns), config()))
    parts = {"🦜": 1.0, "</tool_call>": 2.0, "It is 5": 4.0, "本.": 8.0, "Done.": 16.0}

    def found(completions, **columns):
        (text,) = map(rewards.completion_text, completions)
        seen.append(text)
        ends = {part: text.rindex(part) + len(part) for part in parts}
        return [{"spans": [(0 if part == "🦜" else ends[part] - 1, ends[part], v) for part, v in parts.items()]}]

    asyncio.run(rewards.score([t], {"found": found}, config(), tokenizer))
    assert seen == ["\n".join(turns)]
    mine = [[n for n in range(turn["start"], turn["end"])] for turn in t.info["turns"]]

    def first(number, part):  # by hand: the first token with which the turn's text holds the part
        ids = [t.token_ids[n] for n in mine[number]]
        return mine[number][next(n for n in range(len(ids)) if tokenizer.decode(ids[: n + 1]).count(part))]

    wanted = {first(0, "🦜"): 1.0, mine[1][-2]: 2.0, first(2, "It is 5"): 4.0}
    wanted |= {first(2, "本."): 8.0, first(2, "Done."): 16.0}
    assert {place: reward for place, reward in enumerate(t.token_rewards) if reward} == wanted
    assert t.info["reward"] == 31.0
