"""Masks, corrections and adaptive knobs do what they say; a step is made of the prompts that it says."""

import asyncio
import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import local_batch, small_llama
from steps import collected, sampled

import rollouts
import train_grpo as script
from algorithms import checks
from config import TrainConfig
from inputs.trajectory import Completion
from inputs.vision import Prompt
from rollouts import Trajectory

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def policy():
    original, script.load_hf_model = script.load_hf_model, small_llama
    cfg = TrainConfig(compute_dtype="float32", learning_rate=1e-2)
    made = script.load_policy(cfg, torch.device("cpu"))
    script.load_hf_model = original
    return made


def make_batch(policy, cfg) -> script.Batch:
    batch = local_batch(0, 1)
    outputs = script.all_logprobs(policy, batch, cfg)
    batch.sampling_logprobs, batch.entropy, batch.sum_pi_squared = outputs.values()
    batch.old_logprobs = batch.sampling_logprobs.clone()
    batch.baselines, batch.reward_components = torch.full((15,), 0.5), batch.scores[:, None].repeat(1, 2)
    return batch


def test_corrections_weigh_clamp_and_leave_out(policy):
    cfg = TrainConfig(compute_dtype="float32")
    batch = make_batch(policy, cfg)
    trainer = batch.old_logprobs.clone()
    batch.advantages = script.dr_grpo(batch, cfg)
    shift = torch.zeros_like(trainer)
    shift[0] = math.log(3.0)  # row 0: the trainer finds its tokens three times as likely as the sampler did
    batch.sampling_logprobs = (trainer - shift) * batch.loss_mask

    def weights(**options):
        own = replace(cfg, **options)
        w = script.correction(trainer, batch, own)
        return w, script.mismatch_statistics(trainer, w, batch, own)

    sampled = batch.loss_mask > 0
    first, other = sampled[0], sampled[3]
    w, stats = weights()
    assert torch.allclose(w[0][first], torch.tensor(2.0)) and torch.allclose(w[3][other], torch.tensor(1.0))
    assert torch.allclose(stats["sampling/ratio_mean"][0][first], torch.tensor(3.0))  # logged as it is, not clamped
    assert (weights(correction_mode="mask")[0][0][first] == 0).all()
    assert torch.allclose(weights(correction="none")[0], torch.tensor(1.0))
    assert torch.allclose(weights(correction_max=5.0)[0][0][first], torch.tensor(3.0))
    n = float(first.sum())
    assert torch.allclose(weights(correction="sequence", correction_max=1e9)[0][0], torch.tensor(3.0**n))
    w, stats = weights(reject_bounds=[0, 2.5])
    assert (w[0][first] == 0).all() and (w[3][other] == 1).all() and (stats["sampling/left_out"][0] == 1).all()
    batch.advantages = batch.loss_mask * torch.tensor([-1.0] + [1.0] * 14)[:, None]
    batch.sampling_logprobs = (trainer + shift) * batch.loss_mask  # the policy moved away from row 0, a negative one
    assert (weights(off_policy_threshold=1.0)[0][0][first] == 0).all()
    assert (weights(off_policy_threshold=1.2)[0][0][first] > 0).all()


def test_truncated_rows_hopeless_groups_and_sure_tokens_are_left_out(policy):
    cfg = TrainConfig(compute_dtype="float32")
    groups = make_batch(policy, cfg).groups.tolist()
    last = groups.index(max(groups))  # the first row of the last group
    trajectories = [Trajectory({}, g, [1], [2], [1], [0.0], [float(row >= last)]) for row, g in enumerate(groups)]
    trajectories[4].finish_reason = "length"

    def left(**options):
        batch = make_batch(policy, cfg)
        batch.advantages = script.dr_grpo(batch, cfg)
        script.leave_out(batch, trajectories, replace(cfg, **options))
        return batch

    whole = left()
    assert (left(mask_truncated=True).loss_mask[4] == 0).all()
    easy = left(group_mean_bounds=[0.0, 0.5])  # the last group is solved by all
    assert (easy.loss_mask[last:] == 0).all() and torch.equal(easy.loss_mask[:last], whole.loss_mask[:last])
    forks = left(top_entropy_quantile=0.25)
    sampled = whole.loss_mask > 0
    least = whole.entropy[sampled].sort(descending=True).values[int(0.25 * int(sampled.sum())) - 1]
    assert torch.equal(forks.advantages, whole.advantages * (whole.entropy >= least))
    assert torch.equal(forks.loss_mask, whole.loss_mask)  # they still count in the denominators


def test_kl_goes_into_the_reward_and_scores_are_normalised(policy):
    cfg = TrainConfig(compute_dtype="float32", beta=0.5, kl="k1", kl_in_reward=True)
    batch = make_batch(policy, cfg)
    batch.ref_logprobs = batch.old_logprobs - 0.1 * batch.loss_mask
    before, moments = batch.rewards.clone(), {}
    metrics = script.shape_rewards(batch, cfg, moments)
    assert torch.allclose(batch.rewards, before - 0.05 * batch.loss_mask) and metrics["kl"] == pytest.approx(
        0.1, rel=1e-4
    )
    running = replace(cfg, kl_in_reward=False, beta=0.0, reward_mean="running", reward_std="running")
    batch.rewards = before.clone()
    script.shape_rewards(batch, running, moments)
    expected = (before.sum(1) - before.sum(1).mean()) / before.sum(1).std()
    has_token = batch.loss_mask.any(1)
    assert torch.allclose(batch.shaped_scores[has_token], expected[has_token], atol=1e-4) and moments[""][0] == 15
    assert torch.equal(batch.scores, before.sum(1)), "scores stay as the reward functions gave them"
    assert torch.equal(batch.select([1, 4]).scores, before.sum(1)[[1, 4]])


def test_adaptive_beta_matches_the_published_numbers_and_entropy_steers_its_coefficient():
    cfg = TrainConfig(beta=0.001, kl_target=0.1, prompts_per_step=32, num_generations=8)
    up = script.adapt(cfg, {"kl": 0.5})
    down = script.adapt(up, {"kl": 0.01})
    assert [up.beta, down.beta] == pytest.approx([0.00100512, 0.0009999737856], abs=1e-12)
    cfg = TrainConfig(entropy_target=1.0)
    up = script.adapt(cfg, {"entropy": 0.5})
    assert up.entropy_coef == 0.0005 and script.adapt(up, {"entropy": 2.0}).entropy_coef == 0.0


def test_the_entropy_bonus_has_a_gradient_and_raises_the_entropy(policy):
    start = copy.deepcopy(policy.state_dict())
    cfg = TrainConfig(compute_dtype="float32", entropy_coef=1.0, num_iterations=3, learning_rate=1e-3, max_steps=9)
    policy.entropy_gradient = True
    batch = make_batch(policy, cfg)
    batch.advantages = torch.zeros_like(batch.loss_mask)
    script.update(policy, script.make_optimizer(policy, cfg), batch, cfg, 0)
    entropy = script.all_logprobs(policy, batch, cfg)["entropy"]
    policy.entropy_gradient = False
    policy.load_state_dict(start)
    assert entropy.sum() > batch.entropy.sum()


def test_ref_sync_moves_the_reference_part_of_the_way(policy):
    policy, reference = copy.deepcopy(policy), copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.zero_()
    for model in (reference, policy):  # tied: one weight in two modules
        model.hf_model.lm_head.weight = model.hf_model.get_input_embeddings().weight
    script.move_towards(reference, policy, 0.25)
    pairs = zip(reference.parameters(), policy.parameters(), strict=True)
    assert all(torch.allclose(old, 0.25 * new) for old, new in pairs)


@pytest.mark.parametrize(
    ("advantages", "says"),
    [
        (lambda batch: batch.scores, "must be a value per token, .*spread"),
        (lambda batch: batch.loss_mask * math.nan, "nan or infinity"),
        (lambda batch: None, "returned NoneType"),
    ],
)
def test_an_advantage_of_the_wrong_kind_is_named(advantages, says):
    batch = local_batch(0, 1)
    with pytest.raises(ValueError, match=f"(?s)advantage 'mine'.*{says}"):
        checks.advantages_of_part(lambda batch, cfg: advantages(batch), batch, TrainConfig(advantage="mine"))


# ---- collecting a step ----------------------------------------------------------------------------------------------


class Parity:
    """A sampler that needs no model: completion i of a prompt is i tokens long, greedy ones one token."""

    tokenizer = None

    async def generate(self, prompt_ids, *, n, temperature, **options):
        return [Completion([2] * (i + 1), [0.0] * (i + 1), "stop", 0, prompt_ids) for i in range(n)]


def by_row(completion_ids, speaks, **columns):
    """Differs within a group only where the row says so."""
    return [len(ids) * float(s) for ids, s in zip(completion_ids, speaks, strict=True)]


def collect(monkeypatch, rows, reward=by_row, groups=tuple(range(4)), **options):
    monkeypatch.setattr("rollouts.build_prompt", lambda *_: Prompt([1], [1]))
    Parity.tokenizer = type("Tokenizer", (), {"decode": lambda self, ids, **_: str(ids)})()
    cfg = TrainConfig(prompts_per_step=4, num_generations=3, reward_funcs=["by_row"], **options)
    sampler = script.PromptSampler(len(rows), 4, seed=0)
    trajectories, metrics = collected(rows, sampler, 0, Parity(), {"by_row": reward}, cfg)
    assert groups is None or [t.group for t in trajectories] == [g for g in groups for _ in range(3)]
    return trajectories, metrics, sampler


def test_silent_groups_make_room_for_others(monkeypatch):
    rows = [{"prompt": str(n), "speaks": n % 2} for n in range(40)]
    trajectories, metrics, sampler = collect(monkeypatch, rows, dynamic_sampling=True, resample_rounds=20)
    assert all(t.row["speaks"] for t in trajectories) and metrics["dynamic_sampling/silent"] == 0
    silent = sum(1 - rows[i]["speaks"] for i in sampler.next(0))
    assert metrics["dynamic_sampling/resampled"] >= silent > 0
    again, _, _ = collect(monkeypatch, rows, dynamic_sampling=True, resample_rounds=20)
    assert [t.row for t in again] == [t.row for t in trajectories]  # a function of seed and step


@pytest.mark.parametrize("advantage", ["grpo", "gdpo", "reinforce_plus_plus_baseline"])
def test_a_completion_without_a_reward_is_left_out(monkeypatch, advantage):
    """What a judge gave no answer for got a 0, and so an advantage below that of all others."""

    def scored(completion_ids, unread, **columns):
        return [None if len(ids) in u else float(len(ids)) for ids, u in zip(completion_ids, unread, strict=True)]

    rows = [{"prompt": str(n), "unread": lengths} for n, lengths in enumerate([(), (2,), (1, 2), (1, 2, 3)])]
    trajectories, metrics, _ = collect(monkeypatch, rows, scored, groups=None)
    assert metrics["rollout/unrewarded"] == 3 and metrics["rollout/failed"] == 0
    left = {prompt: [len(t.token_ids) for t in trajectories if t.row["prompt"] == prompt] for prompt in "0123"}
    assert left == {"0": [1, 2, 3], "1": [1, 3], "2": [3], "3": [1, 2, 3]}  # of the last none has a reward
    batch = script.collate(trajectories, 0, torch.device("cpu"))
    cfg = TrainConfig(advantage=advantage, reward_funcs=["by_row"])
    script.shape_rewards(batch, cfg, {})
    script.add_advantages(batch, cfg)
    pair = [place for place, t in enumerate(trajectories) if t.row["prompt"] == "1"]
    first, last = (float(batch.advantages[place, 1]) for place in pair)  # of the scores 1 and 3, as if these were all
    assert first < 0 < last and (advantage != "grpo" or first == pytest.approx(-(0.5**0.5), abs=1e-4))


class Late(Parity):
    """Each prompt takes its own time; counts those that were cancelled."""

    def __init__(self, seconds):
        self.seconds, self.begun, self.ended = seconds, 0, 0

    async def generate(self, prompt_ids, **options):
        self.begun += 1
        await asyncio.sleep(self.seconds[self.begun % len(self.seconds)])
        self.ended += 1
        return await super().generate(prompt_ids, **options)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.001, 0.003]), min_size=1, max_size=9),
    st.lists(st.booleans(), min_size=12, max_size=12).filter(any),
    st.integers(0, 3),
)
def test_what_ends_first_does_not_choose_the_groups(seconds, speaks, rounds):
    """Of each place the first group with signal in the order drawn, else the last; none is left running."""
    rows = [{"prompt": str(n), "speaks": float(s)} for n, s in enumerate(speaks)]
    sampler = script.PromptSampler(len(rows), 4, seed=0)
    options = dict(prompts_per_step=4, num_generations=3, reward_funcs=["by_row"], dynamic_sampling=True)
    cfg = TrainConfig(**options, resample_rounds=rounds)
    generator = Late(seconds)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rollouts.build_prompt", lambda *_: Prompt([1], [1]))
        Parity.tokenizer = type("Tokenizer", (), {"decode": lambda self, ids, **_: str(ids)})()

        async def alone():
            found = await sampled(rows, sampler, 0, generator, {"by_row": by_row}, cfg)
            assert len(asyncio.all_tasks()) == 1
            return found

        groups, counts = asyncio.run(alone())
    drawn = sampler.next(0) + sampler.extra(0, sampler.next(0), 4 * rounds)
    asked = 0
    silent = 0
    for place, group in enumerate(groups):
        numbers = drawn[place::4]
        loud = [n for n, number in enumerate(numbers) if rows[number]["speaks"]][:1]
        assert group[0].info["row_number"] == numbers[(loud or [-1])[0]]
        silent += not loud
        asked += loud[0] + 1 if loud else len(numbers)
    assert counts["silent"] == silent
    assert 4 + counts["resampled"] == generator.begun == generator.ended == asked


def test_the_window_of_difficulty_counts_as_signal(monkeypatch):
    rows = [{"prompt": str(n), "speaks": 1 + n % 2} for n in range(40)]  # means 2 and 4
    trajectories, _, _ = collect(monkeypatch, rows, dynamic_sampling=True, resample_rounds=20, group_mean_bounds=[0, 3])
    assert {t.row["speaks"] for t in trajectories} == {1}


def test_without_a_score_of_the_greedy_completion_remax_takes_the_groups_mean():
    ones = [Trajectory({}, 0, [0], [0], [1], [0.0], [score], info={"unrewarded": 0}) for score in (1.0, 0.0)]
    rollouts.tell_baseline(ones, Trajectory({}, 0, [0], [0], [1], [0.0], [0.0], info={"unrewarded": 1}))
    assert [t.info["baselines"] for t in ones] == [0.5, 0.5]


def test_remax_scores_one_greedy_completion_per_prompt(monkeypatch):
    rows = [{"prompt": str(n), "speaks": n} for n in range(4)]
    trajectories, _, _ = collect(monkeypatch, rows, advantage="remax")
    batch = script.collate(trajectories, 0, torch.device("cpu"))
    assert torch.equal(batch.baselines, torch.tensor([float(t.row["speaks"]) for t in trajectories]))
    expected = [len(t.token_ids) * t.row["speaks"] - t.row["speaks"] for t in trajectories]
    first = script.ADVANTAGES["remax"](batch, TrainConfig())[:, 1]
    assert torch.equal(first, torch.tensor(expected, dtype=torch.float))
