"""Logits are what the model's own forward makes of hidden states, and a run whose policy, model and generator do not
agree on a fixed text ends before its first step."""

import copy

import pytest
import torch
from families import FAMILIES, model_of, saved
from ragged import settled
from server_fixture import ROOT, make_tiny

import train_grpo as script
import utils
from config import TrainConfig
from hf_generator import HFGenerator
from modeling import attention
from modeling.model import backbone, logits_of
from runfiles.reading import read_metrics

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
IDS = torch.arange(20, 140, 10)[None]
TOY = ROOT / "benchmarks" / "toy.py"

# Scaled, divided, capped, behind a layer of their own; what a bare output layer gives is far from that.
OWN_LOGITS = ["cohere2", "granite", "minicpm3", "recurrent_gemma", "gemma2"]


def config(model, **more) -> TrainConfig:
    return TrainConfig(model_id=str(model), **{"compute_dtype": "float32"} | more)


def check(policy, inner, cfg) -> TrainConfig:
    return settled(cfg, policy, inner)


@pytest.mark.parametrize("families", [OWN_LOGITS, pytest.param(FAMILIES, marks=pytest.mark.slow)], ids=["few", "all"])
def test_logits_are_those_of_the_model_itself(families):
    for family in families:
        model = model_of(family)
        with torch.no_grad():
            hidden = backbone(model)(input_ids=IDS, use_cache=False).last_hidden_state[0]
            own = model(input_ids=IDS, use_cache=False).logits[0]
            assert torch.allclose(logits_of(model, hidden), own, atol=1e-5), family
            assert torch.equal(model(input_ids=IDS, use_cache=False).logits[0], own), family  # nothing was left behind


@pytest.mark.parametrize("family", ["cohere2", "gemma2"])
def test_gradients_through_them(family, tmp_path):
    policy = script.load_policy(cfg := config(saved(family, tmp_path), logprob_chunk=4), CPU)
    inner = script.unwrapped(policy)
    check(policy, inner, cfg)
    model, tokens = copy.deepcopy(inner.hf_model), torch.tensor([5, 7, 9, 11, 3, 8])
    ids = torch.cat([IDS[:, :6], tokens[None]], 1)
    policy(dict(input_ids=ids), torch.zeros(6, dtype=torch.long), torch.arange(5, 11), tokens)[
        "logprobs"
    ].sum().backward()
    own = model(input_ids=ids, use_cache=False).logits[0, 5:-1].log_softmax(-1)
    own.gather(1, tokens[:, None]).sum().backward()
    for (name, ours), other in zip(inner.hf_model.named_parameters(), model.parameters(), strict=True):
        assert (ours.grad is None) == (other.grad is None), name
        if ours.grad is not None:
            assert torch.allclose(ours.grad, other.grad, atol=1e-5 * other.grad.abs().max().item() + 1e-7), name


def test_it_is_the_model_that_is_compared_and_not_the_temperature():
    for temperature in (0.5, 1.0, 2.0):
        policy = script.load_policy(cfg := config("models/tiny", temperature=temperature), CPU)
        inner = script.unwrapped(policy)
        check(policy, inner, cfg)


def test_logits_that_the_policy_makes_by_itself_end_the_run(monkeypatch):
    monkeypatch.setattr(script, "logits_of", lambda model, hidden, _: 2 * model.get_output_embeddings()(hidden))
    cfg = config(make_tiny())
    with pytest.raises(RuntimeError, match=r"other log-probs than LlamaForCausalLM itself \(by \d"):
        check(policy := script.load_policy(cfg, CPU), script.unwrapped(policy), cfg)


def test_a_shared_prompt_that_is_not_seen_makes_plain_rows(monkeypatch, capsys):
    monkeypatch.setattr(attention.PackedMask, "seen", lambda self, q, k: (k <= q[:, None]) & (k > 3))
    cfg = config(make_tiny())
    policy = script.load_policy(cfg, CPU)
    assert not check(policy, script.unwrapped(policy), cfg).shared_prefix
    assert "packed rows differ from LlamaForCausalLM's own (by 0." in capsys.readouterr().out


@pytest.mark.parametrize("slow", [True, False])
def test_a_cpu_without_bfloat16_computes_in_float32(slow, tmp_path, monkeypatch, capsys):
    """The whole run, its generator included; and it says so."""
    monkeypatch.setattr(utils, "slow_in_bfloat16", lambda device: slow)
    made, make = [], script.make_generator
    monkeypatch.setattr(script, "make_generator", lambda *how: made.append(make(*how)) or made[0])
    run(make_tiny(), tmp_path, f"{TOY}:rows", compute_dtype="bfloat16")
    assert made[0].weight_dtype == (torch.float32 if slow else torch.bfloat16)
    assert ("no instructions for bfloat16: the run computes in float32." in capsys.readouterr().out) == slow


# ---- the generator --------------------------------------------------------------------------------------------------


def run(model, folder, rows: str, **more) -> None:
    usual = dict(
        generator="hf", dataset_id=rows, reward_funcs=[f"{TOY}:tens"], max_steps=1, prompts_per_step=2,
        num_generations=2, max_completion_length=4, output_dir=str(folder), run_name="run",
    )  # fmt: skip
    script.train(config(model, **usual | more))


def test_weights_that_did_not_arrive_end_the_run_before_its_first_step(tmp_path, monkeypatch):
    send = HFGenerator.send_bucket
    monkeypatch.setattr(HFGenerator, "send_bucket", lambda self, named: send(self, [(n, x * 1.1) for n, x in named]))
    with pytest.raises(RuntimeError, match=r"Trainer and generator disagree on the sampled tokens: .*limit 0\.01"):
        run(make_tiny(), tmp_path, f"{TOY}:rows")
    assert not list(tmp_path.rglob("completions*"))


@pytest.mark.slow
@pytest.mark.parametrize("old", ["sampler", "current"])
def test_what_a_steps_own_updates_moved_is_no_disagreement(old, tmp_path):
    """With these the difference that is logged is that of the newest weights; it ended runs that were well."""
    how = dict(old_logprobs=old, num_iterations=4, learning_rate=3e-3, logprob_diff_limit=0.01)
    run(make_tiny(), tmp_path, f"{TOY}:rows", num_generations=8, **how)
    (step,) = (line for line in read_metrics(tmp_path / "run") if "loss" in line)
    assert step["sampling/logprob_diff_mean"] > 0.01
