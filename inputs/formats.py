"""Formats of tool calls: how a model is told to write them, and how its text is parsed.

    --tool_parser auto                   the format of the model's chat template
    --tool_parser hermes                 a name in FORMATS
    --tool_parser my_calls.py:read       your own: read(text, schemas) -> [{"name": ..., "arguments": {...}}, ...]

A format is a response template of transformers, or a function like `read`. `auto` takes the response template that
comes with the tokenizer or, without one, the format whose mark occurs in the chat template.
"""

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from config import ConfigError, function_path, known_name, load_function, shorten
from inputs.prompts import clean, each_text, tokenizer_of

# transformers takes seconds to import, so `read_calls` imports it.


@dataclass
class Call:
    name: str
    arguments: dict = field(default_factory=dict)
    error: str | None = None  # why it could not be read

    def as_message(self) -> dict:
        """Its form in an assistant message's `tool_calls`."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


# ---- formats --------------------------------------------------------------------------------------------------------


def call_format(content: str, open_pattern: str, close: str | list, function=None, **content_args) -> dict:
    """A response template that finds calls and skips all other text, in linear time. function: where a call's name and
    arguments come from; {name} is the group `name` of open_pattern. content_args: options of transformers' parser of
    the content."""
    transform = {"type": "function", "function": function or {"name": "{name}", "arguments": "{content}"}}
    delimiters = {"open_pattern": open_pattern, "close": close}
    calls = {"repeats": True, "content": content, "content_args": content_args, "transform": transform} | delimiters
    return {"start_anchor": "\0", "fields": {"tool_calls": calls}}


def parse_tags(text: str, schemas: list[dict]) -> list[dict]:
    """<search>who wrote it</search>: the text is the tool's first argument, read as JSON unless its type is string."""
    functions = {schema["function"]["name"]: schema["function"]["parameters"] for schema in schemas}
    calls, names = [], "|".join(map(re.escape, functions)) or "(?!)"
    for name, body in re.findall(rf"<({names})>(.*?)(?:</\1>|$)", text, re.DOTALL):
        arguments = {}
        for first, schema in list(functions[name].get("properties", {}).items())[:1]:
            arguments[first] = body.strip()
            if schema.get("type") != "string":
                with contextlib.suppress(ValueError):
                    arguments[first] = json.loads(body)
        calls.append({"name": name, "arguments": arguments})
    return calls


# allow_non_json: a call that is not JSON gets an error, and the others of the turn are still read.
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
# Texts in a chat template that reveal its format; the first match counts.
MARKS = {"<arg_key>": "glm45", "<function=": "xml", "<|tool_call>call:": "gemma4", "<|channel|>commentary": "harmony"}
MARKS |= {"<tool_call>": "hermes", '"parameters": ': "llama3_json"}

# (begin, end) of thinking; the second is gpt-oss's.
THINKING = (("<think>", "</think>"), ("<|channel|>analysis<|message|>", "<|end|>"))


def outside_thinking(text: str) -> str:
    """A turn without its thinking, in which a model may plan calls and answers that are none yet. If the prompt has
    opened the thinking, all text before the first </think> goes, too. Thinking without an end is not recognised."""
    (begin, end), *_ = THINKING
    if end in text and begin not in (first := text.partition(end)[0]):
        text = text[len(first) :]
    for begin, end in THINKING:
        *parts, last = text.split(end)
        text = end.join([*(part.partition(begin)[0] for part in parts), last])
    return text


def read_calls(text: str, schemas: list[dict], parser: str) -> list[Call]:
    """The calls of a turn, outside its thinking. A call that cannot be read has an `error`, which the model sees and
    the metrics count.

    schemas: of the tools in the prompt, in the form of chat templates and OpenAI's API. parser: a name in FORMATS, or
    file.py:function.
    """
    from transformers.utils.chat_parsing import parse_response

    text = outside_thinking(text)
    reader = FORMATS[parser] if parser in FORMATS else load_function(parser)
    try:
        if callable(reader):
            calls = reader(text, schemas)
        else:
            calls = parse_response(text, reader, prefix="", tools=schemas).get("tool_calls", [])
        return [as_call(call) for call in calls]
    except Exception as error:  # from a user's parser, or transformers' parser of what a model wrote
        return [Call("", error=f"a call that cannot be read ({type(error).__name__}): {shorten(text, 200)}")]


def as_call(call: dict) -> Call:
    """The Call of an entry of `tool_calls`, with or without {"function": ...} around it; arguments may be JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else call
    try:
        name, arguments = function["name"], function.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        json.dumps(arguments, allow_nan=False)
        if isinstance(name, str) and isinstance(arguments, dict):
            return Call(*each_text([name, arguments], clean))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    form = '{"name": "...", "arguments": {...}} in JSON'
    return Call("", error=f"a call must be {form}, not {shorten(function)}")


# ---- instructions ----------------------------------------------------------------------------------------------------

HOW_TO_CALL = {
    "hermes": 'To call one, write <tool_call>{"name": "...", "arguments": {...}}</tool_call>.',
    "xml": "To call one, write <function=NAME><parameter=ARGUMENT>value</parameter></function>.",
    "tags": "To call one, write its tags with the argument between them.",
}  # other formats: their chat templates say it


def instructions(schemas: list[dict], parser: str) -> str:
    """The text of a system message about the tools, for chat templates that do not write it themselves."""
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
    """--tool_parser; hermes for an `auto` that no chat template has settled."""
    return "hermes" if cfg.tool_parser == "auto" else cfg.tool_parser


def parser_for(choice: str, processor, env_tools: bool = False) -> str:
    """The parser for --tool_parser `choice`. env_tools: any tools are those of an environment or agent."""
    template = re.sub(r"\{#.*?#\}", "", str(processor.chat_template or ""), flags=re.DOTALL)  # without comments
    default = next((name for mark, name in MARKS.items() if mark in template), None)
    if response_template := getattr(tokenizer_of(processor), "response_template", None):
        FORMATS["response_template"], default = response_template, "response_template"
    if function_path(choice):
        load_function(choice)
        return choice
    known_name("--tool_parser (or file.py:function)", choice, ["auto", *FORMATS])
    if choice == "auto" and (default or "tools" not in template):
        return default or "hermes"  # the system message explains it
    if choice == "auto" and env_tools:
        return "tags"
    if choice == "auto":
        raise ConfigError("--tool_parser=auto: an unknown format of calls; give my_calls.py:read, or tags.")
    if choice != "tags" and default not in (None, choice):
        raise ConfigError(f"--tool_parser={choice}: the chat template writes {default}; leave it out, or take tags.")
    return choice
