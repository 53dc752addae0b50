"""Prompts with images: token ids, further input tensors of the model, and image files for the server.

A prompt with images has two forms. A server gets each image with one placeholder token, and expands the placeholder
itself. The trainer needs the expanded ids and the pixels. `build_prompt` makes both, once per row however many
completions are sampled; `check_echo` compares the server's expanded ids with ours. All inputs of a model except token
ids are one dict of tensors, `model_inputs`; `join_inputs` joins those of several rows by their shapes. TYPES has what
some families need beyond that, and is the only place that names a family.

    row -> build_prompt -> sampled -> continued | observed
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from config import ConfigError, TrainConfig, shorten
from inputs.parts import PartError
from inputs.pictures import load_image
from inputs.prompts import SCHEMAS, adds_bos, image_parts, is_vision, observation_text, prompt_text, tokenize
from inputs.trajectory import RowError, TrajectoryError

# torch is imported only for images, so that environments can be tried without it.

# Families whose masks treat images differently: their name for token types, which are 0 for text.
TYPES = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids", "gemma4unified": "mm_token_type_ids"}
PER_TOKEN = ("position_ids", *TYPES.values())  # inputs with one entry per token; others are per image or patch
UNLIKE = {
    "mllama": "Llama 3.2 Vision looks at images by cross-attention",
    "paligemma": "a prompt of PaliGemma sees itself in both directions",
}
ANNOUNCED = re.compile(r"^(image|video|audio|img|media).*token.*(id|index)$|^(boi|eoi)_token_(id|index)$")

_RECENT: dict[int, tuple] = {}  # id(row): (row, key, prompt), since a row may be sampled many times


@dataclass
class Prompt:
    token_ids: list[int]  # the model's: images expanded
    sent_ids: list[int]  # the server's: one placeholder per image; without images the same
    images: list[bytes] = field(default_factory=list)  # image files, in the order of their placeholders
    model_inputs: dict = field(default_factory=dict)  # tensors beside the token ids


def placeholder_tokens(config) -> list[int]:
    """Token ids that stand for an image, a video or a sound in a prompt, from the model's config. Server and trainer
    give them no probability, since a sampled one would be taken for an image."""
    ids = {value for key, value in config.to_dict().items() if ANNOUNCED.match(key) and isinstance(value, int)}
    return sorted(token for token in ids if token >= 0)


def image_sources(row: dict) -> list:
    """The sources of the row's images, in the order of its prompt. Column `image` or `images` fills those image parts
    of the messages that have no source. PartError if the numbers differ."""
    column, parts = column_images(row), image_parts(row["prompt"])
    bare = sum("image" not in part for part in parts)
    if not parts:
        return column
    if bare and bare != len(column):
        raise PartError(f"{bare} image placeholders in `prompt` for {len(column)} images")
    unplaced = iter(column)
    return [part["image"] if "image" in part else next(unplaced) for part in parts]


def column_images(row: dict) -> list:
    """The images of column `images` or, if it has none, `image`. An empty text is a .csv file's None."""
    for column in (row.get("images"), row.get("image")):
        column = column if isinstance(column, (list, tuple)) else [column]
        if images := [image for image in column if image is not None and not (isinstance(image, str) and not image)]:
            return images
    return []


def build_prompt(
    row: dict, generator, cfg: TrainConfig, model_row: dict | None = None, limit: float | None = None
) -> Prompt:
    """The prompt of a row, or of `model_row`, which an environment made of it; images are decoded and processed once.
    generator: its `tokenizer` is used, for models with images a processor, and `rope_index` if it has one.

    RowError if the prompt cannot be made, or has more than `limit` tokens (unset: --max_prompt_length); with an
    environment, which may be to blame, TrajectoryError.
    """
    model_row, kind = model_row or row, TrajectoryError if cfg.env else RowError
    key = model_row.get("prompt"), model_row.get(SCHEMAS)
    cached_row, cached_key, prompt = _RECENT.get(id(row), (None, None, None))
    if cached_row is not row or cached_key != key:
        try:
            rope_index = getattr(generator, "rope_index", None)  # optional in a generator of your own
            prompt = vision_prompt(model_row, generator.tokenizer, rope_index, cfg, row)
        except ConfigError:
            raise
        except Exception as error:  # templates and image decoders raise whatever they like
            fault = str(error) if isinstance(error, PartError) else repr(error)
            raise kind(f"the prompt cannot be shown to the model: {fault:.500}", row) from error
        if prompt.images:
            _RECENT[id(row)] = row, key, prompt
        while len(_RECENT) > cfg.prompts_per_step:  # pixels take room
            _RECENT.pop(next(iter(_RECENT)))
    if len(prompt.token_ids) > (limit or cfg.max_prompt_length):
        addition = ", with what its environment adds," if model_row is not row else ""
        flag = f"--max_prompt_length={cfg.max_prompt_length}"
        raise kind(f"the prompt{addition} is over {flag}: raise it, and the server's --max-model-len with it.", row)
    return prompt


def vision_prompt(
    row: dict, processor, rope_index: Callable | None, cfg: TrainConfig, data_row: dict | None = None
) -> Prompt:
    """The Prompt of a row, which has as many images as placeholders. data_row: the row of the data set, if an
    environment wrote the prompt; only texts of the data row may name files. PartError."""
    sources, row_sources = image_sources(row), image_sources(data_row or row)
    if sources and not is_vision(processor):
        raise PartError("the row has images, and the model of --model_id takes none; choose one that does")
    text = prompt_text(row, processor, cfg, len(sources))
    add_special = cfg.no_apply_chat_template and adds_bos(text, processor)
    sent = tokenize(text, processor, add_special)
    if not sources:
        return Prompt(sent, sent)
    pictures = []
    for number, source in enumerate(sources):
        try:
            foreign = isinstance(source, (str, dict)) and source not in row_sources
            pictures.append(load_image(source, cfg, local_files=not foreign))
        except PartError as error:
            raise PartError(f"image {number} of a row cannot be read: {shorten(source, 60)}: {error}") from error
    images, files = zip(*pictures, strict=True)
    ids, inputs = expand(text, list(images), processor, rope_index, add_special)
    return Prompt(ids, sent, list(files), inputs)


def expand(text: str, images: list, processor, rope_index: Callable | None, add_bos: bool) -> tuple[list[int], dict]:
    """(token ids with every placeholder expanded, tensors for the model), from the model's own processor.

    rope_index: for models with positions on three axes, which are computed here for the prompt. Positions after the
    prompt continue from its largest.
    """
    family = type(processor).__name__.removesuffix("Processor").lower()
    if family in UNLIKE:
        raise PartError(f"{UNLIKE[family]}; take a model whose images are tokens of a causal prompt")
    encoded = dict(processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=add_bos))
    ids, mask = encoded.pop("input_ids"), encoded.pop("attention_mask")
    if rope_index is not None:
        encoded["position_ids"] = rope_index(ids, **encoded, attention_mask=mask)[0]  # [3, 1, T]
    for key in {"token_type_ids", "mm_token_type_ids", "labels"} - {TYPES.get(family)}:  # positions contain them
        encoded.pop(key, None)
    return ids[0].tolist(), encoded


def join_inputs(rows: list[dict], device=None) -> dict:
    """Vision tensors of several rows, concatenated along the first dimension, be it images, patches or rows. Other
    dimensions that differ (images per row, height, width) are padded with zeros."""
    joined = {}
    for key in dict.fromkeys(key for row in rows for key in row if key not in PER_TOKEN):
        tensors = [row[key] for row in rows if key in row]
        shape = [max(sizes) for sizes in zip(*(t.shape[1:] for t in tensors), strict=True)]
        joined[key] = tensors[0].new_zeros(sum(map(len, tensors)), *shape)
        for out, tensor in zip(joined[key].split([len(t) for t in tensors]), tensors, strict=True):
            out[tuple(map(slice, tensor.shape))] = tensor
        joined[key] = joined[key].to(device)
    return joined


def per_token(inputs: dict, name: str, length: int):
    """Positions or token types of a prompt, extended to `length` tokens: positions continue from the largest, token
    types are 0.  [3, 1, length], [1, length]"""
    import torch

    axes = (3, 1) if name == "position_ids" else (1,)
    values = inputs.get(name, torch.zeros(*axes, 0, dtype=torch.long))
    filling = torch.zeros(*axes, length - values.shape[-1], dtype=torch.long)
    if name == "position_ids":
        filling += torch.arange(filling.shape[-1]) + (values.max() + 1 if values.numel() else 0)
    return torch.cat([values, filling], dim=-1)


def continued_prompt(
    prompt: Prompt, ids: list[int], sent: list[int] | None = None, inputs: dict | None = None
) -> Prompt:
    """The prompt followed by `ids`, which were sampled or belong to an observation. sent: an observation's ids in the
    server's form. inputs: the model's tensors for its images. Positions on several axes continue from the largest."""
    import torch

    old, new = prompt.model_inputs, inputs or {}
    joined = join_inputs([old, new]) if new else {k: v for k, v in old.items() if k not in PER_TOKEN}
    for name in {*PER_TOKEN} & {*old, *new}:
        before, after = per_token(old, name, len(prompt.token_ids)), per_token(new, name, len(ids))
        after = before.max() + 1 + after if name == "position_ids" else after
        joined[name] = torch.cat([before, after], dim=-1)
    return Prompt(prompt.token_ids + ids, prompt.sent_ids + (ids if sent is None else sent), prompt.images, joined)


def prompt_with(prompt: Prompt, messages: list[dict], generator, schemas, cfg: TrainConfig, **options) -> Prompt:
    """The prompt, which ends in sampled tokens, followed by the messages of tools or an environment, images expanded.
    Sampled tokens are never tokenised again. schemas, options: the tools and settings with which the chat template
    rendered the prompt."""
    processor, sources = generator.tokenizer, image_sources({"prompt": messages})
    text = observation_text(messages, processor, schemas, **options)
    sent = tokenize(text, processor)
    skip = int(sent[0] == prompt.token_ids[-1])  # the template's end-of-turn token, which was sampled
    sent = sent[skip:]
    if not sources:
        return continued_prompt(prompt, sent)
    images, files = zip(*(load_image(source, cfg, local_files=False) for source in sources), strict=True)
    ids, inputs = expand(text, list(images), processor, generator.rope_index, add_bos=False)
    for key in PER_TOKEN:
        inputs |= {key: inputs[key][..., skip:]} if key in inputs else {}
    if "position_ids" in inputs:
        inputs["position_ids"] = inputs["position_ids"] - skip  # its first position was cut off
    extended = continued_prompt(prompt, ids[skip:], sent, inputs)
    return replace(extended, images=[*prompt.images, *files])


def check_echo(prompt: Prompt, samples: list) -> None:
    """RuntimeError if the generator did not see the prompt that is trained on, with the place where the two differ."""
    ids, echo = prompt.token_ids, samples[0].prompt_ids
    if ids != echo:
        raise RuntimeError(
            f"the generator made {len(echo)} tokens of a prompt with {len(prompt.images)} images, the trainer "
            f"{len(ids)}; the first {len(os.path.commonprefix([ids, echo]))} are alike. Is the server's --model "
            "the trainer's --model_id? Scale images with --max_pixels here, not with --mm-processor-kwargs there."
        )
