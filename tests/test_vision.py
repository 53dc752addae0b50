"""Models that see: log-probs and gradients of every family through one loop, pixels, pictures of rows and of turns."""

import asyncio
import base64
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_vlms
import torch
import torch.distributed as dist
from PIL import Image
from ragged import full_gradients, settled
from ranks import on_ranks
from safetensors.torch import load_file
from test_turns import config
from tiers import by_default
from tiny_vlms import batch_of, picture, picture_rows

import train_grpo as script
import utils
from agentic import agents
from config import ConfigError, TrainConfig
from envs import Environment
from envs.turns import play
from inputs import pictures, prompts, vision
from inputs.parts import PartError
from inputs.pictures import encode_image, load_image
from inputs.processor import load_processor
from modeling import agreement
from modeling.model import rope_index_of
from rollouts import look_at, single_turn
from runfiles.reading import read_metrics
from saving import checkpoints

# Positions along three axes and packed patches; images that see themselves in both directions, two kinds of attention.
FAMILIES = [
    pytest.param(family, marks=() if family in ("qwen2_5_vl", "gemma3") else pytest.mark.slow)
    for family in tiny_vlms.MARK
]


PLAIN = {"gemma3", "gemma4", "qwen3_5"}  # own masks, recurrent layers: they take plain rows


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory):
    """A family's model under training in fp32, its rows, and a Batch of 3 completions a row."""
    folder = tiny_vlms.make(request.param, tmp_path_factory.mktemp(request.param))
    cfg = TrainConfig(model_id=str(folder), compute_dtype="float32", generator="hf", num_generations=3, beta=0.0)
    policy = script.load_policy(cfg, torch.device("cpu"))
    inner = script.unwrapped(policy)
    generator = script.make_generator(cfg, inner.hf_model, load_processor(str(folder)), torch.device("cpu"))
    rows = picture_rows()
    cfg = settled(cfg, policy, inner, agreement.trials(generator, inner.hf_model, cfg, rows))
    assert cfg.shared_prefix == (request.param not in PLAIN)
    return SimpleNamespace(
        family=request.param,
        cfg=cfg,
        policy=policy,
        inner=inner,
        generator=generator,
        rows=rows,
        batch=batch_of(rows, generator, cfg),
    )


def direct_logprobs(tiny, row: int) -> torch.Tensor:
    """What transformers itself says, given what the processor makes of the row.  [sampled tokens]"""
    source = tiny.rows[row // 3]
    images = [pictures.load_image(one, tiny.cfg)[0] for one in vision.image_sources(source)]
    processor = tiny.generator.tokenizer
    text = prompts.prompt_text(source, processor, tiny.cfg, len(images))
    encoded = dict(
        processor(text=[text], images=[images] if images else None, return_tensors="pt", add_special_tokens=False)
    )
    ids, _ = encoded.pop("input_ids"), encoded.pop("attention_mask")
    encoded.pop("labels", None)
    sampled = tiny.batch.input_ids[row][tiny.batch.loss_mask[row] > 0]
    follows = torch.zeros(1, len(sampled), dtype=torch.long)
    for key in ("token_type_ids", "mm_token_type_ids"):
        if key in encoded:
            encoded[key] = torch.cat([encoded[key], follows], 1)
    whole = torch.cat([ids, sampled[None]], 1)
    with torch.no_grad():
        logits = (
            tiny.inner.hf_model(input_ids=whole, attention_mask=torch.ones_like(whole), **encoded).logits[0].float()
        )
    logits[:, tiny.inner.never] = -1e9
    return logits.log_softmax(-1)[ids.shape[1] - 1 : -1].gather(1, sampled[:, None])[:, 0]


def test_logprobs_are_those_of_transformers(tiny):
    """With the prompt shared and repeated, several images, and rows without any beside them."""
    for shared in {tiny.cfg.shared_prefix, False}:
        logprobs = script.all_logprobs(tiny.policy, tiny.batch, replace(tiny.cfg, shared_prefix=shared))["logprobs"]
        for row in range(0, len(tiny.batch), 2):
            mine = logprobs[row][tiny.batch.loss_mask[row] > 0]
            assert (mine - direct_logprobs(tiny, row)).abs().max() < 1e-5, (row, shared)


def gradients(tiny, cfg) -> dict:
    tiny.policy.zero_grad()
    script.accumulate_gradients(tiny.policy, replace(tiny.batch), cfg)
    return {name: p.grad.clone() for name, p in tiny.policy.named_parameters() if p.grad is not None}


def test_the_gradient_is_the_same_however_it_is_cut(tiny):
    """Micro-batches with two, one and no images; every trained part gets a gradient."""
    whole = gradients(tiny, tiny.cfg)
    parts = {name.split(".layers.")[0].split(".blocks.")[0] for name, g in whole.items() if g.abs().max() > 0}
    assert len(parts) >= 4, parts  # embeddings, tower, connector, language model
    for cut in (
        dict(tokens_per_microbatch=60),
        dict(shared_prefix=False),
        dict(shared_prefix=False, tokens_per_microbatch=60),
    ):
        other = gradients(tiny, replace(tiny.cfg, **cut))
        distance = sum((other[name] - whole[name]).double().pow(2).sum() for name in whole)
        assert (distance / sum(g.double().pow(2).sum() for g in whole.values())).sqrt() < 1e-5, cut


def test_the_sampler_sees_what_is_trained_on(tiny):
    """In-process generation, prompts of different lengths and numbers of images in one batch."""
    cfg = replace(tiny.cfg, max_completion_length=6)
    generator = tiny.generator
    generator.max_sequences = 6  # two prompts at a time
    generator.seed(0)
    script.push_weights(tiny.policy, generator, 1, 64)
    if not generator.cached:  # layers with a state (qwen3_5)
        with pytest.raises(ValueError, match="no prompts with images here; use --generator vllm"):
            asyncio.run(single_turn(tiny.rows, generator, cfg))
        return
    trajectories = asyncio.run(single_turn(tiny.rows, generator, cfg))
    batch = script.collate(trajectories, 0, torch.device("cpu"))
    logprobs = script.all_logprobs(tiny.policy, batch, cfg)["logprobs"]
    assert ((logprobs - batch.sampling_logprobs) * batch.loss_mask).abs().max() < 1e-4
    assert not torch.isin(batch.input_ids[batch.loss_mask > 0], torch.tensor(tiny.inner.never)).any()


def test_adapters_and_checkpoints(tiny, tmp_path):
    """LoRA on all linear layers, or with --freeze_vision on none of the tower; a checkpoint reloads as it is."""
    for freeze in (False, True):
        cfg = replace(tiny.cfg, use_peft=True, freeze_vision=freeze)
        policy = script.load_policy(cfg, torch.device("cpu"))
        inner = script.unwrapped(policy)
        tower = {id(p) for p in inner.hf_model.get_encoder(modality="image").parameters()}
        trained = [p for p in policy.parameters() if p.requires_grad]
        assert trained and any(id(p) in tower for p in trained) != freeze
        script.accumulate_gradients(policy, replace(tiny.batch), cfg)
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in trained)
    modules = {"policy": (tiny.policy, None)}
    buckets, _ = script.saved_weights(tiny.policy, replace(tiny.cfg, push_bucket_mb=1024), torch.float32)
    checkpoints.save_checkpoint(tmp_path, 1, modules, tiny.inner.hf_model, buckets, tiny.generator.tokenizer, {}, {}, 1)
    folder = tmp_path / "checkpoints" / "step_1"
    again = script.load_hf_model(replace(tiny.cfg, model_id=str(folder)), torch.float32).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in tiny.inner.hf_model.state_dict().items())
    assert type(load_processor(str(folder))) is type(tiny.generator.tokenizer)


# ---- the whole loop --------------------------------------------------------------------------------------------------

ROWS = """
import io
import tiny_vlms

def rows(split, seed):
    for n in range(8 if split == "train" else 2):
        tiny_vlms.picture(n).save(file := io.BytesIO(), "PNG")
        image = {5: None, 6: tiny_vlms.damaged(file.getvalue())}.get(n, file.getvalue())
        yield {"prompt": f"Which is picture {n}?", "image": image}

def even(completion_ids, image, **_):
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]
"""


def test_the_script_trains_it(tmp_path, caplog, monkeypatch):
    """Text rows among rows with images, each of which is processed once a step, however often it is sampled. One whose
    pixels are damaged is replaced by another."""
    (tmp_path / "task.py").write_text(ROWS, encoding="utf-8")
    cfg = TrainConfig(
        model_id=str(tiny_vlms.make("idefics3", tmp_path / "model")), generator="hf", compute_dtype="float32",
        dataset_id=f"{tmp_path}/task.py:rows", reward_funcs=[f"{tmp_path}/task.py:even"], prompts_per_step=8,
        num_generations=4, num_iterations=2, max_completion_length=4, max_steps=2, eval_steps=2, learning_rate=1e-3,
        output_dir=str(tmp_path), run_name="run",
    )  # fmt: skip
    loaded = []

    def load(source, *given, **how):
        loaded.append(pictures.load_image(source, *given, **how))
        return loaded[-1]

    monkeypatch.setattr(vision, "load_image", load)
    monkeypatch.setattr("rollouts.LOOKED_AT", 5)  # before the start; else the damaged one is named there
    before = load_file(Path(cfg.model_id) / "model.safetensors")
    script.train(cfg)
    steps = [line for line in read_metrics(tmp_path / "run") if "reward" in line]
    # 6 of the 8 rows have an image that can be read, and the two that are evaluated; 5 + 2 and two are looked at before
    assert 6 + 2 <= len(loaded) <= 2 * 6 + 2 * 2 + 7 + 2
    assert all(line["rollout/failed"] == 0 and line["rollout/rows_left_out"] >= 1 for line in steps)
    assert "row 6 of those in use is left out" in caplog.text and "image 0 of a row cannot be read" in caplog.text
    after = load_file(tmp_path / "run" / "checkpoints" / "step_2" / "model.safetensors")
    for part in ("vision_model", "connector", "text_model"):
        assert any(part in name and not torch.equal(before[name], after[name]) for name in after), part


# ---- two ranks -------------------------------------------------------------------------------------------------------


def gradients_of_a_rank(strategy: str, folder: str) -> dict:
    """Whole gradients, with and without the prompt shared. Of three groups, with one image, two, and none, the last is
    all that a second rank has."""
    world = utils.world_size()
    rank = dist.get_rank() if world > 1 else 0
    cfg = TrainConfig(model_id=folder, strategy=strategy, compute_dtype="float32", beta=0.0)
    policy = script.load_policy(cfg, torch.device("cpu"))
    inner = script.unwrapped(policy)
    generator = SimpleNamespace(tokenizer=load_processor(folder), rope_index=rope_index_of(inner.hf_model))
    batch, found = batch_of(picture_rows(), generator, cfg), {}
    groups = batch.groups.tolist()
    batch = batch.select([row for row, group in enumerate(groups) if world == 1 or (group == 2) == (rank == 1)])
    for shared in (True, False):
        policy.zero_grad()
        script.accumulate_gradients(policy, batch, replace(cfg, shared_prefix=shared, tokens_per_microbatch=60))
        found[shared] = full_gradients(policy)
    return found


def test_a_rank_without_images(tmp_path):
    """One of two ranks has text only: nothing waits, and the gradient is that of one process."""
    folder = str(tiny_vlms.make("qwen2_5_vl", tmp_path / "model"))
    (alone,), (two, _) = (on_ranks(n, gradients_of_a_rank, s, folder, limit=250) for n, s in ((1, "ddp"), (2, "fsdp2")))
    for shared, wanted in alone.items():
        distance = sum((two[shared][name] - gradient).double().pow(2).sum() for name, gradient in wanted.items())
        size = sum(gradient.double().pow(2).sum() for gradient in wanted.values())
        assert (distance / size).sqrt() < 1e-5, shared


# ---- pictures of an environment --------------------------------------------------------------------------------------


class Pictures(Environment):
    """Answers every turn with a picture, or two, of its own."""

    def reset(self, row, seed):
        self.given = []
        return super().reset(row, seed)

    async def step(self, text):
        seeds = [10 * len(self.given) + n for n in range(1 + len(self.given) % 2)]
        shown = [picture(seed, 56 + 28 * n, 56) for n, seed in enumerate(seeds)]
        self.given += shown
        parts = [{"type": "image", "image": image} for image in shown]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": "And now?"}]}], 0.0, False, {}


@pytest.mark.parametrize(
    "family",
    ["qwen2_5_vl", *(pytest.param(f, marks=pytest.mark.slow) for f in ("idefics3", "gemma3", "gemma4"))],
)
def test_images_of_rows_and_of_an_environment(family, tmp_path):
    """Shown to the model in their order and trained on as they were shown, beside rows that have none."""
    folder = str(tiny_vlms.make(family, tmp_path / "model"))
    settings = dict(model_id=folder, env="x", tools=[], generator="hf", compute_dtype="float32", num_generations=2)
    cfg = config(**settings, max_turns=4, max_completion_length=400, max_turn_length=40, beta=0.0)
    policy = script.load_policy(cfg, torch.device("cpu"))
    inner = script.unwrapped(policy)
    processor = load_processor(folder)
    generator = script.make_generator(cfg, inner.hf_model, processor, torch.device("cpu"))
    generator.eos_ids |= set(range(0, 4096, 8))  # a random model seldom ends a turn
    own = [picture(1), picture(2)]
    parts = [{"type": "image", "image": own[0]}, {"type": "text", "text": "then"}, {"type": "image"}]
    rows = [{"prompt": "Look.", "images": own}, {"prompt": [{"role": "user", "content": parts}], "image": own[1]}]
    cfg = settled(cfg, policy, inner, agreement.trials(generator, inner.hf_model, cfg, rows))
    environments = [Pictures() for _ in range(6)]

    async def run():
        played = zip([*rows, {"prompt": "Wait."}] * 2, [0, 1, 2] * 2, environments, strict=True)
        return await asyncio.gather(*(play(row, group, env, generator, cfg) for row, group, env in played))

    trajectories = asyncio.run(run())
    assert max(len(t.images) for t in trajectories) >= 4
    for t, environment in zip(trajectories, environments, strict=True):
        assert len(t.token_ids) == len(t.loss_mask) == len(t.logprobs)
        shown = (own * (t.group < 2) + environment.given)[: len(t.images)]
        if family == "qwen2_5_vl" and shown:
            wanted = processor.image_processor(images=shown, return_tensors="pt")["pixel_values"]
            assert torch.equal(t.info["model_inputs"]["pixel_values"], wanted)
            marks = (t.prompt_ids + t.token_ids).count(processor.tokenizer.convert_tokens_to_ids("<|vision_start|>"))
            assert marks == len(t.images)
    batch = script.collate(sorted(trajectories, key=lambda t: t.group), 0, torch.device("cpu"))
    for shared in {cfg.shared_prefix, False}:
        for budget in (100_000, 200):
            cut = TrainConfig(**vars(cfg) | {"shared_prefix": shared, "tokens_per_microbatch": budget})
            logprobs = script.all_logprobs(policy, batch, cut)["logprobs"]
            assert ((logprobs - batch.sampling_logprobs) * batch.loss_mask).abs().max() < 1e-4, (shared, budget)


def looks(row, endpoint):
    """An agent: two turns with a picture each, and a helper who is shown another one."""
    import openai

    client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)

    def say(messages: list, seed: int) -> list:
        url = encode_image(load_image(picture(seed, 56 + 28 * (seed % 2), 56))[1])
        parts = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": url}}]
        messages = [*messages, {"role": "user", "content": parts}]
        return [*messages, client.chat.completions.create(model=endpoint.model, messages=messages).choices[0].message]

    say(say([], 1), 2)
    say([{"role": "system", "content": "Help."}], 3)
    return 1.0


@pytest.mark.parametrize("family", by_default(["qwen2_5_vl"], ["qwen2_5_vl", "idefics3", "gemma3"]))
def test_images_of_an_agent(family, tmp_path):
    folder = str(tiny_vlms.make(family, tmp_path / "model"))
    settings = dict(model_id=folder, agent=f"{__file__}:looks", generator="hf", compute_dtype="float32", beta=0.0)
    cfg = TrainConfig(**settings, max_prompt_length=400, max_completion_length=400, max_turn_length=20)
    policy = script.load_policy(cfg, torch.device("cpu"))
    inner = script.unwrapped(policy)
    generator = script.make_generator(cfg, inner.hf_model, load_processor(folder), torch.device("cpu"))
    row = {"prompt": "-"}
    cfg = settled(cfg, policy, inner, agreement.trials(generator, inner.hf_model, cfg, picture_rows()))
    t = asyncio.run(agents.play(row, 0, generator, cfg))
    assert len(t.info["restarts"]) == 1 and t.turns == 3
    batch = script.collate([t, t], 0, torch.device("cpu"))
    for shared in {cfg.shared_prefix, False}:
        logprobs = script.all_logprobs(policy, batch, replace(cfg, shared_prefix=shared))["logprobs"]
        assert ((logprobs - batch.sampling_logprobs) * batch.loss_mask).abs().max() < 1e-4, shared


# ---- pixels ----------------------------------------------------------------------------------------------------------


def file_of(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_an_image_in_every_form_is_the_same(tmp_path):
    """PIL, path, bytes, base64, data URL, and what a data set holds undecoded."""
    image, path = picture(3), tmp_path / "a.png"
    image.save(path)
    data = path.read_bytes()
    text = base64.b64encode(data).decode()
    forms = [image, str(path), path, data, text, f"data:image/png;base64,{text}", {"bytes": data, "path": None}]
    for form in [*forms, {"bytes": None, "path": str(path)}]:
        got, sent = pictures.load_image(form, TrainConfig())
        assert got.tobytes() == image.tobytes()
        assert Image.open(io.BytesIO(sent)).tobytes() == image.tobytes()


def test_pixels_are_bounded_for_trainer_and_server_alike():
    image, sent = pictures.load_image(picture(0, 100, 50), TrainConfig(max_pixels=1000))
    assert 900 < image.width * image.height <= 1000 and abs(image.width / image.height - 2) < 0.1
    assert Image.open(io.BytesIO(sent)).size == image.size
    line, _ = pictures.load_image(picture(0, 2000, 1), TrainConfig(max_pixels=1000))
    assert line.size == (1000, 1) or line.width < 1000


def test_photographs_are_turned_upright_and_sent_so():
    image, exif = Image.new("RGB", (40, 20), "white"), Image.Exif()
    image.paste((255, 0, 0), (0, 0, 10, 10))
    for turn, corner in ((1, (5, 5)), (3, (35, 15)), (6, (15, 5)), (8, (5, 35))):
        exif[0x0112] = turn
        got, sent = pictures.load_image(file_of(image, "PNG", exif=exif), TrainConfig())
        assert got.getpixel(corner) == (255, 0, 0) and got.size == ((40, 20) if turn < 5 else (20, 40))
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(sent))), np.asarray(got))


@pytest.mark.parametrize(
    "image, message",
    [
        ("https://example.org/a.png", "nothing is fetched; download it"),
        (b"hello", "cannot identify image file"),
        (Image.new("1", (20_000, 20_000)), "20000 x 20000 pixels"),
    ],
    ids=["address", "no image", "bomb"],
)
def test_a_bad_image_names_its_row(image, message):
    rows = [{"prompt": "What?", "image": picture(0)}, {"prompt": "What?", "image": image}]
    with pytest.raises(ConfigError, match=f"rows.jsonl, row 1: image 0 of a row.* cannot be read.*{message}"):
        look_at(rows, "rows.jsonl", tiny_vlms.processor_of("idefics3"), TrainConfig())


def test_every_form_of_an_image_in_a_prompt_is_the_column(tmp_path):
    processor = tiny_vlms.processor_of("idefics3")
    picture(1).save(tmp_path / "a.png")
    url = f"data:image/png;base64,{base64.b64encode((tmp_path / 'a.png').read_bytes()).decode()}"
    ask = {"type": "text", "text": "What?"}
    wanted = vision.vision_prompt({"prompt": "What?", "image": picture(1)}, processor, None, TrainConfig())
    assert len(wanted.images) == 1
    for part in (
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a.png"}},
        {"type": "image", "image": picture(1)},
        {"type": "image", "path": str(tmp_path / "a.png"), "url": None},
    ):
        row = {"prompt": [{"role": "user", "content": [part, ask]}]}
        (length,) = look_at([row], "rows", processor, TrainConfig())
        prompt = vision.vision_prompt(row, processor, None, TrainConfig())
        assert prompt.token_ids == wanted.token_ids and length == len(prompt.token_ids)
        assert all(torch.equal(prompt.model_inputs[k], v) for k, v in wanted.model_inputs.items())


def test_the_texts_of_an_environment_name_no_file(tmp_path):
    """What it puts into the prompt may be somebody else's; what the data row names itself is the user's own."""
    processor, path = tiny_vlms.processor_of("idefics3"), tmp_path / "a.png"
    picture(1).save(path)
    shown = {"prompt": [{"role": "user", "content": [{"type": "image", "image": str(path)}]}]}
    with pytest.raises(PartError, match="text of tools and environments never names a file"):
        vision.vision_prompt(shown, processor, None, TrainConfig(), {"prompt": "Look."})
    for mine in (shown, {"prompt": "Look.", "image": str(path)}):
        assert len(vision.vision_prompt(shown, processor, None, TrainConfig(), mine).images) == 1
    shown = {"prompt": [{"role": "user", "content": [{"type": "image", "image": path}]}]}
    assert len(vision.vision_prompt(shown, processor, None, TrainConfig(), {"prompt": "Look."}).images) == 1
