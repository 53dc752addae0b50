"""From a row to token ids: messages, the chat template, what may not become a control token.

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

REFUSED = (TemplateError, TypeError, LookupError, ValueError)  # what templates raise at what they do not know
SCHEMAS = "<tool schemas>"  # of a row that was made for the model, for its template: no column of data is called so
END = chr(0xFFFFD)  # stands where an answer ends in a made-up conversation; see observation_text
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


# ---- text of others: data rows, tools, environments ------------------------------------------------------------------

# A tokenizer turns every "<|im_end|>" it reads into the token that ends a turn, whoever wrote it: a tool's result could
# end its own message and go on as the assistant. So before a chat template sees foreign text, `guard` breaks the text
# of every special token in it by a blank, "< |im_end|>". The template's own special tokens come after that.


def tokenizer_of(processor):
    """The text tokenizer of a processor for text and images; a tokenizer itself."""
    return getattr(processor, "tokenizer", processor)


def special_texts(processor) -> list[str]:
    """Texts that the tokenizer, or the processor of images, reads as something else than text; longest first."""
    tokenizer = tokenizer_of(processor)
    texts = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts |= set(tokenizer.all_special_tokens)
    texts |= {str(getattr(processor, name)) for name in PLACEHOLDERS if getattr(processor, name, None)}
    return sorted(filter(None, texts), key=len, reverse=True)


@functools.lru_cache(maxsize=16)
def pattern_of(processor) -> re.Pattern:
    return re.compile("|".join(map(re.escape, special_texts(processor))) or "(?!)")


def guard(value, processor):
    """Messages or tool schemas in which no text reads like a special token."""
    pattern = pattern_of(processor)

    def guarded(text: str) -> str:
        text = clean(text).replace(END, "\ufffd")
        for _ in range(3):  # one may stand within another
            text = pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
        return pattern.sub("\ufffd", text)

    return each_text(value, guarded)


def clean(text: str) -> str:
    """The text as valid Unicode: a pair of surrogates becomes its character, a lone half U+FFFD, which every tokenizer,
    file and page can hold. Models write lone halves as JSON escapes, tools cut texts in the middle of an emoji."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def each_text(value, function):
    """The value with `function` applied to every text in it: in lists, tuples and dicts, their keys included."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {each_text(key, function): each_text(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [each_text(item, function) for item in value]
    return value


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


def prompt_text(row: dict, processor, cfg: TrainConfig, count: int = 0) -> str:
    """What a row with `count` images looks like before tokenisation: one placeholder an image; by the chat template,
    with the tools and settings that columns of the row give it. PartError for what it refuses.

    Its special tokens are the only ones: no second BOS, and none of the row's own text unless --allow_special_tokens
    (see `guard`). A conversation that ends in an assistant message is continued, as in TRL: that text is the beginning
    of the answer. It stands at the end as the row has it, in place of what the template begins one with: templates take
    blanks off an answer's end, put empty thinking before it, or take its thinking away.
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
    messages = normal(prompt_messages(row, cfg.system_prompt), processor, count)
    schemas, options = row.get(SCHEMAS, own_schemas(row)), own_kwargs(row)
    if not cfg.allow_special_tokens:
        messages, schemas = guard(messages, processor), guard(schemas, processor)
    begun = text_of_parts(messages[-1].get("content")) if messages[-1]["role"] == "assistant" else ""
    try:
        asked = messages[:-1] if begun else messages
        text = render(asked, processor, schemas, add_generation_prompt=True, **options)
    except REFUSED as error:
        raise PartError(f"the chat template refuses this prompt: {error}") from error
    return text.removesuffix(begun_by(text, processor)) + begun if begun else text


def begun_by(prompt: str, processor) -> str:
    """The tag at a prompt's end with which the chat template has begun the answer: "<think>\\n" of models that always
    think, an empty thinking of those that are told not to; mostly nothing."""
    found = OPENED.search(prompt)
    return found[0] if found and f"<{found[1]}>" not in special_texts(processor) else ""


def begun_in(ids: list[int], processor, cfg: TrainConfig) -> str:
    """What the chat template has begun the answer with that is sampled behind these tokens."""
    tokenizer = tokenizer_of(processor)
    # A tokenizer of somebody's own need not have the attribute.
    if cfg.no_apply_chat_template or not getattr(tokenizer, "chat_template", None):
        return ""
    return begun_by(tokenizer.decode(ids[-16:]), processor)


def end_ids(hf_model, processor) -> set[int]:
    """Tokens that end an answer: the model's own, and the one with which its chat template ends a turn."""
    tokenizer, ids = tokenizer_of(processor), hf_model.generation_config.eos_token_id
    found = {*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id} - {None}
    if not getattr(tokenizer, "chat_template", None):
        return found
    behind = tokenize(render(made_up(processor), processor).rpartition(END)[2], processor)
    end = next((token for token in behind if token in tokenizer.added_tokens_decoder), None)
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
    shows, said = shown_by(processor), []
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


@functools.lru_cache(maxsize=16)
def shown_by(processor) -> Shown:
    """Found by rendering. Some templates raise at what they do not know, others leave it out without a word."""

    def sees(*messages: dict) -> bool:
        try:
            text = processor.apply_chat_template(normal([*messages], processor), tokenize=False)
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
    called = shown_by(processor).results == "with their calls"
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


# ---- ids -------------------------------------------------------------------------------------------------------------


def adds_bos(text: str, processor) -> bool:
    """Whether a text that was rendered beforehand lacks what the tokenizer would put before it: BOS. A chat template
    writes its own."""
    tokenizer = tokenizer_of(processor)
    first = tokenizer("")["input_ids"][:1]
    return not (first and text.startswith(tokenizer.decode(first)))


def tokenize(text: str, processor, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a rendered text, whose special tokens are the template's."""
    return list(tokenizer_of(processor)(text, add_special_tokens=add_special_tokens)["input_ids"])


def prompt_ids(row: dict, tokenizer, cfg: TrainConfig) -> list[int]:
    """Token ids of a row's prompt, up to where the model's answer begins, for models without images."""
    text = prompt_text(row, tokenizer, cfg)
    return tokenize(text, tokenizer, cfg.no_apply_chat_template and adds_bos(text, tokenizer))
