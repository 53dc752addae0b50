"""Several turns: what was sampled is trained on token by token, what was answered never; nothing waits for others."""

import asyncio
import json
import random
from pathlib import Path

import pytest
from server_fixture import make_tiny
from steps import groups_of
from transformers import AutoTokenizer

import rewards
from config import ConfigError, TrainConfig
from data import load_data
from envs import Environment, ToolEnvironment
from envs.tools import Tool, from_function
from envs.turns import play
from inputs.prompts import render
from inputs.trajectory import Completion
from rollouts import TrajectoryError, check_rollout, look_at, trajectory_fault

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

    def __init__(self, tokenizer, turns: list[str], seconds=lambda: 0.0):
        self.tokenizer, self.turns, self.said, self.seconds = tokenizer, turns, [], seconds

    def next_turn(self, sent) -> str:
        number = sum(1 for turn in self.said if sent[: len(turn["sent"])] == turn["sent"])
        return self.turns[min(number, len(self.turns) - 1)]

    async def generate(self, sent, *, n, max_tokens, min_tokens=0, **options):
        assert min_tokens <= max_tokens, "a server refuses that"
        text = self.next_turn(sent)
        pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
        ids = [i for piece in pieces for i in self.tokenizer(piece, add_special_tokens=False)["input_ids"]]
        ids.append(self.tokenizer.eos_token_id)
        reason = "stop" if len(ids) <= max_tokens else "length"
        ids = ids[:max_tokens]
        self.said.append({"sent": list(sent), "ids": ids})
        await asyncio.sleep(self.seconds())
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
    return ToolEnvironment({tool.name: tool for tool in tools}, cfg)


@pytest.mark.parametrize("template", ENDS)
def test_tokens_are_the_samplers_and_the_templates(template):
    """Under four kinds of templates: spans with mask 1 are what was sampled, id for id, and everything together is what
    the template writes for the whole conversation."""
    tokenizer, cfg = tokenizer_of(template), config()
    sampler, environment = Scripted(tokenizer, TURNS), tool_environment(cfg)
    t = asyncio.run(play({"prompt": "What is 2 + 3?"}, 0, environment, sampler, cfg))
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
    said = [{"role": m["role"], "content": m["content"]} for m in t.info["messages"]]
    whole = render([*t.info["shown"], *said, {"role": "user", "content": ""}], tokenizer, environment.schemas)
    assert whole.startswith(text)
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


def test_thinking_of_earlier_turns_stays():
    """Qwen3's template takes it out of what came before; the model saw it, so it is trained on."""
    tokenizer, cfg = tokenizer_of("qwen3"), config()
    turns = [f"<think>\nHm.\n</think>\n\n{CALL}", "It is 5."]
    t = asyncio.run(play({"prompt": "?"}, 0, tool_environment(cfg), Scripted(tokenizer, turns), cfg))
    assert tokenizer.decode(t.token_ids).count("Hm.") == 1
    assert "<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n" in tokenizer.decode(t.token_ids)


class Asks(Environment):
    """Asks twice more."""

    def reset(self, row, seed):
        self.left = 2
        return "First?"

    def step(self, text):
        self.left -= 1
        return "Next?", 1.0, self.left < 0, {}


@pytest.mark.parametrize("how, template, rows", [("append", "qwen3", 1), ("fork", "qwen2_5", 1), ("fork", "qwen3", 3)])
def test_a_history_that_the_template_writes_anew_begins_a_row(how, template, rows):
    """The model sees in training what it sees when it is used; what was sampled is there once with mask 1."""
    tokenizer, cfg = tokenizer_of(template), TrainConfig(env="-", on_rewrite=how, max_completion_length=300)
    sampler = Scripted(tokenizer, ["<think>\nHm.\n</think>\n\nYes."])
    t = asyncio.run(play({"prompt": "?"}, 0, Asks(), sampler, cfg))
    assert trajectory_fault(t, sampler, cfg) is None and t.turns == 3
    trained = [token for token, mask in zip(t.token_ids, t.loss_mask, strict=True) if mask]
    assert trained == sum((turn["ids"] for turn in sampler.said), [])
    bounds = [-len(t.prompt_ids), *t.info.get("restarts", []), len(t.token_ids)]
    whole = t.prompt_ids + t.token_ids
    parts = [whole[a - bounds[0] : b - bounds[0]] for a, b in zip(bounds, bounds[1:], strict=False)]
    assert len(parts) == rows
    for turn in sampler.said:  # what the sampler was sent, and said, is the beginning of a row
        assert any(part[: len(turn["sent"]) + len(turn["ids"])] == turn["sent"] + turn["ids"] for part in parts)
    assert tokenizer.decode(parts[-1]).count("Hm.") == (3 if rows == 1 else 1)
    ends = [t.token_ids[turn["start"] : turn["end"]] for turn in t.info["turns"]]
    assert ends == [turn["ids"] for turn in sampler.said]


def test_a_template_whose_roles_have_to_alternate():
    """Two results of one turn are one message; a prompt that begins the answer is no fault of the template's."""
    tokenizer, cfg = tokenizer_of("smollm2"), config()
    rule = "{% for m in messages %}{% if m['role'] == 'tool' or (not loop.first and m['role'] == last.role) %}"
    rule = "{% set last = namespace(role='') %}" + rule + "{{ raise_exception('what?') }}{% endif %}"
    tokenizer.chat_template = rule + "{% set last.role = m['role'] %}{% endfor %}" + tokenizer.chat_template
    t = asyncio.run(play({"prompt": "?"}, 0, tool_environment(cfg), Scripted(tokenizer, [CALL * 2, "5."]), cfg))
    assert "<|im_start|>user\n5\n\n5<|im_end|>\n<|im_start|>assistant\n" in tokenizer.decode(t.token_ids)
    begun = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Let me"}]
    sampler = Scripted(tokenizer, [f" see. {CALL}", "5."])
    t = asyncio.run(play({"prompt": begun}, 0, tool_environment(cfg), sampler, cfg))
    assert tokenizer.decode(t.prompt_ids + t.token_ids).count("<|im_start|>assistant\nLet me see. <tool_call>") == 1


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


@pytest.mark.parametrize(
    "said, count",
    [
        ("<think>\nThe call goes within <tool_call></tool_call> tags.\n</think>\n\n" + CALL, 1),
        (f"<think>\nI could say {CALL}, but I know it.\n</think>\n\nIt is 5.", 0),
        ("<|channel|>analysis<|message|>At the end <answer>...</answer>.<|end|><|start|>assistant" + CALL, 1),
    ],
)
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
    chance = random.Random(0)
    sampler = Scripted(tokenizer, ["More."], lambda: chance.random() / 20)
    rows = [{"prompt": "a"}, {"prompt": "b"}]

    async def run():
        tasks = [play(row, group, Secret(), sampler, cfg) for group, row in enumerate(rows) for _ in range(8)]
        trajectories = await asyncio.gather(*tasks)
        await rewards.score(trajectories, {"environment": rewards.get_reward_function("environment")}, cfg)
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


def test_a_prompt_that_its_tools_make_too_long(tmp_path):
    """Is left out when it is played; what is wrong with the tools of a row is said at the start."""
    tokenizer, cfg = tokenizer_of("qwen2_5"), config(max_prompt_length=50)
    with pytest.raises(
        TrajectoryError, match="(?s)its environment adds, is over --max_prompt_length=50.*'What now\\?'"
    ):
        asyncio.run(play({"prompt": "What now?"}, 0, tool_environment(cfg), Scripted(tokenizer, TURNS), cfg))
    rows = [{"prompt": "What now?", "tools": []}, {"prompt": "What now?", "tools": ["calculator"]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    cfg = config(dataset_id=f"{tmp_path}/rows.jsonl", tools=["calculator"], max_prompt_length=50)
    short, long = look_at(load_data(cfg, dict)[0], "rows", tokenizer, cfg)
    assert short <= 50 < long
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0] | {"tools": ["calculate"]}), encoding="utf-8")
    with pytest.raises(ConfigError, match="Did you mean 'calculator'"):
        look_at(load_data(cfg, dict)[0], "rows", tokenizer, cfg)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(rollout="single_turn", reward_funcs=["length"]), "make it multi_turn"),
        (dict(dataset_id="rows.jsonl"), "tools bring no reward: give --reward_funcs"),
    ],
)
def test_flags_that_do_not_go_together(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_rollout(config(**settings))


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
    groups = groups_of(rows, sampler, {"compared": compared}, cfg)
    assert calls == ([4, 4] if whole else [1] * 8) and [len(group) for group in groups] == [4, 4]
    assert [{t.row["prompt"] for t in group} for group in groups] == [{"hello"}, {"goodbye"}]
