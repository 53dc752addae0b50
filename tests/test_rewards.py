"""What reward functions return, how score() treats every way they can go wrong, and that time limits hold for real."""

import asyncio
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from server_fixture import make_tiny
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

import rewards
from config import ConfigError, TrainConfig
from data import load_rows
from rewards import (
    REWARDS,
    RewardError,
    answer_part,
    completion_text,
    get_reward_function,
    get_reward_functions,
    is_own_metric,
    numbers,
    score,
)
from rollouts import Trajectory
from runlog import rollout_metrics
from safety.workers import WorkerPool

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parent.parent
CFG = TrainConfig()


def trajectory(text="5", loss_mask=(1, 1, 1), prompt="2 + 3 =", **columns):
    count = len(loss_mask)
    return Trajectory(
        row={"prompt": prompt, **columns},
        group=0,
        prompt_ids=[1, 2],
        token_ids=list(range(10, 10 + count)),
        loss_mask=list(loss_mask),
        logprobs=[0.0] * count,
        token_rewards=[0.0] * count,
        info={"completion": text},
    )


def run(trajectories, functions, **settings):
    cfg = TrainConfig(reward_timeout=settings.pop("reward_timeout", 20.0), **settings)
    functions = functions if isinstance(functions, dict) else {"f": functions}
    asyncio.run(score(trajectories, functions, cfg))
    return trajectories


# ---- text and numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["2 + 3 =", [{"role": "user", "content": "2 + 3 ="}]])
def test_a_right_answer_is_worth_the_same_behind_a_call(prompt):
    """Functions that compare a whole text with the answer compare the last turn's, of string prompts, too."""
    row = load_rows("reasoning_gym:chain_sum?size=1")[0] | {"prompt": prompt}
    call, answer = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>', row["answer"]
    said = [{"role": "assistant", "content": call}, {"role": "tool", "content": answer}]
    direct, called, tagged = (trajectory(text, **row) for text in (answer, answer, "Bye."))
    called.info["messages"] = [*said, {"role": "assistant", "content": answer}]
    last = {"role": "assistant", "content": "Bye."}
    tagged.info["messages"] = [{"role": "assistant", "content": f"<answer>{answer}</answer>"}, said[1], last]
    names = ("exact_match", "squad_em", "squad_f1", "reasoning_gym")
    run([direct, called, tagged], {name: REWARDS[name] for name in names})
    assert [t.info["rewards"] for t in (direct, called, tagged)] == [dict.fromkeys(names, 1.0)] * 3


def test_completion_text_of_strings_messages_and_parts():
    assert completion_text("a") == "a"
    assert completion_text([{"role": "assistant", "content": "a"}]) == "a"
    turns = [
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
    ]
    assert completion_text(turns) == "a\nb"


@pytest.mark.parametrize(
    "text, part",
    [
        (" 5 ", "5"),
        ("<think>1</think> 2", "2"),
        ("<answer>1</answer> or <answer> 2 </answer>.", "2"),
        ("<think><answer>1</answer></think>2", "2"),
        ("<answer>1", "<answer>1"),
        ("1</answer>", "1</answer>"),
    ],
)
def test_answer_part(text, part):
    assert answer_part(text) == part


@pytest.mark.parametrize(
    "text, expected",
    [
        ("1,234.50 and -3", ["1234.50", "-3"]),
        ("5-3=2.", ["5", "3", "2"]),
        ("x = -7", ["-7"]),
        ("\u22127 and (-8)", ["-7", "-8"]),
        ("[1,2,3]", ["1", "2", "3"]),
        ("1,2345", ["1", "2345"]),
        ("$69 **70** 71%", ["69", "70", "71"]),
        (".5 or 0.5", ["0.5", "0.5"]),
        ("1e3 2e", ["1000", "2"]),
        ("1e99999999999999999999", ["1", "99999999999999999999"]),
        ("none", []),
    ],
)
def test_numbers(text, expected):
    assert numbers(text) == [Decimal(number) for number in expected]


def test_last_number():
    texts = ["It is 5", "5 or 6", "five", "", "5.0", "-5", "1 + 4 = 5!"]
    assert REWARDS["last_number"](completions=texts, answer=["5"] * 7) == [1, 0, 0, 0, 1, 0, 1]
    assert REWARDS["last_number"](completions=["72", "7"], answer=["2 and 3 make\n#### 72", None]) == [1, None]
    assert REWARDS["last_number"](completions=["1234.5"], answer=[1234.5]) == [1]
    with pytest.raises(ValueError, match="not one number.*exact_match"):
        REWARDS["last_number"](completions=["1"], answer=["1/2"])


def test_exact_match():
    texts = [" Paris. ", "<think>Rome</think><answer>PARIS</answer>", "It is Paris", "paris  ", ""]
    assert REWARDS["exact_match"](completions=texts, answer=["Paris"] * 5) == [1, 1, 0, 1, 0]
    assert REWARDS["exact_match"](completions=["B", "7", "x"], answer=[["a", "b"], 7, None]) == [1, 1, None]


def test_format():
    good = "<think>a\nb</think>\n<answer>c</answer>\n"
    bad = ["c", "<think>a</think>c", good + "d", good + good, "<answer>c</answer><think>a</think>", "x" + good]
    assert REWARDS["format"](completions=[good, *bad]) == [1, 0, 0, 0, 0, 0, 0]


def test_overlong_and_length():
    cfg = TrainConfig(max_completion_length=100)  # buffer 20
    ids = [[0] * n for n in (0, 50, 80, 90, 95, 100)]
    assert REWARDS["overlong"](completion_ids=ids, cfg=cfg) == pytest.approx([0, 0, 0, -0.5, -0.75, -1])
    assert REWARDS["length"](completion_ids=ids, cfg=cfg) == pytest.approx([0, -0.5, -0.8, -0.9, -0.95, -1])


# ---- scoring processes ----------------------------------------------------------------------------------------------


def test_math():
    cases = [
        (r"\frac{1}{2}", r"so \boxed{\frac{2}{4}}", 1),
        (r"\frac{1}{2}", "the answer is 0.5", 1),
        ("x+1", "$1+x$", 1),
        ("x+1", "<think>x</think><answer>1+x</answer>", 1),
        ("#### 72", "That makes 72.", 1),
        ("1,234", "1234", 1),
        (5, "5", 1),
        ("5", "6", 0),
        ("5", "", 0),
        ("5", "x" * 5000, 0),
        ("5", "<answer>5 eggs</answer>", 1),
        ("5", "<answer>6 eggs</answer>", 0),
        ("5 dollars", "<answer>5</answer>", 1),
        ("5", r"So \boxed{5 eggs}", 1),
        (r"\text{Evelyn}", r"\boxed{Evelyn}", 1),
        ("silent", r"\boxed{listen}", 0),
        (r"\$32,\!348", r"\boxed{\$32,348}", 1),
        ("silent", "<answer>listen</answer>", 0),
        ("No solution", "<answer>no solution</answer>", 1),
        (r"\frac{\pi}{2}", "<answer>pi/2</answer>", 1),
        (r"2\sin x", "<answer>2 sin(x)</answer>", 1),
        ("2 x y z", "<answer>2xyz</answer>", 1),
        ("-5", "the answer is \u22125", 1),
        ("5", "<answer>**5**</answer>", 1),
        ("5", "So 1 2 3 <answer>5", 1),
        (None, "5", None),
        ("", "5", None),
    ]
    answers, texts, expected = zip(*cases, strict=True)
    assert REWARDS["math"](completions=list(texts), answer=list(answers)) == list(expected)


def test_math_pays_for_no_sum_that_the_grader_does_itself():
    """The question over again is equal to its answer: where that is a number, a number has to be given."""
    unevaluated = {"reward": 0.0, "unevaluated": 1.0}
    cases = [
        ("408", "<answer>12 * 34</answer>", r"So 12 * 34", r"\boxed{5 = 12*34}", r"\boxed{x = 12 \cdot 34}"),
        ("26", r"\boxed{\frac{44}{4} + 15}"),
        ("3", r"\boxed{\frac{12}{4}}", "12/4", r"\boxed{\log_2 8}", r"\boxed{\sqrt{9}}"),
        ("56", r"\boxed{\binom{8}{3}}"),
        ("120", r"\boxed{5!}"),
        ("1/3", r"\boxed{\int_0^1 x^2 dx}", r"\boxed{1 - \frac{2}{3}}"),
    ]
    answers, texts = zip(*((case[0], text) for case in cases for text in case[1:]), strict=True)
    assert REWARDS["math"](completions=list(texts), answer=list(answers)) == [unevaluated] * len(texts)
    cases = [
        ("408", r"\boxed{12 * 34 = 408}", r"\boxed{408 = 12*34}", r"\boxed{x = 408}", r"\boxed{408 \text{ cm}^2}"),
        ("1234", r"\boxed{1,234}", r"\boxed{1{,}234}", r"\boxed{1234.0}", r"\boxed{\mathbf{1234}}"),
        ("-5", r"\boxed{-\$5}", r"\boxed{(-5)}", r"\boxed{p(2) = -5}", r"\boxed{\{-5\}}", r"\boxed{-5^\circ}"),
        ("300000", r"\boxed{3 \times 10^5}", r"\boxed{300,000}"),
        ("1000000", r"\boxed{10^6}"),
        ("0.5", r"\boxed{\frac{1}{2}}", "1/2", r"\boxed{50\%}", r"\boxed{\frac{2}{4}}", ".5"),
        ("1.5", r"\boxed{1\frac{1}{2}}", r"\boxed{\frac32}"),
        (r"\sqrt{12}", r"\boxed{2\sqrt{3}}"),
        ("2^{10}", r"\boxed{2^5 \cdot 2^5}"),
    ]
    answers, texts = zip(*((case[0], text) for case in cases for text in case[1:]), strict=True)
    scores = REWARDS["math"](completions=list(texts), answer=list(answers))
    assert {text: score for text, score in zip(texts, scores, strict=True) if score != 1} == {}


def test_math_in_signs_of_unicode():
    cases = [
        (r"2\sqrt{3}", "\\boxed{2\u221a3}", "<answer>2\u221a3</answer>", "<answer>2\u221a(3)</answer>"),
        (r"\frac{\sqrt{12}}{2}", "<answer>\u221a12/2</answer>"),
        ("x^2+1", "<answer>x\u00b2 + 1</answer>", "\\boxed{x\u00b2+1}"),
        ("2x^{-10}", "<answer>2\u00b7x\u207b\u00b9\u2070</answer>"),
        (r"\frac{1}{2}", "<answer>\u00bd</answer>", "\\boxed{\u00bd}"),
        ("1.5", "<answer>1\u00bd</answer>"),
        (r"[0,\infty)", "<answer>[0,\u221e)</answer>"),
        ("1000000", r"\boxed{1\,000\,000}"),
        ("2\u221a3", r"\boxed{2\sqrt{3}}"),
        ("5", "<answer>5 m\u00b2</answer>", "It is 5 cm\u00b2."),  # a unit, as before
    ]
    answers, texts = zip(*((case[0], text) for case in cases for text in case[1:]), strict=True)
    scores = REWARDS["math"](completions=list(texts), answer=list(answers))
    assert {text: score for text, score in zip(texts, scores, strict=True) if score != 1} == {}
    scores = REWARDS["math"](completions=["<answer>\u221a9</answer>", "<answer>5\u00b2</answer>"], answer=["3", "25"])
    assert scores == [{"reward": 0.0, "unevaluated": 1.0}] * 2


@pytest.mark.slow
def test_math_that_never_ends_costs_its_own_limit_only():
    """sympy evaluates 9^9^9^9 for longer than anyone waits: the process is replaced, the others' scores stand."""
    pool = WorkerPool("math", size=2, item_timeout=3.0)
    hopeless, fine = (r"\boxed{9^{9^{9^{9}}}}", False, "5"), ("5", False, "5")
    assert pool.map([fine, fine]) == [1, 1]  # both processes are up
    start = time.monotonic()
    answers = pool.map([fine, hopeless, fine, None, fine])
    assert answers == [1, {"reward": 0.0, "timeout": 1.0}, 1, None, 1]
    assert time.monotonic() - start < 20
    assert pool.map([fine] * 3) == [1] * 3, "the pool goes on"


@pytest.mark.slow
def test_a_scoring_process_that_dies_is_replaced():
    pool = WorkerPool("math", size=1)
    assert pool.map([("5", False, "5")]) == [1]
    worker = pool.slots.get()
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    pool.slots.put(worker)
    assert pool.map([("5", False, "5")]) == [1]


@pytest.mark.slow
def test_scoring_processes_end_with_a_killed_trainer():
    """One waits and finds its input closed; the other computes something endless and has an alarm set."""
    code = """
import rewards, threading, time
pool = rewards.WorkerPool("math", size=2, item_timeout=1.0)
workers = [pool.start(), pool.start()]
pool.slots.get(), pool.slots.get()
pool.slots.put(workers[0])
threading.Thread(target=pool.map, args=([(r"\\boxed{9^{9^{9^{9}}}}", False, "5")],), daemon=True).start()
time.sleep(0.3)
print(*(worker.pid for worker in workers), flush=True)
time.sleep(60)
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 2 and all(map(alive, pids))
    trainer.kill()
    trainer.communicate()
    deadline = time.monotonic() + 15
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split(")")[1].split()[0]
    except FileNotFoundError:
        return False


def test_a_scoring_process_that_cannot_start_is_an_error(capfd):
    with pytest.raises(RuntimeError, match="'nonsense' did not start"):
        WorkerPool("nonsense", size=1).map([("a",)])
    assert "no 'nonsense_scorer'" in capfd.readouterr().err


@pytest.mark.slow
def test_reasoning_gym_scores_with_the_parameters_of_the_row():
    rows = [
        load_rows("reasoning_gym:chain_sum?size=1", seed=1)[0],
        load_rows("reasoning_gym:puzzle24?min_value=1&max_value=6&size=1", seed=1)[0],
        load_rows("reasoning_gym:leg_counting?size=1", seed=1)[0],
    ]
    function, answer = REWARDS["reasoning_gym"], rows[0]["answer"]
    columns = {key: [row.get(key) for row in rows] for key in rows[0]}
    completions = [f"<think>hm</think><answer>{answer}</answer>", "garbage (", rows[2]["answer"]]
    first, second, third = function(completions=completions, **columns)
    assert (first, third) == (1, 1) and second < 0.1
    several = {key: [value] * 3 for key, value in rows[0].items()}
    right, wrong, sentence = function(completions=[answer, "x", f"It is {answer}."], **several)
    assert right == 1 and wrong == 0 and 0 < sentence < 1
    del several["reasoning_gym_task"]  # a data set of someone else's: metadata may be JSON, too
    several["metadata"] = ['{"source_dataset": "chain_sum"}', rows[0]["metadata"], None]
    assert function(completions=[answer] * 3, **several) == [1, 1, None]
    with pytest.raises(ConfigError, match="chain_sun"):
        function(completions=["1"], metadata=[{"source_dataset": "chain_sun"}], answer=["1"])


def test_a_scorer_that_fails_is_seen_not_fatal():
    row = load_rows("reasoning_gym:prime_factorization?size=1")[0]  # its scorer calls int() on whatever stands there
    columns = {key: [value] * 2 for key, value in row.items()}
    values = REWARDS["reasoning_gym"](completions=["garbage (", row["answer"]], **columns)
    assert values == [{"reward": 0.0, "scorer_error": 1.0}, 1]


# ---- finding functions ----------------------------------------------------------------------------------------------


def test_own_function_from_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def brevity(completions, **columns): return [-len(c) for c in completions]\ndef other(completions): pass\n",
        encoding="utf-8",
    )
    assert get_reward_function(f"{tmp_path}/mine.py:brevity")(completions=["ab"]) == [-2]
    functions = get_reward_functions(TrainConfig(reward_funcs=["length", f"{tmp_path}/mine.py:brevity"]))
    assert list(functions) == ["length", "brevity"]
    with pytest.raises(ConfigError, match="has no 'brief'.*brevity, other"):
        get_reward_function(f"{tmp_path}/mine.py:brief")
    with pytest.raises(ConfigError, match="no file"):
        get_reward_function(f"{tmp_path}/yours.py:brevity")
    with pytest.raises(ConfigError, match="two functions are named 'brevity'"):
        get_reward_functions(TrainConfig(reward_funcs=[f"{tmp_path}/mine.py:brevity"] * 2))


def test_unknown_names_missing_columns_and_wrong_weights_are_found_early():
    with pytest.raises(ConfigError, match="'mat'.*exact_match, few_turns, format, .*last_number.*Did you mean 'math'"):
        get_reward_function("mat")
    with pytest.raises(ConfigError, match="reward_weights has 1 values for 2 reward functions"):
        get_reward_functions(SimpleNamespace(reward_funcs=["math", "format"], reward_weights=[1.0]))
    with pytest.raises(ConfigError, match="math: needs answer, but there are only .*solution"):
        get_reward_functions(TrainConfig(reward_funcs=["math"]), columns=["prompt", "solution"])
    assert get_reward_functions(TrainConfig(reward_funcs=["math"]), columns=["prompt", "answer"])


# ---- score: the call ------------------------------------------------------------------------------------------------


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


def test_chat_prompts_give_chat_completions():
    chat = [{"role": "user", "content": "2 + 3"}]

    def f(completions, prompts):
        assert completions == [[{"role": "assistant", "content": "a"}]] and prompts == [chat]
        return [2.0]

    assert run([trajectory("a", prompt=chat)], f)[0].info["reward"] == 2


def test_only_named_arguments_go_to_a_function_without_kwargs():
    def f(level, trajectories, cfg, absent="default"):
        assert level == [3] and isinstance(trajectories[0], Trajectory) and cfg.reward_timeout == 20
        return [float(absent == "default")]

    assert run([trajectory(level=3, answer="5")], f)[0].info["reward"] == 1


def test_the_sum_stands_on_the_last_sampled_token():
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
        one = trajectory("5")
        run([one], functions, reward_weights=weights, purpose=purpose)
        assert one.info["reward"] == expected, (purpose, weights)


def test_none_does_not_apply():
    both = run(
        [trajectory(), trajectory()], {"a": lambda completions: [None, None], "b": lambda completions: [None, 3]}
    )
    assert math.isnan(both[0].info["rewards"]["a"]) and math.isnan(both[0].info["rewards"]["b"])
    assert both[0].info["unrewarded"] == 1 and both[0].info["reward"] == 0 and both[0].token_rewards[-1] == 0
    assert both[1].info["unrewarded"] == 0 and both[1].info["reward"] == 3
    (none,) = run([trajectory()], {"a": lambda completions: [{"reward": None, "big": 1e20}]})  # logged, not added up
    assert none.info["unrewarded"] == 1 and none.info["reward"] == 0


def test_components_are_logged_and_may_differ_by_row():
    values = [{"style": 0.5, "length": 1}, {"reward": 2, "style": 7}, {"style": None, "extra": -1}, {"a": None}, 4]
    rows = run([trajectory() for _ in values], lambda completions: values)
    assert rows[0].info["rewards"] == {"f": 1.5, "f/style": 0.5, "f/length": 1}
    assert rows[1].info["rewards"] == {"f": 2, "f/style": 7}
    assert rows[2].info["rewards"] == {"f": -1, "f/extra": -1}
    assert math.isnan(rows[3].info["rewards"]["f"]) and rows[3].info["unrewarded"] == 1
    assert rows[4].info["reward"] == 4


@pytest.mark.parametrize("values", [[1, 0], (True, False), np.array([1, 0]), np.float32([1, 0]), torch.tensor([1, 0])])
def test_kinds_of_numbers(values):
    rows = run([trajectory(), trajectory()], lambda completions: values)
    assert [row.info["reward"] for row in rows] == [1, 0]


def test_names_of_the_runs_own_metrics_are_not_taken(caplog):
    def logs(completions, log_metric):
        for name, value in {"step": 5, "reward": 7.0, "eval/reward": 9, "mine": 1, "huge": 1e308}.items():
            log_metric(name, value)
            log_metric(name, value)
        return [0.5]

    metrics = rollout_metrics.rollout_metrics(run([trajectory()], logs))
    assert metrics["reward"] == 0.5 and metrics["mine"] == 1 and not {"step", "eval/reward"} & metrics.keys()
    assert [metrics[f"log_metric/{name}"] for name in ("step", "reward", "eval/reward")] == [5, 7, 9]
    assert math.isnan(metrics["huge"]) and "log_metric('step')" in caplog.text


def test_every_metric_in_the_glossary_is_the_runs_own():
    pages = [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("metrics.md", "async.md")]
    lines = [line for page in pages for line in page.splitlines()]
    names = re.findall(r"`([\w@/]+)`", "".join(line.split("|")[1] for line in lines if line.startswith("| `")))
    names = [name for name in names if not name.startswith("DOMAIN/")]
    assert len(names) > 70 and [name for name in names if not is_own_metric(name)] == []


def test_async_functions_share_one_loop_and_run_at_the_same_time():
    loops, running, most = [], [0], [0]

    async def slow(completions):
        loops.append(asyncio.get_running_loop())
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.5)
        running[0] -= 1
        return [1.0]

    def returns_a_coroutine(completions):
        return slow(completions)

    row = run([trajectory()], {"a": slow, "b": slow, "c": returns_a_coroutine})[0]
    run([trajectory()], slow)
    assert row.info["reward"] == 3 and most[0] == 3
    assert len(set(map(id, loops))) == 1, "a client made at one step must work at the next"


def test_no_trajectories_is_fine():
    run([], lambda completions: [])


# ---- score: what goes wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, part",
    [
        ([1.0], "1 values for 2 completions"),
        ([1.0, 2.0, 3.0], "3 values for 2 completions"),
        (None, "returned None"),
        (1.0, "returned 1.0, a float"),
        ("ab", "returned 'ab', a str"),
        ({"a": 1, "b": 2}, "a dict"),
        ({1.0, 0.5}, "a set, which has no order"),
        (frozenset((1.0, 0.5)), "a frozenset, which has no order"),
        ({1.0: 0, 0.5: 0}.keys(), "a dict_keys, which has no order"),
        ([1.0, {"turns": {1.0}}], "for completion 1: returned {1.0}, a set, which has no order"),
        ([1.0, "nan"], "for completion 1: text is not a number"),
        ((x for x in (1, 2)), "a generator"),
        (torch.tensor(1.0), "a Tensor"),
        ([1.0, "1"], "for completion 1: text is not a number"),
        ([1.0, [1.0]], "for completion 1"),
        ([1.0, math.nan], "for completion 1: a reward must be finite"),
        ([1.0, -math.inf], "must be finite"),
        ([1.0, 1e39], "for completion 1: a reward must be finite, and from -1e+18 to 1e+18"),
        ([1.0, {"a": math.nan}], "must be finite"),
        ([1.0, {"a": "b"}], "text is not a number"),
        ([1.0, 10**400], "for completion 1"),
        (torch.ones(2, 2), "for completion 0"),
    ],
)
def test_wrong_values_name_function_row_and_completion(values, part):
    with pytest.raises(RewardError) as error:
        run(
            [trajectory("first text", answer="a1"), trajectory("second text", answer="a1")],
            {"mine": lambda completions: values},
        )
    message = str(error.value)
    assert "'mine'" in message and part in message and "'answer': 'a1'" in message
    assert ("first text" if "completion 0" in part else "second text") in message


@pytest.mark.parametrize(
    "stop", [ZeroDivisionError("by hand"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()]
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_that_raises_stops_the_run(stop, is_async):
    def raises(completions):
        raise stop

    async def raises_later(completions):
        raise stop

    with pytest.raises(RewardError) as error:
        run([trajectory("the text", answer="the answer")], {"mine": raises_later if is_async else raises})
    assert f"'mine' raised {type(stop).__name__}" in str(error.value)
    assert "the text" in str(error.value) and "the answer" in str(error.value)
    assert error.value.__cause__ is stop
    assert run([trajectory()], lambda completions: [1])[0].info["reward"] == 1, "the next call works"


def test_a_missing_column_is_named():
    with pytest.raises(RewardError, match="'math' needs answer.*solution"):
        run([trajectory(solution="5")], {"math": REWARDS["math"]})


def sleeps(completions):
    time.sleep(3600)


async def sleeps_async(completions):
    await asyncio.sleep(3600)


async def blocks_its_loop(completions):
    time.sleep(3600)


async def will_not_be_cancelled(completions):
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass


@pytest.mark.slow
@pytest.mark.parametrize("endless", [sleeps, sleeps_async, blocks_its_loop, will_not_be_cancelled])
def test_a_function_that_never_returns_is_counted(endless, caplog):
    rows, start = [trajectory(), trajectory()], time.monotonic()
    functions = {"endless": endless, "fine": lambda completions: [1.0, 2.0]}
    run(rows, functions, reward_timeout=1.0, reward_on_timeout=-0.5, reward_weights=[2.0, 1.0])
    assert time.monotonic() - start < 15
    assert [row.info["reward"] for row in rows] == [0, 1] and rows[0].token_rewards == [0, 0, 0]
    assert rows[1].token_rewards == [0, 0, 1]
    assert [row.info["reward_timeouts"] for row in rows] == [1, 1]
    assert rows[0].info["rewards"] == {"endless": -0.5, "fine": 1}
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
    assert rollout_metrics.check_failed([late, half], cfg) == 0
    seconds = rollout_metrics.reward_seconds(half)
    assert seconds["time/reward/endless"] > 0.4 > seconds["time/reward/fine"] > 0


@pytest.mark.slow
def test_a_busy_loop_ends_with_the_program():
    """`while True` holds a thread for ever; neither score() nor the exit may wait for it."""
    code = """
import asyncio, types, config, rewards

def busy(completions):
    while True: pass

async def busy_async(completions):
    while True: pass

lists = dict(loss_mask=[1], token_ids=[1], token_rewards=[0])
row = types.SimpleNamespace(row={"prompt": "p"}, info={"completion": "c"}, **lists)
functions = {"busy": busy, "busy_async": busy_async}
asyncio.run(rewards.score([row], functions, config.TrainConfig(reward_timeout=0.5)))
print(row.info["reward_timeouts"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, encoding="utf-8"
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_cancelling_score_leaves_no_noise(capfd):
    async def cancelled():
        task = asyncio.ensure_future(score([trajectory()], {"f": lambda completions: time.sleep(0.3)}, TrainConfig()))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    time.sleep(0.5)
    assert "Traceback" not in capfd.readouterr().err


def test_the_loop_stays_free_while_rewards_compute():
    def heavy(completions):
        time.sleep(0.5)
        return [1.0]

    async def ticks():
        count, task = 0, asyncio.ensure_future(score([trajectory()], {"f": heavy}, TrainConfig()))
        while not task.done():
            await asyncio.sleep(0.01)
            count += 1
        return count

    assert asyncio.run(ticks()) > 10


# ---- spans: rewards of parts of the text -----------------------------------------------------------------------------


def spanned(text, tokenizer, *, pieces=None, special=True):
    """A trajectory of one turn whose tokens are `pieces` of the text, and an end-of-turn token."""
    ids = [i for piece in pieces or [text] for i in tokenizer(piece, add_special_tokens=False)["input_ids"]]
    ids += [tokenizer.eos_token_id] * special
    one = trajectory(tokenizer.decode(ids, skip_special_tokens=True), [1] * len(ids))
    one.token_ids = ids
    return one


def sentences(completions, **columns):
    """1 for each sentence that has a digit, -0.5 for each that has none."""
    values = []
    for text in completions:
        found = [(m.start(), m.end()) for m in re.finditer(r"[^.]+\.", text)]
        values.append({"spans": [(a, b, 1.0 if re.search(r"\d", text[a:b]) else -0.5) for a, b in found]})
    return values


def test_rewards_of_sentences_stand_where_these_end():
    tokenizer = AutoTokenizer.from_pretrained(make_tiny())
    text = "We have 2 apples. Nobody knows why. So 3."
    (one,) = [spanned(text, tokenizer)]
    functions = {"f": sentences, "g": lambda completions, **_: [10.0]}
    asyncio.run(score([one], functions, TrainConfig(reward_weights=[2.0, 1.0], reward_funcs=["f", "g"]), tokenizer))
    placed = {place: reward for place, reward in enumerate(one.token_rewards) if reward}
    # By hand: the last token of a sentence is the one with which the text first holds its full stop.
    read = [tokenizer.decode(one.token_ids[: n + 1], skip_special_tokens=True) for n in range(len(one.token_ids))]
    ends = [next(n for n, text in enumerate(read) if text.count(".") == k) for k in (1, 2, 3)]
    assert placed == {ends[0]: 2.0, ends[1]: -1.0, ends[2]: 2.0, len(read) - 1: 10.0}
    assert one.info["rewards"] == {"f": 1.5, "f/spans": 3.0, "g": 10.0} and one.info["reward"] == 13.0
    assert json.loads(one.info["extra"]["spans/f"])[0] == [0, 17, 1.0]


def test_the_spans_of_the_documentation():
    page = (ROOT / "docs" / "data-and-rewards.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n# my_rewards.py\n(.*?)```", page, re.DOTALL)
    names: dict = {}
    exec(code, names)
    tokenizer = AutoTokenizer.from_pretrained(make_tiny())
    one = spanned("2 + 3 = 5, so\n5 + 4 = 8. Then 1 + 1 = 2", tokenizer)
    asyncio.run(score([one], {"sums": names["sums"]}, TrainConfig(), tokenizer))
    assert [reward for reward in one.token_rewards if reward] == [1.0, -1.0, 1.0] and one.info["reward"] == 1.0
    read = [tokenizer.decode(one.token_ids[:n], skip_special_tokens=True) for n in range(len(one.token_ids) + 1)]
    wrong = one.token_rewards.index(-1.0)
    assert "5 + 4 = 8" in read[wrong + 1] and "5 + 4 = 8" not in read[wrong]


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_characters_of_several_bytes_and_tokens(step):
    """A character belongs to the token that ends it: its bytes may be in several, and a token may hold several."""
    tokenizer = AutoTokenizer.from_pretrained(make_tiny())
    text = "Ω≈ç √∫ 🦜🦜🏽 naïve 日本語。ok  two  spaces\n\tend"
    one = spanned(text, tokenizer, pieces=[text[i : i + step] for i in range(0, len(text), step)])
    text = one.info["completion"]
    every = lambda completions, **_: [{"spans": [(i, i + 1, 2.0**-i) for i in range(len(text))]}]  # noqa: E731
    asyncio.run(score([one], {"f": every}, TrainConfig(), tokenizer))
    wanted = [0.0] * len(one.token_ids)
    for i in range(len(text)):  # by hand, in bytes: the first token with which they are all there
        size = len(text[: i + 1].encode())
        sizes = [len(raw(tokenizer, one.token_ids[: n + 1])) for n in range(len(wanted) - 1)]
        wanted[next(n for n, known in enumerate(sizes) if known >= size)] += 2.0**-i
    assert one.token_rewards == wanted


def raw(tokenizer, ids) -> bytes:
    """What tokens of a byte-level tokenizer stand for."""
    alphabet = {c: b for b, c in bytes_to_unicode().items()}
    return bytes(alphabet[c] for piece in tokenizer.convert_ids_to_tokens(ids) for c in piece)


@pytest.mark.parametrize(
    "spans, message",
    [
        ([(0, 6, 1.0)], "0 <= start < end <= 5"),
        ([(-1, 2, 1.0)], "no span"),
        ([(2, 2, 1.0)], "start < end"),
        ([(3, 2, 1.0)], "start < end"),
        ([(0, 2)], "no span"),
        ([(0.0, 2.0, 1.0)], "no span"),
        ([(0, True, 1.0)], "no span"),
        ([(0, 2, math.nan)], "must be finite"),
        ([(0, 2, None)], "None is no value of a span"),
        ({(0, 2): 1.0}, "in a list"),
        ("02", "in a list"),
    ],
)
def test_spans_that_are_none(spans, message):
    tokenizer = AutoTokenizer.from_pretrained(make_tiny())
    with pytest.raises(RewardError, match=f"'f' returned .*completion 0.*{re.escape(message)}"):
        asyncio.run(score([spanned("right", tokenizer)], {"f": lambda **_: [{"spans": spans}]}, CFG, tokenizer))


def test_spans_stand_alone_and_need_the_text_that_was_sampled():
    tokenizer = AutoTokenizer.from_pretrained(make_tiny())
    one = spanned("right", tokenizer)
    for more in ({"reward": 1.0}, {"turns": [1.0]}):
        with pytest.raises(RewardError, match="'spans' are the whole reward: give 'turns' or 'reward' by another"):
            asyncio.run(score([one], {"f": lambda more=more, **_: [{"spans": []} | more]}, CFG, tokenizer))
    asyncio.run(score([one], {"f": lambda **_: [{"spans": []}]}, CFG, tokenizer))
    assert one.info["reward"] == 0 == sum(one.token_rewards) and not one.info["unrewarded"]
    one.info["completion"] = "wrong"
    with pytest.raises(RewardError, match="tokens read 'right.*not 'wrong': no token can be found"):
        asyncio.run(score([one], {"f": lambda **_: [{"spans": [(0, 2, 1.0)]}]}, CFG, tokenizer))


def test_a_copy_for_a_reward_function_shares_what_is_noted_of_the_trajectory():
    """Its notes and the live environment in `info` are the trajectory's own; what is pickled has no environment."""
    environment = object()
    trajectory = Trajectory({"prompt": "a"}, 0, [1], [2], [1], [-1.0], [0.0], info={"object": environment})
    own = rewards.copy_of(trajectory)
    own.info["noted"] = 1
    own.token_rewards[0] = 9.0
    assert trajectory.info == {"object": environment, "noted": 1} and trajectory.token_rewards == [0.0]
    assert pickle.loads(pickle.dumps(trajectory)).info == {"noted": 1}
