"""Schedules and optimizers by name: transformers' rates, torch's updates, mistakes before anything is touched."""

import re
from dataclasses import replace

import pytest
import torch
from transformers.optimization import get_scheduler
from transformers.trainer_utils import SchedulerType

import train_grpo as script
from algorithms import optimizers
from config import ConfigError, TrainConfig, load_config

pytestmark = pytest.mark.quick

ARGUMENTS = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-7},
    "warmup_stable_decay": {"num_decay_steps": 8},
    "cosine_with_restarts": {"num_cycles": 3},
}
METRIC = {"reduce_lr_on_plateau", "greedy"}  # follow a metric, not the step: refused


@pytest.mark.parametrize("name", sorted({each.value for each in SchedulerType} - METRIC))
def test_a_schedule_of_transformers_gives_its_rates_whatever_comes_first(name):
    """As its scheduler gives step by step; here from the number alone, as a resumed run asks for them."""
    cfg = TrainConfig(
        lr_schedule=f"{name}?{'&'.join(f'{k}={v}' for k, v in ARGUMENTS.get(name, {}).items())}",
        warmup_steps=3, learning_rate=1e-5, max_steps=10, num_minibatches=2, prompts_per_step=4,
    )  # fmt: skip
    optimizers.check_optimisation(cfg)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-5)
    schedule = get_scheduler(name, optimizer, 6, 20, scheduler_specific_kwargs=ARGUMENTS.get(name))
    wanted = []
    for _ in range(20):
        wanted.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    wanted = [wanted[u + 1] if u < 6 else wanted[u] for u in range(20)]  # ours begin with a part of the rate
    if name == "constant":  # has a warm-up here
        wanted = [1e-5 * min((u + 1) / 6, 1) for u in range(20)]
    found = {update: script.lr_at(update, cfg) for update in reversed(range(20))}
    assert [found[u] for u in range(20)] == pytest.approx(wanted, rel=1e-9, abs=1e-20)


def test_a_warm_up_counts_steps_or_is_a_share_of_them():
    cfg = TrainConfig(learning_rate=1.0, warmup_steps=2, max_steps=5, num_iterations=2)
    assert [script.lr_at(u, cfg) for u in range(10)] == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]
    assert script.lr_at(0, replace(cfg, warmup_steps=0)) == 1
    share = TrainConfig(learning_rate=1.0, warmup_steps=0.2, max_steps=10, lr_schedule="linear")
    assert [script.lr_at(n, share) for n in (0, 1, 2, 9)] == pytest.approx([0.5, 1, 1, 1 / 8])


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--lr_schedule cosinus", "'cosinus'.*Did you mean 'cosine'"),
        ("--lr_schedule greedy", "'greedy'; known are constant, constant_with_warmup"),
        ("--lr_schedule linear?power=2", "power"),
        ("--optim AdamX", "'AdamX'.*Did you mean"),
        ("--optim LBFGS", "unknown name 'LBFGS'"),
    ],
)
def test_mistakes_in_schedule_and_optimizer_are_named_before_anything_is_touched(flags, says):
    with pytest.raises(ConfigError) as caught:
        optimizers.check_optimisation(load_config(TrainConfig, flags.split()))
    assert re.search(says, str(caught.value))


@pytest.mark.parametrize("name, kind", [("adamw_torch_fused", "AdamW"), ("sgd", "SGD"), ("NAdam", "NAdam")])
def test_an_optimizer_by_name_is_the_one_torch_makes(name, kind):
    cfg, updated = TrainConfig(optim=name, learning_rate=0.1, weight_decay=0.2), []
    betas = {"betas": (0.9, cfg.adam_beta2)} if "Adam" in kind else {}
    theirs = lambda p: getattr(torch.optim, kind)(p.parameters(), lr=0.1, weight_decay=0.2, **betas)  # noqa: E731
    for make in (lambda p: script.make_optimizer(p, cfg), theirs):
        torch.manual_seed(0)
        module = torch.nn.Linear(4, 4)
        optimizer = make(module)
        for _ in range(3):
            module(torch.ones(4)).square().sum().backward()
            optimizer.step()
        updated.append(module.weight)
        assert type(optimizer).__name__ == kind
    assert torch.allclose(*updated, atol=1e-6)
