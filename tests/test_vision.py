"""Models that see: every family through one loop, images processed once a prompt, equal however the batch is cut."""

import asyncio
import base64
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_vlms
import torch
from live import running, trainer
from PIL import Image
from safetensors.torch import load_file
from tiny_vlms import batch_of, picture, rows_of

import train_grpo as script
import train_ppo
from config import PRESETS, ConfigError, TrainConfig
from inputs import packing, prompts
from inputs.processor import load_processor
from rollouts import single_turn
from runlog import checkpoints
from runlog.log import read_metrics

FAMILIES = list(tiny_vlms.MARK)


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory):
    """A family's model under training in fp32, its rows, and a Batch of 3 completions a row."""
    folder = tiny_vlms.make(request.param, tmp_path_factory.mktemp(request.param))
    cfg = TrainConfig(model_id=str(folder), compute_dtype="float32", generator="hf", num_generations=3, beta=0.0)
    policy, inner = script.load_policy(cfg, torch.device("cpu"))
    generator = script.make_generator(cfg, inner.hf_model, load_processor(str(folder)), torch.device("cpu"))
    cfg = replace(cfg, shared_prefix=packing.why_not_shared(inner.hf_model, cfg) is None)
    rows = rows_of(request.param)
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
    images = [prompts.load_image(one, tiny.cfg)[0] for one in prompts.image_sources(source)]
    processor = tiny.generator.tokenizer
    text = prompts.prompt_text(source, processor, tiny.cfg, len(images))
    encoded = dict(
        processor(text=[text], images=[images] if images else None, return_tensors="pt", add_special_tokens=False)
    )
    ids, _ = encoded.pop("input_ids"), encoded.pop("attention_mask")
    encoded.pop("labels", None)
    sampled = tiny.batch.input_ids[row][tiny.batch.loss_mask[row] > 0]
    follows = torch.full((1, len(sampled)), prompts.FOLLOWED_BY.get(tiny.family, 0))
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
        logprobs = script.all_logprobs(tiny.policy, tiny.batch, replace(tiny.cfg, shared_prefix=shared))[0]
        for row in range(0, len(tiny.batch), 2):
            mine = logprobs[row][tiny.batch.loss_mask[row] > 0]
            assert (mine - direct_logprobs(tiny, row)).abs().max() < 1e-5, (row, shared)


def test_the_image_matters(tiny):
    before = script.all_logprobs(tiny.policy, tiny.batch, tiny.cfg)[0]
    other = prompts.build_prompt(tiny.rows[0] | {"image": picture(9)}, tiny.generator, tiny.cfg).model_inputs
    swapped = replace(tiny.batch, model_inputs=[other] * 3 + tiny.batch.model_inputs[3:])
    change = (script.all_logprobs(tiny.policy, swapped, tiny.cfg)[0] - before).abs().sum(1)
    assert (change[:3] > 1e-4).all() and change[3:].max() < 1e-5


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
    trajectories = asyncio.run(single_turn(tiny.rows, generator, cfg))
    batch = script.collate(trajectories, 0, torch.device("cpu"))
    logprobs = script.all_logprobs(tiny.policy, batch, cfg)[0]
    assert ((logprobs - batch.sampling_logprobs) * batch.loss_mask).abs().max() < 1e-4
    assert not torch.isin(batch.input_ids[batch.loss_mask > 0], torch.tensor(tiny.inner.never)).any()


def test_adapters_and_checkpoints(tiny, tmp_path):
    """LoRA on all linear layers, or with --freeze_vision on none of the tower; a checkpoint reloads as it is."""
    for freeze in (False, True):
        cfg = replace(tiny.cfg, use_peft=True, freeze_vision=freeze)
        policy, inner = script.load_policy(cfg, torch.device("cpu"))
        tower = {id(p) for p in inner.hf_model.get_encoder(modality="image").parameters()}
        trained = [p for p in policy.parameters() if p.requires_grad]
        assert trained and any(id(p) in tower for p in trained) != freeze
        script.accumulate_gradients(policy, replace(tiny.batch), cfg)
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in trained)
    modules = {"policy": (tiny.policy, None)}
    buckets = script.weight_buckets(tiny.policy, 2**30, torch.float32)
    checkpoints.save_checkpoint(tmp_path, 1, modules, tiny.inner.hf_model, buckets, tiny.generator.tokenizer, {}, {}, 1)
    folder = tmp_path / "checkpoints" / "step_1"
    again = script.load_hf_model(replace(tiny.cfg, model_id=str(folder)), torch.float32).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in tiny.inner.hf_model.state_dict().items())
    assert type(load_processor(str(folder))) is type(tiny.generator.tokenizer)


# ---- the whole loop --------------------------------------------------------------------------------------------------

ROWS = """
from PIL import Image

def rows(split, seed):
    for n in range(8 if split == "train" else 2):
        image = None if n == 5 else Image.new("RGB", (64, 64), (30 * n, 0, 0))
        yield {"prompt": f"Which shade is picture {n}?", "image": image}

def even(completion_ids, image, **_):
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]
"""


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_both_scripts_train_it(algorithm, tmp_path):
    """Text rows among rows with images; every image is processed once a step, however often it is sampled."""
    (tmp_path / "task.py").write_text(ROWS)
    settings = dict(
        model_id=str(tiny_vlms.make("idefics3", tmp_path / "model")),
        generator="hf",
        compute_dtype="float32",
        dataset_id=f"{tmp_path}/task.py:rows",
        reward_funcs=[f"{tmp_path}/task.py:even"],
        prompts_per_step=8,
        num_generations=4,
        num_iterations=2,
        max_completion_length=4,
        max_steps=2,
        eval_steps=2,
        learning_rate=1e-3,
        output_dir=str(tmp_path),
        run_name="run",
    )
    config, critic = (train_ppo.TrainConfig, train_ppo.CriticTrainer) if algorithm == "ppo" else (TrainConfig, None)
    prompts.COUNTS.clear()
    before = load_file(Path(settings["model_id"]) / "model.safetensors")
    script.train(config(**PRESETS[algorithm] | settings | dict(preset=algorithm)), critic)
    steps = [line for line in read_metrics(tmp_path / "run") if "reward" in line]
    # 7 of the 8 rows have an image; the first step's count has the two rows of the evaluation before it
    assert [line["images/processed"] for line in steps] == [7 + 2, 7]
    after = load_file(tmp_path / "run" / "checkpoints" / "step_2" / "model.safetensors")
    for part in ("vision_model", "connector", "text_model"):
        assert any(part in name and not torch.equal(before[name], after[name]) for name in after), part


# ---- two ranks -------------------------------------------------------------------------------------------------------


def run_worker(strategy: str, ranks: int, out: Path, folders: list[str]) -> dict:
    flags = [strategy, str(out), *folders]
    with running(trainer(out.with_suffix(".log"), *flags, ranks=ranks, script="tests/vision_worker.py")) as worker:
        assert worker.end() == 0, worker.text
    return torch.load(out)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process's gradients of families that stack images by row, leave part of a tower unused, pack patches."""
    folder = tmp_path_factory.mktemp("ranks")
    folders = [str(tiny_vlms.make(family, folder / family)) for family in ("idefics3", "llava", "qwen2_5_vl")]
    return folders, run_worker("ddp", 1, folder / "one.pt", folders)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
def test_a_rank_without_images(alone, strategy, tmp_path):
    """One of two ranks has text only: nothing waits, and the gradient is that of one process."""
    folders, one = alone
    two = run_worker(strategy, 2, tmp_path / "two.pt", folders)
    assert two.keys() == one.keys()
    for case, gradient in two.items():
        size = sum(g.double().pow(2).sum() for g in one[case].values())
        names = one[case].keys() | {name for name, g in gradient.items() if g.abs().max() > 0}
        distance = sum((gradient[name] - one[case][name]).double().pow(2).sum() for name in names)
        assert (distance / size).sqrt() < 1e-5, case


# ---- mistakes --------------------------------------------------------------------------------------------------------


def bomb(path: Path) -> Path:
    Image.new("L", (10_000, 5_000)).save(path)
    return path


def half(kind: str) -> bytes:
    buffer = io.BytesIO()
    picture(0, 200, 200).save(buffer, kind)
    return buffer.getvalue()[: len(buffer.getvalue()) // 2]


MISTAKES = {
    "a JPEG cut short": (lambda folder: {"image": half("JPEG")}, "truncated"),
    "a PNG cut short": (lambda folder: {"image": half("PNG")}, "truncated"),
    "missing file": (lambda folder: {"image": str(folder / "none.png")}, "is neither a file nor base64"),
    "corrupt": (lambda folder: {"image": b"not an image"}, "cannot identify image file"),
    "huge": (lambda folder: {"image": str(bomb(folder / "big.png"))}, "10000 x 5000 pixels; at most 20,000,000"),
    "a number": (lambda folder: {"image": 7}, "a int; allowed: PIL image, path, bytes, base64"),
    "more placeholders": (
        lambda folder: {"image": picture(0), "prompt": [{"role": "user", "content": [{"type": "image"}] * 2}]},
        "2 image placeholders in `prompt` for 1 images",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_bad_image_names_its_row(name, tmp_path):
    make, message = MISTAKES[name]
    rows = [{"prompt": "What?", "image": picture(0)}, {"prompt": "What?"} | make(tmp_path)]
    with pytest.raises(ConfigError, match="rows.jsonl, row 1") as error:
        prompts.check_images(rows, "rows.jsonl", SimpleNamespace(image_processor=None))
    assert message in str(error.value)


def test_images_for_a_model_without_eyes():
    with pytest.raises(ConfigError, match="row 0 has images, and the model of --model_id takes none"):
        prompts.check_images([{"prompt": "What?", "image": picture(0)}], "rows", object())


def test_an_image_in_every_form_is_the_same(tmp_path):
    """PIL, path, bytes, base64, data URL, and what a data set holds undecoded."""
    image, path = picture(3), tmp_path / "a.png"
    image.save(path)
    data = path.read_bytes()
    text = base64.b64encode(data).decode()
    forms = [image, str(path), path, data, text, f"data:image/png;base64,{text}", {"bytes": data, "path": None}]
    for form in [*forms, {"bytes": None, "path": str(path)}]:
        got, sent = prompts.load_image(form, TrainConfig())
        assert got.tobytes() == image.tobytes()
        assert Image.open(io.BytesIO(sent)).tobytes() == image.tobytes()


def test_pixels_are_bounded_for_trainer_and_server_alike():
    for width, height, cfg in ((100, 50, dict(max_pixels=1000)), (10, 5, dict(min_pixels=1000))):
        image, sent = prompts.load_image(picture(0, width, height), TrainConfig(**cfg))
        assert image.width * image.height <= 1000 if "max_pixels" in cfg else image.width * image.height >= 1000
        assert abs(image.width / image.height - 2) < 0.1
        assert Image.open(io.BytesIO(sent)).size == image.size
