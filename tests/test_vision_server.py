"""A live vLLM server and the trainer see the same images: before and after a push that changes every part."""

import asyncio
import os
from dataclasses import replace

import pytest
import tiny_vlms
import torch
from server_fixture import start_server
from tiny_vlms import picture, rows_of

import train_grpo as script
from config import TrainConfig
from inputs import prompts
from inputs.processor import load_processor
from rollouts import single_turn

# Others, by hand: FAMILIES="llava llava_next gemma3" pytest tests/test_vision_server.py
FAMILIES = os.environ.get("FAMILIES", "idefics3 qwen2_5_vl").split()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Servers of two families, loading side by side: one gives every image a fixed size, one as many patches as fit."""
    folder = tmp_path_factory.mktemp("served")
    servers = {}
    for family in FAMILIES:
        path = tiny_vlms.make(family, folder / family)
        servers[family] = start_server(path, "--dtype", "float32", "--max-model-len", "512")
    try:
        yield {family: server.wait() for family, server in servers.items()}
    finally:
        for server in servers.values():
            server.stop()


def edit(model: torch.nn.Module) -> None:
    """Every part - tower, connector, language model - by about a third."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * (parameter.std(correction=0) / 3 + 0.02))


def difference(policy, batch, cfg) -> float:
    """Mean |trainer - sampler| log-prob of the sampled tokens."""
    logprobs = script.all_logprobs(policy, batch, cfg)[0]
    return float(((logprobs - batch.sampling_logprobs).abs() * batch.loss_mask).sum() / batch.loss_mask.sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_server_and_trainer_see_the_same(served, family):
    server = served[family]
    cfg = TrainConfig(
        model_id=str(server.model_dir),
        server_urls=[server.url],
        server_token=server.token,
        compute_dtype="float32",
        max_prompt_length=256,
        max_completion_length=12,
        num_generations=3,
        beta=0.0,
    )
    policy, inner = script.load_policy(cfg, torch.device("cpu"))
    processor = load_processor(cfg.model_id)
    client = script.make_generator(cfg, inner.hf_model, processor, torch.device("cpu"))
    rows = rows_of(family)
    prompts.COUNTS.clear()
    for version in (0, 1):
        if version:
            edit(inner.hf_model)
        script.push_weights(policy, client, version, 1)  # ends with an error if a parameter is not covered exactly once
        trajectories = asyncio.run(single_turn(rows, client, cfg))
        batch = script.collate(trajectories, 0, torch.device("cpu"))
        assert {t.policy_version for t in trajectories} == {version}
        assert difference(policy, batch, cfg) < 1e-4
        assert not torch.isin(batch.input_ids[batch.loss_mask > 0], torch.tensor(inner.never)).any()

    # Three images in the rows, sampled three times each, twice: processed once each, sent once a request.
    sent = client.image_bytes
    assert prompts.image_metrics(client)["images/processed"] == 3 and sent > 6 * 1000
    assert prompts.image_metrics(client) == {"images/processed": 0, "images/mb_sent": 0.0}

    # Another image, or another row's, shows in the log-probs: the canary of every step would see it.
    other = prompts.build_prompt(rows[0] | {"image": picture(9)}, client, cfg).model_inputs
    swapped = replace(batch, model_inputs=[other] * 3 + batch.model_inputs[3:])
    assert difference(policy, swapped, cfg) > 100 * difference(policy, batch, cfg)

    # A trainer that would expand a prompt otherwise says so.
    prompt = prompts.build_prompt(rows[0], client, cfg)
    wrong = replace(prompt, token_ids=[*prompt.token_ids[:5], *prompt.token_ids[6:]])
    samples = asyncio.run(client.generate(prompt.sent_ids, n=1, max_tokens=2, images=prompt.images))
    prompts.check_echo(prompt, samples)
    with pytest.raises(RuntimeError, match=r"the trainer \d+; they differ from token \d+ on"):
        prompts.check_echo(wrong, samples)
    client.close()
