"""Several domains in one run: whose prompt is next, which settings, tools and rewards a row gets, and real runs."""

import asyncio
import contextlib
import json
import re
import statistics
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import ragged
import torch
import yaml
from live import ROOT, running, trainer
from runlog.report import write_report

import domains
import rewards
import train_grpo as script
from config import ConfigError, TrainConfig, load_config
from data import Draw, load_data
from domains import Mixture
from inputs.trajectory import Trajectory
from runlog import resume, rollout_metrics, samples
from runlog.reading import read_metrics
from safety import sandbox

# ---- whose prompt is next -------------------------------------------------------------------------------------------

SHARES = {
    "two": {"a": 1, "b": 3},
    "thirds": {"a": 1, "b": 1, "c": 1},
    "odd": {"a": 0.37, "b": 0.1234, "c": 5, "d": 2.5},
    "many": {"big": 90, **{f"small{n}": 1 for n in range(10)}},
    "one": {"alone": 0.3},
}


def samplers(weights: dict, ranks: int, per_step: int = 12, rows: int = 40, **settings) -> list:
    """A sampler for each rank, over `rows` rows of each domain."""
    entries = [{"name": name, "weight": weight} for name, weight in weights.items()]
    cfg = TrainConfig(domains=entries, prompts_per_step=per_step, **settings)
    data = [{"domain": name} for name in weights for _ in range(rows)]
    made = [script.PromptSampler(len(data), per_step, cfg.seed, rank, ranks) for rank in range(ranks)]
    for sampler in made:
        sampler.draw = Draw(Mixture.of(cfg), data, cfg)
    return made


@pytest.mark.in_turn
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("weights", SHARES.values(), ids=SHARES)
def test_shares_are_exact_over_time_and_after_a_resume(weights, ranks):
    """After each of 1,000 steps every domain has had what its weight asks for, to less than one prompt; on ranks that
    draw each for itself; and a run that goes on after step 371 draws what the uninterrupted one did."""
    steps, total = 1000, sum(weights.values())
    made, resumed = samplers(weights, ranks), samplers(weights, ranks)
    drawn, most = np.zeros(len(weights)), 0
    for step in range(steps):
        shares = [sampler.next(step) for sampler in made]
        rows = np.concatenate(shares)
        counts = np.bincount(rows // 40, minlength=len(weights))
        drawn += counts
        wanted = np.array([(step + 1) * 12 * weight / total for weight in weights.values()])
        most = max(most, np.abs(drawn - wanted).max())
        for share in shares:  # a rank's share is mixed as the step is
            part = np.bincount(np.array(share) // 40, minlength=len(weights))
            assert np.abs(part - np.array([*weights.values()]) / total * len(share)).max() < 2
        states = [sampler.draw.mixture.ended(step, {}) for sampler in made]
        assert all(state == states[0] for state in states)
        if step == 370:
            for sampler in resumed:
                sampler.draw.mixture.restore(json.loads(json.dumps(states[0]))["domains"])
        if 370 < step < 400:
            assert [sampler.next(step) for sampler in resumed] == shares
    assert most < 1


def test_every_domain_has_its_own_epochs_and_steps_no_repeats():
    (sampler,) = samplers({"a": 2, "b": 1}, 1, rows=30)
    steps = [sampler.next(step) for step in range(60)]
    assert all(len(set(rows)) == 12 for rows in steps)
    for first in (0, 30):
        drawn = [row - first for rows in steps for row in rows if first <= row < first + 30]
        for epoch in range(len(drawn) // 30):
            assert sorted(drawn[epoch * 30 : epoch * 30 + 30]) == list(range(30))
    a, b = ([row - first for row in steps[0] if first <= row < first + 30] for first in (0, 30))
    assert a[: len(b)] != b, "an order of its own"
    assert samplers({"a": 2, "b": 1}, 1, rows=30)[0].next(7) == steps[7], "asking out of order changes nothing"


def test_further_prompts_are_of_the_same_domains():
    for sampler in samplers({"a": 1, "b": 2, "c": 1}, 2):
        first, extra = np.array(sampler.next(5)), np.array(sampler.extra(5, 0, 6))
        assert (first // 40 == extra // 40).all() and len(sampler.extra(5, 0, 3)) == 3
        assert sampler.extra(5, 0, 6) == extra.tolist() != sampler.extra(5, 1, 6)


class Before(script.PromptSampler):
    """`next` and `extra` as they were before there were domains."""

    def next(self, step):
        epoch, start = divmod(step * self.prompts_per_step, self.num_rows)
        rows = self.draw.order(epoch)[start : start + self.prompts_per_step]
        if len(rows) < self.prompts_per_step:
            rows = np.concatenate([rows, self.draw.order(epoch + 1)[: self.prompts_per_step - len(rows)]])
        return rows[self.rank * self.share : (self.rank + 1) * self.share].tolist()

    def extra(self, step, round, count):
        random = np.random.default_rng([self.seed, step, round, self.rank, 0xD1CE])
        return random.choice(self.num_rows, count, replace=False).tolist()


@pytest.mark.parametrize("rows, per_step, ranks", [(10, 4, 2), (37, 8, 4), (8, 8, 1), (100, 6, 3)])
def test_one_domain_draws_what_it_drew(rows, per_step, ranks):
    for rank in range(ranks):
        now, then = (kind(rows, per_step, 5, rank, ranks) for kind in (script.PromptSampler, Before))
        for step in [*range(30), 10_000, 123_456_789]:
            assert now.next(step) == then.next(step)
            assert now.extra(step, 1, now.share) == then.extra(step, 1, now.share)


def test_a_sampler_of_ones_own_draws_from_domains():
    """README's, with the rows that were solved once replaced: row numbers are those of `memory`."""

    class Mine(script.PromptSampler):
        def next(self, step):
            rows = [n for n in super().next(step) if self.memory.get(n, 0) < 1]
            return rows + self.extra(step, 0, self.share - len(rows))

    data = [{"domain": name} for name in "ab" for _ in range(20)]
    cfg = TrainConfig(domains=[{"name": "a"}, {"name": "b"}], prompts_per_step=8)
    plain, mine = (kind(40, 8, 42, memory={}) for kind in (script.PromptSampler, Mine))
    for sampler in (plain, mine):
        sampler.draw = Draw(Mixture.of(cfg), data, cfg)
    assert mine.next(3) == plain.next(3)
    mine.memory |= {n: 1 for n in plain.next(3)[:2]}
    assert mine.next(3)[:6] == plain.next(3)[2:] and len(mine.next(3)) == 8


def test_weights_by_step():
    mixture = Mixture({"a": [[10, 1.0], [20, 0]], "b": 1}, 8)
    assert [mixture.weights_at(step)[0] for step in (0, 10, 15, 20, 99)] == [1, 1, 0.5, 0, 0]
    due = 0.0
    for step in range(200):
        shares = mixture.shares(step)
        assert sum(shares) == mixture.unit
        due += 8 * shares[0] / mixture.unit
        assert abs(mixture.drawn(step + 1)[0] - due) < 1
    assert mixture.turns(150) == [1] * 8


def test_a_schedule_may_end_at_0(tmp_path):
    """Where another domain goes on, and the settings of each domain can be asked for."""
    cfg = config(tmp_path, SUMS | {"weight": 2}, LAKE | {"weight": [[0, 1.0], [5, 0]]})
    assert [own.domain for own in cfg.by_domain()] == ["sums", "lake"]
    mixture = Mixture({entry["name"]: entry["weight"] for entry in cfg.domains}, 6)
    assert [mixture.turns(step) for step in range(5, 40)] == [[0] * 6] * 35


def test_weight_by_success():
    """Half solved: full weight; all or nothing: the floor; and what a step that began early could not know."""
    mixture = Mixture({"half": "success", "never": "success", "always": "success"}, 12, lag=1)
    assert mixture.weights_at(0) == [1, 1, 1]
    solved = {"half": 0.5, "never": 0.0, "always": 1.0}
    for step in range(30):
        metrics = {f"{name}/solved": share for name, share in solved.items()} | {
            f"{name}/prompts": 4 for name in solved
        }
        state = mixture.ended(step, metrics)
        assert (mixture.weights_at(step + 1) == [1, 1, 1]) == (step == 0)
    assert mixture.weights_at(30) == [1, domains.FLOOR, domains.FLOOR]
    turns = [mixture.turns(step) for step in range(30, 45)]
    again = Mixture({"half": "success", "never": "success", "always": "success"}, 12, lag=1)
    again.restore(json.loads(json.dumps(state))["domains"])
    assert [again.turns(step) for step in range(30, 45)] == turns
    assert sum(map(turns[0].count, (1, 2))) < 4
    sampled = {f"dynamic_sampling/always/{what}": 4.0 for what in ("prompts", "solved")}
    kept = {"always/prompts": 1, "always/solved": 0.5}  # the others had no signal
    for step in range(30):
        again.ended(step + 30, metrics | kept | sampled)
    assert again.weights_at(60) == [1, domains.FLOOR, domains.FLOOR]
    for step in range(30, 60):  # only lately counts
        mixture.ended(step, metrics | {"half/solved": 1.0, "never/solved": 0.5})
    assert mixture.weights_at(61) == [domains.FLOOR, 1, domains.FLOOR]


def test_a_resumed_run_with_another_list():
    """Counts stay, a new domain begins, one that is gone is forgotten."""
    before = Mixture({"a": 1, "b": 2, "gone": 1}, 8)
    state = before.ended(9, {})["domains"]
    after = Mixture({"new": 1, "b": 1, "a": 2}, 8)
    after.restore(state)
    assert after.drawn(10) == [0, before.drawn(10)[1], before.drawn(10)[0]]
    drawn = np.array(after.drawn(1010)) - after.drawn(10)
    assert np.abs(drawn - 8000 * np.array([0.25, 0.25, 0.5])).max() <= 3 and drawn.sum() == 8000
    fresh = Mixture({"a": 1, "b": 1}, 8)  # after a run without a list
    fresh.restore(None, 10)
    assert fresh.drawn(10) == [0, 0] and fresh.drawn(11) == [4, 4]


def test_row_numbers_that_another_list_moves():
    assert resume.moved_domains({"a": 9, "b": 5}, {"a": 9, "b": 5, "c": 1}) == []
    assert resume.moved_domains({"a": 9, "b": 5}, {"b": 5, "a": 9}) == ["a", "b"]
    assert resume.moved_domains({"a": 9, "b": 5, "c": 1}, {"a": 8, "c": 1}) == ["c"]


@pytest.mark.parametrize(
    "weights, steps, message",
    [
        ([1, "success"], None, "'a' has 20 rows and gives up to 30 of the 32"),  # while b is never solved
        ([1, 1], None, None),
        ([[[0, 1], [1000, 50]], 1], None, "'a' has 20 rows and gives up to 32 of the 32"),
        ([[[0, 1], [1000, 50]], 1], 10, None),
    ],
)
def test_a_step_never_has_more_prompts_of_a_domain_than_it_has_rows(weights, steps, message):
    entries = [{"name": name, "weight": weight} for name, weight in zip("ab", weights, strict=True)]
    rows = [{"domain": name} for name, count in (("a", 20), ("b", 400)) for _ in range(count)]
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        domains.check_enough(TrainConfig(domains=entries, max_steps=steps, prompts_per_step=32), rows)


@pytest.mark.parametrize("count, fits", [(2, False), (3, True)])
def test_what_a_step_gives_with_a_share_that_is_not_whole(count, fits):
    """9/5 of the 3 prompts of a step: 2, 2, 1, 3, ..."""
    entries = [{"name": name, "weight": weight} for name, weight in zip("abc", (1, 1, 3), strict=True)]
    rows = [{"domain": name} for name, many in (("a", 20), ("b", 20), ("c", count)) for _ in range(many)]
    with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match="2 rows and gives up to 3 of the 3"):
        domains.check_enough(TrainConfig(domains=entries, prompts_per_step=3), rows)


# ---- settings -------------------------------------------------------------------------------------------------------

SUMS = {"name": "sums", "dataset_id": "examples/sums.py:rows", "reward_funcs": "last_number"}
LAKE = {"name": "lake", "env": "frozenlake", "max_turns": 3, "max_completion_length": 700}


def config(tmp_path, *entries, flags: str = "", **beside) -> TrainConfig:
    (tmp_path / "mix.yaml").write_text(
        yaml.safe_dump({"generator": "hf", **beside, "domains": list(entries)}), encoding="utf-8"
    )
    return load_config(argv=["--config", str(tmp_path / "mix.yaml"), *flags.split()])


def test_a_domain_is_the_config_with_settings_of_its_own(tmp_path):
    cfg = config(tmp_path, SUMS, LAKE, flags="--learning_rate 1e-4", max_completion_length=64)
    sums, lake = cfg.by_domain()
    assert (sums.rollout, sums.reward_funcs, sums.max_completion_length) == ("single_turn", ["last_number"], 64)
    assert (lake.rollout, lake.reward_funcs, lake.dataset_id) == ("multi_turn", ["environment"], "seeds:2000")
    assert lake.learning_rate == sums.learning_rate == 1e-4 and not sums.env
    assert cfg.max_completion_length == 700, "room for the longest"
    assert (sums.domain, sums.prefix, cfg.domain) == ("sums", "sums/", "")
    assert cfg.of({"domain": "lake"}) == lake == lake.of({"domain": "lake"}) and cfg.of({}) is cfg
    assert replace(cfg, beta=0.1).of({"domain": "lake"}) == replace(lake, beta=0.1)
    plain = TrainConfig()
    assert plain.by_domain() == [plain] and plain.of({"domain": "a column of mine"}) is plain and plain.prefix == ""


def test_the_file_of_the_documentation_is_one(tmp_path):
    page = (ROOT / "docs" / "data-and-rewards.md").read_text(encoding="utf-8")
    (tmp_path / "mix.yaml").write_text(re.search(r"```yaml\n(# mix.yaml\n.*?)```", page, re.S)[1], encoding="utf-8")
    cfg = load_config(argv=["--config", str(tmp_path / "mix.yaml"), "--generator", "hf"])
    assert [own.domain for own in cfg.by_domain()] == ["math", "search", "lake"]
    assert [own.rollout for own in cfg.by_domain()] == ["single_turn", "multi_turn", "multi_turn"]


@pytest.mark.parametrize(
    "entries, message",
    [
        ([{"dataset_id": "x"}], "entry 0: .* is not `name"),
        ([{"name": 7}], "entry 0: .* is not `name: ...`, a text"),
        ([{"name": "a", "weight": 10**400}], "domain 'a': weight 10*: give a number above 0"),
        ([SUMS | {"eval_dataset_id": "b.jsonl", "eval_split": "none"}], "eval_dataset_id is never read with"),
        (["math"], "--domains=math: expected `name: value` lines in a --config file"),
        ([{"name": "a/b"}], "name 'a/b': give letters"),
        ([{"name": "rewards"}], "name 'rewards': other metrics begin with it"),
        ([SUMS, SUMS], "two are named 'sums'"),
        ([{"name": "a", "reward_func": "math"}], "domain 'a': unknown name 'reward_func'.*Did you mean 'reward_funcs'"),
        (
            [{"name": "a", "learning_rate": 1}],
            "learning_rate is one for the whole run.*may have: name, weight, allow_special",
        ),
        ([{"name": "a", "weight": 0}], "domain 'a': weight 0: give a number above 0, points such as"),
        ([{"name": "a", "weight": "succes"}], "weight 'succes': give a number above 0.* or success"),
        ([{"name": "a", "weight": [[5, 1], [3, 2]]}], "steps must be whole numbers that rise"),
        ([{"name": "a", "weight": [[0, 0], [9, 0]]}], "it is 0 at every step"),
        ([{"name": "a", "weight": [[0, 0], [9, 1]]}], "at step 0 all weights are 0"),
        ([SUMS | {"max_turns": "three"}], "domain 'sums': --max_turns=three: expected a whole number"),
        ([SUMS | {"reward_weights": [1, 2]}], "domain 'sums': --reward_weights has 2 values for 1"),
        ([SUMS | {"max_turns": 0}], "domain 'sums': --max_turns=0: must be above 0"),
    ],
)
def test_wrong_entries_are_answered_when_the_file_is_read(entries, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, *entries)


def load(cfg) -> list[list[dict]]:
    """Training and held-out rows of all domains."""
    read = {}
    parts = [load_data(own, dict, lambda rows, name: [1] * len(rows), cfg, read) for own in cfg.by_domain()]
    return [sum(found, []) for found in zip(*parts, strict=True)]


def test_flags_and_held_out_rows(tmp_path):
    """A flag that every domain overrides is a mistake; a domain may be trained on without being evaluated."""
    own = [SUMS | {"max_completion_length": 12}, LAKE]
    with pytest.raises(ConfigError, match="--max_completion_length changes nothing: every domain of .*mix.yaml has"):
        config(tmp_path, *own, flags="--max_completion_length 30")
    config(tmp_path, SUMS, LAKE, flags="--max_completion_length 30")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n' * 9, encoding="utf-8")
    file = SUMS | {"name": "file", "dataset_id": str(tmp_path / "rows.jsonl")}
    with pytest.raises(ConfigError, match="file has no splits|rows.jsonl has no splits: .* or give this domain"):
        load(config(tmp_path, file, SUMS, eval_steps=5))
    train, held_out = load(config(tmp_path, file | {"eval_split": "none"}, SUMS, eval_steps=5))
    assert {row["domain"] for row in train} == {"file", "sums"} and {row["domain"] for row in held_out} == {"sums"}
    with pytest.raises(ConfigError, match="evaluation and eval_split none in every domain contradict"):
        config(tmp_path, SUMS, LAKE, eval_steps=5, eval_split="none")
    assert [entry["weight"] for entry in config(tmp_path, SUMS | {"weight": "1e-1"}, LAKE).domains] == [0.1, 1]
    with pytest.raises(ConfigError, match="--eval_split=none and evaluation"):
        load_config(argv="--generator hf --eval_steps 5 --eval_split none".split())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"reward_funcs": "last_numbr"}, "domain 'sums': .*Did you mean 'last_number'"),
        ({"tools": "calculater"}, "domain 'sums': .*Did you mean 'calculator'"),
        ({"env": "frozenlak"}, "domain 'sums': .*Did you mean 'frozenlake'"),
        ({"dataset_id": "nothing.jsonl"}, "domain 'sums': nothing.jsonl: no such file"),
        ({"reward_funcs": "code_tests"}, "domain 'sums': --reward_funcs code_tests: needs tests"),
        ({"dataset_id": "seeds:3", "env": "frozenlake"}, "'sums' has 3 rows and gives up to 16 of the 32 prompts"),
    ],
)
def test_wrong_names_are_answered_before_anything_starts(change, message, tmp_path):
    cfg = config(tmp_path, SUMS | change, LAKE, model_id=str(ROOT / "models" / "tiny"), allow_uncontained=True)
    if "env" in change:
        cfg = config(tmp_path, {"name": "sums"} | change, LAKE, model_id=str(ROOT / "models" / "tiny"))
    with pytest.raises(ConfigError, match=message):
        script.setup(cfg)


def test_tools_of_one_name_are_all_looked_at(tmp_path, monkeypatch):
    """That of the second domain is harmless, that of the first runs a model's code."""
    for name, marked in (("first", "run.executes_code = True"), ("second", "")):
        (tmp_path / f"{name}.py").write_text(
            f'def run(code: str) -> str:\n    """Run it.\n\n    Args:\n        code: python\n    """\n\n{marked}\n',
            encoding="utf-8",
        )
    monkeypatch.setattr(sandbox, "why_not_contained", lambda: "there is no wall")
    entries = [SUMS | {"name": name, "tools": f"{tmp_path}/{name}.py:run"} for name in ("first", "second")]
    with pytest.raises(ConfigError, match="run would run code that the model writes"):
        script.setup(config(tmp_path, *entries, model_id=str(ROOT / "models" / "tiny"), allow_uncontained=False))


def test_a_column_routes_the_rows_of_one_data_set(tmp_path):
    rows = [{"prompt": f"{n}?", "domain": "ab"[n % 2]} for n in range(6)]
    path = tmp_path / "rows.jsonl"

    def loaded(cfg):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        read = {}
        parts = [load_data(own, dict, lambda rows, name: [1] * len(rows), cfg, read) for own in cfg.by_domain()]
        assert len(read) == 1, "read once"
        return [[row["prompt"] for row in train] for train, _ in parts]

    cfg = config(tmp_path, {"name": "a"}, {"name": "b"}, dataset_id=str(path))
    assert loaded(cfg) == [["0?", "2?", "4?"], ["1?", "3?", "5?"]]
    game = config(tmp_path, {"name": "a"}, {"name": "b", "env": "frozenlake"}, dataset_id=str(path))
    assert [[row["prompt"] for row in rows] for rows in load(game)[:1]] == [["0?", "2?", "4?", "1?", "3?", "5?"]]
    held_out = dict(eval_dataset_id=str(path), eval_steps=1)
    one = config(tmp_path, {"name": "a"}, {"name": "b", "eval_split": "none"}, dataset_id=str(path), **held_out)
    assert [row["prompt"] for row in load(one)[1]] == ["0?", "2?", "4?"]
    rows[3]["domain"] = "bb"
    with pytest.raises(ConfigError, match=r"row 3, column `domain`: unknown name 'bb'; known are a, b.*format_row"):
        loaded(cfg)
    rows = [row | {"domain": "a"} for row in rows]
    with pytest.raises(ConfigError, match="no row names 'b'"):
        loaded(cfg)
    rows = [{"prompt": row["prompt"]} for row in rows]
    assert loaded(cfg)[0] == loaded(cfg)[1] == [row["prompt"] for row in rows], "without the column all rows are each's"


def test_the_rewards_of_a_domain_are_found_by_its_name():
    functions = {"a/right": 1, "b/right": 2, "b/short": 3}
    cfg = TrainConfig(domains=[{"name": "a"}, {"name": "b"}])
    assert [rewards.own_functions(functions, own) for own in cfg.by_domain()] == [
        {"right": 1},
        {"right": 2, "short": 3},
    ]
    assert rewards.own_functions(functions, TrainConfig()) == functions


# ---- the update -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage", [*script.ADVANTAGES, "grpo batch"])
def test_what_is_over_the_batch_is_over_each_domain(advantage):
    """The advantages of two domains in a batch are those of each alone, and so are scores normalised beforehand."""
    name, _, scale = advantage.partition(" ")
    settings = dict(advantage=name, scale_rewards=scale or "group", reward_funcs=["length", "overlong"])
    plain = TrainConfig(**settings)
    entries = [{"name": "a"}, {"name": "b", "reward_funcs": "length", "reward_weights": [2.0]}]
    cfg = TrainConfig(**settings, domains=entries)

    def batch():
        made = ragged.local_batch(0, 1)
        made.rows = [{"domain": "ab"[int(group) % 2]} for group in made.groups]
        made.reward_components = torch.stack([made.scores, made.scores**2], 1)
        made.baselines, made.old_logprobs = made.scores / 2, -made.loss_mask
        made.entropy = made.sum_pi_squared = made.values = made.loss_mask * 0.5
        return made

    together = batch()
    if name not in ("gdpo", "remax"):
        moments = {}
        script.shape_rewards(together, replace(cfg, reward_std="running"), moments)
        assert set(moments) == {"a", "b"}
    script.add_advantages(together, cfg)
    for domain, own in zip("ab", (plain, replace(plain, reward_funcs=["length"], reward_weights=[2.0])), strict=True):
        rows = [i for i, row in enumerate(together.rows) if row["domain"] == domain]
        alone = batch().select(rows)
        alone.reward_components = alone.reward_components[:, : len(own.reward_funcs)]
        if name not in ("gdpo", "remax"):
            script.shape_rewards(alone, replace(own, reward_std="running"), {})
        script.add_advantages(alone, own)
        length = alone.advantages.shape[1]
        assert torch.equal(together.advantages[rows, :length], alone.advantages)


def test_filters_are_those_of_the_row():
    batch, groups = ragged.local_batch(0, 1), ragged.trajectories()
    for trajectory in groups:
        trajectory.row = {"domain": "ab"[trajectory.group % 2]}
    entries = [{"name": "a", "group_mean_max": -1.0}, {"name": "b"}]
    batch.advantages = batch.loss_mask.clone()
    kept = batch.loss_mask.any(1)
    script.leave_out(batch, groups, TrainConfig(domains=entries))
    assert batch.loss_mask.any(1).tolist() == [bool(k) and t.group % 2 == 1 for k, t in zip(kept, groups, strict=True)]


# ---- real runs ------------------------------------------------------------------------------------------------------

TASKS = """
def plain(split, seed):
    count = 40 if split == "train" else 3
    return [{"prompt": f"Plain {n}?", "kind": "plain", "own": n, "answer": 2 * n} for n in range(count)]

def tooled(split, seed):
    return [{"prompt": f"Tooled {n}?", "kind": "tooled"} for n in range(40 if split == "train" else 2)]

def even(completion_ids, kind, own, cfg, **columns):
    assert set(kind) == {"plain"} == set(columns["domain"]) and cfg.max_completion_length == 8, (kind, columns)
    return [sum(t % 2 == 0 for t in ids) / max(len(ids), 1) for ids in completion_ids]

def odd(completion_ids, kind, trajectories, **columns):
    assert set(kind) == {"tooled"} == set(columns["domain"]) and "own" not in columns, (kind, columns)
    return [5 + 3 * sum(t % 2 for t in ids) / max(len(ids), 1) for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(name, flags, script) -> folder of a run of two domains on two ranks, one of them with tools."""
    folder = tmp_path_factory.mktemp("domains")
    (folder / "tasks.py").write_text(TASKS, encoding="utf-8")
    tasks = f"{folder}/tasks.py"
    plain = dict(name="plain", weight=[[0, 5], [4, 3]], dataset_id=f"{tasks}:plain", reward_funcs=[f"{tasks}:even"])
    plain |= dict(max_completion_length=8, eval_solved=0.5, system_prompt="Speak plainly.")
    tooled = dict(name="tooled", weight="success", dataset_id=f"{tasks}:tooled", reward_funcs=[f"{tasks}:odd"])
    tooled |= dict(tools=["calculator"], max_turns=2, max_completion_length=24, max_turn_length=6, eval_solved=6.5)
    beside = dict(
        model_id="models/tiny", generator="hf", compute_dtype="float32", prompts_per_step=4, learning_rate=1e-3
    )
    beside |= dict(num_generations=4, max_prompt_length=512, print_samples_every=0, scale_rewards="batch")
    beside |= dict(output_dir=str(folder), save_steps=2, save_total_limit=9, eval_generations=2, env_errors="stop")
    (folder / "mix.yaml").write_text(yaml.safe_dump(beside | {"domains": [plain, tooled]}), encoding="utf-8")
    single = {key: value for key, value in tooled.items() if key not in ("tools", "max_turns", "max_turn_length")}
    single |= {"eval_split": "none"}
    (folder / "single.yaml").write_text(yaml.safe_dump(beside | {"domains": [plain, single]}), encoding="utf-8")

    def train(name: str, flags: str, script: str = "train_grpo.py", mix: str = "mix", **env):
        command = ["--config", f"{folder}/{mix}.yaml", "--run_name", name, *flags.split()]
        with running(trainer(folder / f"{name}.log", *command, ranks=2, script=script, **env)) as process:
            assert process.end() == 0, process.text[-4000:]
        return folder / name

    return train


def untimed(run) -> list[dict]:
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_metrics(run)]


@pytest.fixture(scope="module")
def whole(runs):
    return runs("whole", "--max_steps 6 --eval_steps 3 --reward_mean running")


def test_each_row_is_asked_and_scored_by_its_domain(whole):
    steps = [line for line in untimed(whole) if "reward" in line]
    shown = [pandas.read_parquet(path) for path in sorted((whole / "completions").glob("*.parquet"))]
    assert len(steps) == len(shown) == 6
    for line, rows in zip(steps, shown, strict=True):
        assert len(rows) == 16 and set(rows.domain) <= {"plain", "tooled"}
        for name, own in rows.groupby("domain"):
            column = {"plain": "rewards/even", "tooled": "rewards/odd"}[name]
            assert own[column].notna().all() and line[f"{name}/prompts"] == len(own) / 4
            assert own.reward.to_numpy() == pytest.approx(own[column].to_numpy(), abs=1e-6), (
                "not as --reward_mean has it"
            )
            assert line[f"{name}/reward"] == pytest.approx(own[column].mean())
            assert line[f"{name}/rewards/{column.split('/')[1]}/mean"] == pytest.approx(own[column].mean())
            solved = own[column] >= {"plain": 0.5, "tooled": 6.5}[name]
            assert line[f"{name}/solved"] == pytest.approx(solved.mean())
            spread = [statistics.stdev(group) for _, group in own.groupby("row_number")[column]]
            assert line[f"{name}/reward_std"] == pytest.approx(statistics.fmean(spread))
            assert own.prompt.str.contains("calculator").all() == (name == "tooled"), "tools are offered to their own"
            assert own.prompt.str.contains("calculator").any() == (name == "tooled")
            assert own.turns.notna().all() == (name == "tooled") if "turns" in own else name == "plain"
            assert own.prompt.str.contains("Speak plainly.").all() == (name == "plain")
            assert own.prompt.str.contains("Speak plainly.").any() == (name == "plain")
            if name == "plain":
                asked = own.prompt.str.extract(r"Plain (\d+)\?")[0].astype(int)
                assert own.answer.astype(int).tolist() == (2 * asked).tolist()
            # What did not apply, or did not happen, is not in a line; a tool that was offered and not called is.
            assert (f"{name}/tools/call_frequency" in line) == (name == "tooled") == (f"{name}/turns/mean" in line)
            # Centred in its group, divided by the std of the domain's part of the step, on whichever ranks that lies.
            centred = own[column] - own.groupby("row_number")[column].transform("mean")
            expected = (centred / own[column].std()).fillna(0)  # it may have one group, whose completions score alike
            assert own.advantage.to_numpy() == pytest.approx(expected.to_numpy(), abs=1e-4)
        for function, name in (("even", "plain"), ("odd", "tooled")):
            assert (f"rewards/{function}/mean" in line) == (name in set(rows.domain))
        assert line.get("turns/mean", 1) >= 1 and 0 <= line["plain/completions/mean_length"] <= 8
    assert sum(line.get("plain/prompts", 0) for line in steps) > 12
    assert any(set(rows.domain) == {"plain", "tooled"} and (rows.domain == "tooled").sum() == 4 for rows in shown), (
        "a step in which one rank has no row of a domain"
    )
    assert any("rewards/odd/mean" not in line for line in steps), "a step without one of the domains"


def test_evaluation_and_report_by_domain(whole):
    evaluations = [line for line in untimed(whole) if "eval/reward" in line]
    assert [line["step"] for line in evaluations] == [0, 3, 6]
    for line in evaluations:
        assert (line["eval/rows"], line["eval/plain/rows"], line["eval/tooled/rows"]) == (5, 3, 2)
        for key in ("reward", "mean@2"):
            parts = 3 * line[f"eval/plain/{key}"] + 2 * line[f"eval/tooled/{key}"]
            assert line[f"eval/{key}"] == pytest.approx(parts / 5)
        assert line["eval/plain/reward"] <= 1 < line["eval/tooled/reward"] and "eval/plain/pass@2" in line
    for path in (whole / "completions").glob("*.parquet"):
        assert {row["domain"] for row in samples.first_rows(path, 2)} == set(pandas.read_parquet(path).domain)
    page = write_report(whole).read_text(encoding="utf-8")
    assert "Reward by domain" in page and "Held-out rows by domain" in page and "tooled: reward by function" in page
    assert json.loads((whole / "config.json").read_text(encoding="utf-8"))["domains"][1]["tools"] == ["calculator"]


def test_a_resumed_run_goes_on_bit_for_bit(runs):
    """With weights by step and by success, and running moments of each domain's scores. Without tools: which requests
    of several turns --generator hf puts into one batch, and so what it draws, depends on how fast tools answer."""
    flags = "--reward_mean running --eval_steps 2 "
    whole = runs("one", f"{flags} --max_steps 6", mix="single")
    runs("parts", f"{flags} --max_steps 4", mix="single")
    parts = runs("parts", f"{flags} --max_steps 6 --resume --strict_resume", mix="single")
    assert untimed(parts) == untimed(whole)
    evaluations = [line for line in untimed(whole) if "eval/reward" in line]
    assert evaluations and all(line["eval/rows"] == line["eval/plain/rows"] == 3 for line in evaluations)
    assert not [key for line in evaluations for key in line if key.startswith("eval/tooled")], "it holds no rows out"
    state = json.loads((parts / "checkpoints" / "step_6" / "trainer" / "state.json").read_text(encoding="utf-8"))
    assert set(state["score_moments"]) == {"plain", "tooled"} == set(state["domains"]["drawn"])


@pytest.mark.parametrize(
    "name, flags",
    [
        ("train_ppo.py", "--num_generations 1 --prompts_per_step 4"),
        ("train_async.py", "--max_staleness 0 --dynamic_sampling --resample_rounds 1 --advantage reinforce_plus_plus"),
    ],
)
def test_the_other_scripts(runs, name, flags):
    run = runs(name, f"--max_steps 2 {flags}", script=name)
    lines = [line for line in read_metrics(run) if "reward" in line]
    assert len(lines) == 2 and all(0 <= line["plain/reward"] <= 1 for line in lines)
    assert sum(line["plain/prompts"] + line.get("tooled/prompts", 0) for line in lines) == 8


OWN = """
import sys
sys.path.insert(0, {root!r})
import train_grpo as script
from config import parse_args

def own(batch, cfg):
    assert {{row["domain"] for row in batch.rows}} == {{cfg.domain}}
    assert cfg.domain == "tooled" or all("own" in row for row in batch.rows)
    return script.grpo(batch, cfg)

script.ADVANTAGES["own"] = own
if __name__ == "__main__":
    script.main(parse_args())
"""


def test_an_advantage_sees_rows_of_its_domain_on_every_rank(runs, tmp_path, whole):
    """In the same steps as above, in some of which a rank has none of a domain."""
    (tmp_path / "own.py").write_text(OWN.format(root=str(ROOT)), encoding="utf-8")
    run = runs("own", "--max_steps 6 --eval_steps none --advantage own", script=str(tmp_path / "own.py"))
    rewards = [[line["reward"] for line in untimed(each) if "reward" in line][:1] for each in (run, whole)]
    assert rewards[0] == rewards[1]


def test_sampling_ahead_of_the_trainer(runs, server):
    """Beside a server, up to two steps ahead, stopped at step 4 and resumed: every row is asked once, each step has the
    domains that weights and outcomes of the steps before it, less two, ask for, and rewards and tools are their own."""
    flags = f"--generator vllm --server_urls {server.url} --max_staleness 2 --max_prompt_length 480 "
    flags += "--logprob_diff_limit 1 --max_steps"
    env = {"VLLM_SERVER_TOKEN": server.token}
    runs("ahead", f"{flags} 4", script="train_async.py", **env)
    run = runs("ahead", f"{flags} 7 --resume", script="train_async.py", **env)
    lines = [line for line in read_metrics(run) if "reward" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7] and lines[-1]["staleness/max"] == 2
    mixture, names = Mixture({"plain": [[0, 5], [4, 3]], "tooled": "success"}, 4, lag=2), ["plain", "tooled"]
    asked = []
    for step, line in enumerate(lines):
        expected = [names[number] for number in mixture.turns(step)]
        assert {name: line.get(f"{name}/prompts", 0) for name in names} == {n: expected.count(n) for n in names}
        mixture.ended(step, line)
        rows = pandas.read_parquet(run / "completions" / f"step_{step + 1:06}.parquet")
        asked += {(row.domain, row.row_number) for row in rows.itertuples()}
        assert (rows.prompt.str.contains("calculator") == (rows.domain == "tooled")).all()
        for name, own in rows.groupby("domain"):
            assert own[{"plain": "rewards/even", "tooled": "rewards/odd"}[name]].notna().all()
    assert {domain for domain, _ in asked} == {"plain", "tooled"}
    assert len(asked) == len(set(asked)) == 28


def test_solved_is_the_same_in_training_and_in_an_evaluation(monkeypatch):
    """Three functions that all give 1, with weights of .7, .2 and .1: the sum is .9999999999999999."""
    parts, row = [0.7, 0.2, 0.1], {"prompt": "?", "domain": "a"}
    assert sum(parts) < 1
    info = {"rewards": {}, "domain": "a"}
    group = [Trajectory(row, 0, [1], [2, 3, 4], [1] * 3, [-1.0] * 3, list(parts), info=dict(info)) for _ in range(2)]

    async def rollout(rows, generator, reward_functions, cfg, versions):
        return [group], {"time/generate": 0.0, "time/score": 0.0}

    monkeypatch.setattr(script, "rollout", rollout)
    for needed, share in ((1.0, 1.0), (1.001, 0.0)):
        cfg = TrainConfig(domains=[{"name": "a"}], eval_solved=needed)
        _, counts = asyncio.run(script.sample_rows([row], [0], [], None, {}, cfg, range(1)))
        assert counts["a/solved"] == share
        assert rollout_metrics.domain_metrics(group, cfg)["a/solved"] == share
        assert rollout_metrics.eval_metrics([group], cfg)["mean@4"] == share


def test_a_substitute_is_of_the_same_domain():
    """Every group of one domain is silent: as many of it stay, and no other is resampled."""
    rows = [{"prompt": "?", "domain": name} for name in "ab" for _ in range(20)]
    settings = dict(prompts_per_step=8, num_generations=2, dynamic_sampling=True, resample_rounds=2)
    cfg = TrainConfig(domains=[{"name": "a", "weight": 3}, {"name": "b"}], **settings)
    sampler = script.PromptSampler(40, 8, 0)
    sampler.draw = Draw(Mixture.of(cfg), rows, cfg)
    asked = []

    async def rollout(rows, generator, reward_functions, cfg, versions):
        asked.append(rows[0]["domain"])
        scores = [0.0, 1.0] if rows[0]["domain"] == "a" else [0.0, 0.0]
        made = [SimpleNamespace(info={}, token_rewards=[score], row=rows[0]) for score in scores]
        return [made], {"time/generate": 0.0, "time/score": 0.0}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "rollout", rollout)
        sampled, counts = asyncio.run(script.sample_step(rows, sampler, 0, None, {}, cfg))
    assert (counts["resampled"], counts["silent"], counts["unused"]) == (4, 2, 0)
    assert asked.count("a") == 6 and asked.count("b") == 6
    ended = [counts[f"{name}/{what}"] for name in "ab" for what in ("prompts", "solved")]
    assert ended == [6, 3, 6, 0], "all that ended, replaced or not, and how many prompts' worth of them were solved"
    chosen = [group[0].row["domain"] for group, _, _ in sampled]
    drawn = [rows[number]["domain"] for number in sampler.next(0)]
    assert chosen == drawn and chosen.count("b") == 2, "interleaved, for --num_minibatches"
