"""Environments of gymnasium, TextArena and TRL, run as docs/environments.md says."""

import asyncio

import pytest
from live import SMALL, trained
from test_turns import Scripted, tokenizer_of

import rewards
from config import ConfigError, TrainConfig
from data import load_rows
from envs.adapters import environment_maker
from envs.turns import play
from rollouts import check_rollout


def act(environment, method, *arguments):
    result = getattr(environment, method)(*arguments)
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


def played(spec, turns, row=None, **settings):
    """A trajectory with a sampler that says these turns."""
    settings = dict(max_completion_length=4000, max_prompt_length=4000, num_generations=1) | settings
    cfg = TrainConfig(env=spec, **settings)
    row = {"prompt": "Play.", "seed": 8} | (row or {})
    return asyncio.run(play(row, 0, environment_maker(cfg)(), Scripted(tokenizer_of("qwen2_5"), turns), cfg))


def started(spec, **settings):
    """What the scripts check before anything else starts."""
    check_rollout(TrainConfig(env=spec, **settings))


# ---- gymnasium ------------------------------------------------------------------------------------------------------


def test_gymnasium_refuses_at_start_what_cannot_work():
    for spec, message in (
        ("gymnasium?id=FrozenLak-v1", "Did you mean: `FrozenLake`"),
        ("gymnasium?id=Pendulum-v1", r"Box\(.*only Discrete and Text"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            started(spec)
        assert "\n" not in str(caught.value)


# ---- TextArena ------------------------------------------------------------------------------------------------------


def test_textarena_says_only_what_is_new():
    """Observed tokens of a whole game grow with its turns, not with their square."""
    turns = [f"I guess [{number}]" for number in (1, 2, 3, 4)]
    trajectory = played("textarena?id=GuessTheNumber-v0", turns, max_turns=len(turns))
    (rules,) = trajectory.info["shown"]
    answers = [turn["observation"][0]["content"] for turn in trajectory.info["turns"] if turn["observation"]]
    assert answers and all(answers)
    for answer, turn in zip(answers, turns, strict=False):
        assert rules["content"].splitlines()[0] not in answer and turn not in answer and "[GAME]" not in answer
    assert len(set(map(len, answers[:2]))) <= 2
    per_turn = [len(tokenizer_of("qwen2_5")(answer)["input_ids"]) for answer in answers]
    assert max(per_turn) <= 40, per_turn


# ---- classes as TRL's environment_factory takes them ----------------------------------------------------------------

TRL_CLASSES = '''
import functools
import threading


class Counter:
    """Keeps its count; every call is slow enough for two at once to lose one."""

    def __init__(self, start=0):
        self.start = start

    async def reset(self, **kwargs):
        self.count, self.seen, self.thread = self.start, kwargs, threading.current_thread()
        return " The counter is ready."

    async def increment(self, by: int) -> int:
        """Raises the counter.

        Args:
            by: by how much
        """
        return self._add(by)

    def double(self) -> int:
        """Doubles the counter."""
        return self._add(self.count)

    def _add(self, by):
        import time

        count = self.count
        time.sleep(0.05)
        self.count = count + by
        return self.count

    async def get_reward(self):
        return float(self.count)

    async def close(self):
        self.closed = True


class Plain:
    """Without a reward."""

    def reset(self, word="none", **kwargs):
        self.word = word
        return [{"role": "system", "content": "Be short."}, {"role": "user", "content": f"Say {word}."}]

    def look(self) -> str:
        """Looks around."""
        return self.word


five = functools.partial(Counter, start=5)


def made():
    return Counter(start=7)


def seen_environments(environments, prompts, completions, **kwargs):
    assert len(environments) == len(prompts) == len(completions)
    return [float(type(environment).__name__ == "Counter") for environment in environments]
'''
INCREMENT = '<tool_call>{"name": "increment", "arguments": {"by": 4}}</tool_call>'
DOUBLE = '<tool_call>{"name": "double", "arguments": {}}</tool_call>'


@pytest.fixture
def trl(tmp_path):
    (tmp_path / "task.py").write_text(TRL_CLASSES, encoding="utf-8")
    return f"{tmp_path}/task.py"


def score(trajectory, *functions, **settings):
    cfg = TrainConfig(env="x", reward_funcs=list(functions), **settings)
    asyncio.run(rewards.score([trajectory], rewards.get_reward_functions(cfg), cfg))
    return trajectory.info["rewards"]


def test_async_methods_and_calls_in_order(trl):
    """reset, tools and get_reward may be async; the calls of a turn change one object, so they run one by one."""
    trajectory = played(f"{trl}:Counter", [INCREMENT + DOUBLE + INCREMENT, "Done."])
    assert trajectory.info["shown"][-1]["content"].endswith("Play. The counter is ready.")
    answers = [message["content"] for message in trajectory.info["turns"][0]["observation"]]
    assert answers == ["4", "8", "12"] and trajectory.turns == 2
    counter = trajectory.info["object"]
    environment = environment_maker(TrainConfig(env=f"{trl}:Counter"))()
    act(environment, "close")
    assert environment.inner.closed and "close" not in environment.methods
    assert counter.count == 12 and counter.seen["seed"] == 8 and score(trajectory, "environment")["environment"] == 12


def test_factories(trl):
    """A class, a partial or a function; reward functions see the objects."""
    settings = dict(reward_funcs=["environment", f"{trl}:seen_environments"])
    for name, start in (("Counter", 0), ("five", 5), ("made", 7)):
        trajectory = played(f"{trl}:{name}", [INCREMENT, "Done."], **settings)
        assert trajectory.info["object"].count == start + 4
        assert score(trajectory, *settings["reward_funcs"]) == {"environment": start + 4, "seen_environments": 1}
    trajectory = played(f"{trl}:Plain", ["Done."], {"word": "Oslo"}, **settings)
    assert [m["content"] for m in trajectory.info["shown"]][-1] == "Say Oslo."
    scored = score(trajectory, *settings["reward_funcs"])
    assert scored["environment"] != scored["environment"] and scored["seen_environments"] == 0  # nan: does not apply


def test_prompts_that_the_environment_makes(trl, tmp_path):
    """Rows without prompts, or of nothing but seeds, as where TRL has no train_dataset."""
    (tmp_path / "rows.jsonl").write_text('{"word": "Rome"}\n{"word": "Oslo"}\n', encoding="utf-8")
    rows = load_rows(f"{tmp_path}/rows.jsonl", own_prompts=False)
    shown = [played(f"{trl}:Plain", ["Done."], row, reward_funcs=["length"]).info["shown"] for row in rows]
    assert [messages[-1]["content"] for messages in shown] == ["Say Rome.", "Say Oslo."]
    with pytest.raises(ConfigError, match="no column `prompt`"):
        load_rows(f"{tmp_path}/rows.jsonl")
    assert TrainConfig(env=f"{trl}:Counter").dataset_id == "seeds:2000"
    train, test = (load_rows("seeds:20", split=split) for split in ("train", "test"))
    assert len(train) == 20 and not {row["seed"] for row in train} & {row["seed"] for row in test}
    with pytest.raises(ConfigError, match="such as seeds:2000"):
        load_rows("seeds:many")


def test_a_run_trains_with_such_a_class(trl, tmp_path):
    flags = f"{SMALL} --env {trl}:five --reward_funcs environment {trl}:seen_environments --max_steps 1 "
    lines = trained(tmp_path, flags + "--max_prompt_length 512 --max_completion_length 40 --max_turn_length 20")
    (line,) = [line for line in lines if "reward" in line]
    found = {name: line[f"rewards/{name}/mean"] for name in ("environment", "seen_environments")}
    assert found == {"environment": 5, "seen_environments": 1} and line["turns/mean"] == 1
