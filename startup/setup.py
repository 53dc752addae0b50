"""Before the first step: check settings and rows before a process group, a GPU or a server is touched; first push."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

import data
import rollouts
from algorithms import optimizers, teachers
from batch import Batch
from config import TrainConfig, naming_domain
from inputs.processor import load_processor, with_template_kwargs
from modeling import agreement, router_replay
from modeling.model import backbone, push_bucket_mb
from modeling.parameters import unwrapped
from rewards import get_reward_functions
from startup import colocate


def settings_and_data(
    cfg: TrainConfig, format_row: Callable[[dict], dict], load_hf_model: Callable
) -> tuple[TrainConfig, dict[str, Callable], object, Sequence[dict], list[dict]]:
    """(settings, with those that depend on model and rows filled in; reward functions; processor; training rows;
    held-out rows). ConfigError if they cannot work together. format_row, load_hf_model: train_grpo.py's."""
    with torch.device("meta"):  # finds models that cannot be built
        hf_model = load_hf_model(cfg, torch.float32)
        if cfg.router_aux_coef:
            router_replay.balance_loss(hf_model)
        backbone(hf_model)
    cfg = replace(cfg, push_bucket_mb=cfg.push_bucket_mb or push_bucket_mb(hf_model.num_parameters()))
    optimizers.check_optimisation(cfg)
    for domain in cfg.by_domain():
        with naming_domain(domain):
            rollouts.check_rollout(domain)
    processor = with_template_kwargs(load_processor(cfg.model_id), cfg.chat_template_kwargs)  # or a bare tokenizer
    cfg = rollouts.with_parser(cfg, processor)
    rows, held_out, reward_functions = rows_and_rewards(cfg, processor, format_row)
    if cfg.max_steps is None:
        cfg = replace(cfg, max_steps=max(1, int(cfg.num_epochs * len(rows)) // cfg.prompts_per_step))
    return cfg, reward_functions, processor, rows, held_out


def rows_and_rewards(cfg: TrainConfig, processor, format_row: Callable) -> tuple[Sequence[dict], list[dict], dict]:
    """Training rows, held-out rows and reward functions, over all domains."""
    rows, held_out, reward_functions = [], [], {}
    for domain in cfg.by_domain():
        with naming_domain(domain):
            training, evaluated = data.load_data(domain, format_row, cfg)
            for split, name in ((training, "training rows"), (evaluated, "held-out rows")):
                rollouts.look_at(split, f"{domain.prefix}{name}", processor, domain)
            functions = get_reward_functions(domain, data.columns_of(training), data.columns_of(evaluated))
            if domain.has_teacher and not cfg.eval_only:
                teachers.connect(domain, processor, training)
        # Rows on disk stay there; those of several domains are a list.
        rows, held_out = [*rows, *training] if cfg.domains else training, held_out + evaluated
        reward_functions |= {domain.prefix + name: function for name, function in functions.items()}
    return rows, held_out, reward_functions


def first_push(run, cfg: TrainConfig, all_logprobs: Callable, push_weights: Callable) -> TrainConfig:
    """Compare the policy with its plain transformers model on a text, push the weights to the generator, and compare
    its log-probs with the policy's. Returns the settings, with plain rows if packed rows differ. Collective.
    run, all_logprobs, push_weights: train_grpo.py's."""
    text = agreement.trials(run.generator, unwrapped(run.policy).hf_model, cfg, itertools.chain(run.rows, run.held_out))

    def logprobs(policy: nn.Module, batch: Batch, cfg: TrainConfig) -> Tensor:
        return all_logprobs(policy, batch, cfg)["logprobs"]

    def push() -> None:
        push_weights(run.policy, run.generator, run.first, cfg.push_bucket_mb)

    colocate.trainers_turn(run, cfg)
    for policy in [run.policy, *([run.teacher] if run.teacher else [])]:
        cfg = agreement.check_policy(unwrapped(policy), partial(logprobs, policy), text, cfg, run.device)
    colocate.servers_turn(run, cfg)
    push()
    sampled = agreement.ask(run.generator, text, cfg)
    colocate.trainers_turn(run, cfg)
    dtype = run.generator.weight_dtype
    agreement.check_generator(sampled, partial(logprobs, run.policy), dtype, cfg, run.device)
    colocate.servers_turn(run, cfg)
    if cfg.colocate:  # the server has slept, and lost its weights
        push()
    return cfg
