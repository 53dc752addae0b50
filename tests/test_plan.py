"""Will it fit: the plan's bytes against counts by hand and those of real updates; what it says to type can be typed."""

import json
import os
import re
import shlex
from dataclasses import replace
from unittest import mock

import pytest
import torch
from live import running, trainer
from memory_worker import predicted

import memory
import plan
import train_ppo
from batch import Batch
from config import ConfigError, TrainConfig, check, load_config
from inputs.packing import micro_batches, pack
from train_grpo import empty_policy
from vllm_server import parse_command_line

SHAPE = dict(vocab_size=4000, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8)
SHAPE |= dict(num_key_value_heads=2, tie_word_embeddings=False, model_type="qwen2", architectures=["Qwen2ForCausalLM"])
LAYER = 2 * 256 * 256 + 256 + 2 * (256 * 64 + 64) + 3 * 256 * 768 + 2 * 256  # q and o, k and v, MLP, norms
WEIGHTS = 2 * 4000 * 256 + 4 * LAYER + 256
ADAPTERS = 4 * 8 * (2 * (256 + 256) + 2 * (256 + 64) + 3 * (256 + 768))  # of rank 8


@pytest.fixture
def shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    return tmp_path


# Bytes kept from step to step: fp32 weights, gradients and Adam's two moments, with DDP's and FSDP1's copies.
KEPT = {
    "one rank: weights, two moments, and what is added up": ({}, 1, 12 * WEIGHTS),
    "a reference, computed in bf16": (dict(beta=0.1), 1, 12 * WEIGHTS + 2 * WEIGHTS),
    "shards of four": (dict(strategy="fsdp2"), 4, 12 * WEIGHTS / 4),
    "DDP's buckets": ({}, 2, 16 * WEIGHTS),
    "adapters on frozen bf16": (dict(use_peft=True, lora_r=8, dtype="bfloat16"), 1, 2 * WEIGHTS + 12 * ADAPTERS),
    "offloaded": (dict(strategy="fsdp2", offload=True), 4, 0),
}


@pytest.mark.parametrize("what", KEPT)
def test_what_is_kept_between_steps_is_counted_by_hand(shape, what):
    more, ranks, wanted = KEPT[what]
    cfg = TrainConfig(model_id=str(shape), tokens_per_microbatch=512, prompts_per_step=8, **more)
    cfg = replace(cfg, max_prompt_length=64, max_completion_length=64, gradient_checkpointing=False)
    need = memory.rank_bytes(empty_policy, cfg, ranks)
    assert memory.kept(need) == pytest.approx(wanted, rel=0.01), need


@pytest.mark.slow
@pytest.mark.parametrize("strategy, ranks", [("ddp", 1), ("fsdp2", 2)])
def test_predicted_bytes_are_those_of_a_real_update(strategy, ranks, shape, tmp_path):
    """All weights and LoRA, with and without gradient checkpointing, with a critic, offloaded: within a tenth."""
    flags = "--prompts_per_step 4 --num_generations 4 --max_prompt_length 64 --max_completion_length 64 "
    flags += "--push_bucket_mb 1 --tokens_per_microbatch 291 --logprob_chunk 64 --lora_r 8"  # a group: 320
    words, out = ["--model_id", str(shape), "--strategy", strategy, *flags.split()], tmp_path / "measured.json"
    with running(trainer(tmp_path / "log", str(out), *words, ranks=ranks, script="tests/memory_worker.py")) as worker:
        assert worker.end() == 0, worker.text
    wrong = []
    for more, critic, measured in json.loads(out.read_text(encoding="utf-8")):
        for what, size in predicted(replace(load_config(TrainConfig, words), **more), ranks, critic).items():
            wrong += [(more, critic, what, size / measured[what])] * (abs(size / measured[what] - 1) > 0.1)
    assert not wrong


@pytest.mark.parametrize("shared", [True, False])
def test_no_pass_has_more_tokens_than_the_one_that_is_counted(shared):
    """But for those of a prompt: shorter completions may leave room for one more group."""
    most = 0
    for seed in range(10):
        random = torch.Generator().manual_seed(seed)
        cfg = TrainConfig(prompts_per_step=8, num_generations=4, max_prompt_length=40, max_completion_length=200)
        cfg = replace(cfg, tokens_per_microbatch=500 + 100 * seed, shared_prefix=shared)
        counted = memory.longest_pass(cfg)[0]["input_ids"].numel()
        lengths = torch.randint(41, 241, (32, 1), generator=random).clamp(max=40 + 20 * (seed + 1))
        there, tokens, groups = (torch.arange(240) < lengths).float(), torch.arange(240), torch.arange(32) // 4
        batch = Batch(groups[:, None] + tokens, there, there * (tokens >= 40), torch.zeros(32, 240), groups)
        passes = [pack(batch.select(rows), cfg)[0]["input_ids"] for rows in micro_batches(batch, cfg)]
        sizes = [ids.shape[-1] if shared else ids.numel() for ids in passes]
        limit = cfg.tokens_per_microbatch * 1.1
        assert counted <= limit and max(sizes) <= min(counted + shared * cfg.max_prompt_length, limit)
        most = max(most, max(sizes) / counted)
    assert most > 0.9, "nor much fewer"


def test_the_micro_batch_is_chosen_by_the_memory_there_is(shape):
    """The largest that fits; what was given stays; what cannot fit is said with what can."""
    cfg = TrainConfig(model_id=str(shape), prompts_per_step=64, num_generations=8, strategy="fsdp2")
    roomy, warning = memory.settled(empty_policy, cfg, 2, 80 * memory.GIB)
    assert (roomy.tokens_per_microbatch, roomy.gradient_checkpointing, warning) == (16384, True, "")
    given = replace(cfg, gradient_checkpointing=False, tokens_per_microbatch=8192)
    assert memory.settled(empty_policy, given, 2, 80 * memory.GIB) == (given, "")
    need = memory.rank_bytes(empty_policy, replace(cfg, gradient_checkpointing=True, tokens_per_microbatch=4096), 2)
    assert memory.peak(need) > memory.kept(need) > 0
    just = memory.peak(need) / (1 - memory.SPARE) + 1
    less, warning = memory.settled(empty_policy, cfg, 2, just)
    assert (less.tokens_per_microbatch, warning) == (4096, "")
    _, warning = memory.settled(empty_policy, replace(less, strategy="ddp"), 2, just)
    assert "--strategy ddp" in warning and "--strategy fsdp2 needs" in warning


# ---- what is printed ------------------------------------------------------------------------------------------------


def planned(capsys, words: str) -> str:
    assert plan.main(load_config(plan.PlanConfig, words.split())) == 0
    return capsys.readouterr().out


MORE = ["", *(pytest.param(m, marks=pytest.mark.slow) for m in ("--overlap --server_gpus 2", "--critic", "--use_peft"))]


@pytest.mark.parametrize("more", MORE)
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


@pytest.mark.slow
def test_several_machines_get_lines_of_their_own(capsys):
    """No machine is asked for a GPU that it lacks; all the trainer's get one line."""
    cfg = load_config(plan.PlanConfig, "--model_id models/tiny --gpu_memory 8 --gpus 24 --prompt 20".split())
    assert plan.main(cfg) == 0
    printed = capsys.readouterr().out
    lines = printed[printed.index("export VLLM_SERVER_TOKEN") :].partition("\n\nOr under Slurm")[0]
    *servers, last = [line for line in lines.splitlines()[1:] if not line.startswith("#")]
    for line in servers:
        visible, *words = shlex.split(line.removesuffix("&"))
        assert all(int(gpu) < cfg.node_gpus for gpu in visible.split("=")[1].split(","))
        with mock.patch.dict(os.environ, VLLM_SERVER_TOKEN="a"):
            assert parse_command_line(words[2:])[0].host == "0.0.0.0"
    _, nodes, each, _, _, _, *flags = shlex.split(last)
    ranks = int(nodes.split("=")[1]) * int(each.split("=")[1])
    trained = load_config(TrainConfig, flags)
    check(trained, ranks)
    assert len(trained.server_urls) == len(servers) and ranks <= cfg.gpus - cfg.node_gpus


def test_on_one_gpu_phases_that_take_turns_are_not_added_up(capsys):
    """The trainer waits in CPU memory while the server samples; --generator hf samples before the update begins."""
    words = "--model_id models/tiny --use_peft --gpus 1 --gpu_memory 80 --tokens_per_microbatch 1024"
    ways = {way["name"]: way for way in plan.weighed(load_config(plan.PlanConfig, words.split())).ways}
    turns, alone = ways["server and trainer by turns"], ways["--generator hf, no server"]
    assert turns["both"] == max(turns["beside"], memory.peak(turns["need"]))
    assert alone["both"] == max(memory.kept(alone["need"]) + alone["beside"], memory.peak(alone["need"]))
    lines = planned(capsys, words).splitlines()
    (server,) = (number for number, line in enumerate(lines) if "--enable-sleep-mode" in line)
    assert load_config(TrainConfig, shlex.split(lines[server + 1])[2:]).colocate


def test_what_does_not_fit_is_said(capsys):
    """A hub id without a hub: the shape is known. 16 bytes a parameter fit neither on the GPU nor in CPU memory."""
    words = "--model_id Qwen/Qwen2.5-1.5B --gpus 2 --gpu_memory 20 --cpu_memory 20 --tokens_per_microbatch 2048"
    assert plan.main(load_config(plan.PlanConfig, words.split())) == 1
    printed = capsys.readouterr().out
    assert re.search(r"1\.54 B parameters", printed) and "does NOT fit" in printed and "To type" not in printed


@pytest.mark.parametrize("words", ["--gpus 0", "--server_gpus 8", "--critic --overlap"])
def test_mistakes_are_named(words):
    with pytest.raises(ConfigError, match="one each|above 0|no critic"):
        plan.main(load_config(plan.PlanConfig, words.split()))
