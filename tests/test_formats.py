"""Chat templates of several formats of calls: which parser reads them is found by rendering one; three turns are played
under each; what cannot be read is said, at start or to the model."""

import asyncio

import pytest
from server_fixture import make_tiny
from test_turns import Scripted, config, tokenizer_of, tool_environment
from transformers import AutoTokenizer

from config import ConfigError, TrainConfig
from envs import formats
from envs.tools import OPENERS, PARSERS
from inputs.processor import load_processor, with_template_kwargs
from inputs.prompts import shown_by
from rollouts import play

pytestmark = pytest.mark.quick

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
    "harmony": ("to=functions.{{ c['name'] }}<|channel|>commentary json<|message|>{{ c['arguments'] | tojson }}", []),
    "llama3_json": ('{"name": "{{ c[\'name\'] }}", "parameters": {{ c["arguments"] | tojson }}}', ["<|python_tag|>"]),
    "glm45": (
        "<tool_call>{{ c['name'] }}\n" + PAIRS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + VALUE
        + "</arg_value>\n{% endfor %}</tool_call>", ["<tool_call>", "</tool_call>"],
    ),
    "lfm2": (
        "<|tool_call_start|>[{{ c['name'] }}(" + PAIRS + "{{ k }}={{ v | tojson }}"
        + "{% if not loop.last %}, {% endif %}{% endfor %})]<|tool_call_end|>",
        ["<|tool_call_start|>", "<|tool_call_end|>"],
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


@pytest.mark.parametrize("parser", WRITTEN)
def test_three_turns_in_a_templates_own_format(parser):
    tokenizer = tokenizer_with(*WRITTEN[parser])
    cfg = formats.settled(config(tool_parser="auto"), tokenizer)
    assert cfg.tool_parser == parser and OPENERS[parser] in call_of(tokenizer, a=1, b=2)
    call = call_of(tokenizer, a=20, b=3)
    sampler = Scripted(tokenizer, [call, call, "It is 23."])
    t = asyncio.run(play({"prompt": "What is 20 + 3?"}, 0, tool_environment(cfg), sampler, cfg))
    called = [[(c["name"], c["arguments"], c["failed"]) for c in turn["info"]["calls"]] for turn in t.info["turns"]]
    assert called == [[("add", {"a": 20, "b": 3}, 0.0)]] * 2 + [[]]
    given = tokenizer.decode([i for i, mask in zip(t.token_ids, t.loss_mask, strict=True) if not mask])
    assert given.count("23") == 2 and "add" in tokenizer.decode(t.prompt_ids)


def test_another_parser_than_the_templates_is_refused_at_start():
    tokenizer = tokenizer_with(*WRITTEN["glm45"])
    with pytest.raises(ConfigError, match="--tool_parser=hermes: .* writes '?<tool_call>look_up.*, which glm45 reads"):
        formats.settled(config(tool_parser="hermes"), tokenizer)
    assert formats.settled(config(tool_parser="tags"), tokenizer).tool_parser == "tags"  # in our own words
    with pytest.raises(ConfigError, match="--tool_parser=herms: allowed are auto, hermes, xml"):
        formats.settled(config(tool_parser="herms"), tokenizer)


def test_a_template_whose_calls_nobody_reads():
    odd = tokenizer_with("(({{ c['name'] }} with {{ c['arguments'] | length }}, not two))")
    none = tokenizer_with("")
    for tokenizer, says in ((odd, r"writes '?\(\(look_up.*which no parser here reads"), (none, "shows none. Name the")):
        with pytest.raises(ConfigError, match=f"--tool_parser=auto: .*{says}"):
            formats.settled(config(tool_parser="auto"), tokenizer)
        played = config(tool_parser="auto", tools=[], env="sokoban")  # which may have no tools at all
        assert formats.settled(played, tokenizer).tool_parser == "tags"
    assert formats.settled(config(tool_parser="hermes"), none).tool_parser == "hermes"


def test_a_template_without_tools_is_told_in_our_words():
    assert formats.settled(config(tool_parser="auto"), tokenizer_of("smollm2")).tool_parser == "hermes"
    assert formats.settled(config(tool_parser="xml"), tokenizer_of("smollm2")).tool_parser == "xml"
    assert formats.settled(TrainConfig(), tokenizer_of("qwen2_5")).tool_parser == "auto"  # no tools, nothing to read


@pytest.mark.parametrize("parser", ["glm45", "xml", "harmony"])
def test_a_call_that_cannot_be_read_is_answered(parser):
    tokenizer = tokenizer_with(*WRITTEN[parser])
    cfg = formats.settled(config(tool_parser="auto"), tokenizer)
    broken = f"{OPENERS[parser]} add 20 to 3"
    sampler = Scripted(tokenizer, [broken, call_of(tokenizer, a=20, b=3), "23."])
    t = asyncio.run(play({"prompt": "?"}, 0, tool_environment(cfg), sampler, cfg))
    first, second, _ = (turn["info"]["calls"] for turn in t.info["turns"])
    assert first[0]["failed"] and first[0]["name"] == "unreadable" and not second[0]["failed"]
    assert "begins as a call, and cannot be read" in t.info["turns"][0]["observation"][0]["content"]


def test_what_foreign_parsers_raise_is_the_calls_fault(monkeypatch):
    from vllm.tool_parsers import ToolParserManager

    kind = ToolParserManager.get_tool_parser("glm45")
    parse = formats.vllm_parser("glm45", tokenizer_with(*WRITTEN["glm45"]))
    monkeypatch.setattr(kind, "extract_tool_calls", lambda *_: 1 / 0)
    (call,) = parse("<tool_call>add", {"look_up": formats.PROBE})
    assert "cannot be read (ZeroDivisionError)" in call.error


# ---- what templates do not show -------------------------------------------------------------------------------------

WITH_CALL = "{% if messages[loop.index0 - 1]['tool_calls'] %}<answer>{{ m['content'] }}</answer>{% endif %}"


@pytest.mark.parametrize(
    "results, shown, text",
    [
        (TURN, "alone", "<|im_start|>tool\n23<|im_end|>"),
        ("", "as a user", "<|im_start|>user\n23<|im_end|>"),  # left out without a word
        ("{{ raise_exception('what?') }}", "as a user", "<|im_start|>user\n23<|im_end|>"),
        (WITH_CALL, "with their calls", "<answer>23</answer><|im_start|>assistant\n"),
    ],
)
def test_results_of_tools_are_seen_under_every_template(results, shown, text):
    tokenizer = tokenizer_with(WRITTEN["hermes"][0], results=results)
    assert shown_by(tokenizer).results == shown
    cfg = config(tool_parser="hermes")
    sampler = Scripted(tokenizer, [call_of(tokenizer, a=20, b=3), "It is 23."])
    t = asyncio.run(play({"prompt": "?"}, 0, tool_environment(cfg), sampler, cfg))
    given = tokenizer.decode([i for i, mask in zip(t.token_ids, t.loss_mask, strict=True) if not mask])
    assert text in given and t.turns == 2


def test_a_model_with_several_templates_has_that_for_tools_where_there_are_tools():
    """As transformers chooses; what each shows is looked at for itself."""
    tokenizer = tokenizer_with(WRITTEN["hermes"][0])
    call = call_of(tokenizer, a=20, b=3)
    plain = "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('what?') }}{% endif %}" + TURN
    tokenizer.chat_template = {"default": plain + "{% endfor %}" + ASKS, "tool_use": tokenizer.chat_template}
    cfg = config(tool_parser="hermes")
    t = asyncio.run(play({"prompt": "?"}, 0, tool_environment(cfg), Scripted(tokenizer, [call, "It is 23."]), cfg))
    given = tokenizer.decode([i for i, mask in zip(t.token_ids, t.loss_mask, strict=True) if not mask])
    assert "<|im_start|>tool\n23<|im_end|>" in given and t.turns == 2
    assert shown_by(tokenizer).results == "as a user" and shown_by(tokenizer, [{}]).results == "alone"
    with pytest.raises(ConfigError, match="template has no thinking; it reads nothing of the kind"):
        with_template_kwargs(tokenizer, {"thinking": True})


@pytest.mark.parametrize("does", ["{{ raise_exception('System role not supported') }}", ""])
def test_a_system_prompt_that_a_template_does_not_take_stands_before_the_question(does):
    tokenizer = tokenizer_of("smollm2")
    rule = "{% if m['role'] == 'system' %}" + does + "{% else %}" + TURN + "{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}" + rule + "{% endfor %}" + ASKS
    cfg = config(system_prompt="Be brief.", tools=[])
    sampler = Scripted(tokenizer, ["Yes."])
    t = asyncio.run(play({"prompt": "Is it?"}, 0, tool_environment(cfg), sampler, cfg))
    assert tokenizer.decode(t.prompt_ids).startswith("<|im_start|>user\nBe brief.\n\nYou can call")
    assert "\n\nIs it?<|im_end|>" in tokenizer.decode(t.prompt_ids)


# ---- --chat_template_kwargs -----------------------------------------------------------------------------------------


def test_what_a_template_is_given(tmp_path):
    tokenizer = load_processor(str(make_tiny()))
    tokenizer, before = AutoTokenizer.from_pretrained(make_tiny()), [{"role": "user", "content": "-"}]
    tokenizer.chat_template = "{% if enable_thinking %}think{% else %}quick{% endif %}" + ASKS

    def written() -> str:
        return tokenizer.apply_chat_template(before, tokenize=False)

    assert written() == "quick"
    with_template_kwargs(tokenizer, {"enable_thinking": True})
    assert written() == "think"
    with_template_kwargs(tokenizer, None)  # the next run of this process has none
    assert written() == "quick"
    with pytest.raises(ConfigError, match="template has no enable_thinkin; it reads enable_thinking"):
        with_template_kwargs(tokenizer, {"enable_thinkin": True})


def test_every_parser_has_a_name_of_its_own():
    assert {"hermes", "xml", "harmony", "tags"} <= set(PARSERS)
