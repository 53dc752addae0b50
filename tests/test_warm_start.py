"""Demonstrations: laid out by the trainer's own code, right about as often as they mean to be, and learned."""

import asyncio
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from config import ConfigError, TrainConfig, load_function
from rewards import get_reward_functions, score
from runfiles.reading import read_metrics

ROOT = Path(__file__).parent.parent
TINY = ROOT / "models" / "tiny"
sys.path.append(str(ROOT / "scripts"))
from warm_start import WarmConfig, demonstrate, main  # noqa: E402


@pytest.fixture(scope="module")
def generator():
    return SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(TINY), rope_index=None, version=0)


def test_examples_are_careless(generator):
    """Some demonstrations use the tool and are mostly right, the others guess: there is something left to learn."""
    example = f"{ROOT}/examples/arithmetic.py"
    cfg = TrainConfig(tools=["calculator"], reward_funcs=[f"{example}:right"], num_generations=2)
    rows, shows = load_function(f"{example}:rows")("train", 0)[:100], load_function(f"{example}:demonstrate")
    trajectories = asyncio.run(demonstrate(rows, shows, generator, cfg))
    asyncio.run(score(trajectories, get_reward_functions(cfg), cfg))
    again, other = (asyncio.run(demonstrate(rows[:9], shows, generator, replace(cfg, seed=n))) for n in (42, 7))
    assert [t.token_ids for t in again] == [t.token_ids for t in trajectories[:18]] != [t.token_ids for t in other]
    called = [t for t in trajectories if t.turns > 1]
    assert 0.02 < len(called) / len(trajectories) < 0.6
    assert not any(call["failed"] for t in called for call in t.info["turns"][0]["info"]["calls"])
    right = [
        statistics.fmean(t.info["reward"] for t in trajectories if (t.turns > 1) == used) for used in (True, False)
    ]
    assert right[0] > 0.5 > 0.2 > right[1]


def test_a_demonstration_that_is_cut_is_said(generator, caplog):
    """Without its last token it teaches never to stop."""
    for most, cut in ((400, False), (8, True)):
        cfg = TrainConfig(env="frozenlake", num_generations=2, max_turn_length=most, max_completion_length=500)
        asyncio.run(demonstrate([{"prompt": ""}] * 2, lambda *_: "word " * 40, generator, cfg))
        assert ("tokens was cut" in caplog.text) == cut


def test_an_agent_is_shown_to(generator):
    """It is answered as by a model, and computes: its second call has the result of the first one."""
    example, answers_of = f"{ROOT}/examples/agent.py", []
    cfg = TrainConfig(agent=f"{example}:run", tool_parser="tags", num_generations=2)
    shows = load_function(f"{example}:demonstrate")

    def calls_first(row, environment, answers):
        answers_of.append(len(answers))
        return shows(row, environment, answers) if answers else f"<calculator>{row['expression']}</calculator>"

    rows = load_function(f"{ROOT}/examples/arithmetic.py:rows")("train", 0)[:3]
    trajectories = asyncio.run(demonstrate(rows, calls_first, generator, cfg))
    assert [t.info["turns"][-1]["reward"] for t in trajectories] == [1] * 6 and sorted(answers_of) == [0] * 6 + [1] * 6
    for t in trajectories:
        said = generator.tokenizer.decode([token for token, mask in zip(t.token_ids, t.loss_mask, strict=True) if mask])
        ends = said.replace(generator.tokenizer.eos_token, "")
        assert ends == f"<calculator>{t.row['expression']}</calculator><final_answer>{t.row['answer']}</final_answer>"


def test_one_task_is_shown():
    """Rows of a domain with another rollout would be sampled by the model, and learned as if they had been shown."""
    domains = [{"name": name, "dataset_id": "reasoning_gym:chain_sum"} for name in "ab"]
    with pytest.raises(ConfigError, match="demonstrates one task"):
        main(WarmConfig(demonstrations="examples/arithmetic.py:demonstrate", domains=domains))


@pytest.mark.slow
def test_the_script_teaches_what_is_shown(tmp_path):
    example = f"{ROOT}/examples/arithmetic.py"
    flags = f"--model_id {TINY} --tools calculator --dataset_id {example}:rows --demonstrations {example}:demonstrate "
    flags += f"--reward_funcs {example}:right "
    flags += "--compute_dtype float32 --max_steps 20 --learning_rate 3e-3 --prompts_per_step 8 --max_prompt_length 400"
    command = [sys.executable, f"{ROOT}/scripts/warm_start.py", *flags.split()]
    command += ["--output_dir", str(tmp_path), "--run_name", "warm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [line["loss"] for line in read_metrics(tmp_path / "warm")]
    assert losses[-1] < 0.8 * 8.3  # ln 4096: where a random model begins
    assert (tmp_path / "warm" / "checkpoints" / "step_20" / "model.safetensors").is_file()
