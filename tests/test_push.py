"""Weights really arrive: six kinds of policy on two ranks, a large edit, a push, and what the server then says."""

import json
from collections import Counter
from pathlib import Path

import pytest
import tiny_vlms
import torch
from families import model_of
from live import Process, running
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText

import train_grpo as script
import utils


def push_all(server, compute_dtype: str, out: Path) -> list[dict]:
    command = ["tests/push_worker.py", str(server.model_dir), server.url, compute_dtype, str(out)]
    with running(Process(command, out.with_suffix(".log"), 2, VLLM_SERVER_TOKEN=server.token)) as ranks:
        assert ranks.end() == 0, ranks.text[-4000:]
    return json.loads(out.read_text(encoding="utf-8"))


def check(results: list[dict], limit: float) -> None:
    assert len(results) == 6
    for result in results:
        assert result["before"] > 0.1 > result["after"], result  # the edit was large, and it arrived
        assert result["after"] < limit and result["later"] < limit, result
        assert result["version"] and result["untouched"] and result["saved"], result
        # Of a model of 164 MiB: a layer gathered, the bucket filled from it, that packed for the wire; 13 MiB each.
        assert result["extra_mb"] < 3 * 13 + 16, result


def test_pushed_weights_are_the_trainers_in_fp32(server, tmp_path):
    check(push_all(server, "float32", tmp_path / "out.json"), 1e-4)


@pytest.mark.parametrize(("family", "joined"), [("hrm_text", True), ("llama", False)])
def test_what_a_checkpoint_holds_joined_is_in_one_bucket(family, joined):
    """Published weights of hrm_text have gate and up projections in one tensor, and those of attention in another."""
    model = model_of(family)
    buckets = list(script.weight_buckets(torch.nn.ModuleDict({"model": model}), 20_000, torch.float32))
    whole = dict(utils.as_in_a_checkpoint(model, [item for bucket in buckets for item in bucket]))
    sent = [item for bucket in buckets for item in utils.as_in_a_checkpoint(model, bucket)]
    assert sorted(name for name, _ in sent) == sorted(whole)  # once each
    assert all(torch.equal(tensor, whole[name]) for name, tensor in sent)
    layers = [{utils.layer_of(name) for name, _ in bucket} - {""} for bucket in buckets]
    divided = any(count > 1 for count in Counter(layer for bucket in layers for layer in bucket).values())
    assert len(buckets) > 2 and divided != joined


def test_experts_are_turned_as_published_ones_are(tmp_path):
    """Of Qwen3-VL's mixtures a checkpoint has [experts, inputs, outputs], transformers' model the other way round. vLLM
    turns whatever it is sent."""
    config = tiny_vlms.config_of("qwen3_vl", tiny_vlms.processor_of("qwen3_vl"))
    config["text_config"] |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model("qwen3_vl_moe", **config))
    own = dict(model.named_parameters())
    sent = dict(utils.as_in_a_checkpoint(model, list(own.items())))
    turned = {name for name in own if ".experts." in name}
    assert len(turned) == 4 and sent.keys() == own.keys()
    assert all(torch.equal(sent[n], own[n].mT if n in turned else own[n]) for n in own)
    model.config.save_pretrained(tmp_path)
    save_file({name: x.contiguous() for name, x in sent.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert all(torch.equal(x, own[name]) for name, x in again.named_parameters())
    back = dict(utils.as_in_a_checkpoint(again, list(again.named_parameters())))
    assert all(torch.equal(back[name], sent[name]) for name in sent)
