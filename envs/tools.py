"""What a model can call between its turns: python functions, MCP servers, other models, other agents.

    --tools calculator my_tools.py:weather      # names in TOOLS, or a function, or a Tool, of a file
    --mcp_config servers.json                   # {"mcpServers": {"files": {"command": "...", "args": []}, ...}}

A function with type hints and a Google-style docstring is a tool as it is; it may be async. What it returns is shown to
the model: text, or a list of message parts where it has images. What it raises is shown, too, and counted, as is a call
that cannot be read: the model may try again. Columns of a data set may narrow this down by row: `tools` to some names,
`tools_kwargs` ({tool: {argument: value}}) to arguments that the model neither sees nor gives.
"""

import ast
import asyncio
import functools
import inspect
import json
import math
import operator
import re
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import jsonschema
from referencing.exceptions import Unresolvable

from cli import shorten
from config import ConfigError, known_name
from inputs.special_tokens import clean, each_text
from plugins import function_path, load_function
from safety.limits import run_limited
from safety.sandbox import run_python
from safety.storable import text_of


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


def parse_hermes(text: str, tools: dict[str, Tool]) -> list[Call]:
    """<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, as Hermes, Qwen2.5 and Qwen3 write it."""
    return [read_json(part.group(1)) for part in re.finditer(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL)]


def read_json(text: str) -> Call:
    try:
        found = each_text(json.loads(text), clean)  # JSON may spell half an emoji
        name, arguments = found["name"], found.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # the last: a thousand open brackets
        return Call("", error='a call must be {"name": "...", "arguments": {...}} in JSON, not ' + shorten(text, 200))
    return Call(name, arguments)


def parse_xml(text: str, tools: dict[str, Tool]) -> list[Call]:
    """<function=add><parameter=a>1</parameter></function>, as Qwen3-Coder writes it. Values that are JSON of the type
    that the schema names become it; others stay text."""
    calls = []
    for name, body, end in re.findall(r"<function=([^>\n]*)>(.*?)(</function>|$)", text, re.DOTALL):
        schema = tools[name].parameters.get("properties", {}) if name in tools else {}
        found = re.findall(r"<parameter=([^>\n]*)>(.*?)</parameter>", body, re.DOTALL)
        arguments = {key: typed(value.strip("\n"), schema.get(key, {})) for key, value in found}
        error = None if end else "a call must end in </function>"
        calls.append(Call(name, arguments, error))
    return calls


def typed(value: str, schema: dict):
    """The value that a text is JSON of, where the schema of its argument wants another than text."""
    kinds = [part.get("type") for part in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ()))]
    if "string" in kinds or not any(kinds):
        return value
    try:
        return each_text(json.loads(value), clean)
    except (ValueError, RecursionError):  # of a number with thousands of digits, or of a thousand open brackets, too
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


PARSERS: dict[str, Callable[[str, dict[str, Tool]], list[Call]]] = {
    "hermes": parse_hermes,
    "xml": parse_xml,
    "tags": parse_tags,
}

HOW_TO_CALL = {
    "hermes": 'To call one, write <tool_call>{"name": "...", "arguments": {...}}</tool_call>.',
    "xml": "To call one, write <function=NAME><parameter=ARGUMENT>value</parameter></function>.",
    "tags": "To call one, write its tags with the argument between them.",
}


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
    return "\n".join(["You can call these tools:", *lines, HOW_TO_CALL[parser]])


# ---- where tools come from ------------------------------------------------------------------------------------------


def from_function(function: Callable) -> Tool:
    """A function as a tool; ConfigError where signature and docstring do not say enough."""
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        schema = get_json_schema(function)["function"]
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigError(
            f"the tool {function.__name__!r} needs a type hint on every argument, and a docstring with a line for each "
            f"under 'Args:' ({error})"
        ) from None
    for argument in inspect.signature(function).parameters.values():
        if argument.kind is argument.VAR_POSITIONAL:
            raise ConfigError(
                f"the tool {function.__name__!r} takes *{argument.name}, and calls name every argument; make it a list."
            )
    return Tool(schema["name"], schema["description"], schema["parameters"], function)


def named_tools(cfg) -> list[Tool]:
    """The tools of cfg.tools."""
    found = []
    for given in cfg.tools:
        if given.endswith(".py"):
            raise ConfigError(f"--tools {given}: which function of it? Give {given}:NAME.")
        if not function_path(given):
            known_name("--tools (names, or path/to/file.py:function)", given, TOOLS)
        tool = load_function(given) if function_path(given) else TOOLS[given]
        found.append(tool if isinstance(tool, Tool) else from_function(tool))
    return found


def tools_of(row: dict, tools: dict[str, Tool]) -> dict[str, Tool]:
    """The tools that the row's column `tools` allows, without the arguments that its `tools_kwargs` sets."""
    names, hidden = row.get("tools"), row.get("tools_kwargs") or {}
    if isinstance(names, str):
        raise ConfigError(f"column `tools`: {names!r} is text; give a list of names, as [{names!r}].")
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


def chat(url: str, model: str, messages: list[dict], token: str | None = None, **options) -> str:
    """What a model behind an OpenAI-compatible server says next.  url: up to and with /v1"""
    import requests

    body = {"model": model, "messages": messages} | options
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    answer = requests.post(f"{url}/chat/completions", json=body, headers=headers, timeout=600)
    if not answer.ok:
        raise RuntimeError(f"{url} answered {answer.status_code}: {answer.text[:500]}")
    return answer.json()["choices"][0]["message"]["content"]


def model_tool(name: str, description: str, url: str, model: str, token: str | None = None, **options) -> Tool:
    """Another model as a tool: one question, one answer."""

    def ask(question: str) -> str:
        return chat(url, model, [{"role": "user", "content": question}], token, **options)

    return Tool(name, description, QUESTION, ask)


def agent_tool(
    name: str, description: str, tools: list[Tool], cfg, url: str, model: str, token: str | None = None, **options
) -> Tool:
    """An agent as a tool: another model, which answers a question with tools of its own - a rollout in the rollout.

    cfg: the limits of its calls, how it writes them (tool_parser), and max_turns, after which its last words count.
    """
    toolbox = Toolbox({tool.name: tool for tool in tools}, cfg)
    told = instructions([tool.schema() for tool in tools], cfg.tool_parser)

    async def answer(question: str) -> str:
        messages, said = [{"role": "system", "content": told}, {"role": "user", "content": question}], ""
        for _ in range(cfg.max_turns):
            said = await asyncio.to_thread(chat, url, model, messages, token, **options)
            if not (calls := PARSERS[cfg.tool_parser](said, toolbox.tools)):
                break
            answers, _ = await toolbox.run(calls, toolbox.tools)
            # As a user's message: the role `tool` wants ids of calls that the server has read, and we read them.
            messages += [{"role": "assistant", "content": said}, *(a | {"role": "user"} for a in answers)]
        return said

    answer.executes_code = any(getattr(tool.call, "executes_code", False) for tool in tools)
    return Tool(name, description, QUESTION, answer)


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
        self._loops: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

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
        return self._loops.setdefault(loop, SimpleNamespace(limits={}, next={}, locks={}))

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
        if fault := call.error or self.fault(call, tools):
            content, failed = cut(f"Error: {fault}", self.cfg.max_tool_result), True
        elif self.cfg.tool_cache and tool.cacheable and not tool.stateful:
            async with self._here.locks.setdefault(same, asyncio.Lock()):  # of equal calls at once one runs
                cached = same in self._results
                content, failed = (self._results[same], False) if cached else await self._run(call, tool)
                if not failed:
                    self._results[same] = content
        else:
            content, failed = await self._run(call, tool)
        seconds = time.perf_counter() - start
        # Names that a model makes up must not become metrics without end.
        name = call.name if tool else "unknown" if call.name else "unreadable"
        event = {"name": name, "call": key, "seconds": seconds, "failed": int(failed), "cached": int(cached)}
        return content, event | {"written": call.name, "arguments": call.arguments, "result": content}

    async def _run(self, call: Call, tool: Tool) -> tuple[object, bool]:
        """(what the tool answers, or the error's text; whether it failed)"""
        everyone, *own = self._semaphores(tool)
        seconds = tool.timeout or self.cfg.tool_timeout
        for semaphore in (*own, everyone):  # first its own: what waits there must not take another tool's place
            await semaphore.acquire()
        try:
            await self._until_allowed(tool)
            outcome = await run_limited(tool.call, call.arguments, seconds)
        finally:
            for semaphore in (everyone, *own):
                semaphore.release()
        failed = outcome is None or outcome[1] is not None
        if outcome is None:
            content = f"Error: {call.name} gave no answer within {seconds:g} s"
        elif failed:
            content = f"Error: {type(outcome[1]).__name__}: {text_of(outcome[1])}"
        else:
            content = as_content(outcome[0])
        return cut(each_text(content, clean), self.cfg.max_tool_result), failed

    async def _until_allowed(self, tool: Tool) -> None:
        """Wait for the tool's turn under its rate."""
        if tool.rate:
            now = time.monotonic()
            turn = max(self._here.next.get(tool.name, now), now)
            self._here.next[tool.name] = turn + 1 / tool.rate
            await asyncio.sleep(turn - now)

    @staticmethod
    def fault(call: Call, tools: dict[str, Tool]) -> str | None:
        """What is wrong with a call's name or arguments, or None."""
        if call.name not in tools:
            return f"there is no tool {call.name!r}; there are {', '.join(tools) or 'none'}"
        schema = tools[call.name].parameters
        known, required = schema.get("properties", {}), schema.get("required", [])
        if missing := [name for name in required if name not in call.arguments]:
            return f"{call.name} needs {', '.join(missing)}"
        if unknown := [name for name in call.arguments if name not in known]:
            return f"{call.name} takes {', '.join(known) or 'no arguments'}, not {', '.join(unknown)}"
        validator = jsonschema.Draft202012Validator(as_json_schema(schema))
        try:
            validator.check_schema(validator.schema)
            wrong = next(validator.iter_errors(call.arguments), None)
        except (jsonschema.SchemaError, Unresolvable):  # an MCP server's may be none; it checks what it gets itself
            return None
        return wrong and f"{call.name}, {'.'.join(map(str, wrong.path))}: {wrong.message}"


def as_json_schema(schema: dict) -> dict:
    """With `nullable`, by which transformers says Optional to chat templates, as JSON Schema says it."""

    def with_null(value: dict) -> dict:
        kinds = value["type"] if isinstance(value["type"], list) else [value["type"]]
        return value | {"type": [*kinds, "null"]}

    properties = schema.get("properties", {}).items()
    return schema | {"properties": {k: with_null(v) if v.get("nullable") and "type" in v else v for k, v in properties}}


def as_content(result):
    """What a tool returned as the content of a message: text and parts as they are, the rest as JSON as far as it has a
    form there, else as Python shows it."""
    if isinstance(result, str) or is_parts(result):
        return result
    try:
        return json.dumps(result, default=as_json, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # keys that are no text, a value within itself, thousands of levels
        return shorten(result, 10_000)


def as_json(value):
    """Numbers and arrays of numpy and torch as JSON has them, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def is_parts(result) -> bool:
    """Whether a tool answered with parts of a message, [{"type": "text", "text": "..."}, {"type": "image", "image":
    ...}], and not just with some list."""

    def is_part(part) -> bool:
        kind = part.get("type") if isinstance(part, dict) else None
        return (kind == "text" and isinstance(part.get("text"), str)) or (kind == "image" and "image" in part)

    return isinstance(result, list) and bool(result) and all(map(is_part, result))


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
