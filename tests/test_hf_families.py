"""Sampling in this process, for families of every kind of layer: the log-probs are those of a
plain forward pass of a row alone. And which attention a family is loaded with."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from families import FAMILIES, TINY, model_of, saved
from server_fixture import ROOT, make_tiny
from tiers import by_default
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_grpo as script
from config import ConfigError, TrainConfig
from hf_generator import HFGenerator
from runfiles.reading import read_metrics

CPU = torch.device("cpu")
PROMPTS = [list(range(20, 20 + 7 * n, 7)) for n in (3, 11, 6, 19, 6)]
ENDS = {2, *range(10, 200)}  # a token in five ends a sample

# Their state is computed by one formula for a prompt and by another for a single token (with the step bounded below).
ROUNDED = {"nemotron_h": 1e-4}


def generator_of(model) -> HFGenerator:
    model.generation_config.eos_token_id = sorted(ENDS)
    generator = HFGenerator(model, SimpleNamespace(eos_token_id=2, chat_template=None))
    generator.seed(0)
    return generator


def sampled(generator) -> list:
    """[(prompt, completion)], three of each prompt: they end at different times, by a token or their own limit."""

    async def run():
        calls = (generator.generate(ids, max_tokens=5 + 2 * i, n=3) for i, ids in enumerate(PROMPTS))
        return await asyncio.gather(*calls)

    groups = asyncio.run(run())
    return [(ids, completion) for ids, group in zip(PROMPTS, groups, strict=True) for completion in group]


@torch.no_grad()
def logprobs_alone(model, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def check_family(family: str, **more) -> HFGenerator:
    """Prompts of unequal length, three samples each that end at different times: the log-probs are those of plain
    passes of the rows alone."""
    generator, model = generator_of(model_of(family, **more)), model_of(family, **more)
    rows = sampled(generator)
    assert len({len(completion.token_ids) for _, completion in rows}) > 3
    for prompt, completion in rows:
        expected = logprobs_alone(model, prompt, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=ROUNDED.get(family, 1e-5), rtol=0)
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] in ENDS else "length")
        assert not ENDS & set(completion.token_ids[:-1])
    return generator


@pytest.mark.parametrize("family, cached", [("qwen3", True), ("gemma2", True), ("qwen3_5_text", False)])
def test_sampled_logprobs_are_those_of_a_row_alone(family, cached, capsys):
    """A dense family, one with sliding windows, one with recurrent layers, which is run without a cache: said once."""
    assert check_family(family).cached == cached
    assert capsys.readouterr().out.count("no plain cache") == (not cached)


@pytest.mark.slow
def test_sampled_logprobs_of_every_family():
    wrong = {}
    for family in FAMILIES:
        try:
            check_family(family)
        except Exception as error:  # all of them are looked at
            wrong[family] = repr(error)[:200]
    check_family("kimi_linear", layer_types=["linear_attention"] * 2)  # has no layer whose length it asks for
    assert not wrong


# ---- attention ------------------------------------------------------------------------------------------------------


def test_an_attention_that_is_not_there_is_refused_at_start(tmp_path):
    folder = str(saved("llama", tmp_path))
    for wanted in ("sdap", "flash_attention_2"):
        with pytest.raises(ConfigError, match=f"{folder} cannot be loaded: .*(sdap|[Ff]lash)"):
            script.setup(TrainConfig(model_id=folder, attn_implementation=wanted))


def test_a_model_without_a_backbone_is_refused_at_start(tmp_path):
    """Llama 4 with images holds a whole causal model; nothing in it gives hidden states of text and images."""
    from transformers import Llama4Config

    text = TINY | dict(vocab_size=1000, intermediate_size_mlp=96, attention_chunk_size=64, num_experts_per_tok=1)
    Llama4Config(text_config=text, vision_config=dict(hidden_size=64, num_hidden_layers=1)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="^Llama4ForConditionalGeneration has no part below"):
        script.setup(TrainConfig(model_id=str(tmp_path)))


# ---- training -------------------------------------------------------------------------------------------------------


# Recurrent, sinks, latent attention.
@pytest.mark.parametrize("family", by_default(["qwen3_5_text"], ["qwen3_5_text", "gpt_oss", "deepseek_v3"]))
def test_two_steps(family, tmp_path):
    toy = ROOT / "benchmarks" / "toy.py"
    cfg = TrainConfig(
        model_id=str(saved(family, tmp_path / "model")), generator="hf", compute_dtype="float32", max_steps=2,
        dataset_id=f"{toy}:rows", reward_funcs=[f"{toy}:tens"], prompts_per_step=2, num_generations=8,
        max_completion_length=6, learning_rate=1e-3, output_dir=str(tmp_path), run_name="run",
    )  # fmt: skip
    script.train(cfg)
    steps = [line for line in read_metrics(tmp_path / "run") if "reward" in line]
    assert len(steps) == 2 and all(line["grad_norm"] > 0 for line in steps)
    assert max(line["sampling/logprob_diff_mean"] for line in steps) < 1e-5


def test_a_long_prompt_does_not_cut_its_neighbours():
    """Each prompt may fill the model's window, and none goes beyond it."""
    model = AutoModelForCausalLM.from_pretrained(make_tiny(), dtype=torch.float32)
    generator = HFGenerator(model, AutoTokenizer.from_pretrained(make_tiny()))
    generator.window = 20

    async def run():
        calls = (generator.generate(list(range(5, 5 + n)), max_tokens=12, min_tokens=12) for n in (5, 15, 8, 19))
        return await asyncio.gather(*calls)

    assert [len(one.token_ids) for (one,) in asyncio.run(run())] == [12, 5, 12, 1]
