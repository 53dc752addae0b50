"""What a model can call between its turns: python functions, MCP servers, other models, other agents.

    --tools calculator my_tools.py:weather      # names in TOOLS, or a function, or a Tool, of a file
    --mcp_config servers.json                   # {"mcpServers": {"files": {"command": "...", "args": []}, ...}}

A function with type hints and a Google-style docstring is a tool as it is; it may be async. So are a functools.partial
of one, an object with __call__, and tool objects of smolagents and langchain. What a tool returns is shown to the
model: text, an image, or a list of message parts. What it raises is shown, too, and counted, as is a call
that cannot be read: the model may try again. Columns of a data set may narrow this down by row: `tools` to some names,
`tools_kwargs` ({tool: {argument: value}}) to arguments that the model neither sees nor gives.
"""

import ast
import asyncio
import contextlib
import functools
import inspect
import json
import math
import operator
import re
import time
import typing
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from PIL import Image

from cli import shorten
from config import ConfigError, known_name
from inputs.parts import PartError, parts_of
from inputs.pictures import data_url
from inputs.special_tokens import clean, each_text
from plugins import function_path, load_function
from safety import http
from safety.calls import UnusableResult, run_limited, time_limit, to_thread, unread, warn_once
from safety.sandbox import run_python
from safety.storable import text_of

# transformers takes seconds, jsonschema and pydantic only tools need: they are imported where a tool is made or called.


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    parameters: dict  # JSON schema of an object
    call: Callable  # by keyword; plain or async
    concurrency: int | None = None  # most calls at the same time, beside --tool_concurrency for all tools together
    rate: float | None = None  # most calls a second
    timeout: float | None = None  # seconds a call may take; None: --tool_timeout
    stateful: bool = False  # of an isolated MCP server (mcp_tools.OwnTool), which each trajectory has for itself
    cacheable: bool = True  # equal calls have equal results, so that --tool_cache may keep them

    def schema(self) -> dict:
        """As chat templates and OpenAI's API want it."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


@dataclass
class Call:
    name: str
    arguments: dict = field(default_factory=dict)
    error: str | None = None  # why it could not be read

    def as_message(self) -> dict:
        """As it stands in an assistant message's `tool_calls`."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


# ---- what a model writes: (text, tools) -> calls --------------------------------------------------------------------
# In linear time, whatever it is: they run on the event loop of all trajectories. So what has begun and has no end is
# read to the end of the text, and not once for every place where it might begin.


def parse_hermes(text: str, tools: dict[str, Tool]) -> list[Call]:
    """<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, as Hermes, Qwen2.5 and Qwen3 write it."""
    return [read_json(part.group(1)) for part in re.finditer(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL)]


def read_json(text: str) -> Call:
    try:
        found = json_of(text)
        name, arguments = found["name"], found.get("arguments", {})
        arguments = json_of(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # the last: a thousand open brackets
        return Call("", error='a call must be {"name": "...", "arguments": {...}} in JSON, not ' + shorten(text, 200))
    return Call(name, arguments)


def json_of(text: str):
    """What a text is JSON of, its texts valid Unicode: JSON may spell half an emoji. ValueError for what is none, such
    as NaN; RecursionError for a thousand open brackets."""
    return each_text(json.loads(text, parse_float=finite, parse_constant=finite), clean)


def finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number that JSON has")
    return number


def parse_xml(text: str, tools: dict[str, Tool]) -> list[Call]:
    """<function=add><parameter=a>1</parameter></function>, as Qwen3-Coder writes it. Values that are JSON of the type
    that the schema names become it; others stay text."""
    calls = []
    for name, body, end in re.findall(r"<function=([^<>\n]*)>(.*?)(</function>|$)", text, re.DOTALL):
        schema = tools[name].parameters.get("properties", {}) if name in tools else {}
        found = re.findall(r"<parameter=([^<>\n]*)>(.*?)(</parameter>|$)", body, re.DOTALL)
        arguments = {key: typed(value.strip("\n"), schema.get(key, {})) for key, value, closed in found if closed}
        error = None if end else "a call must end in </function>"
        calls.append(Call(name, arguments, error))
    return calls


def typed(value: str, schema: dict | bool):
    """The value that a text is JSON of, where the schema of its argument wants another than text."""
    schema = schema if isinstance(schema, dict) else {}
    parts = (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ()))
    kinds = [part.get("type") for part in parts if isinstance(part, dict)]
    if not any(kinds) or any("string" in kind for kind in kinds if kind):  # one, or a list of them
        return value
    if value in (of_python := {"True": True, "False": False, "None": None}):  # some templates show them so
        return of_python[value]
    try:
        return json_of(value)
    except (ValueError, RecursionError):  # the former of a number with thousands of digits, too
        return value


def parse_tags(text: str, tools: dict[str, Tool]) -> list[Call]:
    """<search>who wrote it</search>: the text is the tool's first argument."""
    calls = []
    for name, body, end in re.findall(
        rf"<({'|'.join(map(re.escape, tools)) or '(?!)'})>(.*?)(</\1>|$)", text, re.DOTALL
    ):
        first = next(iter(tools[name].parameters.get("properties", {})), None)
        arguments = {first: typed(body.strip(), tools[name].parameters["properties"][first])} if first else {}
        calls.append(Call(name, arguments, None if end else f"a call must end in </{name}>"))
    return calls


def parse_harmony(text: str, tools: dict[str, Tool]) -> list[Call]:
    """to=functions.add ... <|message|>{"a": 1}<|call|>, as gpt-oss writes it: its channel stands in between."""
    # A name has at most 200 letters, and between it and the message stands no other: the time would be cubic.
    between, end, calls = r"(?:(?!to=functions\.|<\|end\|>).)*?<\|message\|>", r"(?:<\|call\|>|<\|end\|>|$)", []
    for name, body in re.findall(rf"to=functions\.([^\s<]{{1,200}}+){between}(.*?){end}", text, re.DOTALL):
        whole = read_json(json.dumps({"name": clean(name), "arguments": clean(body)}))
        error = "a call's message must be a JSON object, not " + shorten(body, 200) if whole.error else None
        calls.append(replace(whole, name=name, error=error))
    return calls


# Those of vLLM are entered when one is chosen: see formats.py.
PARSERS: dict[str, Callable[[str, dict[str, Tool]], list[Call]]] = {
    "hermes": parse_hermes,
    "xml": parse_xml,
    "harmony": parse_harmony,
    "tags": parse_tags,
}

OPENERS: dict[str, str] = {}  # what calls begin with, by parser, where a chat template has shown it (formats.py)


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


def read_calls(text: str, tools: dict[str, Tool], parser: str) -> list[Call]:
    """The calls of a turn, outside its thinking. One that begins as calls do, and that the parser does not read, is a
    call with an error: the model is told, and it is counted."""
    text = outside_thinking(text)
    calls, opener = PARSERS[parser](text, tools), OPENERS.get(parser)
    if not calls and opener and opener in text:
        start = text.index(opener)
        return [Call("", error=f"this begins as a call, and cannot be read as one: {shorten(text[start:], 200)}")]
    return calls


def parser_of(cfg) -> str:
    """--tool_parser, or for an `auto` that no chat template has settled hermes."""
    return "hermes" if cfg.tool_parser == "auto" else cfg.tool_parser


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


# ---- where tools come from ------------------------------------------------------------------------------------------


def as_tool(given, where: str) -> Tool:
    """What a user names as a tool: a Tool, whatever can be called, or an object that has what tools of smolagents
    (`inputs`, `forward`) or of langchain (`args`, `invoke`) have. ConfigError for anything else."""
    if isinstance(given, Tool):
        return given
    if inspect.isclass(given):
        raise ConfigError(f"{where} is a class: make an object of it in the file, and name that.")
    try:
        if callable(getattr(given, "forward", None)) and isinstance(getattr(given, "inputs", None), dict):
            return from_inputs(given)
        if callable(getattr(given, "invoke", None)) and hasattr(given, "args"):
            return from_invoked(given)
    except ConfigError:
        raise
    except (AttributeError, TypeError, ValueError) as error:  # what it has is not what those libraries give
        raise ConfigError(f"{where}: {type(given).__name__} cannot be a tool ({error!r:.300}). {WRAP_IT}") from error
    if not callable(given):
        raise ConfigError(f"{where} is {shorten(given)}. {WRAP_IT}")
    return from_function(given)


WRAP_IT = (
    "Allowed are functions, functools.partial, objects with __call__, tool objects of smolagents and langchain, and "
    "envs.tools.Tool: call it in a function of your own, with type hints and a docstring."
)


def from_inputs(given) -> Tool:
    """A tool object as of smolagents; called as a whole, so that its setup() runs."""
    kinds = {name: about.get("type") for name, about in given.inputs.items()}
    if sent := [f"{name} ({kind})" for name, kind in kinds.items() if kind in ("image", "audio")]:
        raise ConfigError(f"the tool {given.name!r} takes {', '.join(sent)}, which no call can give. {WRAP_IT}")
    properties = {
        name: {key: value for key, value in about.items() if (key, value) != ("type", "any")}
        for name, about in given.inputs.items()
    }
    required = [name for name, about in given.inputs.items() if not about.get("nullable")]
    parameters = {"type": "object", "properties": properties, "required": required}
    return Tool(given.name, given.description, parameters, given)


def from_invoked(given) -> Tool:
    """A tool object as of langchain; called by `ainvoke` if it is async alone."""
    schema = given.tool_call_schema
    schema = schema if isinstance(schema, dict) else schema.model_json_schema()
    if schema.get("properties", {}).keys() != given.args.keys():  # of a single text: the schema is of something else
        schema = {"properties": given.args, "required": list(given.args)}
    needed = getattr(given.args_schema, "model_fields", {}).items()
    if unseen := [name for name, about in needed if about.is_required() and name not in given.args]:
        raise ConfigError(f"the tool {given.name!r} needs {', '.join(unseen)}, which the model may not give. {WRAP_IT}")
    kept = {key: schema[key] for key in ("properties", "required", "$defs") if key in schema}

    async def ainvoke(**arguments):
        return await given.ainvoke(arguments)

    def invoke(**arguments):
        return given.invoke(arguments)

    call = ainvoke if getattr(given, "coroutine", None) and getattr(given, "func", None) is None else invoke
    call.__qualname__, call.executes_code = given.name, getattr(given, "executes_code", False)
    return Tool(given.name, given.description, {"type": "object", "properties": {}} | kept, call)


def from_function(function: Callable) -> Tool:
    """A function, a functools.partial of one, or an object with __call__ as a tool; ConfigError where signature and
    docstring do not say enough."""
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    if isinstance(function, functools.partial):
        return from_partial(function)
    routine = function if inspect.isroutine(function) else function.__call__
    name = getattr(function, "__name__", type(function).__name__)
    try:
        arguments = inspect.signature(routine).parameters.values()
    except (ValueError, TypeError) as error:  # some functions written in C
        raise ConfigError(f"the tool {name!r} does not say what it takes ({error}). {WRAP_IT}") from None
    for argument in arguments:
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            what = f"*{argument.name}" if argument.kind is argument.VAR_POSITIONAL else f"**{argument.name}"
            raise ConfigError(
                f"the tool {name!r} takes {what}, and calls name every argument; make it a list or a dict."
            )
        if argument.kind is argument.POSITIONAL_ONLY:
            raise ConfigError(
                f"the tool {name!r} takes {argument.name} by position alone, and calls name it. {WRAP_IT}"
            )
    try:
        schema = get_json_schema(routine)["function"]
        hints = typing.get_type_hints(routine)
    except (DocstringParsingException, TypeHintParsingException, NameError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the tool {name!r} needs a type hint on every argument, and a docstring with a line for each "
            f"under 'Args:' ({error})"
        ) from None
    tool = Tool(name, schema["description"], schema["parameters"], function)
    objects = {key: hint for key, hint in hints.items() if key != "return" and not is_json(hint)}
    return with_objects(tool, objects) if objects else tool


def from_partial(partial: functools.partial) -> Tool:
    """The tool of its function without the arguments that it fixes."""
    whole = from_function(partial.func)
    try:
        fixed = inspect.signature(partial.func).bind_partial(*partial.args, **partial.keywords).arguments
    except TypeError as error:
        raise ConfigError(f"the tool {whole.name!r} is a functools.partial that cannot be called: {error}.") from None
    tool = without(whole, fixed)
    tool.call.executes_code = getattr(whole.call, "executes_code", False)
    return tool


def is_json(hint) -> bool:
    """Whether values of the type are what JSON gives as it is."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return True
    return all(map(is_json, parts)) if parts else hint in (int, float, str, bool, type(None), list, tuple, dict, Any)


def with_objects(tool: Tool, hints: dict[str, type]) -> Tool:
    """The tool with the schemas of arguments that are pydantic models, dataclasses, enums, dates or lists of such, and
    with the values that calls give made into them."""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    parameters, made, function = tool.parameters, {}, tool.call
    for name, hint in hints.items():
        try:
            schema = TypeAdapter(hint).json_schema()
        except PydanticUserError:
            kind = getattr(hint, "__name__", hint)
            fault = f"The argument {name} of the tool {tool.name!r} is a {kind}, which no call can give"
            warn_once(f"{fault}: set it by the column `tools_kwargs`, or take text, numbers, lists or dicts.")
            continue
        made[name] = TypeAdapter(hint)
        about = {"description": parameters["properties"][name].get("description", "")}
        definitions = parameters.get("$defs", {}) | schema.pop("$defs", {})
        parameters = parameters | {"properties": parameters["properties"] | {name: schema | about}}
        parameters |= {"$defs": definitions} if definitions else {}
    if made and getattr(function, "own_process", False):
        raise ConfigError(f"the tool {tool.name!r} has own_process, and takes {min(made)} as an object: take a dict.")

    @functools.wraps(function, updated=())
    def call(**arguments):
        given = {name: made[name].validate_python(v) if name in made else v for name, v in arguments.items()}
        return function(**given)

    call.executes_code = getattr(function, "executes_code", False)
    return replace(tool, parameters=parameters, call=call) if made else tool


def named_tools(cfg) -> list[Tool]:
    """The tools of cfg.tools."""
    found = []
    for given in cfg.tools:
        if given.endswith(".py"):
            raise ConfigError(f"--tools {given}: which function of it? Give {given}:NAME.")
        if not function_path(given):
            known_name("--tools (names, or path/to/file.py:function)", given, TOOLS)
        tool = load_function(given, also=object) if function_path(given) else TOOLS[given]
        found.append(as_tool(tool, f"--tools {given}"))
    return found


def tools_of(row: dict, tools: dict[str, Tool]) -> dict[str, Tool]:
    """The tools that the row's column `tools` allows, without the arguments that its `tools_kwargs` sets."""
    names, hidden = row.get("tools"), row.get("tools_kwargs") or {}
    if isinstance(names, str):
        raise ConfigError(f"column `tools`: {names!r} is text; give a list of names, as [{names!r}].")
    if not isinstance(hidden, dict):
        raise ConfigError(f"column `tools_kwargs`: {hidden!r:.200} is no dict; give {{tool: {{argument: value}}}}.")
    # parquet and jsonl pad what a row does not have with None
    hidden = {name: {k: v for k, v in (fixed or {}).items() if v is not None} for name, fixed in hidden.items()}
    for name in [*(names or ()), *(name for name, fixed in hidden.items() if fixed)]:
        known_name("column `tools` or `tools_kwargs`", name, tools)
    for name, fixed in hidden.items():
        for key in fixed:
            known_name(f"column `tools_kwargs`, {name}", key, tools[name].parameters.get("properties", {}))
    allowed = tools if names is None else {name: tools[name] for name in names}
    return {name: without(tool, hidden[name]) if hidden.get(name) else tool for name, tool in allowed.items()}


def without(tool: Tool, fixed: dict) -> Tool:
    """The tool with some arguments fixed, and out of its schema."""
    properties = {key: value for key, value in tool.parameters.get("properties", {}).items() if key not in fixed}
    required = [key for key in tool.parameters.get("required", []) if key not in fixed]
    return replace(
        tool,
        parameters=tool.parameters | {"properties": properties, "required": required},
        call=functools.partial(tool.call, **fixed),  # which run_limited sees through: own_process stays
    )


def chat(url: str, model: str, messages: list[dict], token: str = "", **options) -> str:
    """What a model behind an OpenAI-compatible server says next. http.NoAnswer where it says nothing in the time that
    the tool, environment or reward which asks may take (600 s elsewhere).  url: up to and with /v1"""
    body = {"model": model, "messages": [for_openai(message) for message in messages]} | options
    where = http.route(url, "/chat/completions")
    found = http.ask("POST", where, min(time_limit(), 600), body, token)
    try:
        text = found["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        raise http.NoAnswer(f"{http.origin(url)} answered without a text in choices[0].message.content")
    return text


def for_openai(message: dict) -> dict:
    """The message with its images, if it has any, as OpenAI's servers take them. They never name files here: a path in
    what an environment says may be somebody else's idea."""
    if not isinstance(message.get("content"), (list, tuple)):
        return message

    def sent(part: dict) -> dict:
        url = data_url(part["image"], local_files=False) if "image" in part else None
        return {"type": "image_url", "image_url": {"url": url}} if url else part

    return message | {"content": [sent(part) for part in parts_of(message["content"])]}


def model_tool(name: str, description: str, url: str, model: str, token: str = "", **options) -> Tool:
    """Another model as a tool: one question, one answer."""

    def ask(question: str) -> str:
        return chat(url, model, [{"role": "user", "content": question}], token, **options)

    return Tool(name, description, QUESTION, ask)


def agent_tool(
    name: str, description: str, tools: list[Tool], cfg, url: str, model: str, token: str = "", **options
) -> Tool:
    """An agent as a tool: another model, which answers a question with tools of its own - a rollout in the rollout.

    cfg: the limits of its calls, how it writes them (tool_parser), and max_turns, after which its last words count.
    """
    toolbox = Toolbox({tool.name: tool for tool in tools}, cfg)
    # Told in our words: what the chat template of the model that is trained writes does not matter to this one.
    parser = cfg.tool_parser if cfg.tool_parser in HOW_TO_CALL else "hermes"
    told = instructions([tool.schema() for tool in tools], parser)

    async def answer(question: str) -> str:
        messages, said = [{"role": "system", "content": told}, {"role": "user", "content": question}], ""
        for _ in range(cfg.max_turns):
            said = await to_thread(chat, url, model, messages, token, **options)
            if not (calls := PARSERS[parser](outside_thinking(said), toolbox.tools)):
                break
            answers, _ = await toolbox.run(calls, toolbox.tools)
            # As a user's message: the role `tool` wants ids of calls that the server has read, and we read them.
            messages += [{"role": "assistant", "content": said}, *(a | {"role": "user"} for a in answers)]
        return said

    answer.executes_code = any(getattr(tool.call, "executes_code", False) for tool in tools)
    return Tool(name, description, QUESTION, answer)


KEPT_RESULTS = 4096  # of --tool_cache
QUESTION = {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]}


# ---- calling --------------------------------------------------------------------------------------------------------


class Toolbox:
    """Runs calls: all at the same time, as far as the limits let them, each within its time; of one turn at most
    cfg.max_calls_per_turn.

    Results are kept from step to step under cfg.tool_cache. Used from one event loop after another: its semaphores
    belong to the running one.
    """

    def __init__(self, tools: dict[str, Tool], cfg):
        self.tools, self.cfg = tools, cfg
        self._results: dict[tuple, object] = {}
        self._instructions: dict[tuple, str] = {}
        # What belongs to an event loop; train_async.py evaluates on another one than it samples on.
        self._loops: dict[asyncio.AbstractEventLoop, SimpleNamespace] = {}

    def instructions(self, tools: dict[str, Tool], parser: str) -> str:
        """How to call these of its tools. Written once for all rows with the same tools and arguments."""
        key = (parser, *((name, *tool.parameters.get("properties", {})) for name, tool in tools.items()))
        if key not in self._instructions:
            schemas = [tool.schema() for tool in tools.values()]
            self._instructions[key] = instructions(schemas, parser) if schemas else ""
        return self._instructions[key]

    def _semaphores(self, tool: Tool) -> list[asyncio.Semaphore]:
        limits = {None: self.cfg.tool_concurrency} | ({tool.name: tool.concurrency} if tool.concurrency else {})
        known = self._here.limits
        return [known.setdefault(name, asyncio.Semaphore(limit)) for name, limit in limits.items()]

    @property
    def _here(self) -> SimpleNamespace:
        """Semaphores, next turns by rate, and locks of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            for ended in [other for other in list(self._loops) if other.is_closed()]:
                self._loops.pop(ended, None)
        locks = weakref.WeakValueDictionary()  # each is kept by who waits for it
        return self._loops.setdefault(loop, SimpleNamespace(limits={}, next={}, locks=locks))

    async def run(self, calls: list[Call], tools: dict[str, Tool]) -> tuple[list[dict], list[dict]]:
        """(a tool message a call, in the calls' order; what happened: name, seconds, failed, cached; the name as it
        was written, arguments, result)"""
        most, number = self.cfg.max_calls_per_turn, len(calls)
        if number > most:
            fault = f"this turn made {number} calls; only the first {most} were run (--max_calls_per_turn)"
            calls = [*calls[:most], replace(calls[most], error=fault)]
        results = await self._all(calls, tools)
        messages = [
            {"role": "tool", "name": call.name, "content": content}
            for call, (content, _) in zip(calls, results, strict=True)
        ]
        return messages, [event for _, event in results]

    async def _all(self, calls: list[Call], tools: dict[str, Tool]) -> list[tuple[object, dict]]:
        return await asyncio.gather(*(self._one(call, tools) for call in calls))

    async def _one(self, call: Call, tools: dict[str, Tool]) -> tuple[object, dict]:
        start, tool = time.perf_counter(), tools.get(call.name)
        key, cached = f"{call.name} {json.dumps(call.arguments, sort_keys=True, default=str)}", False
        same = key, repr(getattr(tool and tool.call, "keywords", {}))  # and what the row's `tools_kwargs` fix
        if fault := call.error or await self.fault(call, tools):
            content, failed = cut(f"Error: {fault}", self.cfg.max_tool_result), True
        elif self.cfg.tool_cache and tool.cacheable and not tool.stateful:
            async with self._here.locks.setdefault(same, asyncio.Lock()):  # of equal calls at once one runs
                known = self._results.pop(same, None)
                cached = known is not None
                content, failed = (known, False) if cached else await self._run(call, tool)
                if not failed:
                    self._results[same] = content  # behind all others: the first one was asked for longest ago
                for oldest in list(self._results)[: len(self._results) - KEPT_RESULTS]:
                    self._results.pop(oldest, None)
        else:
            content, failed = await self._run(call, tool)
        seconds = time.perf_counter() - start
        # Names that a model makes up must not become metrics without end.
        name = call.name if tool else "unknown" if call.name else "unreadable"
        event = {"name": name, "call": key, "seconds": seconds, "failed": int(failed), "cached": int(cached)}
        return content, event | {"written": call.name, "arguments": call.arguments, "result": content}

    async def _run(self, call: Call, tool: Tool) -> tuple[object, bool]:
        """(what the tool answers, or the error's text; whether it failed)"""
        seconds, limit = tool.timeout or self.cfg.tool_timeout, self.cfg.max_tool_result
        async with contextlib.AsyncExitStack() as held:
            await self._take_turn(tool, held)
            outcome = await run_limited(tool.call, call.arguments, seconds)
            if outcome is not None and outcome[1] is None:  # made text in a thread: the loop is everybody's
                outcome = await run_limited(functools.partial(readable, outcome[0], limit), {}, seconds, unread)
        if outcome is None:
            warn_once(f"tool {tool.name!r} took over --tool_timeout={seconds:g} s; the model reads an error.")
            return f"Error: {call.name} gave no answer within {seconds:g} s", True
        content, error = outcome
        if error is None:
            return content, False
        if isinstance(error, PartError):
            fault = f"{call.name} gave what cannot be shown: "
        else:
            fault = f"{call.name} " if isinstance(error, UnusableResult) else f"{type(error).__name__}: "
        return cut(clean(f"Error: {fault}{text_of(error)}"), limit), True

    async def _take_turn(self, tool: Tool, held: contextlib.AsyncExitStack) -> None:
        """Wait until the tool may be called. What it waits for itself comes first: nothing that waits for that must
        take another tool's place."""
        everyone, *own = self._semaphores(tool)
        for semaphore in own:
            await held.enter_async_context(semaphore)
        if not tool.rate:
            await held.enter_async_context(everyone)
            return
        async with self._here.locks.setdefault(tool.name, asyncio.Lock()):
            await asyncio.sleep(self._here.next.get(tool.name, 0.0) - time.monotonic())
            await held.enter_async_context(everyone)
            self._here.next[tool.name] = time.monotonic() + 1 / tool.rate

    async def fault(self, call: Call, tools: dict[str, Tool]) -> str | None:
        """What is wrong with a call's name or arguments, or None."""
        if call.name not in tools:
            return f"there is no tool {call.name!r}; there are {', '.join(tools) or 'none'}"
        tool, given = tools[call.name], call.arguments
        schema, fixed = tool.parameters, getattr(tool.call, "keywords", {})  # what the row's `tools_kwargs` fix
        known = schema.get("properties", {})
        says_of_others = any(schema.get(key, False) is not False for key in OF_OTHERS)
        if missing := [name for name in schema.get("required", []) if name not in given]:
            return f"{call.name} needs {', '.join(missing)}"
        if unknown := [name for name in given if name in fixed or not (name in known or says_of_others)]:
            return f"{call.name} takes {', '.join(known) or 'no arguments'}, not {', '.join(unknown)}"
        seconds = tool.timeout or self.cfg.tool_timeout
        outcome = await run_limited(misfit, {"arguments": given, "schema": schema}, seconds, unread)
        if outcome is None:
            return f"{call.name}: its arguments could not be checked within {seconds:g} s"
        return outcome[0] and f"{call.name}, {outcome[0]}"


# What a schema says of arguments that are not among its `properties`.
OF_OTHERS = "additionalProperties patternProperties unevaluatedProperties anyOf oneOf allOf if $ref".split()


def misfit(arguments: dict, schema: dict) -> str | None:
    """Where and why arguments do not fit a schema, or None, also where that cannot be told: an MCP server's may be no
    schema, say, and its tools check what they get themselves."""
    from jsonschema.exceptions import best_match

    validator = validator_class()(as_json_schema(schema))
    try:
        validator.check_schema(validator.schema)
        wrong = best_match(validator.iter_errors(arguments))
    except Exception:  # also of arithmetic with numbers that no float can hold, and of a schema within itself
        return None
    return wrong and ": ".join(filter(None, (".".join(map(str, wrong.absolute_path)), wrong.message)))


@functools.cache
def validator_class() -> type:
    """jsonschema's, without the keywords that search by a schema's regular expressions: on some texts one takes for
    ever, and it lets no other thread run meanwhile."""
    from jsonschema import Draft202012Validator, validators

    def unless_by_pattern(validator, additional, given, schema):
        if "patternProperties" not in schema:
            yield from Draft202012Validator.VALIDATORS["additionalProperties"](validator, additional, given, schema)

    unchecked = dict.fromkeys(("pattern", "patternProperties", "unevaluatedProperties"), lambda *_: None)
    return validators.extend(Draft202012Validator, unchecked | {"additionalProperties": unless_by_pattern})


def as_json_schema(schema):
    """With `nullable`, by which transformers says Optional to chat templates, as JSON Schema says it."""
    if isinstance(schema, list):
        return [as_json_schema(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: as_json_schema(part) for key, part in schema.items()}
    if schema.get("nullable") is not True:
        return inner
    if "type" in inner and "enum" not in inner:  # a fault says this more plainly
        kinds = inner["type"] if isinstance(inner["type"], list) else [inner["type"]]
        return inner | {"type": [*kinds, "null"]}
    return {"anyOf": [inner, {"type": "null"}]}


def readable(result, limit: int):
    """`as_content`, at most `limit` characters of it."""
    return each_text(cut(as_content(result), limit), clean)


def as_content(result):
    """What a tool returned, made plain, as the content of a message: text as it is, parts in their usual form, and
    Pillow's images, alone or in a list with texts and parts, as parts of their own; the rest as JSON as far as it has a
    form there, else as Python shows it. PartError for parts of which one cannot be shown."""
    if isinstance(result, str):
        return result
    listed = result if isinstance(result, list) else [result]
    if any(isinstance(each, Image.Image) for each in listed):
        return parts_of([{"type": "image", "image": e} if isinstance(e, Image.Image) else e for e in listed])
    if is_parts(result):
        return parts_of(result)
    try:
        # Piece by piece: json.dumps would keep the GIL, and with it everybody, until the last one.
        return "".join(json.JSONEncoder(default=as_json, ensure_ascii=False).iterencode(result))
    except (TypeError, ValueError, RecursionError):  # keys that are no text, a value within itself, thousands of levels
        return shorten(result, 10_000)


LARGEST_ARRAY = 1 << 18  # bytes


def as_json(value):
    """Numbers and arrays of numpy and torch as JSON has them, anything else as text, which is short of large arrays."""
    return value.tolist() if hasattr(value, "tolist") and value.nbytes <= LARGEST_ARRAY else str(value)


def is_parts(result) -> bool:
    """Whether a tool answered with parts of a message (inputs/parts.py), and not just with some list: every element has
    a type, and one at least can be shown. Of an image without a source there is nothing to show."""

    def can_be_shown(part) -> bool:
        try:
            (read,) = parts_of([part])
            return "text" in read or "image" in read
        except PartError:
            return False

    typed = isinstance(result, list) and all(isinstance(p, dict) and isinstance(p.get("type"), str) for p in result)
    return typed and any(map(can_be_shown, result))


def cut(content, limit: int):
    """Text, or the text parts of a message, of at most `limit` characters."""
    if isinstance(content, list):
        return [part | {"text": cut(part["text"], limit)} if part.get("type") == "text" else part for part in content]
    return content if len(content) <= limit else f"{content[:limit]}... ({len(content) - limit} more characters)"


# ---- tools ----------------------------------------------------------------------------------------------------------

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression of numbers, + - * / // % ** and brackets.

    Args:
        expression: such as "3 * (17 + 4)"
    """

    def value(node):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            base, exponent = value(node.left), value(node.right)
            if abs(exponent) * math.log2(abs(base) + 2) > 2000:  # 9 ** 9 ** 9 would take hours
                raise ValueError("the power is too large")
            return base**exponent
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.operand))
        raise ValueError("only numbers, + - * / // % ** and brackets are allowed")

    if len(expression) > 1000:
        raise ValueError("the expression is longer than 1,000 characters")
    result = value(ast.parse(expression.strip(), mode="eval").body)
    return str(int(result) if isinstance(result, float) and result.is_integer() else result)


def python(code: str) -> str:
    """Runs a python program and gives what it prints.

    Args:
        code: the whole program; nothing is kept from one call to the next
    """
    result = run_python(code)
    if result.timed_out:
        return f"{result.stdout}\nError: it took too long and was ended"
    return result.stdout + (f"\nError:\n{result.stderr[-2000:]}" if result.status else "")


python.executes_code = True

TOOLS: dict[str, Callable | Tool] = {
    "calculator": calculator,
    "python": python,  # contained as safety/sandbox.py says
}
