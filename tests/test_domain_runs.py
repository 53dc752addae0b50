"""A training of two domains on two ranks: whose rewards, tools and numbers a row gets."""

import statistics

import pandas
import pytest
import yaml
from live import trained

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


def two_domains(folder) -> list[dict]:
    """The lines of a run on two ranks; one of its two domains has tools."""
    tasks = folder / "tasks.py"
    tasks.write_text(TASKS, encoding="utf-8")
    plain = dict(name="plain", weight=3, dataset_id=f"{tasks}:plain", reward_funcs=[f"{tasks}:even"])
    plain |= dict(max_completion_length=8, eval_solved=0.5, system_prompt="Speak plainly.")
    other = dict(name="tooled", weight=1, dataset_id=f"{tasks}:tooled", reward_funcs=[f"{tasks}:odd"])
    other |= dict(max_completion_length=24, eval_solved=6.5, tools=["calculator"], max_turns=2, max_turn_length=6)
    beside = dict(model_id="models/tiny", generator="hf", compute_dtype="float32", prompts_per_step=4)
    beside |= dict(num_generations=4, max_prompt_length=512, print_samples_every=0, scale_rewards="batch", max_steps=6)
    beside |= dict(eval_steps=3, eval_generations=2, learning_rate=1e-3)
    (folder / "run.yaml").write_text(yaml.safe_dump(beside | {"domains": [plain, other]}), encoding="utf-8")
    return trained(folder, f"--config {folder}/run.yaml", ranks=2)


def test_each_row_is_asked_scored_and_counted_by_its_domain(tmp_path):
    """Also in steps in which a rank, or the step, has no row of a domain."""
    lines = two_domains(tmp_path)
    steps = [line for line in lines if "reward" in line]
    shown = [pandas.read_parquet(path) for path in sorted((tmp_path / "run" / "completions").glob("*.parquet"))]
    assert len(steps) == len(shown) == 6
    for line, rows in zip(steps, shown, strict=True):
        assert len(rows) == 16 and set(rows.domain) <= {"plain", "tooled"}
        for name, own in rows.groupby("domain"):
            column = {"plain": "rewards/even", "tooled": "rewards/odd"}[name]
            assert own[column].notna().all() and line[f"{name}/prompts"] == len(own) / 4
            assert own.reward.to_numpy() == pytest.approx(own[column].to_numpy(), abs=1e-6)
            assert line[f"{name}/reward"] == pytest.approx(own[column].mean())
            solved = own[column] >= {"plain": 0.5, "tooled": 6.5}[name]
            assert line[f"{name}/solved"] == pytest.approx(solved.mean())
            spread = [statistics.stdev(group) for _, group in own.groupby("row_number")[column]]
            assert line[f"{name}/reward_std"] == pytest.approx(statistics.fmean(spread))
            for text, whose in (("calculator", "tooled"), ("Speak plainly.", "plain")):
                told = own.prompt.str.contains(text)
                assert told.all() and name == whose or not told.any() and name != whose
            if name == "plain":
                asked = own.prompt.str.extract(r"Plain (\d+)\?")[0].astype(int)
                assert own.answer.astype(int).tolist() == (2 * asked).tolist()
            # What did not apply, or did not happen, is not in a line.
            assert (f"{name}/tools/call_frequency" in line) == (name == "tooled") == (f"{name}/turns/mean" in line)
            # Centred in its group, divided by the std of the domain's part of the step, on whichever ranks that lies.
            centred = own[column] - own.groupby("row_number")[column].transform("mean")
            expected = (centred / own[column].std()).fillna(0)  # it may have one group, whose completions score alike
            assert own.advantage.to_numpy() == pytest.approx(expected.to_numpy(), abs=1e-4)
        for function, name in (("even", "plain"), ("odd", "tooled")):
            assert (f"rewards/{function}/mean" in line) == (name in set(rows.domain))
    assert any((rows.domain == "tooled").sum() == 4 for rows in shown), "a step in which one rank has no row of it"
    evaluations = [line for line in lines if "eval/reward" in line]
    assert [line["step"] for line in evaluations] == [0, 3, 6]
    for line in evaluations:
        assert (line["eval/rows"], line["eval/plain/rows"], line["eval/tooled/rows"]) == (5, 3, 2)
        for key in ("reward", "mean@2"):
            parts = 3 * line[f"eval/plain/{key}"] + 2 * line[f"eval/tooled/{key}"]
            assert line[f"eval/{key}"] == pytest.approx(parts / 5)
