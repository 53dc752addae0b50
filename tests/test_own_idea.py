"""Ideas of one's own: what a function says about itself, and the place for a term beside the policy loss."""

import asyncio
import re
import time
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import gradient_worker
import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

import rewards
import rollouts
import train_grpo as script
import utils
from algorithms import advantages, checks
from config import PRESETS, ConfigError, TrainConfig, load_config, public_config
from hf_generator import HFGenerator
from rollouts import RolloutError, Trajectory
from safety.calls import say_once
from serving import answers
from vllm_client import Completion

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
ENVIRONMENTS = Path(__file__).parent.parent / "docs" / "environments.md"


@pytest.fixture
def small(monkeypatch):
    """(config, policy, its Policy, a batch) of a small random Llama."""
    monkeypatch.setattr(script, "load_hf_model", gradient_worker.small_llama)
    cfg = TrainConfig(compute_dtype="float32", beta=0.0, tokens_per_microbatch=60)
    policy, inner = script.load_policy(cfg, CPU)
    return cfg, policy, inner, gradient_worker.local_batch(0, 1)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(num_generations=1), "--num_generations=1: grpo compares .* at least 2; 8 is usual"),
        (dict(num_generations=1, advantage="turn"), "turn compares"),
        (dict(num_generations=1, advantage="turn", scale_rewards="none"), None),
        (dict(num_generations=1, advantage="remax"), None),
        (dict(num_generations=1, advantage="reinforce_plus_plus"), None),
        (dict(advantage="remax", reward_mean="batch"), "--advantage remax: it compares raw scores"),
        (dict(advantage="gdpo", kl_in_reward=True), "--advantage gdpo: it normalises by itself"),
        (dict(policy_loss="kimi", old_logprobs="sampler"), "--policy_loss kimi: it has no ratio"),
        (dict(policy_loss="gpg", old_logprobs="sampler"), "--policy_loss gpg: it has no ratio"),
        (dict(advantage="gropo"), "Did you mean 'grpo'"),
    ],
)
def test_settings_an_algorithm_cannot_work_with(settings, message):
    if message is None:
        return script.check_algorithm(TrainConfig(**settings))
    with pytest.raises(ConfigError, match=message):
        script.check_algorithm(TrainConfig(**settings))


def said(capsys, cfg) -> str:
    say_once.cache_clear()
    checks.say_without_effect(script.tables(), script.in_use(cfg), vars(script), cfg)
    return capsys.readouterr().out


def test_a_knob_that_nothing_in_use_reads_is_told(monkeypatch, capsys):
    how = dict(gamma=0.9, policy_loss="reinforce", epsilon=0.1, kl_cov_coef=2.0, clip_cov_ratio=0.1)
    told = said(capsys, TrainConfig(**how, advantage="rloo", scale_rewards="none", beta=0.1, learning_rate=1.0))
    names = re.findall(r"^  without effect +--(\w+) (?:0\.1|0\.9|2\.0|none), which is read by --", told, re.MULTILINE)
    assert sorted(names) == ["clip_cov_ratio", "epsilon", "gamma", "kl_cov_coef", "scale_rewards"] and len(names) == 5
    assert "--gamma 0.9, which is read by --advantage reinforce_plus_plus, --advantage turn, --advantage gigpo" in told
    used = dict(advantage="gigpo", gamma=0.9, gigpo_step_weight=0.5, policy_loss="clip_cov", clip_cov_ratio=0.1)
    assert said(capsys, TrainConfig(**used)) == ""  # read by the function, what it calls, what stands below it

    taught = dict(distill_gamma=0.5, distill_clip=3.0, distill_baseline="place", distill_topk=20, teacher_id="a")
    told = said(capsys, TrainConfig(**taught))  # the term beside the loss is none of the advantage's
    assert re.findall(r"--(\w+) \S+, which is read by --advantage distill\n", told) == [
        "distill_gamma", "distill_baseline", "distill_clip",
    ]  # fmt: skip
    assert told.count("without effect") == 3 and said(capsys, TrainConfig(**taught, advantage="distill")) == ""

    @dataclass
    class Own(TrainConfig):
        mine: float = 1.0
        list_of_mine: list[float] = field(default_factory=lambda: [1.0])

    monkeypatch.setitem(script.POLICY_LOSSES, "mine", lambda logprobs, batch, cfg: logprobs * cfg.mine)
    assert said(capsys, Own()) == said(capsys, Own(mine=2.0, policy_loss="mine", list_of_mine=[2.0])) == ""
    assert "--mine 2.0, which is read by --policy_loss mine" in said(capsys, Own(mine=2.0))


@pytest.mark.parametrize(
    ("given", "told", "read"),
    [
        (
            dict(lora_r=8, lora_alpha=16.0),
            "--lora_r 8 and --lora_alpha 16.0, read only with --use_peft",
            dict(use_peft=1),
        ),
        (dict(lora_targets=["q", "v"]), "--lora_targets q v, read only with --use_peft", dict(use_peft=True)),
        (dict(reward_model="x"), "--reward_model x, read only by --rew", dict(reward_funcs=["a.py:f"])),
        (dict(judge_model="x"), "--judge_model x, read only by --reward_funcs judge", dict(reward_funcs=["judge"])),
        (dict(eval_generations=9), "--eval_generations 9, read only with --eval_steps", dict(eval_steps=5)),
        (dict(max_turns=3), "--max_turns 3, read only with --tools", dict(tools=["python"])),
        (dict(hub_repo_id="a/b"), "--hub_repo_id a/b, read only with", dict(push_to_hub=True)),
        (dict(resample_rounds=9), "--resample_rounds 9, read only with --dynamic_", dict(dynamic_sampling=True)),
        (dict(kl_horizon=5e3), "--kl_horizon 5000.0, read only with --kl_target", dict(kl_target=0.1)),
        (dict(ref_sync_alpha=0.1), "--ref_sync_alpha 0.1, read only with --ref_sync_steps", dict(ref_sync_steps=5)),
        (dict(entropy_coef_step=0.1), "--entropy_coef_step 0.1, read only with --ent", dict(entropy_target=0.5)),
        (
            dict(max_turn_length=600, tools=["python"]),
            "--max_turn_length 600, read only below --max_completion_length",
            dict(max_completion_length=700),
        ),
    ],
)
def test_a_setting_that_waits_for_another_is_told(given, told, read, capsys):
    assert f"  without effect         {told}" in said(capsys, TrainConfig(**given))
    assert said(capsys, TrainConfig(**given | read)) == ""


SEEN = {
    "itself": lambda inner: inner,
    "default": lambda inner: lambda batch, cfg, function=inner: function(batch, cfg),
    "module": lambda inner: lambda batch, cfg: advantages.gigpo(batch, cfg),
    "decorated": torch.no_grad(),
    "cached": cache,
    "by getattr": lambda inner: lambda batch, cfg: batch.scores * getattr(cfg, "gigpo_step_weight", 1.0),
}


@pytest.mark.parametrize("way", SEEN)
def test_a_knob_is_found_however_its_reader_is_called(way, monkeypatch, capsys):
    monkeypatch.setitem(script.ADVANTAGES, "mine", SEEN[way](script.ADVANTAGES["gigpo"]))
    used = dict(gigpo_step_weight=0.3, clip_cov_ratio=0.1)
    told = said(capsys, TrainConfig(**used, advantage="mine"))
    assert told.count("without effect") == 1 and "--clip_cov_ratio 0.1" in told
    assert "--gigpo_step_weight 0.3, which is read by" in said(capsys, TrainConfig(**used))


def test_of_a_function_that_cannot_be_looked_into_nothing_is_said(monkeypatch, capsys):
    class Called:
        def __call__(self, batch, cfg):
            return cfg.gamma

    inner = script.ADVANTAGES["gigpo"]
    for function in (max, partial(inner), Called(), Called().__call__, lambda batch, cfg: inner(batch, cfg)):
        monkeypatch.setitem(script.ADVANTAGES, "mine", function)
        assert said(capsys, TrainConfig(gigpo_step_weight=0.3, clip_cov_ratio=0.1, advantage="mine")) == ""


@pytest.mark.parametrize("name", PRESETS)
def test_no_preset_sets_what_it_does_not_use(name, capsys):
    import train_ppo  # noqa: F401 - registers gae

    assert said(capsys, load_config(TrainConfig, ["--preset", name])) == ""


@pytest.mark.parametrize("field", ["entropy", "old_logprobs", "sum_pi_squared", "ref_logprobs"])
def test_an_advantage_gets_what_it_asks_for(field, small, monkeypatch):
    """And is told how to ask, where it reads what nobody computed."""
    cfg, policy, inner, batch = small
    source = (
        f"def mine(batch, cfg):\n    return batch.{field} * batch.loss_mask, {{'mine/mean': batch.{field}.mean()}}\n"
    )
    names: dict = {}
    exec(source, names)
    # Two updates need old log-probs: what that pass computes beside them is no reason to give zeros for the rest.
    mine, cfg = names["mine"], replace(cfg, advantage="mine", num_minibatches=1 + (field == "sum_pi_squared"))
    monkeypatch.setitem(script.ADVANTAGES, "mine", mine)
    batch.old_logprobs = batch.ref_logprobs = None
    script.add_logprobs(batch, policy, None, inner, cfg)
    with pytest.raises(TypeError, match=rf"reads batch.{field}.* write mine.needs = \('{field}',\)"):
        script.add_advantages(batch, cfg)
    mine.needs = (field,)
    reference = policy if field == "ref_logprobs" else None
    script.add_logprobs(batch, policy, reference, inner, cfg)
    metrics = script.add_advantages(batch, cfg)
    assert metrics["mine/mean"] != 0 and metrics["advantages/abs_mean"] > 0
    assert metrics["advantages/frac_zero_groups"] == 0.0


def test_a_group_of_one_is_learned_from_however_far_scores_must_differ():
    """Dynamic sampling kept it; the update left it out, in silence."""
    cfg = TrainConfig(num_generations=1, group_std_min=0.1, advantage="reinforce_plus_plus")
    batch = gradient_worker.local_batch(0, 1)
    batch.groups = torch.arange(len(batch))
    ones = [Trajectory({}, n, [0], [0], [1], [0.0], [1.0]) for n in range(len(batch))]
    assert all(script.has_signal([t], cfg) for t in ones)
    batch.advantages, before = batch.rewards.clone(), batch.loss_mask.clone()
    script.leave_out(batch, ones, cfg)
    assert torch.equal(batch.loss_mask, before)


@pytest.mark.parametrize("score", [0.1, 8.1, 10.1, 1999.9])
def test_equal_scores_have_no_signal_whatever_they_are(score):
    """A std in float32 is above 1e-6 from 8.1 on, though all are equal."""
    group = [Trajectory({}, 0, [0], [0], [1], [0.0], [score]) for _ in range(8)]
    assert not script.has_signal(group, TrainConfig())
    group[0].token_rewards = [score + 0.01]
    assert script.has_signal(group, TrainConfig())


@pytest.mark.parametrize(("right", "of", "bounds"), [(4, 5, (0.0, 0.8)), (7, 10, (0.7, 1.0)), (1, 10, (0.0, 0.1))])
def test_a_bound_of_the_mean_is_still_within_it(right, of, bounds):
    """In float32 .8 is more than .8: dynamic sampling replaced groups that leave_out would have kept."""
    cfg = TrainConfig(num_generations=of, group_mean_min=bounds[0], group_mean_max=bounds[1])
    assert script.has_signal([Trajectory({}, 0, [0], [0], [1], [0.0], [float(n < right)]) for n in range(of)], cfg)


def test_one_completion_a_prompt(monkeypatch):
    def mine(batch, cfg):
        return script.spread(batch.scores, batch.loss_mask)

    monkeypatch.setitem(script.ADVANTAGES, "mine", mine)
    with pytest.raises(ConfigError, match="mine compares"):
        script.check_algorithm(TrainConfig(advantage="mine", num_generations=1))
    mine.compares_group = False
    script.check_algorithm(TrainConfig(advantage="mine", num_generations=1))


def test_a_term_of_ones_own(small, monkeypatch):
    """It sees rows and step, is logged, counts for silent groups, and is cut as everything else is."""
    cfg, policy, inner, batch = small
    batch.advantages = batch.advantages * (batch.groups > 2)[:, None]
    batch.sampling_logprobs = script.all_logprobs(policy, batch, cfg)[0]
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


@pytest.mark.parametrize("of", ["own_term", "policy loss 'mine'"])
def test_a_term_that_trains_nothing_is_refused(of, small, monkeypatch):
    """Detached by mistake it would move the loss, and no weight."""
    cfg, policy, _, batch = small
    mine = lambda logprobs, *_: (-logprobs.detach(), {})  # noqa: E731
    if of == "own_term":
        monkeypatch.setattr(script, "own_term", mine)
    else:
        monkeypatch.setitem(script.POLICY_LOSSES, "mine", mine)
        cfg = replace(cfg, policy_loss="mine")
    with pytest.raises(ValueError, match=f"{of} returned a term without a gradient"):
        script.accumulate_gradients(policy, batch, cfg)


def test_a_term_of_entropy_is_the_entropy_bonus(small, monkeypatch):
    """The entropy has its gradient where own_term reads it, and costs none where it does not."""
    cfg, _, _, batch = small
    batch.sampling_logprobs = batch.loss_mask * -7.0

    def term(logprobs, entropy, part, cfg):
        return -0.5 * entropy, {"bonus": entropy}

    def gradient(settings, own=None):
        with monkeypatch.context() as patch:
            patch.setattr(script, "own_term", own or script.own_term)
            policy, inner = script.load_policy(settings, CPU)
            sums = script.accumulate_gradients(policy, batch, settings)
        return torch.cat([p.grad.flatten() for p in policy.parameters()]), sums, inner.entropy_gradient

    by_flag, _, _ = gradient(replace(cfg, entropy_coef=0.5))
    by_term, sums, has_gradient = gradient(cfg, term)
    plain, _, unread = gradient(cfg)
    assert has_gradient and not unread
    assert (by_flag - by_term).norm() < 1e-6 * by_flag.norm() < 0.1 * (by_flag - plain).norm()
    assert sums["bonus"] > 0


def test_whether_a_function_reads_an_argument_is_seen():
    def renamed(p, h, part, cfg):
        return -0.5 * h, {}

    def inner(logprobs, entropy, part, cfg):
        return [entropy * k for k in range(2)], {}  # in 3.11 a comprehension is a function of its own

    def not_read(logprobs, entropy, part, cfg):
        return -logprobs, {"other": part.scores}

    assert [checks.uses_argument(f, "entropy", 1) for f in (renamed, inner, not_read)] == [True, True, False]
    assert checks.uses_argument(partial(not_read, cfg=1), "entropy", 1) and checks.uses_argument(
        lambda *given: given, "entropy", 1
    )
    assert not checks.uses_argument(script.own_term, "entropy", 1)


def test_statistics_without_a_term_are_kept(small, monkeypatch):
    cfg, policy, _, batch = small
    batch.sampling_logprobs = batch.loss_mask * -7.0
    monkeypatch.setattr(script, "own_term", lambda logprobs, *_: (None, {"surprise": -logprobs}))
    assert script.accumulate_gradients(policy, batch, cfg)["surprise"] > 0


def test_every_function_asks_in_one_way(small, monkeypatch):
    """own_term as an advantage does; and what cannot be computed is refused before anything starts."""
    cfg, policy, inner, batch = small
    batch.old_logprobs = batch.ref_logprobs = None

    def term(logprobs, entropy, part, cfg):
        return -part.ref_logprobs * logprobs, {}

    monkeypatch.setattr(script, "own_term", term)
    with pytest.raises(TypeError, match=r"own_term reads batch.ref_logprobs.*term.needs = \('ref_logprobs',\)"):
        script.accumulate_gradients(policy, batch, cfg)
    term.needs = ("ref_logprobs",)
    script.check_algorithm(cfg)
    script.add_logprobs(batch, policy, policy, inner, cfg)
    script.accumulate_gradients(policy, batch, cfg)
    for wrong, message in (
        ("entropy", r'write a tuple, .needs = \("entropy",\)'),
        (("entropi",), "Did you mean 'entropy'"),
    ):
        term.needs = wrong
        with pytest.raises(ConfigError, match=f"own_term: .*{message}"):
            script.check_algorithm(cfg)
    term.needs = ()
    term.check = lambda cfg: "it wants two ranks"
    with pytest.raises(ConfigError, match="own_term: it wants two ranks"):
        script.check_algorithm(cfg)


def test_a_statistic_of_groups_is_taken_once_and_not_in_a_part(small, monkeypatch):
    """Under micro-batches that cut groups it is the same as in one pass; taken in the loss itself it is refused."""
    cfg, policy, inner, batch = small
    batch.sampling_logprobs = batch.loss_mask * -7.0

    def mine(logprobs, part, cfg):
        long = part.extras["mean_length"][:, None] / part.extras["longest"]
        return -part.advantages * logprobs * long, {"long": long.expand_as(logprobs)}

    def lengths(batch, cfg):
        length = batch.loss_mask.sum(1)
        return {
            "mean_length": script.group_mean(length, batch.groups),
            "longest": script.utils.all_max(float(length.max())),
        }

    def in_a_part(logprobs, part, cfg):
        return -part.advantages * logprobs * script.group_mean(part.scores, part.groups)[:, None], {}

    def of_the_batch(logprobs, part, cfg):
        return -part.advantages * logprobs * script.utils.global_moments(logprobs, part.loss_mask)[2], {}

    monkeypatch.setitem(script.POLICY_LOSSES, "mine", mine)
    mine.prepare = lengths
    cfg = replace(cfg, policy_loss="mine", shared_prefix=False)
    with pytest.raises(
        RuntimeError, match=r"policy loss 'mine' reads batch.extras\['mean_length'\], which nothing gave"
    ):
        script.accumulate_gradients(policy, batch, cfg)
    batch.extras |= checks.prepared(script.in_use(cfg), batch, cfg)
    gradients = []
    for budget in (40, 100_000):
        policy.zero_grad()
        sums = script.accumulate_gradients(policy, batch, replace(cfg, tokens_per_microbatch=budget))
        gradients.append((torch.cat([p.grad.flatten() for p in policy.parameters()]), float(sums["long"])))
    assert (gradients[0][0] - gradients[1][0]).norm() < 1e-5 * gradients[0][0].norm()
    assert gradients[0][1] == pytest.approx(gradients[1][1])
    for wrong, what in ((in_a_part, "a statistic of a group"), (of_the_batch, "a statistic of the batch")):
        monkeypatch.setitem(script.POLICY_LOSSES, "mine", wrong)
        with pytest.raises(RuntimeError, match=f"{what} was asked for inside a loss.*NAME.prepare"):
            script.accumulate_gradients(policy, batch, cfg)
    script.group_mean(batch.scores, batch.groups)  # outside of one it is as ever


def test_an_advantage_finds_what_it_prepares(small, monkeypatch):
    cfg, _, _, batch = small

    def mine(batch, cfg):
        return script.spread(batch.extras["twice"], batch.loss_mask)

    mine.prepare = lambda batch, cfg: {"twice": 2 * batch.scores}
    monkeypatch.setitem(script.ADVANTAGES, "mine", mine)
    script.add_advantages(batch, replace(cfg, advantage="mine"))
    assert torch.equal(batch.advantages, (2 * batch.scores)[:, None] * batch.loss_mask)


@pytest.mark.parametrize(
    "given, message",
    [
        (3, "must return a dict"),
        ({"x": torch.ones(2)}, r"'x' of shape \(2,\); give a number, a tensor with a value for each of the 15 rows"),
        ({"x": [1.0] * 15}, r"'x' \[1.0, 1.0, .*; give a number"),
        ({"x": torch.ones(15, 3)}, r"'x' of shape \(15, 3\)"),
    ],
)
def test_what_prepare_returns_is_looked_at(given, message, small, monkeypatch):
    cfg, _, _, batch = small

    def mine(logprobs, part, cfg):
        return -logprobs, {}

    mine.prepare = lambda batch, cfg: given
    monkeypatch.setitem(script.POLICY_LOSSES, "mine", mine)
    with pytest.raises((TypeError, ValueError), match=f"--policy_loss mine: .prepare .*{message}"):
        checks.prepared(script.in_use(replace(cfg, policy_loss="mine")), batch, cfg)


def test_scores_as_given_and_shaped_ones_have_names_of_their_own(monkeypatch):
    """A threshold sees 0 and 1 under --reward_mean; and an advantage that would not see the shaping is refused."""

    def raw(batch, cfg):
        return script.spread(batch.scores, batch.loss_mask)

    def shaped(batch, cfg):
        return script.spread(batch.shaped_scores * (batch.scores > 0), batch.loss_mask)

    monkeypatch.setitem(script.ADVANTAGES, "mine", raw)
    for settings in (dict(reward_mean="group"), dict(kl_in_reward=True, beta=0.1)):
        with pytest.raises(ConfigError, match=f"--{list(settings)[0]} would have no effect; .*batch.shaped_scores"):
            script.check_algorithm(TrainConfig(advantage="mine", **settings))
    script.check_algorithm(TrainConfig(advantage="mine"))
    monkeypatch.setitem(script.ADVANTAGES, "mine", shaped)
    script.check_algorithm(TrainConfig(advantage="mine", reward_mean="group"))


def test_numbers_of_ones_own_travel_with_a_trajectory():
    """From info["extras"] into batch.extras, by completion or by token, through every selection of rows."""
    ones = [Trajectory({}, n, [0] * (n + 1), [7, 8], [1, 1], [0.0] * 2, [0.0, 1.0]) for n in range(3)]
    ones[1].info["extras"] = {"demo": True, "hint": [0.5, 2]}
    batch = script.collate(ones, 0, CPU)
    assert batch.extras["demo"].tolist() == [0, 1, 0]
    assert batch.extras["hint"].tolist() == [[0] * 5, [0, 0, 0.5, 2, 0], [0] * 5]
    part = batch.select([1])
    assert part.extras["demo"].tolist() == [1] and part.extras["hint"].tolist() == [[0, 0, 0.5, 2]]
    ones[0].info["extras"] = {"hint": 1.0}
    with pytest.raises(ValueError, match="a list for each token here, a single number there"):
        script.collate(ones, 0, CPU)
    ones[0].info["extras"] = {}
    ones[1].info["extras"] = {"hint": [1.0]}
    with pytest.raises(ValueError, match="has 1 numbers for 2 tokens after the prompt"):
        script.collate(ones, 0, CPU)


# ---- a rollout of one's own -----------------------------------------------------------------------------------------


class Sampler:
    """Completions of three tokens, and what was asked for."""

    vocab_size = 1000

    def __init__(self):
        self.tokenizer, self.asked = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids))), []

    async def generate(self, prompt_ids, *, n, **options):
        self.asked.append(n)
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
    groups, _ = asyncio.run(script.rollout(rows or [{"prompt": "a"}, {"prompt": "b"}], Sampler(), functions, cfg))
    return groups, seen


def test_a_rollout_is_called_once_per_row_unless_it_says_otherwise(monkeypatch):
    """With a reward that scores each by itself, too: groups of 4 were 16."""

    async def mine(rows, generator, cfg):
        return tree(rows, cfg, cfg.num_generations)

    groups, seen = rolled_out(monkeypatch, mine)
    assert [len(group) for group in groups] == [4, 4] and [cfg.num_generations for cfg in seen] == [4, 4]
    assert groups[0][0].info["completion"] == "7 9" and groups[0][0].row == {"prompt": "a"}
    mine.per_trajectory = True
    groups, seen = rolled_out(monkeypatch, mine)
    assert [len(group) for group in groups] == [4, 4] and [cfg.num_generations for cfg in seen] == [1] * 8


def test_a_rollout_may_decide_how_many_it_returns_if_it_says_so(monkeypatch):
    async def search(rows, generator, cfg):
        return tree(rows, cfg, 7 if rows[0]["prompt"] == "a" else 3)

    with pytest.raises(RolloutError, match="'mine', asked for 4 .* returned 7.*any_number = True.*\n  row: .*'a'"):
        rolled_out(monkeypatch, search)
    search.any_number = search.per_trajectory = True
    groups, seen = rolled_out(monkeypatch, search)
    assert [len(group) for group in groups] == [7, 3] and len(seen) == 2
    with pytest.raises(RolloutError, match="asked for 1 .*'baseline'.* returned 7. .* 1 for a greedy baseline"):
        rolled_out(monkeypatch, search, num_generations=1, purpose="baseline")


def shared(t):
    return [replace(t) for _ in range(4)]


def uneven(t):
    made = shared(t)
    t.token_ids.append(9)  # of all four, after they were made
    return made


def longer(t):
    lists = ("token_ids", "loss_mask", "logprobs", "token_rewards")
    return replace(t, **{name: getattr(t, name) * 3 for name in lists})


@pytest.mark.parametrize(
    "returned, message",
    [
        (lambda t: None, "returned None, a NoneType. Return a list of Trajectory"),
        (lambda t: iter([]), "a list_iterator"),
        (lambda t: [], "returned 0"),
        (lambda t: [t] * 3, "returned 3"),
        (lambda t: [t] * 4, "one of them several times"),
        (lambda t: [vars(t)] * 4, "a dict"),
        (lambda t: [replace(t, row={"prompt": "b"}), *shared(t)[1:]], "trajectory 0 with another row"),
        (lambda t: [replace(t, group=n) for n in range(4)], r"groups \[0, 1, 2, 3\] for one row"),
        (lambda t: [replace(t, logprobs=[float("nan")] * 3), *shared(t)[1:]], "logprobs have nan for a sampled token"),
        (
            lambda t: [*shared(t)[1:], replace(t, logprobs=[0.5] * 3)],
            "trajectory 3 whose logprobs have 0.5 .*at most 0",
        ),
        (lambda t: [*shared(t)[1:], replace(t, token_rewards=[float("inf")] * 3)], "token_rewards have inf"),
        (lambda t: [*shared(t)[1:], replace(t, token_ids=[7, 8, 1000])], "token ids go from 5 to 1000.* 0 to 999"),
        (lambda t: [*shared(t)[1:], replace(t, token_ids=[7, 8, -100])], "token ids go from -100"),
        (lambda t: [*shared(t)[1:], replace(t, token_ids=torch.tensor([7, 8, 9]))], "token_ids is a Tensor.*tolist"),
        (lambda t: [*shared(t)[1:], replace(t, token_ids=[7.0, 8.0, 9.0])], "token_ids holds a float"),
        (lambda t: [*shared(t)[1:], replace(t, prompt_ids=[])], "prompt_ids is empty"),
        (lambda t: [*shared(t)[1:], replace(t, loss_mask=[1, 2, 1])], r"loss_mask has \[1, 2\]"),
        (lambda t: [*shared(t)[1:], replace(t, finish_reason="eos")], "finish_reason is 'eos'. 'stop', or 'length'"),
        (lambda t: [*shared(t)[1:], replace(t, info=None)], "info is None"),
        (uneven, "differ in length"),
        (lambda t: [longer(t) for _ in range(4)], "9 tokens are over --max_completion_length=8"),
    ],
)
def test_what_a_rollout_returns_is_compared_with_what_was_asked(returned, message, monkeypatch):
    async def mine(rows, generator, cfg):
        (t,) = tree(rows, cfg, 1)
        return returned(t)

    with pytest.raises(RolloutError, match=message):
        rolled_out(monkeypatch, mine, max_completion_length=8)


def test_trajectories_that_share_lists_are_scored_each_by_itself(monkeypatch):
    """One list of zeros as token_rewards of all, one dict as info: each had the rewards of all."""

    async def mine(rows, generator, cfg):
        (t,) = tree(rows, cfg, 1)
        return [replace(t, row=dict(rows[0])) for _ in range(cfg.num_generations)]

    numbered = lambda completions, **columns: list(range(len(completions)))  # noqa: E731
    groups, _ = rolled_out(monkeypatch, mine, functions={"length": numbered})
    assert [[sum(t.token_rewards) for t in group] for group in groups] == [[0, 1, 2, 3]] * 2
    assert [t.info["reward"] for t in groups[0]] == [0, 1, 2, 3]


def test_a_rollout_that_takes_too_long_or_gives_up_costs_its_row(monkeypatch):
    async def mine(rows, generator, cfg):
        if rows[0]["prompt"] == "a":
            await asyncio.sleep(1000)
        elif rows[0]["prompt"] == "b":
            raise rollouts.TrajectoryError("no way on", rows[0])
        return tree(rows, cfg, cfg.num_generations)

    rows = [{"prompt": text} for text in "abc"]
    groups, _ = rolled_out(monkeypatch, mine, rows, rollout_timeout=0.2)
    assert [sum("failure" in t.info for t in group) for group in groups] == [4, 4, 0]
    assert groups[0][0].info["failure"].cause == "rollout 'mine' took over 0.2 s (--rollout_timeout)"
    with pytest.raises(rollouts.TrajectoryError, match="took over|no way on"):
        rolled_out(monkeypatch, mine, rows, rollout_timeout=0.2, env_errors="stop")


class SamplesOnTheLoop(Sampler):
    """As --generator hf: the event loop stands still while it samples."""

    def __init__(self):
        super().__init__()
        self.sampled, self.since = 0.0, None

    def seconds_sampling(self):  # the watch looks in the middle, too
        return self.sampled + (0.0 if self.since is None else time.monotonic() - self.since)

    async def generate(self, prompt_ids, **options):
        await asyncio.sleep(0.01)
        self.since = time.monotonic()
        time.sleep(0.4)
        self.sampled, self.since = self.seconds_sampling(), None
        await asyncio.sleep(0)
        return await super().generate(prompt_ids, **options)


def test_a_rollout_is_not_late_because_the_generator_held_up_its_loop(monkeypatch):
    async def mine(rows, generator, cfg):
        await generator.generate([5], n=1)
        return tree(rows, cfg, cfg.num_generations)

    monkeypatch.setattr(rollouts, "MARGIN", 0.05)
    monkeypatch.setitem(rollouts.ROLLOUTS, "mine", mine)
    ended = []
    monkeypatch.setattr(rollouts, "leave", lambda code, text: ended.append(text))
    cfg = TrainConfig(rollout="mine", rollout_timeout=0.2, env_errors="stop", num_generations=4)

    async def several():
        generator = SamplesOnTheLoop()
        return await asyncio.gather(*(rollouts.call_rollout({"prompt": "a"}, generator, cfg) for _ in range(5)))

    assert [len(group) for group in asyncio.run(several())] == [4] * 5
    assert not ended


def test_a_cancelled_request_costs_others_of_its_batch_nothing():
    cfg = TrainConfig(model_id="models/tiny", compute_dtype="float32")
    generator = HFGenerator(script.load_hf_model(cfg, torch.float32), script.load_processor(cfg.model_id))

    async def two_and_another():
        tasks = [asyncio.create_task(generator.generate([5, 6], n=2, max_tokens=3)) for _ in range(2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        answers = [await asyncio.wait_for(tasks[1], 20)]
        return [*answers, await asyncio.wait_for(generator.generate([5], n=1, max_tokens=3), 20)]

    assert [len(answer) for answer in asyncio.run(two_and_another())] == [2, 1]
    assert generator.seconds_sampling() > 0


def test_image_placeholders_beyond_the_vocabulary_and_rounded_log_probs_are_allowed():
    row = {"prompt": "a"}
    (t,) = tree([row], None, 1)
    cfg = TrainConfig()
    fault = lambda **other: rollouts.trajectory_fault(replace(t, **other), Sampler(), cfg)  # noqa: E731
    assert fault(logprobs=[answers.ABOVE_ZERO, 0.0, -1.0]) is None
    assert fault(logprobs=[2 * answers.ABOVE_ZERO, 0.0, -1.0])[0].startswith("logprobs have")
    assert fault(prompt_ids=[5, 1000], token_ids=[7, 1001, 9], images=[b""]) is None
    for other in ({"prompt_ids": [1000]}, {"token_ids": [1000, 8, 9], "images": [b""]}, {"prompt_ids": [-1]}):
        assert fault(**other)[0].startswith("token ids go"), other


@pytest.mark.parametrize(
    "fault, message",
    [
        (lambda: {}["x"], "Raised by rollout 'mine' for the row with prompt 'a'"),
        (asyncio.current_task, "'mine' ended by asyncio.CancelledError.*\n  row .* 'a'"),
    ],
)
def test_an_error_of_a_rollout_names_it_and_the_row(fault, message, monkeypatch):
    async def mine(rows, generator, cfg):
        if rows[0]["prompt"] == "a":
            if (task := fault()) is not None:
                task.cancel()
                await asyncio.sleep(1)
        return tree(rows, cfg, cfg.num_generations)

    with pytest.raises((KeyError, RolloutError)) as raised:
        rolled_out(monkeypatch, mine)
    assert re.search(message, "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())]))


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
    sampler = SimpleNamespace(next=lambda step: [0, 1])
    sampled, _ = asyncio.run(script.sample_step(rows, sampler, 0, Sampler(), {"mine": scored}, cfg))
    assert sorted(seen) == [("baseline", 1, 0.0)] * 2 + [("train", 3, 1.0), ("train", 4, 1.0)]
    assert [len(group) for group, *_ in sampled] == [3, 4]
    assert sampled[0][0][0].info["baselines"] == 0.0
    seen.clear()
    metrics, _ = script.evaluate(rows, Sampler(), {"mine": scored}, cfg, 0)
    assert seen == [("eval", 2, 1.0)] * 2 and metrics["eval/pass@2"] == 0.0


def test_an_evaluation_names_how_many_were_counted(monkeypatch):
    """pass@2 was logged of 16 completions."""
    sizes = {"a": 16, "b": 16}

    async def search(rows, generator, cfg):
        return tree(rows, cfg, sizes[rows[0]["prompt"]])

    search.any_number = True
    monkeypatch.setitem(rollouts.ROLLOUTS, "search", search)
    monkeypatch.setattr(script.utils, "check_fresh", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    cfg = TrainConfig(rollout="search", reward_funcs=["length"], eval_generations=2, eval_solved=-1.0)
    rows, functions = [{"prompt": "a"}, {"prompt": "b"}], {"length": rewards.REWARDS["length"]}
    metrics, _ = script.evaluate(rows, Sampler(), functions, cfg, 0)
    assert metrics["eval/pass@16"] == metrics["eval/mean@16"] == 1.0 and metrics["eval/completions_per_row"] == 16
    sizes["a"] = 4
    metrics, _ = script.evaluate(rows, Sampler(), functions, cfg, 0)
    assert metrics["eval/pass@all"] == 1.0 and metrics["eval/completions_per_row"] == 10
    assert not [name for name in metrics if "@2" in name]


def test_purpose_is_no_flag():
    with pytest.raises(ConfigError, match="--purpose"):
        load_config(argv=["--purpose", "eval", "--generator", "hf"])
    assert replace(replace(TrainConfig(), purpose="eval"), num_generations=2).purpose == "eval"
    assert "purpose" not in public_config(TrainConfig())


# ---- groups of several sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "4", float("nan"), [4]])
def test_a_column_that_is_no_number_of_completions(size):
    with pytest.raises(ConfigError, match="column num_generations is .* row with prompt 'a'.* from 1 on.*format_row"):
        rollouts.group_sizes([{"prompt": "a", "num_generations": size}], TrainConfig())


def test_rows_say_how_many_completions_they_get():
    rows = [{"prompt": "a", "num_generations": 3}, {"prompt": "b", "num_generations": None}, {"prompt": "c"}]
    assert rollouts.group_sizes(rows, TrainConfig(num_generations=5)) == [3, 5, 5]
    assert rollouts.group_sizes([{"prompt": "d", "num_generations": 16.0}], TrainConfig()) == [16]
    rollouts.check_smallest(rows, TrainConfig(), script.check_algorithm)
    rows.append({"prompt": "d", "num_generations": 1})
    with pytest.raises(ConfigError, match="column num_generations of a row: --num_generations=1: grpo compares"):
        rollouts.check_smallest(rows, TrainConfig(), script.check_algorithm)
    rollouts.check_smallest(rows, TrainConfig(advantage="reinforce_plus_plus"), script.check_algorithm)


def test_the_kl_adapts_to_the_completions_there_were():
    cfg = TrainConfig(kl_target=0.1, beta=1.0, kl_horizon=1000.0, prompts_per_step=4, num_generations=8)
    assert script.adapt(cfg, {"kl": 9.0}).beta == pytest.approx(1 + 0.2 * 32 / 1000)
    assert script.adapt(cfg, {"kl": 9.0, "completions/count": 60}).beta == pytest.approx(1 + 0.2 * 60 / 1000)


def test_the_rollout_of_the_documentation(monkeypatch):
    """Three completions for each that was asked for in training, as many as asked in evaluations."""
    (block,) = re.findall(
        r"```python\n(import asyncio\n[^`]*?import ROLLOUTS.*?)```", ENVIRONMENTS.read_text(encoding="utf-8"), re.DOTALL
    )
    names = dict(replace=replace, asyncio=asyncio)
    exec(block, names)
    branching = rollouts.ROLLOUTS.pop("branching")
    prompt = SimpleNamespace(token_ids=[5, 6], sent_ids=[5, 6], images=[], model_inputs={})
    monkeypatch.setattr(rollouts, "build_prompt", lambda *_: prompt)
    monkeypatch.setattr(rollouts, "check_echo", lambda *_: None)
    groups, seen = rolled_out(monkeypatch, branching)
    assert [len(group) for group in groups] == [12, 12] and len(seen) == 2
    ids = [t.token_ids for t in groups[0]]
    assert ids == [[7, 8, 9]] * 4 + [[7, 7, 8, 9]] * 8 and groups[0][5].info["completion"] == "7 7 8 9"
    groups, _ = rolled_out(monkeypatch, branching, purpose="eval", num_generations=2)
    assert [len(group) for group in groups] == [2, 2]


@pytest.mark.parametrize("name", ["loss", "tokens", "entropy", "lr", "grad_norm"])
def test_statistics_with_names_of_the_scripts_own_are_refused(small, monkeypatch, name):
    """They would be added to, or replace, what is logged under that name."""
    cfg, policy, _, batch = small
    monkeypatch.setattr(script, "own_term", lambda logprobs, entropy, part, cfg: (None, {name: logprobs.detach()}))
    with pytest.raises(ValueError, match=f"own_term returned the statistic '{name}', .* take another name"):
        script.accumulate_gradients(policy, batch, cfg)


def test_an_estimator_has_a_value_per_token(small, monkeypatch):
    cfg, policy, _, batch = small
    monkeypatch.setitem(script.KL_ESTIMATORS, "k2", lambda logprobs, ref: ((logprobs - ref) ** 2).mean())
    batch.ref_logprobs = torch.zeros_like(batch.loss_mask)
    with pytest.raises(ValueError, match="--kl k2 returned .* it must be a value per token"):
        script.accumulate_gradients(policy, batch, replace(cfg, beta=0.1, kl="k2"))


def test_two_functions_do_not_prepare_under_one_name(small):
    cfg, _, _, batch = small
    one, other = (lambda *_: None), (lambda *_: None)
    one.prepare, other.prepare = (lambda batch, cfg: {"scale": 2.0}), (lambda batch, cfg: {"scale": 5.0})
    with pytest.raises(ValueError, match="b: .prepare returned 'scale', which a has prepared"):
        checks.prepared({"a": one, "b": other}, batch, cfg)


def test_scores_are_not_changed_in_place_and_reading_them_under_a_flag_is_said(small, monkeypatch, caplog):
    cfg, _, _, batch = small

    def below(batch):
        scores = batch.scores
        scores -= 1.0
        return scores

    monkeypatch.setitem(script.ADVANTAGES, "mine", lambda batch, cfg: script.spread(below(batch), batch.loss_mask))
    batch.rewards = batch.rewards + batch.loss_mask
    given = batch.scores.clone()
    cfg = replace(cfg, advantage="mine", reward_mean="group")
    script.shape_rewards(batch, cfg, {})
    script.add_advantages(batch, cfg)
    assert torch.equal(batch.scores, given) and "batch.shaped_scores" in caplog.text


def test_an_optimizer_of_optimizers_without_a_state_of_its_own_is_refused(small):
    """It would not be saved, and what torch does to save it changes the training."""

    class Both(torch.optim.Optimizer):
        def __init__(self, *parts):
            self.parts = parts
            super().__init__([group for part in parts for group in part.param_groups], {})

        def step(self, closure=None):
            for part in self.parts:
                part.step()

    _, policy, _, _ = small
    halves = [list(policy.parameters())[::2], list(policy.parameters())[1::2]]
    both = Both(*(torch.optim.AdamW(half) for half in halves))
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    both.step()
    with pytest.raises(RuntimeError, match="Both keeps nothing in `state`, and holds other optimizers"):
        utils.check_states(policy, both)


def test_an_optimizer_whose_step_takes_no_closure_can_be_resumed(small):
    """It trained and was saved; --resume ended in torch, which makes what it loads into by step(closure=None)."""

    class Plain(torch.optim.Optimizer):
        def step(self):
            for p in self.param_groups[0]["params"]:
                self.state[p]["momentum"] = torch.zeros_like(p)

    cfg, policy, _, _ = small
    make = lambda module, cfg: Plain(module.parameters(), {"lr": cfg.learning_rate})  # noqa: E731
    optimizer = utils.build_optimizer(make, policy, cfg, None, script.clean_name)
    _, moments = get_state_dict(policy, optimizer)
    assert len(moments["state"]) == len(list(policy.parameters()))
    optimizer.step()


def test_a_temperature_that_changes_during_a_run_is_that_of_the_log_probs(small):
    """Whoever gives the next step another one (in `adapt`, say) samples and learns at it."""
    cfg = TrainConfig(compute_dtype="float32", max_steps=4)
    cooler, batch = replace(cfg, temperature=0.5), gradient_worker.local_batch(0, 1)
    policy, made_cooler = (script.load_policy(each, torch.device("cpu"))[0] for each in (cfg, cooler))
    warm, cool = (script.all_logprobs(policy, batch, each)[0] for each in (cfg, cooler))
    assert torch.equal(cool, script.all_logprobs(made_cooler, batch, cooler)[0]) and not torch.allclose(cool, warm)
    batch.sampling_logprobs = cool
    seen = script.accumulate_gradients(policy, batch, cfg)["sampling/logprob_diff_mean"]
    assert seen > 0.1 > 1e-4 > script.accumulate_gradients(policy, batch, cooler)["sampling/logprob_diff_mean"]


def test_an_advantage_that_needs_the_critic_names_its_script(monkeypatch):
    monkeypatch.delitem(script.ADVANTAGES, "gae", raising=False)  # another test file imports train_ppo
    with pytest.raises(ConfigError, match="unknown name 'gae'.*'gae' is for train_ppo.py: start that"):
        script.check_algorithm(TrainConfig(**PRESETS["ppo"]))
