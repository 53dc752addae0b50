"""On-policy distillation: the signals against independent loops, a teacher in this process, and live teachers."""

import asyncio
import contextlib
import functools
import http.server
import json
import math
import shutil
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy
import pandas
import pytest
import requests
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live import EVEN, SMALL, Process, running, trainer
from safetensors.torch import load_file, save_file
from server_fixture import free_port, make_tiny, start_server
from stub_server import stub
from test_adapters_alone import Trainer

import teachers
import train_grpo as script
import utils
from algorithms.distillation import distill_metrics, divergence
from batch import collate
from config import ConfigError, TrainConfig, load_config
from data import load_rows
from inputs import on_disk
from inputs.trajectory import Trajectory
from serving.teacher import TeacherServers

CPU = torch.device("cpu")


def trajectories(teacher=True) -> list[Trajectory]:
    """Two groups of two; a hole, another length, and one of which no teacher was asked."""
    made = []
    for number, mask in enumerate([[1, 1, 0, 1], [1, 1], [1, 0, 0, 1, 1], [1, 1, 1]]):
        n = len(mask)
        sampled = [-0.3 - 0.1 * t * m if m else 0.0 for t, m in enumerate(mask)]
        said = [-0.2 - 0.9 * ((t + number) % 3) if m else 0.0 for t, m in enumerate(mask)]
        rewards = [0.0] * (n - 1) + [float(number % 2)]
        made.append(Trajectory({}, number // 2, [5, 6, 7], [10 + number + t for t in range(n)], mask, sampled, rewards))
        made[-1].teacher_logprobs = said if teacher and number < 3 else None
    return made


# ---- the advantage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("baseline", ["none", "place"])
@pytest.mark.parametrize("gamma, clip, coef", [(0.0, 20.0, 1.0), (1.0, 20.0, 1.0), (0.5, 0.4, 2.0)])
def test_the_advantage_is_that_of_a_loop(gamma, clip, coef, baseline):
    """Later tokens count by gamma for each sampled token between; a tool's text neither counts nor discounts. Places
    are counted in sampled tokens, over the completions that the teacher was asked about."""
    said = trajectories()
    batch = collate(said, 0, CPU)
    cfg = TrainConfig(distill_gamma=gamma, distill_clip=clip, distill_coef=coef, scale_rewards="none")
    ours = script.ADVANTAGES["distill"](batch, replace(cfg, distill_baseline=baseline))
    later: dict[tuple[int, int], float] = {}  # (completion, how many sampled tokens are before) -> its sum
    for row, t in enumerate(said[:3]):
        total, sampled = 0.0, [place for place, mask in enumerate(t.loss_mask) if mask]
        for number in reversed(range(len(sampled))):
            apart = t.teacher_logprobs[sampled[number]] - t.logprobs[sampled[number]]
            later[row, number] = total = max(-clip, min(clip, apart)) + gamma * total
    for row, t in enumerate(said):
        score = sum(t.token_rewards) - 0.5  # each group has one 0 and one 1
        for place, mask in enumerate(t.loss_mask):
            number = sum(t.loss_mask[:place])
            others = [value for (other, n), value in later.items() if n == number and other != row]
            others = others if others and baseline == "place" else [0.0]
            teach = later[row, number] - sum(others) / len(others) if row < 3 and mask else 0.0
            expected = (score + coef * teach) * mask
            assert float(ours[row, 3 + place]) == pytest.approx(expected, abs=1e-6)
    assert not ours[:, :3].any()


def test_without_any_answer_it_is_grpo():
    batch = collate(trajectories(teacher=False), 0, CPU)
    assert torch.equal(script.ADVANTAGES["distill"](batch, TrainConfig()), script.grpo(batch, TrainConfig()))


def test_the_gradient_of_the_advantage_is_that_of_the_reverse_kl():
    """A categorical policy and a fixed teacher: the mean of A grad log pi over all tokens, by their probability, is
    minus the gradient of KL(policy || teacher)."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(7, dtype=torch.float64, requires_grad=True), torch.randn(7, dtype=torch.float64)
    log_p, log_t = logits.log_softmax(-1), teacher.log_softmax(-1)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - log_t)).sum(), logits, retain_graph=True)
    mask = torch.ones(7, 1, dtype=torch.float64)
    batch = script.Batch(torch.arange(7)[:, None], mask, mask, torch.zeros_like(mask), torch.arange(7))
    batch.sampling_logprobs, batch.teacher_logprobs = log_p.detach()[:, None], log_t[:, None]
    advantages = script.ADVANTAGES["distill"](batch, TrainConfig(reward_weights=[0.0]))[:, 0]
    (ours,) = torch.autograd.grad(-(log_p.detach().exp() * advantages * log_p).sum(), logits)
    assert torch.allclose(ours, exact, atol=1e-12)


def test_a_baseline_takes_noise_away_and_changes_no_expected_gradient():
    """A teacher that finds nearly all of what is sampled bad: 400 steps of 16 completions of one token."""
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    logits.data[0] -= 3.0  # the one that it finds good is hardly ever sampled
    log_p, log_t = logits.log_softmax(-1), torch.tensor([-1e-6, *[-15.0 - n for n in range(6)]], dtype=torch.float64)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - log_t)).sum(), logits, retain_graph=True)
    tokens = torch.multinomial(log_p.detach().exp(), 400 * 16, replacement=True).view(400, 16, 1)

    def gradients(baseline: str) -> torch.Tensor:  # [400, 7] of the loss of each step
        found = []
        for ids in tokens:
            mask = torch.ones(16, 1, dtype=torch.float64)
            batch = script.Batch(ids, mask, mask, torch.zeros_like(mask), torch.arange(16))
            batch.sampling_logprobs, batch.teacher_logprobs = log_p.detach()[ids], log_t[ids]
            advantages = script.ADVANTAGES["distill"](
                batch, TrainConfig(reward_weights=[0.0], distill_baseline=baseline)
            )
            loss = -(advantages * log_p[ids]).mean()
            found.append(torch.autograd.grad(loss, logits, retain_graph=True)[0])
        return torch.stack(found)

    plain, centered = gradients("none"), gradients("place")
    noise = [float((g - exact).square().sum(1).mean()) for g in (plain, centered)]
    assert noise[1] < 0.3 * noise[0], noise
    assert float((centered.mean(0) - exact).norm()) < 0.1 * float(exact.norm())


@pytest.mark.parametrize("completions", [1, 2, 3])
def test_the_expected_gradient_under_a_baseline_is_exact(completions):
    """Over all steps there can be: of few completions the baseline takes no part, of one alone it is 0."""
    torch.manual_seed(0)
    logits = torch.randn(4, dtype=torch.float64, requires_grad=True)
    log_p, log_t = logits.log_softmax(-1), torch.randn(4, dtype=torch.float64).log_softmax(-1)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - log_t)).sum(), logits, retain_graph=True)
    cfg = TrainConfig(reward_funcs=["zero"], distill_baseline="place")
    mask, expected = torch.ones(completions, 1, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for ids in torch.cartesian_prod(*[torch.arange(4)] * completions).view(-1, completions, 1):
        batch = script.Batch(ids, mask, mask, torch.zeros_like(mask), torch.arange(completions))
        batch.sampling_logprobs, batch.teacher_logprobs = log_p.detach()[ids], log_t[ids]
        loss = -(script.ADVANTAGES["distill"](batch, cfg) * log_p[ids]).mean()
        expected += log_p.detach()[ids].sum().exp() * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.allclose(expected, exact, atol=1e-12)


# ---- the term -------------------------------------------------------------------------------------------------------


def term_by_hand(teacher: list[float], policy: list[float], b: float) -> float:
    """Probabilities of the k tokens -> the divergence over them and the rest."""
    p, q = [*teacher, 1 - sum(teacher)], [*policy, 1 - sum(policy)]

    def kl(a, c):
        return sum(x * math.log(x / y) for x, y in zip(a, c, strict=True))

    if b in (0, 1):
        return kl(p, q) if b == 0 else kl(q, p)
    m = [b * x + (1 - b) * y for x, y in zip(p, q, strict=True)]
    return b * kl(p, m) + (1 - b) * kl(q, m)


shares = st.lists(st.floats(0.01, 1), min_size=4, max_size=4).map(lambda xs: [x / sum(xs) for x in xs][:3])


@settings(max_examples=60, deadline=None)
@given(shares, shares, st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
def test_the_term_is_that_of_a_loop(teacher, policy, b):
    part = SimpleNamespace(
        teacher_top_logprobs=torch.tensor(teacher, dtype=torch.float64).log()[None, None],
        top_logprobs=torch.tensor(policy, dtype=torch.float64).log()[None, None].requires_grad_(),
    )
    term, stats = divergence(part, TrainConfig(distill_topk=3, distill_jsd=b))
    assert float(term.detach()) == pytest.approx(term_by_hand(teacher, policy, b), abs=1e-9)
    assert float(stats["distill/policy_mass"]) == pytest.approx(sum(policy), abs=1e-9)
    (gradient,) = torch.autograd.grad(term.sum(), part.top_logprobs)
    for index in range(3):  # a log-prob that moves takes from the rest
        near = []
        for step in (1e-6, -1e-6):
            moved = list(policy)
            moved[index] *= math.exp(step)
            near.append(term_by_hand(teacher, moved, b))
        slope = (near[0] - near[1]) / 2e-6
        assert float(gradient[0, 0, index]) == pytest.approx(slope, abs=1e-4)


def test_the_term_over_all_tokens_has_the_gradient_of_cross_entropy():
    """Forward KL over the whole vocabulary: softmax(policy) - softmax(teacher), known in closed form."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(5, requires_grad=True), torch.randn(5).softmax(-1)
    part = SimpleNamespace(
        teacher_top_logprobs=teacher.log()[:4][None, None], top_logprobs=logits.log_softmax(-1)[:4][None, None]
    )
    (ours,) = torch.autograd.grad(divergence(part, TrainConfig(distill_topk=4))[0].sum(), logits)
    assert torch.allclose(ours, logits.softmax(-1).detach() - teacher, atol=1e-6)


@pytest.mark.parametrize("b", [0.0, 0.5, 1.0])
def test_nothing_known_is_no_term_and_no_gradient(b):
    policy = torch.zeros(2, 3, 4, requires_grad=True)
    part = SimpleNamespace(teacher_top_logprobs=torch.full((2, 3, 4), -math.inf), top_logprobs=policy)
    term, _ = divergence(part, TrainConfig(distill_topk=4, distill_jsd=b))
    term.sum().backward()
    assert not term.any() and not policy.grad.any()


def test_certain_teachers_and_policies_give_finite_gradients():
    """Float rounding may put the mass of k tokens at 1 or above."""
    for b in (0.0, 0.3, 1.0):
        policy = torch.tensor([[[1e-7, -17.0]], [[-40.0, 0.0]]], requires_grad=True)
        teacher = torch.tensor([[[0.0, -100.0]], [[1e-7, -9999.0]]])
        part = SimpleNamespace(teacher_top_logprobs=teacher, top_logprobs=policy)
        term, _ = divergence(part, TrainConfig(distill_topk=2, distill_jsd=b))
        term.sum().backward()
        assert term.isfinite().all() and policy.grad.isfinite().all()


# ---- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_count_asked_tokens_alone():
    batch = collate(trajectories(), 0, CPU)
    batch.teacher_top = batch.input_ids[..., None].clone()
    batch.teacher_top[0, 3] += 1  # its first sampled token is another one
    batch.teacher_top_logprobs = torch.full(batch.teacher_top.shape, math.log(0.25))
    found = distill_metrics(batch)
    apart = [
        p - s
        for t in trajectories()[:3]
        for p, s, m in zip(t.teacher_logprobs, t.logprobs, t.loss_mask, strict=True)
        if m
    ]
    assert found["distill/reverse_kl"] == pytest.approx(-sum(apart) / len(apart), abs=1e-6)
    assert found["distill/asked"] == pytest.approx(len(apart) / (len(apart) + 3))
    assert found["distill/first_gap"] == pytest.approx(sum(-0.2 - 0.9 * n + 0.3 for n in range(3)) / 3, abs=1e-6)
    assert found["distill/top_mass"] == pytest.approx(0.25)
    assert found["distill/outside_top"] == pytest.approx(1 / len(apart))


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--advantage distill", "no teacher to learn from; give --teacher_urls"),
        ("--distill_topk 20", "no teacher to learn from"),
        ("--teacher_id models/tiny", "nothing learns from it: add --advantage distill"),
        ("--teacher_id x --teacher_urls http://a:1", "two teachers"),
        ("--teacher_model x", "add --teacher_urls"),
        ("--teacher_urls a:1 --advantage distill", "begins with http"),
        ("--teacher_urls http://u:p@a:1 --advantage distill", "TEACHER_TOKEN"),
        ("--teacher_id models/tiny --advantage distill --temperature 0.7", "leave --temperature out"),
        ("--teacher_id models/tiny --advantage distill --distill_jsd 0.5", "add --distill_topk"),
        ("--teacher_id models/tiny --distill_topk 5 --distill_jsd 1.5", "between 0 and 1"),
        ("--teacher_id models/tiny --advantage distill --num_generations 1", "at least 2"),
        ("--teacher_id models/tiny --advantage distill --reward_funcs zero --dynamic_sampling", "no reward counts"),
    ],
)
def test_settings_that_cannot_teach_are_refused_before_anything_is_loaded(flags, message):
    with pytest.raises(ConfigError, match=message):
        script.check_algorithm(load_config(TrainConfig, [*flags.split(), "--generator", "hf"]))


@pytest.mark.parametrize("rewards", ["--reward_funcs zero", "--reward_funcs last_number --reward_weights 0"])
def test_one_completion_a_prompt_is_enough_where_rewards_count_for_nothing(rewards):
    flags = f"--teacher_id models/tiny --advantage distill --num_generations 1 {rewards}"
    script.check_algorithm(load_config(TrainConfig, [*flags.split(), "--generator", "hf"]))


# ---- a teacher in this process --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    """(cfg, run as add_teacher sees it) with models/tiny as the policy, in float32."""
    cfg = TrainConfig(
        model_id="models/tiny", generator="hf", compute_dtype="float32", advantage="distill", distill_topk=5
    )
    policy, inner = script.load_policy(cfg, CPU)
    return cfg, SimpleNamespace(policy=policy, inner=inner, teacher=None, device=CPU)


def all_logits(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("shown", ["the same prompt", "another prompt"])
@pytest.mark.parametrize("shared", [True, False])
def test_what_a_teacher_here_says_is_what_its_model_says(tiny, shown, shared):
    """Behind the prompt that it is shown, of sampled tokens alone: a tool's text is context."""
    cfg, run = tiny
    said = trajectories(teacher=False)
    if shown == "another prompt":
        cfg = replace(cfg, teacher_prompt="hint")
        for number, t in enumerate(said[:3]):
            prompt = list(range(20, 22 + 5 * number))
            t.info["teacher_prompt"] = teachers.Prompt(prompt, prompt)
        asked = [True] * 3 + [False]
    else:
        cfg = replace(cfg, teacher_id="models/tiny")
        asked = [True] * 4
    cfg = replace(cfg, shared_prefix=shared)
    batch = collate(said, 0, CPU)
    script.add_teacher(batch, run, said, 0, cfg)
    for row, t in enumerate(said):
        prompt = t.info["teacher_prompt"].token_ids if "teacher_prompt" in t.info else t.prompt_ids
        logprobs = all_logits(run.inner.hf_model, prompt + t.token_ids)
        for place, mask in enumerate(t.loss_mask):
            ours, top = batch.teacher_logprobs[row, 3 + place], batch.teacher_top[row, 3 + place]
            if not mask or not asked[row]:
                assert ours.isnan()
                continue
            at = logprobs[len(prompt) + place - 1]
            assert float(ours) == pytest.approx(float(at[t.token_ids[place]]), abs=2e-5)
            assert torch.equal(top, at.topk(5).indices)
            assert torch.allclose(batch.teacher_top_logprobs[row, 3 + place], at[top], atol=2e-5)


def test_the_policy_tells_the_teachers_tokens_with_their_gradient(tiny):
    cfg, run = tiny
    said = trajectories()
    batch = collate(said, 0, CPU)
    batch.teacher_top = (batch.input_ids[..., None] * torch.tensor([3, 7])) % 1000
    batch.teacher_top_logprobs = torch.full(batch.teacher_top.shape, -1.0)
    logprobs, *_ = script.compute_logprobs(run.policy, batch, cfg)
    for row, t in enumerate(said):
        at = all_logits(run.inner.hf_model, t.prompt_ids + t.token_ids)
        for place in (place for place, mask in enumerate(t.loss_mask) if mask):
            expected = at[2 + place, batch.teacher_top[row, 3 + place]]
            assert torch.allclose(batch.top_logprobs[row, 3 + place], expected, atol=2e-5)
            assert float(logprobs[row, 3 + place]) == pytest.approx(float(at[2 + place, t.token_ids[place]]), abs=2e-5)
    assert batch.top_logprobs.requires_grad
    part = batch.select([2, 0])
    assert part.teacher_top.shape == (2, 8, 2) and torch.equal(part.teacher_top[1], batch.teacher_top[0])


def test_tokens_beyond_the_policys_logits_are_no_targets(tiny):
    cfg, run = tiny
    said = trajectories()
    for t in said:
        ids = torch.tensor([[99_999, 5]] * len(t.token_ids))
        t.teacher_top = ids, torch.full(ids.shape, -1.0)
    batch = collate(said, 0, CPU)
    script.add_teacher(batch, run, said, 0, replace(cfg, teacher_urls=["http://a:1"], distill_topk=2))
    assert batch.teacher_top.max() == 5 and (batch.teacher_top_logprobs[0, 3] == torch.tensor([-math.inf, -1])).all()


def learned(run: Path, key: str) -> list[float]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line[key] for line in map(json.loads, lines) if key in line]


@pytest.fixture(scope="module")
def even_tiny(tmp_path_factory):
    """A teacher: models/tiny, taught to write nothing but tokens of even ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("teacher") / "teacher"
    model = AutoModelForCausalLM.from_pretrained("models/tiny", dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(0)
    for _ in range(30):
        ids = torch.randint(0, model.config.vocab_size, (8, 24))
        even = model(ids).logits.log_softmax(-1)[..., ::2].logsumexp(-1)
        optimizer.zero_grad()
        (-even.mean()).backward()
        optimizer.step()
    assert even.exp().mean() > 0.9
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained("models/tiny").save_pretrained(folder)
    return folder


TAUGHT = SMALL + " --reward_funcs zero --max_steps 12 --learning_rate 3e-3 "


@pytest.mark.in_turn
@pytest.mark.parametrize("how", ["--advantage distill", "--distill_topk 1024"])
def test_the_policy_learns_what_its_teacher_can_without_any_reward(how, even_tiny, tmp_path):
    """The share of even tokens is looked at, and counts for nothing."""
    (tmp_path / "even.py").write_text(EVEN, encoding="utf-8")
    flags = f"{SMALL} --reward_funcs {tmp_path}/even.py:even --reward_weights 0 --max_steps 50 {how} "
    flags += f"--teacher_id {even_tiny} --num_generations 8 --output_dir {tmp_path} --run_name x"
    with running(trainer(tmp_path / "log", *flags.split())) as process:
        assert process.end() == 0, process.text
    shares, apart = (learned(tmp_path / "x", key) for key in ("rewards/even/mean", "distill/reverse_kl"))
    assert shares[0] < 0.65 and sum(shares[-3:]) / 3 > 0.7, shares
    assert sum(apart[-3:]) < 0.5 * sum(apart[:3]), apart


@pytest.fixture(scope="module")
def said_by(even_tiny, tmp_path_factory):
    """(strategy, ranks) -> the teacher's probability within its top 4, in the first step."""
    folder = tmp_path_factory.mktemp("sharded")

    def train(strategy: str, ranks: int) -> float:
        flags = f"{TAUGHT} --max_steps 1 --advantage distill --distill_topk 4 --teacher_id {even_tiny} "
        flags += f"--strategy {strategy} --output_dir {folder} --run_name {strategy}"
        with running(trainer(folder / "log", *flags.split(), ranks=ranks)) as process:
            assert process.end() == 0, process.text
        return learned(folder / strategy, "distill/top_mass")[0]

    return functools.cache(train)


@pytest.mark.in_turn
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_a_sharded_teacher_says_the_same(strategy, said_by):
    assert said_by(strategy, 2) == pytest.approx(said_by("ddp", 1), rel=0.2)  # other samples of the same prompts


def test_the_policy_is_its_own_teacher_behind_another_prompt(tmp_path):
    """Of one domain a column, of another what a function makes of rewards, and of the third nothing."""
    (tmp_path / "hints.py").write_text(
        "def shown(trajectory):\n"
        "    assert trajectory.info['rewards']\n"
        "    return f\"Say {trajectory.row['answer']}.\" if len(trajectory.row['answer']) == 2 else None\n",
        encoding="utf-8",
    )
    sums = "dataset_id: 'examples/sums.py:rows'"
    (tmp_path / "three.yaml").write_text(
        "domains:\n"
        f"  - {{name: column, {sums}, teacher_prompt: answer}}\n"
        f"  - {{name: function, {sums}, teacher_prompt: '{tmp_path}/hints.py:shown'}}\n"
        f"  - {{name: nothing, {sums}}}\n",
        encoding="utf-8",
    )
    flags = TAUGHT.replace("--dataset_id examples/sums.py:rows ", "")
    flags += f"--max_steps 2 --prompts_per_step 6 --advantage distill --config {tmp_path}/three.yaml "
    flags += f"--output_dir {tmp_path} --run_name x"
    with running(trainer(tmp_path / "log", *flags.split())) as process:
        assert process.end() == 0, process.text
    assert learned(tmp_path / "x", "distill/reverse_kl")[0] != 0
    told = dict.fromkeys(("column", "function", "nothing"), 0)
    for file in (tmp_path / "x" / "completions").glob("step_*.parquet"):
        for row in pandas.read_parquet(file).to_dict("records"):
            known = row["tokens/teacher_logprob"] is not None and not numpy.isnan(row["tokens/teacher_logprob"]).all()
            assert not (known and row["domain"] == "nothing")
            told[row["domain"]] += known
    assert told["column"] and told["function"], told


def test_another_vocabulary_is_refused_token_by_token(tmp_path):
    folder = tmp_path / "other"
    shutil.copytree("models/tiny", folder)
    words = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = words["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[500:502]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    cfg = TrainConfig(teacher_id=str(folder), advantage="distill", model_id="models/tiny")
    with pytest.raises(ConfigError, match=f"token {vocabulary[second]} is"):
        teachers.connect(cfg, script.load_processor("models/tiny"), [])


def test_folders_that_are_no_teacher_are_named_as_one(tmp_path):
    """A checkpoint of a base in 4 bits is an adapter alone."""
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    for folder, message in ((tmp_path, "adapter alone. Fold it into its base"), (tmp_path / "no", "no such folder")):
        cfg = TrainConfig(teacher_id=str(folder), advantage="distill", model_id="models/tiny")
        with pytest.raises(ConfigError, match=f"--teacher_id={folder}: .*{message}"):
            teachers.connect(cfg, script.load_processor("models/tiny"), [])


@pytest.mark.parametrize("fault", ["model.safetensors is missing or damaged", "1 of its weights hold nan"])
def test_damaged_weights_of_a_teacher_are_named_by_its_flag(fault, tmp_path):
    folder = Path(shutil.copytree("models/tiny", tmp_path / "teacher"))
    if "nan" in fault:
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"][3] = float("nan")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-20])
    cfg = TrainConfig(teacher_id=str(folder), advantage="distill", model_id="models/tiny")
    with pytest.raises(ConfigError, match=f"^--teacher_id={folder}: {fault}"):
        script.load_teacher(cfg, CPU)


def test_a_teacher_is_asked_while_training_alone():
    said = trajectories(teacher=False)
    cfg = TrainConfig(teacher_urls=["http://127.0.0.1:9"], advantage="distill", purpose="eval")
    asyncio.run(teachers.tell(said, None, cfg, None))
    assert all(t.teacher_logprobs is None for t in said)


def test_a_server_that_hangs_leaves_time_for_the_next():
    """Asked who it is, too, which it is after a pause."""
    logprobs = [None, {"2": {"logprob": -1.0}}, {"3": {"logprob": -2.0}}]
    answers = {"/v1/models": {"data": [{"id": "m", "root": "m"}]}}
    answers["/v1/completions"] = {"model": "m", "choices": [{"prompt_token_ids": [1, 2, 3]}]}
    answers["/v1/completions"]["choices"][0]["prompt_logprobs"] = logprobs
    with stub(lambda path, _: time.sleep(20)) as (hangs, _), stub(lambda path, _: answers[path]) as (sound, _):
        servers = TeacherServers([hangs, sound], seconds=4)
        servers.probe_ids = [1, 2, 3]
        for server in servers.servers:
            server.model, server.root, server.probe = "m", "m", [-1.0, -2.0]
        assert asyncio.run(servers.score([1, 2, 3])).logprobs == [-1.0, -2.0]


# ---- live teachers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher():
    """vllm_server.py with models/tiny in float32, which nobody pushes to."""
    server = start_server(make_tiny(), "--dtype", "float32", "--max-logprobs", "64")
    try:
        yield server.wait()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def plain(teacher, tmp_path_factory):
    """vLLM's own server of the same model and token, without any of our code."""
    port = free_port()
    # `vllm serve` itself wants a distribution of the name vllm; the CPU build is called otherwise.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(teacher.model_dir)]
    command += f"--port {port} --api-key={teacher.token} --dtype float32 --max-model-len 2048 --enforce-eager".split()
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    with running(Process(command, tmp_path_factory.mktemp("plain") / "log", **env)) as process:
        url = f"http://127.0.0.1:{port}"
        process.until(lambda: serves(url))
        yield SimpleNamespace(url=url, token=teacher.token, kill=process.kill)


def serves(url: str) -> bool:
    with contextlib.suppress(requests.ConnectionError):
        return requests.get(f"{url}/health", timeout=2).ok
    time.sleep(0.2)


def asked(server, **how) -> TeacherServers:
    tokenizer = script.load_processor("models/tiny")
    found = TeacherServers([server.url], token=server.token, **how)
    found.connect(partial(tokenizer.decode, skip_special_tokens=False), len(tokenizer), 128, 5)
    return found


@pytest.mark.in_turn
@pytest.mark.parametrize("whose", ["ours", "vLLM's own"])
def test_a_server_says_what_its_model_says(whose, request, tiny):
    _, run = tiny
    ids = list(range(40, 80))
    said = asyncio.run(asked(request.getfixturevalue("teacher" if whose == "ours" else "plain")).score(ids, 5))
    logprobs = all_logits(run.inner.hf_model, ids)
    assert len(said.logprobs) == 39 and said.top_ids.shape == (39, 5)
    for place, token in enumerate(ids[1:]):
        assert said.logprobs[place] == pytest.approx(float(logprobs[place, token]), abs=1e-4)
        assert torch.allclose(said.top_logprobs[place], logprobs[place].topk(5).values, atol=1e-4)
        assert torch.allclose(logprobs[place, said.top_ids[place]], said.top_logprobs[place], atol=1e-4)


def answered(server) -> float:
    """Requests that vLLM's own server has answered."""
    text = requests.get(f"{server.url}/metrics", timeout=10).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:request_success_total"))


def test_of_several_turns_a_server_scores_what_was_sampled(teacher, tiny, monkeypatch):
    """What an environment said between is context: seen, and not counted."""
    monkeypatch.setenv("TEACHER_TOKEN", teacher.token)
    _, run = tiny
    cfg, said = TrainConfig(teacher_urls=[teacher.url], distill_topk=5, env_errors="stop"), trajectories(teacher=False)
    teachers.connect(cfg, script.load_processor("models/tiny"), [])
    asyncio.run(teachers.tell(said, None, cfg, None))
    for t in said:
        at = all_logits(run.inner.hf_model, t.prompt_ids + t.token_ids)[2:-1]
        expected = at[range(len(t.token_ids)), t.token_ids] * torch.tensor(t.loss_mask)
        assert t.teacher_logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        assert torch.allclose(t.teacher_top[1], at.topk(5).values, atol=1e-4)


def test_two_servers_share_the_asking_and_one_that_dies_is_named(teacher, plain, tmp_path):
    """The other takes over: every completion is scored. A step has 16."""
    flags = f"{TAUGHT} --max_steps 8 --advantage distill --distill_topk 3 --teacher_urls {plain.url} {teacher.url} "
    flags += f"--output_dir {tmp_path} --run_name x"
    before = answered(plain)
    with running(trainer(tmp_path / "log", *flags.split(), TEACHER_TOKEN=teacher.token)) as process:
        process.until(lambda: "step 2/8" in process.text)
        share = answered(plain) - before
        done = process.text.count("/8")
        plain.kill()
        assert process.end() == 0, process.text
    assert 8 <= share <= 16 * (done + 1) - 8, (share, done)
    assert f"the teacher at {plain.url}" in process.text and "the next one is asked" in process.text
    assert learned(tmp_path / "x", "distill/asked") == [1] * 8
    assert abs(learned(tmp_path / "x", "distill/reverse_kl")[0]) < 1e-3
    seconds = learned(tmp_path / "x", "distill/seconds_max")
    assert sorted(seconds)[-3] < 2.5, seconds  # then it is left alone for a while: to find nobody there takes 3 s


def test_our_route_tells_log_probs_of_a_prompt(teacher):
    """As vLLM's own does, with the same numbers; without being asked, nothing."""
    ids = list(range(40, 60))
    body = {"prompt_ids": ids, "max_tokens": 1, "prompt_logprobs": 2}
    ours = teacher.request("POST", "/generate", json=body).json()["prompt_logprobs"]
    body = {"model": str(teacher.model_dir), "prompt": ids, "max_tokens": 1, "prompt_logprobs": 2}
    theirs = teacher.request("POST", "/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    assert ours[0] is None and len(ours) == len(theirs) == 20
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert {k: v["logprob"] for k, v in a.items()} == pytest.approx({k: v["logprob"] for k, v in b.items()})
    plain = teacher.request("POST", "/generate", json={"prompt_ids": ids, "max_tokens": 1}).json()
    assert "prompt_logprobs" not in plain
    body = {"prompt_ids": ids, "max_tokens": 1, "prompt_logprobs": 65}
    refused = teacher.request("POST", "/generate", json=body)
    assert refused.status_code == 400 and "--max-logprobs" in refused.text


def test_what_cannot_be_the_teacher_is_refused_at_start(teacher):
    with pytest.raises(ConfigError, match="not --teacher_model=other"):
        asked(teacher, model="other")
    with pytest.raises(ConfigError, match="look at the token"):
        asked(SimpleNamespace(url=teacher.url, token="another"))
    tokenizer = script.load_processor("models/tiny")

    def decode(ids):  # of a vocabulary in which one token reads otherwise
        return "".join("??" if token == 3001 else tokenizer.decode([token]) for token in ids)

    servers = TeacherServers([teacher.url], token=teacher.token)
    with pytest.raises(ConfigError, match="another vocabulary: token"):
        servers.connect(decode, len(tokenizer), 128)
    with pytest.raises(ConfigError, match="--max-model-len 100001"):
        servers.connect(tokenizer.decode, len(tokenizer), 100_000)
    with pytest.raises(ConfigError, match="max"):
        servers.connect(partial(tokenizer.decode, skip_special_tokens=False), len(tokenizer), 128, top=65)


def test_a_run_with_a_teachers_server(teacher, tmp_path):
    """The policy is its teacher at first, so the first gaps are 0; the token columns have what it said."""
    flags = f"{TAUGHT} --max_steps 2 --advantage distill --distill_topk 3 --teacher_urls {teacher.url} "
    flags += f"--output_dir {tmp_path} --run_name x"
    with running(trainer(tmp_path / "log", *flags.split(), TEACHER_TOKEN=teacher.token)) as process:
        assert process.end() == 0, process.text
    assert abs(learned(tmp_path / "x", "distill/reverse_kl")[0]) < 1e-3
    assert learned(tmp_path / "x", "distill/asked") == [1, 1]
    longest, mean = (learned(tmp_path / "x", f"distill/seconds{end}")[0] for end in ("_max", ""))
    assert longest >= mean > 0 and not learned(tmp_path / "x", "time/teacher")
    columns = pandas.read_parquet(next((tmp_path / "x" / "completions").glob("step_*1.parquet")))
    for row in columns.to_dict("records"):  # half precision
        assert row["tokens/teacher_logprob"] == pytest.approx(row["tokens/sampler_logprob"], abs=0.02)
    assert teacher.token not in process.text
    assert "A teacher: distill/reverse_kl" in process.text and "Watch the reward" not in process.text


@contextlib.contextmanager
def slow(server, seconds: float):
    """Address of a proxy before a teacher's server: each answer about a completion comes so many seconds later."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))) or None
            if self.path == "/v1/completions":
                time.sleep(seconds)
            headers = {"Content-Type": "application/json"}
            answer = server.request(self.command, self.path, data=body, headers=headers)
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_POST = do_GET

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_address[1]}"
        proxy.shutdown()


@pytest.mark.in_turn
def test_what_a_teacher_takes_is_hidden_by_overlap(teacher, server, tmp_path):
    """Each of its answers takes 2 s. Three steps are under way at a time, so the trainer waits for a part of that."""
    flags = f"{TAUGHT} --generator vllm --server_urls {server.url} --advantage distill --output_dir {tmp_path} "
    flags += "--max_steps 6 --max_staleness 2 --logprob_diff_limit 1 --run_name x"
    with slow(teacher, 2.0) as url:
        env = dict(VLLM_SERVER_TOKEN=server.token)
        how = dict(script="train_async.py", ranks=1, **env)
        with running(trainer(tmp_path / "log", *flags.split(), "--teacher_urls", url, **how)) as process:
            assert process.end() == 0, process.text
    took, waited = (learned(tmp_path / "x", key) for key in ("distill/seconds", "async/trainer_waited"))
    print(f"teacher: {took}, trainer waited: {waited}")
    assert learned(tmp_path / "x", "distill/asked") == [1] * 6 and min(took) >= 2
    assert waited[0] > 2 and sum(waited[1:]) < 0.7 * sum(took[1:]), (took, waited)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--use_peft", "may hold adapters beside its base.*with --teacher_prompt alone"),
        ("--use_peft --push_lora adapters", "may hold adapters beside its base"),
        ("--server_urls http://a:1 http://b:1 --teacher_urls http://a:1 http://c:1", "own server and others"),
    ],
)
def test_the_policys_own_server_is_refused_where_it_would_not_say_what_the_policy_says(flags, message):
    """Before it is asked anything: nobody listens at these addresses."""
    own = "--server_urls http://a:1 --teacher_urls http://a:1 --teacher_prompt hint --distill_topk 4".split()
    cfg = load_config(TrainConfig, [*own, *flags.split()])
    with pytest.raises(ConfigError, match=message):
        teachers.connect(cfg, None, [{"prompt": "?", "hint": "!"}])


def test_a_column_that_every_row_on_disk_has_is_known_without_reading_them(tmp_path, monkeypatch):
    monkeypatch.setattr(on_disk, "LARGE", 1)
    monkeypatch.setattr(on_disk, "MANY", 10)
    monkeypatch.setattr(on_disk, "KEPT", tmp_path / "kept")
    texts = [json.dumps({"prompt": f"{n}", "hint": "!"} | ({"more": "?"} if n != 25 else {})) for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(texts), encoding="utf-8")
    rows = load_rows(str(tmp_path / "rows.jsonl"), format_row=script.format_row, lines=True)
    cfg = TrainConfig(model_id="models/tiny", teacher_prompt="more")
    with pytest.raises(ConfigError, match="more is no column of the row with prompt '25', which has prompt, hint;"):
        teachers.connect(cfg, None, rows)
    teachers.connect(cfg, None, rows.select(range(25)))  # of a file's rows some are left out
    monkeypatch.setattr(on_disk.Lines, "read", None)  # a call of it would raise
    teachers.connect(replace(cfg, teacher_prompt="hint"), None, rows)


def test_a_domain_may_have_a_teacher_while_another_has_none(teacher, tmp_path):
    (tmp_path / "two.yaml").write_text(
        "domains:\n"
        f"  - {{name: taught, dataset_id: 'examples/sums.py:rows', teacher_urls: ['{teacher.url}']}}\n"
        "  - {name: rest, dataset_id: 'examples/sums.py:rows'}\n",
        encoding="utf-8",
    )
    flags = TAUGHT.replace("--dataset_id examples/sums.py:rows ", "")
    flags += f"--config {tmp_path}/two.yaml --max_steps 2 --advantage distill --distill_topk 3 "
    flags += f"--output_dir {tmp_path} --run_name x"
    with running(trainer(tmp_path / "log", *flags.split(), ranks=2, TEACHER_TOKEN=teacher.token)) as process:
        assert process.end() == 0, process.text
    shares = learned(tmp_path / "x", "distill/asked")
    assert all(0 < share < 1 for share in shares), shares


@pytest.mark.in_turn
def test_each_domain_has_its_own_teacher_one_of_them_an_adapter_that_lags(teacher, tmp_path):
    """Two servers of the policy's model: as it is, and with the adapter that another run pushed and left there."""
    utils.init_distributed(60)
    started = start_server(make_tiny(), "--dtype", "float32", "--enable-lora", VLLM_SERVER_TOKEN=teacher.token)
    other = replace(started, token=teacher.token)  # TEACHER_TOKEN is that of both
    try:
        other.wait()
        lagged = Trainer(other)
        lagged.learn()
        lagged.push(1)
        (tmp_path / "two.yaml").write_text(
            "domains:\n"
            f"  - {{name: now, dataset_id: 'examples/sums.py:rows', teacher_urls: ['{teacher.url}']}}\n"
            f"  - {{name: then, dataset_id: 'examples/sums.py:rows', teacher_urls: ['{other.url}']}}\n",
            encoding="utf-8",
        )
        flags = TAUGHT.replace("--dataset_id examples/sums.py:rows ", "")
        flags += f"--config {tmp_path}/two.yaml --max_steps 1 --advantage distill --output_dir {tmp_path} --run_name x"
        with running(trainer(tmp_path / "log", *flags.split(), TEACHER_TOKEN=teacher.token)) as process:
            assert process.end() == 0, process.text
        lagged.client.close()
    finally:
        other.stop()
    rows = pandas.read_parquet(next((tmp_path / "x" / "completions").glob("step_*1.parquet"))).to_dict("records")
    assert {row["domain"] for row in rows} == {"now", "then"} and learned(tmp_path / "x", "distill/asked") == [1]
    apart = []
    for row in rows:
        told, sampled = row["tokens/teacher_logprob"], row["tokens/sampler_logprob"]  # half precision
        if row["domain"] == "now":
            assert told == pytest.approx(sampled, abs=0.02)
            continue
        at = all_logits(lagged.policy.model, [*row["prompt_ids"], *row["token_ids"]])[len(row["prompt_ids"]) - 1 : -1]
        assert told == pytest.approx(at[range(len(told)), row["token_ids"].tolist()].numpy(), abs=0.02)
        apart += abs(told - sampled).tolist()
    assert sum(apart) / len(apart) > 0.1  # so it is another teacher


@pytest.mark.parametrize("sure", [0.5, 0.99, 0.99999, 0.999999])
def test_what_the_policy_is_sure_of_can_still_be_taught(sure):
    """Forward KL over one token: its gradient is what the policy has too much of it, however little is left."""
    logits = torch.tensor([[[math.log(sure), math.log(1 - sure)]]], dtype=torch.float32, requires_grad=True)
    teacher = torch.full((1, 1, 1), math.log(0.5))
    part = SimpleNamespace(teacher_top_logprobs=teacher, top_logprobs=logits.log_softmax(-1)[..., :1])
    term, _ = divergence(part, TrainConfig(distill_topk=1, teacher_id="x"))
    (gradient,) = torch.autograd.grad(term.sum(), logits)
    assert torch.allclose(gradient[0, 0, 0], torch.tensor(sure - 0.5), rtol=0.1, atol=1e-6)
