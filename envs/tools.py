"""Tools that a model can call between its turns: python functions and MCP servers.

    --tools calculator my_tools.py:weather      # names in TOOLS, or functions or Tools in a file
    --mcp_config servers.json                   # {"mcpServers": {"files": {"command": "...", "args": []}, ...}}

Any function with type hints and a Google-style docstring is a tool; it may be async. So is a functools.partial of one,
and an object with __call__. The model sees what a tool returns: text, an image, or a list of message parts. It also
sees what a tool raises, and why a call could not be read, so that it may try again; both are counted. Columns of a data
set may restrict tools by row: `tools` to some names; `tools_kwargs` ({tool: {argument: value}}) fixes arguments, which
the model neither sees nor passes.
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
from collections.abc import Callable
from dataclasses import dataclass, replace

from PIL import Image

from config import ConfigError, function_path, known_name, load_function, shorten
from inputs.formats import Call
from inputs.parts import PartError, parts_of
from inputs.prompts import clean, each_text
from safety.calls import run_limited
from safety.results import warn_once
from safety.sandbox import run_python

# transformers takes seconds to import, and only tools need pydantic: both are imported where a tool is made.


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    parameters: dict  # JSON schema of an object
    call: Callable  # by keyword; plain or async
    timeout: float | None = None  # seconds a call may take; None: --tool_timeout
    check: Callable[[dict], dict] = dict  # converts arguments for the function; ValueError if they do not fit

    def schema(self) -> dict:
        """The form of chat templates and OpenAI's API."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


# ---- where tools come from ------------------------------------------------------------------------------------------


def from_function(function: Callable) -> Tool:
    """A function, a functools.partial of one, or an object with __call__ as a tool. transformers makes its schema, and
    pydantic converts a call's arguments to the types of the hints. ConfigError if hints or descriptions are missing."""
    from typing import NotRequired

    from pydantic import ConfigDict, TypeAdapter, with_config
    from pydantic.errors import PydanticInvalidForJsonSchema
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )
    from typing_extensions import TypedDict

    if isinstance(function, functools.partial):
        full_schema = from_function(function.func)
        fixed = inspect.signature(function.func).bind_partial(*function.args, **function.keywords)
        return tool_without(full_schema, fixed.arguments)
    routine = function if inspect.isroutine(function) else function.__call__
    name = getattr(function, "__name__", type(function).__name__)
    try:
        arguments = inspect.signature(routine).parameters.values()
        schema = get_json_schema(routine)["function"]
        hints = typing.get_type_hints(routine)
    except (DocstringParsingException, TypeHintParsingException, NameError, TypeError, ValueError) as error:
        missing = "a type hint and a line in Args: for each argument"
        raise ConfigError(f"the tool {name!r} needs {missing}: {error}") from None
    typed_arguments = {a.name: hints[a.name] if a.default is a.empty else NotRequired[hints[a.name]] for a in arguments}
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    adapter = TypeAdapter(with_config(config)(TypedDict("given", typed_arguments)))
    parameters = schema["parameters"]
    with contextlib.suppress(PydanticInvalidForJsonSchema):  # a type that only `tools_kwargs` can pass
        full_schema = adapter.json_schema()
        for key, prop in full_schema.get("properties", {}).items():
            if re.search(r'"(\$ref|format)":', json.dumps(prop)):  # transformers says less of classes and dates
                described = parameters["properties"][key]["description"]
                parameters["properties"][key] = prop | {"description": described}
        parameters |= {"$defs": full_schema["$defs"]} if "$defs" in full_schema else {}
    return Tool(name, schema["description"], parameters, function, check=adapter.validate_python)


def named_tools(cfg) -> list[Tool]:
    """The tools of cfg.tools."""
    tools = []
    for spec in cfg.tools:
        if not function_path(spec):
            known_name("--tools (names, or path/to/file.py:function)", spec, TOOLS)
        tool = load_function(spec) if function_path(spec) else TOOLS[spec]
        if inspect.isclass(tool) or not (callable(tool) or isinstance(tool, Tool)):
            allowed = "a function, functools.partial, an object with __call__, or envs.tools.Tool"
            raise ConfigError(f"--tools {spec} is {shorten(tool)}; give {allowed}.")
        tools.append(tool if isinstance(tool, Tool) else from_function(tool))
    return tools


def tools_of(row: dict, tools: dict[str, Tool]) -> dict[str, Tool]:
    """The tools that the row's column `tools` allows, without the arguments that its `tools_kwargs` fixes."""
    names, hidden = row.get("tools"), {n: fixed for n, fixed in (row.get("tools_kwargs") or {}).items() if fixed}
    for name in [*(names or ()), *hidden]:
        known_name("column `tools` or `tools_kwargs`", name, tools)
    for name, fixed in hidden.items():
        for key in fixed:
            known_name(f"column `tools_kwargs`, {name}", key, tools[name].parameters.get("properties", {}))
    allowed = tools if names is None else {name: tools[name] for name in names}
    return {name: tool_without(tool, hidden[name]) if hidden.get(name) else tool for name, tool in allowed.items()}


def tool_without(tool: Tool, fixed: dict) -> Tool:
    """The tool with some arguments fixed, and removed from its schema."""
    properties = {key: value for key, value in tool.parameters.get("properties", {}).items() if key not in fixed}
    required = [key for key in tool.parameters.get("required", []) if key not in fixed]
    call = functools.partial(tool.call, **fixed)  # run_limited still sees its own_process
    call.executes_code = getattr(tool.call, "executes_code", False)

    def check(arguments: dict) -> dict:
        if overridden := fixed.keys() & arguments.keys():
            raise ValueError(f"{min(overridden)} is not yours to give")
        return {key: value for key, value in tool.check(fixed | arguments).items() if key not in fixed}

    parameters = tool.parameters | {"properties": properties, "required": required}
    return replace(tool, parameters=parameters, call=call, check=check)


# ---- calling --------------------------------------------------------------------------------------------------------

MOST_CALLS = 64  # at the same time on each rank; environments have no such limit
CALLS_PER_TURN = 16  # further calls are not run, and the model reads so


@functools.lru_cache(maxsize=8)
def slots(loop: asyncio.AbstractEventLoop, purpose: str, limit: int) -> asyncio.Semaphore:
    """The semaphore of an event loop, as one belongs to a single loop: each training step has its own, and so has an
    evaluation beside it."""
    return asyncio.Semaphore(limit)


async def run_calls(
    calls: list[Call], tools: dict[str, Tool], cfg, in_order: bool = False
) -> tuple[list[dict], list[dict]]:
    """(a tool message per call, in order; an event per call: name, seconds, failed, the name as the model wrote it,
    arguments, result). Each call has its time limit. All run at the same time, or, in_order, one after another, for
    methods that change the state of one object."""
    limit = CALLS_PER_TURN
    if len(calls) > limit:
        fault = f"this turn made {len(calls)} calls; only the first {limit} were run"
        calls = [*calls[:limit], replace(calls[limit], error=fault)]
    if in_order:
        events = [await run_call(call, tools, cfg) for call in calls]
    else:
        events = await asyncio.gather(*(run_call(call, tools, cfg) for call in calls))
    return [{"role": "tool", "name": e["written"], "content": e["result"]} for e in events], events


async def run_call(call: Call, tools: dict[str, Tool], cfg) -> dict:
    start, tool = time.perf_counter(), tools.get(call.name)
    content, failed = await call_result(call, tools, cfg)
    # Names that a model makes up must not become ever more metrics.
    name = call.name if tool else "unknown" if call.name else "unreadable"
    written = f"{call.name} {json.dumps(call.arguments, sort_keys=True, default=str)}"
    event = {"name": name, "call": written, "seconds": time.perf_counter() - start, "failed": int(failed)}
    return event | {"written": call.name, "arguments": call.arguments, "result": cut(content, cfg.max_tool_result)}


async def call_result(call: Call, tools: dict[str, Tool], cfg) -> tuple[object, bool]:
    """(the tool's result or an error message, whether the call failed)"""
    if call.error:
        return f"Error: {call.error}", True
    if call.name not in tools:
        return f"Error: there is no tool {call.name!r}; there are {', '.join(tools) or 'none'}", True
    tool = tools[call.name]
    try:
        arguments = tool.check(call.arguments)
    except ValueError as error:  # pydantic's lists what is wrong
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in getattr(error, "errors", list)()]
        return f"Error: {call.name}: {'; '.join(faults) or error}", True
    seconds = tool.timeout or cfg.tool_timeout
    async with slots(asyncio.get_running_loop(), "tools", MOST_CALLS):
        outcome = await run_limited(tool.call, arguments, seconds, as_content)
    if outcome is None:
        warn_once(f"tool {tool.name!r} took over --tool_timeout={seconds:g} s; the model reads an error.")
        return f"Error: {call.name} gave no answer within {seconds:g} s", True
    content, error = outcome
    return (content, False) if error is None else (clean(f"Error: {type(error).__name__}: {error}"), True)


def as_content(result):
    """A tool's result as the content of a message. Text stays; message parts get their usual form; Pillow images, alone
    or in a list with texts and parts, become parts. Anything else becomes JSON if it can, else its repr."""
    if isinstance(result, str):
        return clean(result)
    items = result if isinstance(result, list) else [result]
    are_parts = [isinstance(item, Image.Image) or is_part(item) for item in items]
    if any(are_parts) and all(part or isinstance(item, str) for part, item in zip(are_parts, items, strict=True)):
        parts = parts_of([{"type": "image", "image": e} if isinstance(e, Image.Image) else e for e in items])
        return each_text(parts, clean)
    try:
        return clean(json.dumps(result, default=as_json, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):  # keys that are not text, a value that contains itself
        return clean(shorten(result, 10_000))


def as_json(value):
    """Numbers and small arrays of numpy and torch as numbers and lists; anything else as its str."""
    return value.tolist() if hasattr(value, "tolist") and value.nbytes <= 1 << 18 else str(value)


def is_part(value) -> bool:
    """Whether it is a text or image part of a message (inputs/parts.py), and not just any dict."""
    try:
        return isinstance(value, dict) and parts_of([value]) != [{"type": "image"}]  # that one has no image to show
    except PartError:
        return False


def cut(content, limit: int):
    """The text, or the parts, with each text cut to `limit` characters."""
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
    "python": python,  # in the sandbox of safety/sandbox.py
}
