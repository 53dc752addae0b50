"""Ideas of one's own: what a function says about itself, and the place for a term beside the policy loss."""

import asyncio
import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ragged
import steps
import torch

import rewards
import rollouts
import train_grpo as script
from config import ConfigError, TrainConfig
from envs.turns import answer_to
from inputs.trajectory import Completion
from inputs.vision import Prompt
from rollouts import RolloutError, Trajectory

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    """(config, policy, its Policy, a batch) of a small random Llama."""
    monkeypatch.setattr(script, "load_hf_model", ragged.small_llama)
    cfg = TrainConfig(compute_dtype="float32", beta=0.0, tokens_per_microbatch=60)
    policy = script.load_policy(cfg, CPU)
    inner = script.unwrapped(policy)
    return cfg, policy, inner, ragged.local_batch(0, 1)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(num_generations=1), "--num_generations=1: grpo compares"),
        (dict(num_generations=1, advantage="turn", scale_rewards="none"), None),
        (dict(advantage="remax", reward_mean="batch"), "--advantage remax: it compares raw scores"),
        (dict(policy_loss="kimi", old_logprobs="sampler"), "--policy_loss kimi: it has no ratio"),
    ],
)
def test_settings_an_algorithm_cannot_work_with(settings, message):
    cfg = TrainConfig(**settings)
    if message is None:
        return script.checks.check_functions(script.in_use(cfg), cfg)
    with pytest.raises(ConfigError, match=message):
        script.checks.check_functions(script.in_use(cfg), cfg)


@pytest.mark.parametrize("field", ["entropy", "sum_pi_squared", "ref_logprobs"])
def test_an_advantage_gets_what_it_asks_for(field, small, monkeypatch):
    """And is told how to ask, where it reads what nobody computed."""
    cfg, policy, inner, batch = small
    source = (
        f"def mine(batch, cfg):\n    return batch.{field} * batch.loss_mask, {{'mine/mean': batch.{field}.mean()}}\n"
    )
    names: dict = {}
    exec(source, names)
    mine, cfg = names["mine"], replace(cfg, advantage="mine")
    monkeypatch.setitem(script.ADVANTAGES, "mine", mine)
    batch.old_logprobs = batch.ref_logprobs = None
    script.add_logprobs(batch, policy, None, cfg)
    with pytest.raises((TypeError, AttributeError), match=rf"are None, .*{field}.*\.needs"):
        script.add_advantages(batch, cfg)
    mine.needs = (field,)
    reference = policy if field == "ref_logprobs" else None
    script.add_logprobs(batch, policy, reference, cfg)
    metrics = script.add_advantages(batch, cfg)
    assert metrics["mine/mean"] != 0 and metrics["advantages/abs_mean"] > 0
    assert metrics["advantages/frac_zero_groups"] == 0.0


def test_a_loss_gives_its_statistics_beside_it(small, monkeypatch):
    cfg, policy, _, batch = small
    batch.sampling_logprobs = batch.loss_mask * -7.0
    monkeypatch.setitem(script.POLICY_LOSSES, "mine", lambda logprobs, batch, cfg: -batch.advantages * logprobs)
    with pytest.raises(TypeError, match=r"policy loss 'mine' must return \(loss per token .*dict of statistics"):
        script.accumulate_gradients(policy, batch, replace(cfg, policy_loss="mine"))


@pytest.mark.parametrize("score", [0.1, 8.1, 1999.9])
def test_equal_scores_have_no_signal_whatever_they_are(score):
    """A std in float32 is above 1e-6 from 8.1 on, though all are equal."""
    group = [Trajectory({}, 0, [0], [0], [1], [0.0], [score]) for _ in range(8)]
    assert not script.has_signal(group, TrainConfig())
    group[0].token_rewards = [score + 0.01]
    assert script.has_signal(group, TrainConfig())


def test_a_term_of_ones_own(small, monkeypatch):
    """It sees rows and step, is logged, counts for silent groups, and is cut as everything else is."""
    cfg, policy, inner, batch = small
    batch.advantages = batch.advantages * (batch.groups > 2)[:, None]
    batch.sampling_logprobs = script.all_logprobs(policy, batch, cfg)["logprobs"]
    batch.rows, batch.step = [{"weight": 0.1 * n} for n in range(len(batch))], 3

    def sft(logprobs, entropy, part, cfg):
        weight = torch.tensor([row["weight"] for row in part.rows])[:, None] * (part.step == 3)
        return -weight * logprobs * part.loss_mask, {"sft": -logprobs}

    gradients, sums = {}, {}
    nothing = script.own_term
    for own in (nothing, sft):
        monkeypatch.setattr(script, "own_term", own)
        for budget in (40, 100_000):
            policy.zero_grad()
            sums[own, budget] = script.accumulate_gradients(policy, batch, replace(cfg, tokens_per_microbatch=budget))
            gradients[own, budget] = torch.cat([p.grad.flatten() for p in policy.parameters()])
    with_term = gradients[sft, 40]
    assert (with_term - gradients[sft, 100_000]).norm() < 1e-5 * with_term.norm()
    assert (with_term - gradients[nothing, 40]).norm() > 0.01 * with_term.norm()
    assert sums[sft, 40]["sft"] == pytest.approx(sums[sft, 100_000]["sft"]) and "sft" not in sums[nothing, 40]
    monkeypatch.setattr(script, "own_term", lambda *_: (torch.tensor(1.0), {}))
    with pytest.raises(ValueError, match="own_term returned .*do not average"):
        script.accumulate_gradients(policy, batch, cfg)


def test_a_term_of_entropy_is_the_entropy_bonus(small, monkeypatch):
    """The entropy has its gradient where own_term asks for it, and costs none where it does not."""
    cfg, _, _, batch = small
    batch.sampling_logprobs = batch.loss_mask * -7.0

    def term(logprobs, entropy, part, cfg):
        return -0.5 * entropy, {"bonus": entropy}

    term.entropy_gradient = True

    def gradient(settings, own=None):
        with monkeypatch.context() as patch:
            patch.setattr(script, "own_term", own or script.own_term)
            policy = script.load_policy(settings, CPU)
            inner = script.unwrapped(policy)
            sums = script.accumulate_gradients(policy, batch, settings)
        return torch.cat([p.grad.flatten() for p in policy.parameters()]), sums, inner.entropy_gradient

    by_flag, _, _ = gradient(replace(cfg, entropy_coef=0.5))
    by_term, sums, has_gradient = gradient(cfg, term)
    plain, _, unread = gradient(cfg)
    assert has_gradient and not unread
    assert (by_flag - by_term).norm() < 1e-6 * by_flag.norm() < 0.1 * (by_flag - plain).norm()
    assert sums["bonus"] > 0


def test_a_statistic_of_rows_is_a_mean_over_them(small, monkeypatch):
    """[B] counts completions alike, [B, 1] by their tokens; however the update is cut."""
    cfg, policy, _, batch = small
    batch.sampling_logprobs = batch.loss_mask * -7.0

    def loss(logprobs, part, cfg):
        lengths = part.loss_mask.sum(1)
        return -part.advantages * logprobs, {
            "by_row": lengths,
            "tokens_of": lengths[:, None],
            "longest_max": lengths,
        }

    monkeypatch.setitem(script.POLICY_LOSSES, "mine", loss)
    lengths = batch.loss_mask.sum(1)
    for budget in (40, 100_000):
        settings = replace(cfg, policy_loss="mine", tokens_per_microbatch=budget)
        means = script.checks.means_of(script.accumulate_gradients(policy, batch, settings))
        assert means["by_row"] == pytest.approx(float(lengths[lengths > 0].mean()))
        assert means["tokens_of"] == pytest.approx(float((lengths**2).sum() / lengths.sum()))
        assert means["longest_max"] == float(lengths.max())


def test_a_statistic_of_a_group_or_the_batch_is_refused_in_a_loss(small, monkeypatch):
    """Which sees a micro-batch, that may cut groups. What .prepare computes before: test_ideas_hold.py."""
    cfg, policy, inner, batch = small
    batch.sampling_logprobs = batch.loss_mask * -7.0

    def in_a_part(logprobs, part, cfg):
        return -part.advantages * logprobs * script.group_mean(part.scores, part.groups)[:, None], {}

    def of_the_batch(logprobs, part, cfg):
        return -part.advantages * logprobs * script.utils.global_moments(logprobs, part.loss_mask)[2], {}

    for wrong, what in ((in_a_part, "a statistic of a group"), (of_the_batch, "a statistic of the batch")):
        monkeypatch.setitem(script.POLICY_LOSSES, "mine", wrong)
        with pytest.raises(RuntimeError, match=f"{what} was asked for inside a loss.*NAME.prepare"):
            script.accumulate_gradients(policy, batch, replace(cfg, policy_loss="mine", shared_prefix=False))
    script.group_mean(batch.scores, batch.groups)  # outside of one it is as ever


def test_numbers_of_ones_own_travel_with_a_trajectory():
    """From info["extras"] into batch.extras, by completion or by token, through every selection of rows."""
    ones = [Trajectory({}, n, [0] * (n + 1), [7, 8], [1, 1], [0.0] * 2, [0.0, 1.0]) for n in range(3)]
    ones[1].info["extras"] = {"demo": True, "hint": [0.5, 2]}
    batch = script.collate(ones, 0, CPU)
    assert batch.extras["demo"].tolist() == [0, 1, 0]
    assert batch.extras["hint"].tolist() == [[0] * 5, [0, 0, 0.5, 2, 0], [0] * 5]
    part = batch.select([1])
    assert part.extras["demo"].tolist() == [1] and part.extras["hint"].tolist() == [[0, 0, 0.5, 2]]


# ---- a rollout of one's own -----------------------------------------------------------------------------------------


class Sampler:
    """Completions of three tokens."""

    vocab_size = 1000
    tokenizer = SimpleNamespace(chat_template=None, decode=lambda ids, **_: " ".join(map(str, ids)))

    async def generate(self, prompt_ids, *, n, **options):
        return [Completion([7, 8, 9], [-1.0] * 3, "stop", 0, list(prompt_ids)) for _ in range(n)]


def tree(rows, cfg, count):
    made = lambda row: Trajectory(row, 0, [5], [7, 8, 9], [1, 0, 1], [-1.0, 0.0, -1.0], [0.0] * 3)  # noqa: E731
    return [made(row) for row in rows for _ in range(count)]


def rolled_out(monkeypatch, rollout, rows=None, functions=None, **settings):
    """Groups of a call of the script's `rollout` with this entry in ROLLOUTS, and the configs that it was given."""
    seen = []

    async def mine(rows, generator, cfg):
        seen.append(cfg)
        return await rollout(rows, generator, cfg)

    for name, value in vars(rollout).items():
        setattr(mine, name, value)
    monkeypatch.setitem(rollouts.ROLLOUTS, "mine", mine)
    cfg = TrainConfig(rollout="mine", **{"num_generations": 4, "reward_funcs": ["length"]} | settings)
    functions = functions or {"length": rewards.REWARDS["length"]}
    return steps.groups_of(rows or [{"prompt": "a"}, {"prompt": "b"}], Sampler(), functions, cfg), seen


def shared(t):
    return [replace(t) for _ in range(4)]


@pytest.mark.parametrize(
    "returned, message",
    [
        (lambda t: None, "returned None, a NoneType. Return a list of Trajectory"),
        (lambda t: [replace(t, logprobs=[float("nan")] * 3), *shared(t)[1:]], "logprobs have nan for a sampled token"),
        (lambda t: [*shared(t)[1:], replace(t, token_ids=[7, 8, 1000])], "token ids go from 5 to 1000, .*0 to 999"),
    ],
)
def test_what_a_rollout_returns_is_compared_with_what_was_asked(returned, message, monkeypatch):
    async def mine(rows, generator, cfg):
        (t,) = tree(rows, cfg, 1)
        return returned(t)

    with pytest.raises(RolloutError, match=message):
        rolled_out(monkeypatch, mine, max_completion_length=8)


def test_a_rollout_that_takes_too_long_or_gives_up_costs_its_row(monkeypatch):
    async def mine(rows, generator, cfg):
        if rows[0]["prompt"] == "a":
            await asyncio.sleep(1000)
        elif rows[0]["prompt"] == "b":
            raise rollouts.TrajectoryError("no way on", rows[0])
        elif rows[0]["prompt"] == "c":  # a second context, as long as it may be
            await answer_to(Prompt([5] * 9, [5] * 9), 0, generator, cfg)
        return tree(rows, cfg, cfg.num_generations)

    rows = [{"prompt": text} for text in "abcd"]
    monkeypatch.setattr(rollouts, "ROLLOUT_TIMEOUT", 0.2)
    groups, _ = rolled_out(monkeypatch, mine, rows)
    assert [sum("failure" in t.info for t in group) for group in groups] == [4, 4, 4, 0]
    assert groups[0][0].info["failure"].cause == "rollout 'mine' took over 0.2 s"


def test_a_rollout_knows_what_it_is_called_for(monkeypatch):
    """And so do rewards. Beside training there are evaluations and, with remax, a greedy baseline of each prompt."""
    seen, rows = [], [{"prompt": "a", "num_generations": 3}, {"prompt": "b"}]

    async def mine(rows, generator, cfg):
        seen.append((cfg.purpose, cfg.num_generations, cfg.temperature))
        return tree(rows, cfg, cfg.num_generations)

    def scored(completions, cfg, **columns):
        assert (cfg.purpose, cfg.num_generations, cfg.temperature) in seen
        return [float(cfg.purpose == "train")] * len(completions)

    monkeypatch.setitem(rollouts.ROLLOUTS, "mine", mine)
    monkeypatch.setattr(script.utils, "check_fresh", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    cfg = TrainConfig(rollout="mine", num_generations=4, advantage="remax", reward_funcs=["mine"], eval_generations=2)
    sampler = SimpleNamespace(next=lambda step: [0, 1], extra=lambda *_: [])
    sampled, _ = asyncio.run(steps.sampled(rows, sampler, 0, Sampler(), {"mine": scored}, cfg))
    assert sorted(seen) == [("baseline", 1, 0.0)] * 2 + [("train", 3, 1.0), ("train", 4, 1.0)]
    assert [len(group) for group in sampled] == [3, 4]
    assert sampled[0][0].info["baselines"] == 0.0
    seen.clear()
    run = SimpleNamespace(held_out=rows, generator=Sampler(), reward_functions={"mine": scored}, log=None)
    metrics = script.evaluate(run, replace(cfg, log_completions=False), 0)
    assert seen == [("eval", 2, 1.0)] * 2 and metrics["eval/pass@2"] == 0.0


@pytest.mark.parametrize("first, last, fine", [(3, 3, True), (3, 4, True), (2, 3, False), (2, 2, False), (4, 5, False)])
def test_a_completion_of_other_weights_than_allowed_ends_the_run(first, last, fine, monkeypatch):
    async def mine(rows, generator, cfg):
        return [replace(t, policy_version=first, policy_version_last=last) for t in tree(rows, cfg, 4)]

    monkeypatch.setitem(rollouts.ROLLOUTS, "mine", mine)
    cfg = TrainConfig(rollout="mine", num_generations=4, reward_funcs=["length"])
    given = {"prompt": "a"}, Sampler(), {"length": rewards.REWARDS["length"]}, cfg, range(3, 5)
    with contextlib.nullcontext() if fine else pytest.raises(RuntimeError, match=f"{first} to {last}, not 3 to 4"):
        asyncio.run(script.rollout(*given))


# ---- groups of several sizes ----------------------------------------------------------------------------------------


def test_rows_say_how_many_completions_they_get():
    rows = [{"prompt": "a", "num_generations": 3}, {"prompt": "b", "num_generations": None}, {"prompt": "c"}]
    assert rollouts.group_sizes(rows, TrainConfig(num_generations=5)) == [3, 5, 5]
    assert rollouts.group_sizes([{"prompt": "d", "num_generations": 16.0}], TrainConfig()) == [16]
