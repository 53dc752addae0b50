"""What a run keeps of every token: its weight in the loss, from the gradient itself, and what it says as text."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pandas
import pyarrow.parquet
import pytest
import ragged
import test_turns
import torch
from live import SMALL, trained
from test_turns import TURNS, Scripted, tokenizer_of, tool_environment
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import train_grpo as script
from batch import start_record
from config import TrainConfig
from envs import Environment
from envs.turns import play
from runlog.log import completion_rows
from runlog.tokens import token_columns, write_vocabulary

# ---- the weight of a token in the loss ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy():
    torch.set_num_threads(1)  # the model is small
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "load_hf_model", ragged.small_llama)
        return script.load_policy(TrainConfig(compute_dtype="float32"), torch.device("cpu"))


def prepared(policy, cfg) -> script.Batch:
    """An update off policy, so that clips bind, with a group that is silent."""
    batch = ragged.local_batch(0, 1)
    logprobs = script.all_logprobs(policy, batch, cfg)["logprobs"]
    wave = torch.sin(batch.input_ids.float())
    batch.old_logprobs = (logprobs + 0.4 * wave) * batch.loss_mask
    batch.sampling_logprobs = (logprobs + 0.6 * wave) * batch.loss_mask
    batch.ref_logprobs = (logprobs - 0.3 * wave) * batch.loss_mask if cfg.beta else None
    batch.advantages = batch.advantages * (batch.groups != 3)[:, None]
    return batch


def derivative(policy, batch, cfg, loss_of) -> torch.Tensor:
    """By autograd, of the whole update in one pass, with the log-probs as the variables.  [B, T]"""
    found = {}

    def given(*inputs):
        with torch.no_grad():
            found["values"] = {name: values.requires_grad_() for name, values in policy(*inputs).items()}
        return found["values"]

    if prepare := getattr(script.POLICY_LOSSES[cfg.policy_loss], "prepare", None):
        now = script.all_logprobs(policy, batch, cfg)["logprobs"]
        batch = replace(batch, extras=prepare(replace(batch, current_logprobs=now), cfg))
    mask, whole = batch.loss_mask, replace(batch, record=None)
    whole.weights, tokens = script.weights_of_update(whole, cfg)
    loss, _ = loss_of(given, whole, cfg)
    (gradient,) = torch.autograd.grad(loss, found["values"]["logprobs"], allow_unused=True)
    out = torch.zeros_like(mask)
    if gradient is not None:
        out[mask.nonzero(as_tuple=True)] = -tokens * gradient
    return out


@pytest.mark.parametrize("loss", [*sorted(script.POLICY_LOSSES), "foreign"])
def test_a_weight_is_the_derivative_of_the_whole_loss(loss, policy, monkeypatch):
    """However the update is cut, silent groups without a backward pass included; for a loss of one's own, too."""
    monkeypatch.setitem(script.POLICY_LOSSES, "foreign", ragged.foreign_loss)
    for mode, beta in (("token_mean", 0.0), ("seq_mean", 0.1), ("constant", 0.0)):
        settings = dict(policy_loss=loss, loss_agg=mode, beta=beta, compute_dtype="float32", correction_max=1.2)
        cfg = TrainConfig(**settings, tokens_per_microbatch=40, **ragged.SETTINGS.get(loss, {}))
        batch = prepared(policy, cfg)
        expected = derivative(policy, replace(batch), cfg, script.micro_loss)
        start_record(batch)
        torch.manual_seed(0)
        script.accumulate_gradients(policy, batch, cfg)
        torch.testing.assert_close(batch.record.weight, expected, rtol=1e-3, atol=1e-4, msg=f"{loss} {mode}")
        outputs = script.all_logprobs(policy, batch, cfg)
        logprobs, entropy = outputs["logprobs"], outputs["entropy"]
        sampled = batch.loss_mask > 0
        torch.testing.assert_close(batch.record.logprob[sampled], logprobs[sampled], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(batch.record.entropy[sampled], entropy[sampled], rtol=1e-3, atol=1e-4)
        assert batch.record.logprob[~sampled].isnan().all() and expected.abs().max() > 0


# ---- the files ------------------------------------------------------------------------------------------------------


def test_two_ranks_write_one_table(tmp_path):
    """Of a real run: every column in its type and length, groups that no two ranks share, weights that the formula
    gives, held-out rows in their order."""
    (tmp_path / "held_out.jsonl").write_text(
        "".join(f'{{"prompt": "{n} + 1 ="}}\n' for n in range(5)), encoding="utf-8"
    )
    flags = f"{SMALL} --max_steps 2 --loss_agg token_mean --eval_steps 2 --max_prompt_length 128 --strategy fsdp2 "
    flags += f"--eval_generations 2 --eval_dataset_id {tmp_path}/held_out.jsonl --eval_split train"
    trained(tmp_path, flags, "a", ranks=2)
    table = pandas.read_parquet(tmp_path / "a" / "completions" / "step_000002.parquet")
    assert len(table) == 16 and sorted(table.groupby("group").size()) == [4] * 4 and table["group"].dtype == "int64"
    assert table.policy_version.dtype == table.length.dtype == "int32" and set(table.policy_version) == {1}
    vocabulary = pandas.read_parquet(tmp_path / "a" / "vocabulary.parquet").set_index("id")
    lists = {name: "float16" for name in ("advantage", "weight", "logprob", "entropy", "sampler_logprob")}
    lists |= {"trained": "bool", "version": "int32"}
    assert {name.removeprefix("tokens/") for name in table if name.startswith("tokens/")} == set(lists)
    for _, row in table.iterrows():
        assert row.prompt_ids.dtype == row.token_ids.dtype == np.int32
        for name, dtype in lists.items():
            assert (len(row[f"tokens/{name}"]), row[f"tokens/{name}"].dtype) == (len(row.token_ids), dtype), name
        assert row["tokens/trained"].sum() == row.length and set(row["tokens/version"]) == {1}
        assert np.allclose(row["tokens/weight"], row["tokens/advantage"], atol=2e-3, rtol=5e-3)
        assert np.allclose(row["tokens/logprob"], row["tokens/sampler_logprob"], atol=2e-2)
        assert np.allclose(row["tokens/advantage"].mean(), row.advantage, atol=2e-3)
        ids = [i for i in row.token_ids if not vocabulary.special[i]]
        assert b"".join(vocabulary.piece[i] for i in ids).decode(errors="replace") == row.completion
    assert (table["tokens/weight"].map(np.abs).map(max) > 0).any()
    held_out = pandas.read_parquet(tmp_path / "a" / "evaluations" / "step_000002.parquet")
    assert held_out.row_number.tolist() == [0, 1, 2, 3, 4] and not {"tokens/weight", "tokens/logprob"} & set(held_out)
    assert [prompt[:5] for prompt in held_out.prompt] == [f"{n} + 1" for n in range(5)]
    assert held_out["tokens/version"].map(set).tolist() == [{2}] * 5


def test_turns_have_places_versions_calls_and_states():
    """Of each turn: which tokens are its, the weights that sampled them, and what each call asked and got."""

    class Newer(Scripted):  # a push between the turns
        async def generate(self, sent, **options):
            (sample,) = await super().generate(sent, **options)
            sample.policy_version += len(self.said)
            return [sample]

    tokenizer, cfg = tokenizer_of("qwen2_5"), test_turns.config()
    bad = '<tool_call>{"name": "minus", "arguments": {"a": 1}}</tool_call>'
    sampler = Newer(tokenizer, [TURNS[0], bad, "It is 5."])
    t = asyncio.run(play({"prompt": "What is 2 + 3?"}, 0, tool_environment(cfg), sampler, cfg))
    (columns,) = token_columns([t])
    (row,) = completion_rows([t], [0.0], [None])
    for number, (turn, said) in enumerate(zip(row["turns"], sampler.said, strict=True)):
        assert columns["token_ids"][turn["start"] : turn["end"]].tolist() == said["ids"]
        assert set(columns["tokens/version"][turn["start"] : turn["end"]]) == {4 + number}
    assert set(columns["tokens/version"][~columns["tokens/trained"]]) == {0}
    assert np.isnan(columns["tokens/sampler_logprob"][~columns["tokens/trained"]]).all()
    (right,), (wrong,), none = (turn["calls"] for turn in row["turns"])
    assert (right["name"], json.loads(right["arguments"]), right["result"]) == ("add", {"a": 2, "b": 3}, "5")
    assert not right["failed"] and 0 <= right["seconds"] < 60
    assert wrong["failed"] and wrong["name"] == "minus" and "there is no tool 'minus'" in wrong["result"] and not none
    json.dumps(row["turns"])

    class Counts(Environment):
        number = 0

        def state(self):
            return ("at", self.number)

        def step(self, text):
            self.number += 1
            return "On.", 0.0, self.number == 2, {}

    t = asyncio.run(play({"prompt": "?"}, 0, Counts(), Scripted(tokenizer, ["a", "b"]), test_turns.config(env="x")))
    (row,) = completion_rows([t], [0.0], [None])
    assert [turn["state"] for turn in row["turns"]] == ["('at', 0)", "('at', 1)"]


# ---- the vocabulary -------------------------------------------------------------------------------------------------

TEXTS = [
    "Hello there,  world!\n\n\tdef f(x):  return x",
    "Héllo wörld — 你好, 🎉👩‍👩‍👧 \u202eabc",
    " <0x41> Ġ ▁ ü ",
    "9" * 50,
]


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Llama 2's kind: ▁ for a space, bytes for what the vocabulary lacks."""
    vocabulary = {"<unk>": 0, "</s>": 1} | {f"<0x{value:02X}>": 2 + value for value in range(256)}
    for piece in [*"▁abcdefghijklmnopqrstuvwxyz", "▁t", "he", "▁the", "wor"]:
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "t"), ("h", "e"), ("▁t", "he")], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("kind", ["smollm2", "sentencepiece"])
def test_pieces_joined_are_the_text(kind, tmp_path):
    llama = kind == "sentencepiece"
    tokenizer = sentencepiece_like() if llama else AutoTokenizer.from_pretrained(test_turns.make_tiny())
    write_vocabulary(tmp_path, tokenizer)
    table = pyarrow.parquet.read_table(tmp_path / "vocabulary.parquet")
    assert [str(field.type) for field in table.schema] == ["int32", "binary", "bool"]
    vocabulary = {row["id"]: row for row in table.to_pylist()}
    assert set(vocabulary) == set(tokenizer.get_vocab().values())
    end = tokenizer.eos_token
    for text in [*TEXTS, f"the wor{end}ld  two spaces"]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        joined = b"".join(vocabulary[i]["piece"] for i in ids).decode()
        if llama:  # which cannot tell these from spaces and bytes
            joined, text = joined.removeprefix(" ").replace("A", "<0x41>"), text.replace("▁", " ").removeprefix(" ")
        assert joined == text
    assert vocabulary[tokenizer.eos_token_id] == {"id": tokenizer.eos_token_id, "piece": end.encode(), "special": True}
    assert not vocabulary[tokenizer("a", add_special_tokens=False)["input_ids"][-1]]["special"]
