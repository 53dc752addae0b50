"""The real train() learns: a random model, a reward it gets by chance one time in ten, seconds a run."""

import statistics
import subprocess
import sys

import pytest
import torch
from server_fixture import ROOT, make_tiny
from tiers import by_default

import train_ppo
from config import PRESETS, TrainConfig
from runfiles.reading import read_metrics
from train_grpo import train

TOY = ROOT / "benchmarks" / "toy.py"
TWICE = dict(num_minibatches=2, num_iterations=2)
ALGORITHMS = {  # settings on top of the preset's
    "grpo": dict(beta=0.0, **TWICE),
    "dr_grpo": {},
    "rloo": {},
    "reinforce_plus_plus": {},
    "remax": dict(max_steps=30, eval_steps=30),
    "dapo": dict(num_minibatches=2),
    "gspo": dict(epsilon=0.2, epsilon_high=0.2, **TWICE),  # the preset's 3e-4 is for thousands of tokens, here are 4
    "cispo": TWICE,
    "ppo": dict(critic_learning_rate=1e-3, critic_iterations=4, num_minibatches=2),
}
FIRST = ("grpo", "dapo", "gspo", "ppo")


def toy(folder, **more) -> dict:
    torch.set_num_threads(1)  # the model is small, and idle servers of other tests hold on to the cores
    return dict(
        model_id=str(make_tiny()),
        generator="hf",
        compute_dtype="float32",
        dataset_id=f"{TOY}:rows",
        reward_funcs=[f"{TOY}:tens"],
        prompts_per_step=4,
        num_generations=16,
        max_completion_length=4,
        learning_rate=1e-2,
        print_samples_every=0,
        output_dir=str(folder),
        run_name="run",
        seed=0,
        **more,
    )


@pytest.mark.parametrize("preset", by_default(FIRST, ALGORITHMS))
def test_the_loop_learns(preset, tmp_path):
    settings = toy(tmp_path, max_steps=20, eval_steps=20)
    config, critic = (train_ppo.TrainConfig, train_ppo.CriticTrainer) if preset == "ppo" else (TrainConfig, None)
    cfg = config(**PRESETS[preset] | settings | ALGORITHMS[preset] | dict(preset=preset))
    after = train(cfg, critic)["eval/reward"]
    lines = read_metrics(tmp_path / "run")
    assert lines[0]["eval/reward"] < 0.2, "a random model should be right one time in ten"
    assert after > 0.8
    assert (tmp_path / "run" / "checkpoints" / f"step_{cfg.max_steps}" / "model.safetensors").exists()
    assert (tmp_path / "run" / "report.html").exists()
    if preset == "ppo":
        explained = [line["value/explained_variance"] for line in lines if "reward" in line]
        assert explained[0] < 0.1 and statistics.median(explained[-5:]) > 0.3
    # The sampler's log-probs are the trainer's: both are this model in fp32.
    assert max(line.get("sampling/logprob_diff_mean", 0) for line in lines) < 1e-3


@pytest.mark.slow
def test_a_healthy_run_warns_of_nothing(tmp_path):
    """Of libraries, too: nothing in the error output."""
    command = [sys.executable, "train_grpo.py", "--model_id", str(make_tiny()), "--generator", "hf", "--use_peft"]
    command += ["--dataset_id", f"{TOY}:rows", "--reward_funcs", f"{TOY}:tens", "--max_steps", "2"]
    command += ["--prompts_per_step", "2", "--num_generations", "4", "--max_completion_length", "6"]
    command += ["--output_dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0 and done.stderr == ""
    assert "[transformers]" not in done.stdout
