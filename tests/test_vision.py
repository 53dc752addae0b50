"""Models that see: every family through one loop, images processed once a prompt, equal however the batch is cut."""

import asyncio
import base64
import contextlib
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import tiny_vlms
import torch
import transformers
from fastapi import HTTPException
from live import running, trainer
from PIL import Image
from safetensors.torch import load_file
from server_fixture import make_tiny
from tiny_vlms import batch_of, picture, rows_of
from transformers import AutoTokenizer

import data
import train_grpo as script
import train_ppo
import vllm_server
from config import PRESETS, ConfigError, TrainConfig
from inputs import packing, pictures, prompts
from inputs.processor import load_processor
from rollouts import single_turn
from runlog import checkpoints
from runlog.reading import read_metrics

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
    follows = torch.full((1, len(sampled)), prompts.FOLLOWED_BY.get(tiny.family, (None, 0))[1])
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


def test_a_model_without_an_image_encoder_has_none_to_freeze():
    """transformers gives the model itself for it, which would be frozen as a whole."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny_vlms.TEXT, vocab_size=32))
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no image encoder of its own"):
        script.image_encoder(model)


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
    (tmp_path / "task.py").write_text(ROWS, encoding="utf-8")
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


# ---- pixels ----------------------------------------------------------------------------------------------------------


def file_of(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def grey(kind: type, value: float, other: float) -> Image.Image:
    """An image of one number, a corner of it another one, so that its range can be told."""
    values = np.full((8, 8), value, kind)
    values[0, 0] = other
    return Image.fromarray(values)


def see_through(mode: str) -> Image.Image:
    """Nothing on the left, black on the right."""
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (4, 0, 8, 8))
    if mode == "P":
        image = image.quantize(4)
    return image.convert(mode)


def keyed(mode: str) -> bytes:
    """A PNG whose black, by its tRNS chunk, is transparent; its right half is grey."""
    image = Image.new("RGB", (8, 8))
    image.paste((128, 128, 128), (4, 0, 8, 8))
    if mode == "I;16":
        values = np.zeros((8, 8), np.uint16)
        values[:, 4:] = 128 * 257
        return file_of(Image.fromarray(values), "PNG", transparency=0)
    return file_of(image.convert(mode), "PNG", transparency=0 if mode == "L" else (0, 0, 0))


PIXELS = {  # a picture, and what its left and its right half must look like
    "16 bits, PNG": (file_of(grey(np.uint16, 32768, 65535), "PNG"), 128, 128),
    "16 bits, TIFF": (file_of(grey(np.uint16, 32768, 65535), "TIFF"), 128, 128),
    "16 bits that use the lower ones alone": (file_of(grey(np.uint16, 255, 0), "PNG"), 1, 1),
    "whole numbers of 32 bits, to 65535": (grey(np.int32, 32768, 65535), 128, 128),
    "whole numbers of 32 bits, to 255": (file_of(grey(np.int32, 128, 255), "TIFF"), 128, 128),
    "floats to 1": (file_of(grey(np.float32, 0.5, 1), "TIFF"), 128, 128),
    "floats to 255": (file_of(grey(np.float32, 128, 255), "TIFF"), 128, 128),
    "RGBA": (file_of(see_through("RGBA"), "PNG"), 255, 0),
    "LA": (file_of(see_through("LA"), "PNG"), 255, 0),
    "a palette with transparency": (file_of(see_through("P"), "PNG"), 255, 0),
    "PA, in memory": (see_through("P").convert("PA"), 255, 0),
    "RGBa, in memory": (see_through("RGBA").convert("RGBa"), 255, 0),
    "La, in memory": (see_through("LA").convert("La"), 255, 0),
    "a GIF with transparency": (file_of(see_through("RGBA"), "GIF"), 255, 0),
    "a WEBP with transparency": (file_of(see_through("RGBA"), "WEBP", lossless=True), 255, 0),
    "RGB with a transparent colour": (keyed("RGB"), 255, 128),
    "grey with a transparent value": (keyed("L"), 255, 128),
    "16 bits with a transparent value": (keyed("I;16"), 255, 128),
    "CMYK": (file_of(Image.new("CMYK", (8, 8), (0, 0, 0, 255)), "TIFF"), 0, 0),
    "a CMYK JPEG": (file_of(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG"), 255, 255),
    "one bit": (file_of(Image.new("1", (8, 8), 1), "PNG"), 255, 255),
}


@pytest.mark.parametrize("name", PIXELS)
def test_every_kind_of_pixel_is_shown_as_it_is_meant_to_trainer_and_server(name):
    source, left, right = PIXELS[name]
    image, sent = prompts.load_image(source, TrainConfig())
    shown = np.asarray(image)
    assert image.mode == "RGB"
    assert abs(shown[2:6, 2].astype(int) - left).max() <= 1 and abs(shown[2:6, 6].astype(int) - right).max() <= 1
    for file in (sent, source):  # what the trainer sends, and what a client of one's own might
        if isinstance(file, bytes):
            assert np.array_equal(np.asarray(vllm_server.decode_image(base64.b64encode(file).decode())), shown)


def test_photographs_are_turned_upright_and_sent_so():
    image, exif = Image.new("RGB", (40, 20), "white"), Image.Exif()
    image.paste((255, 0, 0), (0, 0, 10, 10))
    for turn, corner in ((1, (5, 5)), (3, (35, 15)), (6, (15, 5)), (8, (5, 35))):
        exif[0x0112] = turn
        got, sent = prompts.load_image(file_of(image, "PNG", exif=exif), TrainConfig())
        assert got.getpixel(corner) == (255, 0, 0) and got.size == ((40, 20) if turn < 5 else (20, 40))
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(sent))), np.asarray(got))
        eyes = SimpleNamespace(image_processor=None)
        for kind in ("JPEG", "WEBP", "TIFF"):
            file = file_of(image, kind, exif=exif)
            wanted = prompts.load_image(file)[0].size
            assert prompts.check_images([{"prompt": "What?", "image": file}], "rows", eyes) == [[wanted[::-1]]]
    broken = file_of(image, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\xff" * 40)
    assert prompts.load_image(broken, TrainConfig())[0].size == (40, 20)


FRAMES = [Image.new("RGB", (8, 8), color) for color in ("red", "green", "blue")]
REFUSED = {
    "a GIF that moves": (file_of(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "an animation"),
    "a PNG that moves": (file_of(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:]), "an animation"),
    "a WEBP that moves": (file_of(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]), "an animation"),
    "pages": (file_of(FRAMES[0], "TIFF", save_all=True, append_images=FRAMES[1:]), "a file of several pages"),
    "nothing": (Image.new("RGB", (0, 0)), "0 x 0 pixels"),
    "floats below 0": (grey(np.float32, -1, 1), "numbers from -1 to 1; scale them"),
    "floats that are none": (grey(np.float32, np.nan, 1), "numbers from nan to nan"),
    "a bomb": (Image.new("1", (20_000, 20_000)), "20000 x 20000 pixels"),
    "a bomb in a file": (file_of(Image.new("1", (20_000, 20_000)), "PNG"), "pixels"),
    "an address": ("https://example.org/a.png", "nothing is fetched; download it"),
    "a data: URL of something else": ("data:text/plain,hello", "neither a file nor base64"),
    "a folder": (Path("/"), "is no file"),
    "no image": (b"hello", "cannot identify image file; read are PNG"),
    "a damaged PNG": (tiny_vlms.damaged(file_of(picture(1), "PNG")), "broken"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shown_is_refused_in_words(name):
    source, message = REFUSED[name]
    with pytest.raises(pictures.PictureError, match=message):
        prompts.load_image(source, TrainConfig())
    if isinstance(source, bytes):
        with pytest.raises(HTTPException, match=message) as error:
            vllm_server.decode_image(base64.b64encode(source).decode())
        assert error.value.status_code == 400


def test_one_photograph_with_others_behind_it_is_one_picture():
    data = file_of(FRAMES[0], "MPO", save_all=True, append_images=FRAMES[1:])
    assert prompts.load_image(data, TrainConfig())[0].getpixel((4, 4))[0] > 250


def test_plain_base64_of_our_own_pictures_is_no_path():
    files = sorted((Path(__file__).parent.parent / "docs").rglob("*.png"))
    assert len(files) >= 4
    for file in files:
        plain = base64.b64encode(file.read_bytes()).decode()
        wanted = np.asarray(prompts.load_image(file, TrainConfig())[0])
        for text in (plain, base64.encodebytes(file.read_bytes()).decode(), f"file://{file}"):
            assert np.array_equal(np.asarray(prompts.load_image(text, TrainConfig())[0]), wanted)
        with pytest.raises(pictures.PictureError, match="neither a file nor base64"):
            prompts.load_image(f"file://{file}", TrainConfig(), local_files=False)


def test_a_line_of_pixels_stays_within_its_bounds():
    image, _ = prompts.load_image(Image.new("RGB", (100_000, 1)), TrainConfig(max_pixels=1000))
    assert image.size == (1000, 1)


def one_vision() -> transformers.ProcessorMixin:
    """LLaVA-OneVision's: one image is cut into tiles, of several none is."""
    tokenizer = AutoTokenizer.from_pretrained(make_tiny())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<video>"]})
    side = {"height": 56, "width": 56}
    images = transformers.LlavaOnevisionImageProcessor(size=side, image_grid_pinpoints=[[56, 112], [112, 112]])
    videos = transformers.LlavaOnevisionVideoProcessor(size=side)
    template = tiny_vlms.TEMPLATE.replace("MARK", "<image>")
    how = dict(num_image_tokens=16, vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_9")
    return transformers.LlavaOnevisionProcessor(images, tokenizer, videos, chat_template=template, **how)


@pytest.mark.parametrize("family", [*FAMILIES, "llava_onevision"])
def test_prompts_are_measured_with_the_images_that_are_shown(family):
    """Scaled as --max_pixels says; of processors that cannot tell from an image's size (SmolVLM's), or leave out what
    stands around it (Gemma's), too."""
    processor = one_vision() if family == "llava_onevision" else tiny_vlms.processor_of(family)
    rows = [{"prompt": "What?", "image": picture(1, 300, 200)}]
    rows += [{"prompt": "Which?", "images": [picture(2, 80, 160), picture(3, 200, 90)]}, rows[0]]
    for cfg in (TrainConfig(), TrainConfig(max_pixels=3000)):
        prompts.COUNTS.clear()
        lengths = prompts.prompt_lengths(rows, "rows", processor, cfg)
        assert prompts.COUNTS["images"] == 0
        assert lengths == [len(prompts.vision_prompt(row, processor, None, cfg).token_ids) for row in rows]


def test_images_by_cross_attention_are_refused_where_rows_are_measured():
    """Llama 3.2 Vision: its mask ended at the prompt, and the first step in an error of torch over shapes."""
    tokenizer = tiny_vlms.processor_of("llava").tokenizer
    tokenizer.add_tokens("<|image|>", special_tokens=True)
    template = tiny_vlms.TEMPLATE.replace("MARK", "<|image|>")
    images = transformers.MllamaImageProcessor(size={"height": 28, "width": 28}, max_image_tiles=2)
    processor = transformers.MllamaProcessor(images, tokenizer, chat_template=template)
    row = {"prompt": "What?", "image": picture(1)}
    with pytest.raises(ConfigError, match="rows, row 0: the model looks at images by cross-attention.*Choose a model"):
        prompts.prompt_lengths([row], "rows", processor, TrainConfig())


# ---- the parts of a message ------------------------------------------------------------------------------------------


def test_every_form_of_an_image_in_a_prompt_is_the_column(tmp_path):
    processor = tiny_vlms.processor_of("idefics3")
    picture(1).save(tmp_path / "a.png")
    url = pictures.data_url(tmp_path / "a.png")
    ask = {"type": "text", "text": "What?"}
    wanted = prompts.vision_prompt({"prompt": "What?", "image": picture(1)}, processor, None, TrainConfig())
    assert len(wanted.images) == 1
    for part in (
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": {"url": str(tmp_path / "a.png")}, "text": None},
        {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a.png"}},
        {"type": "image", "image": picture(1)},
        {"type": "image", "url": url, "path": None},
        {"type": "image", "path": str(tmp_path / "a.png")},
        {"type": "image", "base64": url.partition(",")[2]},
    ):
        row = {"prompt": [{"role": "user", "content": [part, ask]}]}
        (length,) = prompts.prompt_lengths([row], "rows", processor, TrainConfig(), "all")
        prompt = prompts.vision_prompt(row, processor, None, TrainConfig())
        assert prompt.token_ids == wanted.token_ids and length == len(prompt.token_ids)
        assert all(torch.equal(prompt.model_inputs[k], v) for k, v in wanted.model_inputs.items())


def test_the_texts_of_an_environment_name_no_file(tmp_path):
    """What it puts into the prompt may be somebody else's; what the data row names itself is the user's own."""
    processor, path = tiny_vlms.processor_of("idefics3"), tmp_path / "a.png"
    picture(1).save(path)
    shown = {"prompt": [{"role": "user", "content": [{"type": "image", "image": str(path)}]}]}
    with pytest.raises(pictures.PictureError, match="text of tools and environments never names a file"):
        prompts.vision_prompt(shown, processor, None, TrainConfig(), {"prompt": "Look."})
    for mine in (shown, {"prompt": "Look.", "image": str(path)}):
        assert len(prompts.vision_prompt(shown, processor, None, TrainConfig(), mine).images) == 1
    shown = {"prompt": [{"role": "user", "content": [{"type": "image", "image": path}]}]}
    assert len(prompts.vision_prompt(shown, processor, None, TrainConfig(), {"prompt": "Look."}).images) == 1


def test_an_empty_text_is_no_image(tmp_path):
    """As rows without a picture have it among others in a .csv file."""
    picture(1).save(tmp_path / "a.png")
    (tmp_path / "rows.csv").write_text(f"prompt,image\nWhat?,{tmp_path / 'a.png'}\nSay it.,\n", encoding="utf-8")
    rows, processor = data.load_rows(str(tmp_path / "rows.csv")), tiny_vlms.processor_of("idefics3")
    assert [len(prompts.image_sources(row)) for row in rows] == [1, 0]
    assert prompts.prompt_lengths(rows, "rows.csv", processor, TrainConfig())[0] > 0


def test_images_of_the_column_and_of_the_parts_stand_in_their_order():
    own = {"type": "image", "image": "own"}
    row = {"prompt": [{"role": "user", "content": [{"type": "image"}, own, {"type": "image"}]}], "images": ["a", "b"]}
    assert prompts.image_sources(row) == ["a", "own", "b"]
    eyes = SimpleNamespace(image_processor=None)
    with pytest.raises(ConfigError, match="row 0: 1 images in a column, and the image parts of `prompt` bring"):
        prompts.check_images([{"prompt": [{"role": "user", "content": [own]}], "image": picture(0)}], "rows", eyes)
    with pytest.raises(ConfigError, match="row 0: `prompt` has no user message to put its 1 images into"):
        row = {"prompt": [{"role": "system", "content": "Look."}], "image": picture(0)}
        prompts.prompt_lengths([row], "rows", tiny_vlms.processor_of("idefics3"), TrainConfig())


# ---- damaged pictures ------------------------------------------------------------------------------------------------


def test_a_damaged_picture_is_found_at_start(tmp_path):
    """Of as many as can be decoded in a few seconds; with --check_images of all. A header says nothing of damage."""
    eyes = tiny_vlms.processor_of("idefics3")
    bad = tiny_vlms.damaged(file_of(picture(1), "PNG"))
    rows = [{"prompt": "What?", "image": bad if n in (5, 9, 11) else file_of(picture(n), "PNG")} for n in range(12)]
    prompts.check_images(rows, "rows", eyes)
    with pytest.raises(ConfigError, match="row 5, image 0: cannot be read: .*2 other rows .*: row 9, image 0; row 11"):
        prompts.check_images(rows, "rows", eyes, "all")


@pytest.mark.parametrize("decode", ["some", "all"])
def test_a_large_data_set_is_decoded_in_part(decode, monkeypatch, capsys):
    monkeypatch.setattr(prompts, "DECODED", 3 * 64 * 64)
    bad = tiny_vlms.damaged(file_of(picture(1), "PNG"))
    rows = [{"prompt": "What?", "image": bad if n == 5 else file_of(picture(n), "PNG")} for n in range(12)]
    with contextlib.nullcontext() if decode == "some" else pytest.raises(ConfigError, match="row 5, image 0"):
        prompts.check_images(rows, "rows", tiny_vlms.processor_of("idefics3"), decode)
        assert "the images of 3 rows of 12 were decoded; --check_images decodes all" in capsys.readouterr().out


def test_a_data_set_of_files_is_opened_and_not_decoded(tmp_path):
    """Rewards get PIL images, as always; a damaged file costs nobody but its row."""
    files = [file_of(picture(n), "PNG") for n in range(4)]
    files[2] = tiny_vlms.damaged(files[2])
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    columns = {"prompt": ["What?"] * 4, "image": [{"bytes": file, "path": None} for file in files]}
    datasets.Dataset.from_dict(columns, features).to_parquet(tmp_path / "rows.parquet")
    rows = data.load_rows(str(tmp_path / "rows.parquet"), format_row=lambda row: row)
    assert all(isinstance(row["image"], Image.Image) for row in rows)
    for number in (0, 1, 3):
        assert np.array_equal(np.asarray(prompts.load_image(rows[number]["image"])[0]), np.asarray(picture(number)))
        assert rows[number]["image"].fp is not None  # its pixels are not kept
        assert np.array_equal(np.asarray(rows[number]["image"]), np.asarray(picture(number)))  # to a reward
    with pytest.raises(ConfigError, match="row 2, image 0: cannot be read"):
        prompts.check_images(rows, "rows", tiny_vlms.processor_of("idefics3"), "some")


DAMAGED_ROWS = """
import tiny_vlms
from PIL import Image
import io

def rows(split, seed):
    for n in range(8):
        out = io.BytesIO()
        tiny_vlms.picture(n).save(out, "PNG")
        file = tiny_vlms.damaged(out.getvalue()) if n == 5 else out.getvalue()
        yield {"prompt": f"Which is picture {n}?", "image": file}

def even(completion_ids, image, **_):
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]
"""


def test_a_damaged_picture_costs_its_row_not_the_run(tmp_path, monkeypatch, caplog):
    """One that nobody looked at, in a step of four prompts; before and after a resume, and in an evaluation."""
    monkeypatch.setattr(prompts, "DECODED", 1)  # that no more than one row is decoded at start
    (tmp_path / "task.py").write_text(DAMAGED_ROWS, encoding="utf-8")
    settings = dict(
        model_id=str(tiny_vlms.make("idefics3", tmp_path / "model")),
        generator="hf",
        compute_dtype="float32",
        dataset_id=f"{tmp_path}/task.py:rows",
        reward_funcs=[f"{tmp_path}/task.py:even"],
        prompts_per_step=4,
        num_generations=2,
        max_completion_length=4,
        max_steps=4,
        eval_steps=4,
        save_steps=2,
        output_dir=str(tmp_path),
        run_name="run",
    )
    script.train(TrainConfig(**settings))
    steps = [line for line in read_metrics(tmp_path / "run") if "reward" in line]
    assert sorted(line["rollout/failed"] for line in steps) == [0, 0, 2, 2]  # once an epoch of two steps
    assert "row 5 of those in use is left out" in caplog.text and "image 0 of a row cannot be read" in caplog.text
    (tmp_path / "run" / "checkpoints" / "step_4").rename(tmp_path / "gone")
    script.train(TrainConfig(**settings, resume=True))
    again = [line for line in read_metrics(tmp_path / "run") if "reward" in line]
    assert [line["rollout/failed"] for line in again] == [line["rollout/failed"] for line in steps]
    with pytest.raises(RuntimeError, match="image 0 of a row cannot be read"):
        script.train(TrainConfig(**settings | dict(run_name="strict", env_errors="stop")))
