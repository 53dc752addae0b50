"""A live vLLM server of a tiny Qwen2.5-VL: it sees what the trainer sees, and so does a teacher."""

import asyncio
from dataclasses import replace

import psutil
import pytest
import tiny_vlms
import torch
from server_fixture import start_server
from tiny_vlms import picture, picture_rows

import train_grpo as script
import vllm_client
from algorithms import teachers
from config import TrainConfig
from inputs import pictures, vision
from inputs.processor import load_processor
from rollouts import single_turn

FAMILY = "qwen2_5_vl"  # gives an image as many patches as fit


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tiny_vlms.make(FAMILY, tmp_path_factory.mktemp("served") / FAMILY)
    live = start_server(path, "--dtype", "float32", "--max-model-len", "512")
    try:
        yield live.wait()
    finally:
        live.stop()


@pytest.fixture
def run(server):
    """(policy, its config, the client), the weights pushed."""
    how = dict(model_id=str(server.model_dir), server_urls=[server.url], server_token=server.token, beta=0.0)
    how |= dict(compute_dtype="float32", max_prompt_length=256, max_completion_length=12, num_generations=2)
    cfg = TrainConfig(**how)
    policy = script.load_policy(cfg, torch.device("cpu"))
    inner = script.unwrapped(policy)
    client = script.make_generator(cfg, inner.hf_model, load_processor(cfg.model_id), torch.device("cpu"))
    script.push_weights(policy, client, 0, 1)
    yield policy, cfg, client
    client.close()


def difference(policy, batch, cfg) -> float:
    """Mean |trainer - server| log-prob of the sampled tokens."""
    logprobs = script.all_logprobs(policy, batch, cfg)["logprobs"]
    return float(((logprobs - batch.sampling_logprobs).abs() * batch.loss_mask).sum() / batch.loss_mask.sum())


def test_server_and_trainer_see_the_same(run):
    """Rows with no, one and two pictures; every part of the model changed and pushed anew."""
    policy, cfg, client = run
    for version in (1, 2):
        torch.manual_seed(version)
        for parameter in policy.parameters():
            parameter.data.add_(torch.randn_like(parameter) * (parameter.std(correction=0) / 3 + 0.02))
        script.push_weights(policy, client, version, 1)
        trajectories = asyncio.run(single_turn(picture_rows(), client, cfg))
        batch = script.collate(trajectories, 0, torch.device("cpu"))
        assert {t.policy_version for t in trajectories} == {version}
        assert difference(policy, batch, cfg) < 1e-4
    # Another picture shows in the log-probs: the canary of every step would see it.
    row = next(row for row in picture_rows() if "image" in row)
    place = next(n for n, t in enumerate(trajectories) if t.images)
    other = vision.build_prompt(row | {"image": picture(9)}, client, cfg).model_inputs
    inputs = [other if n == place else given for n, given in enumerate(batch.model_inputs)]
    assert difference(policy, replace(batch, model_inputs=inputs), cfg) > 10 * difference(policy, batch, cfg)


def test_a_server_that_sees_another_picture_ends_the_run(run, monkeypatch):
    _, cfg, client = run
    rows = [row for row in picture_rows() if "image" in row]
    encode = vllm_client.encode_image
    monkeypatch.setattr(vllm_client, "encode_image", lambda _: encode(pictures.load_image(picture(9, 90, 90))[1]))
    with pytest.raises(RuntimeError, match="the generator made"):
        asyncio.run(single_turn(rows, client, cfg))


@pytest.mark.parametrize("prompt", ["the same", "another"])
def test_pictures_travel_to_a_teacher(run, server, prompt, monkeypatch):
    """The policy's own server as its teacher: behind the same prompt it says what it said when it sampled."""
    _, cfg, client = run
    monkeypatch.setenv("TEACHER_TOKEN", server.token)
    own = dict(teacher_urls=[server.url], distill_topk=4, max_failed=0.0)
    cfg = replace(cfg, **own, teacher_prompt="hint" if prompt == "another" else None)
    rows = [row | {"hint": [{"role": "user", "content": "Another one."}]} for row in picture_rows()]
    teachers.connect(cfg, client.tokenizer, rows)

    async def told() -> list:
        trajectories = await single_turn(rows, client, cfg)
        await teachers.tell(trajectories, client, cfg, asyncio.ensure_future(asyncio.sleep(0)))
        return trajectories

    for t in asyncio.run(told()):
        assert len(t.teacher_logprobs) == len(t.token_ids) and t.teacher_top[0].shape == (len(t.token_ids), 4)
        apart = max(abs(a - b) for a, b in zip(t.teacher_logprobs, t.logprobs, strict=True))
        # Sampling leaves out placeholders of images, which a teacher gives their small share.
        assert (apart < 3e-3) == (prompt == "the same")


def test_a_server_whose_engine_dies_says_so_and_leaves_no_process_behind(server):
    """The last test here, as it ends the server."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    (engine,) = (child for child in family if "EngineCore" in " ".join(child.cmdline()) + child.name())
    engine.kill()
    assert server.process.wait(60) == 1
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
