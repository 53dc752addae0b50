"""What TRL, verl, prime-rl and AReaL ship: each formula against a loop of its own over plain transformers' log-probs,
on one rank and two, with micro-batches that cut a group."""

import asyncio
import math
from dataclasses import replace

import pytest
import ragged
import torch
from ranks import on_ranks
from server_fixture import make_tiny

import train_grpo as script
import utils
from algorithms.advantages import role_means
from batch import GROUPS
from config import TrainConfig
from hf_generator import HFGenerator
from inputs.processor import load_processor
from rollouts import single_turn

CPU, STEP = torch.device("cpu"), 7
CFG = TrainConfig(compute_dtype="float32", dtype="float32", tokens_per_microbatch=30, shared_prefix=False)
CFG = replace(CFG, correction="none", loss_agg="seq_mean", eval_solved=1.0)
FIELDS = ("sampling_logprobs", "old_logprobs", "ref_logprobs")


def made() -> list:
    """(trajectory, what is added to the policy's log-probs of each token for each of FIELDS) of every completion."""
    generator, out = torch.Generator().manual_seed(3), []
    for number, t in enumerate(ragged.trajectories()):
        t.policy_version = STEP - number % 4
        t.info["spans"] = [(t.policy_version, 0, 2), (STEP - number % 2, 2, len(t.token_ids))]  # a push on the way
        out.append((t, 0.4 * torch.randn(len(FIELDS), len(t.token_ids), generator=generator)))
    return out


def ours(settings: dict) -> dict:
    """Gradient and statistics of one update on this rank."""
    script.load_hf_model = ragged.small_llama  # in a fork
    cfg, rank, world = replace(CFG, **settings), torch.distributed.get_rank(), utils.world_size()
    policy = script.load_policy(cfg, CPU)
    mine = [(t, noise) for t, noise in made() if world == 1 or (t.group >= 3) == (rank == 1)]
    for t, _ in mine:
        t.group -= 3 * rank
    batch = script.collate([t for t, _ in mine], 0, CPU, rank, STEP)
    batch.advantages = script.dr_grpo(batch, cfg)
    now = script.all_logprobs(policy, batch, cfg)["logprobs"]
    for field, name in enumerate(FIELDS):
        values = now.clone()
        for row, (t, noise) in enumerate(mine):
            values[row, len(t.prompt_ids) : len(t.prompt_ids) + len(t.token_ids)] += noise[field]
        setattr(batch, name, values * batch.loss_mask)
    if cfg.old_logprobs != "recompute":
        batch.old_logprobs = None
    if not cfg.beta:
        batch.ref_logprobs = None
    return ragged.gradients(policy, batch, cfg)


def theirs(settings: dict) -> dict:
    """The same in a loop over completions and their sampled tokens."""
    cfg, model, rows = replace(CFG, **settings), ragged.small_llama(None, torch.float32), []
    lags = {}  # of each token, by the row
    for number, (t, noise) in enumerate(made()):
        log_p = model(torch.tensor([t.prompt_ids + t.token_ids])).logits[0].log_softmax(-1)
        places = [i for i, mask in enumerate(t.loss_mask) if mask]
        now = [log_p[len(t.prompt_ids) + i - 1, t.token_ids[i]] for i in places]
        mu, old, ref = ([p.detach() + noise[f, i] for p, i in zip(now, places, strict=True)] for f in range(3))
        rows.append((t, now, mu, old, ref, sum(t.token_rewards)))
        lags[id(t)] = [number % 4 if i < 2 else number % 2 for i in places]
    scores = {g: [s for t, *_, s in rows if t.group == g] for g in range(5)}
    tokens = {g: sum(len(now) for t, now, *_ in rows if t.group == g) for g in range(5)}

    def weights(t, mu, old):
        """Of each token, clamped: pi_old / mu, or the product of them over the completion."""
        d = [float(o - m) for o, m in zip(old, mu, strict=True)]
        d = [sum(d)] * len(d) if cfg.correction == "sequence" else d
        return [min(max(math.exp(x), cfg.correction_min), cfg.correction_max) for x in d]

    total, sampled = 0.0, [row for row in rows if row[1]]
    for t, now, mu, old, ref, score in sampled:
        advantage = score - sum(scores[t.group]) / len(scores[t.group])
        if cfg.old_logprobs == "sampler":
            old = mu
        if cfg.old_logprobs == "interpolate":
            old = [m + a / (a + 1) * (p.detach() - m) for m, p, a in zip(mu, now, lags[id(t)], strict=True)]
        d = [float(o - m) for o, m in zip(old, mu, strict=True)]
        k = {"k1": d, "k2": [x * x / 2 for x in d], "k3": [math.exp(x) - 1 - x for x in d]}[cfg.reject_by[-2:]]
        by = {"tok": k, "sum": [sum(k)], "mea": [sum(k) / len(k)], "max": k}
        k = by[cfg.reject_by.removeprefix("seq_")[:3]]
        k = [math.exp(x) for x in k] if cfg.reject_by.endswith("k1") else k
        inside = [cfg.reject_bounds[0] <= x <= cfg.reject_bounds[1] for x in k]
        kept = inside if cfg.reject_by.startswith("token") else [all(inside)] * len(now)
        w = weights(t, mu, old) if cfg.correction != "none" and cfg.old_logprobs != "sampler" else [1.0] * len(now)
        for i, p in enumerate(now):
            ratio = (p - old[i]).exp()
            if cfg.policy_loss == "dppo_tv":
                moved = float(p.detach().exp() - old[i].exp())
                masked = moved > cfg.epsilon_high if advantage > 0 else -moved > cfg.epsilon
                loss = -advantage * ratio * (not masked) + cfg.dppo_tau * (p - old[i]) ** 2
            else:
                loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - cfg.epsilon, 1 + cfg.epsilon_high))
            loss = loss * w[i] * kept[i]
            if cfg.beta:
                x = p - ref[i]
                kl = {"k1": x, "k3": (-x).exp() - 1 + x}[cfg.kl]
                loss = loss + cfg.beta * (kl * ratio if cfg.kl_ratio else kl)
            filled = [g for g in range(5) if tokens[g]]
            share = {"prompt_mean": 1 / tokens[t.group] / len(filled), "seq_mean": 1 / len(now) / len(sampled)}
            total = total + loss * share[cfg.loss_agg]
    total.backward()
    return {name: p.grad for name, p in model.named_parameters()}


CASES = [
    dict(beta=0.3, kl="k3", kl_ratio=True),
    dict(beta=0.3, kl="k1", kl_ratio=True),
    dict(loss_agg="prompt_mean"),
    dict(correction="token", correction_max=1.2),
    dict(correction="sequence", loss_agg="prompt_mean", correction_max=1.2),
    dict(reject_by="token_k1", reject_bounds=[0.8, 1.3]),
    dict(reject_by="seq_mean_k3", reject_bounds=[0, 0.08]),
    dict(reject_by="seq_max_k1", reject_bounds=[0.5, 2.0]),
    dict(reject_by="seq_sum_k2", reject_bounds=[0, 0.4]),
    dict(policy_loss="dppo_tv", dppo_tau=0.5, epsilon=1e-4, epsilon_high=1e-4, old_logprobs="sampler"),
    dict(old_logprobs="interpolate", correction="token"),
]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_the_gradient_is_that_of_a_loop(settings):
    expected, plain = theirs(settings), theirs({})
    size = max(gradient.norm() for gradient in expected.values())
    assert max((expected[n] - plain[n]).norm() for n in expected) > 0.01 * size, "it changes something"
    for ranks in (1, 2):
        found = on_ranks(ranks, ours, settings)[0]
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() < 2e-5 * size, (ranks, name)


# ---- advantages -----------------------------------------------------------------------------------------------------


RANKS = pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 2), (1, 2)])  # a group lies on one: nothing is asked


@RANKS
def test_maxrl_divides_by_the_mean(rank, world):
    batch = ragged.local_batch(rank, world)
    found = script.ADVANTAGES["maxrl"](batch, CFG)
    for row, (score, group) in enumerate(zip(batch.scores.tolist(), batch.groups.tolist(), strict=True)):
        mine = batch.scores[batch.groups == group].tolist()
        mean = sum(mine) / len(mine)
        expected = (score - mean) / mean if mean > 0 else 0.0
        assert found[row].tolist() == pytest.approx([expected * m for m in batch.loss_mask[row].tolist()], abs=1e-6)


def of_roles() -> tuple[list, dict]:
    """rae in two steps of the same scores, the second times ten."""
    batch, means, out = ragged.local_batch(torch.distributed.get_rank(), utils.world_size()), {}, []
    offset = 3 * torch.distributed.get_rank()
    batch.rows = [{"role": "first" if g % GROUPS + offset in (1, 4) else "second"} for g in batch.groups.tolist()]
    for _ in range(2):
        batch.baselines = role_means(batch, means)
        out.append(script.ADVANTAGES["rae"](batch, CFG).sum(1).tolist())
        batch.rewards = 10 * batch.rewards
    return [*zip(batch.groups.tolist(), *out, strict=True)], means


def test_rae_keeps_a_mean_of_each_role_over_all_ranks():
    rows = ragged.trajectories()
    roles = ["first" if t.group in (1, 4) else "second" for t in rows]
    scores, means = [sum(t.token_rewards) for t in rows], {}
    now = {r: [s for s, role in zip(scores, roles, strict=True) if role == r] for r in ("first", "second")}
    now = {r: sum(values) / len(values) for r, values in now.items()}
    means = {r: 0.95 * mean + 0.05 * 10 * mean for r, mean in now.items()}
    for ranks in (1, 2):
        found = on_ranks(ranks, of_roles)
        assert all(of_rank[1] == pytest.approx(means) for of_rank in found)
        values = sum((of_rank[0] for of_rank in found), [])
        for (_, first, second), t, role, score in zip(values, rows, roles, scores, strict=True):
            tokens = sum(t.loss_mask)
            assert first == pytest.approx(tokens * (score - now[role]), abs=1e-5)
            assert second == pytest.approx(tokens * (10 * score - means[role]), abs=1e-4)


# ---- the last product -----------------------------------------------------------------------------------------------


def test_the_output_layer_in_float32_multiplies_in_it(monkeypatch):
    """Of hidden states in bfloat16, as autocast makes them: what a cast behind a product in bfloat16 is not."""
    monkeypatch.setattr(script, "load_hf_model", ragged.small_llama)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets, found = torch.arange(5), {}
    for dtype in ("auto", "float32"):
        inner = script.load_policy(replace(CFG, head_dtype=dtype), CPU)
        with torch.autocast("cpu", torch.bfloat16):
            found[dtype] = inner.head(hidden, targets, 1.0)["logprobs"]
    weight = inner.hf_model.lm_head.weight
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)[targets, targets]
    assert (found["float32"] - exact).abs().max() < 5e-6 < 1e-4 < (found["auto"] - exact).abs().max()


# ---- stop strings ---------------------------------------------------------------------------------------------------


def test_sampling_ends_with_the_token_that_completes_a_text():
    """What was sampled up to there is trained on. Evaluations sample with the same options."""
    processor = load_processor(str(make_tiny()))
    model = script.load_hf_model(TrainConfig(model_id=str(make_tiny())), torch.float32)
    generator = HFGenerator(model, processor)
    row = {"prompt": "Count from one to a hundred."}

    def sampled(**settings):
        generator.seed(5)
        cfg = TrainConfig(num_generations=1, max_completion_length=40, **settings)
        return asyncio.run(single_turn([row], generator, cfg))[0]

    text, whole = (plain := sampled()).info["completion"], plain.token_ids
    stop = next(text[i : i + 2] for i in range(8, len(text)) if text[i : i + 2].isalpha() and text[i : i + 2].isascii())
    end = next(n for n in range(1, len(whole)) if stop in processor.decode(whole[:n], skip_special_tokens=True))
    cut = sampled(stop=["never said", stop])
    assert cut.token_ids == whole[:end] and cut.finish_reason == "stop" and set(cut.loss_mask) == {1}
    assert stop in cut.info["completion"] and end < len(whole)
