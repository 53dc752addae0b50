"""Live vLLM servers of vision models: they see what the trainer sees; what they refuse; how one dies."""

import asyncio
import base64
import http.server
import io
import os
import time
from dataclasses import replace

import psutil
import pytest
import tiny_vlms
import torch
from PIL import Image
from server_fixture import start_server
from test_server import generate, push
from tiny_vlms import picture, rows_of
from transformers import AutoModelForImageTextToText, AutoProcessor

import teachers
import train_grpo as script
from config import TrainConfig
from inputs import prompts
from inputs.processor import load_processor
from rollouts import single_turn
from vllm_client import ServerError, VLLMClient, in_thread

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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", ["the same", "another"])
def test_images_travel_to_a_teacher(served, family, prompt):
    """The policy's own server as its teacher: behind the same prompt it says what it said when it sampled."""
    server = served[family]
    how = dict(model_id=str(server.model_dir), server_urls=[server.url], server_token=server.token)
    how |= dict(compute_dtype="float32", max_prompt_length=256, max_completion_length=12, num_generations=2)
    how |= dict(teacher_urls=[server.url], distill_topk=4, env_errors="stop")
    cfg = TrainConfig(**how, teacher_prompt="hint" if prompt == "another" else None)
    rows = [row | {"hint": [{"role": "user", "content": "Another one."}]} for row in rows_of(family)]
    policy, inner = script.load_policy(cfg, torch.device("cpu"))
    processor = load_processor(cfg.model_id)
    client = script.make_generator(cfg, inner.hf_model, processor, torch.device("cpu"))
    script.push_weights(policy, client, 0, 1)
    teachers.connect(cfg, processor, rows)

    async def told() -> list:
        trajectories = await single_turn(rows, client, cfg)
        scored = asyncio.ensure_future(asyncio.sleep(0))
        await teachers.tell(trajectories, client, cfg, scored)
        return trajectories

    trajectories = asyncio.run(told())
    assert any(t.images for t in trajectories)
    for t in trajectories:
        assert len(t.teacher_logprobs) == len(t.token_ids) and t.teacher_top[0].shape == (len(t.token_ids), 4)
        apart = max(abs(a - b) for a, b in zip(t.teacher_logprobs, t.logprobs, strict=True))
        # Sampling leaves out placeholders of images, which a teacher gives their small share.
        assert (apart < 3e-3) == (prompt == "the same")
    client.close()


# ---- any request with images, and the death of a server; on the first server ----------------------------------------


@pytest.fixture(scope="module")
def vision(served):
    return served["idefics3"]


@pytest.fixture(scope="module")
def eyes(vision):
    """(client, processor, model)"""
    client = VLLMClient([vision.url], vision.token, timeout=30, request_timeout=120)
    model = AutoModelForImageTextToText.from_pretrained(vision.model_dir, dtype=torch.float32)
    return client, AutoProcessor.from_pretrained(vision.model_dir), model


def png(width, height):
    buffer = io.BytesIO()
    Image.new("L", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def test_token_ids_and_images_together(eyes):
    """Before and after an edit: prompt ids as the HF processor expands them, log-probs as the HF model's."""
    client, processor, model = eyes
    prompt = processor.tokenizer("<image>What is it?")["input_ids"]
    (info,) = client.server_info()
    assert info["never_sampled"] == [model.config.image_token_id]
    client.connect_weights("cpu")
    for version in (0, 1):
        if version:
            edit(model)
        push(client, model, version)
        for seed in (1, 2):
            features = processor(text="<image>What is it?", images=[picture(seed)], return_tensors="pt")
            for one in generate(client, prompt, n=2, images=[picture(seed)]):
                assert one.prompt_ids == features["input_ids"][0].tolist()
                ids = torch.tensor([one.prompt_ids + one.token_ids])
                with torch.no_grad():
                    logits = model(input_ids=ids, pixel_values=features["pixel_values"]).logits[0]
                logits[:, info["never_sampled"]] = -torch.inf  # as the server does
                logprobs = logits.log_softmax(-1)[len(one.prompt_ids) - 1 : -1]
                expected = logprobs.gather(-1, ids[0, len(one.prompt_ids) :, None])[:, 0]
                assert torch.allclose(expected, torch.tensor(one.logprobs), atol=1e-4), (version, seed)
    client.close()


def test_bad_images_are_refused(vision, eyes):
    client, processor, _ = eyes
    prompt = processor.tokenizer("<image>What is it?")["input_ids"]
    expanded = processor(text="<image>What is it?", images=[picture(1)])["input_ids"][0]
    huge = png(8000, 6250)
    cases = [
        (prompt, [huge], "50000000 pixels"),
        (prompt, [png(5000, 4001)], "20005000 pixels|5000 x 4001"),
        (prompt, ["???"], "cannot be read"),
        (prompt, [b"no image"], "cannot be read"),
        (prompt, [huge[:200]], "pixels|cannot be read"),
        (prompt, None, "1 placeholder tokens for 0 images"),
        (prompt, [picture(1), picture(2)], "image"),
        (list(expanded), [picture(1)], "4 placeholder tokens for 1 images"),
    ]
    for ids, images, message in cases:
        with pytest.raises(ServerError, match=f"with 4[0-9][0-9].*({message})"):
            generate(client, ids, images=images, max_tokens=2)
    for data in (base64.b64encode(huge).decode(), "???", "aGVsbG8="):
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}
        body = {"model": str(vision.model_dir), "messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
        answer = vision.request("POST", "/v1/chat/completions", json=body)
        assert 400 <= answer.status_code < 500, answer.text[:500]
    assert len(generate(client, prompt, images=[picture(1)])) == 1


class Pictures(http.server.BaseHTTPRequestHandler):
    """What a request to the server must not be able to reach."""

    asked = []

    def do_GET(self):
        self.asked.append(self.path)
        self.send_response(302 if self.path == "/elsewhere" else 200)
        self.send_header("Location", "/picture")
        self.end_headers()
        self.wfile.write(png(64, 64))

    def log_message(self, format, *args):
        pass


def ask_about(vision, url):
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    body = {"model": str(vision.model_dir), "messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    return vision.request("POST", "/v1/chat/completions", json=body)


def as_url(format):
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, format)
    return f"data:image/{format.lower()};base64," + base64.b64encode(buffer.getvalue()).decode()


def test_nothing_is_fetched(vision, eyes):
    """Loopback and redirects used to be; a slow host held the request for a minute."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as listener:
        in_thread(listener.serve_forever)
        for host in ("127.0.0.1", "localhost", "127.1", "[::ffff:127.0.0.1]"):
            for path in ("/picture", "/elsewhere"):
                answer = ask_about(vision, f"http://{host}:{listener.server_port}{path}")
                assert answer.status_code == 400 and "--allowed-media-domains" in answer.text, answer.text
        listener.shutdown()
    assert Pictures.asked == []
    for url in ("file:///etc/hostname", "/etc/hostname", "ftp://127.0.0.1/x", "https:///x"):
        assert ask_about(vision, url).status_code >= 400, url
    assert ask_about(vision, as_url("PNG")).status_code == 200


def test_pictures_are_of_the_formats_named(vision, eyes):
    client, processor, _ = eyes
    prompt = processor.tokenizer("<image>What is it?")["input_ids"]
    for format in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        assert ask_about(vision, as_url(format)).status_code == 200, format
        assert generate(client, prompt, images=[as_url(format).rpartition(",")[2]], max_tokens=1)
    for format in ("EPS", "PCX", "TGA", "PPM", "ICO"):
        assert ask_about(vision, as_url(format)).status_code == 400, format
        with pytest.raises(ServerError, match="400: an image that cannot be read"):
            generate(client, prompt, images=[as_url(format).rpartition(",")[2]], max_tokens=1)


def test_engine_death_is_an_error_in_seconds_with_its_traceback(vision, eyes):
    """Its weights taken away behind the server's back, the model raises in the middle of a generation."""
    client, _, _ = eyes
    children = psutil.Process(vision.process.pid).children(recursive=True)

    async def break_meanwhile():
        running = asyncio.create_task(client.generate([5, 6, 7], n=4, max_tokens=500, min_tokens=500))
        await asyncio.sleep(0.5)
        body = {"method": "start_weight_update"}
        await asyncio.to_thread(vision.request, "POST", "/collective_rpc", json=body)
        start = time.monotonic()
        with pytest.raises(ServerError, match=r"(?s)the engine died.*Traceback.*meta"):
            await running
        return time.monotonic() - start

    assert asyncio.run(break_meanwhile()) < 20
    assert vision.process.wait(30) not in (0, None)
    with pytest.raises(ServerError, match="is gone.*start it again"):
        client.server_info()
    psutil.wait_procs(children, timeout=10)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
