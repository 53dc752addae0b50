"""--push_lora adapters for models whose layers the server has under other names or in other pieces."""

import asyncio
import os
from dataclasses import replace

import pytest
import tiny_vlms
import torch
from push_worker import edit
from server_fixture import make_tiny, start_server
from tiny_vlms import rows_of
from transformers import AutoTokenizer, Phi3Config, Phi3ForCausalLM

import train_grpo as script
import utils
from config import TrainConfig
from inputs.processor import load_processor
from rollouts import single_turn

# Of the language model; the tower is left out.
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VISION = os.environ.get("FAMILIES", "qwen2_5_vl").split()  # others by hand
ROWS = [{"prompt": [{"role": "user", "content": f"What is {n} + 7?"}]} for n in range(3)]


def make_phi3(folder):
    """Query, key and value are one layer in its checkpoints, too; so are gate and up."""
    tokenizer = AutoTokenizer.from_pretrained(make_tiny())
    torch.manual_seed(0)
    shape = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=tokenizer.eos_token_id)
    config = Phi3Config(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=512, **shape, **ids)
    Phi3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    models = {family: tiny_vlms.make(family, folder / family) for family in VISION}
    models["phi3"] = make_phi3(folder / "phi3")
    how = ("--dtype", "float32", "--max-model-len", "512", "--enable-lora")
    servers = {family: start_server(path, *how) for family, path in models.items()}
    try:
        yield {family: server.wait(600) for family, server in servers.items()}
    finally:
        for server in servers.values():
            server.stop()


def config(server, **options) -> TrainConfig:
    cfg = TrainConfig(
        model_id=str(server.model_dir), server_urls=[server.url], use_peft=True, push_lora="adapters", lora_r=16
    )
    cfg = replace(cfg, compute_dtype="float32", max_prompt_length=256, max_completion_length=12, num_generations=3)
    cfg = replace(cfg, **options)
    cfg.server_token = server.token
    return cfg


@pytest.mark.slow
@pytest.mark.parametrize("family", [*VISION, "phi3"])
def test_log_probs_are_the_trainers(served, family):
    utils.init_distributed(60)
    server, vision = served[family], family in VISION
    cfg = config(server, **(dict(freeze_vision=True, lora_targets=LINEAR) if vision else {}))
    policy, inner = script.load_policy(cfg, torch.device("cpu"))
    generator = script.make_generator(cfg, inner.hf_model, load_processor(cfg.model_id), torch.device("cpu"))
    rows = rows_of(family) if vision else ROWS
    for version in (0, 1):
        script.push_weights(policy, generator, version, 1)
        trajectories = asyncio.run(single_turn(rows, generator, cfg))
        batch = script.collate(trajectories, 0, torch.device("cpu"))
        assert {t.policy_version for t in trajectories} == {version}

        def difference(batch=batch):
            logprobs = script.all_logprobs(policy, batch, cfg)[0]
            return float(((logprobs - batch.sampling_logprobs).abs() * batch.loss_mask).sum() / batch.loss_mask.sum())

        assert difference() < 1e-5
        edit(policy, version)
        assert difference() > 1e-2
    generator.close()
