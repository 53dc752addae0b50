"""Published advantages beyond those in train_grpo.py: (batch, cfg) -> [B, T], 0 where nothing was sampled.

What a function needs is set right below it; see the beginning of section 5 in train_grpo.py.
"""

import torch
from torch import Tensor

import utils
from algorithms.distillation import distill
from batch import (
    Batch,
    by_domain,
    by_turn,
    center_and_scale,
    center_by_group,
    differ,
    group_index,
    group_mean,
    group_std,
    normalize,
    placed,
    returns_to_go,
    spread,
    turn_returns,
    whiten,
)
from config import TrainConfig
from safety.results import warn_once


def normalised_beforehand(cfg: TrainConfig) -> bool:
    return (cfg.reward_mean, cfg.reward_std) != ("none", "none")


def lite_ppo(batch: Batch, cfg: TrainConfig) -> Tensor:
    """grpo with the std of the whole batch; meant for token_mean.  2508.08221.  [B, T]"""
    return spread(normalize(batch.shaped_scores, batch.groups, "group", "batch"), batch.loss_mask)


def opo(batch: Batch, cfg: TrainConfig) -> Tensor:
    """s - length-weighted mean of the group, the variance-optimal baseline.  2505.23585.  [B, T]"""
    length, scores = batch.loss_mask.sum(1).double(), batch.shaped_scores  # [B]
    total = group_mean(length, batch.groups)
    baseline = group_mean(length * scores, batch.groups) / total.clamp(min=1e-8)
    # Equal scores: exactly 0, without rounding errors.
    scores_differ = differ(group_std(scores, batch.groups), group_mean(scores, batch.groups))
    return spread(torch.where(scores_differ, (scores - baseline).to(scores.dtype), 0.0), batch.loss_mask)


def gpg(batch: Batch, cfg: TrainConfig) -> Tensor:
    """alpha (s - group mean), alpha = rows / rows of groups whose scores differ, over all ranks, so silent groups do
    not shrink the step.  2504.02546 (some implementations count non-zero *scores* instead).  [B, T]"""
    scores = batch.shaped_scores
    informative = differ(group_std(scores, batch.groups), group_mean(scores, batch.groups))
    rows, differing = utils.all_sum(torch.stack([torch.ones_like(informative).sum(), informative.sum()])).tolist()
    return spread(center_by_group(scores, batch.groups) * rows / max(differing, 1), batch.loss_mask)


def grpo_passk(batch: Batch, cfg: TrainConfig) -> Tensor:
    """Best score of the group minus the second best, for the best alone; 0 for ties: trains pass@k.  2503.19595.
    [B, T]"""
    advantages = torch.zeros_like(batch.shaped_scores)
    for group in batch.groups.unique():
        rows = (batch.groups == group).nonzero()[:, 0]
        if len(rows) > 1:
            (best, second), (place, _) = batch.shaped_scores[rows].topk(2)
            advantages[rows[place]] = best - second
    if cfg.scale_rewards != "none":
        advantages = advantages / center_and_scale(batch.shaped_scores, batch.groups, "none", cfg.scale_rewards)[1]
    return spread(advantages, batch.loss_mask)


def maxrl(batch: Batch, cfg: TrainConfig) -> Tensor:
    """(s - group mean) / group mean, 0 where the mean is not above 0: maximum likelihood RL.  2602.02710.  [B, T]"""
    mean = group_mean(batch.shaped_scores, batch.groups)
    centred = center_by_group(batch.shaped_scores, batch.groups)
    return spread(torch.where(mean > 0, centred / mean.clamp(min=1e-6), 0.0).to(centred.dtype), batch.loss_mask)


def no_shift_of_raw_scores(cfg: TrainConfig) -> str | None:
    if normalised_beforehand(cfg):
        return "it compares raw scores with a baseline of raw scores; leave out --reward_mean and --reward_std"
    return None


def rae(batch: Batch, cfg: TrainConfig) -> Tensor:
    """s - running mean of the scores of the row's `role` (Batch.baselines, of `role_means`): role-conditioned advantage
    estimation, for self-play, where a seat may win more often than the other.  2506.24119.  [B, T]"""
    return spread(batch.shaped_scores - batch.baselines, batch.loss_mask)


rae.compares_group, rae.check = False, no_shift_of_raw_scores
RAE_DECAY = 0.95  # of the old mean, per step


def role_means(batch: Batch, means: dict[str, float]) -> Tensor:
    """The running mean of each row's role (the data's column `role`), this step's scores included.  [B]

    means: by role, kept in checkpoints and updated in place, alike on all ranks: decay m + (1 - decay) times the
    step's mean, or the step's mean at a role's first step. Collective.
    """
    roles = [str(row.get("role", "")) for row in batch.rows]
    local_scores = [] if batch.stand_in else list(zip(roles, batch.scores.tolist(), strict=True))
    scores: dict[str, list[float]] = {}
    for role, score in sum(utils.gather_objects(local_scores), []):
        scores.setdefault(role, []).append(score)
    for role, values in scores.items():
        step_mean = sum(values) / len(values)
        means[role] = RAE_DECAY * means.get(role, step_mean) + (1 - RAE_DECAY) * step_mean
    return batch.scores.new_tensor([means.get(role, 0.0) for role in roles])


def add_at_end(rewards: Tensor, loss_mask: Tensor, values: Tensor) -> Tensor:
    """Rewards with a value added at each row's last sampled token.  [B, T], [B, T], [B] -> [B, T]"""
    last = (loss_mask * torch.arange(loss_mask.shape[1], device=loss_mask.device)).argmax(1)
    rows = torch.arange(len(rewards), device=rewards.device)
    return rewards.index_put((rows, last), values.to(rewards.dtype), accumulate=True)


def normalised_rewards(batch: Batch, cfg: TrainConfig, moments: dict[str, list[float]]) -> Tensor:
    """Rewards [B, T] whose row sums are (score - mean) / std, by --reward_mean and --reward_std of the row's domain. A
    score is the sum of its row, so the mean is subtracted once, at the last sampled token.

    moments: count, sum and sum of squares of all scores so far, by domain; updated in place. For `rae` it also holds
    the means of roles, which become batch.baselines.
    """
    rewards = batch.rewards
    if cfg.advantage == "rae":
        batch.baselines = role_means(batch, moments.setdefault("/rae", {}))  # no domain has such a name
    if not normalised_beforehand(cfg):
        return rewards
    # A rank without rows of a domain gets some row as `part`, so that it joins the collectives; it contributes 0.
    for domain, rows, part in by_domain(batch, cfg):
        running = utils.running_moments(part.scores, moments.setdefault(domain.domain, [0.0] * 3))
        center, scale = center_and_scale(part.scores, part.groups, cfg.reward_mean, cfg.reward_std, running)
        shaped = add_at_end(part.rewards / scale[:, None], part.loss_mask, -center / scale)
        rewards = placed(shaped, rows, rewards)
    return rewards


def sizes_of_advantages(batch: Batch) -> dict[str, float]:
    """Mean absolute advantage, and share of completions in groups whose advantages are all 0. Collective."""
    size = (batch.advantages.abs() * batch.loss_mask).sum(1)  # [B]
    silent = (group_mean(size, batch.groups) == 0).double()
    counted = torch.full_like(silent, not batch.stand_in)  # [B] 0 for a stand-in, which counts for nothing
    mean = float(utils.global_mean(batch.advantages.abs(), batch.loss_mask))
    return {"advantages/abs_mean": mean, "advantages/frac_zero_groups": float(utils.global_mean(silent, counted))}


def largest(values: Tensor, loss_mask: Tensor, share: float) -> Tensor:
    """Marks the largest values: this share of the sampled tokens on all ranks, at least one, and all that equal the
    smallest of them.  [B, T] of bool"""
    all_values = torch.cat(utils.gather_objects(values[loss_mask > 0].cpu())).sort(descending=True).values
    threshold = all_values[max(int(share * len(all_values)), 1) - 1] if len(all_values) else 0.0
    return (values >= threshold) & (loss_mask > 0)


def rloo(batch: Batch, cfg: TrainConfig) -> Tensor:
    """s - mean of the other n - 1 scores = (s - mean) n / (n - 1).  REINFORCE leave-one-out, 2402.14740.  [B, T]"""
    _, size = group_index(batch.groups)  # [B] completions of each row's group
    others = center_by_group(batch.shaped_scores, batch.groups) * size / (size - 1).clamp(min=1)
    return spread(others, batch.loss_mask)


def reinforce_plus_plus(batch: Batch, cfg: TrainConfig) -> Tensor:
    """Discounted reward to go, whitened over the step's tokens: no groups needed.  2501.03262.  [B, T]"""
    return whiten(returns_to_go(batch, cfg.gamma), batch.loss_mask)


reinforce_plus_plus.compares_group = False


def gdpo(batch: Batch, cfg: TrainConfig) -> Tensor:
    """Each reward function is normalised within the group, and the weighted sum whitened: none drowns another.
    2601.05242.  [B, T]"""
    parts, weights = batch.shaped_scores[:, None], [1.0]  # [B, functions]
    if batch.reward_components is not None:
        parts = batch.reward_components
        if parts.isinf().any():
            raise ValueError('--advantage gdpo: give info["reward_components"] in after_rollout, a number per function')
        weights = cfg.reward_weights or [1.0] * len(parts.T)
    total = sum(w * normalize(s, batch.groups, "group", "group") for w, s in zip(weights, parts.T, strict=True))
    return whiten(spread(total, batch.loss_mask), batch.loss_mask)


def normalises_by_itself(cfg: TrainConfig) -> str | None:
    if normalised_beforehand(cfg) or cfg.kl_in_reward:
        return "it takes each function's values as they are: leave out --reward_mean, --reward_std and --kl_in_reward"
    return None


gdpo.check = normalises_by_itself


def remax(batch: Batch, cfg: TrainConfig) -> Tensor:
    """Reward to go minus the score of a greedy completion of the same prompt (Batch.baselines).  2310.10505.  [B, T]"""
    return (returns_to_go(batch, 1.0) - batch.baselines[:, None]) * batch.loss_mask


remax.needs, remax.compares_group, remax.check = ("baselines",), False, no_shift_of_raw_scores


def reinforce_plus_plus_baseline(batch: Batch, cfg: TrainConfig) -> Tensor:
    """s - group mean, whitened over the step's tokens.  2501.03262.  [B, T]"""
    return whiten(spread(center_by_group(batch.shaped_scores, batch.groups), batch.loss_mask), batch.loss_mask)


def turn(batch: Batch, cfg: TrainConfig) -> Tensor:
    """Turn-level credit: the turn's discounted return, normalised over the group's turns unless --scale_rewards is
    none.  [B, T]"""
    turns, table, pairs = turn_returns(batch, cfg.gamma)
    values = table[pairs.unbind(1)]  # [M]
    if cfg.scale_rewards != "none":
        values = normalize(values, batch.groups[pairs[:, 0]], "group", cfg.scale_rewards)
    return by_turn(values, turns, pairs, batch.loss_mask)


turn.compares_group = lambda cfg: cfg.scale_rewards != "none"


def gigpo(batch: Batch, cfg: TrainConfig) -> Tensor:
    """Episode advantage in the group + step_weight * advantage among turns that started in the same state.

    2505.10978. Without Batch.states, which an environment's state() gives, only first turns are compared: they all
    start at the prompt.  [B, T]
    """
    turns, table, pairs = turn_returns(batch, cfg.gamma)
    rows, k = pairs.unbind(1)
    if batch.states is None:
        warn_once("--advantage gigpo: the environment has no state() (envs/base.py), so only first turns are compared.")
        states = torch.where(k == 1, 0, 1 + rows * table.shape[1] + k)  # all different
    else:
        first = (turns[rows] == k[:, None]).long().argmax(1)  # [M] the turn's first token
        states = batch.states[rows, first]
        # Other rows' states must not change the result: a first turn without one starts at the prompt, as above.
        states = torch.where((k == 1) & (states < 0), 0, states)
    _, state_group = torch.stack([batch.groups[rows], states]).unique(dim=1, return_inverse=True)  # [M]
    steps = by_turn(normalize(table[rows, k], state_group, "group", "group"), turns, pairs, batch.loss_mask)
    episodes = spread(normalize(batch.shaped_scores, batch.groups, "group", "group"), batch.loss_mask)
    return episodes + steps


def otb(batch: Batch, cfg: TrainConfig) -> Tensor:
    """Optimal token baseline: A = G - B, where B = sum(G W) / sum(W) over the group's tokens in the same column, G is
    the reward to go and W = cumsum(1 - 2 pi + sum pi^2) estimates the squared gradient of the tokens so far.

    Two completions with G = 1, 0 and W = 1, 3 in a column: B = (1 * 1 + 0 * 3) / (1 + 3) = .25, A = .75 and -.25. The
    plain mean would be .5: the completion with the larger gradient counts more. A column that no other completion of
    the group reaches has no baseline (B = 0).  [B, T]
    """
    return optimal_baseline(batch, torch.arange(batch.loss_mask.shape[1]).expand_as(batch.loss_mask))


def tir_otb(batch: Batch, cfg: TrainConfig) -> Tensor:
    """otb by sampled tokens instead of columns: with tools, column t is another moment in every row.  [B, T]

    loss_mask 1 1 0 0 1 and 1 0 1 1 0: the second sampled token is in column 1 of the first row, where the second row
    has a tool's answer, and in column 2 of the second row. otb compares neither; tir_otb compares the two.
    """
    return optimal_baseline(batch, batch.loss_mask.argsort(dim=1, descending=True, stable=True))


otb.needs = tir_otb.needs = ("old_logprobs", "sum_pi_squared")


def optimal_baseline(batch: Batch, order: Tensor) -> Tensor:
    """otb after sorting each row's columns by `order` [B, T]. Without Batch.sum_pi_squared, pi^2 is used.  [B, T]"""
    order, pi, (index, size) = order.to(batch.groups.device), batch.old_logprobs.exp(), group_index(batch.groups)
    squares = pi**2 if batch.sum_pi_squared is None else batch.sum_pi_squared
    columns = (batch.loss_mask, returns_to_go(batch, 1.0), 1 - 2 * pi + squares)
    mask, returns, energy = (x.gather(1, order) for x in columns)
    energy = (energy * mask).cumsum(1) * mask
    top, bottom = (torch.zeros_like(energy).index_add(0, index, v)[index] for v in (returns * energy, energy))
    is_other = (index[:, None] == index) & ~torch.eye(len(index), dtype=torch.bool, device=index.device)
    length, longest = mask.sum(1, keepdim=True), (is_other * mask.sum(1)).amax(1, keepdim=True)  # [B, 1]
    since_prompt = torch.arange(mask.shape[1], device=mask.device) - mask.argmax(1, keepdim=True)  # [B, T]
    # Beyond the end of every other completion of the group there is nothing to compare with, so no baseline.
    no_baseline = (since_prompt >= longest) & (length > longest)
    advantages = (returns - (top / (bottom + 1e-8)).masked_fill(no_baseline, 0.0)) * mask * (size > 1)[:, None]
    return torch.zeros_like(advantages).scatter(1, order, advantages)


MORE_ADVANTAGES = {
    "rloo": rloo, "reinforce_plus_plus": reinforce_plus_plus,
    "lite_ppo": lite_ppo, "opo": opo, "gpg": gpg, "maxrl": maxrl, "rae": rae, "gdpo": gdpo,
    "grpo_passk": grpo_passk, "remax": remax,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline, "turn": turn, "gigpo": gigpo, "otb": otb,
    "tir_otb": tir_otb, "distill": distill,
}  # fmt: skip
