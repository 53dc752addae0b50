"""Several domains in one run: whose prompt is next, and which settings and rows are each domain's."""

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

import train_grpo as script
from config import ConfigError, TrainConfig, load_config
from data import Order, load_data
from inputs.trajectory import Trajectory
from runlog import rollout_metrics
from safety import sandbox

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parent.parent

# ---- whose prompt is next -------------------------------------------------------------------------------------------


def samplers(weights: dict, ranks: int = 1, per_step: int = 12, rows: int = 40) -> list:
    """A sampler for each rank, over `rows` rows of each domain: those of the first come first."""
    cfg = TrainConfig(
        domains=[{"name": name, "weight": weight} for name, weight in weights.items()], prompts_per_step=per_step
    )
    data = [{"domain": name} for name in weights for _ in range(rows)]
    made = [script.PromptSampler(len(data), per_step, cfg.seed, rank, ranks) for rank in range(ranks)]
    for sampler in made:
        sampler.order = Order.of(data, cfg)
    return made


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("weights", [{"a": 1, "b": 3}, {"a": 0.37, "b": 0.12, "c": 5}], ids=["two", "three"])
def test_prompts_are_drawn_by_weight_on_any_number_of_ranks(weights, ranks):
    """In every step to less than one prompt; a sampler that begins at a later step draws the same."""
    (whole,), made, total = samplers(weights), samplers(weights, ranks), Counter()
    for step in range(200):
        shares = [sampler.next(step) for sampler in made]
        assert list(itertools.chain(*shares)) == whole.next(step) and {*map(len, shares)} == {12 // ranks}
        drawn = Counter(row // 40 for share in shares for row in share)
        for number, weight in enumerate(weights.values()):
            assert abs(drawn[number] - 12 * weight / sum(weights.values())) < 1
        total.update(drawn)
    for number, weight in enumerate(weights.values()):
        assert total[number] / (12 * 200) == pytest.approx(weight / sum(weights.values()), abs=0.001)
    assert samplers(weights)[0].next(120) == whole.next(120)


def test_every_domain_has_its_own_epochs():
    (sampler,) = samplers({"a": 2, "b": 1}, rows=30)
    steps = [sampler.next(step) for step in range(60)]
    orders = [[row - first for rows in steps for row in sorted(rows) if first <= row < first + 30] for first in (0, 30)]
    for drawn in orders:
        counts = Counter(drawn)
        assert max(counts.values()) - min(counts.values()) <= 1
    assert steps[0] != sorted(steps[0]), "domains are mixed"


def test_what_takes_a_prompts_place_is_of_its_domain():
    """As --dynamic_sampling asks for it."""
    for sampler in samplers({"a": 1, "b": 2, "c": 1}, 2):
        extra = sampler.extra(5, first := sampler.next(5), 12)
        assert [row // 40 for row in first] * (12 // len(first)) == [row // 40 for row in extra]
        assert sampler.extra(5, first, 12) == extra != sampler.extra(6, first, 12)


# ---- settings -------------------------------------------------------------------------------------------------------

SUMS = {"name": "sums", "dataset_id": "examples/sums.py:rows", "reward_funcs": "last_number"}
LAKE = {"name": "lake", "env": "frozenlake", "max_turns": 3, "max_completion_length": 700}


def config(tmp_path, *entries, flags: str = "", **beside) -> TrainConfig:
    path = tmp_path / "mix.yaml"
    path.write_text(yaml.safe_dump({"generator": "hf", **beside, "domains": list(entries)}), encoding="utf-8")
    return load_config(argv=["--config", str(path), *flags.split()])


def load(cfg) -> list[list[dict]]:
    """Training and held-out rows of all domains."""
    parts = [load_data(own, dict, cfg) for own in cfg.by_domain()]
    return [sum(found, []) for found in zip(*parts, strict=True)]


def test_a_domain_is_the_config_with_settings_of_its_own(tmp_path):
    cfg = config(tmp_path, SUMS, LAKE, flags="--learning_rate 1e-4", max_completion_length=64)
    sums, lake = cfg.by_domain()
    assert (sums.rollout, sums.reward_funcs, sums.max_completion_length) == ("single_turn", ["last_number"], 64)
    assert (lake.rollout, lake.reward_funcs, lake.dataset_id) == ("multi_turn", ["environment"], "seeds:2000")
    assert lake.learning_rate == sums.learning_rate == 1e-4 and not sums.env
    assert cfg.max_completion_length == 700, "room for the longest"
    assert cfg.of({"domain": "lake"}) == lake and cfg.of({}) is cfg
    plain = TrainConfig()
    assert plain.by_domain() == [plain] and plain.of({"domain": "a column of mine"}) is plain


@pytest.mark.parametrize(
    "entries, message",
    [
        ([{"name": "rewards"}], "name 'rewards': use letters"),
        ([SUMS, SUMS], "two entries have the same name"),
        ([{"name": "a", "learning_rate": 1}], "domain 'a'.*: unknown name 'learning_rate'"),
    ],
)
def test_wrong_entries_are_answered_when_the_file_is_read(entries, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, *entries)


def test_wrong_names_are_answered_before_anything_starts(tmp_path):
    cfg = config(tmp_path, SUMS | {"reward_funcs": "last_numbr"}, LAKE, model_id=str(ROOT / "models" / "tiny"))
    with pytest.raises(ConfigError, match="domain 'sums': .*Did you mean 'last_number'"):
        script.setup(cfg)


def test_tools_of_one_name_are_all_looked_at(tmp_path, monkeypatch):
    """That of the second domain is harmless, that of the first runs a model's code."""
    for name, marked in (("first", "run.executes_code = True"), ("second", "")):
        text = f'def run(code: str) -> str:\n    """Run it.\n\n    Args:\n        code: python\n    """\n\n{marked}\n'
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sandbox, "why_not_contained", lambda: "there is no wall")
    entries = [SUMS | {"name": name, "tools": f"{tmp_path}/{name}.py:run"} for name in ("first", "second")]
    with pytest.raises(ConfigError, match="run would run code that the model writes"):
        script.setup(config(tmp_path, *entries, model_id=str(ROOT / "models" / "tiny"), allow_uncontained=False))


# ---- rows and numbers -----------------------------------------------------------------------------------------------


def test_a_column_routes_the_rows_of_one_data_set(tmp_path):
    path, rows = tmp_path / "rows.jsonl", [{"prompt": f"{n}?", "domain": "ab"[n % 2]} for n in range(6)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    cfg = config(tmp_path, {"name": "a"}, {"name": "b"}, dataset_id=str(path))
    assert [(row["domain"], row["prompt"]) for row in load(cfg)[0]] == [(d, f"{n}?") for d, n in zip("aaabbb", [0, 2, 4, 1, 3, 5], strict=True)]  # fmt: skip  # noqa: E501
    path.write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[1] | {"domain": "bb"}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"row 1, column `domain` .*: unknown name 'bb'; known are a, b"):
        load(cfg)


def test_held_out_rows_are_those_of_the_domains_that_have_some(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n' * 9, encoding="utf-8")
    file = SUMS | {"name": "file", "dataset_id": str(tmp_path / "rows.jsonl")}
    with pytest.raises(ConfigError, match="rows.jsonl has no splits: .* or give this domain"):
        load(config(tmp_path, file, SUMS, eval_steps=5))
    train, held_out = load(config(tmp_path, file | {"eval_split": "none"}, SUMS, eval_steps=5))
    assert {row["domain"] for row in train} == {"file", "sums"} and {row["domain"] for row in held_out} == {"sums"}


def test_solved_is_the_same_in_training_and_in_an_evaluation():
    """Three functions that all give 1, with weights of .7, .2 and .1: the sum is .9999999999999999."""
    parts, info = [0.7, 0.2, 0.1], {"rewards": {}, "domain": "a"}
    assert sum(parts) < 1
    group = [Trajectory({"domain": "a"}, 0, [1], [2, 3, 4], [1] * 3, [-1.0] * 3, parts, info=info) for _ in range(2)]
    for needed, share in ((1.0, 1.0), (1.001, 0.0)):
        cfg = TrainConfig(domains=[{"name": "a"}], eval_solved=needed)
        assert rollout_metrics.rollout_metrics(group, cfg)["a/solved"] == share
        assert rollout_metrics.eval_metrics([group], cfg)["mean@4"] == share
