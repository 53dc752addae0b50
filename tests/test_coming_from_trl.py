"""scripts/from_trl.py: what a GRPOTrainer script becomes. Expected values are TRL 1.16's definitions, by hand."""

import contextlib
import io
from pathlib import Path

import pytest

from config import ConfigError, TrainConfig, load_config
from scripts import from_trl

pytestmark = pytest.mark.quick

SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
from peft import LoraConfig
from datasets import load_dataset

SIZE = 8


def short(completions, **columns):
    return [-len(c) for c in completions]


def main():
    args = GRPOConfig({config})
    GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=[short], args=args,
                train_dataset=load_dataset("trl-lib/tldr", split="train"){trainer}).train()


if __name__ == "__main__":
    main()
"""


def convert(folder: Path, config: str = "", trainer: str = "", processes: int = 1) -> tuple[TrainConfig, str]:
    """(our config, what else was printed)."""
    path = folder / "theirs.py"
    path.write_text(SCRIPT.format(config=config, trainer=trainer and f", {trainer}"), encoding="utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        from_trl.main([str(path), "--processes", str(processes)])
    *said, line = printed.getvalue().splitlines()
    words = line.split("train_grpo.py ")[1].split()
    return load_config(TrainConfig, [*words, "--generator", "hf"]), "\n".join([*said, line])


def test_what_is_unset_is_as_trl_has_it(tmp_path):
    cfg, line = convert(tmp_path)
    assert (cfg.model_id, cfg.dataset_id) == ("Qwen/Qwen3-0.6B", "trl-lib/tldr")
    assert cfg.reward_funcs == [f"{tmp_path}/theirs.py:short"]
    assert (cfg.prompts_per_step, cfg.num_generations, cfg.max_completion_length) == (1, 8, 256)  # 8 x 1 completions
    assert (cfg.learning_rate, cfg.lr_schedule, cfg.beta, cfg.num_epochs) == (1e-6, "linear", 0.0, 3.0)
    assert (cfg.loss_agg, cfg.epsilon, cfg.epsilon_high, cfg.scale_rewards) == ("token_mean", 0.2, 0.2, "group")
    assert cfg.correction == "none" and "--generator hf" in line  # no vLLM


@pytest.mark.parametrize(
    "kind, wanted",
    [
        ("'grpo'", ("seq_mean", "ppo", 0.2, 0.28)),
        ("'dr_grpo'", ("constant", "ppo", 0.2, 0.28)),
        ("'cispo'", ("token_mean", "cispo", 1.0, 4.0)),  # 5 bounds the ratio there, 1 + 4 here
        ("'grpo', importance_sampling_level='sequence'", ("seq_mean", "gspo", 0.2, 0.28)),
    ],
)
def test_losses_keep_their_meaning(tmp_path, kind, wanted):
    high = 5.0 if "cispo" in kind else 0.28
    cfg, _ = convert(tmp_path, f"loss_type={kind}, epsilon_high={high}")
    assert (cfg.loss_agg, cfg.policy_loss, cfg.epsilon, cfg.epsilon_high) == wanted


def test_updates_become_steps(tmp_path):
    """4 processes x 4 completions x 2 micro-batches = 32 an update, 64 sampled at once: a step is two updates."""
    config = "per_device_train_batch_size=4, gradient_accumulation_steps=2, steps_per_generation=4, max_steps=100, "
    cfg, said = convert(tmp_path, config + "save_steps=50, warmup_steps=10, num_generations=SIZE", processes=4)
    assert (cfg.prompts_per_step, cfg.num_minibatches) == (8, 2)
    assert (cfg.max_steps, cfg.save_steps, cfg.warmup_steps) == (50, 25, 5)
    assert "--nproc_per_node=4" in said


def test_vllm_its_correction_and_adapters(tmp_path):
    more = "use_vllm=True, vllm_importance_sampling_mode='token_truncate', vllm_importance_sampling_clip_max=2.0"
    cfg, said = convert(tmp_path, more, "peft_config=LoraConfig(r=16, lora_alpha=32, target_modules='all-linear')")
    assert (cfg.correction, cfg.correction_mode, cfg.correction_max) == ("token", "truncate", 2.0)
    assert (cfg.use_peft, cfg.lora_r, cfg.lora_alpha) == (True, 16, 32)
    assert "python vllm_server.py --model Qwen/Qwen3-0.6B" in said


def test_what_is_not_read_is_listed(tmp_path):
    """Nothing is lost in silence: a computed value, a field without a flag, a callback."""
    _, said = convert(tmp_path, "learning_rate=1e-6 * SIZE, trackio_space_id='x'", "callbacks=[print]")
    listed = [line for line in said.splitlines() if "set by hand" in line]
    assert len(listed) == 3 and all(
        any(name in line for line in listed) for name in ("learning_rate", "trackio", "callbacks")
    )


def test_a_script_that_cannot_be_converted_is_refused(tmp_path):
    for text in ("print(1)", "def (", SCRIPT.format(config="num_generations=7", trainer="")):
        path = tmp_path / "theirs.py"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError):
            from_trl.main([str(path)])
