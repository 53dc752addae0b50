"""Which parser reads the calls that a model's chat template writes: found by rendering one and reading it back.

Templates that describe tools also show how a call looks, each family in its own way. --tool_parser auto takes the first
parser that reads such a call back, of those in tools.PARSERS, and then of vLLM's, by vLLM's names.
"""

import functools
import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace

from jinja2 import TemplateError

import domains
from cli import shorten
from config import ConfigError
from envs.tools import OPENERS, PARSERS, Call, Tool, json_of
from inputs.prompts import is_vision, with_parts
from inputs.special_tokens import clean, each_text

# vLLM takes seconds and need not be there: it is imported where its parsers are asked for.

PROBE = Tool(
    "look_up",
    "Look something up.",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for."},
            "count": {"type": "integer", "description": "How many results."},
            "exact": {"type": "boolean", "description": "Whether words may differ."},
            "places": {"type": "array", "items": {"type": "string"}, "description": "Where to look."},
        },
        "required": ["query"],
    },
    print,
)
ARGUMENTS = {"query": 'the "first" one\nof {two}', "count": 7, "exact": True, "places": ["a b", "c"]}
OWN_WORDS = "tags"  # the parser whose calls are described by us, in the system message, whatever the template knows


def settled(cfg, processor):
    """The config, and those of its domains, with a parser in place of `auto`. ConfigError where the chat template
    writes calls that the chosen parser does not read."""
    names = {}
    for own in cfg.by_domain():
        if own.env or own.tools or own.mcp_config:
            with domains.named(own):
                names[own.domain] = parser_for(own.tool_parser, processor, bool(own.env))
    if not cfg.domains:
        return replace(cfg, tool_parser=names.get("", cfg.tool_parser))
    entries = [e | ({"tool_parser": names[e["name"]]} if e["name"] in names else {}) for e in cfg.domains]
    return replace(cfg, domains=entries)


def parser_for(wanted: str, processor, has_own: bool = False) -> str:
    """The name of the parser that is used for `wanted`. One of vLLM's is entered into PARSERS.

    has_own: the tools are an environment's, which may have none at all."""
    if wanted not in ("auto", *PARSERS):
        PARSERS[wanted] = vllm_parser(wanted, processor)
    turn, opener = rendered_call(processor) if processor.chat_template else (None, "")
    if turn is None or wanted == OWN_WORDS:  # the system message says how to call
        return "hermes" if wanted == "auto" else wanted
    if turn == "" and wanted != "auto":  # nothing to compare with
        return wanted
    if wanted != "auto" and reads_back(PARSERS[wanted], turn):
        found = [wanted]
    else:
        found = readers(turn, processor) if turn else []
    if found and wanted in ("auto", found[0]):
        OPENERS[found[0]] = opener
        return found[0]
    if wanted == "auto" and has_own:
        return OWN_WORDS
    if found:
        shows, remedy = f"writes {shorten(turn, 120)}, which {found[0]} reads", "Leave the flag out"
    elif turn:
        shows, remedy = f"writes {shorten(turn, 120)}, which no parser here reads", "Change the template"
    else:
        shows, remedy = "shows none", f"Name the parser, if you know it ({', '.join(all_names())})"
    raise ConfigError(
        f"--tool_parser={wanted}: for a call the chat template of --model_id {shows}. {remedy}; or take {OWN_WORDS}, "
        "with which the system message says how to call, not the template."
    )


def all_names() -> list[str]:
    return [*PARSERS, *(name for name in vllm_names() if name not in PARSERS)]


def rendered_call(processor) -> tuple[str | None, str]:
    """(what the chat template writes for a turn with one call: "" if it leaves it out, None if it knows no tools; what
    each call begins with)"""

    def render(messages: list[dict], tools, **options) -> str:
        messages = with_parts({"prompt": messages}, 0)["prompt"] if is_vision(processor) else messages
        return processor.apply_chat_template(messages, tools=tools, tokenize=False, **options)

    def answer(name: str, arguments) -> str:
        call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": name, "arguments": arguments}}
        return render([*asked, {"role": "assistant", "content": "", "tool_calls": [call]}], schemas)

    schemas, asked = [PROBE.schema()], [{"role": "user", "content": "-"}]
    try:
        told = render(asked, schemas, add_generation_prompt=True)
        if told == render(asked, None, add_generation_prompt=True):
            return None, ""
        plain = render([*asked, {"role": "assistant", "content": "-"}], schemas)
    except (TemplateError, TypeError, ValueError):
        return None, ""
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):  # some templates write them as they are given
        try:
            whole, other = answer(PROBE.name, arguments), answer("Another", arguments)
        except (TemplateError, TypeError, ValueError):
            continue
        turn = after(told, whole).rstrip().removesuffix(getattr(processor, "tokenizer", processor).eos_token or "")
        if PROBE.name in turn and "two" in turn:
            before_name = after(plain, os.path.commonprefix([whole, other])).strip()
            return turn, before_name.split("\n")[0] if len(before_name) > 3 else ""
    return "", ""


def after(beginning: str, text: str) -> str:
    """What of `text` is not in `beginning`, from their first difference on."""
    return text[len(os.path.commonprefix([beginning, text])) :]


def reads_back(parse: Callable, turn: str) -> bool:
    try:
        calls = parse(turn, {PROBE.name: PROBE})
    except Exception:  # of a foreign parser: it is not for this text
        return False
    return [(call.name, call.arguments, call.error) for call in calls] == [(PROBE.name, ARGUMENTS, None)]


def readers(turn: str, processor) -> list[str]:
    """Names of the parsers that read this turn. One of vLLM's is looked for where none of ours does; the first that is
    found is entered into PARSERS."""
    found = [name for name, parse in PARSERS.items() if reads_back(parse, turn)]
    for name in [] if found else vllm_names():
        try:
            parse = vllm_parser(name, processor)
        except Exception:  # most want certain tokens in the vocabulary
            continue
        if reads_back(parse, turn):
            PARSERS[name] = parse
            return [name]
    return found


# ---- vLLM's parsers --------------------------------------------------------------------------------------------------


def vllm_names() -> list[str]:
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError:
        return []
    return ToolParserManager.list_registered()


def vllm_parser(name: str, processor) -> Callable[[str, dict[str, Tool]], list[Call]]:
    """vLLM's parser of this name as one of ours. ConfigError if there is none, or this tokenizer is not for it."""
    if name not in (names := vllm_names()):
        allowed = ", ".join(["auto", *all_names()]) + ("" if names else "; more with vllm installed")
        raise ConfigError(f"--tool_parser={name}: allowed are {allowed}.")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)  # of every text that is no call, with traceback
    tokenizer, kind = getattr(processor, "tokenizer", processor), ToolParserManager.get_tool_parser(name)

    @functools.lru_cache(maxsize=64)  # tools may differ by row
    def made(schemas: str):
        tools = json.loads(schemas)
        request = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], tools=tools, model="")
        return kind(tokenizer, request.tools), request

    def parse(text: str, tools: dict[str, Tool]) -> list[Call]:
        parser, request = made(json.dumps([tool.schema() for tool in tools.values()]))
        try:
            found = parser.extract_tool_calls(text, request).tool_calls
            return [read(call.function.name, call.function.arguments) for call in found]
        except Exception as error:  # at what a model wrote
            return [Call("", error=f"a call that cannot be read ({type(error).__name__}): {shorten(text, 200)}")]

    try:
        made(json.dumps([PROBE.schema()]))
    except Exception as error:
        raise ConfigError(f"--tool_parser={name} is not for the tokenizer of --model_id: {error}") from error
    return parse


def read(name: str, arguments: str) -> Call:
    try:
        given = json_of(arguments or "{}")
        if isinstance(given, dict):
            return Call(each_text(name, clean), given)
    except (ValueError, RecursionError):
        pass
    return Call(name, error=f"arguments must be a JSON object, not {shorten(arguments, 200)}")
