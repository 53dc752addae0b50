"""train_minimal.py computes what train_grpo.py computes, learns, and has no flag that does nothing."""

import asyncio
import re
from dataclasses import replace

import pytest
import torch
from ragged import small_llama
from ranks import on_ranks
from server_fixture import ROOT, make_tiny
from transformers import AutoTokenizer

import train_grpo
import train_minimal as script
import utils
from config import ConfigError, TrainConfig, load_config
from inputs.trajectory import Completion
from looking.runs import Run
from rewards import completion_text
from rollouts import Trajectory
from runfiles.reading import read_metrics

TOY = ROOT / "benchmarks" / "toy.py"
CPU = torch.device("cpu")
GENERATIONS = 3


def trajectories() -> list[Trajectory]:
    """Four prompts with three completions each, of all lengths."""
    draw = torch.Generator().manual_seed(0)
    out = []
    for group in range(4):
        prompt = torch.randint(10, 1000, (3 + 4 * group,), generator=draw).tolist()
        for member in range(GENERATIONS):
            ids = torch.randint(10, 1000, (int(torch.randint(1, 12, (1,), generator=draw)),), generator=draw).tolist()
            rewards = [0.0] * (len(ids) - 1) + [float((group + member**2) % 3)]
            out.append(Trajectory({}, group, prompt, ids, [1] * len(ids), [-6.9] * len(ids), rewards))
    return out


def loss_and_gradient(cfg: script.Settings) -> dict[str, torch.Tensor]:
    rank, world, device = utils.init_distributed(60)
    model = small_llama(None, torch.float32)
    mine = [t for t in trajectories() if t.group % world == rank]
    scores = torch.tensor([sum(t.token_rewards) for t in mine], dtype=torch.float64).view(-1, GENERATIONS)
    of_each, size = script.advantages(scores).flatten(), cfg.rows_per_microbatch
    parts = [script.tensors(mine[i : i + size], of_each[i : i + size], device) for i in range(0, len(mine), size)]
    for part in parts if cfg.num_iterations > 1 else ():  # as if weights had moved by now
        part["old_logprobs"] = part["sampling_logprobs"]
    numbers = script.accumulate_gradients(model, parts, cfg)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return gradients | {"loss": torch.tensor(numbers["loss"])}


def of_train_grpo(several: bool, monkeypatch) -> dict[str, torch.Tensor]:
    monkeypatch.setattr(train_grpo, "load_hf_model", small_llama)
    cfg = TrainConfig(compute_dtype="float32", loss_agg="token_mean", beta=0.0, correction="none")
    cfg = replace(cfg, num_generations=GENERATIONS, shared_prefix=False)
    policy = train_grpo.load_policy(cfg, CPU)
    batch = train_grpo.collate(trajectories(), 0, CPU)
    batch.advantages = train_grpo.grpo(batch, cfg)
    batch.old_logprobs = batch.sampling_logprobs if several else None
    sums = train_grpo.accumulate_gradients(policy, batch, cfg)
    named = {train_grpo.clean_name(name): weight.grad for name, weight in policy.named_parameters()}
    return named | {"loss": sums["loss"].float()}


def check_equal(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize("updates", (1, 2))
def test_loss_and_gradient_are_those_of_train_grpo(updates, monkeypatch):
    cfg = script.Settings(compute_dtype="float32", num_iterations=updates, rows_per_microbatch=5)
    found = loss_and_gradient(cfg)
    check_equal(found, of_train_grpo(updates > 1, monkeypatch))


def test_two_ranks_give_the_gradient_of_one(monkeypatch):
    cfg = script.Settings(compute_dtype="float32", rows_per_microbatch=2, num_iterations=2)
    for found in on_ranks(2, loss_and_gradient, cfg):
        check_equal(found, of_train_grpo(True, monkeypatch))


def test_it_learns(tmp_path):
    torch.set_num_threads(1)
    cfg = script.Settings(
        model_id=str(make_tiny()), generator="hf", compute_dtype="float32", dataset_id=f"{TOY}:rows",
        reward_funcs=[f"{TOY}:tens"], prompts_per_step=4, num_generations=16, max_completion_length=4, max_steps=20,
        num_iterations=2, learning_rate=1e-2, eval_steps=20, output_dir=str(tmp_path), run_name="run", seed=0,
    )  # fmt: skip
    script.train(cfg)
    lines = read_metrics(tmp_path / "run")
    assert lines[0]["eval/reward"] < 0.2 and lines[-1]["eval/reward"] > 0.8
    assert Run("run", tmp_path / "run").summary()["step"] == 20  # as the page shows it
    assert max(line.get("sampling/logprob_diff_mean", 0) for line in lines) < 1.0
    assert lines[1]["sampling/logprob_diff_mean"] < 1e-3  # before the step's first update, which has equal weights
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_the_rows_of_an_epoch_are_distinct_and_those_of_the_next_are_shuffled(monkeypatch):
    rows, cfg = [{"prompt": str(n)} for n in range(10)], script.Settings(prompts_per_step=4)
    epochs = []
    for epoch in range(3):
        numbers = []
        for step in (2 * epoch, 2 * epoch + 1):  # two rows of ten fill no step
            for rank in range(2):
                monkeypatch.setattr(script.dist, "get_rank", lambda rank=rank: rank)
                monkeypatch.setattr(script.dist, "get_world_size", lambda: 2)
                numbers += [int(row["prompt"]) for row in script.rows_of_step(rows, step, cfg)]
        epochs.append(numbers)
    assert all(len(set(numbers)) == 8 for numbers in epochs)
    assert len(set(map(tuple, epochs))) == 3 and {n for numbers in epochs for n in numbers} == {*range(10)}


def the_answer(completions, answer, **columns):
    """As in the comment of section 2."""
    return [float(completion_text(c) == a) for c, a in zip(completions, answer, strict=True)]


def test_chats_are_scored_prompt_by_prompt():
    class Generator:
        tokenizer = AutoTokenizer.from_pretrained(make_tiny())

        async def generate(self, prompt, n, **options):
            said = [self.tokenizer(text).input_ids for text in ("46", "47")]
            return [Completion(ids, [-1.0] * len(ids), "stop", 0, prompt) for ids in said]

    rows = [{"prompt": [{"role": "user", "content": "What is 12 + 34?"}], "answer": answer} for answer in ("46", "47")]
    given = Generator(), {"the_answer": the_answer}, script.Settings()
    _, scores = asyncio.run(script.sample(rows, 2, 0, *given))
    assert scores.tolist() == [[1, 0], [0, 1]]
    with pytest.raises(RuntimeError, match="2 of 2 completions"):  # completions of other weights
        asyncio.run(script.sample(rows, 2, 1, *given))


def test_flags_that_it_does_not_have_are_refused():
    assert load_config(script.Settings, ["--learning_rate", "2e-5"]).learning_rate == 2e-5
    with pytest.raises(ConfigError, match="'--beta': it is one of train_grpo.py"):
        load_config(script.Settings, ["--beta", ".1"])


def test_advice_after_a_failure_names_flags_of_the_program(capsys):
    for cfg, flags in ((script.Settings(), set()), (TrainConfig(save_steps=5), {"resume", "run_name"})):
        assert utils.print_failure(utils.dist.DistNetworkError("a rank is gone"), cfg) == 1
        text = capsys.readouterr().err
        assert "signal 9" in text and {*re.findall(r"--(\w+)", text)} == flags


def test_held_out_prompts_of_which_none_fits_are_an_error(monkeypatch):
    monkeypatch.setattr(script.dist, "get_rank", lambda: 0)
    tokenizer, cfg = AutoTokenizer.from_pretrained(make_tiny()), script.Settings(max_prompt_length=80)
    short, long = {"prompt": "What is 1 + 2?"}, {"prompt": "What is 1 + 2? " * 40}
    assert script.fitting([short, long], "training", tokenizer, cfg) == [short]
    assert script.fitting([], "held-out", tokenizer, cfg) == []
    with pytest.raises(ConfigError, match="--max_prompt_length=80: all 1 held-out prompts are longer"):
        script.fitting([long], "held-out", tokenizer, cfg)


@pytest.mark.parametrize("start", (script.train, train_grpo.setup))
def test_held_out_rows_that_a_reward_cannot_score_are_found_before_there_is_a_run(start, tmp_path):
    for name, answer in (("rows", ', "answer": "2"'), ("held_out", "")):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "What is 1 + 1?"{answer}}}\n' * 8, encoding="utf-8")
    cfg = script.Settings(
        model_id=str(make_tiny()), generator="hf", dataset_id=f"{tmp_path}/rows.jsonl", run_name="run",
        eval_dataset_id=f"{tmp_path}/held_out.jsonl", output_dir=str(tmp_path / "runs"),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"last_number \(held-out rows\): needs answer"):
        start(cfg)
    assert not (tmp_path / "runs").exists()
