"""What computes, with tensors that claim to be on a GPU: nothing is made on, or mixed with, another device."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import gpu_checks
import numpy as np
import pytest
import torch
from claimed import GPU, claimed_gpu
from gpu_checks import settings, trajectories
from server_fixture import make_tiny
from torch._subclasses.fake_tensor import FakeTensorMode

import train_grpo as script
import train_ppo
from inputs.processor import load_processor
from modeling.attention import attend_in_one_call
from runlog.tokens import token_columns
from safety import calls

pytestmark = pytest.mark.quick


@pytest.fixture
def gpu():
    with claimed_gpu():
        yield


@pytest.fixture
def small(monkeypatch):
    llama = gpu_checks.random_model
    monkeypatch.setattr(script, "load_hf_model", lambda cfg, dtype, **_: llama("llama", dtype))


def on_the_gpu(batch) -> bool:
    return all(x.device == GPU for x in vars(batch).values() if isinstance(x, torch.Tensor))


def test_a_batch_and_what_is_computed_of_it(gpu):
    """Advantages, losses with their gradients, corrections, shaped rewards, rows left out: each case of gpu_checks."""
    complete = gpu_checks.complete_batch(GPU)
    assert on_the_gpu(complete.select([0, 4]))
    for name, case in gpu_checks.CASES.items():
        batch = replace(complete)
        assert all(x.device == GPU for x in case(batch)) and on_the_gpu(batch), name


def test_the_kernel_of_gpus_takes_fewer_heads_of_keys():
    """Forward and backward, with the checks of torch's kernel and none of its numbers."""
    with FakeTensorMode():
        made = dict(dtype=torch.bfloat16)
        query, key, value = (torch.empty(1, heads, 300, 64, **made, requires_grad=True) for heads in (8, 2, 2))
        ends, keys = torch.empty(4, dtype=torch.int32), torch.empty(400, dtype=torch.int64)
        row = SimpleNamespace(for_kernel=(keys, ends, ends), shapes=[(100, 0), (100, 100), (100, 0)])
        out = attend_in_one_call(query, key, value, SimpleNamespace(row=row, window=0), 0.1)
        out.float().sum().backward()
        assert out.shape == query.transpose(1, 2).shape and key.grad.shape == key.shape


# ---- whole steps -----------------------------------------------------------------------------------------------------

STEPS = {
    "several updates": dict(num_iterations=2, num_minibatches=2, policy_loss="kl_cov", kl_cov_ratio=0.2),
    "LoRA, plain rows": dict(use_peft=True, kl_in_reward=True, shared_prefix=False),
    "entropy, output layer in chunks, checkpointing, a reference that follows": dict(
        entropy_target=1.0, logprob_chunk=4, top_entropy_quantile=0.5, gradient_checkpointing=True, ref_sync_steps=1
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step(case, gpu, small):
    """From trajectories to weights, as `train` goes."""
    cfg = settings(**STEPS[case])
    policy = script.load_policy(cfg, GPU)
    reference, optimizer = script.load_reference(cfg, GPU), script.make_optimizer(policy, cfg)
    batch = script.collate(trajectories(), 0, GPU)
    script.add_logprobs(batch, policy, reference, cfg)
    metrics = script.shape_rewards(batch, cfg, {}) | script.add_advantages(batch, cfg)
    script.leave_out(batch, trajectories(), cfg)
    before = [p.detach().cpu().clone() for p in policy.parameters() if p.requires_grad]
    script.start_record(batch)
    metrics |= script.update(policy, optimizer, batch, cfg, 0)
    kept = token_columns(trajectories(), batch)
    assert all(np.isfinite(row["tokens/logprob"][row["tokens/trained"]]).all() for row in kept)
    after = [p.detach() for p in policy.parameters() if p.requires_grad]
    assert on_the_gpu(batch) and all(p.device == GPU for p in policy.parameters())
    assert any(not torch.equal(old, new.cpu()) for old, new in zip(before, after, strict=True))
    cfg = script.adapt(cfg, metrics)
    if cfg.ref_sync_steps:
        script.move_towards(reference, policy, 0.5)
        assert all(p.device == GPU for p in reference.parameters())


def test_a_critic(gpu, small):
    cfg = settings(advantage="gae", critic_iterations=2)
    critic, batch = train_ppo.CriticTrainer(cfg, GPU), script.collate(trajectories(), 0, GPU)
    metrics = critic.learn(batch, cfg, 0)
    script.add_advantages(batch, cfg)
    assert on_the_gpu(batch) and metrics["value/grad_norm"] > 0


@pytest.fixture(scope="module")
def tokenizer():
    return load_processor(str(make_tiny()))


def test_the_generator_takes_weights_and_samples(gpu, tokenizer):
    cfg = settings(model_id=str(make_tiny()), use_peft=True, generator="hf", max_completion_length=6)
    policy = script.load_policy(cfg, GPU)
    inner = script.unwrapped(policy)
    generator = script.make_generator(cfg, inner.hf_model, tokenizer, GPU)
    script.push_weights(policy, generator, 0, 1)
    assert all(p.device == GPU for p in generator.model.parameters())
    generator.seed(7)
    for options in (dict(), dict(top_k=5, top_p=0.9, min_tokens=2), dict(temperature=0.0)):
        several = [generator.generate(ids, n=2, max_tokens=4 + len(ids), **options) for ids in ([5, 6], [7, 8, 9])]
        for completion in sum(asyncio.run(gathered(several)), []):
            assert 1 <= len(completion.token_ids) <= 7


async def gathered(several):
    return await asyncio.gather(*several)


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_rewards_run_in_threads_with_the_ranks_gpu(kind, monkeypatch):
    """torch.cuda.set_device holds for one thread: a reward that calls .cuda() would land on GPU 0 on every rank."""
    current = threading.local()
    monkeypatch.setattr(calls, "NEW_THREADS", [lambda: setattr(current, "device", 3)])
    calls.shared_loop.cache_clear()

    async def asynchronous():
        return current.device

    functions = {"plain": lambda: current.device, "async": asynchronous}
    assert asyncio.run(calls.run_limited(functions[kind], {}, 10)) == (3, None)
