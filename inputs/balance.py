"""The loss that keeps experts evenly used (--router_aux_coef): Switch Transformer, 2101.03961, eq. 4 - 6."""

import torch
from torch import nn

import utils
from batch import Batch
from config import ConfigError, TrainConfig
from inputs.packing import micro_batches, pack
from inputs.routing import experts_of, routers_of


def check(model: nn.Module, cfg: TrainConfig) -> None:
    """ConfigError where --router_aux_coef has nothing to balance."""
    if cfg.router_aux_coef and not experts_of(model.config)[0]:
        raise ConfigError(f"--router_aux_coef={cfg.router_aux_coef}: the model has no experts; leave it out.")
    if cfg.router_aux_coef and not routers_of(model):
        raise ConfigError(
            f"--router_aux_coef={cfg.router_aux_coef}: transformers returns no router logits of "
            f"{type(model).__name__}; leave it out."
        )


def begin(policy: nn.Module, batch: Batch, cfg: TrainConfig) -> None:
    """Have the next passes with gradient, an optimizer update's, add the gradient of

        router_aux_coef * E * sum over e of f_e P_e

    f_e: how often an expert was chosen for a token in a layer (they add up to k), of which there is no gradient. P_e:
    mean of softmax(router logits), whatever the router makes of its logits. Both are means over the layers and over the
    tokens of the update, on all ranks: those that are learned from, each at the place that predicts it, so a shared
    prompt's last token counts for each completion. That is transformers' load_balancing_loss_func where routers choose
    by their logits alone (Qwen, Mixtral, OLMoE, gpt-oss, Granite); of others it has the gradient with the experts that
    were really chosen. f is counted before the update, and then the loss is a sum over tokens, however they are cut.
    With router replay it is known; else it takes a forward pass.
    """
    routing = getattr(policy, "module", policy).routing
    device, number = batch.input_ids.device, int(batch.loss_mask.sum())
    routing.pull = None
    rows, columns = batch.loss_mask.cpu().nonzero(as_tuple=True)  # replayed experts are in CPU memory
    known = None if batch.routed_experts is None else batch.routed_experts[rows, columns - 1][:, routing.routed].long()
    missing = number > 0 if known is None else bool((known < 0).any())
    routing.taken = torch.zeros(routing.experts, dtype=torch.float64, device=device)
    if utils.all_max(int(missing)) or len(routing.routed) < len(routing.routers):
        with torch.no_grad():
            for own in micro_batches(batch, cfg):
                part = batch.select(own or [0])
                part.loss_mask = part.loss_mask if own else torch.zeros_like(part.loss_mask)
                policy(*pack(part, cfg))
    elif known is not None:
        routing.taken += known.flatten().bincount(minlength=routing.experts).to(device)
    counted = torch.cat([routing.taken, routing.taken.new_tensor([number])])
    *taken, number = utils.all_sum(counted).tolist()
    routing.taken, routing.updates = None, routing.updates + 1
    if number and not any(taken):
        raise ConfigError("--router_aux_coef: no layer of this mixture of experts chooses by topk; leave it out.")
    places = max(number, 1) * len(routing.routers)
    scale = cfg.router_aux_coef * routing.experts / places**2 * utils.world_size()  # gradients are averaged over ranks
    routing.pull = torch.tensor(taken, device=device) * scale  # [E]
