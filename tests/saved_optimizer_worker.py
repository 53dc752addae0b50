"""Every optimizer that can be named, under one sharding: saved after two updates and loaded into a new policy, the
third update is the same. The last layer never has a gradient, as that of an image encoder of which an earlier one is
used. Run by test_coming_from_trl.py and torchrun.

usage: saved_optimizer_worker.py OUT.json [flags of TrainConfig]
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import gradient_worker  # noqa: E402

import train_grpo as script  # noqa: E402
import utils  # noqa: E402
from algorithms import optimizers  # noqa: E402
from config import ConfigError, TrainConfig, load_config  # noqa: E402
from rollouts import Trajectory  # noqa: E402
from runlog import checkpoints  # noqa: E402


def advance(policy, optimizer, numbers: range) -> dict[str, torch.Tensor]:
    """Updates by gradients that follow from their number; the whole weights after them."""
    for number in numbers:
        trained = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
        for index, parameter in enumerate(p for name, p in trained if "layers.1." not in name):
            generator = torch.Generator().manual_seed(1000 * number + index)  # one of FSDP2 is cut like its parameter
            parameter.grad = torch.zeros_like(parameter)
            local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
            local.copy_(torch.randn(local.shape, generator=generator))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        optimizer.step()
        optimizer.zero_grad()
    named = [item for bucket in script.weight_buckets(policy, 2**30, torch.float32) for item in bucket]
    return {name: tensor.clone() for name, tensor in named}


def outcome(flags: list[str], device, updates: int = 2, later: tuple[str, ...] = ()) -> str:
    """ "the same", what differs, or why the optimizer is refused.  updates: before it is saved; later: flags of the run
    that goes on, and of the one that it must be equal to."""
    try:
        cfg = load_config(TrainConfig, flags)
        optimizers.check_optimisation(cfg)
        policy, inner = script.load_policy(cfg, device)
        optimizer = script.make_optimizer(policy, cfg)
    except ConfigError as error:
        return str(error)
    folder = Path(utils.gather_objects(tempfile.mkdtemp())[0])
    advance(policy, optimizer, range(updates))
    modules = {"policy": (policy, optimizer)}
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    buckets = script.weight_buckets(policy, 2**30, torch.float32)
    checkpoints.save_checkpoint(folder, 2, modules, inner.hf_model, buckets, tokenizer, {}, {}, 1)
    cfg = load_config(TrainConfig, [*flags, *later])
    options = script.make_optimizer(policy, cfg).param_groups[0]
    for group in optimizer.param_groups:
        group.update({name: value for name, value in options.items() if name != "params"})
    wanted = advance(policy, optimizer, range(2, 4))
    policy, _ = script.load_policy(cfg, device)
    optimizer = script.make_optimizer(policy, cfg)
    checkpoints.load_checkpoint(folder, 2, {"policy": (policy, optimizer)}, {}, [Trajectory])
    found = advance(policy, optimizer, range(2, 4))
    different = [name for name in wanted if not torch.equal(wanted[name], found[name])]
    return f"{len(different)} of {len(wanted)} weights differ" if different else "the same"


def main(out: str, flags: list[str]) -> None:
    rank, _, device = utils.init_distributed(60)
    script.load_hf_model = gradient_worker.small_llama
    names = [*optimizers._classes("torch.optim"), *optimizers._classes("bitsandbytes.optim")]
    found = {}
    for name in dict.fromkeys([*names, *optimizers.SAME]):
        found[name] = outcome([*flags, "--optim", name], device)
        if rank == 0:
            print(name, found[name], flush=True)
    adamw = [*flags, "--optim", "AdamW", "--weight_decay", "0.1"]
    found["saved before the first update"] = outcome(adamw, device, 0)
    more = "--weight_decay 0 --adam_beta1 0.5 --adam_beta2 0.8 --adam_epsilon 1e-3"
    found["other settings"] = outcome(adamw, device, 2, tuple(more.split()))
    if rank == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    utils.end_process(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
