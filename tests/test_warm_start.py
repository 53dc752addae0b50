"""Demonstrations: laid out by the trainer's own code, right about as often as they mean to be, and learned."""

import asyncio
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from server_fixture import make_tiny
from transformers import AutoTokenizer

from config import TrainConfig
from envs import mcp_tools
from plugins import load_function
from rewards import get_reward_functions, score

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts"))
from warm_start import demonstrate  # noqa: E402


@pytest.mark.parametrize("task", ["arithmetic", "search"])
def test_examples_are_careless(task):
    """Some demonstrations use the tool and are mostly right, the others guess: there is something left to learn."""
    example, tools = (
        f"{ROOT}/examples/{task}.py",
        dict(tools=["calculator"], reward_funcs=[f"{ROOT}/examples/arithmetic.py:right"]),
    )
    if task == "search":
        tools = dict(mcp_config=f"{ROOT}/examples/search.json", tool_parser="tags", reward_funcs=["squad_em"])
    cfg, rows = TrainConfig(**tools, num_generations=2), load_function(f"{example}:rows")
    try:
        processor = AutoTokenizer.from_pretrained(make_tiny())
        shown = demonstrate(rows("train", 0)[:100], load_function(f"{example}:demonstrate"), processor, None, cfg)
        trajectories = asyncio.run(shown)
        asyncio.run(score(trajectories, get_reward_functions(cfg), cfg))
    finally:
        mcp_tools.close_all()
    called = [t for t in trajectories if t.turns > 1]
    assert 0.02 < len(called) / len(trajectories) < 0.6
    assert not any(call["failed"] for t in called for call in t.info["turns"][0]["info"]["calls"])
    right = [
        statistics.fmean(t.info["reward"] for t in trajectories if (t in called) == used) for used in (True, False)
    ]
    assert right[0] > 0.5 > 0.2 > right[1]
    held_out = {json.dumps(row["prompt"]) for row in rows("test", 0)}
    assert not held_out & {json.dumps(row["prompt"]) for row in rows("train", 0)}


def test_a_careless_walker():
    cfg = TrainConfig(
        env="frozenlake?compass=true", num_generations=1, max_completion_length=1500, advantage="reinforce_plus_plus"
    )
    rows = load_function(f"{ROOT}/examples/games.py:rows")
    walk = load_function(f"{ROOT}/examples/frozenlake.py:demonstrate")
    processor = AutoTokenizer.from_pretrained(make_tiny())
    trajectories = asyncio.run(demonstrate(rows("train", 0)[:60], walk, processor, None, cfg))
    assert 0.3 < statistics.fmean(t.info["metrics"]["success"] for t in trajectories) < 0.9
    moves = [turn["info"]["valid"] for t in trajectories for turn in t.info["turns"]]
    assert 0.9 < statistics.fmean(moves) < 0.99


def test_the_seed_gives_the_demonstrations():
    """Whatever else has drawn from python's generator, and however the environments' threads take turns."""
    walk = load_function(f"{ROOT}/examples/frozenlake.py:demonstrate")
    rows = load_function(f"{ROOT}/examples/games.py:rows")("train", 0)[:8]
    processor = AutoTokenizer.from_pretrained(make_tiny())

    def shown(seed: int, step: int) -> list[list[int]]:
        cfg = TrainConfig(env="frozenlake?compass=true", num_generations=2, max_completion_length=1500, seed=seed)
        return [t.token_ids for t in asyncio.run(demonstrate(rows, walk, processor, None, cfg, step))]

    first = shown(0, 0)
    assert shown(0, 0) == first and first[0] != first[1]
    assert first not in (shown(1, 0), shown(0, 1))


def test_demonstrations_that_are_cut_are_counted():
    """Without their last token they teach never to stop."""
    processor = AutoTokenizer.from_pretrained(make_tiny())
    for most, cut in ((8, 4), (400, 0)):
        cfg = TrainConfig(env="frozenlake", num_generations=2, max_turn_length=most, max_completion_length=500)
        lengths = []
        asyncio.run(demonstrate([{"prompt": ""}] * 2, lambda *_: "word " * 40, processor, None, cfg, too_long=lengths))
        assert len(lengths) == cut and all(40 < length < 200 for length in lengths)


def test_the_script(tmp_path):
    command = [sys.executable, f"{ROOT}/scripts/warm_start.py", "--model_id", str(make_tiny()), "--tools", "calculator"]
    command += [
        "--dataset_id",
        f"{ROOT}/examples/arithmetic.py:rows",
        "--compute_dtype",
        "float32",
        "--max_steps",
        "20",
    ]
    command += ["--demonstrations", f"{ROOT}/examples/arithmetic.py:demonstrate", "--learning_rate", "3e-3"]
    command += [
        "--prompts_per_step",
        "8",
        "--output_dir",
        str(tmp_path),
        "--run_name",
        "warm",
        "--max_prompt_length",
        "400",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in done.stdout.splitlines() if "loss " in line]
    assert losses[-1] < 0.8 * 8.3  # ln 4096: where a random model begins
    assert (tmp_path / "warm" / "checkpoints" / "step_20" / "model.safetensors").is_file()
    wrong = subprocess.run([*command[:2]], capture_output=True, text=True, timeout=60, encoding="utf-8")
    assert wrong.returncode == 2 and "--demonstrations: give file.py:function" in wrong.stderr


def test_a_small_model_is_shown_how_to_play_the_customer():
    """Number and wish, one after the other, from the card of its row."""
    recipe = f"{ROOT}/recipes/support_customer.py"
    cfg = TrainConfig(
        env=f"{recipe}:Questions", num_generations=1, max_turns=3, max_completion_length=192, advantage="distill"
    )
    rows, processor = load_function(f"{recipe}:rows"), AutoTokenizer.from_pretrained(make_tiny())
    shown = demonstrate(rows("train", 0)[:20], load_function(f"{recipe}:demonstrate"), processor, None, cfg)
    for told in asyncio.run(shown):
        wish, last = told.row["wish"], processor.decode(told.token_ids).rpartition("assistant")[2]
        assert told.turns == 3 and wish["order"] in last and (wish["color"] or "it") in last
