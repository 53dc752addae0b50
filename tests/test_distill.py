"""On-policy distillation: the signals against independent loops, a teacher in this process, and live teachers."""

import asyncio
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pandas
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live import SMALL, trained
from server_fixture import make_tiny, start_server

import train_grpo as script
from algorithms import teachers
from algorithms.distillation import divergence
from batch import collate
from config import TrainConfig
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
@pytest.mark.parametrize("coef", [1.0, 2.0])
def test_the_advantage_is_that_of_a_loop(coef, baseline):
    """A tool's text does not count. Places are counted in sampled tokens, over the completions that the teacher was
    asked about."""
    said = trajectories()
    batch = collate(said, 0, CPU)
    cfg = TrainConfig(distill_coef=coef, scale_rewards="none")
    ours = script.ADVANTAGES["distill"](batch, replace(cfg, distill_baseline=baseline))
    later: dict[tuple[int, int], float] = {}  # (completion, how many sampled tokens are before) -> its sum
    for row, t in enumerate(said[:3]):
        for number, place in enumerate(place for place, mask in enumerate(t.loss_mask) if mask):
            later[row, number] = max(-20.0, min(20.0, t.teacher_logprobs[place] - t.logprobs[place]))
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


# ---- a teacher in this process --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    """(cfg, run as teachers.add sees it) with models/tiny as the policy, in float32."""
    cfg = TrainConfig(
        model_id="models/tiny", generator="hf", compute_dtype="float32", advantage="distill", distill_topk=5
    )
    policy = script.load_policy(cfg, CPU)
    return cfg, SimpleNamespace(policy=policy, teacher=None, device=CPU)


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
    teachers.add(batch, run, said, 0, cfg, script.all_logprobs)
    for row, t in enumerate(said):
        prompt = t.info["teacher_prompt"].token_ids if "teacher_prompt" in t.info else t.prompt_ids
        logprobs = all_logits(run.policy.hf_model, prompt + t.token_ids)
        for place, mask in enumerate(t.loss_mask):
            ours, top = batch.teacher_logprobs[row, 3 + place], batch.teacher_top[row, 3 + place]
            if not mask or not asked[row]:
                assert ours.isnan() if mask else ours == 0
                continue
            at = logprobs[len(prompt) + place - 1]
            assert float(ours) == pytest.approx(float(at[t.token_ids[place]]), abs=2e-5)
            assert torch.equal(top, at.topk(5).indices)
            assert torch.allclose(batch.teacher_top_logprobs[row, 3 + place], at[top], atol=2e-5)


def learned(lines: list[dict], key: str) -> list[float]:
    return [line[key] for line in lines if key in line]


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


@pytest.mark.parametrize("how", ["--advantage distill", pytest.param("--distill_topk 1024", marks=pytest.mark.slow)])
def test_the_policy_learns_what_its_teacher_can_without_any_reward(how, even_tiny, tmp_path):
    """The share of even tokens is looked at, and counts for nothing."""
    flags = f"{SMALL} --reward_weights 0 --max_steps 50 {how} --teacher_id {even_tiny} --num_generations 8"
    lines = trained(tmp_path, flags)
    shares, apart = (learned(lines, key) for key in ("rewards/even/mean", "distill/reverse_kl"))
    assert shares[0] < 0.65 and sum(shares[-3:]) / 3 > 0.7, shares
    assert sum(apart[-3:]) < 0.5 * sum(apart[:3]), apart


# ---- live teachers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher():
    """vllm_server.py with models/tiny in float32, which nobody pushes to."""
    server = start_server(make_tiny(), "--dtype", "float32", "--max-logprobs", "64")
    try:
        yield server.wait()
    finally:
        server.stop()


def asked(server, **how) -> TeacherServers:
    tokenizer = script.load_processor("models/tiny")
    found = TeacherServers([server.url], token=server.token, **how)
    found.connect(partial(tokenizer.decode, skip_special_tokens=False), len(tokenizer), 128, 5)
    return found


@pytest.mark.slow
def test_a_server_says_what_its_model_says(teacher, tiny):
    _, run = tiny
    ids = list(range(40, 80))
    said = asyncio.run(asked(teacher).score(ids, 5))
    logprobs = all_logits(run.policy.hf_model, ids)
    assert len(said.logprobs) == 39 and said.top_ids.shape == (39, 5)
    for place, token in enumerate(ids[1:]):
        assert said.logprobs[place] == pytest.approx(float(logprobs[place, token]), abs=1e-4)
        assert torch.allclose(said.top_logprobs[place], logprobs[place].topk(5).values, atol=1e-4)
        assert torch.allclose(logprobs[place, said.top_ids[place]], said.top_logprobs[place], atol=1e-4)


@pytest.mark.slow
def test_a_run_with_a_teachers_server(teacher, tmp_path):
    """The policy is its teacher at first, so the first gaps are 0; the token columns have what it said."""
    flags = f"{SMALL} --reward_funcs zero --max_steps 2 --advantage distill --distill_topk 3 --learning_rate 3e-3 "
    lines = trained(tmp_path, f"{flags} --teacher_urls {teacher.url}", TEACHER_TOKEN=teacher.token)
    assert abs(learned(lines, "distill/reverse_kl")[0]) < 1e-3 and learned(lines, "distill/asked") == [1, 1]
    longest, mean = (learned(lines, f"distill/seconds{end}")[0] for end in ("_max", ""))
    assert longest >= mean > 0 and not learned(lines, "time/teacher")
    columns = pandas.read_parquet(next((tmp_path / "run" / "completions").glob("step_*1.parquet")))
    for row in columns.to_dict("records"):  # half precision
        assert row["tokens/teacher_logprob"] == pytest.approx(row["tokens/sampler_logprob"], abs=0.02)
    said = (tmp_path / "run.log").read_text(encoding="utf-8")
    assert teacher.token not in said and "A teacher: distill/reverse_kl" in said and "Watch the reward" not in said


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_no_process_behind(teacher):
    """The last test here, as it ends the server."""
    family = psutil.Process(teacher.process.pid).children(recursive=True)
    teacher.process.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert family and not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
