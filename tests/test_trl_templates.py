"""The chat templates that come with TRL, tools described, three turns each: two calls in the template's own format and
an answer. Skipped where TRL is not installed (benchmarks/requirements-bench.txt)."""

import asyncio
import re
from pathlib import Path

import pytest
from server_fixture import make_tiny
from test_formats import call_of
from test_turns import Scripted, config, tool_environment
from transformers import AutoTokenizer

from config import ConfigError
from envs import formats
from rollouts import play

FOLDER = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
SPECIAL = re.compile(r"</?\|?[A-Za-z][\w|/]*\|?>|\[/?[A-Z_]+\]|<｜[^｜]+｜>")
CALL = '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 3}}</tool_call>'
OF_IMAGES = {"idefics3", "llava_next", "smolvlm"}  # they want lists of parts, as processors do


def tokenizer_with(template: str):
    """Its words in angle brackets as tokens, and what stands behind an assistant's message as its end."""
    tokenizer = AutoTokenizer.from_pretrained(make_tiny())
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(SPECIAL.findall(template)))})
    tokenizer.chat_template = template
    said = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "END"}]
    end = SPECIAL.search(tokenizer.apply_chat_template(said, tokenize=False).rpartition("END")[2])
    tokenizer.eos_token = end.group() if end else tokenizer.eos_token
    return tokenizer


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jinja")), ids=lambda path: path.stem)
def test_three_turns_under_a_template_of_trl(path):
    if path.stem.removesuffix("_training") in OF_IMAGES:
        pytest.skip("needs its processor")
    tokenizer = tokenizer_with(path.read_text(encoding="utf-8"))
    turn, _ = formats.rendered_call(tokenizer)
    if turn == "":  # describes tools, and shows no calls
        with pytest.raises(ConfigError, match="--tool_parser=auto: .* shows none. Name the parser"):
            formats.settled(config(tool_parser="auto"), tokenizer)
        return
    cfg = formats.settled(config(tool_parser="auto"), tokenizer)
    call = CALL if turn is None else call_of(tokenizer, a=20, b=3)  # None: told in our words
    sampler = Scripted(tokenizer, [call, call, "It is 23."])
    t = asyncio.run(play({"prompt": "What is 20 + 3?"}, 0, tool_environment(cfg), sampler, cfg))
    called = [[(c["name"], c["arguments"], c["failed"]) for c in turn["info"]["calls"]] for turn in t.info["turns"]]
    assert called == [[("add", {"a": 20, "b": 3}, 0.0)]] * 2 + [[]]
    given = tokenizer.decode([i for i, mask in zip(t.token_ids, t.loss_mask, strict=True) if not mask])
    assert given.count("23") == 2
