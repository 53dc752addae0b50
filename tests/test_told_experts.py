"""A live server of a mixture of experts tells which of them its tokens went through, and the trainer takes the same."""

import asyncio
import json
import subprocess
import sys

import pytest
import torch
from families import saved
from live import EVEN
from server_fixture import ROOT, start_server
from transformers import AutoModelForCausalLM

from config import TrainConfig
from inputs.routing import Routing
from runlog.reading import read_metrics
from train_grpo import train
from utils import as_in_a_checkpoint
from vllm_client import VLLMClient

pytestmark = pytest.mark.in_turn

# Sizes that vLLM's kernels for CPUs take; one layer without experts.
SIZES = dict(hidden_size=128, head_dim=32, moe_intermediate_size=64, num_hidden_layers=4, mlp_only_layers=[1])
EXPERTS = dict(num_experts=16, num_experts_per_tok=4)


@torch.no_grad()
def agreement(client: VLLMClient, model) -> float:
    """Of some completions, the share of choices (a token in a layer) that transformers' model makes, too. They are cut
    into parts of a prompt, share prompts with each other and earlier ones, and more are sampled than there is memory
    for, so that some are put off and computed again."""

    async def sampled():
        prompts = [list(range(100, 100 + n)) for n in (40, 90, 90, 7, 150)]
        return sum(await asyncio.gather(*(client.generate(ids, n=3, max_tokens=40) for ids in prompts)), [])

    routes, same = Routing(model), []
    for completion in asyncio.run(sampled()):
        with routes.noting() as noted:
            model(torch.tensor([completion.prompt_ids + completion.token_ids]), use_cache=False)
        own = routes.stacked(noted)[:-1]  # the last token went through no layer
        told = torch.from_numpy(completion.routed_experts)
        assert told.shape == own.shape
        layers = sorted(noted)
        assert layers == [0, 2, 3]
        same.append((told.sort(-1).values == own.sort(-1).values).all(-1)[:, layers].float().mean())
    return float(torch.stack(same).mean())


def test_every_token_keeps_its_experts(tmp_path):
    """In float32 both choose alike. The server cuts prompts every 64 tokens and holds 12 blocks of 32."""
    folder = saved("qwen3_moe", tmp_path, **SIZES, **EXPERTS)
    flags = (
        "--dtype float32 --max-model-len 256 --block-size 32 --max-num-batched-tokens 64 --num-gpu-blocks-override 12"
    )
    live = start_server(folder, *flags.split())
    try:
        live.wait(400)
        assert "it tells the experts of its tokens" in live.log.read_text(encoding="utf-8")
        client = VLLMClient([live.url], live.token, timeout=60)
        assert client.can_tell_experts()
        assert client.server_info()[0]["expert_bytes"] == 4 * 4  # layers, and experts of a token
        client.tells_experts = True
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert agreement(client, model) > 0.999
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        client.connect_weights("cpu")
        client.begin_push()
        client.send_bucket(as_in_a_checkpoint(model, list(model.named_parameters())))
        client.finish_push(1)
        assert agreement(client, model) > 0.999
        client.close()
    finally:
        live.stop()


def test_log_probs_come_closer_with_replay(tmp_path, monkeypatch):
    """The real train() in bfloat16 beside a live server in bfloat16."""
    folder = saved("qwen3_moe", tmp_path / "model", **SIZES, **EXPERTS)
    (tmp_path / "even.py").write_text(EVEN, encoding="utf-8")
    live = start_server(folder, "--dtype", "bfloat16", "--max-model-len", "256")
    try:
        live.wait(400)
        monkeypatch.setenv("VLLM_SERVER_TOKEN", live.token)
        seen = {}
        for replay in ("auto", "off"):
            settings = dict(model_id=str(folder), server_urls=[live.url], dataset_id="examples/sums.py:rows")
            settings |= dict(reward_funcs=[f"{tmp_path}/even.py:even"], prompts_per_step=4, num_generations=4)
            settings |= dict(max_completion_length=48, max_steps=2, print_samples_every=0, output_dir=str(tmp_path))
            settings |= dict(max_prompt_length=64, learning_rate=0.0, router_replay=replay, run_name=replay)
            train(TrainConfig(**settings))
            seen[replay] = read_metrics(tmp_path / replay)[-1]
        assert 0 < seen["auto"]["routing/differs"] < 0.3 and "routing/differs" not in seen["off"]
        assert 1 <= seen["auto"]["routing/load_max"] < 16  # of the layers that have experts
        with_replay, without = (seen[name]["sampling/logprob_diff_mean"] for name in ("auto", "off"))
        assert with_replay < 0.7 * without, (with_replay, without)
    finally:
        live.stop()


TRIES = """
import json, sys
import vllm_server
from serving.engine import Arguments
for words in json.loads(sys.argv[1]):
    args, rest = vllm_server.parse_command_line(words)
    parsed, _ = vllm_server.engine_arguments(args, [*rest, "--max-model-len", "128"])
    try:
        config = Arguments.from_cli_args(parsed).create_engine_config()
        found = [config.aux_output_config.enabled, config.parallel_config.worker_cls]
    except ValueError as error:
        found = str(error)
    print("FOUND", json.dumps(found))
"""


def test_experts_are_told_where_they_can_be(tmp_path):
    """By itself with a mixture; not with a dense model, against the user's word, or where vLLM cannot."""
    mixture = str(saved("qwen3_moe", tmp_path, **SIZES, **EXPERTS))
    on, off = [True, "serving.cpu_worker.Worker"], [False, "vllm.v1.worker.cpu_worker.CPUWorker"]
    cases = {
        (mixture,): on,
        (mixture, "--enable-return-routed-experts"): on,
        (mixture, "--no-enable-return-routed-experts"): off,
        (mixture, "--no-enable-prefix-caching"): off,
        (mixture, "--no-enable-prefix-caching", "--enable-return-routed-experts"): "requires prefix caching",
        ("models/tiny",): off,
        ("models/tiny", "--enable-return-routed-experts"): "only supports MoE models",
    }
    words = json.dumps([["--model", *case] for case in cases])
    done = subprocess.run(
        [sys.executable, "-c", TRIES, words], cwd=ROOT, capture_output=True, text=True, timeout=200, encoding="utf-8"
    )
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert len(found) == len(cases), done.stderr[-3000:]
    for (case, wanted), seen in zip(cases.items(), found, strict=True):
        assert wanted in seen if isinstance(wanted, str) else seen == wanted, (case, seen)
    assert "it does not tell the experts of its tokens: AuxOutput Connector requires prefix caching" in done.stdout
