"""What computes, with tensors that claim to be on a GPU: nothing is made on, or mixed with, another device."""

import asyncio
import contextlib
import threading
from dataclasses import replace

import families
import numpy as np
import pytest
import ragged
import torch
import torch.distributed as dist
from claimed import GPU, Refused, claimed_gpu
from collectives import Collectives
from server_fixture import make_tiny
from test_routing import made
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

import train_grpo as script
import train_ppo
import utils
from inputs import recurrence
from inputs.processor import load_processor
from rollouts import Trajectory
from runlog import checkpoints
from runlog.tokens import token_columns
from safety import calls

pytestmark = pytest.mark.quick


@pytest.fixture
def gpu():
    with claimed_gpu() as gpu:
        yield gpu


# ---- the rules, as CUDA has them -------------------------------------------------------------------------------------


def on_gpu(*shape):
    return torch.ones(shape, device=GPU)


def put(target, index, value):
    target[index] = value
    return target


ALLOWED = {
    "two on the GPU": lambda: on_gpu(2, 3) @ on_gpu(3, 2),
    "a CPU scalar": lambda: on_gpu(2) * torch.tensor(2.0),
    "a CPU scalar first": lambda: torch.tensor(2.0) - on_gpu(2),
    "a number": lambda: on_gpu(2) + 1,
    "where with a CPU scalar": lambda: torch.where(on_gpu(2) > 0, on_gpu(2), torch.tensor(0.0)),
    "masked_fill with a CPU scalar": lambda: on_gpu(2).masked_fill(on_gpu(2) > 0, torch.tensor(0.0)),
    "indexed from the CPU": lambda: on_gpu(3)[torch.tensor([0, 2])],
    "indexed by a list": lambda: on_gpu(3)[[0, 2]],
    "a CPU scalar put": lambda: put(on_gpu(3), torch.tensor([0]), torch.tensor(2.0)),
    "copied over": lambda: on_gpu(2).copy_(torch.zeros(2)),
    "a slice copied over": lambda: put(on_gpu(2, 2), 0, torch.zeros(2)),
    "sent": lambda: torch.ones(2).to(GPU),
    "made there": lambda: torch.arange(3, device=on_gpu().device),
    "made there of values": lambda: torch.tensor([1, 2], device=GPU),
    "made alike": lambda: torch.zeros_like(on_gpu(2)).new_ones(3),
    "random": lambda: torch.rand(2, device=GPU, generator=torch.Generator(GPU)),
    "a gradient": lambda: torch.autograd.grad((x := on_gpu(2).requires_grad_()).square().sum(), x)[0],
}
REFUSED = {
    "a CPU tensor": lambda: on_gpu(2) * torch.ones(2),
    "a CPU tensor of one number": lambda: on_gpu(2) * torch.ones(1),
    "a CPU scalar changed": lambda: torch.tensor(1.0).add_(on_gpu()),
    "a CPU tensor changed": lambda: torch.ones(2).mul_(on_gpu(2)),
    "product": lambda: on_gpu(2, 3) @ torch.ones(3, 2),
    "cat": lambda: torch.cat([on_gpu(2), torch.ones(2)]),
    "stack of scalars": lambda: torch.stack([on_gpu(), torch.tensor(1.0)]),
    "where with a CPU condition": lambda: torch.where(torch.ones(2) > 0, on_gpu(2), on_gpu(2)),
    "masked_fill with a CPU mask": lambda: on_gpu(2).masked_fill(torch.ones(2) > 0, 0.0),
    "CPU tensor indexed from the GPU": lambda: torch.ones(3)[torch.tensor([0], device=GPU)],
    "CPU tensor put from the GPU": lambda: put(torch.ones(3), torch.tensor([0]), on_gpu(1)),
    "CPU values put": lambda: put(on_gpu(3), torch.tensor([0, 1]), torch.ones(2)),
    "gather": lambda: on_gpu(3).gather(0, torch.tensor([0])),
    "index_select": lambda: on_gpu(3).index_select(0, torch.tensor([0])),
    "index_add": lambda: on_gpu(3).index_add(0, torch.tensor([0]), on_gpu(1)),
    "isin": lambda: torch.isin(on_gpu(3), torch.ones(2)),
    "embedding": lambda: torch.nn.functional.embedding(torch.tensor([0]), on_gpu(3, 2)),
    "pinned on the GPU": lambda: on_gpu(2).pin_memory(),
    "a CPU generator": lambda: torch.rand(2, device=GPU, generator=torch.Generator()),
    "a GPU generator on the CPU": lambda: torch.rand(2, generator=torch.Generator(GPU)),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_allowed(case, gpu):
    assert ALLOWED[case]().device == GPU


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, gpu):
    with pytest.raises(Refused, match="expected"):
        REFUSED[case]()


WAITS = {
    "item": lambda x: x[0].item(), "float": lambda x: float(x[0]), "bool": lambda x: bool((x > 0).all()),
    "tolist": lambda x: x.tolist(), "cpu": lambda x: x.cpu(), "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(), "mask": lambda x: x[x > 0], "equal": lambda x: torch.equal(x, x),
    "copied back": lambda x: torch.zeros(2).copy_(x),
}  # fmt: skip


@pytest.mark.parametrize("case", WAITS)
def test_a_wait_is_counted(case, gpu):
    x = on_gpu(2)
    (x * 2).sum(0, keepdim=True).exp()
    assert gpu.waits.total() == 0
    WAITS[case](x)
    assert gpu.waits.total() == 1


# ---- a step's tensors ------------------------------------------------------------------------------------------------


def trajectories() -> list[Trajectory]:
    """3 prompts x 3 completions of one to three turns in an environment with states, rewards in the middle, texts of
    tools, one row that is a demonstration, one cut off, and what remax and gdpo want."""
    random, made = torch.Generator().manual_seed(0), []
    for group in range(3):
        prompt = [10 + group] * (3 + 2 * group)
        for member in range(3):
            mask = ([1, 1, 1, 0] * 3)[: 2 + 4 * (group + member > 1) + member]
            n = len(mask)
            ids = torch.randint(10, 1000, (n,), generator=random).tolist()
            rewards = [float(m and t % 4 == 2 and (member + t) % 3) for t, m in enumerate(mask)]
            rewards[n - 1 - mask[::-1].index(1)] += float(member == group)
            info = {"states": [("cell", t // 4 + member % 2) if m else None for t, m in enumerate(mask)]}
            info |= {"baselines": 0.5, "reward_components": [float(member), float(group == member)]}
            logprobs = [float("nan") if group == member == 2 else -7.0 * m for m in mask]
            reason = "length" if member == 0 else "stop"
            row = Trajectory({}, group, prompt, ids, mask, logprobs, rewards, finish_reason=reason, info=info)
            made.append(row)
    return made


def settings(**options) -> train_ppo.TrainConfig:
    base = dict(num_generations=3, compute_dtype="float32", advantage="dr_grpo", max_steps=2, beta=0.05)
    return train_ppo.TrainConfig(**(base | dict(kl_in_reward=False, tokens_per_microbatch=50) | options))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(script, "load_hf_model", ragged.small_llama)


def on_the_gpu(batch) -> bool:
    return all(x.device == GPU for x in vars(batch).values() if isinstance(x, torch.Tensor))


def complete_batch() -> script.Batch:
    """Every field of it is filled; on the CPU."""
    batch = script.collate(trajectories(), 0, torch.device("cpu"))
    wave = batch.input_ids.float().sin()
    batch.old_logprobs, batch.ref_logprobs = (batch.loss_mask * (wave * a - 7) for a in (0.2, 0.3))
    batch.entropy, batch.sum_pi_squared, batch.values = (batch.loss_mask * a for a in (6.0, 0.01, 0.1))
    batch.returns, batch.advantages = batch.values + wave * batch.loss_mask, wave * batch.loss_mask
    return batch


complete = pytest.fixture(scope="module")(complete_batch)


def sent(complete, device=GPU) -> script.Batch:
    """The batch on the GPU: laid out there, and filled in."""
    batch = script.collate(trajectories(), 0, device)
    missing = {name for name, x in vars(complete).items() if getattr(batch, name) is None and x is not None}
    return replace(batch, **{name: getattr(complete, name).to(device) for name in missing})


def test_a_batch_on_the_gpu(gpu):
    batch = script.collate(trajectories(), 0, GPU)
    assert on_the_gpu(batch) and batch.states is not None and batch.reward_components is not None
    assert on_the_gpu(batch.select([0, 4]))


@pytest.mark.parametrize("options", [dict(), dict(scale_rewards="batch"), dict(scale_rewards="none", gamma=0.9)])
@pytest.mark.parametrize("name", sorted(script.ADVANTAGES))
def test_advantages(name, options, gpu, complete):
    batch = sent(complete)
    for states in (batch.states, None):
        batch.states = states
        script.add_advantages(batch, settings(advantage=name, **options))
        assert on_the_gpu(batch) and batch.advantages.cpu().any()


def logprobs_of(batch):
    return (batch.old_logprobs + 0.1 * batch.input_ids.float().cos() * batch.loss_mask).requires_grad_()


@pytest.mark.parametrize("old", ["recompute", "sampler", "current"])
@pytest.mark.parametrize("name", sorted(script.POLICY_LOSSES))
def test_policy_losses(name, old, gpu, complete):
    """Every loss, with its choice among all tokens if it makes one."""
    batch, cfg = sent(complete), settings(policy_loss=name, old_logprobs=old, **ragged.SETTINGS.get(name, {}))
    if choose := getattr(script.POLICY_LOSSES[name], "choose", None):
        batch.chosen = choose(logprobs_of(batch), batch, cfg)
    leaf = logprobs_of(batch)
    loss, stats = script.check_loss(script.POLICY_LOSSES[name](leaf, batch, cfg), batch, cfg)
    loss.sum().backward()
    assert leaf.grad.device == GPU and all(x.device == leaf.device for x in stats.values())


@pytest.mark.parametrize("mode", ["none", "token", "sequence"])
@pytest.mark.parametrize("outside", ["clamp", "mask"])
def test_corrections(mode, outside, gpu, complete):
    batch = sent(complete)
    cfg = settings(correction=mode, correction_mode=outside, reject_below=0.5, off_policy_threshold=0.1)
    weights = script.correction(logprobs_of(batch), batch, cfg)
    stats = script.mismatch_statistics(logprobs_of(batch), weights, batch, cfg)
    assert weights.device == GPU and all(x.device == weights.device for x in stats.values())


@pytest.mark.parametrize("name", script.KL_ESTIMATORS)
def test_kl_estimators(name, gpu, complete):
    batch = sent(complete)
    kl = script.KL_ESTIMATORS[name](logprobs_of(batch), batch.ref_logprobs)
    kl.sum().backward()
    assert kl.device == GPU


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean", "seq_sum", "constant"])
def test_token_weights(aggregation, gpu, complete):
    counts = dict(num_tokens=30.0, num_sequences=9.0, max_tokens=20)
    assert script.token_weights(sent(complete).loss_mask, aggregation, **counts).device == GPU


@pytest.mark.parametrize("std", ["none", "group", "batch", "running"])
@pytest.mark.parametrize("mean", ["none", "group", "batch", "running"])
def test_shaped_rewards(mean, std, gpu, complete):
    batch, moments = sent(complete), {}
    for kl_in_reward in (False, True):
        cfg = settings(reward_mean=mean, reward_std=std, kl_in_reward=kl_in_reward)
        script.shape_rewards(batch, cfg, moments)
        assert on_the_gpu(batch)


def test_rows_and_tokens_are_left_out(gpu, complete):
    batch, cfg = sent(complete), settings(mask_truncated=True, group_std_min=0.1, top_entropy_quantile=0.5)
    script.leave_out(batch, trajectories(), cfg)
    assert on_the_gpu(batch)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows(attention, shared, gpu, complete):
    batch, cfg = sent(complete), settings(shared_prefix=shared, attn_implementation=attention)
    assert len(script.micro_batches(batch, cfg)) > 1
    inputs, *places = script.pack(batch, cfg)
    assert all(x.device == GPU for x in (*inputs.values(), *places))
    assert all(on_the_gpu(part) for part in script.minibatches(batch, replace(cfg, num_minibatches=2)))


# ---- whole steps -----------------------------------------------------------------------------------------------------

STEPS = {
    "several updates": dict(num_iterations=2, num_minibatches=2, policy_loss="kl_cov", kl_cov_ratio=0.2),
    "LoRA, plain rows": dict(use_peft=True, kl_in_reward=True, shared_prefix=False),
    "entropy, output layer in chunks": dict(entropy_target=1.0, logprob_chunk=4, top_entropy_quantile=0.5),
    "a reference that follows": dict(ref_sync_steps=1, kl_target=0.1),
    "checkpointed activations": dict(gradient_checkpointing=True, advantage="otb", loss_agg="constant"),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step(case, gpu, small):
    """From trajectories to weights, as `train` goes."""
    cfg = settings(**STEPS[case])
    policy, inner = script.load_policy(cfg, GPU)
    reference, optimizer = script.load_reference(cfg, GPU), script.make_optimizer(policy, cfg)
    batch = script.collate(trajectories(), 0, GPU)
    script.add_logprobs(batch, policy, reference, inner, cfg)
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


def test_a_recurrent_layer_is_tried_on_the_gpu(gpu, monkeypatch, tmp_path):
    """What cannot be tried is taken for a layer that cannot go on from a prompt's state."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # none for what is claimed
    model = AutoModelForCausalLM.from_pretrained(families.saved("lfm2", tmp_path))
    mixer = recurrence.mixers_of(model)[0]
    assert recurrence.unlike(mixer, model.config.hidden_size, GPU) == ""


@pytest.mark.parametrize("replay", [False, True])
def test_balanced_experts(replay, gpu, monkeypatch):
    """Replayed experts come from the server, and wait in CPU memory."""
    model = made("qwen3_moe", torch.float32)
    for part in filter(lambda module: hasattr(module, "config"), model.modules()):
        part.config._experts_implementation_internal = "eager"  # the GPU that is claimed has no histc
    monkeypatch.setattr(script, "load_hf_model", lambda cfg, dtype: model)
    cfg = settings(router_aux_coef=0.3, beta=0.0)
    policy, inner = script.load_policy(cfg, GPU)
    sampled = trajectories()
    for t in sampled if replay else ():
        places = len(t.prompt_ids) + len(t.token_ids)
        t.info["routed_experts"] = np.tile(np.arange(2, dtype=np.int16), (places, 3, 1))  # [T, layers, chosen]
    batch = script.collate(sampled, 0, GPU)
    script.add_advantages(batch, cfg)
    script.accumulate_gradients(policy, batch, cfg)
    assert inner.routing.pull.device == torch.device(GPU)
    assert inner.routing.pull.cpu().count_nonzero() == (2 if replay else 8)


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
    policy, inner = script.load_policy(cfg, GPU)
    generator = script.make_generator(cfg, inner.hf_model, tokenizer, GPU)
    script.push_weights(policy, generator, 0, 1)
    assert all(p.device == GPU for p in generator.model.parameters())
    generator.seed(7)
    for options in (dict(), dict(top_k=5, top_p=0.9, min_p=0.01, min_tokens=2), dict(temperature=0.0)):
        several = [generator.generate(ids, n=2, max_tokens=4 + len(ids), **options) for ids in ([5, 6], [7, 8, 9])]
        for completion in sum(asyncio.run(gathered(several)), []):
            assert 1 <= len(completion.token_ids) <= 7


async def gathered(several):
    return await asyncio.gather(*several)


def length(completions, **_):
    return [float(len(text)) for text in completions]


def test_evaluation(gpu, tokenizer, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    options = dict(model_id=str(make_tiny()), generator="hf", max_completion_length=6, eval_generations=2)
    cfg = settings(**options, rollout="single_turn")
    model = script.load_hf_model(cfg, torch.float32)
    generator = script.make_generator(cfg, model, tokenizer, GPU)
    rows = [{"prompt": "1 + 1 ="}, {"prompt": "Count to three:"}]
    metrics, shown = script.evaluate(rows, generator, {"length": length}, cfg, 0)
    assert metrics["eval/rows"] == 2 and len(shown) == 2


def test_a_checkpoint(gpu, small, tokenizer, tmp_path):
    """Saved from the GPU, loaded onto it: weights and Adam's moments."""
    cfg, saved = settings(use_peft=True), {}
    for step in (1, 2):
        policy, inner = script.load_policy(cfg, GPU)
        optimizer = script.make_optimizer(policy, cfg)
        modules = {"policy": (policy, optimizer)}
        if step == 2:
            checkpoints.load_checkpoint(tmp_path, 1, modules, {}, [Trajectory])
            now = [p.cpu() for p in policy.parameters()] + [s["exp_avg"].cpu() for s in optimizer.state.values()]
            assert all(map(torch.equal, now, saved))
            assert all(s["exp_avg"].device == GPU for s in optimizer.state.values())
        batch = script.collate(trajectories(), 0, GPU)
        script.add_advantages(batch, cfg)
        script.update(policy, optimizer, batch, replace(cfg, beta=0.0), step)
        saved = [p.detach().cpu() for p in policy.parameters()]
        saved += [s["exp_avg"].cpu() for s in optimizer.state.values()]
        buckets = script.weight_buckets(policy, 2**20, torch.float32)
        state = {"num_tokens": 3}
        checkpoints.save_checkpoint(tmp_path, step, modules, inner.hf_model, buckets, tokenizer, state, {}, 2)


# ---- how often the host waits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_a_micro_batch_waits_a_fixed_number_of_times(shared, gpu, small):
    """Whatever the number of prompts and statistics in it: after each wait the GPU has nothing to do."""
    cfg, waits, passes = settings(shared_prefix=shared, beta=0.0), [], []
    policy, _ = script.load_policy(cfg, GPU)
    batch = script.collate(trajectories(), 0, GPU)
    script.add_advantages(batch, cfg)
    script.start_record(batch)
    for budget in (30, 10_000):
        cut = replace(cfg, tokens_per_microbatch=budget)
        gpu.waits.clear()
        gpu.sent.clear()
        script.accumulate_gradients(policy, batch, cut)
        waits.append(gpu.waits.copy())
        passes.append(len(script.micro_batches(batch, cut)))
    each = {place: (n - waits[1][place]) / (passes[0] - passes[1]) for place, n in waits[0].items()}
    assert passes[1] == 1 and sum(each.values()) <= 5, each
    assert not any("checks.py" in place for place, count in each.items() if count), each  # read once an update
    assert not +gpu.sent, gpu.sent  # from pageable memory, for which it waits, too


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_rewards_run_in_threads_with_the_ranks_gpu(kind, monkeypatch):
    """torch.cuda.set_device holds for one thread: a reward that calls .cuda() would land on GPU 0 on every rank."""
    current = threading.local()
    monkeypatch.setattr(calls, "NEW_THREADS", [lambda: setattr(current, "device", 3)])
    monkeypatch.setattr(calls, "_loop", None)

    async def asynchronous():
        return current.device

    functions = {"plain": lambda: current.device, "async": asynchronous}
    assert asyncio.run(calls.run_limited(functions[kind], {}, 10)) == (3, None)


@pytest.mark.parametrize("given, refuses", [({}, False), ({}, True), ({"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, False)])
def test_segments_grow_unless_the_user_or_the_driver_says_otherwise(given, refuses, monkeypatch):
    said = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    def empty(*shape, device):
        if refuses:
            raise RuntimeError("CUDA driver error: unknown error")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    monkeypatch.setattr(torch, "empty", empty)
    utils.let_segments_grow(GPU)
    wanted = ["expandable_segments:True", "expandable_segments:False"]
    assert said == ([] if given else wanted if refuses else wanted[:1])


def test_shards_in_cpu_memory_travel_from_the_gpu(gpu):
    """--offload: what a push gathers goes to the GPU first, or gloo would carry it."""
    if dist.is_initialized():  # by a test before, in this process
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh(GPU.type, (2,), mesh_dim_names=("shard",))
        bucket = []
        for name, shape in (("matrix", (3, 2)), ("vector", (5,))):
            whole = torch.empty(shape, device="meta")
            spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(whole.shape, whole.stride(), torch.float32))
            bucket.append((name, DTensor(torch.ones(-(-shape[0] // 2), *shape[1:]), spec, requires_grad=False)))
        with Collectives() as collectives:
            whole = script.gathered(bucket, keep=True)
        assert collectives.seen == [("allgather_into_tensor_coalesced_", 4 * (2 * 2 + 3), GPU.type)]
        assert [(name, tuple(t.shape), t.device) for name, t in whole] == [
            ("matrix", (3, 2), GPU),
            ("vector", (5,), GPU),
        ]
    finally:
        dist.destroy_process_group()
