"""Will it fit: the plan's bytes against counts by hand and simulated ones; what it says to type can be typed.

Against those of real updates: "sizes" of scripts/gpu_check.py."""

import json
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import plan
import train_ppo
from config import ConfigError, TrainConfig, check, load_config
from train_grpo import empty_policy
from vllm_server import parse_command_line

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import simulate  # noqa: E402

SHAPE = dict(vocab_size=4000, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8)
SHAPE |= dict(num_key_value_heads=2, tie_word_embeddings=False, model_type="qwen2", architectures=["Qwen2ForCausalLM"])
LAYER = 2 * 256 * 256 + 256 + 2 * (256 * 64 + 64) + 3 * 256 * 768 + 2 * 256  # q and o, k and v, MLP, norms
WEIGHTS = 2 * 4000 * 256 + 4 * LAYER + 256
ADAPTERS = 4 * 8 * (2 * (256 + 256) + 2 * (256 + 64) + 3 * (256 + 768))  # of rank 8


@pytest.fixture
def shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    return tmp_path


# Bytes kept from step to step: fp32 weights and Adam's two moments.
KEPT = {
    "one rank": ({}, 1, 12 * WEIGHTS),
    "a reference, computed in bf16": (dict(beta=0.1), 1, 12 * WEIGHTS + 2 * WEIGHTS),
    "shards of four": (dict(strategy="fsdp2"), 4, 12 * WEIGHTS / 4),
    "adapters on frozen bf16": (dict(use_peft=True, lora_r=8, dtype="bfloat16"), 1, 2 * WEIGHTS + 12 * ADAPTERS),
    "offloaded": (dict(strategy="fsdp2", offload=True), 4, 0),
}


@pytest.mark.parametrize("what", KEPT)
def test_what_is_kept_between_steps_is_counted_by_hand(shape, what):
    more, ranks, wanted = KEPT[what]
    cfg = TrainConfig(model_id=str(shape), prompts_per_step=8, **more)
    with torch.device("meta"):
        sizes = plan.sizes_of(empty_policy(cfg))
    assert plan.kept_bytes(plan.bytes_needed(sizes, cfg, ranks)) == pytest.approx(wanted, rel=0.01)


LENGTHS = "--prompt 500 --completion 4000 --max_prompt_length 500 --max_completion_length 4000"
ROWS = ["qwen2.5-7b --gpus 8", "qwen2.5-1.5b --gpus 1", "qwen2.5-7b --gpus 8 --use_peft", "qwen2.5-vl-3b --gpus 8"]
MORE_ROWS = ["qwen3-30b-a3b --gpus 16", "qwen2.5-32b --gpus 16", "qwen2.5-72b --gpus 256 --hsdp"]
MORE_ROWS += ["qwen2.5-7b --gpus 1 --strategy ddp --dtype bfloat16 --use_peft --load_in 4bit"]


@pytest.mark.parametrize("words", [*ROWS, *(pytest.param(row, marks=pytest.mark.slow) for row in MORE_ROWS)])
def test_peaks_are_those_that_were_simulated(words):
    """Of benchmarks/results/simulate.md, where real functions ran on tensors without memory."""
    table = (simulate.ROOT / "benchmarks/results/simulate.md").read_text(encoding="utf-8")
    (kept, peak), *_ = re.findall(rf"^\| {re.escape(words)} \| ([\d.]+) \|.*?\| ([\d.]+) \|", table, re.M)
    need = simulate.predicted(load_config(simulate.SimulateConfig, f"--model {words} {LENGTHS}".split()))
    assert plan.kept_bytes(need) / plan.GIB == pytest.approx(float(kept), rel=0.01, abs=0.01)
    assert plan.peak(need) / plan.GIB == pytest.approx(float(peak), rel=plan.MARGIN)


def test_the_micro_batch_is_chosen_by_the_memory_there_is(shape):
    """The largest that fits; what was given stays; what cannot fit is said with what can."""
    cfg = TrainConfig(model_id=str(shape), prompts_per_step=64, num_generations=8, strategy="fsdp2")
    roomy, warning = plan.settings_for(empty_policy, cfg, 2, 80 * plan.GIB)
    assert (roomy.tokens_per_microbatch, roomy.gradient_checkpointing, warning) == (16384, True, "")
    given = replace(cfg, gradient_checkpointing=False, tokens_per_microbatch=8192)
    assert plan.settings_for(empty_policy, given, 2, 80 * plan.GIB) == (given, "")
    chosen = replace(cfg, gradient_checkpointing=True, tokens_per_microbatch=4096)
    with torch.device("meta"):
        just = plan.peak(plan.bytes_needed(plan.sizes_of(empty_policy(chosen)), chosen, 2)) / (1 - plan.SPARE) + 1
    less, warning = plan.settings_for(empty_policy, cfg, 2, just)
    assert (less.tokens_per_microbatch, warning) == (4096, "")
    _, warning = plan.settings_for(empty_policy, replace(less, strategy="ddp"), 2, just)
    assert "--strategy ddp" in warning and "--strategy fsdp2" in warning


# ---- what is printed ------------------------------------------------------------------------------------------------


def planned(capsys, words: str) -> str:
    assert plan.main(load_config(plan.PlanConfig, words.split())) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("more", ["--use_peft", "--overlap --server_gpus 2", "--critic"])
def test_what_is_said_to_type_can_be_typed(more, capsys):
    """Server and trainer take the lines, the trainer for that number of ranks."""
    words = f"--model_id models/tiny --prompt 20 --completion 30 --gpus 8 --gpu_memory 8 {more}"
    printed = planned(capsys, words)
    *servers, last = printed[printed.index("export VLLM_SERVER_TOKEN") :].splitlines()[1:]
    for line in servers:
        args, _ = parse_command_line(shlex.split(line.removesuffix("&"))[3:])
        assert args.model == "models/tiny"
    _, _, ranks, script, *flags = shlex.split(last)
    cfg = load_config(train_ppo.TrainConfig if "--critic" in more else TrainConfig, flags)
    check(cfg, int(ranks.split("=")[1]))
    assert len(cfg.server_urls) == len(servers) and cfg.tokens_per_microbatch and cfg.gradient_checkpointing
    assert script == {"--overlap": "train_async.py", "--critic": "train_ppo.py"}.get(more[:9].strip(), "train_grpo.py")
    assert cfg.use_peft == ("--use_peft" in more) and ("\n  critic " in printed) == ("--critic" in more)


def test_several_machines_serve_or_train(capsys):
    printed = planned(capsys, "--model_id models/tiny --gpu_memory 8 --gpus 24 --prompt 20")
    *_, server, last = printed.splitlines()
    with mock.patch.dict(os.environ, VLLM_SERVER_TOKEN="a"):
        assert parse_command_line(shlex.split(server.removesuffix("&"))[2:])[0].host == "0.0.0.0"
    ranks = int(re.search(r"Trainer: (\d+) of 24 GPUs", printed)[1])
    assert ranks in (8, 16)
    check(load_config(TrainConfig, shlex.split(last)[1:]), ranks)


def test_on_one_gpu_the_server_takes_turns(capsys):
    lines = planned(capsys, "--model_id models/tiny --use_peft --gpus 1 --gpu_memory 80").splitlines()
    (server,) = (number for number, line in enumerate(lines) if "--enable-sleep-mode" in line)
    assert load_config(TrainConfig, shlex.split(lines[server + 1])[2:]).colocate


def test_what_does_not_fit_is_said(shape, capsys):
    words = f"--model_id {shape} --gpus 2 --gpu_memory .1 --tokens_per_microbatch 2048"
    assert plan.main(load_config(plan.PlanConfig, words.split())) == 1
    printed = capsys.readouterr().out
    assert "does NOT fit" in printed and "To type" not in printed


@pytest.mark.parametrize("words", ["--gpus 0", "--server_gpus 8", "--critic --overlap"])
def test_mistakes_are_named(words):
    with pytest.raises(ConfigError, match="one each|above 0|no critic"):
        plan.main(load_config(plan.PlanConfig, words.split()))
