"""Ten ideas of one's own, each pasted into a copy of the script: on one rank, and on two in small micro-batches, the
gradient is that of a loop over completions by plain transformers, and what is logged is the same."""

import importlib.util
import os
import re
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ragged
import torch
from ranks import on_ranks
from transformers import AutoModelForCausalLM

from runlog.reading import read_metrics

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "ideas.md").read_text(encoding="utf-8")
DATA = """
def rows(split, seed):
    return [{"prompt": f"{split} {n}?"} for n in range(4)]


def even(trajectories, **_):
    return [sum(t % 2 == 0 for t in one.token_ids) / len(one.token_ids) for one in trajectories]
"""
WAYS = {"whole": (1, "--tokens_per_microbatch 100000"), "cut": (2, "--tokens_per_microbatch 60")}
LOGGED = "idea|reward|advantages|grad_norm|entropy|completions|rollout|num_tokens"


def section(title: str) -> str:
    """The block of a section of docs/ideas.md."""
    return re.search(rf"(?ms)^## {re.escape(title)}.*?```python\n(.*?)```", PAGE)[1]


def steps_of(source: str, flags: str, folder: str) -> list[dict]:
    """The steps of a run of a copy: this rank's trajectories, its weights before the update and the whole gradient."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import same_samples  # noqa: F401 - completions depend on the prompt, its place and the step alone

    path = Path(folder) / "my_grpo.py"
    partial = Path(folder) / f"my_grpo.{os.getpid()}"  # two ranks write it: neither may import half of a file
    partial.write_text(source, encoding="utf-8")
    os.replace(partial, path)
    spec = importlib.util.spec_from_file_location("my_grpo", path)
    copy = sys.modules["my_grpo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    steps, collate, accumulate = [], copy.collate, copy.accumulate_gradients

    def collated(trajectories, *args):
        steps.append({"trajectories": trajectories})
        return collate(trajectories, *args)

    def accumulated(policy, *args):
        named = [(copy.clean_name(name), p) for name, p in policy.named_parameters()]
        steps[-1]["weights"] = {name: p.detach().clone() for name, p in named}
        sums = accumulate(policy, *args)
        steps[-1]["gradient"] = ragged.full_gradients(policy)
        return sums

    copy.collate, copy.accumulate_gradients = collated, accumulated
    copy.train(copy.parse_args(copy.TrainConfig, flags.split()))
    if torch.distributed.get_rank():  # the weights and gradients are those of rank 0
        steps = [{"trajectories": step["trajectories"]} for step in steps]
    return steps


def scored(trajectories: list) -> torch.Tensor:
    return torch.tensor([sum(t.token_rewards) for t in trajectories])


def z_scores(scores: torch.Tensor) -> torch.Tensor:
    return (scores - scores.mean()) / (scores.std() + 1e-6) if scores.std() > 1e-6 else scores * 0


def by_group(step, values=scored, key=lambda t: None):
    """An advantage for each completion, from those of its group."""
    advantages, groups = [0.0] * len(step.all), {}
    for i, t in enumerate(step.all):
        groups.setdefault((t.rank, t.group, key(t)), []).append(i)
    for members in groups.values():
        found = values([step.all[i] for i in members])
        for i, value in zip(members, found.tolist(), strict=True):
            advantages[i] = value
    return advantages


def grpo(step, key=lambda t: None):
    return by_group(step, lambda group: z_scores(scored(group)), key)


def pairs(step):
    """-log sigmoid(best - worst) of each prompt, on average, beside the policy loss."""
    losses, groups = [], {}
    for t, logprobs in zip(step.all, step.logprobs, strict=True):
        groups.setdefault((t.rank, t.group), []).append((sum(t.token_rewards), logprobs.sum()))
    for members in groups.values():
        (high, best), (low, worst) = max(members, key=lambda m: m[0]), min(members, key=lambda m: m[0])
        losses += [-torch.nn.functional.logsigmoid(best - worst)] if high > low else []
    return sum(losses) / len(losses)


BEST = """
def best(batch, cfg):
    lead = center_by_group(batch.scores, batch.groups)
    lead = lead * torch.stack([a == lead[batch.groups == g].max() for a, g in zip(lead, batch.groups)])
    return spread(lead, batch.loss_mask), {"idea/lead": lead, "idea/lead_max": lead, "idea/learning_sum": lead > 0}


ADVANTAGES["best"] = best
"""


def best_of_k(step):
    def lead(group):
        scores = scored(group)
        return (scores - scores.mean()) * (scores == scores.max())

    return by_group(step, lead)


POSITION = """
def by_position(batch, cfg):
    place = (batch.loss_mask.cumsum(1) - 1).clamp(min=0).long().flatten()
    mine = torch.stack([batch.entropy * batch.loss_mask, batch.loss_mask]).flatten(1).double()  # [2, B * T]
    total, count = utils.all_sum(torch.zeros(2, cfg.max_completion_length).double().index_add(1, place, mine))
    usual = (total / count.clamp(min=1))[place].view_as(batch.entropy).float()
    return grpo(batch, cfg) * batch.entropy / usual, {"idea/usual": usual}


by_position.needs = ("entropy",)
ADVANTAGES["by_position"] = by_position
"""


def by_position(step):
    longest = max(len(entropy) for entropy in step.entropies)
    usual = [statistics.fmean(float(e[n]) for e in step.entropies if len(e) > n) for n in range(longest)]
    pairs = zip(grpo(step), step.entropies, strict=True)
    return [a * entropy.detach() / torch.tensor(usual[: len(entropy)]) for a, entropy in pairs]


QUANTILE = """
def after_rollout(trajectories, memory, step, cfg):
    mine = [(t.info["row_number"], sum(t.token_rewards)) for t in trajectories]
    for t in trajectories:
        seen = memory.get(t.info["row_number"], [])
        t.info["extras"] = {"usual": sorted(seen)[len(seen) // 2] if seen else 0.0}
    for row, score in sorted(sum(utils.gather_objects(mine), [])):
        memory.setdefault(row, []).append(score)
    return trajectories, {"idea/usual": [t.info["extras"]["usual"] for t in trajectories]}


def over_usual(batch, cfg):
    return spread(batch.scores - batch.extras["usual"], batch.loss_mask)


ADVANTAGES["over_usual"] = over_usual
"""


def over_usual(step):
    def usual(t):
        seen = sorted(sum(o.token_rewards) for o in step.before if o.info["row_number"] == t.info["row_number"])
        return seen[len(seen) // 2] if seen else 0.0

    return [sum(t.token_rewards) - usual(t) for t in step.all]


HINDSIGHT = """
def after_rollout(trajectories, memory, step, cfg):
    found = [t for t in trajectories if sum(t.token_rewards) < 0.5]
    goals = [replace(t, row={"prompt": "a goal"}, group=1000 + t.group, prompt_ids=[5, 6, 7]) for t in found]
    for t in goals:
        t.token_rewards, t.info = [0.0] * (len(t.token_ids) - 1) + [t.token_ids[-1] % 3], t.info | {"origin": "goal"}
    return trajectories + goals, {"idea/goals_sum": len(goals), "idea/missed": [t in found for t in trajectories]}
"""

MAJORITY = """
def after_rollout(trajectories, memory, step, cfg):
    for t in trajectories:
        answers = [o.token_ids[-1] % 3 for o in trajectories if o.group == t.group]
        most = max(sorted(set(answers)), key=answers.count)
        t.token_rewards[-1] = float(t.token_ids[-1] % 3 == most)
    return trajectories, {"idea/agree": [t.token_rewards[-1] for t in trajectories]}
"""


def majority(step):
    def agreed(group):
        answers = [t.token_ids[-1] % 3 for t in group]
        most = max(sorted(set(answers)), key=answers.count)
        return z_scores(torch.tensor([float(answer == most) for answer in answers]))

    return by_group(step, agreed)


SELF_PLAY = """
async def games(rows, generator, cfg):
    first = await rollouts.single_turn(rows, generator, replace(cfg, num_generations=cfg.num_generations // 2))
    both = []
    for t in first:
        asked = t.prompt_ids + t.token_ids
        (answer,) = await generator.generate(asked, n=1, **rollouts.sampling_options(cfg))
        n, lead = len(answer.token_ids), float(len(t.token_ids) - len(answer.token_ids))
        reply = replace(t, prompt_ids=asked, token_ids=answer.token_ids, loss_mask=[1] * n, logprobs=answer.logprobs,
                        token_rewards=[0.0] * (n - 1) + [-lead], info={"side": 1})
        both += [replace(t, token_rewards=t.token_rewards[:-1] + [lead], info={"side": 0}), reply]
    return both


ROLLOUTS["games"] = games
"""
UNUSED = ("unused = takes_images(policy.hf_model.config)", "unused = True")
ADAPTERS = "--use_peft --lora_targets q_proj v_proj --lora_r 4"
IDEAS = {  # the snippet, flags, and what is expected: an advantage a completion
    "best of k": (BEST, "--advantage best", best_of_k),
    "entropy by position": (POSITION, "--advantage by_position", by_position),
    "forking": (section("A branch from a prefix"), "--rollout endings", grpo),
    "pairs": (section("A term over pairs"), "", grpo),
    "quantile": (QUANTILE, "--advantage over_usual --save_steps 1", over_usual),
    "length curriculum": (section("A setting that changes"), "--loss_agg constant --eval_steps 1", grpo),
    "hindsight": (HINDSIGHT, "", grpo),
    "majority": (MAJORITY, "", majority),
    "two adapters": (section("Two adapters"), ADAPTERS, grpo),
    "self-play": (SELF_PLAY + section("Self-play"), "--rollout games --reward_funcs zero", grpo),
}


def merged(weights: dict, used: str) -> dict:
    """The weights with the product of the adapter in use in them."""
    whole = {name: tensor for name, tensor in weights.items() if "lora_" not in name}
    for name in [name for name in weights if "lora_A" in name]:
        layer, adapter = re.fullmatch(r"(.*)\.lora_A\.(.*)\.weight", name).groups()
        b = weights[name.replace("lora_A", "lora_B")]
        if adapter == used:
            whole[f"{layer}.weight"] = whole[f"{layer}.weight"] + 64 / 4 * b @ weights[name]
    return whole


def expected(name: str, step) -> dict:
    """The gradient, one completion at a time."""
    model = AutoModelForCausalLM.from_pretrained(ROOT / "models" / "tiny", dtype=torch.float32)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in step.weights.items()}
    weights = merged(leaves, ("default", "second")[step.number % 2])
    step.logprobs, step.entropies = [], []
    for t in step.all:
        ids = torch.tensor([t.prompt_ids + t.token_ids])
        logits = torch.func.functional_call(model, weights, (ids,)).logits[0, len(t.prompt_ids) - 1 : -1]
        log_p, sampled = logits.log_softmax(-1), torch.tensor(t.loss_mask) > 0
        step.logprobs.append(log_p.gather(1, torch.tensor(t.token_ids)[:, None])[:, 0][sampled])
        step.entropies.append(-(log_p.exp() * log_p).sum(1)[sampled])
    advantages = IDEAS[name][2](step)
    constant = "constant" in IDEAS[name][1]
    terms = [(-a * lp).sum() / (8 if constant else len(lp)) for a, lp in zip(advantages, step.logprobs, strict=True)]
    loss = sum(terms) / len(terms) + (pairs(step) if name == "pairs" else 0)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def flags_of(folder: Path, own: str) -> str:
    (folder / "data.py").write_text(DATA, encoding="utf-8")
    data = f"--dataset_id {folder}/data.py:rows --reward_funcs {folder}/data.py:even --prompts_per_step 4"
    model = f"--model_id {ROOT}/models/tiny --generator hf --compute_dtype float32 --max_prompt_length 64"
    sizes = "--num_generations 4 --max_completion_length 8 --learning_rate 1e-2 --warmup_steps 0 --correction none"
    logs = f"--print_samples_every 0 --no-log_completions --eval_steps none --log_steps 1 --output_dir {folder}"
    return f"{data} {model} {sizes} {logs} --logprob_diff_limit 1e9 {own}"


@pytest.mark.parametrize("name", IDEAS)
def test_idea(name, tmp_path):
    snippet, own, _ = IDEAS[name]
    source = (ROOT / "train_grpo.py").read_text(encoding="utf-8")
    source = source.replace(*UNUSED) if "use_peft" in own else source
    source = source.replace("# ==== 11", f"import rollouts\nfrom rollouts import ROLLOUTS\n\n{snippet}\n\n# ==== 11")
    base, lines = flags_of(tmp_path, own), {}
    for way, (ranks, cut) in WAYS.items():
        parts = [(ranks, "--max_steps 2")]
        if resumed := name == "quantile" and ranks > 1:  # it goes on with more ranks than it began with
            parts = [(1, "--max_steps 1"), (ranks, "--max_steps 2 --resume")]
        steps = []
        for world, more in parts:
            flags = f"{base} {cut} --run_name {way} {more}"
            played = on_ranks(world, steps_of, source, flags, str(tmp_path), limit=600)
            for of_ranks in zip(*played, strict=True):
                everything = [(rank, t) for rank, part in enumerate(of_ranks) for t in part["trajectories"]]
                steps.append(SimpleNamespace(**of_ranks[0], all=everything))
        for number, step in enumerate(steps):
            for rank, t in step.all:
                t.rank = rank
            step.all, step.number, step.before = [t for _, t in step.all], number, steps[0].all if number else []
            wanted = {key: gradient for key, gradient in expected(name, step).items() if gradient is not None}
            size = max(gradient.abs().max() for gradient in wanted.values())
            assert size > 1e-5 and step.gradient
            for key, gradient in step.gradient.items():
                assert (gradient - wanted.get(key, 0)).abs().max() < 1e-4 * size, (way, number, key)
            lora = {key for key in wanted if "lora_" in key}
            assert (lora or wanted.keys()) <= step.gradient.keys(), (way, number)
        lines[way] = [line for line in read_metrics(tmp_path / way) if "reward" in line]
        for mine, first in zip(lines[way], lines["whole"], strict=True):
            known = {key: value for key, value in first.items() if re.match(LOGGED, key)}
            assert resumed or {key: mine[key] for key in known} == pytest.approx(known, rel=1e-3, abs=1e-6), way
