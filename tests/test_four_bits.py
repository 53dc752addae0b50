"""A base in 4 bits (--load_in 4bit): the same numbers as PEFT and transformers alone, one base for all that it is used
for, and what cannot be is refused."""

import asyncio
from dataclasses import replace

import pytest
import torch
from live import SMALL, trained
from ragged import gradients, load_awake, local_batch, relative_difference
from ranks import on_ranks
from server_fixture import make_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import train_grpo as script
import utils
from config import TrainConfig
from hf_generator import PolicyGenerator
from inputs.vision import Prompt
from modeling import agreement
from saving import checkpoints

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CFG = TrainConfig(use_peft=True, load_in="4bit", compute_dtype="float32", lora_r=8, beta=0.05, policy_loss="gspo")
CUTS = {
    "one": {},
    "many": dict(tokens_per_microbatch=40, logprob_chunk=4),
    "plain rows": dict(shared_prefix=False),
    "checkpointed": dict(gradient_checkpointing=True),
}


def batch_of(policy, cfg: TrainConfig, rank: int, world: int):
    """The reference is the base without adapters."""
    batch = local_batch(rank, world)
    batch.old_logprobs = script.all_logprobs(policy, batch, cfg)["logprobs"]
    batch.ref_logprobs = batch.old_logprobs - 0.3 * batch.loss_mask
    return batch


def of_every_cut(model_dir: str, strategy: str) -> dict[str, dict]:
    rank, world, _ = utils.init_distributed(60)
    found = {}
    for cut, more in CUTS.items():
        cfg = replace(CFG, model_id=model_dir, strategy=strategy, **more)
        policy = load_awake(cfg, CPU)
        found[cut] = gradients(policy, batch_of(policy, cfg, rank, world), cfg)
    return found


QUANTISED = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


@pytest.fixture(scope="module")
def cfg():
    return replace(CFG, model_id=str(make_tiny()))


@pytest.fixture(scope="module")
def policy(cfg):
    return load_awake(cfg, CPU)


def theirs(model_id: str) -> torch.nn.Module:
    """A base in 4 bits as transformers loads it, by no line of ours. In eval mode bitsandbytes would compute in
    bfloat16 on some CPUs."""
    return AutoModelForCausalLM.from_pretrained(model_id, dtype=torch.float32, quantization_config=QUANTISED).train()


def test_gradient_is_that_of_peft_and_transformers_alone(cfg, policy):
    """Log-probs of whole logits, row by row, of a model that PEFT has put the same adapters on."""
    from peft import get_peft_model

    own, inner = policy, script.unwrapped(policy)
    plain = get_peft_model(theirs(cfg.model_id), inner.model.peft_config["default"])
    learned = {name: p for name, p in inner.model.named_parameters() if p.requires_grad}
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(learned[name])
    batch = local_batch(0, 1)
    own.zero_grad()
    (script.compute_logprobs(own, batch, cfg)["logprobs"] * batch.advantages).sum().backward()
    for ids, there, advantages in zip(batch.input_ids, batch.attention_mask, batch.advantages, strict=True):
        ids = ids[: int(there.sum())]
        logprobs = plain(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        (logprobs * advantages[1 : len(ids)]).sum().backward()
    found = {name: p.grad for name, p in learned.items()}
    expected = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    assert relative_difference(found, expected) < 1e-5


def test_gradient_of_every_cut_and_of_two_ranks(cfg):
    cases = [(1, "ddp"), (2, "ddp"), (2, "fsdp2")]
    found = {case: on_ranks(case[0], of_every_cut, cfg.model_id, case[1])[0] for case in cases}
    for case, gradients_of in found.items():
        for cut, gradient in gradients_of.items():
            assert relative_difference(gradient, found[1, "ddp"]["one"]) < 1e-5, (case, cut)


def test_the_policy_itself_samples_and_stays_as_it_is(cfg, policy):
    """In this process there is one base. Adapters count at once, and the policy can be trained afterwards."""
    own, inner = policy, script.unwrapped(policy)
    tokenizer = AutoTokenizer.from_pretrained(cfg.model_id)
    generator = script.make_generator(replace(cfg, generator="hf"), inner.hf_model, tokenizer, CPU)
    assert isinstance(generator, PolicyGenerator) and generator.model is inner.hf_model
    modes = [module.training for module in inner.modules()]
    found = asyncio.run(generator.generate([5, 6, 7, 8], n=4, max_tokens=12))
    batch = agreement.batch_of([(Prompt([5, 6, 7, 8], []), [c.token_ids for c in found])], CPU)
    logprobs = script.compute_logprobs(own, batch, cfg)["logprobs"]
    sampled = torch.tensor(sum((c.logprobs for c in found), []))
    assert (logprobs[batch.loss_mask.bool()] - sampled).abs().max() < 1e-5
    assert [module.training for module in inner.modules()] == modes and logprobs.requires_grad
    logprobs.sum().backward()


def test_checkpoints_hold_the_adapter_and_resume_bit_for_bit(cfg, tmp_path):
    from peft import PeftModel

    for name, more in (("whole", ""), ("broken", "--max_steps 2"), ("broken", "--resume")):
        trained(tmp_path, f"{SMALL} --use_peft --load_in 4bit --lora_r 8 --max_steps 4 --save_steps 2 {more}", name)
    whole, resumed = (checkpoints.folder_of(tmp_path / name, 4) for name in ("whole", "broken"))
    for path in (*whole.glob("*.safetensors"), *(whole / "trainer" / "state").glob("*.distcp")):
        assert path.read_bytes() == (resumed / path.relative_to(whole)).read_bytes(), path
    assert not list(whole.glob("model*")) and (whole / "tokenizer.json").is_file()
    loaded = PeftModel.from_pretrained(theirs(cfg.model_id), whole)
    loaded.train()
    own = script.load_policy(cfg, CPU)
    checkpoints.load_checkpoint(tmp_path / "whole", 4, {"policy": (own, script.make_optimizer(own, cfg))}, {})
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(input_ids=ids).logits, own.hf_model(input_ids=ids).logits)
    assert any(p.any() for name, p in own.named_parameters() if "lora_B" in name)
