"""What reward functions are given and may return, where it goes, what goes wrong; the rewards that read text alone."""

import asyncio
import math
import time
from decimal import Decimal

import numpy as np
import pytest

from config import ConfigError, TrainConfig
from rewards import (
    REWARDS,
    TRAINER_STATE,
    RewardError,
    answer_part,
    completion_text,
    get_reward_function,
    get_reward_functions,
    numbers,
    score,
    turn_ends,
)
from rollouts import Trajectory
from runlog import rollout_metrics
from utils import print_failure

pytestmark = pytest.mark.quick


def trajectory(text="5", loss_mask=(1, 1, 1), prompt="2 + 3 =", turns=1, **columns):
    count = len(loss_mask)
    return Trajectory(
        row={"prompt": prompt, **columns},
        group=0,
        prompt_ids=[1, 2],
        token_ids=list(range(10, 10 + count)),
        loss_mask=list(loss_mask),
        logprobs=[0.0] * count,
        token_rewards=[0.0] * count,
        turns=turns,
        info={"completion": text},
    )


def run(trajectories, functions, **settings):
    cfg = TrainConfig(reward_timeout=settings.pop("reward_timeout", 20.0), **settings)
    functions = functions if isinstance(functions, dict) else {"f": functions}
    asyncio.run(score(trajectories, functions, cfg))
    return trajectories


# ---- text and numbers -----------------------------------------------------------------------------------------------


def test_completion_text_of_strings_messages_and_parts():
    assert completion_text("a") == "a"
    turns = [
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
    ]
    assert completion_text(turns) == "a\nb"


@pytest.mark.parametrize(
    "text, part",
    [
        ("<answer>1</answer> or <answer> 2 </answer>.", "2"),
        ("<think><answer>1</answer></think>2", "2"),
        ("<answer>1", "<answer>1"),
    ],
)
def test_answer_part(text, part):
    assert answer_part(text) == part


@pytest.mark.parametrize(
    "text, expected",
    [
        ("1,234.50 and -3", ["1234.50", "-3"]),
        ("5-3=2. \u22127", ["5", "3", "2", "-7"]),
        ("$69 **70** 71% 1e3", ["69", "70", "71", "1000"]),
    ],
)
def test_numbers(text, expected):
    assert numbers(text) == [Decimal(number) for number in expected]


def test_last_number():
    texts = ["It is 5", "5 or 6", "five", "5.0", "1 + 4 = 5!"]
    assert REWARDS["last_number"](completions=texts, answer=["5"] * 5) == [1, 0, 0, 1, 1]
    assert REWARDS["math"](completions=[r"\boxed{\frac{1}{2}}"], answer=["0.5"]) == [1]  # imported when it is called
    assert REWARDS["last_number"](completions=["72", "7"], answer=["2 and 3 make\n#### 72", None]) == [1, None]
    with pytest.raises(ValueError, match="not one number.*exact_match"):
        REWARDS["last_number"](completions=["1"], answer=["1/2"])


def test_exact_match():
    texts = [" Paris. ", "<think>Rome</think><answer>PARIS</answer>", "It is Paris", ""]
    assert REWARDS["exact_match"](completions=texts, answer=["Paris"] * 4) == [1, 1, 0, 0]
    assert REWARDS["exact_match"](completions=["B", "x"], answer=[np.array(["a", "b"]), None]) == [1, None]


def test_squad():
    """The numbers of SQuAD's own examples of what counts as equal."""
    pairs = [("The  Eiffel Tower!", "eiffel tower", 1, 1), ("a tower in Paris", "the Eiffel Tower", 0, 2 * 1 / (3 + 2))]
    pairs += [("<answer>Rome</answer>", ["Paris", "Rome"], 1, 1)]
    for given, wanted, em, f1 in pairs:
        assert get_reward_function("squad_em")([given], [wanted]) == [em]
        assert get_reward_function("squad_f1")([given], [wanted]) == [pytest.approx(f1)]


def test_choices():
    said = ["B", "The answer is C) H2O", "The answer is A. No wait, it is B.", "A: no. B: yes."]
    assert get_reward_function("multiple_choice")(said, [1, "(C)", "B", "A"]) == [1, 1, 1, 0]
    with pytest.raises(ValueError, match="is no letter from A to H"):
        get_reward_function("multiple_choice")(["B"], ["red"])


def test_format():
    good = "<think>a\nb</think>\n<answer>c</answer>\n"
    bad = ["<think>a</think>c", good + "d", "<answer>c</answer><think>a</think>"]
    assert get_reward_function("format")(completions=[good, *bad]) == [1, 0, 0, 0]


def test_rewards_by_length():
    cfg = TrainConfig(max_completion_length=100)  # buffer 20
    ids = [[0] * n for n in (0, 80, 90, 100)]
    assert REWARDS["overlong"](completion_ids=ids, cfg=cfg) == pytest.approx([0, 0, -0.5, -1])
    assert REWARDS["length"](completion_ids=ids, cfg=cfg) == pytest.approx([0, -0.8, -0.9, -1])
    repeated = [[1, 2, 3, 4, 5], [1, 2, 3, 1, 2, 3], [7] * 10]
    assert get_reward_function("repetition")(repeated) == pytest.approx([0, -1 / 4, -7 / 8])


def test_use_of_tools():
    def played(*calls):
        made = trajectory("x", turns=2)
        made.info["turns"] = [{"info": {"calls": [{"call": c, "failed": c == "broken"} for c in calls]}}, {"info": {}}]
        return made

    given = [trajectory(turns=3), played("a 1", "a 2"), played("a 1", "a 1"), played("a 1", "broken")]
    assert get_reward_function("tool_use")(given) == [None, 1, 0.5, 0.5]
    assert get_reward_function("few_turns")(given[:2], TrainConfig(max_turns=5)) == [-0.5, -0.25]


@pytest.mark.parametrize("prompt", ["2 + 3 =", [{"role": "user", "content": "2 + 3 ="}]])
def test_a_right_answer_is_worth_the_same_behind_a_call(prompt):
    """Functions that compare a whole text with the answer compare the last turn's, of string prompts, too."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    direct, called = (trajectory(prompt=prompt, answer="5") for _ in range(2))
    said = [{"role": "assistant", "content": call}, {"role": "tool", "content": "5"}]
    called.info["messages"] = [*said, {"role": "assistant", "content": "5"}]
    run([direct, called], {name: get_reward_function(name) for name in ("exact_match", "squad_f1")})
    assert direct.info["rewards"] == called.info["rewards"] == {"exact_match": 1.0, "squad_f1": 1.0}


# ---- finding functions ----------------------------------------------------------------------------------------------


def test_unknown_names_and_missing_columns_are_found_early():
    with pytest.raises(ConfigError, match="'mat'.*Did you mean 'math'"):
        get_reward_function("mat")
    with pytest.raises(ConfigError, match=r"math \(training rows\): needs answer, but there are only .*solution"):
        get_reward_functions(TrainConfig(reward_funcs=["math"]), columns=["prompt", "solution"])
    assert get_reward_functions(TrainConfig(reward_funcs=["math"]), columns=["prompt", "answer"])


# ---- the call -------------------------------------------------------------------------------------------------------


def test_functions_get_trls_arguments_and_every_column():
    seen = {}

    def everything(completions, prompts, completion_ids, **columns):
        seen.update(completions=completions, prompts=prompts, completion_ids=completion_ids, columns=columns)
        return [0.0, 0.0]

    run([trajectory("a", answer="5", level=1), trajectory("b", (0, 1), answer="6")], everything)
    assert {seen["columns"].pop(name) is not None for name in ("trainer_state", "log_extra", "log_metric")} == {True}
    assert seen == {
        "completions": ["a", "b"],
        "prompts": ["2 + 3 =", "2 + 3 ="],
        "completion_ids": [[10, 11, 12], [11]],
        "columns": {"answer": ["5", "6"], "level": [1, None]},
    }


def test_functions_log_numbers_and_columns():
    """The run's own metrics of that name have precedence."""

    def logs(completions, trainer_state, log_metric, log_extra):
        log_metric("step", trainer_state.global_step)
        for name, value in {"reward": 7.0, "mine": 1}.items():
            log_metric(name, value)
            log_metric(name, value + 2)
        log_extra("seen", ["yes"])
        return [0.5]

    TRAINER_STATE.global_step = 3
    (row,) = run([trajectory()], logs)
    metrics = rollout_metrics.rollout_metrics([row])
    assert (metrics["reward"], metrics["mine"], metrics["step"]) == (0.5, 2, 3)
    assert row.info["extra"] == {"seen": "yes"}


def test_verification_comes_first():
    async def verify(trajectory):
        await asyncio.sleep(30 if trajectory.info["completion"] == "hang" else 0)
        if trajectory.info["completion"] == "broken":
            raise OSError("no data base")
        return len(trajectory.info["completion"])

    def by_length(completions, verification, **columns):
        return [None if found is None else float(found) for found in verification]

    by_length.verify = verify
    group = run([trajectory("four"), trajectory("hang")], by_length, reward_timeout=1.0)
    assert [t.info["reward"] for t in group] == [4.0, 0.0] and group[1].info["unrewarded"] == 1
    with pytest.raises(RewardError, match="its verify raised OSError: no data base"):
        run([trajectory("broken")], by_length)


# ---- where its values go --------------------------------------------------------------------------------------------


def test_the_weighted_sum_stands_on_the_last_sampled_token():
    one, two, none = trajectory("5", (1, 1, 0, 1, 0)), trajectory("6", (1, 1)), trajectory("", (0, 0))
    two.token_rewards = [0.0, 0.5]  # a turn's own reward
    functions = {
        "right": lambda completions: [float(c == "5") for c in completions],
        "two": lambda completions: [2, 2, 2],
    }
    run([one, two, none], functions, reward_weights=[1.0, -0.25])
    assert one.token_rewards == [0, 0, 0, 0.5, 0] and two.token_rewards == [0, 0] and none.token_rewards == [0, 0]
    assert one.info["rewards"] == {"right": 1, "two": 2} and one.info["reward"] == 0.5
    assert [t.info["reward_without_token"] for t in (one, two, none)] == [0, 0, 1]


def test_rewards_of_no_weight_still_judge_held_out_rows():
    """A run that learns from a teacher alone looks at them, and its evaluations would all say 0."""
    functions = {"right": lambda completions: [1.0], "short": lambda completions: [0.5]}
    for purpose, weights, expected in (("train", [0, 0], 0), ("eval", [0, 0], 1.5), ("eval", [0, 2], 1)):
        (one,) = run([trajectory("5")], functions, reward_weights=weights, purpose=purpose)
        assert one.info["reward"] == expected, (purpose, weights)


def test_none_does_not_apply():
    functions = {"a": lambda completions: [None, None], "b": lambda completions: [None, 3]}
    both = run([trajectory(), trajectory()], functions)
    assert math.isnan(both[0].info["rewards"]["a"]) and math.isnan(both[0].info["rewards"]["b"])
    assert both[0].info["unrewarded"] == 1 and both[0].info["reward"] == 0 and both[0].token_rewards[-1] == 0
    assert both[1].info["unrewarded"] == 0 and both[1].info["reward"] == 3


def test_components_are_logged_and_may_differ_by_row():
    values = [{"style": 0.5, "length": 1}, {"reward": 2, "style": 7}, {"style": None, "extra": -1}, {"a": None}]
    rows = run([trajectory() for _ in values], lambda completions: values)
    assert rows[0].info["rewards"] == {"f": 1.5, "f/style": 0.5, "f/length": 1}
    assert rows[1].info["rewards"] == {"f": 2, "f/style": 7}
    assert rows[2].info["rewards"] == {"f": -1, "f/extra": -1}
    assert math.isnan(rows[3].info["rewards"]["f"]) and rows[3].info["unrewarded"] == 1


def test_rewards_of_turns():
    mask = [1, 1, 0, 1, 0, 0, 1]
    assert turn_ends(mask) == [1, 3, 6] and turn_ends([0, 0]) == [] and turn_ends([1]) == [0]
    functions = {
        "by_turn": lambda completions: [{"turns": [0.5, 0.0, 1.0], "seen": 3}],
        "whole": lambda completions: [1.0],
    }
    (t,) = run([trajectory("x", mask, turns=3)], functions, reward_weights=[1.0, 10.0])
    assert t.token_rewards == [0, 0.5, 0, 0, 0, 0, 11.0] and t.info["reward"] == 11.5
    assert t.info["rewards"] == {"by_turn": 1.5, "by_turn/seen": 3.0, "whole": 1.0}
    with pytest.raises(RewardError, match="3 rewards for 2 turns"):
        run([trajectory("x", [1, 0, 1], turns=2)], functions)
    with pytest.raises(RewardError, match="'by_turn' returned rewards of 3 turns, of which loss_mask shows 2"):
        run([trajectory("x", [1, 0, 1], turns=3)], functions)


# ---- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, part",
    [
        ([1.0], "1 values for 2 completions"),
        ([1.0, "nan"], "for completion 1: text is not a number"),
        ([1.0, {"a": math.inf}], "for completion 1"),
    ],
)
def test_wrong_values_name_function_row_and_completion(values, part, capsys):
    rows = [trajectory("first text", answer="a1"), trajectory("second text", answer="a1")]
    with pytest.raises(RewardError) as error:
        run(rows, {"mine": lambda completions: values})
    message = str(error.value)
    assert "'mine'" in message and part in message and "'answer': 'a1'" in message
    assert "second text" in message
    assert print_failure(error.value, TrainConfig()) == 1 and "File " not in capsys.readouterr().err  # not our frames


def sleeps(completions):
    time.sleep(3600)


async def sleeps_async(completions):
    await asyncio.sleep(3600)


async def blocks_its_loop(completions):
    time.sleep(3600)


@pytest.mark.parametrize("endless", [sleeps, sleeps_async, blocks_its_loop])
def test_a_function_that_never_returns_is_counted(endless, caplog):
    rows = [trajectory(), trajectory()]
    functions = {"endless": endless, "fine": lambda completions: [1.0, 2.0]}
    run(rows, functions, reward_timeout=1.0, reward_weights=[2.0, 1.0])
    assert [row.info["reward"] for row in rows] == [1, 2] and rows[1].token_rewards == [0, 0, 2]
    assert [row.info["reward_timeouts"] for row in rows] == [1, 1]
    assert rows[0].info["rewards"] == {"endless": 0, "fine": 1}
    assert "'endless' took over --reward_timeout=1 s" in caplog.text

    async def quick(completions):
        return [1.0]

    assert run([trajectory()], quick)[0].info["reward_timeouts"] == 0, "async functions have a loop again"


def test_a_step_in_which_nothing_was_scored_in_time_ends_the_run():
    functions = {"endless": sleeps, "fine": lambda completions: [1.0, 2.0]}
    late = run([trajectory(), trajectory()], {"endless": sleeps}, reward_timeout=0.5)
    half = run([trajectory(), trajectory()], functions, reward_timeout=0.5)
    cfg = TrainConfig(reward_funcs=["endless"], reward_timeout=0.5)
    with pytest.raises(RuntimeError, match=r"endless.*--reward_timeout=0.5 s, for any of the 2 completions"):
        rollout_metrics.check_failed([late], cfg)
    assert rollout_metrics.check_failed([late, half], cfg) == {"rollout/failed": 0}
    seconds = rollout_metrics.rollout_metrics(half)
    assert seconds["time/reward/endless"] > 0.4 > seconds["time/reward/fine"] > 0
