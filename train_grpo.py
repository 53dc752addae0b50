"""GRPO for language models in one file, on plain torch.distributed, with a vLLM server beside it. Copy it, edit it.

    export VLLM_SERVER_TOKEN=...                                   # any string as token, the same in both terminals
    CUDA_VISIBLE_DEVICES=0 python vllm_server.py --model Qwen/Qwen2.5-1.5B-Instruct              # terminal 1
    CUDA_VISIBLE_DEVICES=1,2,3,4 torchrun --nproc_per_node=4 train_grpo.py \
        --model_id Qwen/Qwen2.5-1.5B-Instruct                                                    # terminal 2

A training step, and where to find it:

    take `prompts_per_step` prompts                                                section 2
    sample `num_generations` completions of each, score them as they end           section 3, rollouts.py, rewards.py
    lay them out as one Batch; token ids are the generator's, never re-tokenised   batch.py
    log-probs of the sampled tokens, only if something needs them                  section 4
    advantages: compare the completions of one prompt                              section 5
    `num_iterations` x `num_minibatches` optimizer updates of the policy loss      sections 6, 7
    push the new weights to the server; the next step samples from them            section 9

Section 1 is the loop, 8 the policy, reference and optimizer, 10 the evaluation, 11 everything before the first step.

Read train_minimal.py first: the same algorithm in 340 lines. To try an idea you need not read this whole file. For an
advantage read section 5; for a loss the beginning of 5, section 6 and `micro_loss` in 7, which calls it; for a rollout
the beginning of section 3; for an optimizer `make_optimizer`. docs/ideas.md has ideas that work. To remove a feature,
delete its import and every line with `teachers.`, `colocate.`, `gpu.`, `agreement.` or `router_replay.` (then with
--router_replay off).

Deliberate differences from the papers and from TRL:

    * Every token's loss is weighted by counts over the whole optimizer update and all ranks, so the gradient does not
      depend on how the update is split into micro-batches or across ranks.
    * A prompt is computed once for all its completions (`--shared_prefix`): the same gradient in less time.
    * The generator's log-probs differ slightly from the trainer's. Each token's loss is multiplied by their ratio,
      capped at 2 (`--correction token`, truncated importance sampling).
    * Sampling is not truncated by default: top-k or top-p would bias the importance ratio.
    * With one update per step the ratio is 1 and the loss says nothing about progress: watch `reward`.

Shapes: B completions (this rank's share of a step), T tokens of the longest prompt + completion, N sampled tokens, V
vocabulary size. The fields of Batch (batch.py) that matter most: `loss_mask` [B, T] is 1 on sampled tokens;
`advantages` [B, T]; `groups` [B] is equal for the completions of one prompt, which are adjacent; `reward_components`
[B, functions] is what each of --reward_funcs returned (0 for None, inf in a demonstration), `scores` [B] their sum by
--reward_weights (give 0 to a function that your advantage alone reads), `shaped_scores` [B] the scores after
`shape_rewards` (section 5). Losses also have `old_logprobs` [B, T] (`pi_old`, section 4) and the generator's
`sampling_logprobs` [B, T]. In forward passes and losses a row may be part of a completion: one whose context starts
anew, as an agent's may, becomes several rows (`split_restarts`). With --domains `cfg.of(row)` is the config of a data
row's domain; otherwise it is cfg.
"""
# ruff: noqa: E402 - the command line is parsed before torch is imported, so that a wrong flag is reported at once

from config import TrainConfig, known_name, parse_args

# A knob of your own: here, above CONFIG; it needs no decorator.
# class TrainConfig(TrainConfig):
#     my_coef: float = 0.1  # what it does: the text of its --help
CONFIG = parse_args(TrainConfig, description=__doc__.split("\n")[0]) if __name__ == "__main__" else None

import asyncio
import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

# isort: off
# What algorithms and rollouts are made of:
import rollouts
import utils
from algorithms import checks
from algorithms.advantages import MORE_ADVANTAGES, largest, normalised_rewards, sizes_of_advantages
from algorithms.correction import mismatch, mismatch_statistics, not_rejected
from algorithms.losses import MORE_KL, MORE_LOSSES, has_no_ratio
from batch import Batch, add_statistics, center_by_group, clip_stats, clipped_surrogate, collate, differ, group_mean
from batch import group_std, group_sum, log_ratio, merge_restarts, record, row_sum, sequence_ratio, split_restarts
from batch import spread, start_record
from batch import by_turn, group_index, normalize, returns_to_go, row_mean, turn_returns, whiten  # noqa: F401 - for you
from inputs.processor import load_processor  # noqa: F401 - for after_rollout
from inputs.trajectory import Trajectory, empty_trajectory, failed_trajectory, known_scores
from inputs.trajectory import without_failed, without_unscored
from rewards import TRAINER_STATE, RewardError, functions_of_domain, score
from rollouts import ROLLOUTS  # noqa: F401 - for an entry of yours

# What carries them:
import data
from algorithms import teachers
from algorithms.distillation import rewards_count
from algorithms.optimizers import adapt, check_optimizer, lr_at, make_by_name
from algorithms.silent import TwoStageBackward
from inputs import vision
from modeling import agreement
from modeling import parameters
from modeling import router_replay
from modeling.attention import packed, take_packed_rows
from modeling.loading import autocasts, load_hf_model, share_adapters, to_train
from modeling.model import adapter_weights, backbone, chunk_size, image_weights, logits_of
from modeling.packing import balanced_groups, micro_batches, minibatches, pack
from modeling.parameters import clean_name, full, gathered, move_towards, parameters_of, rounded, unwrapped, walk
from plan import settings_by_memory
from runlog import gpu
from runlog.log import RunLog, clock, close_all, describe, evaluation_rows, name_run, step_rows
from runlog.rollout_metrics import check_failed, counts_by_origin, eval_metrics, rollout_metrics
from runlog.tokens import write_vocabulary
from saving import checkpoints, resume
from startup import colocate
from startup.servers import make_generator
from startup.setup import first_push, settings_and_data
# isort: on

# ==== 1 the loop =====================================================================================================


@dataclass
class Run:
    """The objects that live from a run's first step to its last. `start` (section 11) makes them."""

    rows: Sequence[dict]  # of the training set
    held_out: list[dict]
    reward_functions: dict[str, Callable]
    processor: object  # the tokenizer, or the processor of a model that takes images
    sampler: "PromptSampler | None"  # None with --eval_only
    generator: object  # samples completions: a client of vLLM servers, or a copy of the model in this process
    policy: nn.Module  # a Policy (section 8) wrapped by DDP or FSDP; unwrapped(policy) is the Policy itself
    optimizer: torch.optim.Optimizer
    modules: dict[str, tuple]  # name -> (module, its optimizer or None): what a checkpoint saves
    device: torch.device
    run_dir: Path
    log: RunLog | None  # None except on rank 0
    first: int  # steps done before this process started: above 0 in a resumed run
    state: dict  # numbers saved in checkpoints
    memory: dict  # shared by `after_rollout` and the prompt sampler, saved in checkpoints
    reference: nn.Module | None = None
    teacher: nn.Module | None = None
    critic: object | None = None  # train_ppo.py
    size: tuple | None = None  # the model's, to compute TFLOP/s on GPUs


def train(
    cfg: TrainConfig, make_critic: Callable | None = None, make_collector: "type[Collector] | None" = None
) -> dict:
    """The training loop. Returns the metrics of the last evaluation, or {}. make_critic: (cfg, device) -> an object
    with `module`, `optimizer` and `learn` (train_ppo.py); make_collector: a kind of Collector (train_async.py)."""
    make_collector = make_collector or Collector
    make_collector.check(cfg)
    cfg, run = start(cfg, make_critic)
    collector = make_collector(run, cfg)
    policy, generator, state = run.policy, run.generator, run.state
    pad_id = getattr(run.processor, "tokenizer", run.processor).pad_token_id or 0
    pushed = run.first  # version of the generator's weights: the number of training steps behind them
    collector.pushed(pushed, cfg)
    last_eval = evaluate(run, cfg, run.first) if cfg.eval_only or (cfg.eval_steps and run.first == 0) else {}

    for step in range(run.first, cfg.max_steps) if not cfg.eval_only else ():
        last = step + 1 == cfg.max_steps
        evaluates = bool(cfg.eval_steps) and ((step + 1) % cfg.eval_steps == 0 or last)
        saves = (bool(cfg.save_steps) and (step + 1) % cfg.save_steps == 0) or last
        logs = (step + 1) % cfg.log_steps == 0 or last
        learns = not run.critic or step >= cfg.critic_warmup  # a new critic is trained alone at first
        metrics: dict[str, float] = {"beta": cfg.beta, "entropy_coef": cfg.entropy_coef, "policy_lag": step - pushed}
        with clock(metrics, "step"):
            # For reward functions, as in TRL.
            TRAINER_STATE.global_step, TRAINER_STATE.epoch = step, step * cfg.prompts_per_step / len(run.rows)
            seed_generator(generator, cfg, step)
            trajectories, collected = collector.take(step, pushed, cfg)
            colocate.trainers_turn(run, cfg)  # with --colocate the server sleeps until the push
            metrics |= rollout_metrics(trajectories, cfg) | collected
            returned = after_rollout(trajectories, run.memory, step, cfg)
            trajectories, numbers = checks.after_rollout(returned, trajectories)  # sorted by group
            added = counts_by_origin(trajectories)  # trajectories that after_rollout added
            metrics |= numbers | added

            batch = collate(trajectories, pad_id, run.device, torch.distributed.get_rank(), step)
            # With the temperature that the step was sampled with, by which the policy divides its logits.
            step_cfg = replace(cfg, temperature=settings_at(step, cfg).temperature)
            metrics |= teachers.add(batch, run, trajectories, pad_id, step_cfg, all_logprobs)  # {} without a teacher
            with clock(metrics, "logprobs"):
                add_logprobs(batch, policy, run.reference, step_cfg)
            metrics |= shape_rewards(batch, step_cfg, state["score_moments"])
            metrics |= run.critic.learn(batch, step_cfg, step) if run.critic else {}
            metrics |= add_advantages(batch, step_cfg)
            metrics |= checks.metrics_of(leave_out(batch, trajectories, step_cfg) or {}, batch)
            if logs and learns and cfg.log_completions:
                start_record(batch)  # each token's log-prob, entropy and weight in the loss go to the run's folder
            with clock(metrics, "update"):
                metrics |= update(policy, run.optimizer, batch, step_cfg, step) if learns else {}
            metrics |= router_replay.metrics(unwrapped(policy).routing, batch)
            metrics |= gpu.metrics(run.size, trajectories, cfg, metrics["time/update"], run.device) if learns else {}
            # Ends the run if trainer and generator gave this step's tokens different log-probs.
            agreement.check_step(metrics, cfg, compares=step == run.first and not added)

            with clock(metrics, "push"):
                colocate.servers_turn(run, cfg)
                # Also before a checkpoint: a resumed run pushes the weights it has loaded, and samples from those.
                if (step + 1) % cfg.push_steps == 0 or evaluates or saves:
                    pushed = step + 1
                    push_weights(policy, generator, pushed, cfg.push_bucket_mb)
                    collector.pushed(pushed, cfg)
            cfg = adapt(cfg, metrics) if learns else cfg  # beta by --kl_target, entropy_coef by --entropy_target
            if cfg.ref_sync_steps and (step + 1) % cfg.ref_sync_steps == 0:
                move_towards(run.reference, policy, cfg.ref_sync_alpha)
        if step == run.first:
            checkpoints.memory_bytes(run.memory)  # warns at once of values that no checkpoint can save
        metrics["num_tokens"] += state["num_tokens"]  # this step's (rollout_metrics) and all before it
        state |= {"num_tokens": metrics["num_tokens"], "beta": cfg.beta, "entropy_coef": cfg.entropy_coef}
        if logs:
            completions = utils.gather_lists(step_rows(trajectories, batch))
            if run.log:
                run.log.step(step + 1, metrics, completions)
        if evaluates:  # before saving, so that a resumed run has it
            last_eval = evaluate(run, cfg, step + 1)
        if saves:
            save(run, cfg, step + 1)

    collector.close()
    generator.close()
    if run.log:
        run.log.close()
    return last_eval


# ==== 2 prompts ======================================================================================================


def format_row(row: dict) -> dict:
    """Edit me: a row of your data set, from either split -> a dict with `prompt` (a string or chat messages) and the
    columns that rewards need. To drop rows, pass a function that returns rows as --dataset_id instead."""
    return row


class PromptSampler:
    """Chooses the rows of each step: every row once per epoch, shuffled by (seed, epoch). Each rank takes its share of
    the step.

    Edit me: `next` may return any `share` row numbers, even repeated ones: for example rows that a column of `rows`
    marks as hard, or that `memory` does. `memory` is this rank's dict; `after_rollout` (section 3) can fill it.
    """

    def __init__(
        self, num_rows: int, prompts_per_step: int, seed: int, rank=0, world_size=1, memory=None, rows=(), order=None
    ):
        data.check_step_size(num_rows, prompts_per_step, world_size)
        self.num_rows, self.prompts_per_step, self.seed = num_rows, prompts_per_step, seed
        self.rank, self.share, self.rows = rank, prompts_per_step // world_size, rows
        self.memory = {} if memory is None else memory
        self.order = order or data.Order([num_rows], [1], prompts_per_step, seed)  # with --domains `start` gives one

    def next(self, step: int) -> list[int]:
        """This rank's row numbers for a training step, counted from 0."""
        return self.order.step(step)[self.rank * self.share : (self.rank + 1) * self.share].tolist()

    def extra(self, step: int, numbers: list[int], count: int) -> list[int]:
        """`count` random rows to replace rows of a step, `numbers`. Entry i has the domain of numbers[i % share], and
        may be in the step already."""
        random = np.random.default_rng([self.seed, step, self.rank, 0xD1CE])  # another stream than the order's
        return self.order.extra(random, numbers, count).tolist()


# ==== 3 rollout and scoring ==========================================================================================

# From a step to its tokens:
#
#     Collector.take          chooses the prompts of a step (train_async.py has a collector that works ahead)
#     sample_rows             all prompts concurrently; others replace those without signal
#     rollout                 the completions of one prompt, each scored as soon as it is there
#     rollouts.call_rollout   --rollout: single_turn, multi_turn (tools, environments), agent, or your own:
#                             async (rows, generator, cfg) -> cfg.num_generations trajectories of each row
#
# To write your own, copy `single_turn` (rollouts.py), or for several turns "A question asked again" in docs/ideas.md
# (answer_to, next_prompt and trajectory_of of envs/turns.py), and register it: ROLLOUTS["mine"] = mine.


class Collector:
    """Samples each step when the loop asks for it."""

    @staticmethod
    def check(cfg: TrainConfig) -> None:
        """ConfigError for settings with which it cannot work."""

    def __init__(self, run: Run, cfg: TrainConfig):
        self.run = run

    def pushed(self, version: int, cfg: TrainConfig) -> None:
        """Called after each push. version: the training steps behind the pushed weights."""

    def take(self, step: int, version: int, cfg: TrainConfig) -> tuple[list[Trajectory], dict]:
        """This rank's trajectories of a step, and metrics. version: of the generator's weights."""
        run, begun = self.run, time.perf_counter()
        first = list(run.sampler.next(step))
        further = run.sampler.extra(step, first, cfg.resample_rounds * len(first))
        versions = range(version, version + 1)  # every token must come from these weights
        work = sample_rows(run.rows, first, further, run.generator, run.reward_functions, cfg, versions, step)
        groups, counts = asyncio.run(work)
        sampled, scored = last_token(groups), time.perf_counter()
        trajectories, metrics = collect(run.rows, groups, counts, cfg)
        return trajectories, metrics | {"time/generate": sampled - begun, "time/score": scored - sampled}

    def close(self) -> None:
        """Called at the end of the run."""


async def sample_rows(
    rows: Sequence[dict], first: list[int], further: list[int], generator, reward_functions: dict, cfg, versions, step=0
) -> tuple[list[list[Trajectory]], dict]:
    """One group of scored completions for each row number in `first`, all sampled concurrently; and counts.

    A row is replaced if its prompt is too long and, with --dynamic_sampling (DAPO, 2503.14476 sec. 3.2), if its group
    teaches nothing. Its replacements are further[place], further[place + len(first)], ...; if none is better the last
    one stays. A slow group is never replaced, as that would favour short completions. Nothing here talks to other
    ranks: train_async.py runs it in the background.
    """

    async def sample(number: int) -> tuple[list[Trajectory], bool]:
        """The group, and whether another one should replace it: it teaches nothing, or its prompt is too long."""
        row = rows[number]
        settings = settings_at(step, rollouts.sampled_by(row, cfg))  # for the row's domain and number of completions
        calls = [rollout(row, generator, reward_functions, settings, versions)]
        if "baselines" in needs(cfg):  # the advantage compares with a greedy completion; `needs` is in section 6
            greedy = replace(settings, num_generations=1, temperature=0.0, purpose="baseline")
            calls.append(rollout(row, generator, reward_functions, greedy, versions))
        group, *greedy_groups = await asyncio.gather(*calls)
        for trajectory in group:
            trajectory.info["row_number"] = number
        for greedy_group in greedy_groups:
            rollouts.tell_baseline(group, greedy_group[0])
        teaches_nothing = cfg.dynamic_sampling and not has_signal(group, settings)
        return group, rollouts.cannot_be_shown(group, number) or teaches_nothing

    async def sample_place(place: int) -> tuple[list[Trajectory], bool, int]:
        """The group that stays, whether it should have been replaced as well, and how many groups it replaced."""
        (group, replace_it), replaced = await sample(first[place]), 0
        for number in further[place :: len(first)]:
            if not replace_it:
                break
            (group, replace_it), replaced = await sample(number), replaced + 1
        return group, replace_it, replaced

    groups, unreplaced, replaced = zip(*await asyncio.gather(*map(sample_place, range(len(first)))), strict=True)
    return [*groups], {"resampled": sum(replaced), "silent": sum(unreplaced)}


def settings_at(step: int, cfg: TrainConfig) -> TrainConfig:
    """Edit me: a schedule for sampling and scoring, such as replace(cfg, temperature=...) or max_completion_length. The
    policy and losses see its temperature, one for all rows of a step, and nothing else; evaluations do not see it."""
    return cfg


async def rollout(row: dict, generator, reward_functions: dict, cfg: TrainConfig, versions=None) -> list[Trajectory]:
    """Samples and scores one row: cfg.num_generations trajectories (or as many as a rollout with `any_number` returns),
    failed ones included (info["failure"]). Their `group` is 0 until `collect` numbers the groups of a step.

    cfg.purpose: "train", "eval" or "baseline". versions: a range of the weights that may have sampled the tokens.
    """
    functions = functions_of_domain(reward_functions, cfg)

    async def sample_and_score(call_cfg: TrainConfig) -> list[Trajectory]:
        trajectories = await rollouts.call_rollout(row, generator, call_cfg)
        sampled_at = time.perf_counter()
        played = [t for t in trajectories if "failure" not in t.info]
        if versions is not None:
            utils.check_fresh(played, versions, cfg.generator)
        scoring = asyncio.ensure_future(score(played, functions, call_cfg))  # fills in token_rewards and info
        work = [scoring]  # and with a teacher's server:
        work.append(teachers.tell(played, generator, call_cfg, scoring))  # waits for the scores if it needs them
        try:
            await asyncio.gather(*work)
        except RewardError as error:
            trajectories = [
                t if "failure" in t.info else failed_trajectory(t.row, t.group, error) for t in trajectories
            ]
        for trajectory in trajectories:
            trajectory.info["sampled_at"] = sampled_at
        return trajectories

    # One call for the whole group, or one for each completion, which is then scored as soon as it ends, if the rollout
    # and every reward function declare `per_trajectory`.
    parts = await asyncio.gather(*map(sample_and_score, rollouts.settings_of_calls(cfg, functions)))
    return list(chain(*parts))


def last_token(groups: list[list[Trajectory]]) -> float:
    """The time.perf_counter() at which the last token was sampled."""
    return max(trajectory.info["sampled_at"] for group in groups for trajectory in group)


def has_signal(group: list[Trajectory], cfg: TrainConfig) -> bool:
    """Edit me: whether a group teaches anything (--dynamic_sampling): its weighted scores differ, and their mean is
    within --group_mean_bounds. t.info["reward_components"] has the unweighted ones, nan for None."""
    if cfg.has_teacher and not rewards_count(cfg):  # a teacher alone teaches: it always does
        return any("failure" not in t.info for t in group)
    scores = known_scores(group)
    if not scores:
        return False
    mean = fmean(scores)
    # A group of one completion may have signal; the only survivor of a larger group has nothing to be compared with.
    differs = len(group) == 1 or (len(scores) > 1 and stdev(scores) > 1e-6 * max(abs(mean), 1))
    low, high = cfg.group_mean_bounds
    return differs and low <= mean <= high


def collect(rows: Sequence[dict], groups: list, counts: dict, cfg: TrainConfig) -> tuple[list[Trajectory], dict]:
    """What `sample_rows` returned -> this rank's trajectories of the step, and metrics. Trajectories that failed are
    dropped, and unscored ones if others of their group have a score. Ranks exchange groups to balance their tokens."""
    utils.wait_for_ranks(cfg.dist_timeout)  # ranks finish sampling at different times
    played = [group for group in without_failed(groups) if group]
    scored = without_unscored(played)
    if cfg.dynamic_sampling:
        numbers = {f"dynamic_sampling/{name}": n for name, n in counts.items()}
    else:
        numbers = {"rollout/rows_left_out": counts["resampled"]}  # whose prompts are too long
    numbers["rollout/unrewarded"] = sum(map(len, played)) - sum(map(len, scored))
    metrics = check_failed(groups, cfg, numbers)  # sums over ranks; RolloutError if too many failed
    groups, balance_metrics = balanced_groups(scored)
    for number, group in enumerate(groups):
        for trajectory in group:
            trajectory.group = number
    # A rank left with nothing gets a trajectory without sampled tokens: a stand-in, which counts for nothing.
    return sum(groups, []) or [empty_trajectory(rows[0], cfg)], metrics | balance_metrics


def after_rollout(trajectories: list[Trajectory], memory: dict, step: int, cfg: TrainConfig) -> list[Trajectory]:
    """Edit me: look at what a step sampled, and change what it learns from. Returns this rank's trajectories, one or
    more; or (trajectories, {name: numbers to log}).

    `memory` is this rank's dict, which checkpoints save and the prompt sampler sees. A trajectory has its data row
    (t.row), the row's number (t.info["row_number"], -1 in a stand-in) and its score, sum(t.token_rewards). Groups have
    moved between ranks by now: use utils.gather_objects for what a sampler should know about its rows. docs/ideas.md
    adds replayed trajectories and demonstrations here.
    """
    return trajectories


# ==== 4 log-probs ====================================================================================================


def add_logprobs(batch: Batch, policy: nn.Module, reference: nn.Module | None, cfg: TrainConfig) -> None:
    """Fills in the log-probs that are needed before the first update. With one update per step and nothing that reads
    them, the ratio is 1 by construction and the policy makes no extra forward pass."""
    needed = needs(cfg)
    # Later updates have a ratio pi / pi_old.
    ratio_moves = cfg.num_iterations * cfg.num_minibatches > 1 and cfg.old_logprobs == "recompute"
    are_read = bool(needed & {"old_logprobs", "entropy", "sum_pi_squared"}) or cfg.kl_in_reward
    if ratio_moves or are_read or cfg.top_entropy_quantile < 1:
        outputs = all_logprobs(policy, batch, cfg)
        batch.old_logprobs, batch.entropy = outputs["logprobs"], outputs["entropy"]
        batch.sum_pi_squared = outputs["sum_pi_squared"]
    if reference is not None:
        batch.ref_logprobs = all_logprobs(reference, batch, cfg)["logprobs"]
    elif cfg.beta > 0 or "ref_logprobs" in needed:  # LoRA: without its adapters the policy is the reference
        unrouted = replace(batch, routed_experts=None)  # the reference chooses its experts itself
        with unwrapped(policy).model.disable_adapter():
            batch.ref_logprobs = all_logprobs(policy, unrouted, cfg)["logprobs"]


def pi_old(logprobs: Tensor, part: Batch, cfg: TrainConfig) -> Tensor:
    """log pi_old, chosen by --old_logprobs.  [B, T]

    The loss has the ratio pi / pi_old, and `correction` multiplies it by pi_old / mu, where mu is the generator. Unless
    one of them is clipped, the product is pi / mu for every choice:

    recompute     pi before the step's first update (the default)
    sampler       mu, so the correction is 1
    interpolate   n / (n + 1) of the way from mu to pi, for a token from weights n steps old (AReaL)
    current       pi, so the ratio is 1; also the fallback of sampler and interpolate for tokens without mu
    """
    now, sampled = logprobs.detach(), part.sampling_logprobs
    if cfg.old_logprobs in ("sampler", "interpolate"):
        lag = (part.step - part.versions).clamp(min=0) if cfg.old_logprobs == "interpolate" else 0  # [B, T]
        return (sampled + lag / (lag + 1) * (now - sampled)).where(~sampled.isnan(), now)
    return now if part.old_logprobs is None or cfg.old_logprobs == "current" else part.old_logprobs


@torch.no_grad()
def all_logprobs(policy: nn.Module, batch: Batch, cfg: TrainConfig) -> dict[str, Tensor]:
    """`compute_logprobs` of the whole batch, without gradient, micro-batch by micro-batch.  [B, T] each

    The policy stays in train mode, as in updates; `to_train` has set every dropout to 0.
    """
    batch = replace(batch, teacher_top=None)  # only a loss needs log-probs of these
    # One row per context: a completion p a a q b, whose context starts anew at q, becomes p a a and q b.
    contexts = split_restarts(batch)
    outputs: dict[str, Tensor] = {}
    # Lists of row numbers. An empty one, where other ranks have more passes, computes row 0 with a mask of 0.
    for rows in micro_batches(contexts, cfg):
        for name, values in compute_logprobs(policy, contexts.select(rows), cfg).items():
            if name not in outputs:
                outputs[name] = values.new_zeros(*contexts.loss_mask.shape, *values.shape[2:])
            if rows:
                outputs[name][rows, : values.shape[1]] = values
    return {name: merge_restarts(values, contexts, batch) for name, values in outputs.items()}


def compute_logprobs(policy: nn.Module, batch: Batch, cfg: TrainConfig) -> dict[str, Tensor]:
    """What `Policy.forward` says of each sampled token: "logprobs", "entropy", "sum_pi_squared" ..., 0 elsewhere.
    Log-probs have a gradient, the entropy only if the loss reads it.  [B, T] each"""
    where = batch.loss_mask.nonzero(as_tuple=True)  # rows and columns of the N sampled tokens
    # inputs: of the model, [R, L]. Completions a and b of prompt p, and c of prompt q, in one row: p p a a a b b q c c.
    # at_rows, at_columns [N]: the position in `inputs` that predicts each sampled token, in the order of `where`.
    # targets [N]: the token, or [N, 1 + k] with the k that a teacher finds likeliest in its place (batch.teacher_top).
    inputs, at_rows, at_columns, targets = pack(batch, cfg)
    outputs = policy(inputs, at_rows, at_columns, targets, cfg.temperature)  # [N] or [N, ...] each
    outputs = teachers.parted(outputs, targets)  # [N, 1 + k] -> "logprobs" [N], "of_teacher_top" [N, k]
    shape = batch.loss_mask.shape  # [N, ...], or a scalar -> [B, T, ...]
    return {name: x.new_zeros(*shape, *x.shape[1:]).index_put(where, x) for name, x in outputs.items()}


# ==== 5 advantages: (batch, cfg) -> [B, T], or ([B, T], numbers to log) =============================================

# batch is this rank's share of the step, in whole groups. group_mean, group_std, center_by_group and group_index need
# this rank alone; whiten and normalize work over all ranks, so every rank has to call them. With --dynamic_sampling
# edit `has_signal` (section 3), too, for an advantage that learns from reward_components where scores are equal.
#
# An advantage, a policy loss, a KL estimator or `own_term` tells the loop what it needs by attributes (examples:
# docs/ideas.md):
#
#     mine.needs = ("entropy",)     fields of Batch that are computed only on demand: ref_logprobs, entropy,
#                                   sum_pi_squared, baselines, teacher_logprobs, teacher_top; old_logprobs, of the
#                                   policy before the step's first update (a loss has `pi_old`, section 4, under this
#                                   name without asking); and for `prepare` current_logprobs, of before each update
#     mine.prepare = function       (batch, cfg) -> {name: number, [B] or [B, T]}: computes what depends on whole groups
#                                   or all ranks, an advantage's once a step, a loss's before each update of its rows.
#                                   It comes as batch.extras[name], in a loss the micro-batch's rows. A loss's, if
#                                   it needs current_logprobs, also has `pi_old` as batch.old_logprobs
#     mine.check = function         (cfg) -> why it does not work with these settings, or None
#     mine.compares_group = False   an advantage that works with one completion per prompt


def grpo(batch: Batch, cfg: TrainConfig) -> Tensor:
    """(s - group mean) / (std + 1e-6), the std chosen by --scale_rewards.  2402.03300 sec. 4.1.2.  [B, T]"""
    scores, groups = batch.shaped_scores, batch.groups
    mean, std = group_mean(scores, groups), torch.zeros_like(scores)  # [B] each
    if cfg.scale_rewards == "group":
        std = group_std(scores, groups)
    if cfg.scale_rewards == "batch":  # over all ranks, or the algorithm would depend on their number
        _, _, global_std = utils.global_moments(scores)  # count, mean, std
        std = std + global_std
    scale = torch.where(differ(std, mean), std + 1e-6, 1.0)  # equal scores: do not divide by a rounding error
    return spread(((scores - mean) / scale).to(scores.dtype), batch.loss_mask)


def dr_grpo(batch: Batch, cfg: TrainConfig) -> Tensor:
    """s - group mean: the std over-weights nearly solved and nearly hopeless prompts.  2503.20783 sec. 3.  [B, T]"""
    return spread(center_by_group(batch.shaped_scores, batch.groups), batch.loss_mask)


ADVANTAGES: dict[str, Callable[[Batch, TrainConfig], Tensor | tuple[Tensor, dict]]] = {
    "grpo": grpo, "dr_grpo": dr_grpo, **MORE_ADVANTAGES,
}  # fmt: skip


def shape_rewards(batch: Batch, cfg: TrainConfig, moments: dict[str, list[float]]) -> dict:
    """Applies --reward_mean, --reward_std and --kl_in_reward to batch.rewards. Its row sums are batch.shaped_scores,
    which advantages read; batch.scores stays what the reward functions gave.
    moments: statistics of all scores so far, updated here and saved in checkpoints."""
    batch.given_scores = row_sum(batch.rewards)  # what batch.scores returns from now on
    batch.rewards = normalised_rewards(batch, cfg, moments)
    if not cfg.kl_in_reward:
        return {}
    kl = KL_ESTIMATORS[cfg.kl](batch.old_logprobs, batch.ref_logprobs) * batch.loss_mask
    batch.rewards = batch.rewards - cfg.beta * kl  # as in RLHF
    return {"kl": float(utils.global_mean(kl, batch.loss_mask))}


def add_advantages(batch: Batch, cfg: TrainConfig) -> dict:
    """Fills in batch.advantages. Returns statistics."""
    advantage = ADVANTAGES[cfg.advantage]
    batch.extras |= checks.extras(advantage, batch, cfg)
    batch.advantages, metrics = checks.advantages(advantage, batch, cfg)  # = advantage(batch, cfg), of each domain
    return metrics | sizes_of_advantages(batch)


def leave_out(batch: Batch, trajectories: list[Trajectory], cfg: TrainConfig) -> dict:
    """Edit me: excludes completions and tokens from the loss. A completion is removed from loss_mask, so no mean of the
    loss counts it (but --loss_agg constant); the mean and std of its group did. Returns {name: numbers to log}."""
    # In float64, to be compared with bounds.  [B]
    scores = torch.tensor([sum(t.token_rewards) for t in trajectories], dtype=torch.float64)
    means = group_mean(scores, batch.groups.cpu()).tolist()  # [B]
    bounds = [cfg.of(t.row).group_mean_bounds for t in trajectories]
    # Neither too hard nor too easy: without --dynamic_sampling, or where nothing better was drawn.
    keep = torch.tensor([low <= mean <= high for mean, (low, high) in zip(means, bounds, strict=True)])
    keep &= torch.tensor([not (cfg.mask_truncated and t.finish_reason == "length") for t in trajectories])
    # Your filter goes here: keep &= ...  [B], bool, on the CPU
    batch.loss_mask = batch.loss_mask * keep.to(batch.loss_mask.device)[:, None]
    batch.advantages = batch.advantages * batch.loss_mask
    if cfg.top_entropy_quantile < 1:  # the other tokens stay in the means, with advantage 0
        batch.advantages = batch.advantages * largest(batch.entropy, batch.loss_mask, cfg.top_entropy_quantile)
    return {}


# ==== 6 policy losses: (logprobs [B, T], batch, cfg) -> loss per token [B, T], statistics {name: [B, T]} =============

# A loss is called for each micro-batch; what it returns for prompts and padding is ignored. A statistic is logged as a
# mean over tokens ([B, T] or [B, 1]) or over rows ([B]); as the maximum if its name ends in _max. row_mean returns
# [B, 1], row_sum [B]: of one context, where a completion has several (see the header); `prepare` sees whole ones.


def ppo(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), where r is each token's importance ratio (1707.06347 eq. 7).
    --dual_clip c: at most -c A where A < 0 (1912.09729 eq. 5).  [B, T]"""
    advantages, ratio = batch.advantages, log_ratio(logprobs, batch).exp()  # [B, T] each; 1 at the first update
    clipped = ratio.clamp(1 - cfg.epsilon, 1 + cfg.epsilon_high)
    loss = torch.max(-advantages * ratio, -advantages * clipped)
    low = (ratio < 1 - cfg.epsilon) & (advantages < 0)  # the clip only binds where it raises the loss
    high = (ratio > 1 + cfg.epsilon_high) & (advantages > 0)
    if cfg.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.min(loss, -advantages * cfg.dual_clip), loss)
    return loss, clip_stats(low, high)


def gspo(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """One ratio per sequence (context), exp(mean log-ratio), clipped.  2507.18071 eq. 5-7.  [B, T]"""
    return clipped_surrogate(sequence_ratio(logprobs, batch), batch, cfg)


def reinforce(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """-A log pi, no ratio: the plain policy gradient, Williams 1992.  [B, T]"""
    return -batch.advantages * logprobs, {}


reinforce.check = has_no_ratio  # refuses --old_logprobs sampler, which corrects the ratio

POLICY_LOSSES: dict[str, Callable[[Tensor, Batch, TrainConfig], tuple[Tensor, dict]]] = {
    "ppo": ppo, "gspo": gspo, "reinforce": reinforce, "gpg": reinforce, **MORE_LOSSES,
}  # fmt: skip


# KL(pi || ref) per token from one sample: (logprobs [B, T], ref [B, T]) -> [B, T].  J. Schulman, "Approximating KL
# divergence", 2020.
KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": lambda logprobs, ref: (logprobs - ref).clamp(-20, 20),  # unbiased, high variance; as a loss: no KL gradient
    "k2": lambda logprobs, ref: (logprobs - ref).clamp(-20, 20) ** 2 / 2,  # biased value, right gradient
    "k3": lambda logprobs, ref: (y := (ref - logprobs).clamp(-20, 20)).exp() - y - 1,  # unbiased, >= 0 (GRPO)
    **MORE_KL,
}


def own_term(logprobs: Tensor, entropy: Tensor | None, part: Batch, cfg: TrainConfig) -> tuple[Tensor | None, dict]:
    """Edit me: a term added to the policy loss, such as the likelihood of good completions in the first steps.

    logprobs [B, T]: of the sampled tokens, with gradient. entropy [B, T]: with gradient, which costs memory, if you set
    `own_term.entropy_gradient = True` below (or with --entropy_coef), else None. part: the micro-batch; part.rows are
    its data rows, part.step is the step. Returns a loss per token [B, T], or None, and statistics. It is weighted like
    the policy loss, or simply summed if you set `own_term.weights = "sum"`.
    """
    return None, {}


def in_use(cfg: TrainConfig) -> dict[str, Callable]:
    """{flag and name: function} of the functions that this run uses. ConfigError for an unknown name."""
    functions: dict[str, Callable] = {"own_term": own_term}
    tables = {"advantage": ADVANTAGES, "policy_loss": POLICY_LOSSES, "kl": KL_ESTIMATORS}
    for flag, table in tables.items():
        known_name(f"--{flag}", name := getattr(cfg, flag), table)
        functions[f"--{flag} {name}"] = table[name]
    return functions


def needs(cfg: TrainConfig) -> set[str]:
    """The fields of Batch that the functions in use declare in `needs`."""
    return {name for function in in_use(cfg).values() for name in getattr(function, "needs", ())}


def token_weights(loss_mask: Tensor, mode: str, *, num_tokens, num_sequences, max_tokens) -> Tensor:
    """The weight of each token: loss = (weights * per_token_loss).sum().  [B, T] -> [B, T]

    All counts are over the *whole* optimizer update and all ranks, so the gradient cannot depend on how it is split.
    num_tokens: loss tokens ("prompt_mean": [B, 1], those of the row's prompt). num_sequences: completions with a loss
    token ("constant": all completions; "prompt_mean": prompts). max_tokens: Dr. GRPO's constant, the longest completion
    allowed.
    """
    if mode == "token_mean":  # all tokens count equally (DAPO, 2503.14476 eq. 8)
        return loss_mask / max(num_tokens, 1)
    if mode == "seq_mean":  # all completions count equally (GRPO, 2402.03300 eq. 3)
        return loss_mask / loss_mask.sum(1, keepdim=True).clamp(min=1) / max(num_sequences, 1)
    if mode == "seq_sum":
        return loss_mask / max(num_sequences, 1)
    if mode == "prompt_mean":  # all prompts count equally, and all tokens of a prompt
        return loss_mask / num_tokens.clamp(min=1) / max(num_sequences, 1)
    if mode == "constant":  # independent of lengths (Dr. GRPO, 2503.20783 sec. 3.1)
        return loss_mask / (max(num_sequences, 1) * max_tokens)
    raise ValueError(f"loss_agg {mode!r}: choose token_mean, seq_mean, seq_sum, prompt_mean or constant")


# ==== 7 update =======================================================================================================


def update(policy: nn.Module, optimizer, batch: Batch, cfg: TrainConfig, step: int, loss_of=None) -> dict:
    """num_iterations passes over the batch, num_minibatches optimizer updates each. Returns metrics, equal on all
    ranks. loss_of: replaces `micro_loss` (train_ppo.py's critic)."""
    norms, sums = [], defaultdict(float)
    parts = [batch] if cfg.num_minibatches == 1 else minibatches(batch, cfg)  # the same in every pass
    updates_done = step * cfg.num_iterations * cfg.num_minibatches
    for part in parts * cfg.num_iterations:
        policy.zero_grad()  # also parameters in no group of the optimizer, since clipping sees all gradients
        accumulate_gradients(policy, part, cfg, loss_of, sums)
        check_optimizer(optimizer, policy)
        norms.append(clip_gradients(policy, cfg.max_grad_norm))
        if not math.isfinite(norms[-1]):
            raise RuntimeError(
                f"step {step}: the gradient norm is {norms[-1]}, so this update was not made. Look at the rewards and "
                "sampling/logprob_diff_mean of the last steps; lower --learning_rate, or --compute_dtype float32. "
                f"{checks.why_not_finite(part)}"
            )
        for group in optimizer.param_groups:
            group["lr"] = lr_at(updates_done, cfg) * group.get("lr_scale", 1.0)
        optimizer.step()
        updates_done += 1
    policy.zero_grad()
    metrics = checks.means_of(sums)
    metrics |= {"loss": metrics["loss"] / len(norms), "grad_norm": sum(norms) / len(norms)}
    for i, group in enumerate(optimizer.param_groups):
        metrics[f"lr/{group.get('name', i)}" if i else "lr"] = group["lr"]
    return metrics


def accumulate_gradients(policy: nn.Module, batch: Batch, cfg: TrainConfig, loss_of=None, sums=None) -> dict:
    """The gradient of one optimizer update, the same however it is split into micro-batches and across ranks: all
    counts are global and taken before the loop. Adds to `sums` this rank's "loss", "tokens" and statistics, a scalar
    each, and returns it.

    Under most losses a group whose completions all scored the same has no gradient. Passes of such groups come first,
    and skip the model's backward pass if no rank's loss has a gradient there (a KL term has one).
    """
    sums = defaultdict(float) if sums is None else sums  # kept on the GPU: .item() would wait for the backward pass
    batch = split_restarts(prepared_for_update(policy, batch, cfg))  # one row per context; usually a completion
    # [B], bool. A critic, which is updated before there are advantages, learns from every row.
    row_learns = (batch.loss_mask if batch.advantages is None else batch.advantages).any(1).tolist()
    passes = micro_batches(batch, cfg, row_learns)  # lists of row numbers; those with a learning row come last
    # Called in place of the policy. What it returns are leaves: the loss's gradient stops there, and goes on through
    # the model unless it is 0 on every rank (a KL term's is not). A loss reaches parameters in this way alone.
    two_stage = TwoStageBackward(policy)
    for number, rows in enumerate(passes):
        part, last = batch.select(rows), number + 1 == len(passes)
        with parameters.exchanging(policy, last):  # DDP exchanges gradients in the last pass only
            with utils.in_part():  # a loss that takes a mean over the batch in here is refused
                loss, stats = (loss_of or micro_loss)(two_stage, part, cfg)
            # DDP and FSDP average gradients over ranks, where a sum is wanted.
            two_stage.backward(loss * utils.world_size(), last)
        sums["loss"] += loss.detach().double()
        add_statistics(sums, stats, part.loss_mask)
    return sums


def prepared_for_update(policy: nn.Module, batch: Batch, cfg: TrainConfig) -> Batch:
    """The batch with all that depends on the whole update: token weights, and what functions `prepare` (section 5)."""
    batch = replace(batch, extras=dict(batch.extras))  # a copy: the next update prepares its own
    batch.weights, batch.update_tokens = weights_of_update(batch, cfg)  # [B, T], split like the rest of the batch
    if batch.advantages is None:  # a critic's update comes before the advantages
        return batch
    seen_by_loss = batch
    if "current_logprobs" in needs(cfg):
        batch.current_logprobs = all_logprobs(policy, batch, cfg)["logprobs"]
        seen_by_loss = replace(batch, old_logprobs=pi_old(batch.current_logprobs, batch, cfg))
    for function in (POLICY_LOSSES[cfg.policy_loss], own_term):
        batch.extras |= checks.extras(function, seen_by_loss, cfg)
    return batch


def weights_of_update(batch: Batch, cfg: TrainConfig) -> tuple[Tensor, float]:
    """`token_weights` of an update [B, T], and its number of loss tokens over all ranks."""
    num_tokens, num_sequences = batch.loss_mask.sum(), batch.loss_mask.any(1).sum()
    if cfg.loss_agg == "constant" and not batch.stand_in:
        num_sequences = len(batch)
    if cfg.loss_agg == "prompt_mean":  # all completions of a prompt are on one rank
        num_sequences = len(batch.groups[batch.loss_mask.any(1)].unique())
    num_tokens, num_sequences = utils.all_sum(torch.tensor([float(num_tokens), float(num_sequences)])).tolist()
    counts = dict(num_tokens=num_tokens, num_sequences=num_sequences, max_tokens=cfg.max_completion_length)
    if cfg.loss_agg == "prompt_mean":
        counts["num_tokens"] = group_sum(batch.loss_mask.sum(1), batch.groups)[:, None]
    return token_weights(batch.loss_mask, cfg.loss_agg, **counts), num_tokens


def micro_loss(policy: Callable, part: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """This micro-batch's share of the update's loss; and statistics, [B, T] each. policy: called like a Policy."""
    outputs = compute_logprobs(policy, part, cfg)  # [B, T] each
    logprobs, entropy = outputs["logprobs"], outputs["entropy"]
    if part.record is not None:
        record(part, logprobs, entropy)
    part = replace(part, old_logprobs=pi_old(logprobs, part, cfg))  # for the loss and `correction`
    # The policy loss, times the ratio trainer / generator. (`checks` calls the function and explains its mistakes.)
    policy_loss, stats = checks.policy_loss(POLICY_LOSSES[cfg.policy_loss], logprobs, part, cfg)  # [B, T]
    w = correction(logprobs, part, cfg)  # [B, T]
    per_token = policy_loss * w  # [B, T]
    stats = stats | mismatch_statistics(logprobs, w, part, cfg) | {"entropy": entropy}
    # Terms with the same weights: KL, teacher, entropy.
    if part.ref_logprobs is not None and not cfg.kl_in_reward:
        kl = checks.term(f"--kl {cfg.kl}", KL_ESTIMATORS[cfg.kl](logprobs, part.ref_logprobs), part)  # [B, T]
        if cfg.kl_ratio:  # tokens come from pi_old; weighted by pi / pi_old, value and gradient are those of pi
            kl = kl * log_ratio(logprobs, part).exp()
        per_token = per_token + cfg.beta * kl
        stats["kl"] = kl
    per_token = per_token + teachers.term(outputs, part, cfg, stats)  # --distill_topk
    per_token = per_token - cfg.entropy_coef * entropy  # without gradient unless Policy.entropy_gradient
    loss = (part.weights * per_token).sum()
    # Terms with other weights.
    own, numbers = checks.own_term(own_term, logprobs, entropy, part, cfg)  # a scalar, weights applied
    loss, stats = loss + own, stats | numbers
    loss = loss + router_replay.balance_term(outputs, part, cfg, stats)  # --router_aux_coef
    return loss, stats


def correction(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> Tensor:
    """The weight of each token's policy loss, w = trainer / generator, without gradient.  [B, T]

    The generator's log-probs differ because its kernels or, with --push_steps, its weights do. w is taken per token or
    per sequence, and clamped to its bounds or set to 0 outside them (TIS, IcePop). It is also 0 for what
    --reject_bounds and --off_policy_threshold leave out.
    """
    # batch.old_logprobs is pi_old here. If that is mu itself (sampler), the ratio contains the correction, and pi is
    # compared with mu for --reject_by alone.
    trainer = logprobs.detach() if cfg.old_logprobs == "sampler" else batch.old_logprobs
    d, w = mismatch(trainer, batch, cfg)  # log(trainer / generator) per token; exp(d), or of its sum over the sequence
    if cfg.correction == "none" or cfg.old_logprobs == "sampler":
        w = torch.ones_like(w)
    elif cfg.correction_mode == "mask":
        w = w.where((w >= cfg.correction_min) & (w <= cfg.correction_max), 0)
    else:
        w = w.clamp(cfg.correction_min, cfg.correction_max)
    return w * not_rejected(d, logprobs, batch, cfg)


def clip_gradients(policy: nn.Module, max_norm: float) -> float:
    """Scales gradients to a global norm of at most max_norm. Returns the norm before."""
    if isinstance(policy, FSDP):
        return float(policy.clip_grad_norm_(max_norm))
    return float(full(nn.utils.clip_grad_norm_([p for p in policy.parameters() if p.grad is not None], max_norm)))


# ==== 8 the policy, the reference, the optimizer =====================================================================


class Policy(nn.Module):
    """A causal LM that returns log-probs of given tokens; logits are computed for `chunk` tokens at a time. All use of
    parameters is inside one `forward`, as DDP and FSDP require."""

    replays = True  # may use the generator's choice of experts (--router_replay); a critic does not
    top = 0  # number of likeliest tokens to return as well, with log-probs: a teacher's --distill_topk

    def __init__(self, model: nn.Module, cfg: TrainConfig, autocast: bool):
        super().__init__()
        self.model, self.chunk, self.autocast = model, cfg.logprob_chunk, autocast
        self.entropy_gradient = cfg.entropy_coef != 0 or cfg.entropy_target is not None
        self.entropy_gradient |= getattr(own_term, "entropy_gradient", False)
        self.offload, self.float32 = cfg.offload_activations, cfg.head_dtype == "float32"
        if cfg.shared_prefix:
            # Changes its attention: within `packed` (see `forward`) a completion sees its prompt and itself.
            take_packed_rows(self.hf_model)
        self.routing, self.balance = router_replay.of(self.hf_model, cfg) if self.replays else (None, None)
        # Empty for a model of text alone:
        self.never = vision.placeholder_tokens(model.config)  # tokens that stand for images, never sampled
        # Weights that a pass without images does not use, although ranks have to reduce their gradients.
        self.of_images = image_weights(self.hf_model) if utils.world_size() > 1 else []

    @property
    def hf_model(self) -> nn.Module:  # the transformers model, below PEFT
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def forward(
        self, inputs: dict, rows: Tensor, columns: Tensor, targets: Tensor, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        """Given the tokens of `inputs` (R rows of length L) up to (rows, columns) [N]: "logprobs" of `targets`, [N] or
        [N, m]; "entropy" and "sum_pi_squared" of their distribution [N]; "top_logprobs" and "top_ids" [N, top] of a
        teacher; in training with --router_aux_coef the pass's "aux_loss", a scalar."""
        device = targets.device.type
        # Without cache: chunks would share one cast weight, whose gradient would be summed in bfloat16.
        casts = partial(torch.autocast, device, torch.bfloat16, cache_enabled=False)
        saving = save_on_cpu(pin_memory=device == "cuda") if self.offload else contextlib.nullcontext()
        with casts() if self.autocast else contextlib.nullcontext():
            inputs = router_replay.replay(self, inputs)
            with saving, packed(inputs.pop("segments", None), targets.device):
                out = backbone(self.hf_model)(**inputs, use_cache=False)
            hidden = out.last_hidden_state[rows, columns]  # [R, L, H] -> [N, H]
            if self.of_images:  # adds a gradient of 0; attributes of modules are what FSDP has gathered
                hidden = hidden + sum(0 * getattr(module, name).sum() for module, name in self.of_images)
            size = self.chunk or chunk_size(self.hf_model.config.get_text_config().vocab_size, hidden.is_cuda)
            chunks = zip(hidden.split(size), targets.split(size), strict=True)
            if len(hidden) <= size or not torch.is_grad_enabled():
                parts = [self.head(h, t, temperature) for h, t in chunks]
            else:  # the backward pass recomputes the logits of each chunk
                parts = [checkpoint(self.head, h, t, temperature, use_reentrant=False) for h, t in chunks]
            outputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            outputs |= router_replay.balance_of(self, out, inputs)
        return outputs

    def head(self, hidden: Tensor, targets: Tensor, temperature: float) -> dict[str, Tensor]:
        """`forward` from the hidden states on, for a chunk.  hidden: [n, H]"""
        logits = logits_of(self.hf_model, hidden, self.float32).float()  # [n, V]
        if self.never:
            logits = logits.index_fill(1, torch.tensor(self.never, device=logits.device), -1e9)  # -inf * 0 would be nan
        if temperature != 1:  # as the generator does
            logits = logits / temperature
        log_p = logits.log_softmax(-1)  # [n, V]
        of_targets = log_p.gather(1, targets if targets.ndim > 1 else targets[:, None]).view_as(targets)
        trains = torch.is_grad_enabled()
        # Last, since `checkpoint` stops recomputing after the last tensor that the backward pass needs: an entropy
        # without gradient is not computed again.
        with torch.set_grad_enabled(trains and self.entropy_gradient):
            p = log_p.exp()
            entropy = -(p * log_p).sum(-1)  # [n]
        # Updates do not read the sum of squares, and save this pass over [n, V].
        squares = torch.zeros_like(entropy) if trains else (p**2).sum(-1)  # [n]
        outputs = {"logprobs": of_targets, "entropy": entropy, "sum_pi_squared": squares}
        outputs |= teachers.likeliest(log_p, self.top)
        return outputs


def load_policy(cfg: TrainConfig, device: torch.device, kind: type | None = None) -> nn.Module:
    """The policy, wrapped by DDP or FSDP. kind: a class other than Policy."""
    torch.manual_seed(cfg.seed)  # for the initial values of adapters
    with parameters.on_rank_0("Loading the policy", everywhere=bool(cfg.load_in)):  # elsewhere on torch's meta device
        load = load_hf_model if getattr(kind, "reads_head", True) else partial(load_hf_model, body=True)
        model = to_train(load(cfg, getattr(torch, cfg.dtype)), cfg)
    return shard((kind or Policy)(model, cfg, autocasts(cfg)), cfg, device, trained=True)


def shard(policy: Policy, cfg: TrainConfig, device: torch.device, trained: bool) -> nn.Module:
    """Applies --strategy: a copy of the policy on every rank (ddp), or sharded layers (fsdp, fsdp2). Rank 0 broadcasts
    the values layer by layer, each sharded before the next. With --load_in every rank has loaded the base itself."""
    # Layers of an image tower are not units: a rank whose pass has no image would not take part in gathering them.
    layer_names = set(policy.hf_model._no_split_modules or [])
    layers = [m for m in policy.hf_model.get_decoder().modules() if type(m).__name__ in layer_names]
    for layer in layers if cfg.compile and trained else ():
        layer.compile(dynamic=True)  # in place, before sharding; lengths differ between passes
    precision = dict(param_dtype=getattr(torch, cfg.compute_dtype), reduce_dtype=torch.float32)
    # Empties the policy. fill_from_rank_0(module) then allocates a module on `device` with rank 0's values, unless it
    # has them; with --load_in only adapters need rank 0's values.
    fill_from_rank_0 = share_adapters if cfg.load_in else parameters.emptied(policy, device)
    if cfg.strategy == "ddp":
        fill_from_rank_0(policy)
        if not trained or utils.world_size() == 1:
            return policy
        devices = None if device.index is None else [device.index]
        return DistributedDataParallel(policy, device_ids=devices, gradient_as_bucket_view=True, init_sync=False)
    mesh = parameters.device_mesh(device, cfg)
    if cfg.strategy == "fsdp":
        return FSDP(
            policy,
            auto_wrap_policy=CustomPolicy(lambda module: module in layers),
            param_init_fn=partial(fill_from_rank_0, recurse=False),
            mixed_precision=fsdp.MixedPrecision(**precision, cast_forward_inputs=True),  # PEFT makes some float32
            use_orig_params=True,
            device_id=device,
            **(dict(device_mesh=mesh, sharding_strategy=fsdp.ShardingStrategy.HYBRID_SHARD) if mesh.ndim > 1 else {}),
        )
    offload = fsdp.CPUOffloadPolicy(pin_memory=device.type == "cuda") if cfg.offload else fsdp.OffloadPolicy()
    how = dict(mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(**precision), offload_policy=offload)
    first, last = policy.hf_model.get_input_embeddings(), policy.hf_model.get_output_embeddings()
    # The output layer, called for every chunk of tokens, belongs to the root's unit: gathered once, its gradient
    # reduced once. Input embeddings are a unit by themselves, unless tied to the output layer.
    tied = last is not None and last.weight is first.weight
    for module in [*layers, *([] if tied else [first]), policy]:
        fill_from_rank_0(module)
        fully_shard(module, **how)
    if not tied:
        first.set_unshard_in_backward(False)  # the gradient of a lookup does not need the weights
    return policy


def empty_policy(cfg: TrainConfig, config=None, kind: type | None = None) -> Policy:
    """Called within `torch.device("meta")`: the Policy with shapes but no values, whose memory plan.py counts."""
    return (kind or Policy)(to_train(load_hf_model(cfg, getattr(torch, cfg.dtype), config), cfg), cfg, autocasts(cfg))


def load_reference(cfg: TrainConfig, device: torch.device) -> nn.Module | None:
    """A frozen copy of the initial policy. None if nothing needs its log-probs, or with LoRA, where the policy without
    its adapters is the reference."""
    if cfg.use_peft or (cfg.beta == 0 and "ref_logprobs" not in needs(cfg)):
        return None
    return load_frozen(cfg, device, "the reference model")


def load_frozen(cfg: TrainConfig, device: torch.device, what: str) -> nn.Module:
    """Like `load_policy`, for a model that is not trained: in the compute dtype, or in float32 if it follows the policy
    (--ref_sync_steps), as bfloat16 would round small steps away."""
    cfg = replace(cfg, router_replay="off", router_aux_coef=0.0, load_in=None)
    with parameters.on_rank_0(f"Loading {what}"):
        model = load_hf_model(cfg, torch.float32 if cfg.ref_sync_steps else getattr(torch, cfg.compute_dtype))
    frozen = Policy(model.eval().requires_grad_(False), cfg, bool(cfg.ref_sync_steps) and autocasts(cfg))
    return shard(frozen, cfg, device, trained=False)


def make_optimizer(module: nn.Module, cfg: TrainConfig) -> torch.optim.Optimizer:
    """AdamW, or the optimizer named by --optim. Edit me: any torch optimizer, with one or several groups.

    Select parameters by clean_name(name), which does not depend on the sharding. Under --strategy fsdp parameters are
    flat pieces: optimizers that need matrices need ddp or fsdp2. Every update sets each group's learning rate to
    `lr_at` times the group's "lr_scale" (default 1) and logs it as lr/NAME, NAME being the group's "name". Keep state
    in self.state[p]: checkpoints save nothing else.
    """
    trained, betas = [p for p in module.parameters() if p.requires_grad], (0.9, cfg.adam_beta2)
    if cfg.optim != "AdamW":
        return make_by_name(trained, cfg)
    return torch.optim.AdamW(trained, lr=cfg.learning_rate, betas=betas, weight_decay=cfg.weight_decay, fused=True)


# ==== 9 weights to the generator, and to disk ========================================================================


def push_weights(policy: nn.Module, generator, version: int, bucket_mb: int) -> None:
    """Sends the policy's weights, or its adapters alone (--push_lora), to the generator: begin, one call per bucket,
    finish. Collective: with servers rank 0 sends, with --generator hf every rank fills its own copy
    (`generator.receives_weights`). Ranks agree after each bucket, and an error on one is raised on all."""
    active, dtype, size = generator.receives_weights, generator.weight_dtype, bucket_mb * 2**20

    def attempt(call, *args):
        try:
            if active:
                call(*args)
        except Exception as caught:  # carried to raise_together, which raises it on every rank
            generator.abort_push()
            return caught

    utils.raise_together(attempt(generator.begin_push), "Starting the weight push")
    adapters_alone = getattr(generator, "adapter", None) is not None  # optional in a generator of your own
    adapters = [gathered(adapter_weights(one_by_one(policy), dtype), active)] if adapters_alone else ()
    for bucket in adapters or weight_buckets(policy, size, dtype, active):
        utils.raise_together(attempt(generator.send_bucket, bucket), "Sending weights")
    utils.raise_together(attempt(generator.finish_push, version), "Finishing the weight push")
    generator.version = version


def weight_buckets(
    model: nn.Module, max_bytes: int, dtype: torch.dtype, keep: bool = True
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields lists of (checkpoint name, full tensor), about `max_bytes` each in `dtype`. Collective.

    All ranks gather a bucket before it is yielded, so that sending it never blocks a collective; keep=False: this rank
    takes part, and yields empty lists. FSDP1 gathers one wrapped module at a time, FSDP2 a bucket. LoRA is folded in.
    Sharded or folded matrices come in `dtype`; vectors keep theirs, as some servers store norms and biases wider; all
    other tensors are the live weights: use them before the next step.
    """
    names = {clean_name(name) for name, _ in model.named_parameters()}  # tied weights appear once, as in a checkpoint
    bucket, size = [], 0
    # Layers, and modules between them, are not split: checkpoints join some of a layer's tensors. Everything here is
    # lazy: under FSDP1 a module has its weights only while one_by_one is at it.
    for _, layer in groupby(one_by_one(model), parameters.layer_of):
        for key, tensor in chain.from_iterable(parameters_of(name, module, dtype) for name, module in layer):
            if key not in names:
                continue
            size += tensor.numel() * dtype.itemsize
            if isinstance(model, FSDP) and keep:  # which frees a unit's weights when it gathers the next unit
                tensor = rounded(tensor, dtype, copy=True)
            bucket.append((key, tensor))
        if size >= max_bytes:
            yield gathered(bucket, keep)
            bucket, size = [], 0
    if size:
        yield gathered(bucket, keep)


def one_by_one(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of all modules, children first. FSDP1 summons the full weights of one unit at a time: all ranks
    iterate in step."""
    if isinstance(model, FSDPModule):
        model.reshard()  # the root stays gathered after a forward pass without backward pass
    units = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDP)]
    for name, unit in units:  # the root first: this is how FSDP1 learns which one it is
        with FSDP.summon_full_params(unit, recurse=False, writeback=False):
            yield from walk(name, unit.module, FSDP)
    if not units:
        yield from walk("", model, ())


def saved_weights(policy: nn.Module, cfg: TrainConfig, dtype: torch.dtype) -> tuple[Iterator, object]:
    """(buckets of weights for `from_pretrained`, which all ranks iterate in step; PEFT's config if they are adapters
    alone, since 4-bit weights cannot be folded)"""
    size = cfg.push_bucket_mb * 2**20
    if cfg.load_in:
        adapters = gathered(adapter_weights(one_by_one(policy), torch.float32, scaled=False), True)
        return iter([adapters]), unwrapped(policy).model.peft_config["default"]
    buckets = ([(name, rounded(t, dtype)) for name, t in bucket] for bucket in weight_buckets(policy, size, dtype))
    return chain(buckets, [parameters.saved_buffers(policy)]), None


def save(run: Run, cfg: TrainConfig, step: int) -> None:
    """Saves a checkpoint after `step` steps, for `from_pretrained` and to resume from."""
    weights, adapter = saved_weights(run.policy, cfg, run.generator.weight_dtype)
    model = unwrapped(run.policy).hf_model
    checkpoints.save_checkpoint(
        run.run_dir, step, run.modules, model, weights, run.processor, run.state, run.memory,
        cfg.save_total_limit, adapter,
    )  # fmt: skip


# ==== 10 evaluation ==================================================================================================


def evaluate(run: Run, cfg: TrainConfig, step: int) -> dict:
    """Samples k completions of every held-out row with the weights after `step` training steps. Logs and returns
    eval/reward, eval/mean@k (share of completions that reach --eval_solved) and eval/pass@k (share of rows with
    one)."""
    rank, world = torch.distributed.get_rank(), utils.world_size()
    how = dict(num_generations=cfg.eval_generations, temperature=cfg.eval_temperature, purpose="eval")
    eval_cfg = replace(cfg, **how)
    seed_generator(run.generator, cfg, step, stream=1)

    async def of_row(row: dict) -> list[Trajectory]:
        settings = rollouts.sampled_by(row, eval_cfg)
        return await rollout(row, run.generator, run.reward_functions, settings, range(step, step + 1))

    async def sample() -> list[list[Trajectory]]:
        return await asyncio.gather(*map(of_row, run.held_out[rank::world]))

    groups = asyncio.run(sample())
    for number, group in zip(range(rank, len(run.held_out), world), groups, strict=True):
        for trajectory in group:
            trajectory.group = trajectory.info["row_number"] = number
    failed = check_failed(groups, cfg)["rollout/failed"]
    groups = [group for group in without_failed(groups) if group]
    metrics = {f"eval/{name}": value for name, value in eval_metrics(groups, cfg, rollouts.any_number).items()}
    metrics |= {"eval/failed": failed} if failed else {}
    shown = utils.gather_lists(evaluation_rows([group[0] for group in groups], cfg))
    if run.log:
        run.log.eval(step, metrics, shown)
    return metrics


def seed_generator(generator, cfg: TrainConfig, step: int, stream: int = 0) -> None:
    """Makes sampling in this process a function of the step, so that a resumed run repeats the uninterrupted one."""
    if cfg.generator == "hf":  # hashes of numbers are the same in every process
        generator.seed(hash((cfg.seed, step, stream, torch.distributed.get_rank())))


# ==== 11 before the loop: settings, data, everything loaded ==========================================================


def start(cfg: TrainConfig, make_critic: Callable | None) -> tuple[TrainConfig, Run]:
    """Loads everything a run needs, or resumes it, and pushes the first weights. Returns the final settings, too."""
    cfg, reward_functions, processor, rows, held_out = setup(cfg)
    getattr(make_critic, "check", lambda *_: None)(cfg, processor)  # ConfigError for settings it cannot work with
    rank, world, device = utils.init_distributed(cfg.dist_timeout)
    home = device  # where models are loaded; with --colocate:
    home = colocate.home(cfg, device)  # the CPU; the server sleeps from here on
    cfg, sizes = utils.computable(cfg, device), rollouts.group_sizes(rows, cfg)  # numbers of completions of the rows
    # Chooses --tokens_per_microbatch and --gradient_checkpointing, unless given, by the memory that is free.
    cfg = settings_by_memory(empty_policy, cfg, sizes, device, critic=make_critic is not None)
    memory, sampler = {}, None  # memory: shared by after_rollout and the sampler
    if not cfg.eval_only:
        order = data.Order.of(rows, cfg)
        sampler = PromptSampler(len(rows), cfg.prompts_per_step, cfg.seed, rank, world, memory, rows, order)
    cfg = replace(cfg, run_name=utils.gather_objects(name_run(cfg))[0])
    run_dir = Path(cfg.output_dir).resolve() / cfg.run_name  # a tool may change the working directory
    # The lock of the run's folder; steps done so far; a fingerprint of settings and rows to check when resuming.
    lock, first, made_with = resume.begin(cfg, rows, held_out)

    policy = load_policy(cfg, home)
    reference = load_reference(cfg, home)
    optimizer = check_optimizer(make_optimizer(policy, cfg), policy)
    critic = make_critic(cfg, home) if make_critic else None
    generator = make_generator(cfg, unwrapped(policy).hf_model, processor, device)
    modules = {"policy": (policy, optimizer)} | ({"reference": (reference, None)} if cfg.ref_sync_steps else {})
    modules |= {"critic": (critic.module, critic.optimizer)} if critic else {}

    state = {"num_tokens": 0, "beta": cfg.beta, "entropy_coef": cfg.entropy_coef, "score_moments": {}}
    if first:
        state |= checkpoints.load_checkpoint(run_dir, first, modules, memory)
        adapted = [("beta", cfg.kl_target), ("entropy_coef", cfg.entropy_target)]
        cfg = replace(cfg, **{name: state[name] for name, target in adapted if target is not None})
    state["made_with"], TRAINER_STATE.max_steps = made_with, cfg.max_steps
    # Only now, so that the run's folder stays untouched if the checkpoint cannot be loaded.
    log = RunLog(cfg, first or None, cfg.max_steps, lock) if rank == 0 else None
    if log:
        describe(cfg, policy, sizes, world)
        if cfg.log_completions:
            write_vocabulary(run_dir, processor)
    run = Run(
        rows=rows, held_out=held_out, reward_functions=reward_functions, processor=processor, sampler=sampler,
        device=device, run_dir=run_dir, log=log, first=first, state=state, memory=memory,
        policy=policy, optimizer=optimizer, reference=reference, critic=critic,
        modules=modules, generator=generator,
    )  # fmt: skip
    run.teacher = teachers.load(cfg, home, load_frozen)
    run.size = gpu.size_of(partial(empty_policy, cfg), device)
    # Compares packed rows with plain ones (returns cfg without --shared_prefix if they differ), pushes, and compares
    # the generator's log-probs with the policy's.
    cfg = first_push(run, cfg, all_logprobs, push_weights)
    return cfg, run


def setup(cfg: TrainConfig) -> tuple[TrainConfig, dict, object, Sequence[dict], list[dict]]:
    """Checks everything that can be checked before a process group, a GPU or a server is touched. Returns settings,
    reward functions, processor, training rows and held-out rows."""
    checks.check_functions(in_use(cfg), cfg)
    return settings_and_data(cfg, format_row, load_hf_model)


# ==== main ===========================================================================================================


def main(cfg: TrainConfig, make_critic: Callable | None = None, make_collector: type[Collector] | None = None) -> None:
    """Trains, and ends the process."""
    utils.run_and_exit(partial(train, cfg, make_critic, make_collector), cfg, close_all)


if __name__ == "__main__":
    main(CONFIG)
