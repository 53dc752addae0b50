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

Section 1 is the loop around it all; 8 the policy, its reference and optimizer; 10 the evaluation; 11 what comes before
the first step.

Where it differs from the papers and from TRL, on purpose:

    * The loss is a sum of per-token weights times per-token losses, the weights taken from counts over the whole
      optimizer update and all ranks: the gradient does not depend on how the update is cut into micro-batches or ranks.
    * A prompt is computed once for all its completions (`--shared_prefix`): same gradient, in less time.
    * Under grpo, dr_grpo and rloo a prompt with one completion has advantage 0 (others use its raw score).
    * No truncated sampling by default: top-k or top-p would bias the importance ratio.
    * With one update per step the ratio is 1, and a group-centred advantage sums to 0: watch `reward`, not `loss`.

Dimensions in comments: B completions of a batch, T tokens of the longest prompt + completion (column 0 is the prompt's
first token), G completions per prompt, N sampled tokens, V vocabulary; R rows of a forward pass (one where prompts are
shared), L their length. A data row is a dict of the data set (`rows`, in sections 2 and 3); a row of a tensor is a
completion.

What most functions get is a Batch (batch.py lists its fields): `loss_mask` [B, T] is 1 on sampled tokens (until
`leave_out`), `advantages` [B, T] are 0 on all others, and so are `rewards`, unless a rollout of yours puts some there;
`scores` [B] are as the reward functions gave them, `shaped_scores` [B] the same after --reward_mean, --reward_std and
--kl_in_reward; `groups` [B] says whose prompt a row has, rows of one prompt are adjacent.

A domain is one of several data sets in a run, with settings of its own: `cfg.of(row)` is the config of a
row's domain, `cfg.by_domain()` are all of them, `own` is one of them and `own.prefix` its name with a slash, for
metrics. Without --domains there is one: cfg itself, with the prefix "".
"""
# ruff: noqa: E402 - the command line is parsed before torch is imported, so that a wrong flag is reported at once

from config import ConfigError, TrainConfig, known_name, named, parse_args

# A knob of your own: here, above CONFIG; it needs no decorator.
# class TrainConfig(TrainConfig):
#     my_coef: float = 0.1  # what it does: the text of its --help
CONFIG = parse_args(TrainConfig, description=__doc__.split("\n")[0]) if __name__ == "__main__" else None

import asyncio
import contextlib
import inspect
import math
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import data
import rollouts
import teachers
import utils
from algorithms import checks, optimizers
from algorithms.advantages import MORE_ADVANTAGES, role_means, with_length_penalty
from algorithms.distillation import check_teacher, divergence, rewards_count
from algorithms.losses import MORE_LOSSES, has_no_ratio
from batch import (
    Batch,
    apart,
    by_domain,
    by_turn,  # noqa: F401 - for an advantage of your own, as turn_returns is
    center_and_scale,
    center_by_group,
    clip_stats,
    clipped_surrogate,
    collate,
    differ,
    group_index,
    group_mean,
    group_std,
    joined,
    log_ratio,
    normalize,  # noqa: F401
    placed,
    record,
    returns_to_go,
    row_mean,
    sequence_ratio,
    spread,
    start_record,
    turn_returns,  # noqa: F401
    whiten,
)
from envs import formats
from envs.tools import named_tools
from inputs import agreement, parameters, prompts, router_replay, vision
from inputs.attention import packed, take_packed_rows
from inputs.loading import autocasts, load_hf_model, share_adapters, to_train
from inputs.model import adapter_buckets, backbone, check_window, chunk_size, folded, is_lora, logits_of
from inputs.packing import balanced, micro_batches, minibatches, pack, with_blank
from inputs.processor import faults_named, load_processor, takes_images, with_template_kwargs
from inputs.trajectory import (
    Trajectory,
    empty_trajectory,
    failed_trajectory,
    known_scores,
    without_failed,
    without_unscored,
)
from plan import push_bucket_mb, settled
from rewards import TRAINER_STATE, RewardError, get_reward_functions, own_functions, score
from rollouts import ROLLOUTS  # noqa: F401 - for an entry of yours
from runlog import checkpoints, gpu, resume
from runlog.log import RunLog, clock, close_all, completion_rows, describe, evaluation_rows, name_run
from runlog.rollout_metrics import check_failed, counts_by_origin, eval_metrics, rollout_metrics, solved
from runlog.tokens import keeps_tokens, write_vocabulary
from safety import sandbox
from serving import servers

# ==== 1 the loop =====================================================================================================


@dataclass
class Run:
    """What a run works with, the same things from its first step to its last. `start` (section 11) makes one."""

    rows: Sequence[dict]  # of the training set
    held_out: list[dict]
    reward_functions: dict[str, Callable]
    processor: object  # the tokenizer; of a model that takes images the processor, which has one
    sampler: "PromptSampler | None"  # None where nothing is trained (--eval_only)
    generator: object  # samples: vLLM servers, or a copy of the model in this process
    policy: nn.Module  # wrapped by DDP or FSDP, to be called
    inner: "Policy"  # the same without its wrapper
    optimizer: torch.optim.Optimizer
    reference: nn.Module | None
    teacher: "tuple[nn.Module, Policy] | None"  # wrapped, and without
    critic: object | None  # train_ppo.py
    modules: dict[str, tuple]  # what a checkpoint keeps, by name: (module, its optimizer or None)
    rank: int
    device: torch.device
    run_dir: Path
    log: RunLog | None  # on rank 0
    first: int  # steps done before: above 0 in a resumed run
    state: dict  # numbers that checkpoints keep
    memory: dict  # of `after_rollout` and the prompt sampler; checkpoints keep it
    checks: list[Callable]  # cfg -> cfg: comparisons that have to wait until the trainer has the GPU (--colocate)
    size: tuple | None  # of the model, for perf/tflops (gpu.sizes); None without a GPU


def train(
    cfg: TrainConfig, make_critic: Callable | None = None, make_collector: "type[Collector] | None" = None
) -> dict:
    """The loop. Returns the metrics of this process's last evaluation (empty without one).

    make_critic: (cfg, device) -> an object with `module`, `optimizer` and `learn`, see train_ppo.py; make_collector: a
    kind of Collector, see train_async.py.
    """
    make_collector = make_collector or Collector
    make_collector.check(cfg)
    cfg, run = start(cfg, make_critic)
    collector = make_collector(run, cfg)
    saver = checkpoints.Saver(run.run_dir, cfg.save_total_limit)
    policy, generator, log, memory, state = run.policy, run.generator, run.log, run.memory, run.state
    pad_id = getattr(run.processor, "tokenizer", run.processor).pad_token_id or 0
    pushed = run.first  # version of the generator's weights: the training steps that made them
    collector.pushed(pushed, cfg)
    # Whether trainer and generator were seen to give the sampled tokens equal log-probs. With several updates a step
    # and no log-probs from before them, updates make a difference of their own: `first_push` alone compares then.
    agreed = cfg.old_logprobs != "recompute" and cfg.num_iterations * cfg.num_minibatches > 1

    def seed_generator(step: int, stream: int) -> None:
        if cfg.generator == "hf":  # a function of the step: a resumed run samples what the uninterrupted one did
            generator.seed(cfg.seed + 1_000_003 * (2 * step + stream + 1) + run.rank)

    def evaluation(step: int) -> dict:
        seed_generator(step, 1)
        metrics, shown = evaluate(run.held_out, generator, run.reward_functions, cfg, step)
        completions = utils.gather_lists(evaluation_rows(shown, run.reward_functions, cfg))
        if log:
            log.eval(step, metrics, completions)
        return metrics

    last_eval = evaluation(run.first) if cfg.eval_only or (cfg.eval_steps and run.first == 0) else {}
    for step in range(run.first, run.first if cfg.eval_only else cfg.max_steps):
        done = step + 1 == cfg.max_steps
        evaluates = bool(cfg.eval_steps) and ((step + 1) % cfg.eval_steps == 0 or done)
        saves = (bool(cfg.save_steps) and (step + 1) % cfg.save_steps == 0) or done
        logs = (step + 1) % cfg.log_steps == 0 or done
        with_tokens = logs and keeps_tokens(cfg, step + 1)
        learns = not run.critic or step >= cfg.critic_warmup  # a new critic learns alone at first
        metrics: dict[str, float] = {}
        with clock(metrics, "step"):
            # What reward functions are told of the run, as in TRL.
            TRAINER_STATE.global_step, TRAINER_STATE.epoch = step, step * cfg.prompts_per_step / len(run.rows)
            seed_generator(step, 0)
            trajectories, collected = collector.take(step, pushed, cfg)
            if cfg.colocate:  # from here until the push, which wakes the server, the trainer has the GPU
                generator.sleep()
                parameters.move(run, run.device)
                for check in run.checks if step == run.first else ():
                    cfg = check(cfg)
            metrics |= rollout_metrics(trajectories, cfg) | collected
            metrics |= {"beta": cfg.beta, "entropy_coef": cfg.entropy_coef, "policy_lag": step - pushed}
            trajectories, numbers = checks.with_numbers(after_rollout(trajectories, memory, step, cfg), trajectories)
            metrics |= numbers
            trajectories = sorted(trajectories, key=lambda t: t.group)
            metrics |= (foreign := counts_by_origin(trajectories))  # of all ranks
            batch = collate(trajectories, pad_id, run.device, run.rank, step)
            as_sampled = replace(cfg, temperature=settings_at(step, cfg).temperature)
            metrics |= teachers.add(batch, run, trajectories, pad_id, as_sampled, all_logprobs)
            with clock(metrics, "logprobs"):
                add_logprobs(batch, policy, run.reference, run.inner, as_sampled)
            metrics |= shape_rewards(batch, cfg, state["score_moments"])
            metrics |= run.critic.learn(batch, cfg, step) if run.critic else {}
            metrics |= add_advantages(batch, cfg)
            batch.extras |= checks.prepared(POLICY_LOSSES[cfg.policy_loss], batch, cfg)
            metrics |= checks.logged(leave_out(batch, trajectories, cfg) or {}, batch)
            if with_tokens and learns:
                start_record(batch)
            with clock(metrics, "update"):
                metrics |= update(policy, run.optimizer, batch, as_sampled, step) if learns else {}
                metrics |= router_replay.metrics(run.inner.routing, batch, cfg)
            if learns and run.size:
                metrics |= gpu.gpu_metrics(run.size, trajectories, cfg, metrics["time/update"], run.device)
            if not foreign and not agreed and "sampling/logprob_diff_mean" in metrics:
                utils.check_agreement(metrics["sampling/logprob_diff_mean"], cfg)
                agreed = True  # by the first step whose tokens all come from this run's weights
            with clock(metrics, "push"):
                if cfg.colocate:
                    parameters.move(run, torch.device("cpu"))
                # Before a checkpoint, too: a resumed run pushes the weights it has loaded and samples from those.
                if (step + 1) % cfg.push_steps == 0 or evaluates or saves:
                    push_weights(policy, generator, pushed := step + 1, cfg.push_bucket_mb)
                    collector.pushed(pushed, cfg)
            cfg = adapt(cfg, metrics) if learns else cfg
            if cfg.ref_sync_steps and (step + 1) % cfg.ref_sync_steps == 0:
                move_towards(run.reference, policy, cfg.ref_sync_alpha)
        saver.poll(memory)  # a checkpoint that could not be written ends the run, and a memory that none can keep
        state |= {"num_tokens": state["num_tokens"] + metrics["num_tokens"]}
        state |= {"beta": cfg.beta, "entropy_coef": cfg.entropy_coef}
        metrics["num_tokens"] = state["num_tokens"]
        if logs:
            means = row_mean(batch.advantages, batch.loss_mask)[:, 0].tolist()
            rewards = [sum(t.token_rewards) for t in trajectories]
            rows = completion_rows(trajectories, rewards, means, batch, with_tokens)
            completions = utils.gather_lists(rows)
            if log:
                log.step(step + 1, metrics, completions)
        if evaluates:  # before saving, so that a resumed run has it
            last_eval = evaluation(step + 1)
        if saves:
            weights, adapter = saved_weights(policy, run.inner, cfg, generator.weight_dtype)
            saver.save(step + 1, run.modules, run.inner.hf_model, weights, run.processor, state, memory, adapter)

    saver.wait()
    collector.close()
    generator.close()
    if log:
        log.close()
        if cfg.push_to_hub:
            checkpoints.push_to_hub(run.run_dir, cfg.max_steps, cfg.push_to_hub)
    return last_eval


def adapt(cfg: TrainConfig, metrics: dict) -> TrainConfig:
    """beta and entropy_coef for the next step, from this one's KL and entropy, if it had any."""
    if cfg.kl_target is not None and "kl" in metrics:  # Ziegler et al., 1909.08593 sec. 2.2
        error = min(max(metrics["kl"] / cfg.kl_target - 1, -0.2), 0.2)
        count = metrics.get("completions/count", cfg.sequences_per_step)
        cfg = replace(cfg, beta=cfg.beta * (1 + error * count / 10_000))
    if cfg.entropy_target is not None and "entropy" in metrics:
        change = 0.0005 if metrics["entropy"] < cfg.entropy_target else -0.0005
        cfg = replace(cfg, entropy_coef=max(cfg.entropy_coef + change, 0.0))
    return cfg


# ==== 2 prompts ======================================================================================================


def format_row(row: dict) -> dict:
    """Edit me: a row of your data set, of either split -> a dict with `prompt` (string or chat messages) and whatever
    rewards need. It returns a row in any case: to leave some out, give a function of rows as --dataset_id."""
    return row


class PromptSampler:
    """Which rows a step takes: each once an epoch, in an order made from (seed, epoch), but for what is too little for
    a step at an epoch's end; the rows of a step are distinct. Ranks take contiguous shares of one global order
    (data.Order).

    Edit me: `next` may return any `share` rows, for example those that a column of `rows` or `memory` says are hard; a
    row may come twice. `memory` is a dict of this rank: `after_rollout` (section 3) can fill it, and checkpoints keep
    it. For one order over all ranks, fill it from all of them (utils.gather_objects).
    """

    def __init__(self, num_rows: int, prompts_per_step: int, seed: int, rank=0, world_size=1, memory=None):
        data.check_step_size(num_rows, prompts_per_step, world_size)
        self.num_rows, self.prompts_per_step, self.seed = num_rows, prompts_per_step, seed
        self.rank, self.share, self.rows = rank, prompts_per_step // world_size, ()  # the data rows, set at start
        self.memory = {} if memory is None else memory
        self.order = data.Order([num_rows], [1], prompts_per_step, seed)

    def next(self, step: int) -> list[int]:
        """This rank's row numbers of a training step (from 0): prompts_per_step / world_size distinct ones."""
        return self.order.step(step)[self.rank * self.share : (self.rank + 1) * self.share].tolist()

    def extra(self, step: int, round: int, count: int) -> list[int]:
        """`count` further rows for a step of this rank, in place of prompts without signal: random ones, the same for
        the same (seed, step, round, rank). They may be in the step already."""
        random = np.random.default_rng([self.seed, step, round, self.rank, 0xD1CE])  # another stream than the order's
        return self.order.extra(random, step, self.rank * self.share, count).tolist()


# ==== 3 rollout and scoring ==========================================================================================


class Collector:
    """Samples each step when the loop asks for it. train_async.py has one that works ahead."""

    @staticmethod
    def check(cfg: TrainConfig) -> None:
        """ConfigError for settings with which it cannot work."""

    def __init__(self, run: Run, cfg: TrainConfig):
        self.run = run

    def pushed(self, version: int, cfg: TrainConfig) -> None:
        """Called after each push, of the weights after `version` training steps; there is nothing to do here."""

    def take(self, step: int, version: int, cfg: TrainConfig) -> tuple[list[Trajectory], dict]:
        """The trajectories of a step and their metrics. version: of the weights that sample."""
        run, versions = self.run, range(version, version + 1)
        sampled = sample_step(run.rows, run.sampler, step, run.generator, run.reward_functions, cfg, versions)
        return collect(run.rows, *asyncio.run(sampled), cfg)

    def close(self) -> None:
        """Called at the end of the run."""


def sample_step(
    rows: list[dict], sampler, step: int, generator, reward_functions: dict, cfg: TrainConfig, versions=None
) -> Awaitable[tuple[list[tuple], dict]]:
    """Draws the prompts of a step when it is called, not in the background: after_rollout may change what `next` reads.
    Awaiting what it returns samples them (`sample_rows`).

    sampler: the prompt sampler. versions: of the weights that may have sampled, a range; None: `step` alone.
    """
    rounds = cfg.resample_rounds if cfg.dynamic_sampling else 0
    first = list(sampler.next(step))
    further = [number for round in range(rounds) for number in sampler.extra(step, round, len(first))]
    return sample_rows(rows, first, further, generator, reward_functions, cfg, versions or range(step, step + 1), step)


async def sample_rows(
    rows: list[dict], first: list[int], further: list[int], generator, reward_functions: dict, cfg, versions, step=0
) -> tuple[list[tuple], dict]:
    """What this rank samples for a step: [(group, whether it is silent, its times)] in the order in which prompts were
    drawn; and counts: groups resampled, silent and unused.

    first, further: numbers of the rows that were drawn, and of those in place of silent groups.
    --dynamic_sampling (DAPO, 2503.14476 sec. 3.2): `enough_of_each` replaces silent groups, at most --resample_rounds
    times as many as are wanted, by others of the same domain. Baselines (remax) are the scores of a greedy completion
    of each prompt. Nothing here talks to other ranks: train_async.py runs it in the background.
    """
    begun = time.perf_counter()

    async def sample(number: int) -> tuple[list[Trajectory], bool, dict]:
        own = settings_at(step, cfg.of(rows[number]))
        greedy = replace(own, num_generations=1, temperature=0.0, purpose="baseline")
        several = [own, greedy] if "baselines" in needs(cfg) else [own]
        calls = (rollout([rows[number]], generator, reward_functions, each, versions) for each in several)
        (groups, seconds), *others = await asyncio.gather(*calls)
        (group,) = groups  # there is one row
        seconds["time/generate"] = time.perf_counter() - begun - seconds["time/score"]  # from the start of the step
        for trajectory in group:
            trajectory.info["row_number"] = number
        for greedy_groups, _ in others:
            with_baseline(group, greedy_groups[0][0])
        return group, cfg.dynamic_sampling and not has_signal(group, own), seconds

    return await rollouts.enough_of_each(sample, first, further, lambda number: cfg.of(rows[number]).domain, cfg)


def settings_at(step: int, cfg: TrainConfig) -> TrainConfig:
    """Edit me: what a step is sampled and scored with, where that changes by step: replace(cfg, temperature=...), or
    max_completion_length. Sampling alone sees it, no evaluation and no loss; only the temperature is the policy's, too.
    cfg: the run's, or that of a row's domain."""
    return cfg


def with_baseline(group: list[Trajectory], greedy: Trajectory) -> None:
    """Tell the group the score of a greedy completion of its prompt (the group's mean where that has none), or that it
    failed."""
    baseline = fmean(known_scores([greedy]) or known_scores(group) or [0.0])
    for trajectory in group:
        trajectory.info["baselines"] = baseline
        trajectory.info |= {key: value for key, value in greedy.info.items() if key == "failure"}


async def rollout(
    rows: list[dict], generator, reward_functions: dict, cfg: TrainConfig, versions: range | None = None
) -> tuple[list[list], dict]:
    """Sample and score. What is sampled together is scored while the rest is still being sampled.

    versions: of the weights that may have sampled the tokens; None: not checked. Returns each row's trajectories,
    exactly as many as asked for (unless the rollout says `any_number`), including those that failed (info["failure"]),
    and two times in seconds: until the last token was sampled, and how much longer scoring took.
    """
    start, ended_at = time.perf_counter(), []

    async def together(row: dict, cfg: TrainConfig) -> list[Trajectory]:  # cfg: of the row's domain, for this part
        trajectories = await rollouts.call_rollout(row, generator, cfg)
        ended_at.append(time.perf_counter())
        played = [t for t in trajectories if "failure" not in t.info]
        if versions is not None:
            utils.check_fresh(played, versions, cfg.generator)
        scored = asyncio.ensure_future(score(played, own_functions(reward_functions, cfg), cfg, generator.tokenizer))
        try:
            # A teacher's prompt may show the rewards: then it waits for `scored`.
            await asyncio.gather(scored, teachers.tell(played, generator, cfg, scored))
        except RewardError as error:
            trajectories = [failed_trajectory(t.row, t.group, error) for t in trajectories]
        for trajectory in trajectories if cfg.domain else ():
            trajectory.info["domain"] = cfg.domain
        return trajectories

    # A group is sampled in one call; or in one call per completion, scored as it ends, if the rollout and every reward
    # say `per_trajectory`. A part is the config of a call: [cfg], or G x [cfg with num_generations=1]. First parts go
    # first.
    configs = [rollouts.sampled_by(row, cfg) for row in rows]  # of their domains, with their own num_generations
    divided = [rollouts.scored_together(own, own_functions(reward_functions, own)) for own in configs]
    calls = [(i, part) for parts in zip_longest(*divided) for i, part in enumerate(parts) if part]
    groups: list[list[Trajectory]] = [[] for _ in rows]
    parts = await asyncio.gather(*(together(rows[i], part) for i, part in calls))
    for (i, _), trajectories in zip(calls, parts, strict=True):
        groups[i] += trajectories
    seconds = {"time/generate": max(ended_at) - start, "time/score": time.perf_counter() - max(ended_at)}
    return groups, seconds


def has_signal(group: list[Trajectory], cfg: TrainConfig) -> bool:
    """Whether there is anything to learn from a group: its scores differ, and their mean lies in the window. Where a
    teacher is all that counts there is."""
    if cfg.has_teacher and not rewards_count(cfg):
        return any("failure" not in t.info for t in group)
    known = known_scores(group)
    if not known:
        return False
    mean = fmean(known)
    # A single completion that was asked for has signal, a single survivor of several has none.
    differs = len(group) == 1 or (len(known) > 1 and stdev(known) > 1e-6 * max(abs(mean), 1))
    return differs and cfg.group_mean_min <= mean <= cfg.group_mean_max


def collect(rows: list[dict], sampled: list[tuple], counts: dict, cfg: TrainConfig) -> tuple[list, dict]:
    """What `sample_step` returned -> this rank's trajectories of the step, without those that failed or lack a score
    beside others of their prompt, and metrics.

    Ranks exchange groups so that none has many more tokens than the others, which would wait for it.
    """
    utils.wait_for_ranks(cfg.dist_timeout)  # here, where completions of other lengths part them
    groups, _, seconds = (list(column) for column in zip(*sampled, strict=True))
    generate = max(spent["time/generate"] for spent in seconds)
    whole = max(sum(spent.values()) for spent in seconds)
    played = [group for group in without_failed(groups) if group]
    kept = without_unscored(played)
    counts = {f"dynamic_sampling/{name}": n for name, n in counts.items()} if cfg.dynamic_sampling else {}
    counts["rollout/unrewarded"] = sum(map(len, played)) - sum(map(len, kept))
    metrics = {"time/generate": generate, "time/score": whole - generate} | check_failed(groups, cfg, counts)
    groups, moved = balanced(kept)
    for number, group in enumerate(groups):
        for trajectory in group:
            trajectory.group = number
    # A rank that is left with nothing gets a trajectory without a sampled token: a stand-in, which counts for nothing.
    return sum(groups, []) or [empty_trajectory(rows[0], cfg)], metrics | moved


def after_rollout(trajectories: list[Trajectory], memory: dict, step: int, cfg: TrainConfig) -> list[Trajectory]:
    """Edit me: look at what a step has sampled, and change what it learns from. Returns this rank's trajectories, at
    least one; or (trajectories, {name: numbers to log}), see section 5.

    `memory` is a dict of yours, on each rank, that checkpoints keep: tensors, numbers and arrays, texts, trajectories,
    lists and dicts of them. The prompt sampler sees it, too. A trajectory knows its row, t.row, its number among the
    rows in use, t.info["row_number"], and its score, sum(t.token_rewards). Where all of a rank's trajectories failed,
    there is a placeholder with row_number -1. Numbers in t.info["extras"], {name: one, or a list with one for each of
    token_ids}, come as batch.extras[name]. load_processor(cfg.model_id) is the tokenizer or processor.

    Rewards that are changed here (at a trajectory's last index with loss_mask 1) count for what is learned (not
    under gdpo, which has each function's); `reward` and other metrics, and --dynamic_sampling, have seen them before.

    Trajectories that were not sampled in this step may be added: remembered ones (without images), or demonstrations,
    whose `logprobs` are nan, as no generator sampled them: Trajectory(row, group, prompt_ids, token_ids, [1] * n,
    [math.nan] * n, [0.0] * (n - 1) + [score], info={"origin": "demonstration"}). `group` puts one among the completions
    of a prompt: a remembered one has that of its own step, so replace(t, group=...), and alone in a group it has
    advantage 0 under most. info["origin"] = "replay" marks it in the completions, and it counts as rollout/replay.
    """
    return trajectories


# ==== 4 log-probs ====================================================================================================


def add_logprobs(batch: Batch, policy: nn.Module, reference, inner: "Policy", cfg: TrainConfig) -> None:
    """Only the log-probs that are needed before the first update: with one update a step and nothing that reads old
    log-probs the ratio is 1 by construction, and no forward pass is made."""
    several = cfg.num_iterations * cfg.num_minibatches > 1 and cfg.old_logprobs == "recompute"
    asked = needs(cfg)
    inner.squares = "sum_pi_squared" in asked  # a pass over [n, V], which updates do not need
    of_policy = asked & {"old_logprobs", "entropy", "sum_pi_squared"}
    if several or normalises(cfg) or cfg.kl_in_reward or cfg.top_entropy_quantile < 1 or of_policy:
        batch.old_logprobs, batch.entropy, squares = all_logprobs(policy, batch, cfg)
        batch.sum_pi_squared = squares if inner.squares else None
    inner.squares = False
    if reference is not None:
        batch.ref_logprobs = all_logprobs(reference, batch, cfg)[0]
    elif cfg.beta > 0 or "ref_logprobs" in asked:
        seen = replace(batch, routed_experts=None)  # the reference chooses its experts itself
        with inner.model.disable_adapter():
            batch.ref_logprobs = all_logprobs(policy, seen, cfg)[0]


@torch.no_grad()
def all_logprobs(policy: nn.Module, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, Tensor, Tensor]:
    """`compute_logprobs` of the whole batch without gradient, micro-batch by micro-batch.  [B, T] each"""
    set_temperature(policy, cfg)
    out, (whole, batch) = [], (batch, apart(batch))
    for rows in micro_batches(batch, cfg):  # row numbers; empty where other ranks have more passes
        parts = compute_logprobs(policy, batch.select(rows or [0]), cfg)  # cut to the longest of them
        out = out or [part.new_zeros(*batch.loss_mask.shape, *part.shape[2:]) for part in parts]
        for kept, values in zip(out, parts if rows else (), strict=False):
            kept[rows, : values.shape[1]] = values
    return tuple(joined(values, batch, whole) for values in out)


def compute_logprobs(policy: nn.Module, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the sampled tokens; entropy and sum of squared probabilities at their places. 0 elsewhere.

    With gradient (the entropy only if something in the loss reads it).  [B, T] each
    """
    where = batch.loss_mask.nonzero(as_tuple=True)  # the N sampled tokens
    # The model's inputs, rows and columns [N] of the hidden states that predict them, and targets [N], in that order.
    *inputs, targets = pack(batch, cfg)
    if batch.teacher_top is not None:  # beside the sampled token those that a teacher finds likeliest
        targets = torch.cat([targets[:, None], batch.teacher_top[where]], 1)  # [N, 1 + k]

    def placed_back(values: Tensor) -> Tensor:  # [N, ...] -> [B, T, ...]
        return values.new_zeros(*batch.loss_mask.shape, *values.shape[1:]).index_put(where, values)

    logprobs, *others = policy(*inputs, targets)  # [N] each
    if logprobs.ndim > 1:
        batch.top_logprobs, logprobs = placed_back(logprobs[:, 1:]), logprobs[:, 0]
    if batch.record is not None and torch.is_grad_enabled():
        record(batch, where, logprobs, others[0])  # for the run's tokens; overwrites an earlier pass's
    return tuple(map(placed_back, (logprobs, *others)))


def set_temperature(policy: nn.Module, cfg: TrainConfig) -> None:
    """The policy below its wrapper computes at the temperature of cfg."""
    getattr(policy, "module", policy).temperature = cfg.temperature


# ==== 5 advantages: (batch, cfg) -> [B, T], or ([B, T], statistics {name: number}) ===================================


# An advantage or a policy loss is a plain function. What the loop has to know of it, it says as attributes:
#
#     mine.needs = ("entropy",)         fields of Batch computed beforehand, constants without gradient: old_logprobs,
#                                       ref_logprobs, entropy, sum_pi_squared, baselines (score of a greedy completion),
#                                       teacher_logprobs, teacher_top (of a teacher's likeliest tokens: --distill_topk),
#                                       current_logprobs (before this very update; for losses and own_term)
#     mine.prepare = function           (batch, cfg) -> {name: a number, or a tensor [B] or [B, T]}: what needs whole
#                                       groups or all ranks, computed once a step and found as batch.extras[name], which
#                                       is cut into micro-batches like the rest. An advantage's `prepare` runs before
#                                       there are advantages, that of a loss after, both before `leave_out`; that of
#                                       own_term before each update, on the rows of this update
#     mine.compares_group = False       an advantage that works with one completion a prompt (default True); may be a
#                                       function cfg -> bool
#     mine.choose = function            selects the tokens that a loss treats differently, once per update, before it is
#                                       cut (costs a forward pass): (logprobs, batch, cfg) -> Batch.chosen [B, T]
#     mine.check = function             (cfg) -> why it cannot work with these settings, or None
#
# `needs`, `prepare` and `check` can be set on `own_term`, too; `needs` and `check` on a KL estimator, which sees no
# batch.
#
# Numbers to log, of an advantage, `after_rollout` and `leave_out`, are {name: value}. A value has a number for each
# completion [B] or token [B, T] (with loss_mask 1), or for whatever else; a single number stands for all completions
# of its rank. Logged is the mean of all on all ranks; where the name ends in _sum their sum, in _max the largest.


def shape_rewards(batch: Batch, cfg: TrainConfig, moments: dict[str, list[float]]) -> dict:
    """Normalises scores, then subtracts beta * KL from each token's reward (RLHF). batch.scores stay as they were
    given; batch.shaped_scores, the sums of batch.rewards, follow.

    moments: count, sum and sum of squares of all scores so far, by domain ("" without any); brought up to date.
    """
    batch.given_scores = batch.rewards.sum(1)  # what batch.scores are from here on; shaped_scores follow batch.rewards
    normalised = (cfg.reward_mean, cfg.reward_std) != ("none", "none")
    # A rank without rows of a domain gets some row as `part`, so that it joins the collectives; it contributes 0.
    for own, rows, part in by_domain(batch, cfg) if normalised else ():
        running = utils.running_moments(part.scores, moments.setdefault(own.domain, [0.0] * 3))
        center, scale = center_and_scale(part.scores, part.groups, cfg.reward_mean, cfg.reward_std, running)
        last = (part.loss_mask * torch.arange(part.loss_mask.shape[1], device=scale.device)).argmax(1)
        rewards = part.rewards / scale[:, None]
        # Once per completion: the score is the sum of its row, and the outcome's reward is on the last token.
        rewards[torch.arange(len(part)), last] -= (center / scale).to(scale.dtype)
        batch.rewards = placed(rewards, rows, batch.rewards)
    if cfg.length_penalty:
        batch.rewards = with_length_penalty(batch, is_solved(batch, cfg), cfg.length_penalty)
    if cfg.advantage == "rae":
        batch.baselines = role_means(batch, moments.setdefault("rae", {}))
    if not cfg.kl_in_reward:
        return {}
    kl = KL_ESTIMATORS[cfg.kl](batch.old_logprobs, batch.ref_logprobs) * batch.loss_mask
    batch.rewards = batch.rewards - cfg.beta * kl
    return {"kl": float(utils.global_mean(kl, batch.loss_mask))}


def add_advantages(batch: Batch, cfg: TrainConfig) -> dict:
    """Fills in batch.advantages. Returns statistics: mean size, share of completions in groups where all are 0."""
    batch.extras |= checks.prepared(ADVANTAGES[cfg.advantage], batch, cfg)
    whole, stats = torch.zeros_like(batch.rewards), {}
    for own, rows, part in by_domain(batch, cfg):  # statistics over "batch" cover the rows of one domain
        advantages, numbers = checks.computed(ADVANTAGES[cfg.advantage], part, own)
        whole = placed(advantages, rows, whole)
        stats |= checks.logged({own.prefix + name: value for name, value in numbers.items()}, part)
    batch.advantages = whole
    size = (batch.advantages.abs() * batch.loss_mask).sum(1)  # [B]
    silent = (group_mean(size, batch.groups) == 0).double()
    there = torch.full_like(silent, not batch.stand_in)  # [B] 0: the row counts for nothing
    return stats | {
        "advantages/abs_mean": float(utils.global_mean(batch.advantages.abs(), batch.loss_mask)),
        "advantages/frac_zero_groups": float(utils.global_mean(silent, there)),
    }


# batch is this rank's share of the step, in whole groups. group_mean, group_std, center_by_group and group_index look
# at this rank alone; whiten and normalize take all ranks together, so every rank has to call them.


def grpo(batch: Batch, cfg: TrainConfig) -> Tensor:
    """(s - group mean) / (std + 1e-6), std as --scale_rewards says.  DeepSeekMath (2402.03300) sec. 4.1.2.  [B, T]"""
    scores, groups = batch.shaped_scores, batch.groups
    mean, std = group_mean(scores, groups), torch.zeros_like(scores)  # [B] each
    if cfg.scale_rewards == "group":
        std = group_std(scores, groups)
    if cfg.scale_rewards == "batch":  # of all ranks: a rank's own would change the algorithm with their number
        std = std + utils.global_moments(scores)[2]
    scale = torch.where(differ(std, mean), std + 1e-6, 1.0)  # a std that is rounding alone divides nothing
    return spread(((scores - mean) / scale).to(scores.dtype), batch.loss_mask)


def dr_grpo(batch: Batch, cfg: TrainConfig) -> Tensor:
    """s - group mean: the std over-weights nearly solved and nearly hopeless prompts.  2503.20783 sec. 3.  [B, T]"""
    return spread(center_by_group(batch.shaped_scores, batch.groups), batch.loss_mask)


def rloo(batch: Batch, cfg: TrainConfig) -> Tensor:
    """s - mean of the other n - 1 scores = (s - mean) n / (n - 1).  REINFORCE leave-one-out, 2402.14740.  [B, T]"""
    _, size = group_index(batch.groups)  # [B] completions of each row's group
    others = center_by_group(batch.shaped_scores, batch.groups) * size / (size - 1).clamp(min=1)
    return spread(others, batch.loss_mask)


def reinforce_plus_plus(batch: Batch, cfg: TrainConfig) -> Tensor:
    """Discounted reward to go, whitened over the step's tokens: no groups needed.  2501.03262.  [B, T]"""
    return whiten(returns_to_go(batch, cfg.gamma), batch.loss_mask)


reinforce_plus_plus.compares_group = False


ADVANTAGES: dict[str, Callable[[Batch, TrainConfig], Tensor | tuple[Tensor, dict]]] = {
    "grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "reinforce_plus_plus": reinforce_plus_plus, **MORE_ADVANTAGES,
}  # fmt: skip


def leave_out(batch: Batch, trajectories: list[Trajectory], cfg: TrainConfig) -> dict:
    """Edit me: what is sampled and compared, but not learned from. Completions are taken out of loss_mask and
    advantages, tokens of low entropy (--top_entropy_quantile) out of the advantages only. Returns {name: numbers to
    log}, see section 5."""
    rows = [t.row for t in trajectories]
    keep = torch.tensor([not (cfg.mask_truncated and t.finish_reason == "length") for t in trajectories])
    scores, groups = torch.tensor([sum(t.token_rewards) for t in trajectories]).double(), batch.groups.cpu()
    mean = group_mean(scores, groups)  # [B]
    filters = [(own.group_mean_min, own.group_mean_max) for own in map(cfg.of, rows)]
    lowest, highest = torch.tensor(filters, dtype=torch.float64).unbind(1)  # [B] each
    keep &= (mean >= lowest) & (mean <= highest)  # neither too hard nor too easy
    # Groups of equal scores stay, as a KL or an entropy may learn from them.
    # A filter of yours goes here: keep &= ...  [B], bool, on the CPU
    batch.loss_mask = batch.loss_mask * keep.to(batch.loss_mask.device)[:, None]
    batch.advantages = batch.advantages * batch.loss_mask
    if cfg.top_entropy_quantile < 1:  # 2506.01939: the few tokens where the path forks carry the learning
        values = torch.cat(utils.gather_objects(batch.entropy[batch.loss_mask > 0].cpu())).sort(descending=True).values
        if len(values):
            fork = values[max(math.ceil(cfg.top_entropy_quantile * len(values)), 1) - 1]  # the entropy threshold
            batch.advantages = batch.advantages * (batch.entropy >= fork.to(batch.entropy.device))
    return {}


# ==== 6 policy losses: (logprobs [B, T], batch, cfg) -> loss per token [B, T], statistics {name: [B, T]} =============


# A loss always gets the run's cfg, as a micro-batch may hold several domains; an advantage gets its domain's. It is
# called once or twice for each micro-batch: what it knows of earlier steps comes from `prepare` (docs/ideas.md).
# What a loss returns for prompts and padding does not matter; for sampled tokens it has to be finite. A statistic is
# logged as its mean over the tokens that are learned from (a micro-batch without it counts as 0), one whose name ends
# in _max as its maximum. A value for each row counts once for each of its tokens.


def ppo(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), r the importance ratio of each token (1707.06347 eq. 7).
    --dual_clip c bounds it by -A c where A < 0 (1912.09729 eq. 5): no gradient where that binds.  [B, T]
    """
    advantages, ratio = batch.advantages, log_ratio(logprobs, batch).exp()  # [B, T] each; 1 at the first update
    clipped = ratio.clamp(1 - cfg.epsilon, 1 + cfg.epsilon_high)
    loss = torch.max(-advantages * ratio, -advantages * clipped)
    low = (ratio < 1 - cfg.epsilon) & (advantages < 0)  # the clip binds only where it makes the loss larger
    high = (ratio > 1 + cfg.epsilon_high) & (advantages > 0)
    if cfg.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.min(loss, -advantages * cfg.dual_clip), loss)
    return loss, clip_stats(low, high)


def gspo(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """One ratio per sequence, exp(mean log-ratio), clipped.  2507.18071 eq. 5-7.  [B, T]"""
    return clipped_surrogate(sequence_ratio(logprobs, batch), batch, cfg)


def cispo(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """-sg(clip(ratio)) A log pi: the weight is clipped, every token keeps its gradient.  2506.13585 eq. 4.  [B, T]"""
    ratio, low, high = log_ratio(logprobs, batch).exp().detach(), 1 - cfg.epsilon, 1 + cfg.epsilon_high
    return -ratio.clamp(low, high) * batch.advantages * logprobs, clip_stats(ratio < low, ratio > high)


def reinforce(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """-A log pi, no ratio: the plain policy gradient, Williams 1992.  [B, T]"""
    return -batch.advantages * logprobs, {}


reinforce.check = has_no_ratio  # refuses --old_logprobs sampler: there is no ratio to put them into


POLICY_LOSSES: dict[str, Callable[[Tensor, Batch, TrainConfig], tuple[Tensor, dict]]] = {
    "ppo": ppo, "gspo": gspo, "cispo": cispo, "reinforce": reinforce, "gpg": reinforce, **MORE_LOSSES,
}  # fmt: skip


def straight_through(value: Tensor, gradient_of: Tensor) -> Tensor:
    """The value of `value` with the gradient of `gradient_of`."""
    return gradient_of - gradient_of.detach() + value.detach()


# KL(pi || ref) per token from one sample, x = log pi - log ref (J. Schulman, "Approximating KL divergence", 2020). As a
# loss, of the first four only k2 has the gradient of the KL; k1+ and k3+ have the value of k1 and k3 with it. Every
# estimator gets whole rows [B, T], prompts included: a KL that depends on a token's place belongs in `micro_loss` or
# `own_term`.
KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": lambda logprobs, ref: (logprobs - ref).clamp(-20, 20),  # unbiased, high variance; as a loss: no KL gradient
    "abs": lambda logprobs, ref: (logprobs - ref).clamp(-20, 20).abs(),
    "k2": lambda logprobs, ref: (logprobs - ref).clamp(-20, 20) ** 2 / 2,  # biased value, right gradient
    "k3": lambda logprobs, ref: (y := (ref - logprobs).clamp(-20, 20)).exp() - y - 1,  # unbiased, >= 0 (GRPO); y = -x
    "k1+": lambda logprobs, ref: straight_through(*(KL_ESTIMATORS[k](logprobs, ref) for k in ("k1", "k2"))),
    "k3+": lambda logprobs, ref: straight_through(*(KL_ESTIMATORS[k](logprobs, ref) for k in ("k3", "k2"))),
}


def own_term(logprobs: Tensor, _: Tensor, part: Batch, cfg: TrainConfig) -> tuple[Tensor | None, dict]:
    """Edit me: a term of your own beside the policy loss, such as likelihood of good completions in the first steps.

    Gets log-probs [B, T] of the sampled tokens with gradient, their entropy [B, T], and the micro-batch: `part.rows`
    are its data rows, `part.step` the step, `part.scores` [B] the scores as the reward functions gave them. The entropy
    has a gradient, which costs memory, if you call that argument `entropy`.
    Returns the loss per token [B, T] (or None), to which --loss_agg applies, and statistics like a policy loss. With
    `own_term.weights = "sum"` below it, it is added up as it is: a term of completions or pairs divides by their number
    over all ranks, which `prepare` finds. What else it needs it says as other functions do (section 5).
    """
    return None, {}


def token_weights(loss_mask: Tensor, mode: str, *, num_tokens, num_sequences, max_tokens) -> Tensor:
    """What each token's loss counts for: loss = (weights * per_token_loss).sum().  [B, T] -> [B, T]

    num_tokens, num_sequences: loss tokens, and completions with a loss token, of the *whole* optimizer update over all
    ranks, so that the gradient cannot depend on how the update is cut. "constant" counts completions without a loss
    token, too.
    max_tokens: the constant of Dr. GRPO, the longest completion allowed.
    """
    if mode == "token_mean":  # every token alike (DAPO, 2503.14476 eq. 8)
        return loss_mask / max(num_tokens, 1)
    if mode == "seq_mean":  # every completion alike (GRPO, 2402.03300 eq. 3)
        return loss_mask / loss_mask.sum(1, keepdim=True).clamp(min=1) / max(num_sequences, 1)
    if mode == "seq_sum":
        return loss_mask / max(num_sequences, 1)
    if mode == "prompt_mean":  # every prompt alike, in it every token; num_tokens [B, 1]: those of the row's prompt
        return loss_mask / num_tokens.clamp(min=1) / max(num_sequences, 1)
    if mode == "constant":  # no length in it at all (Dr. GRPO, 2503.20783 sec. 3.1)
        return loss_mask / (max(num_sequences, 1) * max_tokens)
    raise ValueError(f"loss_agg {mode!r}: known are token_mean, seq_mean, seq_sum, prompt_mean, constant")


def weights_of(part: Batch, cfg: TrainConfig, counts: dict) -> Tensor:
    """`token_weights` of a micro-batch: of prompt_mean with the tokens of each row's prompt, of seq_mean with those of
    the completion that a row is part of.  [B, T]"""
    if "divided_by" in part.extras:
        counts = counts | {"num_tokens": part.extras["divided_by"][:, None]}
        return token_weights(part.loss_mask, "prompt_mean", **counts)
    return token_weights(part.loss_mask, cfg.loss_agg, **counts)


# ==== 7 update =======================================================================================================


def update(policy: nn.Module, optimizer, batch: Batch, cfg: TrainConfig, step: int, loss_of=None) -> dict:
    """num_iterations passes of num_minibatches optimizer updates. Returns metrics, the same on every rank."""
    total, norms = defaultdict(float), []
    parts = [batch] if cfg.num_minibatches == 1 else minibatches(batch, cfg)
    number = step * cfg.num_iterations * cfg.num_minibatches
    for part in parts * cfg.num_iterations:
        policy.zero_grad()  # all of it: the optimizer knows only what is in its groups, and the clip takes all
        for name, value in accumulate_gradients(policy, part, cfg, loss_of).items():
            total[name] = torch.maximum(total.get(name, value), value) if name.endswith("_max") else total[name] + value
        optimizers.check_optimizer(optimizer, policy)
        norms.append(clip_gradients(policy, cfg.max_grad_norm))
        if not math.isfinite(norms[-1]):
            raise RuntimeError(
                f"step {step}: the gradient norm is {norms[-1]}, so this update was not made. Look at the rewards and "
                "sampling/logprob_diff_mean of the last steps; lower --learning_rate, or --compute_dtype float32."
            )
        for group in optimizer.param_groups:
            group["lr"] = lr_at(number, cfg) * group.get("lr_scale", 1.0)
        optimizer.step()
        number += 1
    policy.zero_grad()
    mine = dict(zip(total, torch.stack([*total.values()]).tolist(), strict=True))  # one read of the GPU
    tokens, loss = mine.pop("tokens"), float(utils.all_sum(torch.tensor(mine.pop("loss")))) / len(norms)
    names = set().union(*utils.gather_objects([*mine]))  # a rank may lack one: its tokens count all the same
    lacking = {name: -math.inf if name.endswith("_max") else 0.0 for name in names}
    metrics = utils.over_ranks({name: (value, tokens) for name, value in (lacking | mine).items()})
    # Effective sample size of the weights, as a share of the tokens: 1 if trainer and generator agree.
    if squared := metrics.pop("sampling/ratio_squared", None):
        metrics["sampling/ess"] = metrics["sampling/ratio_mean"] ** 2 / squared
    rates = {"lr": optimizer.param_groups[0]["lr"]}
    rates |= {f"lr/{group.get('name', i)}": group["lr"] for i, group in enumerate(optimizer.param_groups[1:], 1)}
    return metrics | {"loss": loss, "grad_norm": sum(norms) / len(norms)} | rates


@checks.read_once()  # whether losses are finite is checked once, at the end: each check waits for the GPU
def accumulate_gradients(policy: nn.Module, batch: Batch, cfg: TrainConfig, loss_of=None) -> dict[str, Tensor]:
    """Gradient of one optimizer update, however it is cut into micro-batches and ranks.

    Returns this rank's sums over tokens, a scalar each: "loss", "tokens" and the statistics. Counts are global and
    taken before the loop, or ranks with short completions would count more. DDP and FSDP average gradients over ranks,
    so the loss is multiplied by their number.

    Groups whose completions all scored the same have no gradient under most losses. Micro-batches of such groups alone,
    in which every advantage is 0, come first, as `silent` ones: a forward pass without a graph, and no backward pass.
    Where the loss of one has a gradient after all (an entropy bonus, a KL, an own_term), it is computed again with a
    graph, and all that follow have one. Every rank takes the same branch at the same time (all_max), or the collectives
    of DDP and FSDP would not match.
    """
    loss_of = loss_of or micro_loss
    set_temperature(policy, cfg)
    batch = ready(policy, batch, cfg)
    counts = global_counts(batch, cfg)
    if batch.record is not None:
        # For the view of a run's tokens: the record keeps each token's weight, -d loss / d logprob x num_tokens, which
        # is its advantage under token_mean and a ratio of 1.
        batch.record.scale = -counts["num_tokens"] / utils.world_size()
    batch = apart(batch)
    nonzero = (batch.loss_mask > 0) if batch.advantages is None else batch.advantages != 0  # [B, T]
    learns = nonzero.any(1).tolist()  # rows that have an advantage, and so most likely a gradient
    passes = micro_batches(batch, cfg, learns)  # lists of row numbers; those with a row that learns come last
    learning = utils.all_max(sum(any(learns[row] for row in rows) for rows in passes))  # on the rank with most of them
    silent = 0 if cfg.router_aux_coef else len(passes) - max(learning, 1)  # that loss has a gradient everywhere
    sums: dict[str, Tensor] = defaultdict(float)  # kept on the GPU: .item() would wait for the backward pass
    for number, rows in enumerate(passes):
        part, last = batch.select(rows or [0]), number + 1 == len(passes)
        if not rows:  # this rank has fewer micro-batches than others, but takes part in their collectives
            part.loss_mask = torch.zeros_like(part.loss_mask)
        if number < silent:
            loss, stats, has_gradient = without_graph(policy, part, cfg, counts, loss_of)
            if utils.all_max(int(has_gradient)):  # on any rank
                silent = number
        if number >= silent:
            with exchanging(policy, last):
                with utils.in_part():  # a loss that asks for a mean over the batch in here is refused
                    loss, stats = loss_of(policy, part, cfg, counts)
                (loss * utils.world_size()).backward()
        sums["loss"] += loss.detach().double()
        add_statistics(sums, stats, part.loss_mask)
    return sums


def ready(policy: nn.Module, batch: Batch, cfg: TrainConfig) -> Batch:
    """The batch with what is known of an update before it is cut: what own_term prepares, and the tokens that a loss
    chooses among all (NAME.choose)."""
    choose = getattr(POLICY_LOSSES[cfg.policy_loss], "choose", None)
    batch = replace(batch, extras=batch.extras | shares(batch, cfg))
    if batch.advantages is None:  # a critic's update comes before the advantages
        return batch
    if choose or "current_logprobs" in needs(cfg):
        batch = replace(batch, current_logprobs=all_logprobs(policy, batch, cfg)[0])
    batch = replace(batch, extras=batch.extras | checks.prepared(own_term, batch, cfg))
    if not choose:
        return batch
    now = batch.current_logprobs
    return replace(batch, chosen=choose(now, replace(batch, old_logprobs=pi_old(now, batch, cfg)), cfg))


def shares(batch: Batch, cfg: TrainConfig) -> dict:
    """What parts of the loss divide by, besides `global_counts`: by the update's rows of all ranks."""
    found, tokens = {}, batch.loss_mask.sum(1)  # [B]
    if cfg.loss_agg == "prompt_mean":
        found["divided_by"] = group_mean(tokens, batch.groups) * group_index(batch.groups)[1]
    if cfg.loss_agg == "seq_mean" and any(batch.restarts):  # a completion of several rows is one completion
        found["divided_by"] = tokens
    if cfg.positive_nll:
        right = is_solved(batch, cfg)
        found["right"] = right / utils.all_sum((right * tokens).sum()).clamp(min=1)  # [B]
    if normalises(cfg):
        rows = apart(batch)
        w = mismatch(rows.old_logprobs, rows, cfg)[1].clamp(cfg.correction_min, cfg.correction_max)  # [R, T']
        learned = rows.loss_mask.any(1).float()  # [R]
        whole = cfg.correction == "sequence"  # of completions, else of tokens
        mean = utils.global_mean(w[:, 0], learned) if whole else utils.global_mean(w, rows.loss_mask)
        found["mean_correction"] = float(mean)
    return found


def normalises(cfg: TrainConfig) -> bool:
    return cfg.correction_mode == "normalise" and cfg.correction != "none"


def is_solved(batch: Batch, cfg: TrainConfig) -> Tensor:
    """1 for completions whose score reaches their domain's --eval_solved, else 0.  [B]"""
    scores = zip(batch.scores.tolist(), batch.rows, strict=True)
    return batch.rewards.new_tensor([float(solved(score, cfg.of(row))) for score, row in scores])


def global_counts(batch: Batch, cfg: TrainConfig) -> dict[str, float]:
    """What `token_weights` divides by, of all ranks."""
    counts_all = cfg.loss_agg == "constant" and not batch.stand_in  # else completions with a loss token
    sequences = len(batch) if counts_all else int(batch.loss_mask.any(1).sum())
    if cfg.loss_agg == "prompt_mean":  # a prompt's completions lie on one rank
        sequences = len(batch.groups[batch.loss_mask.any(1)].unique())
    mine = torch.tensor([float(batch.loss_mask.sum()), float(sequences)])
    tokens, sequences = utils.all_sum(mine).tolist()
    return dict(num_tokens=tokens, num_sequences=sequences, max_tokens=cfg.max_completion_length)


def exchanging(policy: nn.Module, last: bool) -> contextlib.AbstractContextManager:
    """DDP sums gradients over ranks in the last backward pass of an update only. FSDP reduces in every pass; fsdp2 with
    --shard_size sums over the copies of the shards in the last pass only."""
    if isinstance(policy, FSDPModule):
        policy.set_requires_all_reduce(last)
    return policy.no_sync() if isinstance(policy, DistributedDataParallel) and not last else contextlib.nullcontext()


def without_graph(policy, part: Batch, cfg: TrainConfig, counts: dict, loss_of) -> tuple[Tensor, dict, bool]:
    """`loss_of` with a forward pass that keeps no graph; and whether the loss has a gradient with respect to what the
    policy returned (log-probs, entropy), so that a pass with a graph is needed."""
    leaves: list[Tensor] = []

    def forward(*inputs):
        with torch.no_grad():
            returned = policy(*inputs)
        leaves.extend(values.requires_grad_() for values in returned)
        return returned

    with utils.in_part():
        loss, stats = loss_of(forward, part, cfg, counts)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else ()
    return loss, stats, any(gradient is not None and bool(gradient.any()) for gradient in gradients)


def add_statistics(sums: dict[str, Tensor], stats: dict[str, Tensor], loss_mask: Tensor) -> None:
    """Sums over the sampled tokens; of names that end in _max the largest."""
    sums["tokens"] += loss_mask.sum().double()
    for name, matrix in stats.items():
        if name.endswith("_max"):
            largest = matrix.detach().double().masked_fill(loss_mask == 0, -math.inf).max()
            sums[name] = torch.maximum(sums.get(name, largest), largest)
        else:
            sums[name] += matrix.detach().where(loss_mask > 0, 0).sum(dtype=torch.float64)


def micro_loss(policy: nn.Module, part: Batch, cfg: TrainConfig, counts: dict) -> tuple[Tensor, dict]:
    """This micro-batch's share of the update's loss, and statistics as per-token matrices [B, T]."""
    logprobs, entropy, _ = compute_logprobs(policy, part, cfg)  # [B, T]
    part = replace(part, old_logprobs=pi_old(logprobs, part, cfg))
    # An error over a field that nobody computed says what to add to the loss's `needs`.
    with checks.explained(f"policy loss {cfg.policy_loss!r}", part):
        per_token, stats = checks.check_loss(POLICY_LOSSES[cfg.policy_loss](logprobs, part, cfg), part, cfg)  # [B, T]
    trust = correction(logprobs, part, cfg)
    per_token, stats = per_token * trust, stats | mismatch_statistics(logprobs, trust, part, cfg)
    if part.ref_logprobs is not None and not cfg.kl_in_reward:
        kl = checks.check_term(f"--kl {cfg.kl}", KL_ESTIMATORS[cfg.kl](logprobs, part.ref_logprobs), part)  # [B, T]
        if cfg.kl_ratio:  # sampled from pi_old: with the weight pi / pi_old it is the KL of pi, and so is its gradient
            kl = kl * log_ratio(logprobs, part).exp()
        per_token, stats["kl"] = per_token + cfg.beta * kl, kl
    if part.top_logprobs is not None:
        term, seen = divergence(part, cfg)  # [B, T]
        per_token, stats = per_token + cfg.distill_coef * term, stats | seen
    per_token = per_token - cfg.entropy_coef * entropy  # which has a gradient if Policy.entropy_gradient says so
    with checks.explained("own_term", part):
        term, seen = own_term(logprobs, entropy, part, cfg)
    stats = stats | checks.check_statistics("own_term", seen, part)
    weights = weights_of(part, cfg, counts)  # [B, T]
    loss = (weights * per_token).sum()
    if cfg.positive_nll:  # VAPO (2504.05118) sec. 4.5: mean over the tokens of right completions
        loss = loss - cfg.positive_nll * (part.extras["right"][:, None] * part.loss_mask * logprobs).sum()
    if term is not None:
        own_weights = 1 if getattr(own_term, "weights", "agg") == "sum" else weights
        loss = loss + (own_weights * checks.check_term("own_term", term, part)).sum()
    if cfg.router_aux_coef and (balance := getattr(policy, "module", policy).aux_loss) is not None:
        # A mean over the pass, which counts by its share of the update's tokens.
        loss = loss + cfg.router_aux_coef * balance * (part.loss_mask.sum() / max(counts["num_tokens"], 1))
        stats["routing/aux_loss"] = balance.detach().expand_as(part.loss_mask)
    return loss, stats | {"entropy": entropy}


def pi_old(logprobs: Tensor, part: Batch, cfg: TrainConfig) -> Tensor:
    """log pi_old, by --old_logprobs: the trainer's before the first update (recompute), the generator's (sampler),
    between the generator's and pi (interpolate), or pi itself (current): then the ratio is 1. Where no generator
    sampled a token it is pi.  [B, T]

    interpolate (AReaL): with weights of L steps ago log mu + L / (L + 1) (log pi - log mu), as if the policy had moved
    as far in each step, this one included. What was sampled by the newest weights has mu.
    """
    now, sampled = logprobs.detach(), part.sampling_logprobs
    if cfg.old_logprobs in ("sampler", "interpolate"):
        lag = (part.step - part.versions).clamp(min=0) if cfg.old_logprobs == "interpolate" else 0  # [B, T]
        return (sampled + lag / (lag + 1) * (now - sampled)).where(~sampled.isnan(), now)
    return now if part.old_logprobs is None or cfg.old_logprobs == "current" else part.old_logprobs


def correction(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> Tensor:
    """Weights trainer / generator of the policy loss, without gradient.  [B, T]

    The generator's log-probs differ because of other kernels, or because its weights are older (--push_steps):
    w = exp(old - sampling), by token or by sequence, clamped to the bounds or 0 outside (TIS, IcePop). Left out are
    completions whose mean ratio (geometric, over tokens) is out of bounds, and tokens with A < 0 of completions that
    drifted further than off_policy_threshold (DeepSeek-V3.2), measured with the current weights.
    """
    mask, (d, w) = batch.loss_mask, mismatch(logprobs, batch, cfg)
    if cfg.correction == "none" or cfg.old_logprobs == "sampler":  # then the policy ratio contains the correction
        w = torch.ones_like(w)
    elif cfg.correction_mode == "mask":
        w = w.where(within_bounds(w, cfg), 0)
    else:
        w = w.clamp(cfg.correction_min, cfg.correction_max) / batch.extras.get("mean_correction", 1.0)
    keep = not_rejected(d, mask, cfg)
    if cfg.off_policy_threshold is not None:
        drift = row_mean((batch.sampling_logprobs - logprobs.detach()).nan_to_num(), mask)
        keep = keep & ((batch.advantages >= 0) | (drift <= cfg.off_policy_threshold))
    return w * keep


def not_rejected(d: Tensor, mask: Tensor, cfg: TrainConfig) -> Tensor:
    """Which tokens or completions --reject_by keeps, of d = log trainer / generator: k1 = d, whose exponential has to
    be within the bounds, k2 = d^2 / 2 or k3 = e^d - 1 - d, of each token, or as the mean, the sum or the largest (k1:
    and the smallest) of a completion.  [B, T] or [B, 1], bool"""
    over, _, name = cfg.reject_by.rpartition("_")
    values = {"k1": d, "k2": d**2 / 2, "k3": d.exp() - 1 - d}[name] * mask
    values = {"seq_mean": row_mean(values, mask), "seq_sum": values.sum(1, keepdim=True)}.get(over, values)
    values = values.exp() if name == "k1" else values
    keep = (values >= cfg.reject_below) & (values <= cfg.reject_above)
    return (keep | (mask == 0)).all(1, keepdim=True) if over == "seq_max" else keep


def mismatch(logprobs: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, Tensor]:
    """Trainer's minus generator's log-probs, and their ratio, by token or by sequence.  [B, T] each"""
    trainer = logprobs.detach() if cfg.old_logprobs == "sampler" else batch.old_logprobs
    d = (trainer - batch.sampling_logprobs) * batch.loss_mask
    d = d.nan_to_num().clamp(-20, 20)  # nan: not sampled (demonstrations)
    by_row = d.sum(1, keepdim=True).clamp(-20, 20).expand_as(d)
    return d, (by_row if cfg.correction == "sequence" else d).exp()


def within_bounds(w: Tensor, cfg: TrainConfig) -> Tensor:
    return (w >= cfg.correction_min) & (w <= cfg.correction_max)


def mismatch_statistics(logprobs: Tensor, weights: Tensor, batch: Batch, cfg: TrainConfig) -> dict[str, Tensor]:
    """How far trainer and generator are apart.  [B, T] each; weights: `correction`'s"""
    if cfg.old_logprobs == "interpolate":  # pi_old is not the trainer's
        batch = replace(batch, old_logprobs=logprobs.detach())
    d, w = mismatch(logprobs, batch, cfg)
    stats = {"logprob_diff_mean": d.abs(), "logprob_diff_max": d.abs(), "kl": d.exp() - d - 1}
    stats |= {"ratio_mean": w, "ratio_max": w, "ratio_squared": w**2, "ratio_outside": (~within_bounds(w, cfg)).float()}
    stats["left_out"] = (weights == 0).float()
    return {f"sampling/{name}": value for name, value in stats.items()}


def clip_gradients(policy: nn.Module, max_norm: float) -> float:
    """Scale gradients to a global norm of at most max_norm; returns the norm before."""
    if isinstance(policy, FSDP):
        return float(policy.clip_grad_norm_(max_norm))
    return float(full(nn.utils.clip_grad_norm_([p for p in policy.parameters() if p.grad is not None], max_norm)))


def lr_at(update: int, cfg: TrainConfig) -> float:
    """Learning rate of an optimizer update: linear warm-up, then --lr_schedule: constant, linear or cosine decay to 0,
    or one of transformers'.

    A function of the update's number, so that resuming needs no scheduler state. Updates are counted from the first
    step, those in which only a critic learns (--critic_warmup) included.
    """
    total = cfg.max_steps * cfg.num_iterations * cfg.num_minibatches
    warmup = optimizers.warmup_updates(cfg, total)
    if optimizers.transformers_schedule(cfg):
        return optimizers.schedule_rate(cfg, update, warmup, total)
    if update < warmup:
        return cfg.learning_rate * (update + 1) / warmup
    done = (update - warmup) / max(total - warmup, 1)
    decay = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return cfg.learning_rate * decay[cfg.lr_schedule]


# ==== 8 the policy, the reference, the optimizer =====================================================================


class Policy(nn.Module):
    """A causal LM that answers with log-probs of chosen tokens. Logits exist for `chunk` sampled tokens at a time only.

    The wrapper exists because DDP and FSDP want everything that uses parameters inside one `forward`.
    """

    replays = True  # whether a mixture's experts are those that the generator chose (--router_replay); a critic: False

    def __init__(self, model: nn.Module, cfg: TrainConfig, autocast: bool):
        super().__init__()
        self.model, self.temperature, self.chunk, self.autocast = model, cfg.temperature, cfg.logprob_chunk, autocast
        if cfg.head_dtype == "float32" and type(self.hf_model.get_output_embeddings()) is not nn.Linear:
            raise ConfigError("--head_dtype float32 needs a plain linear output layer; leave it out of --lora_targets.")
        reads_entropy = "entropy" in inspect.signature(own_term).parameters
        self.entropy_gradient = cfg.entropy_coef != 0 or cfg.entropy_target is not None or reads_entropy
        self.offload, self.float32 = cfg.offload_activations, cfg.head_dtype == "float32"
        if cfg.shared_prefix:
            take_packed_rows(self.hf_model)
        self.routing = router_replay.of(self.hf_model, cfg) if self.replays else None
        self.balance = router_replay.balance_loss(self.hf_model) if self.replays and cfg.router_aux_coef else None
        self.aux_loss: Tensor | None = None  # of the latest pass, for `micro_loss`
        self.squares = False  # whether to sum squared probabilities, a pass over [n, V]
        self.top = 0  # how many of the likeliest tokens to return, with their log-probs (of a teacher)
        self.never = vision.placeholder_tokens(model.config)  # never sampled: they stand for images
        # A rank whose pass has no images must run its vision tower, too, if another rank's pass has some.
        several = utils.world_size() > 1 and takes_images(model.config)
        self.blank = vision.blank_inputs(load_processor(cfg.model_id), cfg, model) if several else {}

    @property
    def hf_model(self) -> nn.Module:  # the transformers model, below PEFT
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def forward(self, inputs: dict, rows: Tensor, columns: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """Log-prob of `targets` [N] or [N, m], conditioned on the tokens of `inputs` up to (rows, columns) [N]; entropy
        and sum of squared probabilities of the distribution it is drawn from [N]; with `top`, also the likeliest
        tokens' log-probs and ids, [N, k] each."""
        device = targets.device.type
        # No autocast cache: all chunks would share one cast weight, and its gradient would be summed in bfloat16.
        casts = partial(torch.autocast, device, torch.bfloat16, cache_enabled=False)
        with casts() if self.autocast else contextlib.nullcontext():
            if self.blank:
                inputs = with_blank(inputs, self.blank)
            inputs = router_replay.replay(self.routing, inputs)
            saving = save_on_cpu(pin_memory=device == "cuda") if self.offload else contextlib.nullcontext()
            with saving, packed(inputs.pop("segments", None), targets.device):
                wanted = dict(output_router_logits=True) if self.balance else {}
                out = backbone(self.hf_model)(**inputs, use_cache=False, **wanted)
                hidden = out.last_hidden_state  # [R, L, H]
            if self.balance:
                self.aux_loss = self.balance(out.router_logits, inputs["attention_mask"])
            unused = 0 * hidden[-1, 0].sum() if self.blank else 0  # the tower gets a gradient of 0 on this rank, too
            hidden = hidden[rows, columns] + unused  # [N, H]
            size = self.chunk or chunk_size(self.hf_model.config.get_text_config().vocab_size, hidden.is_cuda)
            chunks = zip(hidden.split(size), targets.split(size), strict=True)
            if len(hidden) <= size or not torch.is_grad_enabled():
                parts = [self.head(h, t) for h, t in chunks]
            else:  # several chunks: recompute each one's logits in the backward pass
                parts = [checkpoint(self.head, h, t, use_reentrant=False) for h, t in chunks]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def head(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """Output layer on sampled positions.  [n, H], [n] -> [n], [n], [n]; [n, m] for several targets of each"""
        logits = logits_of(self.hf_model, hidden, self.float32).float()  # [n, V]
        if self.never:
            logits = logits.index_fill(1, torch.tensor(self.never, device=logits.device), -1e9)  # -inf * 0 would be nan
        if self.temperature != 1:  # the generator did the same
            logits = logits / self.temperature
        log_p = logits.log_softmax(-1)  # [n, V]
        found = log_p.gather(1, targets if targets.ndim > 1 else targets[:, None]).view_as(targets)
        # Below the gather: when the backward pass recomputes a chunk, it stops behind the last value that it needs.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.entropy_gradient):
            p = log_p.exp()
            entropy = -(p * log_p).sum(-1)  # [n]
            squares = (p.detach() ** 2).sum(-1) if self.squares else torch.zeros_like(entropy)
        return found, entropy, squares, *(log_p.topk(self.top) if self.top else ())


def load_policy(cfg: TrainConfig, device: torch.device, kind: type | None = None) -> tuple[nn.Module, Policy]:
    """(the policy wrapped by DDP or FSDP, to be called; the bare Policy). kind: another class than Policy."""
    torch.manual_seed(cfg.seed)  # for the first values of adapters
    with parameters.on_rank_0("Loading the policy", everywhere=bool(cfg.load_in)):  # elsewhere on torch's meta device
        load = load_hf_model if getattr(kind, "reads_head", True) else partial(load_hf_model, body=True)
        model = to_train(load(cfg, getattr(torch, cfg.dtype)), cfg)
    inner = (kind or Policy)(model, cfg, autocasts(cfg))
    return shard(inner, cfg, device, trained=True), inner


def shard(policy: Policy, cfg: TrainConfig, device: torch.device, trained: bool) -> nn.Module:
    """The policy under --strategy: a copy on every rank (ddp), or its layers in shards (fsdp, fsdp2).

    Rank 0 has the values and hands them out layer by layer; shards are cut as they arrive. With --load_in
    every rank has read the base itself, straight to its device.
    """
    layer_names = set(policy.hf_model._no_split_modules or [])
    layers = [m for m in policy.modules() if type(m).__name__ in layer_names]
    for layer in layers if cfg.compile and trained else ():
        layer.compile(dynamic=True)  # in place, before it is sharded; passes differ in length
    precision = dict(param_dtype=getattr(torch, cfg.compute_dtype), reduce_dtype=torch.float32)
    fill = share_adapters if cfg.load_in else parameters.handed_out(policy, device)
    if cfg.strategy == "ddp":
        fill(policy)
        if not trained or utils.world_size() == 1:
            return policy
        devices = None if device.index is None else [device.index]
        unused = takes_images(policy.hf_model.config)  # some towers end before their last layer
        how = dict(find_unused_parameters=unused, gradient_as_bucket_view=True, init_sync=False)
        return DistributedDataParallel(policy, device_ids=devices, **how)
    mesh = parameters.device_mesh(device, cfg)
    if cfg.strategy == "fsdp":
        return FSDP(
            policy,
            auto_wrap_policy=CustomPolicy(lambda module: module in layers),
            param_init_fn=partial(fill, recurse=False),
            mixed_precision=MixedPrecision(**precision, cast_forward_inputs=True),  # PEFT makes some float32
            use_orig_params=True,
            device_id=device,
            **(dict(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD) if mesh.ndim > 1 else {}),
        )
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if cfg.offload else OffloadPolicy()
    how = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(**precision), offload_policy=offload)
    first, last = policy.hf_model.get_input_embeddings(), policy.hf_model.get_output_embeddings()
    # The output layer is called for each chunk of tokens: in the root's unit it is gathered once, and its gradient
    # reduced once. Input embeddings are a unit of their own, unless they are the output layer's.
    tied = last is not None and last.weight is first.weight
    for module in [*layers, *([] if tied else [first]), policy]:
        fill(module)  # except what is filled already
        fully_shard(module, **how)
    if not tied:
        first.set_unshard_in_backward(False)  # the gradient of a look-up needs no weights
    return policy


def empty_policy(cfg: TrainConfig, config=None, kind: type | None = None) -> Policy:
    """The policy itself, within `torch.device("meta")`: shapes without values, which plan.py counts."""
    return (kind or Policy)(to_train(load_hf_model(cfg, getattr(torch, cfg.dtype), config), cfg), cfg, autocasts(cfg))


def load_reference(cfg: TrainConfig, device: torch.device) -> nn.Module | None:
    """A frozen copy of the initial policy. None if nothing asks for its log-probs, and with LoRA: the policy with its
    adapters switched off is the reference.

    In the compute dtype; one that follows the policy (--ref_sync_steps) in float32, because a small step
    would be rounded away in bfloat16.
    """
    if cfg.use_peft or (cfg.beta == 0 and "ref_logprobs" not in needs(cfg)):
        return None
    return load_frozen(replace(cfg, router_replay="off"), device, "the reference model")[0]


def load_teacher(cfg: TrainConfig, device: torch.device) -> tuple[nn.Module, Policy] | None:
    """The frozen teacher of --teacher_id, in the compute dtype; None without one."""
    if cfg.teacher_id is None:
        return None
    own = replace(cfg, model_id=cfg.teacher_id, ref_sync_steps=None, router_replay="off", load_in=None)
    return load_frozen(own, device, "the teacher", "--teacher_id")


def load_frozen(cfg: TrainConfig, device: torch.device, what: str, flag="--model_id") -> tuple[nn.Module, Policy]:
    """A model that is not trained, as `load_policy` returns one. flag: the one that named it, for its faults."""
    with parameters.on_rank_0(f"Loading {what}"), faults_named(flag):
        model = load_hf_model(cfg, torch.float32 if cfg.ref_sync_steps else getattr(torch, cfg.compute_dtype))
    autocast = bool(cfg.ref_sync_steps) and autocasts(cfg)
    frozen = replace(cfg, router_aux_coef=0.0)  # not trained, so there is nothing to balance
    inner = Policy(model.eval().requires_grad_(False), frozen, autocast)
    return shard(inner, cfg, device, trained=False), inner


@torch.no_grad()
def move_towards(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """ref <- alpha * policy + (1 - alpha) * ref (--ref_sync_steps). Both have the same modules and shards."""
    for model in (reference, policy):
        if isinstance(model, FSDPModule):  # a root module stays gathered after a forward pass without a backward one,
            model.reshard()  # and what is written to the gathered weights is lost
    for old, new in zip(reference.parameters(), policy.parameters(), strict=True):
        old.lerp_(new.to(old.dtype), alpha)


def make_optimizer(module: nn.Module, cfg: TrainConfig) -> torch.optim.Optimizer:
    """AdamW, or what --optim names, on what is trained. Edit me: any torch optimizer, one or several groups.

    Choose by clean_name(name), which is the same whatever shards the model. Parameters of --strategy fsdp are flat
    pieces, so what looks at shapes or computes with matrices needs ddp or fsdp2. Each update
    sets every group's learning rate to `lr_at` times the group's "lr_scale" (1 without one); an "lr" that you give a
    group is overwritten. It is logged as `lr`, that of further groups as lr/NAME by their "name". What `step`
    keeps from update to update belongs into self.state[p]: other attributes are in no checkpoint.
    """
    trained, betas = [p for p in module.parameters() if p.requires_grad], (cfg.adam_beta1, cfg.adam_beta2)
    if cfg.optim != "AdamW":
        return optimizers.by_name(trained, cfg)
    decay, eps = cfg.weight_decay, cfg.adam_epsilon
    return torch.optim.AdamW(trained, lr=cfg.learning_rate, betas=betas, eps=eps, weight_decay=decay, fused=True)


def optimizer_of(make: Callable, module: nn.Module, cfg: TrainConfig):
    """make(module, cfg), which has to hold all that is trained."""
    optimizer = make(module, cfg)
    optimizers.check_optimizer(optimizer, module)
    return optimizer


# ==== 9 weights to the generator =====================================================================================


def make_generator(cfg: TrainConfig, hf_model: nn.Module, processor, device: torch.device):
    """The generator: vLLM servers, which are checked to serve this model, or a copy of it in this process. Of a base in
    4 bits no copy is made: the policy itself samples.

    One of your own has: `generate` (as VLLMClient's), `seed` (for --generator hf), receives_weights, weight_dtype,
    begin_push, send_bucket, finish_push, abort_push and close; for a mixture of experts can_tell_experts, for
    --colocate sleep.
    """
    if cfg.generator == "vllm":
        generator = servers.connect(cfg, hf_model, device)
    else:
        from hf_generator import HFGenerator, PolicyGenerator

        check_window(hf_model.config, cfg)
        if cfg.load_in:
            generator = PolicyGenerator(hf_model, processor, getattr(torch, cfg.compute_dtype))
        else:
            generator = HFGenerator(load_hf_model(cfg, getattr(torch, cfg.compute_dtype)).to(device), processor)
    generator.tokenizer, generator.stop_token_ids = processor, sorted(prompts.end_ids(hf_model, processor))
    generator.rope_index = vision.rope_index_of(hf_model)  # which places of a prompt have which positions: with images
    router_replay.ask(generator, hf_model, cfg)  # with --router_replay it reports its experts
    return generator


def push_weights(policy: nn.Module, generator, version: int, bucket_mb: int) -> None:
    """Send the policy's weights to the generator, or its adapters alone (--push_lora): begin -> one call per bucket ->
    finish. All ranks call it.

    `generator.receives_weights` tells whether this rank talks to the generator: every rank for the in-process one,
    rank 0 for servers. After each bucket the ranks agree that it is in place; an error on one is raised on all.
    """
    active, dtype, size = generator.receives_weights, generator.weight_dtype, bucket_mb * 2**20

    def attempt(call, *args):
        try:
            if active:
                call(*args)
        except Exception as caught:  # carried to raise_together, which raises it on every rank
            generator.abort_push()
            return caught

    utils.raise_together(attempt(generator.begin_push), "Starting the weight push")
    alone = getattr(generator, "adapter", None) is not None  # optional in a generator of your own
    adapters = (gathered(bucket, active) for bucket in adapter_buckets(one_by_one(policy), size, dtype))
    for bucket in adapters if alone else weight_buckets(policy, size, dtype, active):
        utils.raise_together(attempt(generator.send_bucket, bucket), "Sending weights")
    utils.raise_together(attempt(generator.finish_push, version), "Finishing the weight push")
    generator.version = version


def weight_buckets(
    model: nn.Module, max_bytes: int, dtype: torch.dtype, keep: bool = True
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield lists of (checkpoint name, full tensor) of about `max_bytes` in `dtype`: all ranks call it in step.

    A bucket is gathered by all ranks before it is yielded, so that sending it never holds up a collective. FSDP1
    gathers one wrapped module at a time, FSDP2 a bucket; the extra memory is a bucket and one module, or a layer of a
    model whose checkpoints hold tensors of a layer joined: a bucket ends with a module, or with such a layer.
    LoRA is folded in. What is sharded or folded comes in `dtype`; other tensors are the live weights in their own
    dtype: use them before the next step. Vectors keep their dtype, as some servers keep norms and biases wider. With
    keep=False a rank only takes part in the gathering.
    """
    names = {clean_name(name) for name, _ in model.named_parameters()}  # tied weights appear once, as in a checkpoint
    layers_whole = parameters.joined_in_a_checkpoint(model)  # then no layer is divided between buckets
    bucket, size, last = [], 0, ""
    for name, module in one_by_one(model):
        layer = parameters.layer_of(f"{name}.")
        if size >= max_bytes and not (layers_whole and layer == last):
            yield gathered(bucket, keep)
            bucket, size = [], 0
        last = layer
        for key, tensor in own_weights(name, module, dtype):
            if key not in names:
                continue
            size += tensor.numel() * dtype.itemsize
            if isinstance(tensor, DTensor):
                bucket.append((key, tensor))
            elif keep:  # FSDP1 lets go of a unit's weights when the next unit's turn comes
                bucket.append((key, rounded(tensor, dtype, copy=True) if isinstance(model, FSDP) else tensor))
    if size:
        yield gathered(bucket, keep)


def one_by_one(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules by name, children first. Those of an FSDP1 unit have their whole weights while it is their turn: all
    ranks walk in step."""
    if isinstance(model, FSDPModule):
        model.reshard()  # after a forward pass without a backward one the root is still gathered
    units = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDP)]
    for name, unit in units:  # the root comes first: FSDP1 learns which it is
        with FSDP.summon_full_params(unit, recurse=False, writeback=False):
            yield from walk(name, unit.module, FSDP)
    if not units:
        yield from walk("", model, ())


def gathered(bucket: list[tuple[str, Tensor]], keep: bool) -> list[tuple[str, Tensor]]:
    """The tensors of a bucket made whole; all ranks call it. With keep=False this rank only takes part."""
    whole = [(name, full(tensor)) for name, tensor in bucket]
    return whole if keep else []


def walk(name: str, module: nn.Module, stop: type | tuple) -> Iterator[tuple[str, nn.Module]]:
    """Modules below `module`, itself included, children first; neither past `stop` types nor into a LoRA layer."""
    if not is_lora(module):
        for key, child in module.named_children():
            if not isinstance(child, stop):
                yield from walk(f"{name}.{key}" if name else key, child, stop)
    yield name, module


def own_weights(name: str, module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) pairs of the parameters that belong to this module itself. FSDP2's stay sharded, and
    are rounded to `dtype` before they are gathered, as half the bytes travel then."""
    if is_lora(module):
        yield clean_name(f"{name}.weight"), folded(module, dtype)
        if module.base_layer.bias is not None:
            yield clean_name(f"{name}.bias"), module.base_layer.bias.detach()
        return
    for key, parameter in module.named_parameters(recurse=False):
        tensor = parameter.detach()
        yield clean_name(f"{name}.{key}"), rounded(tensor, dtype) if isinstance(tensor, DTensor) else tensor


def rounded(tensor: Tensor, dtype: torch.dtype, copy: bool = False) -> Tensor:
    """A matrix in `dtype`; a vector as it is."""
    return tensor.to(dtype if tensor.ndim > 1 else tensor.dtype, copy=copy)


def full(tensor: Tensor) -> Tensor:
    """The whole tensor of an FSDP2 shard (a collective), any other tensor as it is. A shard that waits in CPU memory
    (--offload, --colocate) goes to the GPU first, and travels from there."""
    if isinstance(tensor, DTensor):
        return tensor.to(tensor.device_mesh.device_type).full_tensor()
    return tensor


def clean_name(name: str) -> str:
    """The name a parameter has in the transformers model, without what DDP, FSDP, PEFT and `Policy` put around it."""
    name = re.sub(r"(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.|\.base_layer", "", name)
    name = name.removeprefix("module.").removeprefix("model.")  # DDP, then Policy.model
    return name.removeprefix("base_model.model.")  # PeftModel -> LoraModel -> the model itself


def saved_weights(policy: nn.Module, inner: Policy, cfg: TrainConfig, dtype: torch.dtype) -> tuple[Iterator, object]:
    """(what a checkpoint has for `from_pretrained`, as buckets that all ranks walk in step; PEFT's config if these are
    an adapter: nothing can be folded into a base in 4 bits, so that is saved as PEFT saves it)"""
    size = cfg.push_bucket_mb * 2**20
    if cfg.load_in:
        buckets = adapter_buckets(one_by_one(policy), size, torch.float32, scaled=False)
        return (gathered(bucket, True) for bucket in buckets), inner.model.peft_config["default"]
    buckets = ([(name, rounded(t, dtype)) for name, t in bucket] for bucket in weight_buckets(policy, size, dtype))
    # Not trained, and part of the model all the same: what some routers add to their scores, for one.
    parts = ((f"{name}.{key}", part, key) for name, part in policy.named_modules() for key in part._buffers)
    saved = [(clean_name(n), part._buffers[k]) for n, part, k in parts if k not in part._non_persistent_buffers_set]
    return chain(buckets, [[(name, tensor) for name, tensor in saved if tensor is not None]]), None


# ==== 10 evaluation ==================================================================================================


def evaluate(
    rows: list[dict], generator, reward_functions: dict, cfg: TrainConfig, step: int
) -> tuple[dict, list[Trajectory]]:
    """k completions of every held-out row: eval/reward, eval/mean@k (share solved), eval/pass@k (rows with one solved).

    A completion is solved if its score reaches --eval_solved. step: training steps so far, which is the version of the
    weights that must have sampled. Returned too: the first completion of each of this rank's rows.
    """
    rank, world = torch.distributed.get_rank(), utils.world_size()
    k = cfg.eval_generations
    eval_cfg = replace(cfg, num_generations=k, temperature=cfg.eval_temperature, purpose="eval")
    share = rows[rank::world]
    groups = (
        asyncio.run(rollout(share, generator, reward_functions, eval_cfg, range(step, step + 1)))[0] if share else []
    )
    for place, group in enumerate(groups):
        for trajectory in group:
            trajectory.group = trajectory.info["row_number"] = rank + place * world
    failed = check_failed(groups, cfg)["rollout/failed"]
    groups = [group for group in without_failed(groups) if group]
    metrics = {f"eval/{name}": value for name, value in eval_metrics(groups, cfg, rollouts.any_number).items()}
    metrics |= {"eval/failed": failed} if failed else {}
    return metrics, [group[0] for group in groups]


# ==== 11 before the loop: settings, data, everything loaded ==========================================================


def start(cfg: TrainConfig, make_critic: Callable | None) -> tuple[TrainConfig, Run]:
    """Everything a run works with, loaded and resumed; the generator has its weights."""
    cfg, reward_functions, processor, rows, held_out = setup(cfg)
    getattr(make_critic, "check", lambda *_: None)(cfg, processor)  # a critic may refuse settings, too
    rank, world, device = utils.init_distributed(cfg.dist_timeout)
    cfg = planned(utils.computable(cfg, device), rows, device, critic=make_critic is not None)
    memory: dict = {}  # shared by after_rollout and the prompt sampler; checkpoints keep it
    sampler = None
    if not cfg.eval_only:
        sampler = PromptSampler(len(rows), cfg.prompts_per_step, cfg.seed, rank, world, memory)
        sampler.rows, sampler.order = rows, data.Order.of(rows, cfg)
    cfg = replace(cfg, run_name=utils.gather_objects(name_run(cfg))[0])
    run_dir = Path(cfg.output_dir).resolve() / cfg.run_name  # a tool may change the working directory
    # The run folder's lock; steps that are done; a fingerprint of settings and rows, to compare a resumed run's with.
    lock, first, made_with = resume.begin(cfg, rows, held_out)
    state = {"num_tokens": 0, "beta": cfg.beta, "entropy_coef": cfg.entropy_coef, "score_moments": {}}
    takes_turns = cfg.colocate and not cfg.offload  # with the server on the GPU: models are loaded to the CPU
    home = torch.device("cpu") if takes_turns else device
    size = None  # of the model, for perf/tflops
    if device.type == "cuda":
        with torch.device("meta"):
            size = gpu.sizes(empty_policy(cfg).hf_model)
    policy, inner = load_policy(cfg, home)
    reference, teacher = load_reference(cfg, home), load_teacher(cfg, home)
    optimizer = optimizer_of(make_optimizer, policy, cfg)
    critic = make_critic(cfg, home) if make_critic else None
    generator = make_generator(cfg, inner.hf_model, processor, device)

    modules = {"policy": (policy, optimizer)} | ({"reference": (reference, None)} if cfg.ref_sync_steps else {})
    modules |= {"critic": (critic.module, critic.optimizer)} if critic else {}
    if first:  # steps that are done, by the checkpoint
        state |= checkpoints.load_checkpoint(run_dir, first, modules, memory)
        adapted = [("beta", cfg.kl_target), ("entropy_coef", cfg.entropy_target)]
        cfg = replace(cfg, **{name: state[name] for name, target in adapted if target is not None})
    # Only now: if the checkpoint cannot be loaded, the run folder must stay as it is.
    log = RunLog(cfg, first or None, cfg.max_steps, lock) if rank == 0 else None
    state["made_with"] = made_with
    if rank == 0:
        describe(cfg, policy, rollouts.group_sizes(rows, cfg), world)
        if cfg.log_completions and cfg.log_tokens_every:
            write_vocabulary(run_dir, processor)
    run = Run(
        rows=rows, held_out=held_out, reward_functions=reward_functions, processor=processor, sampler=sampler,
        rank=rank, device=device, run_dir=run_dir, first=first, state=state, memory=memory, log=log,
        policy=policy, inner=inner, reference=reference, teacher=teacher, optimizer=optimizer, critic=critic,
        modules=modules, generator=generator, checks=[], size=size,
    )  # fmt: skip
    TRAINER_STATE.max_steps = cfg.max_steps
    return first_push(run, cfg), run


def setup(cfg: TrainConfig) -> tuple[TrainConfig, dict, object, list, list]:
    """Everything that can be wrong before a process group, a GPU or the generator's server is touched."""
    check_algorithm(cfg)
    with torch.device("meta"):  # what cannot be built is refused here
        hf_model = load_hf_model(cfg, torch.float32)
        if cfg.router_aux_coef:
            router_replay.balance_loss(hf_model)
        backbone(hf_model)
    cfg = replace(cfg, push_bucket_mb=cfg.push_bucket_mb or push_bucket_mb(hf_model.num_parameters()))
    optimizers.check_optimisation(cfg)
    for own in cfg.by_domain():
        with named(own):
            rollouts.check_rollout(own)
    processor = with_template_kwargs(load_processor(cfg.model_id), cfg.chat_template_kwargs)  # or a bare tokenizer
    cfg = formats.settled(cfg, processor)
    rows, held_out, reward_functions = rows_and_rewards(cfg, processor)
    rollouts.check_smallest(rows, cfg, check_algorithm)  # rows may ask for fewer completions than --num_generations
    if cfg.max_steps is None:
        cfg = replace(cfg, max_steps=max(1, int(cfg.num_epochs * len(rows)) // cfg.prompts_per_step))
    return cfg, reward_functions, processor, rows, held_out


def check_algorithm(cfg: TrainConfig) -> None:
    """ConfigError for settings with which the functions in use cannot work."""
    for name, known in tables().items():
        known_name(f"--{name}", getattr(cfg, name), known, elsewhere={"gae": "train_ppo.py"})  # it needs the critic
    for name, function in in_use(cfg).items():
        checks.check_needs(name, function)
        if fault := getattr(function, "check", lambda cfg: None)(cfg):
            raise ConfigError(f"{name}: {fault}.")
    check_teacher(in_use(cfg), cfg)
    compares = getattr(ADVANTAGES[cfg.advantage], "compares_group", True)
    for own in cfg.by_domain():
        if (compares(own) if callable(compares) else compares) and own.num_generations < 2:
            raise ConfigError(
                f"--num_generations={own.num_generations}: {cfg.advantage} compares the completions of one prompt, so "
                "it needs at least 2; 8 is usual."
            )


def tables() -> dict[str, dict[str, Callable]]:
    """The functions that a flag can name, by flag."""
    return {"advantage": ADVANTAGES, "policy_loss": POLICY_LOSSES, "kl": KL_ESTIMATORS}


def in_use(cfg: TrainConfig) -> dict[str, Callable]:
    """The functions that this run uses, by the flag that names each."""
    named = {f"--{kind} {getattr(cfg, kind)}": known[getattr(cfg, kind)] for kind, known in tables().items()}
    return named | {"own_term": own_term}


def needs(cfg: TrainConfig) -> set[str]:
    """Fields of Batch that the functions in use ask for."""
    return {name for function in in_use(cfg).values() for name in getattr(function, "needs", ())}


def rows_and_rewards(cfg: TrainConfig, processor) -> tuple[list[dict], list[dict], dict[str, Callable]]:
    """Training rows, held-out rows and reward functions, of all domains if there are any."""
    rows, held_out, reward_functions, tools = [], [], {}, {}
    for own in cfg.by_domain():
        with named(own):
            parts = data.load_data(own, format_row, partial(rollouts.measure, processor=processor, cfg=own), cfg)
            functions = get_reward_functions(own, data.columns_of(parts[0] if len(parts[0]) else parts[1]))
            if own.has_teacher and not cfg.eval_only:
                teachers.connect(own, processor, parts[0])
        # Rows on disk stay there; those of several domains are a list.
        rows, held_out = [*rows, *parts[0]] if cfg.domains else parts[0], held_out + parts[1]
        reward_functions |= {own.prefix + name: function for name, function in functions.items()}
        tools |= {own.prefix + tool.name: tool.call for tool in named_tools(own)}
    sandbox.check_contained([*reward_functions.values(), *tools.values()], cfg)
    return rows, held_out, reward_functions


def planned(cfg: TrainConfig, rows: list[dict], device: torch.device, critic: bool) -> TrainConfig:
    """Settings that were left open, chosen to fit the device's free memory; prints a warning if nothing fits."""
    if cfg.colocate:  # the server has the GPU at first: what is free when it sleeps is what a step has
        servers.reach(cfg).sleep()
    largest = max(rollouts.group_sizes(rows, cfg), default=cfg.num_generations)  # the largest group of any row must fit
    asked, world = replace(cfg, num_generations=largest), utils.world_size()
    fitting, warning = settled(empty_policy, asked, world, utils.free_memory(device), critic=critic)
    if warning and utils.is_main():
        print(warning)
    return replace(fitting, num_generations=cfg.num_generations)


def first_push(run: Run, cfg: TrainConfig) -> TrainConfig:
    """Compares the policy with its plain transformers model on a text, gives the generator the weights, and compares
    what it samples with the policy; with --colocate it compares when the trainer has the GPU. Returns the settings,
    with plain rows where packed ones differ."""
    given = agreement.asked(run.generator, run.inner.hf_model, cfg, chain(run.rows, run.held_out))

    def logprobs(policy: nn.Module, batch: Batch, cfg: TrainConfig) -> Tensor:
        return all_logprobs(policy, batch, cfg)[0]

    def check_policies(cfg: TrainConfig) -> TrainConfig:
        for policy, inner in [(run.policy, run.inner), *([run.teacher] if run.teacher else [])]:
            cfg = agreement.check_policy(inner, partial(logprobs, policy), given, cfg, run.device)
        return cfg

    def check_generator(cfg: TrainConfig) -> TrainConfig:
        dtype = run.generator.weight_dtype
        agreement.check_generator(sampled, partial(logprobs, run.policy), dtype, cfg, run.device)
        return cfg

    if cfg.colocate:  # the push wakes the server
        parameters.move(run, torch.device("cpu"))
        run.checks = [check_policies, check_generator]
    else:
        cfg = check_policies(cfg)
    push_weights(run.policy, run.generator, run.first, cfg.push_bucket_mb)
    sampled = agreement.ask(run.generator, given, cfg)
    return cfg if cfg.colocate else check_generator(cfg)


# ==== main ===========================================================================================================


def main(cfg: TrainConfig, make_critic: Callable | None = None, make_collector: type[Collector] | None = None) -> None:
    """Train, and end the process."""
    utils.run_and_exit(partial(train, cfg, make_critic, make_collector), cfg, close_all)


if __name__ == "__main__":
    main(CONFIG)
