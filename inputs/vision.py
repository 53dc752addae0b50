"""Prompts with images: token ids, the tensors that a model wants beside them, and the files that a server is sent.

A prompt with images has two forms. A server is sent one placeholder token an image and the image; it expands the
placeholder itself. The trainer needs the expanded ids and the pixels. `build_prompt` makes both, once per row however
many completions are sampled; the server's echo of the expanded ids is compared with ours (`check_echo`).
Everything a model wants beside token ids travels as one dict of tensors, `model_inputs`; `join_inputs` joins those of
several rows by their shapes. What a family wants beyond that stands in TYPES, the only place that names one.

    row -> build_prompt -> sampled -> continued | observed
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from config import ConfigError, TrainConfig, shorten
from inputs.parts import PartError
from inputs.pictures import load_image
from inputs.prompts import (
    SCHEMAS,
    adds_bos,
    image_parts,
    is_vision,
    observation_text,
    prompt_text,
    tokenize,
)
from inputs.trajectory import RowError, TrajectoryError

# torch is imported where there are images, so that environments can be tried without it.

# Families whose masks treat images apart: what they call token types, which are 0 for text.
TYPES = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids", "gemma4unified": "mm_token_type_ids"}
PER_TOKEN = ("position_ids", *TYPES.values())  # of a model's inputs: all others are by image or patch
UNLIKE = {
    "mllama": "Llama 3.2 Vision looks at images by cross-attention",
    "paligemma": "a prompt of PaliGemma sees itself in both directions",
}
ANNOUNCED = re.compile(r"^(image|video|audio|img|media).*token.*(id|index)$|^(boi|eoi)_token_(id|index)$")

_RECENT: dict[int, tuple] = {}  # prompts by their row's identity: it may be sampled many times


@dataclass
class Prompt:
    token_ids: list[int]  # as the model sees it, images expanded
    sent_ids: list[int]  # as a server is sent it, one placeholder an image; without images the same
    images: list[bytes] = field(default_factory=list)  # image files, in the order of their placeholders
    model_inputs: dict = field(default_factory=dict)  # tensors beside the token ids


def placeholder_tokens(config) -> list[int]:
    """Token ids that stand for an image, a video or a sound in a prompt, as the model's config announces them. Neither
    the server nor the trainer gives them any probability: a sampled one would be taken for an image."""
    found = {value for key, value in config.to_dict().items() if ANNOUNCED.match(key) and isinstance(value, int)}
    return sorted(token for token in found if token >= 0)


def image_sources(row: dict) -> list:
    """What the row has for images, in the order in which its prompt shows them: column `image` or `images` fills the
    image parts of its messages that bring none. PartError if these are not as many."""
    column, parts = column_images(row), image_parts(row["prompt"])
    bare = sum("image" not in part for part in parts)
    if not parts:
        return column
    if bare and bare != len(column):
        raise PartError(f"{bare} image placeholders in `prompt` for {len(column)} images")
    rest = iter(column)
    return [part["image"] if "image" in part else next(rest) for part in parts]


def column_images(row: dict) -> list:
    """Those of `images`; where it has none, that of `image`. An empty text is none: a .csv file has no other."""
    for column in (row.get("images"), row.get("image")):
        column = column if isinstance(column, (list, tuple)) else [column]
        if found := [one for one in column if one is not None and not (isinstance(one, str) and not one)]:
            return found
    return []


def build_prompt(
    row: dict, generator, cfg: TrainConfig, shown: dict | None = None, most: float | None = None
) -> Prompt:
    """The row's prompt, or that of `shown`, which an environment made of it; its images decoded and processed once.
    generator: has the `tokenizer`; for models with images that is the processor, and `rope_index` may be there.

    RowError if it cannot be made, or has more than `most` tokens (unset: --max_prompt_length); of an environment, which
    may be the one to blame, TrajectoryError.
    """
    shown, kind = shown or row, TrajectoryError if cfg.env else RowError
    asked = shown.get("prompt"), shown.get(SCHEMAS)
    known, before, prompt = _RECENT.get(id(row), (None, None, None))
    if known is not row or before != asked:
        try:
            rope_index = getattr(generator, "rope_index", None)  # optional in a generator of your own
            prompt = vision_prompt(shown, generator.tokenizer, rope_index, cfg, row)
        except ConfigError:
            raise
        except Exception as error:  # templates and image decoders raise whatever they like
            said = str(error) if isinstance(error, PartError) else repr(error)
            raise kind(f"the prompt cannot be shown to the model: {said:.500}", row) from error
        if prompt.images:
            _RECENT[id(row)] = row, asked, prompt
        while len(_RECENT) > cfg.prompts_per_step:  # pixels take room
            _RECENT.pop(next(iter(_RECENT)))
    if len(prompt.token_ids) > (most or cfg.max_prompt_length):
        more = ", with what its environment adds," if shown is not row else ""
        limit = f"--max_prompt_length={cfg.max_prompt_length}"
        raise kind(f"the prompt{more} is over {limit}: raise it, and the server's --max-model-len with it.", row)
    return prompt


def vision_prompt(
    row: dict, processor, rope_index: Callable | None, cfg: TrainConfig, data_row: dict | None = None
) -> Prompt:
    """`build_prompt` of a row, whose images are as many as its placeholders, or none. data_row: where it came from, if
    an environment has written the prompt: then only the data row's own texts may name a file. PartError.
    """
    sources, own = image_sources(row), image_sources(data_row or row)
    if sources and not is_vision(processor):
        raise PartError("the row has images, and the model of --model_id takes none; choose one that does")
    text = prompt_text(row, processor, cfg, len(sources))
    special = cfg.no_apply_chat_template and adds_bos(text, processor)
    sent = tokenize(text, processor, special)
    if not sources:
        return Prompt(sent, sent)
    loaded = []
    for number, source in enumerate(sources):
        try:
            named = isinstance(source, (str, dict)) and source not in own
            loaded.append(load_image(source, cfg, local_files=not named))
        except PartError as error:
            name = f", {shorten(source)}," if isinstance(source, (str, Path)) else ""
            raise PartError(f"image {number} of a row{name} cannot be read: {error}") from error
    images, files = zip(*loaded, strict=True)
    ids, inputs = expand(text, list(images), processor, rope_index, special)
    return Prompt(ids, sent, list(files), inputs)


def expand(text: str, images: list, processor, rope_index: Callable | None, special: bool) -> tuple[list[int], dict]:
    """(token ids with every placeholder expanded, tensors for the model), as the model's own processor makes them.

    rope_index: of models whose positions have three axes; the prompt's are computed here, so that nothing later needs
    to know. Positions after the prompt count on from its largest.
    """
    family = type(processor).__name__.removesuffix("Processor").lower()
    if family in UNLIKE:
        raise PartError(f"{UNLIKE[family]}; take a model whose images are tokens of a causal prompt")
    encoded = dict(processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=special))
    ids, mask = encoded.pop("input_ids"), encoded.pop("attention_mask")
    if rope_index is not None:
        encoded["position_ids"] = rope_index(ids, **encoded, attention_mask=mask)[0]  # [3, 1, T]
    for key in {"token_type_ids", "mm_token_type_ids", "labels"} - {TYPES.get(family)}:  # positions have them in them
        encoded.pop(key, None)
    return ids[0].tolist(), encoded


def join_inputs(rows: list[dict], device=None) -> dict:
    """Vision tensors of several rows as one: concatenated along the first dimension, whether it counts images, patches
    or rows; other dimensions that differ (images a row, height, width) are filled up with zeros."""
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
    """What a prompt's `inputs` say of each of its tokens, and of `length` in all with those that follow it: positions
    count on from the largest, token types are 0.  [3, 1, length], [1, length]"""
    import torch

    axes = (3, 1) if name == "position_ids" else (1,)
    known = inputs.get(name, torch.zeros(*axes, 0, dtype=torch.long))
    following = torch.zeros(*axes, length - known.shape[-1], dtype=torch.long)
    if name == "position_ids":
        following += torch.arange(following.shape[-1]) + (known.max() + 1 if known.numel() else 0)
    return torch.cat([known, following], dim=-1)


def continued(prompt: Prompt, ids: list[int], sent: list[int] | None = None, inputs: dict | None = None) -> Prompt:
    """The prompt with `ids` behind it, sampled or of an observation: then `sent` of them for a server, and the model's
    `inputs` for its images. Positions on several axes count on from the largest."""
    import torch

    old, new = prompt.model_inputs, inputs or {}
    joined = join_inputs([old, new]) if new else {k: v for k, v in old.items() if k not in PER_TOKEN}
    for name in {*PER_TOKEN} & {*old, *new}:
        before, after = per_token(old, name, len(prompt.token_ids)), per_token(new, name, len(ids))
        after = before.max() + 1 + after if name == "position_ids" else after
        joined[name] = torch.cat([before, after], dim=-1)
    return Prompt(prompt.token_ids + ids, prompt.sent_ids + (ids if sent is None else sent), prompt.images, joined)


def observed(prompt: Prompt, messages: list[dict], generator, schemas, cfg: TrainConfig, **options) -> Prompt:
    """The prompt and what was sampled behind it, with the messages of tools or of an environment after that, their
    images expanded. What was sampled is never tokenised again. schemas, options: the tools and settings that the chat
    template was given with the prompt."""
    processor, sources = generator.tokenizer, image_sources({"prompt": messages})
    text = observation_text(messages, processor, schemas, **options)
    sent = tokenize(text, processor)
    skip = int(sent[0] == prompt.token_ids[-1])  # the template's own end of a turn, which was sampled
    sent = sent[skip:]
    if not sources:
        return continued(prompt, sent)
    images, files = zip(*(load_image(source, cfg, local_files=False) for source in sources), strict=True)
    ids, inputs = expand(text, list(images), processor, generator.rope_index, special=False)
    for key in PER_TOKEN:
        inputs |= {key: inputs[key][..., skip:]} if key in inputs else {}
    if "position_ids" in inputs:
        inputs["position_ids"] = inputs["position_ids"] - skip  # its first place was taken away
    grown = continued(prompt, ids[skip:], sent, inputs)
    return replace(grown, images=[*prompt.images, *files])


def check_echo(prompt: Prompt, samples: list) -> None:
    """The generator must have seen the prompt that is trained on; RuntimeError says where the two differ."""
    ours, theirs = prompt.token_ids, samples[0].prompt_ids
    if ours != theirs:
        raise RuntimeError(
            f"the generator made {len(theirs)} tokens of a prompt with {len(prompt.images)} images, the trainer "
            f"{len(ours)}; the first {len(os.path.commonprefix([ours, theirs]))} are alike. Is the server's --model "
            "the trainer's --model_id? Scale images with --max_pixels here, not with --mm-processor-kwargs there."
        )
