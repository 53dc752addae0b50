"""The real train() learns: a random model, a reward it gets by chance one time in ten, seconds a run."""

import math
import os
import statistics
import subprocess
import sys

import pytest
import torch
from families import saved
from server_fixture import ROOT, make_tiny
from tiers import by_default
from tiny_vlms import MARK, make

import train_ppo
from config import PRESETS, TrainConfig
from runlog.reading import read_metrics
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


SETTINGS = [  # what people set, of all groups of flags, several at once
    dict(temperature=0.7, beta=0.1, kl="k2", num_iterations=2, epsilon_high=0.28, learning_rate=1e-3),
    dict(
        temperature=1.5, use_peft=True, lora_r=4, lora_targets=["q_proj", "v_proj"], eval_steps=1, eval_temperature=0.6
    ),
    dict(system_prompt="Be brief.", min_completion_length=2, shared_prefix=False, logprob_chunk=16, save_steps=1),
    dict(
        beta=0.1, kl_in_reward=True, ref_sync_steps=1, reward_mean="running", reward_std="batch", scale_rewards="none"
    ),
    dict(
        dynamic_sampling=True, entropy_coef=0.01, top_entropy_quantile=0.5, correction="token", old_logprobs="sampler"
    ),
    dict(optim="SGD", lr_schedule="cosine", warmup_steps=1, weight_decay=0.1, max_grad_norm=0.1, loss_agg="constant"),
    dict(dtype="bfloat16", compute_dtype="bfloat16", gradient_checkpointing=True, offload_activations=True),
    dict(attn_implementation="eager", tokens_per_microbatch=100, push_steps=2, strategy="fsdp2"),
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
def test_what_people_set_is_run(settings, tmp_path):
    train(TrainConfig(**toy(tmp_path, max_steps=2, num_minibatches=2) | settings))
    steps = [line for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert len(steps) == 2 and any(line["grad_norm"] > 0 for line in steps)
    odd = {k: v for line in steps for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)}
    assert not odd


@pytest.mark.slow
@pytest.mark.parametrize("family", [None, "qwen3_moe", "qwen2_5_vl"])
def test_a_healthy_run_warns_of_nothing(family, tmp_path):
    """Of libraries, too: nothing in the error output, with adapters as without."""
    model = make_tiny()
    if family is not None:
        model = (make if family in MARK else saved)(family, tmp_path / "model")
    (tmp_path / "seen.py").write_text(
        "from tiny_vlms import picture\n"
        "def rows(split, seed):\n"
        "    return [{'prompt': f'What is this? {n}', 'image': picture(n), 'bonus': 0.0} for n in range(8)]\n",
        encoding="utf-8",
    )
    rows = f"{tmp_path}/seen.py:rows" if family in MARK else f"{TOY}:rows"
    command = [sys.executable, "train_grpo.py", "--model_id", str(model), "--generator", "hf", "--dataset_id", rows]
    command += ["--reward_funcs", f"{TOY}:tens", "--max_steps", "2", "--prompts_per_step", "2"]
    command += ["--num_generations", "4", "--max_completion_length", "6", "--output_dir", str(tmp_path)]
    command += [] if family is None else ["--use_peft"]
    env = os.environ | {"PYTHONPATH": f"{ROOT}/tests"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0 and done.stderr == ""
    assert "[transformers]" not in done.stdout
