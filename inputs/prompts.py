"""From a row to token ids - and, with images, to the tensors a model wants for them and the bytes a server is sent.

A prompt with images has two forms. A server is sent one placeholder token an image and the image; it expands the
placeholder itself. The trainer needs the expanded ids and the pixels. `build_prompt` makes both, once per row however
many completions are sampled; the server's echo of the expanded ids is compared with ours (`check_echo`).
Everything a model wants beside token ids travels as one dict of tensors, `model_inputs`; `join_inputs` joins those of
several rows by their shapes. What a family wants beyond that stands in FOLLOWED_BY, the only place that names one.

    row -> prompt_messages -> normal -> rendered (by the chat template) -> tokenize | expand
    observation -> observation_text -> tokenize | expand -> observed
"""

import functools
import json
import math
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from jinja2 import TemplateError
from PIL import Image

from config import ConfigError, TrainConfig, shorten
from data import Rows, each, file_of, has_column
from inputs.parts import PartError, parts_of, text_of_parts, text_part
from inputs.pictures import PictureError, load_image, open_image, scaled, upright_size
from inputs.processor import read_by_template
from inputs.special_tokens import END, begins_by_itself, found_in, guard, tokenize, tokenizer_of
from safety.calls import say_once

# torch is imported where there are images, so that environments can be tried without it.

# Families whose masks treat images or whole prompts apart: what they call token types, and the type of what is sampled
# after a prompt.
FOLLOWED_BY = {"gemma3": ("token_type_ids", 0), "paligemma": ("token_type_ids", 1)}
FOLLOWED_BY |= dict.fromkeys(("gemma4", "gemma4unified"), ("mm_token_type_ids", 0))
TYPES = tuple(dict.fromkeys(name for name, _ in FOLLOWED_BY.values()))
PER_TOKEN = ("position_ids", *TYPES)  # of a model's inputs: all others are by image or patch
ANNOUNCED = re.compile(r"^(image|video|audio|img|media).*token.*(id|index)$|^(boi|eoi)_token_(id|index)$")
REFUSED = (TemplateError, TypeError, LookupError, ValueError)  # what templates raise at what they do not know

COUNTS = Counter()  # images processed by this process
SCHEMAS = "<tool schemas>"  # of a row that was made for the model, for its template: no column of data is called so
_RECENT: OrderedDict[int, tuple] = OrderedDict()  # prompts by their row's identity: it may be sampled many times


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


# ---- messages --------------------------------------------------------------------------------------------------------


def is_vision(processor) -> bool:
    """Whether it is a processor of text and images, not a bare tokenizer."""
    return hasattr(processor, "image_processor")


def prompt_messages(row: dict, system_prompt: str | None = None) -> list[dict]:
    """The row's chat messages; a string prompt is one user message. `system_prompt` goes first if the row has none."""
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def normal(messages: list[dict], processor, count: int = 0) -> list[dict]:
    """Messages with content as the chat template takes it: text, or of models with images lists of parts, in which
    {"type": "image"} stands for each. `count` images without a place of their own stand before the first user message's
    text. PartError if there is no such message."""
    if not is_vision(processor):
        return [m | {"content": text_of_parts(m["content"])} if type(m.get("content")) is list else m for m in messages]
    found, count = [], 0 if image_parts(messages) else count
    for message in messages:
        parts = parts_of(message.get("content"))
        parts = [{"type": "image"} if part["type"] == "image" else part for part in joined_texts(parts)]
        if count and message["role"] == "user":
            parts, count = [{"type": "image"}] * count + parts, 0
        found.append(message | {"content": parts})
    if count:
        raise PartError(f"`prompt` has no user message to put its {count} images into")
    return found


def made_up(processor) -> list[dict]:
    """A question, and an answer that is END."""
    return normal([{"role": "user", "content": "-"}, {"role": "assistant", "content": END}], processor)


def image_parts(prompt) -> list[dict]:
    """Image parts of chat messages."""
    messages = prompt if isinstance(prompt, list) else []
    return [part for m in messages for part in parts_of(m.get("content")) if part["type"] == "image"]


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


# ---- by the chat template --------------------------------------------------------------------------------------------


def own_schemas(row: dict) -> list[dict] | None:
    """JSON schemas of tools in the row's column `tools`, as they are or as JSON, which its prompt shows. Names there
    are for --tools."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) and tools.lstrip().startswith("[") else tools
    return tools if isinstance(tools, list) and tools and all(isinstance(tool, dict) for tool in tools) else None


def own_kwargs(row: dict) -> dict:
    """The row's column `chat_template_kwargs`, as it is or as JSON."""
    given = row.get("chat_template_kwargs") or {}
    return json.loads(given) if isinstance(given, str) else given


def template_kwargs(row: dict, processor) -> dict:
    """`own_kwargs` for the chat template. PartError for a name that it never reads."""
    given, template = own_kwargs(row), processor.chat_template
    known = set().union(*map(read_by_template, template.values() if isinstance(template, dict) else [template]))
    if unknown := sorted(given.keys() - known):
        read = f"it reads {', '.join(sorted(known)) or 'nothing of the kind'}"
        raise PartError(f"chat_template_kwargs: the model's chat template has no {', '.join(unknown)}; {read}")
    return given


def prompt_text(row: dict, processor, cfg: TrainConfig, count: int = 0) -> str:
    """What a row with `count` images looks like before tokenisation: one placeholder an image.

    With the chat template its special tokens are the only ones: no second BOS, and none of the row's own text unless
    --allow_special_tokens (see special_tokens.py). A conversation that ends in an assistant message is continued, as in
    TRL: that text is the beginning of the answer.
    """
    if cfg.no_apply_chat_template:
        if not isinstance(row["prompt"], str) or cfg.system_prompt is not None:
            raise ConfigError(
                f"--no_apply_chat_template takes string prompts alone, and no --system_prompt; this prompt is "
                f"{shorten(row['prompt'])}."
            )
        return row["prompt"]
    if not processor.chat_template:
        raise ConfigError(
            "the model of --model_id has no chat template; choose a chat model, or make the prompts strings and add "
            "--no_apply_chat_template."
        )
    return rendered(row, normal(prompt_messages(row, cfg.system_prompt), processor, count), processor, cfg)


def rendered(row: dict, messages: list[dict], processor, cfg: TrainConfig) -> str:
    """The prompt's text, by the chat template, with the tools and settings that columns of the row give it. PartError
    for what it refuses.

    An answer that the row has begun stands at the end as the row has it: templates take blanks off its end, put empty
    thinking before it, or take its thinking away.
    """
    schemas, options = row.get(SCHEMAS, own_schemas(row)), template_kwargs(row, processor)
    if not cfg.allow_special_tokens:
        messages, schemas = guard(messages, processor), guard(schemas, processor)
    try:
        if messages[-1]["role"] != "assistant":
            return render(messages, processor, schemas, add_generation_prompt=True, **options)
        text = [part["text"] for part in parts_of(messages[-1].get("content")) if part["type"] == "text"][-1]
        try:
            whole = render(messages, processor, schemas, continue_final_message=True, **options)
        except ValueError:  # it has taken some of the text away
            whole = END
        head = render(messages[:-1], processor, schemas, add_generation_prompt=True, **options)
    except REFUSED as error:
        raise PartError(f"the chat template refuses this prompt: {error}") from error
    head = head.removesuffix(begun_by(processor, schemas, **options))
    first = re.match(r"\s*(<[^<>]*>|\S*)", text)[1]  # its word, or its tag
    for kept in (text, text.rstrip(), text.strip()):
        before = whole.removesuffix(kept)
        added = before[len(os.path.commonprefix([before, head])) :]
        if whole.endswith(kept) and whole != END and not (first and first in added):
            return before + text
    return head + text


def begun_by(processor, schemas: list[dict] | None = None, **options) -> str:
    """What the chat template begins an answer with that is to be sampled, and no answer that was given: "<think>\\n" of
    models that always think; mostly nothing."""
    asked, answer = made_up(processor)
    try:
        sampled = render([asked], processor, schemas, add_generation_prompt=True, **options)
        given = render([asked, answer, asked], processor, schemas, **options)
    except REFUSED:
        return ""
    same = os.path.commonprefix([sampled, given.partition(END)[0]])
    same = re.sub(
        r"<[^<>]*$", "", same
    )  # no cut goes through a tag, nor through the "<think></think>" of given answers
    opened = re.search(r"<(\w+)>\s*$", same)
    if opened and re.match(rf"\s*</{opened[1]}>", given[len(same) :]):
        same = same[: opened.start()]
    begun = sampled[len(same) :]
    return begun if END in given and begun.strip() else ""


def begun_in(ids: list[int], processor, row: dict) -> str:
    """What the chat template has begun the answer with that is sampled behind these tokens."""
    tokenizer = tokenizer_of(processor)
    if not getattr(tokenizer, "chat_template", None):  # a tokenizer of somebody's own need not have the attribute
        return ""
    begun = begun_by(processor, **own_kwargs(row))
    return begun if begun and tokenizer.decode(ids[-len(begun) - 1 :]).endswith(begun) else ""


def end_ids(hf_model, processor) -> set[int]:
    """Tokens that end an answer: the model's own, and the one with which its chat template ends a turn."""
    tokenizer, ids = tokenizer_of(processor), hf_model.generation_config.eos_token_id
    found = {*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id} - {None}
    if not getattr(tokenizer, "chat_template", None):
        return found
    text = render(made_up(processor), processor).rpartition(END)[2]
    ends = {text.find(str(token)): number for number, token in tokenizer.added_tokens_decoder.items()}
    end = ends.get(min((place for place in ends if place >= 0), default=None))
    if end is not None and end not in found:
        said = tokenizer.convert_ids_to_tokens(end)
        say_once(f"The chat template ends a turn with {said}, which ends no answer by the model's files: here it does.")
    return found | ({end} - {None})


def with_tools(row: dict, schemas: list[dict], instructions: str, processor, system_prompt: str | None = None) -> dict:
    """The row with its system prompt, and with SCHEMAS for its chat template or, where the template knows no tools or
    none are given to it, with `instructions` at the end of its system message."""
    messages = prompt_messages(row, system_prompt)
    shown = normal(messages, processor)
    if schemas and render(shown, processor, None) != render(shown, processor, schemas):
        return row | {"prompt": messages, SCHEMAS: schemas}
    if instructions and messages[0]["role"] == "system":
        both = [*parts_of(messages[0]["content"]), text_part(f"\n\n{instructions}")]
        both = both if is_vision(processor) else text_of_parts(joined_texts(both))
        messages = [messages[0] | {"content": both}, *messages[1:]]
    elif instructions:
        messages = prompt_messages({"prompt": messages}, instructions)
    return row | {"prompt": messages}


def joined_texts(parts: list[dict]) -> list[dict]:
    """Parts with those of text that follow each other as one: a special token in two halves has to be seen."""
    joined: list[dict] = []
    for part in parts:
        if joined and part["type"] == joined[-1]["type"] == "text":
            part = text_part(joined.pop()["text"] + part["text"])
        joined.append(part)
    return joined


def render(messages: list[dict], processor, schemas: list[dict] | None = None, **options) -> str:
    """What the chat template writes. Of a template that does not show the role `tool`, as if a user had said what tools
    did: in one message, as such templates often want roles to alternate. A system message that it does not show stands
    at the beginning of the first user message."""
    shows, said = shown_by(processor, schemas), []
    told_as = {"tool": shows.results == "as a user", "system": not shows.system}  # by a user
    before = None  # the role of the message before, where a user says it
    for message in messages:
        role = message["role"] if told_as.get(message["role"]) else None
        message = message | {"role": "user"} if role else message
        if message["role"] == "user" and (before == "system" or before == role == "tool"):
            gap = [text_part("\n\n")] if is_vision(processor) else "\n\n"
            message = message | {"content": said.pop()["content"] + gap + message["content"]}
        said.append(message)
        before = role
    # Of no tools none: some templates, such as Mistral's, announce a list of them, and an empty one, too.
    return processor.apply_chat_template(said, tools=schemas or None, tokenize=False, **options)


@dataclass(frozen=True)
class Shown:
    """What a chat template shows of the messages that not every one knows."""

    system: bool
    results: Literal["alone", "with their calls", "as a user"]  # of tools: how they have to be given to be seen


def shown_by(processor, schemas: list[dict] | None = None) -> Shown:
    """By its template; of several, by the one that transformers takes where there are tools, or none."""
    template = processor.chat_template  # which may be changed
    return tried(processor, str(template), isinstance(template, dict) and bool(schemas))


@functools.lru_cache(maxsize=64)
def tried(processor, template: str, with_tools: bool) -> Shown:
    """Found by rendering. Some templates raise at what they do not know, others leave it out without a word."""
    parameters = {"type": "object", "properties": {}}
    function = {"name": "f", "description": "-", "parameters": parameters}
    tools = [{"type": "function", "function": function}] if with_tools else None

    def sees(*messages: dict) -> bool:
        messages = normal(messages, processor)
        try:
            text = processor.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        except REFUSED:
            return False
        return "seen7" in text

    asked, answer = {"role": "user", "content": "-"}, {"role": "assistant", "content": "-"}
    result = {"role": "tool", "name": "f", "content": "seen7"}
    system = sees({"role": "system", "content": "seen7"}, asked) or not sees(asked | {"content": "seen7"})
    if sees(asked, answer, result):
        return Shown(system, "alone")
    return Shown(system, "with their calls" if sees(asked, *with_calls([result])) else "as a user")


def with_calls(messages: list[dict]) -> list[dict]:
    """An answer with the calls that these messages of tools answer, and the messages."""
    calls, answers = [], []
    for place, message in enumerate(messages):
        if message["role"] == "tool":
            function = {"name": message.get("name", "f"), "arguments": {}}
            calls.append({"id": f"call{place:05d}", "type": "function", "function": function})
            message = message | {"tool_call_id": calls[-1]["id"]}
        answers.append(message)
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *answers]


def drops_thinking(messages: list[dict], processor, schemas: list[dict] | None, **options) -> bool:
    """Whether the chat template leaves an answer's thinking out where these messages stand behind it."""
    called_for = any(message["role"] == "tool" for message in messages)
    answer, *behind = with_calls(messages) if called_for else [{"role": "assistant"}, *messages]
    thought = answer | {"content": "<think>\nseen7\n</think>\n\n-"}
    shown = [made_up(processor)[0], *normal([thought, *behind], processor)]
    return "seen7" not in render(shown, processor, schemas, **options)


def observation_text(messages: list[dict], processor, schemas: list[dict] | None = None, **options) -> str:
    """What the chat template writes from the end of an answer, over `messages`, to where the next answer begins.

    Rendered behind a made-up conversation, so that nothing before it matters: templates add a default system prompt,
    or take the thinking out of earlier answers.
    """
    before = made_up(processor)
    called = shown_by(processor, schemas).results == "with their calls"
    if called := called and any(message["role"] == "tool" for message in messages):
        answer, *messages = with_calls(messages)
        before[1:] = normal([answer], processor)
    messages, schemas = guard(normal(messages, processor), processor), guard(schemas, processor)
    text = render(before + messages, processor, schemas, add_generation_prompt=True, **options)
    if not called:
        return text[text.rindex(END) + len(END) :]
    same = len(os.path.commonprefix([text, render(before, processor, schemas, **options)]))  # to the end of the calls
    added = tokenizer_of(processor).added_tokens_decoder.values()  # which no cut goes through
    tokens = re.finditer("|".join(re.escape(str(token)) for token in added) or "(?!)", text)
    return text[next((t.start() for t in tokens if t.start() < same < t.end()), same) :]


def observation_ids(messages: list[dict], processor, last: int, schemas: list[dict] | None = None, **options) -> list:
    """Token ids that lead from a sampled answer over `messages` (of tools, of an environment) to where the next answer
    begins, one placeholder an image. What was sampled is not among them and is never tokenised again.

    last: the token that ended the answer; where it is the template's own end of a turn, the ids begin behind it.
    schemas, options: the tools and settings that the chat template was given with the prompt.
    """
    ids = tokenize(observation_text(messages, processor, schemas, **options), processor)
    return ids[int(ids[0] == last) :]


# ---- ids -------------------------------------------------------------------------------------------------------------


def adds_bos(text: str, processor, cfg: TrainConfig) -> bool:
    """Whether the tokenizer adds what it adds to any text; a template writes its own."""
    return cfg.no_apply_chat_template and not begins_by_itself(text, processor)


def prompt_ids(row: dict, tokenizer, cfg: TrainConfig) -> list[int]:
    """Token ids of a row's prompt, up to where the model's answer begins, for models without images."""
    text = prompt_text(row, tokenizer, cfg)
    return tokenize(text, tokenizer, adds_bos(text, tokenizer, cfg))


def build_prompt(row: dict, generator, cfg: TrainConfig, shown: dict | None = None) -> Prompt:
    """The row's prompt, or that of `shown`, which an environment made of it; its images decoded and processed once.
    generator: has the `tokenizer` (of models with images the processor) and `rope_index`."""
    processor, shown = generator.tokenizer, shown or row
    if not is_vision(processor):
        ids = prompt_ids(shown, processor, cfg)
        return Prompt(ids, ids)
    known, messages, prompt = _RECENT.get(id(row), (None, None, None))
    if known is not row or messages != shown["prompt"]:
        prompt = vision_prompt(shown, processor, generator.rope_index, cfg, row)
        _RECENT[id(row)] = row, shown["prompt"], prompt
        while len(_RECENT) > cfg.prompts_per_step:  # pixels take room
            _RECENT.popitem(last=False)
    return prompt


def vision_prompt(
    row: dict, processor, rope_index: Callable | None, cfg: TrainConfig, data_row: dict | None = None
) -> Prompt:
    """`build_prompt` of a row for a model with images; the row may have none. data_row: where it came from, if an
    environment has written the prompt: then only the data row's own texts may name a file."""
    sources, own = image_sources(row), image_sources(data_row or row)
    text = prompt_text(row, processor, cfg, len(sources))
    special = adds_bos(text, processor, cfg)
    sent = tokenize(text, processor, special)
    if not sources:
        return Prompt(sent, sent)
    loaded = []
    for number, source in enumerate(sources):
        try:
            named = isinstance(source, (str, dict)) and source not in own
            loaded.append(load_image(source, cfg, local_files=not named))
        except PictureError as error:
            name = f", {shorten(source)}," if isinstance(source, (str, Path)) else ""
            raise PictureError(f"image {number} of a row{name} cannot be read: {error}") from error
    images, files = zip(*loaded, strict=True)
    COUNTS["images"] += len(images)
    ids, inputs = expand(text, list(images), processor, rope_index, special)
    return Prompt(ids, sent, list(files), inputs)


def expand(text: str, images: list, processor, rope_index: Callable | None, special: bool) -> tuple[list[int], dict]:
    """(token ids with every placeholder expanded, tensors for the model), as the model's own processor makes them.

    rope_index: of models whose positions have three axes; the prompt's are computed here, so that nothing later needs
    to know. Positions after the prompt count on from its largest.
    """
    encoded = dict(processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=special))
    ids, mask = encoded.pop("input_ids"), encoded.pop("attention_mask")
    if "cross_attention_mask" in encoded:  # [1, T, images, tiles], as Llama 3.2 Vision has it
        raise PartError(
            "the model looks at images by cross-attention, whose mask has an entry for each token of a prompt, and "
            "none here for those that are sampled. Choose a model whose images are tokens of the prompt"
        )
    if rope_index is not None:
        encoded["position_ids"] = rope_index(ids, **encoded, attention_mask=mask)[0]  # [3, 1, T]
    family = type(processor).__name__.removesuffix("Processor").lower()
    name, followed_by = FOLLOWED_BY.get(family, (None, None))
    types = encoded.get(name)
    for key in (*TYPES, "labels"):  # of models with positions on three axes, these have the types in them
        encoded.pop(key, None)
    if types is not None:  # one longer than the prompt: the last stands for what follows
        encoded[name] = types.new_tensor([[*types[0].tolist(), followed_by]])
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


def continued(prompt: Prompt, ids: list[int], sent: list[int] | None = None, inputs: dict | None = None) -> Prompt:
    """The prompt with `ids` behind it, sampled or of an observation: then `sent` of them for a server, and the model's
    `inputs` for its images. Positions on several axes count on from the largest, types are a completion's."""
    import torch

    old, new = prompt.model_inputs, inputs or {}
    joined = join_inputs([old, new]) if new else {k: v for k, v in old.items() if k not in PER_TOKEN}
    if "position_ids" in old or "position_ids" in new:  # [3, 1, T]
        before = old.get("position_ids", torch.arange(len(prompt.token_ids)).expand(3, 1, -1))
        after = new.get("position_ids", torch.arange(len(ids)).expand(3, 1, -1))
        joined["position_ids"] = torch.cat([before, before.max() + 1 + after], dim=-1)
    for types in (name for name in TYPES if name in old or name in new):  # [1, T + 1]; the last is of what follows
        before = old.get(types, torch.zeros(1, len(prompt.token_ids) + 1, dtype=torch.long))
        after = new.get(types, before[:, -1:].expand(-1, len(ids) + 1))
        joined[types] = torch.cat([before[:, :-1], after], dim=1)
    return Prompt(prompt.token_ids + ids, prompt.sent_ids + (ids if sent is None else sent), prompt.images, joined)


def observed(prompt: Prompt, messages: list[dict], generator, schemas, cfg: TrainConfig, **options) -> Prompt:
    """The prompt and what was sampled behind it, with an observation's messages after that, their images expanded."""
    processor, sources = generator.tokenizer, image_sources({"prompt": messages})
    sent = observation_ids(messages, processor, prompt.token_ids[-1], schemas, **options)
    if not sources:
        return continued(prompt, sent)
    text = observation_text(messages, processor, schemas, **options)
    skip = len(tokenize(text, processor)) - len(sent)
    images, files = zip(*(load_image(source, cfg, local_files=False) for source in sources), strict=True)
    COUNTS["images"] += len(images)
    ids, inputs = expand(text, list(images), processor, generator.rope_index, special=False)
    for key in PER_TOKEN:
        inputs |= {key: inputs[key][..., skip:]} if key in inputs else {}
    if "position_ids" in inputs:
        inputs["position_ids"] = inputs["position_ids"] - skip  # its first place was taken away
    grown = continued(prompt, ids[skip:], sent, inputs)
    return replace(grown, images=[*prompt.images, *files])


def rope_index_of(hf_model) -> Callable | None:
    """The function that gives a prompt's positions on three axes, of models that have it."""
    from inputs.model import backbone  # here, so that an environment can be tried without torch

    return getattr(backbone(hf_model), "get_rope_index", None)


def images_alone(processor, count: int) -> str:
    """The shortest prompt with so many images."""
    if not processor.chat_template:
        return processor.image_token * count
    return render(normal([{"role": "user", "content": "-"}], processor, count), processor, add_generation_prompt=True)


def blank_inputs(processor, cfg: TrainConfig, hf_model) -> dict:
    """Inputs of the shortest prompt with an image, for passes that have none (packing.with_blank)."""
    import torch

    image = Image.new("RGB", (64, 64))
    ids, inputs = expand(images_alone(processor, 1), [image], processor, rope_index_of(hf_model), special=True)
    return inputs | {"input_ids": torch.tensor([ids])}


def image_metrics(generator) -> dict:
    """Images processed and megabytes of them sent to servers since the last call, over all ranks, which all call it.
    Nothing for models without images."""
    import torch

    import utils

    if not is_vision(generator.tokenizer):
        return {}
    _RECENT.clear()
    counts = torch.tensor([COUNTS.pop("images", 0), generator.image_bytes], dtype=torch.float64)
    generator.image_bytes = 0
    images, sent = utils.all_sum(counts).tolist()
    return {"images/processed": int(images), "images/mb_sent": sent / 1e6}


def check_echo(prompt: Prompt, samples: list) -> None:
    """The generator must have seen the prompt that is trained on; RuntimeError says where the two differ."""
    ours, theirs = prompt.token_ids, samples[0].prompt_ids
    if ours != theirs:
        place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
        raise RuntimeError(
            f"the generator made {len(theirs)} tokens of a prompt with {len(prompt.images)} images, the trainer "
            f"{len(ours)}; they differ from token {place} on. Is the server's --model the trainer's --model_id? Scale "
            "images with --max_pixels and --min_pixels here, not with --mm-processor-kwargs there."
        )


# ---- at start --------------------------------------------------------------------------------------------------------


def check_images(rows, name: str, processor, first: int = 0) -> list:
    """Sizes (height, width) of every row's images, read from their headers; ConfigError naming the row whose images
    cannot be read, or are not as many as its placeholders. What is damaged behind that costs its row when it is drawn.
    first: the first row's number."""
    sizes = []
    for index, row in enumerate(rows, first):
        where = f"{name}, row {index}"
        try:
            sources = image_sources(row)
            if sources and not is_vision(processor):
                raise PartError("it has images, and the model of --model_id takes none; choose one that does")
            if len(sources) < len(column_images(row)):
                raise PartError("the image parts of `prompt` bring their own images: those of its column are not shown")
            sizes.append([upright_size(open_image(source)[0])[::-1] for source in sources])
        except PartError as error:
            raise ConfigError(f"{where}: {error}.") from error
        except PictureError as error:
            raise ConfigError(f"{where}: an image cannot be read: {error}") from error
    return sizes


def prompt_lengths(rows, name: str, processor, cfg: TrainConfig) -> list[int]:
    """Tokens of every prompt, its images counted by their sizes."""
    if isinstance(rows, Rows) and not (is_vision(processor) or has_column(rows, "tools", "chat_template_kwargs")):
        return text_lengths(rows, name, processor, cfg)
    sizes, lengths = check_images(rows, name, processor), []
    for index, (row, shapes) in enumerate(zip(rows, sizes, strict=True)):
        try:
            text = prompt_text(row, processor, cfg, len(shapes))
            sent = len(tokenize(text, processor, adds_bos(text, processor, cfg)))
            lengths.append(sent + added_by(processor, [scaled(shape, cfg) for shape in shapes]))
        except PartError as error:
            raise ConfigError(f"{name}, row {index}: {error}.") from error
    return lengths


def added_by(processor, shapes: list[tuple[int, int]]) -> int:
    """Tokens that images of these sizes (height, width) have beyond one placeholder each."""
    if not shapes:
        return 0
    try:
        if (more := unsaid(processor, len(shapes))) is None:
            return expanded_by(processor, shapes)
        return said_of(processor, shapes) + more
    except (ValueError, ArithmeticError) as error:  # such as a line of 100,000 pixels
        raise PartError(f"the model's processor refuses images of {shapes} (height, width): {error}") from error


def said_of(processor, shapes: list[tuple[int, int]]) -> int:
    return sum(processor._get_num_multimodal_tokens(image_sizes=shapes).num_image_tokens) - len(shapes)


def expanded_by(processor, shapes: list[tuple[int, int]]) -> int:
    """By what the processor makes of blank images."""
    text, blank = images_alone(processor, len(shapes)), [Image.new("RGB", shape[::-1]) for shape in shapes]
    return len(expand(text, blank, processor, None, special=False)[0]) - len(tokenize(text, processor))


@functools.lru_cache(maxsize=64)
def unsaid(processor, count: int) -> int | None:
    """Tokens around `count` images (Gemma's), or of what several become (LLaVA-OneVision's), that the processor leaves
    out where it says how many there are; None if that is no constant number, or it says nothing (SmolVLM's)."""
    if not hasattr(processor, "_get_num_multimodal_tokens"):
        return None
    tried = [[size] * count for size in ((224, 448), (448, 448))]
    found = {expanded_by(processor, shapes) - said_of(processor, shapes) for shapes in tried}
    return found.pop() if len(found) == 1 else None


TRIED = 500  # rows on disk, evenly spread, that are always tokenised


def text_lengths(rows: Rows, name: str, tokenizer, cfg: TrainConfig) -> list[int]:
    """`prompt_lengths` of rows on disk, of text alone: to tokenise each would take a core ten minutes for two million.

    No more tokens than UTF-8 bytes: where these, with the tokens of the template around them, fit, they stand for the
    length. Should that be wrong for some that are tried (a template that writes a text twice), all are tokenised.
    """
    around: dict[tuple, float] = {}  # tokens, by the roles of the messages

    def bound(prompt) -> float:
        messages = [{"role": "", "content": prompt}] if isinstance(prompt, str) else prompt
        if any(m.keys() > {"role", "content"} or not isinstance(m.get("content"), str) for m in messages):
            return math.inf
        roles = tuple(m["role"] for m in messages)
        if roles not in around:
            letters = "x" if isinstance(prompt, str) else [{"role": role, "content": "x"} for role in roles]
            try:
                around[roles] = len(prompt_ids({"prompt": letters}, tokenizer, cfg))
            except PartError:  # the template refuses such roles
                around[roles] = math.inf
        return around[roles] + sum(len(m["content"].encode()) for m in messages)

    def lengths(part: list[dict], first: int) -> list[int]:
        bounds = [bound(row["prompt"]) if bounded else math.inf for row in part]
        far = [place for place, most in enumerate(bounds) if most > cfg.max_prompt_length]
        for place in far:
            (bounds[place],) = prompt_lengths([part[place]], f"{name}, from row {first + place} on", tokenizer, cfg)
        return [int(most) for most in bounds]

    bounded = False  # while the rows are tried
    tried = [*rows.select(range(0, len(rows), max(len(rows) // TRIED, 1)))]
    known = lengths(tried, 0)
    bounded = all(length <= bound(row["prompt"]) for length, row in zip(known, tried, strict=True))
    how = tokenizer.backend_tokenizer.to_str() if getattr(tokenizer, "is_fast", False) else vars(tokenizer)
    how = (how, tokenizer.chat_template, cfg.chat_template_kwargs, cfg.system_prompt, cfg.allow_special_tokens)
    how += (cfg.no_apply_chat_template, cfg.max_prompt_length, version("transformers"))
    return each(rows, lengths, "measuring prompts", file_of(text_lengths), *how)


LOOKED_AT = 10_000  # rows


def special_text_in(rows, processor, cfg: TrainConfig) -> str | None:
    """What to say about prompts whose text reads like special tokens; None where there are none."""
    if cfg.no_apply_chat_template:  # such prompts bring the tokens of their template along
        return None
    found = [tokens for row in rows[:LOOKED_AT] if (tokens := found_in(row["prompt"], processor))]
    if not found:
        return None
    remedy = "becomes one" if cfg.allow_special_tokens else "is broken by a blank (--allow_special_tokens: becomes one)"
    seen = f" of the first {LOOKED_AT:,}" if len(rows) > LOOKED_AT else ""
    return (
        f"{len(found)} prompts{seen} hold text that reads like a special token, such as {found[0][0]!r}: it {remedy}."
    )
