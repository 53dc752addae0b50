"""Demonstrations: laid out by the trainer's own code, right about as often as they mean to be, and learned."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from server_fixture import make_tiny
from transformers import AutoTokenizer

import mcp_tools
from config import TrainConfig
from data import load_function
from rewards import get_reward_functions, score

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts"))
from warm_start import demonstrate  # noqa: E402


@pytest.mark.parametrize("task", ["arithmetic", "search"])
def test_examples_are_careless(task, tmp_path):
    """Some demonstrations use the tool and are right, others guess: there is something left to learn."""
    path, example = tmp_path / "search.json", f"{ROOT}/examples/{task}.py"
    path.write_text(
        json.dumps(
            {"mcpServers": {"search": {"command": sys.executable, "args": [f"{ROOT}/examples/search_server.py"]}}}
        )
    )
    tools = dict(tools=["calculator"]) if task == "arithmetic" else dict(mcp_config=str(path))
    rewards = [f"{example}:right"] if task == "arithmetic" else ["squad_em"]
    cfg = TrainConfig(**tools, reward_funcs=rewards, num_generations=2, max_completion_length=400)
    try:
        rows = load_function(f"{example}:rows")("train", 0)[:40]
        processor = AutoTokenizer.from_pretrained(make_tiny())
        trajectories = asyncio.run(demonstrate(rows, load_function(f"{example}:demonstrate"), processor, None, cfg))
        asyncio.run(score(trajectories, get_reward_functions(cfg), cfg))
    finally:
        mcp_tools.close_all()
    called = [t for t in trajectories if t.turns > 1]
    assert 20 < len(called) < 70 and not any(
        call["failed"] for t in called for call in t.info["turns"][0]["info"]["calls"]
    )
    right = {kind: sum(t.info["reward"] for t in group) / len(group) for kind, group in (
        ("with", called), ("without", [t for t in trajectories if t.turns == 1])
    )}  # fmt: skip
    assert right["with"] > 0.5 > 0.3 > right["without"]
    held_out = {json.dumps(row["prompt"]) for row in load_function(f"{example}:rows")("test", 0)}
    assert not held_out & {json.dumps(row["prompt"]) for row in load_function(f"{example}:rows")("train", 0)}


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
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in done.stdout.splitlines() if "loss " in line]
    assert losses[-1] < 0.8 * 8.3  # ln 4096: where a random model begins
    assert (tmp_path / "warm" / "checkpoints" / "step_20" / "model.safetensors").is_file()
    wrong = subprocess.run([*command[:2]], capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and "--demonstrations: give file.py:function" in wrong.stderr
