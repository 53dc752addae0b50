"""Calls of tools in what a model writes: how they are asked for, and how they are read.

    --tool_parser auto                   as the model's chat template writes them
    --tool_parser hermes                 a name in FORMATS
    --tool_parser my_calls.py:read       your own: read(text, schemas) -> [{"name": ..., "arguments": {...}}, ...]

A format is a response template of transformers, or a function like `read`. `auto` takes the template that comes with
the tokenizer; where there is none, the format whose mark stands in the chat template.
"""

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from config import ConfigError, function_path, known_name, load_function, shorten
from inputs.prompts import clean, each_text, tokenizer_of

# transformers takes seconds, and is imported where calls are read.


@dataclass
class Call:
    name: str
    arguments: dict = field(default_factory=dict)
    error: str | None = None  # why it could not be read

    def as_message(self) -> dict:
        """As it stands in an assistant message's `tool_calls`."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


# ---- formats --------------------------------------------------------------------------------------------------------


def call_format(content: str, open_pattern: str, close: str | list, function=None, **how) -> dict:
    """A response template for calls alone, in linear time: text that is no call is skipped. function: what a call is
    made of; {name} is the group of that name in open_pattern. how: arguments of transformers' parser of the content."""
    transform = {"type": "function", "function": function or {"name": "{name}", "arguments": "{content}"}}
    delimiters = {"open_pattern": open_pattern, "close": close}
    calls = {"repeats": True, "content": content, "content_args": how, "transform": transform} | delimiters
    return {"start_anchor": "\0", "fields": {"tool_calls": calls}}


def parse_tags(text: str, schemas: list[dict]) -> list[dict]:
    """<search>who wrote it</search>: the text is the tool's first argument, JSON where that is not to be text."""
    functions = {schema["function"]["name"]: schema["function"]["parameters"] for schema in schemas}
    calls, names = [], "|".join(map(re.escape, functions)) or "(?!)"
    for name, body in re.findall(rf"<({names})>(.*?)(?:</\1>|$)", text, re.DOTALL):
        given = {}
        for first, schema in list(functions[name].get("properties", {}).items())[:1]:
            given[first] = body.strip()
            if schema.get("type") != "string":
                with contextlib.suppress(ValueError):
                    given[first] = json.loads(body)
        calls.append({"name": name, "arguments": given})
    return calls


# allow_non_json: what is no JSON becomes a call with an error, the others of the turn are read.
FORMATS: dict[str, dict | Callable[[str, list[dict]], list[dict]]] = {
    # <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>: Qwen 2.5 and 3
    "hermes": call_format("json", "<tool_call>", "</tool_call>", "{content}", allow_non_json=True),
    # <tool_call><function=add><parameter=a>1</parameter></function></tool_call>: Qwen 3.5, Qwen3-Coder
    "xml": call_format(
        "xml-inline",
        r"(?:<tool_call>\s*)?<function=(?P<name>[^<>\n]*)>|<tool_call>",
        "</function>",
        tag_pattern=r"<parameter=(?P<key>[^<>\n]+)>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>",
    ),
    # to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>: gpt-oss
    "harmony": call_format(
        "json", r"to=functions\.(?P<name>[\w.-]{1,200})[^{]{0,100}", ["<|call|>", "<|end|>"], allow_non_json=True
    ),
    # <|tool_call>call:add{a:1,b:<|"|>text<|"|>}<tool_call|>: Gemma 4
    "gemma4": call_format(
        "json",
        r"<\|tool_call>(?:call:(?P<name>\w+))?",
        "<tool_call|>",
        allow_non_json=True,
        unquoted_keys=True,
        string_delims=[['<|"|>', '<|"|>']],
    ),
    # {"name": "add", "parameters": {"a": 1}} and nothing else: Llama 3.1
    "llama3_json": call_format(
        "json",
        r'(?=\{"name")',
        ["<|eom_id|>", "<|eot_id|>"],
        {"name": "{content.name}", "arguments": "{content.parameters}"},
    ),
    # <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>: GLM 4.5
    "glm45": call_format(
        "xml-inline",
        r"<tool_call>(?P<name>[^<\s]*)\s*",
        "</tool_call>",
        tag_pattern=r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>(?:(?!<arg_key>).)*?)</arg_value>",
    ),
    "tags": parse_tags,
}
# What stands in the chat template of a model that writes a format; the first counts.
MARKS = {"<arg_key>": "glm45", "<function=": "xml", "<|tool_call>call:": "gemma4", "<|channel|>commentary": "harmony"}
MARKS |= {"<tool_call>": "hermes", '"parameters": ': "llama3_json"}

# What thinking begins and ends with; the second is gpt-oss's.
THINKING = (("<think>", "</think>"), ("<|channel|>analysis<|message|>", "<|end|>"))


def outside_thinking(text: str) -> str:
    """A turn without its thinking, and without what stands before a first </think> where the prompt has begun that.
    There a model says how it will call and answer, which is neither a call nor an answer yet. Thinking that has no end
    is not told from the rest."""
    (begin, end), *_ = THINKING
    if end in text and begin not in (first := text.partition(end)[0]):
        text = text[len(first) :]
    for begin, end in THINKING:
        *parts, rest = text.split(end)
        text = end.join([*(part.partition(begin)[0] for part in parts), rest])
    return text


def read_calls(text: str, schemas: list[dict], parser: str) -> list[Call]:
    """The calls of a turn, outside its thinking. One that cannot be read has an `error`: the model is told, and it is
    counted.

    schemas: of the tools that the model was told of, as chat templates and OpenAI's API take them. parser: a name in
    FORMATS, or file.py:function.
    """
    from transformers.utils.chat_parsing import parse_response

    text = outside_thinking(text)
    how = FORMATS[parser] if parser in FORMATS else load_function(parser)
    try:
        if callable(how):
            found = how(text, schemas)
        else:
            found = parse_response(text, how, prefix="", tools=schemas).get("tool_calls", [])
        return [as_call(call) for call in found]
    except Exception as error:  # of a parser of somebody's own, or of transformers' at what a model wrote
        return [Call("", error=f"a call that cannot be read ({type(error).__name__}): {shorten(text, 200)}")]


def as_call(found: dict) -> Call:
    """One of `tool_calls`, with or without {"function": ...} around it; its arguments may be JSON."""
    function = found.get("function", found) if isinstance(found, dict) else found
    try:
        name, arguments = function["name"], function.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        json.dumps(arguments, allow_nan=False)
        if isinstance(name, str) and isinstance(arguments, dict):
            return Call(*each_text([name, arguments], clean))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    form = '{"name": "...", "arguments": {...}} in JSON'
    return Call("", error=f"a call must be {form}, not {shorten(function, 200)}")


# ---- how a model is told --------------------------------------------------------------------------------------------

HOW_TO_CALL = {
    "hermes": 'To call one, write <tool_call>{"name": "...", "arguments": {...}}</tool_call>.',
    "xml": "To call one, write <function=NAME><parameter=ARGUMENT>value</parameter></function>.",
    "tags": "To call one, write its tags with the argument between them.",
}  # the others are for templates that say so themselves


def instructions(schemas: list[dict], parser: str) -> str:
    """What a system message says about the tools, for chat templates that do not say it themselves."""
    functions = [schema["function"] for schema in schemas]
    if parser == "tags":  # as short as the calls
        firsts = [next(iter(f["parameters"].get("properties", {})), "") for f in functions]
        lines = [
            f"<{f['name']}>{first}</{f['name']}>: {f['description']}"
            for f, first in zip(functions, firsts, strict=True)
        ]
    else:
        lines = [json.dumps(function, ensure_ascii=False) for function in functions]
    return "\n".join(["You can call these tools:", *lines, HOW_TO_CALL.get(parser, "")])


# ---- which format a chat template writes ----------------------------------------------------------------------------


def parser_of(cfg) -> str:
    """--tool_parser, or for an `auto` that no chat template has settled hermes."""
    return "hermes" if cfg.tool_parser == "auto" else cfg.tool_parser


def parser_for(wanted: str, processor, has_own: bool = False) -> str:
    """The name of the parser that is used for `wanted`. has_own: the tools are an environment's, if it has any."""
    template = re.sub(r"\{#.*?#\}", "", str(processor.chat_template or ""), flags=re.DOTALL)  # without comments
    written = next((name for mark, name in MARKS.items() if mark in template), None)
    if own := getattr(tokenizer_of(processor), "response_template", None):
        FORMATS["response_template"], written = own, "response_template"
    if function_path(wanted):
        load_function(wanted)
        return wanted
    known_name("--tool_parser (or file.py:function)", wanted, ["auto", *FORMATS])
    if wanted == "auto" and (written or "tools" not in template):
        return written or "hermes"  # of which the system message says how to call
    if wanted == "auto" and has_own:
        return "tags"
    if wanted == "auto":
        raise ConfigError("--tool_parser=auto: an unknown format of calls; give my_calls.py:read, or tags.")
    if wanted != "tags" and written not in (None, wanted):
        raise ConfigError(f"--tool_parser={wanted}: the chat template writes {written}; leave it out, or take tags.")
    return wanted
