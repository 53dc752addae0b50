"""From a row to token ids: messages, the chat template, and a guard against control tokens in foreign text.

    row -> prompt_messages -> normal -> rendered (by the chat template) -> tokenize
    observation -> observation_text -> tokenize

Images, and the tensors a model wants for them, are in inputs/vision.py.
"""

import functools
import json
import os
import re
from dataclasses import dataclass
from typing import Literal

from jinja2 import TemplateError

from config import ConfigError, TrainConfig, shorten
from inputs.parts import PartError, parts_of, text_of_parts, text_part

REFUSED = (TemplateError, TypeError, LookupError, ValueError)  # errors of templates at messages they do not know
SCHEMAS = "<tool schemas>"  # a row's key for the schemas that its template gets; no column of a data set has this name
END = chr(0xFFFFD)  # marks the end of the answer in a made-up conversation; see observation_text
PLACEHOLDERS = ("image_token", "video_token", "audio_token", "boi_token", "eoi_token", "fake_image_token")
OPENED = re.compile(r"<(\w+)>\s*(</\1>\s*)?$")


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
    """Messages with content in the chat template's form: text or, for models with images, lists of parts with
    {"type": "image"} for each image. If no message has an image part, `count` images go before the text of the first
    user message. PartError if there is no such message."""
    if not is_vision(processor):
        return [m | {"content": text_of_parts(m["content"])} if type(m.get("content")) is list else m for m in messages]
    normalised, count = [], 0 if image_parts(messages) else count
    for message in messages:
        parts = parts_of(message.get("content"))
        parts = [{"type": "image"} if part["type"] == "image" else part for part in joined_texts(parts)]
        if count and message["role"] == "user":
            parts, count = [{"type": "image"}] * count + parts, 0
        normalised.append(message | {"content": parts})
    if count:
        raise PartError(f"`prompt` has no user message to put its {count} images into")
    return normalised


def made_up(processor) -> list[dict]:
    """A conversation of a question and the answer END."""
    return normal([{"role": "user", "content": "-"}, {"role": "assistant", "content": END}], processor)


def image_parts(prompt) -> list[dict]:
    """The image parts of chat messages; none of a prompt that is text."""
    messages = prompt if isinstance(prompt, list) else []
    return [part for m in messages for part in parts_of(m.get("content")) if part["type"] == "image"]


# ---- text of others: data rows, tools, environments ------------------------------------------------------------------

# A tokenizer turns every "<|im_end|>" into the token that ends a turn, whoever wrote it: a tool's result could end its
# own message and continue as the assistant. So before a chat template gets foreign text, `guard` puts a blank into the
# text of each special token, "< |im_end|>". The template adds its own special tokens after that.


def tokenizer_of(processor):
    """The tokenizer of a processor of text and images; a tokenizer itself."""
    return getattr(processor, "tokenizer", processor)


def special_texts(processor) -> list[str]:
    """Texts that the tokenizer or the image processor does not read as plain text; longest first."""
    tokenizer = tokenizer_of(processor)
    texts = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts |= set(tokenizer.all_special_tokens)
    texts |= {str(getattr(processor, name)) for name in PLACEHOLDERS if getattr(processor, name, None)}
    return sorted(filter(None, texts), key=len, reverse=True)


@functools.lru_cache(maxsize=16)
def pattern_of(processor) -> re.Pattern:
    return re.compile("|".join(map(re.escape, special_texts(processor))) or "(?!)")


def guard(value, processor):
    """Messages or tool schemas without text that reads like a special token."""
    pattern = pattern_of(processor)

    def guarded(text: str) -> str:
        text = clean(text).replace(END, "\ufffd")
        for _ in range(3):  # one may contain another
            text = pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
        return pattern.sub("\ufffd", text)

    return each_text(value, guarded)


def clean(text: str) -> str:
    """The text as valid Unicode, which every tokenizer, file and page can hold: a pair of surrogates becomes its
    character, a lone half U+FFFD. Lone halves come from JSON escapes of a model, and from tools that cut an emoji."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def each_text(value, function):
    """The value with `function` applied to every text in it, in lists, tuples and dicts, including keys."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {each_text(key, function): each_text(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [each_text(item, function) for item in value]
    return value


# ---- by the chat template --------------------------------------------------------------------------------------------


def own_schemas(row: dict) -> list[dict] | None:
    """The tool schemas in the row's column `tools`, a list or JSON text, which the prompt shows. None if the column
    has names for --tools, or nothing."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) and tools.lstrip().startswith("[") else tools
    return tools if isinstance(tools, list) and tools and all(isinstance(tool, dict) for tool in tools) else None


def own_kwargs(row: dict) -> dict:
    """The row's column `chat_template_kwargs`, a dict or JSON text."""
    value = row.get("chat_template_kwargs") or {}
    return json.loads(value) if isinstance(value, str) else value


def prompt_text(row: dict, processor, cfg: TrainConfig, count: int = 0) -> str:
    """The text of a row with `count` images before tokenisation, one placeholder per image: rendered by the chat
    template, with the tools and settings in columns of the row. PartError if the template refuses it.

    All special tokens are the template's: there is no second BOS, and none comes from the row's own text unless
    --allow_special_tokens (see `guard`). If the last message is the assistant's, the model continues it, as in TRL. The
    text then ends exactly as that message does, without the template's own beginning of an answer: templates strip
    blanks from an answer's end, put empty thinking before it, or remove its thinking.
    """
    if cfg.no_apply_chat_template:
        if not isinstance(row["prompt"], str) or cfg.system_prompt is not None:
            rule = "takes prompts that are strings, and no --system_prompt"
            raise ConfigError(f"--no_apply_chat_template {rule}; this prompt is {shorten(row['prompt'])}.")
        return row["prompt"]
    if not processor.chat_template:
        remedy = "choose a chat model, or make the prompts strings and set no_apply_chat_template"
        raise ConfigError(f"the model of --model_id has no chat template; {remedy}.")
    messages = normal(prompt_messages(row, cfg.system_prompt), processor, count)
    schemas, options = row.get(SCHEMAS, own_schemas(row)), own_kwargs(row)
    if not cfg.allow_special_tokens:
        messages, schemas = guard(messages, processor), guard(schemas, processor)
    answer_start = text_of_parts(messages[-1].get("content")) if messages[-1]["role"] == "assistant" else ""
    try:
        context = messages[:-1] if answer_start else messages
        text = render(context, processor, schemas, add_generation_prompt=True, **options)
    except REFUSED as error:
        raise PartError(f"the chat template refuses this prompt: {error}") from error
    return text.removesuffix(begun_by(text, processor)) + answer_start if answer_start else text


def begun_by(prompt: str, processor) -> str:
    """The beginning of the answer that the chat template has put at a prompt's end: "<think>\\n" for models that always
    think, an empty thinking if thinking is off, mostly nothing."""
    match = OPENED.search(prompt)
    return match[0] if match and f"<{match[1]}>" not in special_texts(processor) else ""


def begun_in(ids: list[int], processor, cfg: TrainConfig) -> str:
    """`begun_by` of a prompt's token ids."""
    tokenizer = tokenizer_of(processor)
    # A user's own tokenizer need not have the attribute.
    if cfg.no_apply_chat_template or not getattr(tokenizer, "chat_template", None):
        return ""
    return begun_by(tokenizer.decode(ids[-16:]), processor)


def end_ids(hf_model, processor) -> set[int]:
    """Tokens that end an answer: the model's, and the one that ends a turn in its chat template."""
    tokenizer, ids = tokenizer_of(processor), hf_model.generation_config.eos_token_id
    ends = {*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id} - {None}
    if not getattr(tokenizer, "chat_template", None):
        return ends
    ids_after_answer = tokenize(render(made_up(processor), processor).rpartition(END)[2], processor)
    end = next((token for token in ids_after_answer if token in tokenizer.added_tokens_decoder), None)
    return ends | ({end} - {None})


def with_tools(row: dict, schemas: list[dict], instructions: str, processor, system_prompt: str | None = None) -> dict:
    """The row with its system prompt, and SCHEMAS for its chat template. Without schemas, or if the template does not
    show them, `instructions` go to the end of the system message instead."""
    messages = prompt_messages(row, system_prompt)
    chat = normal(messages, processor)
    if schemas and render(chat, processor, None) != render(chat, processor, schemas):
        return row | {"prompt": messages, SCHEMAS: schemas}
    if instructions and messages[0]["role"] == "system":
        content = [*parts_of(messages[0]["content"]), text_part(f"\n\n{instructions}")]
        content = content if is_vision(processor) else text_of_parts(joined_texts(content))
        messages = [messages[0] | {"content": content}, *messages[1:]]
    elif instructions:
        messages = prompt_messages({"prompt": messages}, instructions)
    return row | {"prompt": messages}


def joined_texts(parts: list[dict]) -> list[dict]:
    """The parts, with adjacent texts joined, so that a special token in two halves is noticed."""
    joined: list[dict] = []
    for part in parts:
        if joined and part["type"] == joined[-1]["type"] == "text":
            part = text_part(joined.pop()["text"] + part["text"])
        joined.append(part)
    return joined


def render(messages: list[dict], processor, schemas: list[dict] | None = None, **options) -> str:
    """The text that the chat template writes. If the template does not show the role `tool`, results become one user's
    message, since such templates often require roles to alternate. A system message that it does not show goes to the
    beginning of the first user message."""
    shows, messages_shown = shown_by(processor), []
    as_user = {"tool": shows.results == "as a user", "system": not shows.system}  # whether a role becomes a user's
    last_role = None  # of the message before, if it became a user's
    for message in messages:
        role = message["role"] if as_user.get(message["role"]) else None
        message = message | {"role": "user"} if role else message
        if message["role"] == "user" and (last_role == "system" or last_role == role == "tool"):
            gap = [text_part("\n\n")] if is_vision(processor) else "\n\n"
            message = message | {"content": messages_shown.pop()["content"] + gap + message["content"]}
        messages_shown.append(message)
        last_role = role
    # None for an empty list: some templates, such as Mistral's, would announce an empty list of tools.
    return processor.apply_chat_template(messages_shown, tools=schemas or None, tokenize=False, **options)


@dataclass(frozen=True)
class Shown:
    """How a chat template shows messages that not every template knows."""

    system: bool  # whether it shows system messages
    results: Literal["alone", "with their calls", "as a user"]  # of tools: the form in which it shows them


@functools.lru_cache(maxsize=16)
def shown_by(processor) -> Shown:
    """Found by rendering. At a role that they do not know, some templates raise, and others leave the message out."""

    def sees(*messages: dict) -> bool:
        try:
            text = processor.apply_chat_template(normal([*messages], processor), tokenize=False)
        except REFUSED:
            return False
        return "seen7" in text

    question, answer = {"role": "user", "content": "-"}, {"role": "assistant", "content": "-"}
    result = {"role": "tool", "name": "f", "content": "seen7"}
    system = sees({"role": "system", "content": "seen7"}, question) or not sees(question | {"content": "seen7"})
    if sees(question, answer, result):
        return Shown(system, "alone")
    return Shown(system, "with their calls" if sees(question, *with_calls([result])) else "as a user")


def with_calls(messages: list[dict]) -> list[dict]:
    """An assistant's message with the calls that these results answer, and then the messages."""
    calls, answers = [], []
    for place, message in enumerate(messages):
        if message["role"] == "tool":
            function = {"name": message.get("name", "f"), "arguments": {}}
            calls.append({"id": f"call{place:05d}", "type": "function", "function": function})
            message = message | {"tool_call_id": calls[-1]["id"]}
        answers.append(message)
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *answers]


def drops_thinking(messages: list[dict], processor, schemas: list[dict] | None, **options) -> bool:
    """Whether the chat template removes an answer's thinking when these messages follow it."""
    has_results = any(message["role"] == "tool" for message in messages)
    answer, *following = with_calls(messages) if has_results else [{"role": "assistant"}, *messages]
    answer_thinking = answer | {"content": "<think>\nseen7\n</think>\n\n-"}
    chat = [made_up(processor)[0], *normal([answer_thinking, *following], processor)]
    return "seen7" not in render(chat, processor, schemas, **options)


def observation_text(messages: list[dict], processor, schemas: list[dict] | None = None, **options) -> str:
    """The text that the chat template writes between the end of an answer and the beginning of the next, with
    `messages` in between.

    It is rendered after a made-up conversation, so that the real one does not matter: templates add a default system
    prompt, or remove the thinking of earlier answers.
    """
    preceding = made_up(processor)
    needs_calls = shown_by(processor).results == "with their calls"
    if needs_calls := needs_calls and any(message["role"] == "tool" for message in messages):
        answer, *messages = with_calls(messages)
        preceding[1:] = normal([answer], processor)
    messages, schemas = guard(normal(messages, processor), processor), guard(schemas, processor)
    text = render(preceding + messages, processor, schemas, add_generation_prompt=True, **options)
    if not needs_calls:
        return text[text.rindex(END) + len(END) :]
    shared = len(os.path.commonprefix([text, render(preceding, processor, schemas, **options)]))  # to the calls' end
    added_tokens = tokenizer_of(processor).added_tokens_decoder.values()  # never cut within one
    tokens = re.finditer("|".join(re.escape(str(token)) for token in added_tokens) or "(?!)", text)
    return text[next((t.start() for t in tokens if t.start() < shared < t.end()), shared) :]


# ---- ids -------------------------------------------------------------------------------------------------------------


def adds_bos(text: str, processor) -> bool:
    """Whether the tokenizer has to add BOS, or whatever it puts first, to this text. A chat template writes its own."""
    tokenizer = tokenizer_of(processor)
    first = tokenizer("")["input_ids"][:1]
    return not (first and text.startswith(tokenizer.decode(first)))


def tokenize(text: str, processor, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a rendered text, which has the template's special tokens."""
    return list(tokenizer_of(processor)(text, add_special_tokens=add_special_tokens)["input_ids"])


def prompt_ids(row: dict, tokenizer, cfg: TrainConfig) -> list[int]:
    """Token ids of a row's prompt, up to the beginning of the answer, for models without images."""
    text = prompt_text(row, tokenizer, cfg)
    return tokenize(text, tokenizer, cfg.no_apply_chat_template and adds_bos(text, tokenizer))
