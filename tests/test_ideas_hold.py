"""What ideas of one's own rely on: numbers over ranks, a term's weight, which parameters an update moves, settings by
step, and words where a number would be another than was meant."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ragged
import torch
from ranks import on_ranks
from safetensors.torch import load_file, save_file

import train_grpo as script
import utils
from algorithms import optimizers
from algorithms.checks import after_rollout
from batch import collate
from config import ConfigError, TrainConfig, load_config
from inputs.trajectory import Trajectory, empty_trajectory
from runfiles.reading import read_metrics
from runlog.rollout_metrics import rollout_metrics
from saving import checkpoints

CPU, ROOT = torch.device("cpu"), Path(__file__).parent.parent
TOY = ROOT / "benchmarks" / "toy.py"


def completion(number: int, length: int, score: float, **info) -> Trajectory:
    counts = dict.fromkeys(("unrewarded", "reward_timeouts", "reward_without_token"), 0)
    info = {"row_number": number, "rewards": {"mine": score}, "reward_seconds": {"digit_sum": score}} | counts | info
    rewards = [0.0] * (length - 1) + [score]
    return Trajectory({"prompt": "x"}, number, [1], [2] * length, [1] * length, [-1.0] * length, rewards, info=info)


def small_policy(cfg: TrainConfig):
    script.load_hf_model = ragged.small_llama  # in a fork
    return script.load_policy(cfg, CPU)


CFG = TrainConfig(compute_dtype="float32", dtype="float32", beta=0.0, tokens_per_microbatch=60, learning_rate=1e-2)
CFG = replace(CFG, correction="none", warmup_steps=0, lr_schedule="constant", max_steps=9)


# ---- numbers over ranks ---------------------------------------------------------------------------------------------


def numbers_of_a_step() -> dict:
    """Of three completions on the first rank and one on the second, or of four on one; a third rank has none."""
    rank, world = torch.distributed.get_rank(), utils.world_size()
    mine = [completion(n, 1 + n, float(n), logged=[("seen_sum", 1.0), ("far_max", n)]) for n in range(4)]
    mine = {1: mine, 2: [mine[:3], mine[3:]][rank % 2], 3: [mine[:3], mine[3:], []][rank]}[world]
    mine = mine or [empty_trajectory({"prompt": "x"}, CFG)]
    scores = [sum(t.token_rewards) for t in mine]
    returned = {"score": sum(scores) / len(mine), "scores": scores, "score_sum": sum(scores), "score_max": max(scores)}
    mine, metrics = after_rollout((mine, returned), mine)
    metrics |= rollout_metrics(mine)
    batch = collate(mine, 0, CPU, rank)

    def advantage(batch, cfg):
        values = batch.loss_mask.cumsum(1) * batch.loss_mask  # [B, T]
        return values, {"a/rows": batch.scores, "a/tokens": values, "a/mean": batch.scores.mean(), "a/max_max": values}

    script.ADVANTAGES["mine"] = advantage
    metrics |= script.add_advantages(batch, replace(CFG, advantage="mine"))
    script.leave_out = lambda batch, trajectories, cfg: {"left_sum": batch.scores, "left": batch.scores.mean()}
    return metrics | script.checks.metrics_of(script.leave_out(batch, mine, CFG), batch)


def test_a_number_is_the_same_on_any_number_of_ranks():
    """A sum and a count over all ranks: not a mean of the ranks' means, nor what the first rank has."""
    (alone,), two, three = (on_ranks(n, numbers_of_a_step) for n in (1, 2, 3))
    expected = {"score": 1.5, "scores": 1.5, "score_sum": 6.0, "score_max": 3.0, "a/rows": 1.5, "a/mean": 1.5}
    expected |= {"a/tokens": 2.0, "a/max_max": 4.0, "left_sum": 6.0, "left": 1.5, "reward": 1.5}
    expected |= {"rewards/mine/mean": 1.5, "time/reward/digit_sum": 1.5, "seen_sum": 4.0, "far_max": 3.0}
    assert {name: alone[name] for name in expected} == pytest.approx(expected)
    for metrics in [*two, *three]:
        assert metrics == pytest.approx(alone)


# ---- a term beside the policy loss ----------------------------------------------------------------------------------


def pairs_term() -> list[dict]:
    """A loss over pairs, -log sigmoid(best - worst), with its gradient where both are known; two updates a step."""
    cfg = replace(CFG, num_iterations=2, loss_agg="seq_mean", entropy_coef=0.0)
    policy = small_policy(cfg)

    def pairs(batch, cfg):
        total, (sign, slope) = batch.current_logprobs.sum(1), torch.zeros(2, len(batch))
        for group in batch.groups.unique():
            rows = (batch.groups == group).nonzero()[:, 0]
            best, worst = rows[batch.scores[rows].argmax()], rows[batch.scores[rows].argmin()]
            if batch.scores[best] > batch.scores[worst]:
                slope[best] = slope[worst] = torch.sigmoid(total[worst] - total[best])
                sign[best], sign[worst] = 1.0, -1.0
        number = utils.all_sum((sign > 0).sum())
        return {"slope": sign * slope / number, "pairs": float(number)}

    def own_term(logprobs, entropy, part, cfg):
        return -part.extras["slope"][:, None] * logprobs, {}

    own_term.weights, own_term.prepare, own_term.needs = "sum", pairs, ("current_logprobs",)
    script.own_term = own_term
    script.POLICY_LOSSES["none"] = lambda logprobs, batch, cfg: (0 * logprobs, {})
    gradients, original = [], script.clip_gradients

    def clip(policy, most):
        gradients.append(ragged.full_gradients(policy))
        return original(policy, most)

    script.clip_gradients = clip
    batch = ragged.local_batch(torch.distributed.get_rank(), utils.world_size())
    optimizer = optimizers.check_optimizer(script.make_optimizer(policy, cfg), policy)
    script.update(policy, optimizer, batch, replace(cfg, policy_loss="none"), 0)
    return gradients


def expected_pairs() -> list[dict]:
    """The same by plain transformers, one completion at a time."""
    model = ragged.small_llama(None, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, CFG.adam_beta2), weight_decay=0)
    gradients = []
    for _ in range(2):
        losses, groups = [], {}
        for t in ragged.trajectories():
            ids = torch.tensor([t.prompt_ids + t.token_ids])
            log_p = model(ids).logits[0, :-1].log_softmax(-1)[len(t.prompt_ids) - 1 :]
            picked = log_p.gather(1, torch.tensor(t.token_ids)[:, None])[:, 0]
            score = sum(t.token_rewards)
            groups.setdefault(t.group, []).append((score, (picked * torch.tensor(t.loss_mask)).sum()))
        for members in groups.values():
            best, worst = max(members, key=lambda pair: pair[0]), min(members, key=lambda pair: pair[0])
            if best[0] > worst[0]:
                losses.append(-torch.nn.functional.logsigmoid(best[1] - worst[1]))
        optimizer.zero_grad()
        (sum(losses) / len(losses)).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        torch.nn.utils.clip_grad_norm_(model.parameters(), CFG.max_grad_norm)
        optimizer.step()
    return gradients


def test_a_term_of_pairs_is_summed_as_it_is_and_prepared_before_each_update():
    expected = expected_pairs()
    for ranks in (1, 2):
        for number, found in enumerate(on_ranks(ranks, pairs_term)[0]):
            for name, gradient in expected[number].items():
                size = gradient.abs().max()
                assert (found[name] - gradient).abs().max() < (1e-5, 2e-3)[number] * size + 1e-7, (ranks, number, name)


# ---- what an update moves -------------------------------------------------------------------------------------------


def two_adapters() -> list[set]:
    """What a step with the adapter of `load_policy` moved, and what one with another."""
    cfg = replace(CFG, use_peft=True, lora_targets=["q_proj"], max_grad_norm=1e9)
    kept = script.to_train

    def to_train(model, cfg):
        model = kept(model, cfg)
        model.add_adapter("second", model.peft_config["default"])
        for name, p in model.named_parameters():
            p.requires_grad_("lora_" in name and ".default." in name)
        return model

    script.to_train = to_train
    policy = small_policy(cfg)
    inner = script.unwrapped(policy)
    ragged.wake_adapters(inner)
    script.make_optimizer = lambda module, cfg: torch.optim.SGD(
        [p for name, p in module.named_parameters() if "lora_" in name], lr=1.0
    )
    optimizer = optimizers.check_optimizer(script.make_optimizer(policy, cfg), policy)
    batch = ragged.local_batch(torch.distributed.get_rank(), utils.world_size())
    moved = []
    for step, adapter in enumerate(("default", "second")):
        inner.model.set_adapter(adapter)
        before = {name: p.detach().clone() for name, p in inner.named_parameters()}
        script.update(policy, optimizer, batch, cfg, step)
        moved.append({name.split(".")[-2] for name, p in inner.named_parameters() if (p != before[name]).any()})
    return moved


def test_what_is_trained_later_moves():
    [found] = on_ranks(1, two_adapters)
    assert found == [{"default"}, {"second"}]


# ---- settings by step -----------------------------------------------------------------------------------------------


SHORT_AND_COLD = """
def settings_at(step, cfg):
    return replace(cfg, max_completion_length=2 + step, temperature=0.5 + step)


weights_as_they_are = token_weights


def token_weights(mask, mode, **counts):
    assert counts["max_tokens"] == 12  # of --loss_agg constant
    return weights_as_they_are(mask, mode, **counts)
"""


def metrics_of(snippet: str, flags: str, folder: str) -> list[dict]:
    """Lines of a run of the script with a snippet pasted into it."""
    exec(snippet, vars(script))
    base = f"--model_id {ROOT}/models/tiny --generator hf --compute_dtype float32 --dataset_id {TOY}:rows "
    base += f"--reward_funcs {TOY}:tens --max_prompt_length 64 --max_completion_length 12 --prompts_per_step 2 "
    base += f"--num_generations 4 --print_samples_every 0 --output_dir {folder} --run_name run "
    script.train(load_config(TrainConfig, (base + flags).split()))
    return read_metrics(Path(folder) / "run")


def test_what_a_step_is_sampled_with_changes_neither_evaluations_nor_the_loss(tmp_path):
    flags = "--max_steps 2 --eval_steps 2 --loss_agg constant --log_steps 1"
    [lines] = on_ranks(1, metrics_of, SHORT_AND_COLD, flags, str(tmp_path))
    steps = [line for line in lines if "reward" in line]
    evaluations = [line for line in lines if "eval/reward" in line]
    assert [step["completions/max_length"] for step in steps] == [2, 3]
    assert all(line["eval/mean_length"] > 6 for line in evaluations) and evaluations
    assert all(step["sampling/logprob_diff_max"] < 1e-4 for step in steps)  # the policy is as cold as the generator


# ---- what is remembered ---------------------------------------------------------------------------------------------


def remembered(folder: str, saves: bool, alike: bool) -> dict:
    """What a rank remembers, written into a checkpoint or read back from one."""
    policy = small_policy(CFG)
    inner = script.unwrapped(policy)
    optimizer, rank = script.make_optimizer(policy, CFG), torch.distributed.get_rank()
    modules, memory = {"policy": (policy, optimizer)}, {}
    if saves:
        memory = {"level": 1 if alike else rank, "seen": {3: torch.arange(2.0)}, "best": [completion(0, 2, 1.0)]}
        buckets, processor = script.weight_buckets(policy, 2**20, torch.float32), SimpleNamespace(save_pretrained=str)
        checkpoints.save_checkpoint(Path(folder), 1, modules, inner.hf_model, buckets, processor, {}, memory, 1)
    else:
        checkpoints.load_checkpoint(Path(folder), 1, modules, memory)
    return memory


def test_a_rank_that_was_not_there_remembers_what_all_did(tmp_path):
    [saved, _] = on_ranks(2, remembered, str(tmp_path / "alike"), True, True)
    assert [*map(str, on_ranks(3, remembered, str(tmp_path / "alike"), False, True))] == [str(saved)] * 3
    on_ranks(2, remembered, str(tmp_path / "own"), True, False)
    assert [m["level"] for m in on_ranks(2, remembered, str(tmp_path / "own"), False, False)] == [0, 1]
    with pytest.raises(ConfigError, match="the 2 ranks that saved .* had different `memory`"):
        on_ranks(3, remembered, str(tmp_path / "own"), False, False)


def test_a_row_number_is_that_of_the_row():
    """Of a completion in hindsight, which another prompt would have asked for."""
    sampled = [completion(number, 2, 0.0) for number in (3, 8)]
    for t in sampled:
        t.row = {"prompt": str(t.group)}
    relabelled = replace(sampled[0], row=sampled[1].row, group=8, info=dict(sampled[0].info))
    returned, _ = after_rollout([*sampled, relabelled], sampled)
    assert [t.info["row_number"] for t in returned] == [3, 8, 8]


# ---- an update, by hand ---------------------------------------------------------------------------------------------


def dumped(folder: str) -> int:
    sys.path.insert(0, str(ROOT / "scripts"))
    import check

    return check.dump(str(ROOT / "train_grpo.py"), check.toy_task(), ("--beta", "0.0"), folder)


def test_the_lines_of_the_page_recompute_an_update_that_was_dumped(tmp_path):
    assert on_ranks(1, dumped, str(tmp_path)) == [0]
    page = (ROOT / "docs" / "ideas.md").read_text(encoding="utf-8")
    lines = re.search(r"(?ms)^## Is it the gradient that I mean.*?```python\n(.*?)```", page)[1]
    exec(lines, {"folder": str(tmp_path)})
    gradient = load_file(tmp_path / "gradient.safetensors")
    name = next(iter(gradient))
    save_file(gradient | {name: 1.01 * gradient[name]}, tmp_path / "gradient.safetensors")
    with pytest.raises(AssertionError):
        exec(lines, {"folder": str(tmp_path)})
