"""Tools and the calls of them: several at once within limits, faults answered, every template's format of calls."""

import asyncio
import datetime
import json
from dataclasses import dataclass
from typing import Literal

import pytest
from server_fixture import make_tiny
from test_turns import Scripted, add, config, tokenizer_of, tool_environment
from transformers import AutoTokenizer

from config import ConfigError
from envs import tools
from envs.mcp import get_tools
from envs.tools import Tool, from_function, run_calls
from envs.turns import play
from inputs.formats import Call, read_calls
from inputs.prompts import shown_by
from rollouts import with_parser

pytestmark = pytest.mark.quick


def run_tools(cfg, calls, *tools):
    return asyncio.run(run_calls(calls, {tool.name: tool for tool in tools}, cfg))


def object_of(**properties) -> dict:
    return {"type": "object", "properties": properties}


# ---- calling --------------------------------------------------------------------------------------------------------


def test_a_call_that_fails_is_answered():
    def broken(a: int) -> str:
        """Breaks.

        Args:
            a: a number
        """
        raise KeyError("nothing there")

    async def slow(a: int) -> str:
        """Sleeps.

        Args:
            a: a number
        """
        await asyncio.sleep(3600)

    calls = [
        Call("add", {"a": 1, "b": 2}),
        Call("add", {"a": 1}),
        Call("add", {"a": 1, "b": 2, "c": 3}),
        Call("sub", {}),
        Call("", {}, "not JSON"),
        Call("broken", {"a": 1}),
        Call("slow", {"a": 1}),
        Call("x" * 5000, {}),
    ]
    cfg = config(tool_timeout=1.0, max_tool_result=100)
    messages, events = run_tools(cfg, calls, *map(from_function, (add, broken, slow)))
    wanted = ["3", "add: b: ", "add: c: ", "no tool 'sub'; there are add, broken, slow", "not JSON"]
    wanted += ["KeyError: 'nothing there'", "no answer within 1 s", "xxx"]
    assert all(want in message["content"] for want, message in zip(wanted, messages, strict=True))
    assert [event["failed"] for event in events] == [0, 1, 1, 1, 1, 1, 1, 1] and len(messages[-1]["content"]) < 200
    names = ["add", "add", "add", "unknown", "unreadable", "broken", "slow", "unknown"]  # of the metrics
    assert [event["name"] for event in events] == names and 0.9 < events[-2]["seconds"]


def test_as_many_calls_at_a_time(monkeypatch):
    running, most = 0, 0

    async def watched(a: int) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return str(a)

    monkeypatch.setattr(tools, "MOST_CALLS", 3)
    calls = [Call("watched", {"a": n % 4}) for n in range(8)]
    for _ in range(2):  # a new event loop each, as every training step has
        messages, _ = run_tools(config(), calls, Tool("watched", "", object_of(a={"type": "integer"}), watched))
        assert most == 3 and [message["content"] for message in messages] == [*"01230123"]


# ---- arguments and results ------------------------------------------------------------------------------------------


@dataclass
class Place:
    x: int
    y: int


def test_a_function_with_hints_is_a_tool():
    def several(a: int | list[int] | None, b: Literal["x", "y"] | None, c: list[int | None], d: str | None = None):
        """Takes some.

        Args:
            a: one or several
            b: which
            c: numbers
            d: text
        """
        return [a, b, c, d]

    given = {"a": None, "b": None, "c": [1, None]}
    wrong = ({"a": "x"}, {"b": "z"}, {"c": ["x"]}, {"d": 1})
    answers, events = run_tools(
        config(), [Call("several", given | one) for one in ({}, *wrong)], from_function(several)
    )
    assert [event["failed"] for event in events] == [0, 1, 1, 1, 1]
    assert answers[0]["content"] == "[null, null, [1, null], null]"
    assert answers[3]["content"].startswith("Error: several: c.0")

    def moved(to: Place, days: list[datetime.date]) -> str:
        """Moves.

        Args:
            to: where
            days: when
        """
        return f"{to.x + to.y} on {days[0].year}"

    tool = from_function(moved)
    assert tool.parameters["$defs"]["Place"]["properties"].keys() == {"x", "y"}
    calls = [Call("moved", {"to": {"x": 1, "y": y}, "days": ["2026-05-01"]}) for y in (2, "no")]
    answers, _ = run_tools(config(), calls, tool)
    assert answers[0]["content"] == "3 on 2026" and "moved: to.y: Input should be" in answers[1]["content"]

    def nothing(a): ...

    with pytest.raises(ConfigError, match="the tool 'nothing' needs a type hint"):
        from_function(nothing)
    with pytest.raises(ConfigError, match="unknown name 'calculater'.*Did you mean 'calculator'"):
        get_tools(config(tools=["calculater"]))


def test_what_a_tool_returns():
    """Text as it is, message parts as they are, the rest as JSON."""
    results = {"text": "a", "dicts": [{"title": "é"}], "parts": [{"type": "text", "text": "a"}]}
    kind = {"kind": {"type": "string"}}
    answers, _ = run_tools(
        config(),
        [Call("any", {"kind": k}) for k in results],
        Tool("any", "", object_of(**kind), lambda kind: results[kind]),
    )
    assert [answer["content"] for answer in answers] == ["a", '[{"title": "é"}]', [{"type": "text", "text": "a"}]]


def say(environment, name: str, **arguments) -> str:
    """What a call is answered."""
    text = json.dumps({"name": name, "arguments": arguments})
    (message,), *_ = asyncio.run(environment.step(f"<tool_call>{text}</tool_call>"))
    return message["content"]


def test_rows_choose_tools_and_arguments():
    """What a row fixes the model neither sees nor gives."""
    takes_all = Tool("other", "", object_of(user={}) | {"additionalProperties": True}, dict)
    environment = tool_environment(config(), add, takes_all)
    for b, total in ((10, "11"), (20, "21")):
        environment.reset({"prompt": "?", "tools": ["add"], "tools_kwargs": {"add": {"b": b}}}, 0)
        assert list(environment.tools) == ["add"] and list(environment.tools["add"].parameters["properties"]) == ["a"]
        assert say(environment, "add", a=1) == total
    assert say(environment, "add", a=1, b=2) == "Error: add: b is not yours to give"
    environment.reset({"prompt": "?", "tools_kwargs": {"other": {"user": "me"}}}, 0)
    assert say(environment, "other", x=1) == '{"user": "me", "x": 1}'
    environment.reset({"prompt": "?", "tools": []}, 0)
    assert environment.instructions == "" and environment.tools == {}
    for row, message in (
        ({"tools": ["sub"]}, "unknown name 'sub'"),
        ({"tools_kwargs": {"add": {"c": 1}}}, "unknown name 'c'"),
    ):
        with pytest.raises(ConfigError, match=message):
            environment.reset({"prompt": "?"} | row, 0)


# ---- formats of calls -----------------------------------------------------------------------------------------------

HERMES = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
XML = "<function=add><parameter=a>\n2\n</parameter><parameter=b>3</parameter></function>"


@pytest.mark.parametrize(
    "parser, text, wanted",
    [
        ("hermes", f"First {HERMES} and {HERMES}", [("add", {"a": 2, "b": 3})] * 2),
        ("hermes", "<tool_call>{'name': add}</tool_call>" + HERMES, ["must be", ("add", {"a": 2, "b": 3})]),
        ("hermes", "It is 5.", []),
        ("xml", XML, [("add", {"a": 2, "b": 3})]),
        ("tags", "I <say>hello</say>, <other>you</other>", [("say", {"text": "hello"})]),
        ("gemma4", '<|tool_call>call:say{text:<|"|>a "b"<|"|>}<tool_call|>', [("say", {"text": 'a "b"'})]),
        (
            "harmony",
            'to=functions.add <|message|>{"a": 1}<|call|>assistant to=functions.say<|message|>{"text": "to=x"}',
            [("add", {"a": 1}), ("say", {"text": "to=x"})],
        ),
        (f"{__file__}:my_format", "add 1", [("add", {"a": 1})]),
    ],
)
def test_parsers(parser, text, wanted):
    tools = [from_function(add), Tool("say", "", object_of(text={"type": "string"}), print)]
    calls = read_calls(text, [tool.schema() for tool in tools], parser)
    assert len(calls) == len(wanted)
    for call, want in zip(calls, wanted, strict=True):
        if isinstance(want, str):
            assert want in call.error
        else:
            assert (call.name, call.arguments, call.error) == (*want, None)


def my_format(text: str, schemas: list[dict]) -> list[dict]:
    """A parser of somebody's own."""
    name, number = text.split()
    return [{"name": name, "arguments": {"a": int(number)}}]


TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOLD = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"


def template(call: str, results: str = TURN) -> str:
    """A chat template that writes a call, `c`, in this way, and a tool's message, `m`."""
    calls = "{% for t in m['tool_calls'] %}{% set c = t['function'] %}" + call + "{% endfor %}"
    answer = "<|im_start|>assistant\n{{ m['content'] }}" + calls + "<|im_end|>\n"
    said = "{% if m['role'] == 'tool' %}" + results + "{% elif m['tool_calls'] %}" + answer
    said += "{% else %}" + TURN + "{% endif %}"
    return TOLD + "{% for m in messages %}" + said + "{% endfor %}" + ASKS


PAIRS = "{% for k, v in c['arguments'].items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
WRITTEN = {  # parser: (what a template writes for a call, special tokens in it)
    "hermes": ("<tool_call>\n{{ {'name': c['name'], 'arguments': c['arguments']} | tojson }}\n</tool_call>", []),
    "xml": (
        "<tool_call>\n<function={{ c['name'] }}>\n" + PAIRS + "<parameter={{ k }}>\n" + VALUE
        + "\n</parameter>\n{% endfor %}</function>\n</tool_call>", [],
    ),
    "harmony": (
        "{{ 'to=' }}{{ 'functions.' + c['name'] + '<|channel|>commentary ' }}json<|message|>"
        "{{ c['arguments'] | tojson }}", [],
    ),
    "llama3_json": ('{"name": "{{ c[\'name\'] }}", "parameters": {{ c["arguments"] | tojson }}}', ["<|python_tag|>"]),
    "glm45": (
        "<tool_call>{{ c['name'] }}\n" + PAIRS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + VALUE
        + "</arg_value>\n{% endfor %}</tool_call>", ["<tool_call>", "</tool_call>"],
    ),
}  # fmt: skip


def tokenizer_with(call: str, special=(), results: str = TURN):
    tokenizer = AutoTokenizer.from_pretrained(make_tiny())
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, "<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", template(call, results)
    return tokenizer


def call_of(tokenizer, **arguments) -> str:
    """As its template writes it."""
    function = {"name": "add", "arguments": arguments}
    asked = [{"role": "user", "content": "-"}]
    begun = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    answer = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    text = tokenizer.apply_chat_template([*asked, answer], tokenize=False)
    return text.removeprefix(begun).rstrip().removesuffix("<|im_end|>")


def played(tokenizer, cfg, *turns: str):
    """(trajectory, what it was given between its turns)"""
    t = asyncio.run(play({"prompt": "What is 20 + 3?"}, 0, tool_environment(cfg), Scripted(tokenizer, [*turns]), cfg))
    return t, tokenizer.decode([i for i, mask in zip(t.token_ids, t.loss_mask, strict=True) if not mask])


@pytest.mark.parametrize("parser", WRITTEN)
def test_three_turns_in_a_templates_own_format(parser):
    """--tool_parser auto takes what reads the calls that the template writes; one that cannot be read is answered."""
    tokenizer = tokenizer_with(*WRITTEN[parser])
    cfg = with_parser(config(tool_parser="auto"), tokenizer)
    assert cfg.tool_parser == parser
    call = call_of(tokenizer, a=20, b=3)
    broken = call[: call.index("add") + 3]
    t, given = played(tokenizer, cfg, broken, call, "It is 23.")
    first, second, third = (turn["info"]["calls"] for turn in t.info["turns"])
    assert first[0]["failed"] and first[0]["result"].startswith("Error: ")
    assert [(c["name"], c["arguments"], c["failed"]) for c in second] == [("add", {"a": 20, "b": 3}, 0.0)] and not third
    assert given.count("23") == 1 and "add" in tokenizer.decode(t.prompt_ids)


def test_another_parser_than_the_templates_is_refused_at_start():
    tokenizer = tokenizer_with(*WRITTEN["xml"])
    with pytest.raises(ConfigError, match="--tool_parser=hermes: .* writes xml"):
        with_parser(config(tool_parser="hermes"), tokenizer)
    assert with_parser(config(tool_parser="tags"), tokenizer).tool_parser == "tags"  # in our own words
    for asked, found in (("auto", "hermes"), ("xml", "xml")):  # no tools in the template: it is told in our words
        assert with_parser(config(tool_parser=asked), tokenizer_of("smollm2")).tool_parser == found


WITH_CALL = "{% if messages[loop.index0 - 1]['tool_calls'] %}<answer>{{ m['content'] }}</answer>{% endif %}"


@pytest.mark.parametrize(
    "results, shown, text",
    [
        (TURN, "alone", "<|im_start|>tool\n23<|im_end|>"),
        ("{{ raise_exception('what?') }}", "as a user", "<|im_start|>user\n23<|im_end|>"),
        (WITH_CALL, "with their calls", "<answer>23</answer><|im_start|>assistant\n"),
    ],
)
def test_results_of_tools_are_seen_under_every_template(results, shown, text):
    tokenizer = tokenizer_with(WRITTEN["hermes"][0], results=results)
    assert shown_by(tokenizer).results == shown
    t, given = played(tokenizer, config(tool_parser="hermes"), call_of(tokenizer, a=20, b=3), "It is 23.")
    assert text in given and t.turns == 2
