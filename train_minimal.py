"""GRPO on one page: rows in, a better model out. Read it from top to bottom; train_grpo.py has what is left out here.

    python scripts/make_models.py smollm2 models/SmolLM2-135M-Instruct    # or --model_id: any text model for chats
    python train_minimal.py --generator hf                                # one process that trains and samples

With a server that samples, and two ranks that train, on three GPUs or on CPUs (the token: any string, the same in both
terminals):

    export VLLM_SERVER_TOKEN=...
    CUDA_VISIBLE_DEVICES=0 python vllm_server.py --model models/SmolLM2-135M-Instruct --max-model-len 256  # terminal 1
    CUDA_VISIBLE_DEVICES=1,2 torchrun --nproc_per_node=2 train_minimal.py                                  # terminal 2

(256 tokens: at least max_prompt_length + max_completion_length.)

A step:

    1. prompts      every rank takes its share of `prompts_per_step` rows
    2. completions  the generator samples `num_generations` of each; reward functions score them
    3. advantages   how much better than the mean completion of the same prompt, in standard deviations
    4. update       make tokens of good completions more likely, of bad ones less, not too far at once
    5. push         the generator gets the new weights; the next step samples from them

Every rank has a copy of the model (DDP): weights and Adam's moments in float32, forward passes in bfloat16. No KL term,
no reference model. Dimensions: B completions (this rank's share of a step, or one micro-batch, `part`), T tokens of
the longest prompt + completion (column 0 is a prompt's first token), V vocabulary.
"""
# ruff: noqa: E402 - the command line is read before torch is imported, so that a wrong flag is reported at once

from dataclasses import field
from typing import Literal

from config import ConfigError, TrainConfig, parse_args


class Settings(TrainConfig):  # subclasses of TrainConfig become dataclasses by themselves
    """The flags of this script. What a helper file reads beside them (compute_dtype, eval_generations, system_prompt,
    reward_weights, ...) has TrainConfig's default; declare such a setting below to make it a flag. What is computed in
    this file has the settings that stand here: there is no beta, and no top_p."""

    own_flags_alone = True  # the command line has the flags below, --config and --help
    first_run = "--generator hf"  # suggested when started without arguments and without VLLM_SERVER_TOKEN

    model_id: str = "models/SmolLM2-135M-Instruct"  # folder or hub id of the model to train
    dataset_id: str = "examples/sums.py:rows"  # function, file or hub id; a row has a `prompt` and what rewards need
    eval_dataset_id: str | None = None  # held-out rows; unset: dataset_id's split "test". Beside a file: give one
    reward_funcs: list[str] = field(default_factory=lambda: ["last_number"])  # of rewards.py, or FILE.py:FUNCTION
    generator: Literal["vllm", "hf"] = "vllm"  # servers sample, or a copy of the model in this process
    server_urls: list[str] = field(default_factory=lambda: ["http://127.0.0.1:8000"])  # of vllm_server.py
    prompts_per_step: int = 8  # of all ranks together
    num_generations: int = 8  # completions of each prompt, 2 or more
    max_prompt_length: int = 128  # tokens; rows with longer prompts are left out
    max_completion_length: int = 12  # tokens; what is longer is cut off
    temperature: float = 1.0  # divides the logits, when sampling and when training
    rows_per_microbatch: int = 16  # completions in one forward and backward pass; changes memory, not the gradient
    num_iterations: int = 1  # optimizer updates on the completions of a step
    learning_rate: float = 1e-5  # at the first step; decays linearly to 0 over max_steps
    epsilon: float = 0.2  # lower clip: a token with A < 0 gets no gradient once its ratio is below 1 - epsilon
    epsilon_high: float = 0.2  # upper clip: of A > 0, above 1 + epsilon_high; with one update neither ever binds
    max_grad_norm: float = 1.0  # longer gradients are scaled down to this
    max_steps: int = 30  # training steps
    eval_steps: int | None = 10  # evaluates every so many steps, before the first and after the last; none: never
    seed: int = 42  # of the order of prompts, of a data set that is a function, and of --generator hf
    output_dir: str = "runs"  # the run's folder is made here; `python look.py runs/` shows it
    run_name: str | None = None  # name of that folder; if unset, built from the model's name and the time


if __name__ == "__main__":
    CONFIG = parse_args(Settings, description=__doc__.split("\n")[0])

import asyncio
import contextlib

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import utils
from data import check_step_size, load_data
from hf_generator import HFGenerator
from inputs.loading import load_whole
from inputs.processor import load_processor
from inputs.prompts import end_ids, prompt_ids
from inputs.trajectory import Trajectory
from rewards import get_reward_functions, score
from runlog.log import RunLog, clock, close_all, completion_rows, name_run
from runlog.rollout_metrics import eval_metrics, rollout_metrics
from serving import servers

# ---- 1 prompts ------------------------------------------------------------------------------------------------------


def rows_of_step(rows: list[dict], step: int, cfg: Settings) -> list[dict]:
    """This rank's share of a step. Rows are shuffled anew in each epoch; all ranks draw the same order. (In a step with
    the end of one and the beginning of the next a row may come twice.)"""
    numbers = []
    for drawn in range(step * cfg.prompts_per_step, (step + 1) * cfg.prompts_per_step):
        epoch, place = divmod(drawn, len(rows))
        order = np.random.default_rng([cfg.seed, epoch]).permutation(len(rows))  # for each prompt: simple, not fast
        numbers.append(order[place])
    return [rows[number] for number in numbers[dist.get_rank() :: dist.get_world_size()]]


# ---- 2 completions and their rewards --------------------------------------------------------------------------------

# A row is a dict: {"prompt": [{"role": "user", "content": "What is 12 + 34?"}], "answer": "46"}, or its prompt a text.
# `completions` (messages where the prompt is messages, else texts), `prompts` and each column but `prompt` reach a
# reward function as lists with one element per completion of the prompt. It returns a number for each; those of several
# functions are summed (rewards.py says what else it can ask for):
#
#     from rewards import completion_text  # takes messages and texts
#
#     def exact(completions, answer, **columns):
#         return [float(completion_text(c) == a) for c, a in zip(completions, answer)]


async def sample(rows: list[dict], count: int, generator, reward_functions: dict, cfg: Settings) -> list[Trajectory]:
    """Exactly `count` completions of each row, scored, in the order of the rows: `advantages` and `evaluate` rely on
    that order. All rows are sampled at the same time.

    generator: VLLMClient or HFGenerator; `await generate(token_ids, n=, max_tokens=, temperature=)` returns n
    Completions: tokens, and their log-probs under the distribution that they were drawn from.
    """

    async def of_row(index: int, row: dict) -> list[Trajectory]:
        prompt = prompt_ids(row, generator.tokenizer, cfg)  # in the model's chat template
        # Sampled from softmax(logits / temperature), as in token_logprobs: top_p is 1 and top_k off by default here,
        # whatever the model's generation_config.json says.
        how = dict(n=count, max_tokens=cfg.max_completion_length, temperature=cfg.temperature)
        completions = await generator.generate(prompt, **how)
        trajectories = [
            Trajectory(
                row=row,
                group=index * dist.get_world_size() + dist.get_rank(),  # of all ranks' prompts, for metrics and logs
                prompt_ids=prompt,
                token_ids=c.token_ids,  # as they were sampled, with the end token: text is never tokenised again
                loss_mask=[1] * len(c.token_ids),  # 1: sampled by the model; 0 would mark a tool's answer
                logprobs=c.logprobs,  # the generator's, rounded differently: to watch the gap to the trainer's
                token_rewards=[0.0] * len(c.token_ids),  # `score` writes the reward to the last token
                finish_reason=c.finish_reason,  # "stop", or "length" if it was cut off
                policy_version=c.policy_version,  # steps done by the weights that sampled the first token
                policy_version_last=c.policy_version_last,  # and the last token; None: the same
                info={"completion": generator.tokenizer.decode(c.token_ids, skip_special_tokens=True)},  # for rewards
            )
            for c in completions
        ]
        await score(trajectories, reward_functions, cfg, generator.tokenizer)  # while a server still samples others
        return trajectories

    return sum(await asyncio.gather(*(of_row(index, row) for index, row in enumerate(rows))), [])


def padded(rows: list[list]) -> Tensor:
    """[[1, 2], [3]] -> [[1, 2], [3, 0]]"""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def tensors(trajectories: list[Trajectory], device: torch.device) -> dict[str, Tensor]:
    """Prompts with their completions, padded on the right: column t holds token t.  [B, T] each"""
    zeros = [[0] * len(t.prompt_ids) for t in trajectories]  # for the prompt tokens
    batch = {
        "input_ids": padded([t.prompt_ids + t.token_ids for t in trajectories]),
        "attention_mask": padded([[1] * len(t.prompt_ids + t.token_ids) for t in trajectories]),
        "loss_mask": padded([zero + t.loss_mask for zero, t in zip(zeros, trajectories, strict=True)]).float(),
        "sampling_logprobs": padded([zero + t.logprobs for zero, t in zip(zeros, trajectories, strict=True)]).float(),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


# ---- 3 advantages ---------------------------------------------------------------------------------------------------


def advantages(scores: Tensor, num_generations: int) -> Tensor:
    """(score - mean) / std (of n - 1), over the completions of one prompt; about 0 where all scored the same.  [B] ->
    [B]

    DeepSeekMath (2402.03300) sec. 4.1.2. The scores of one prompt are consecutive, num_generations for every prompt,
    all of them on one rank.
    """
    # In float64: in float32 the mean of equal scores can be off by a rounding error, and dividing by 1e-6 below would
    # blow that up into an advantage.
    groups = scores.double().view(-1, num_generations)  # [prompts, completions of each]
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-6)).flatten().float()


# ---- 4 update -------------------------------------------------------------------------------------------------------


def micro_batches(batch: dict[str, Tensor], cfg: Settings) -> list[dict[str, Tensor]]:
    """The batch in parts of `rows_per_microbatch` completions: splits every tensor along its rows, even inside a group.
    All ranks have the same number of rows (`check_step_size`), so the same number of parts."""
    parts = (tensor.split(cfg.rows_per_microbatch) for tensor in batch.values())
    return [dict(zip(batch, part, strict=True)) for part in zip(*parts, strict=True)]


def token_logprobs(model: nn.Module, part: dict[str, Tensor], cfg: Settings) -> Tensor:
    """Log-prob of each token, given the tokens before it; 0 for the first.  [B, T]"""
    ids, mask = part["input_ids"], part["attention_mask"]
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=cfg.compute_dtype == "bfloat16"):  # the default
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]  # [B, T - 1, V]
    logprobs = (logits.float() / cfg.temperature).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return nn.functional.pad(logprobs, (1, 0))


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, part: dict[str, Tensor], cfg: Settings) -> Tensor:
    """PPO's clipped ratio, per token.  [B, T]

    part: some rows of the batch: the fields of `tensors`, and "advantages", [B, T] each. Do not average over rows here:
    the result would depend on how the batch is cut. The loss must be finite at prompts and padding, too: the caller
    multiplies it by loss_mask, and infinity times 0 is nan.

    The ratio is 1 in the first update of a step: the loss is -A, its gradient -A grad log pi. In later updates the
    gradient is 0 for tokens with A > 0 and a ratio above 1 + epsilon_high, and with A < 0 and one below 1 - epsilon.
    """
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - cfg.epsilon, 1 + cfg.epsilon_high)
    return -torch.min(ratio * part["advantages"], clipped * part["advantages"])


def accumulate_gradients(model: nn.Module, batch: dict[str, Tensor], cfg: Settings) -> dict[str, float]:
    """The gradient of the mean loss over all tokens that *all* ranks have sampled in this step, however many ranks and
    micro-batches there are. Returns the same mean of the loss, and of |trainer - generator| log-prob."""
    # All tokens have equal weight, however long their completion (as in DAPO; GRPO averages each completion first).
    # Tokens of groups with advantage 0 are counted, too, so many such groups make the gradient smaller.
    count = batch["loss_mask"].sum()
    dist.all_reduce(count)
    sums, parts = torch.zeros(2, device=count.device), micro_batches(batch, cfg)
    for part in parts:
        not_last = isinstance(model, DistributedDataParallel) and part is not parts[-1]
        with model.no_sync() if not_last else contextlib.nullcontext():  # ranks all-reduce gradients in the last only
            logprobs, mask = token_logprobs(model, part, cfg), part["loss_mask"]
            # The trainer's log-probs before the step's first update, not the generator's: the clip measures how far
            # updates have moved the policy. With one update a step they are the current ones.
            old = part.get("old_logprobs", logprobs.detach())
            loss = (policy_loss(logprobs, old, part, cfg) * mask).sum() / count
            (loss * dist.get_world_size()).backward()  # DDP averages over ranks, and a sum is wanted
        gap = ((logprobs.detach() - part["sampling_logprobs"]).abs() * mask).sum() / count
        sums += torch.stack([loss.detach(), gap])
    dist.all_reduce(sums)
    return dict(zip(("loss", "sampling/logprob_diff_mean"), sums.tolist(), strict=True))


def update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], step: int, cfg: Settings):
    """`num_iterations` updates of the weights. Returns numbers to log."""
    if cfg.num_iterations > 1:
        with torch.no_grad():
            old = [token_logprobs(model, part, cfg) for part in micro_batches(batch, cfg)]
        batch["old_logprobs"] = torch.cat(old)
    optimizer.param_groups[0]["lr"] = cfg.learning_rate * (1 - step / cfg.max_steps)
    metrics: dict[str, float] = {}
    for _ in range(cfg.num_iterations):
        numbers = accumulate_gradients(model, batch, cfg)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm))
        if not np.isfinite(norm):
            raise RuntimeError(f"step {step}: the gradient norm is {norm} ({numbers}), so this update was not made.")
        # Log the first update: before it, trainer and generator have equal weights. Its loss is -mean(A): watch the
        # reward, not the loss.
        if not metrics:
            metrics = numbers | {"grad_norm": norm}
        optimizer.step()
        optimizer.zero_grad()
    return metrics | {"lr": optimizer.param_groups[0]["lr"]}


# ---- 5 weights to the generator -------------------------------------------------------------------------------------


BUCKET = 256 * 2**20  # bytes


def push_weights(model: nn.Module, generator, version: int) -> None:
    """Sends all weights to the generator, in buckets: begin, a call per bucket, finish. It rounds them to its dtype,
    refuses unknown names and a push in which some are missing, and says `policy_version = version` of each completion
    that it samples from then on. model: without DDP, which changes the names.
    """
    # Nobody samples now: no rank gets through the update's all-reduce before every rank has its completions.
    if generator.receives_weights:  # rank 0 for servers, every rank for a copy in its own process
        generator.begin_push()
        bucket, size = [], 0
        for name, weight in model.named_parameters():  # tied weights are sent once; the generator expects that
            bucket, size = [*bucket, (name, weight.detach())], size + weight.nbytes
            if size >= BUCKET:
                generator.send_bucket(bucket)
                bucket, size = [], 0
        if bucket:
            generator.send_bucket(bucket)
        generator.finish_push(version)
    dist.barrier()  # no rank samples before the weights are there


# ---- the loop -------------------------------------------------------------------------------------------------------


def train(cfg: Settings) -> dict[str, float]:
    """Returns the metrics of the last evaluation."""
    if cfg.num_generations < 2:
        raise ConfigError(
            f"--num_generations={cfg.num_generations}: a prompt's completions are compared; give 2 or more."
        )
    rank, world, device = utils.init_distributed(cfg.dist_timeout)  # a process group, of one process without torchrun
    cfg = utils.computable(cfg, device)  # compute_dtype is float32 on a CPU that is slow in bfloat16
    tokenizer = load_processor(cfg.model_id)  # of a text model its tokenizer
    reward_functions = get_reward_functions(cfg)

    def lengths(rows: list[dict], where: str) -> list[int]:  # of prompts, in tokens; `load_data` gives `where`
        return [len(prompt_ids(row, tokenizer, cfg)) for row in rows]

    # Rows as they are in the data set, without those that are too long.
    rows, held_out = load_data(cfg, format_row=lambda row: row, measure=lengths)
    check_step_size(len(rows), cfg.prompts_per_step, world)  # enough rows, and equally many prompts on every rank
    # from_pretrained returns it in eval mode: no dropout, like the generator.
    bare = load_whole(AutoModelForCausalLM, cfg.model_id, dtype=torch.float32).to(device)
    model = DistributedDataParallel(bare) if world > 1 else bare
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    if cfg.generator == "vllm":
        generator = servers.connect(cfg, bare, device)  # waits for them, and checks that they serve this model
    else:
        # In compute_dtype, as a server usually is. It is never trained: only a push changes it.
        copy = load_whole(AutoModelForCausalLM, cfg.model_id, dtype=getattr(torch, cfg.compute_dtype)).to(device)
        generator = HFGenerator(copy, tokenizer)
    generator.tokenizer = tokenizer  # for `sample`; a server's client has none
    generator.stop_token_ids = sorted(end_ids(bare, tokenizer))  # a base model's may lack the template's end of a turn
    cfg.run_name = utils.gather_objects(name_run(cfg))[0]  # rank 0's: its name has the time in it
    log = RunLog(cfg) if rank == 0 else None
    push_weights(bare, generator, 0)  # the server may still have an earlier run's weights

    def sampled(rows: list[dict], count: int, step: int) -> list[Trajectory]:
        """Completions by the weights after `step` steps; RuntimeError if the generator has others."""
        if cfg.generator == "hf":
            # The hash of numbers is the same in every run. An evaluation may use the same seed as a step.
            generator.seed(hash((cfg.seed, step, rank)))
        trajectories = asyncio.run(sample(rows, count, generator, reward_functions, cfg)) if rows else []
        utils.check_fresh(trajectories, range(step, step + 1), cfg.generator)
        return trajectories

    def evaluate(step: int) -> dict[str, float]:
        """eval/reward; eval/mean@k: share of completions with a score of at least 1; eval/pass@k: of rows with one."""
        k = cfg.eval_generations  # 4 by default, at the training temperature
        found = sampled(held_out[rank::world], k, step)
        groups = [found[start : start + k] for start in range(0, len(found), k)]
        metrics = {f"eval/{name}": value for name, value in eval_metrics(groups, cfg).items()}  # over all ranks
        if log:
            log.eval(step, metrics)
        return metrics

    last_eval = evaluate(0) if cfg.eval_steps else {}
    num_tokens = 0  # of the run so far, prompts included
    for step in range(cfg.max_steps):
        metrics: dict[str, float] = {}
        with clock(metrics, "step"):
            with clock(metrics, "generate"):
                trajectories = sampled(rows_of_step(rows, step, cfg), cfg.num_generations, step)
            metrics |= rollout_metrics(trajectories)  # reward, length, ... over all ranks
            metrics["num_tokens"] = num_tokens = num_tokens + metrics["num_tokens"]  # from which the log counts tok/s
            scores = [sum(t.token_rewards) for t in trajectories]
            gains = advantages(torch.tensor(scores, dtype=torch.float64), cfg.num_generations)  # [B]
            batch = tensors(trajectories, device)
            batch["advantages"] = gains.to(device)[:, None].expand_as(batch["loss_mask"])  # every token alike  [B, T]
            with clock(metrics, "update"):
                metrics |= update(model, optimizer, batch, step, cfg)
            if step == 0:  # ends the run if the server computes otherwise: quantised, another config, ...
                utils.check_agreement(metrics["sampling/logprob_diff_mean"], cfg)
            with clock(metrics, "push"):
                push_weights(bare, generator, step + 1)
        completions = utils.gather_lists(completion_rows(trajectories, scores, gains.tolist()))
        if log:
            log.step(step + 1, metrics, completions)  # steps done; the completions were sampled before
        if cfg.eval_steps and ((step + 1) % cfg.eval_steps == 0 or step + 1 == cfg.max_steps):
            last_eval = evaluate(step + 1)
    if log:
        from runlog.checkpoints import save_model  # needed once, so it is loaded here

        save_model(log.dir / "model", bare, tokenizer)
        log.close()
    generator.close()
    return last_eval


def main(cfg: Settings) -> None:
    """Train, and end the process: a failed run is explained, and leaves no thread or rank behind."""
    utils.run_and_exit(lambda: train(cfg), cfg, close_all)


if __name__ == "__main__":
    main(CONFIG)
