"""Router replay: record the experts that each token goes to in sampling, and use them in training (R3, 2510.11370).

Generator and trainer round differently, so where two experts have nearly equal scores they choose differently. This
happens for about a tenth of the tokens, whose log-probs are then those of another network. With replay the trainer's
layers take the generator's experts, and weigh them by their own scores, through which the gradient flows.

Routers score experts in many ways (softmax, sigmoid, a bias, groups), but all choose by `topk` over all experts. So it
is `topk` that is replaced: it returns the recorded experts, with the scores that the layer gives them.

`balance_loss` is transformers' own loss that keeps experts evenly used (--router_aux_coef). The train script's Policy
has what `of` returns as its attributes `routing` and `balance`.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import utils
from config import ConfigError, TrainConfig
from modeling.model import experts_of
from safety.results import warn_once


class Routing(TorchFunctionMode):
    """Replays routing in all layers of one model. `choice`, [tokens, layers, k], holds the experts for the next forward
    passes and their recomputation; -1 leaves a choice to the layer, None all choices. Tokens are in row-major order of
    [rows, columns]."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.experts, self.chosen = experts_of(model.config)
        self.layers = model.get_decoder().layers
        self.choice: Tensor | None = None
        self.noted: dict[int, Tensor] | None = None  # layer -> [tokens, k], while `noting`
        self.layer = self.passes = 0
        # (choices replayed, those among them that differ from the layer's) by pass and layer, since checkpointing
        # computes layers twice. [2] each
        self.moved: dict[tuple[int, int], Tensor] = {}
        for number, layer in enumerate(self.layers):
            layer.forward = partial(self._within, number, layer.forward)

    def _within(self, number: int, forward, *inputs, **options):
        if self.choice is None and self.noted is None:
            return forward(*inputs, **options)
        self.layer = number
        with self:
            return forward(*inputs, **options)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return out
        scores, indices = args[0], out.indices  # [..., E], [..., k]
        if scores.shape[-1] != self.experts or indices.shape[-1] != self.chosen:
            return out  # topk of groups of experts, or of something else
        if self.noted is not None:
            choice = indices.detach().flatten(0, -2)  # -1 for a layer with two routers: it can replay only one
            self.noted[self.layer] = torch.full_like(choice, -1) if self.layer in self.noted else choice
        if self.choice is None:
            return out
        recorded = self.choice[:, self.layer].to(indices.device, indices.dtype).view(indices.shape)
        is_replayed = recorded >= 0
        with torch.no_grad():
            differs = (recorded.sort(-1).values != indices.sort(-1).values).any(-1) & is_replayed[..., 0]
            self.moved[self.passes, self.layer] = torch.stack([is_replayed[..., 0].sum(), differs.sum()])
        choice = torch.where(is_replayed, recorded, indices)
        return torch.return_types.topk((scores.gather(-1, choice), choice))

    @contextlib.contextmanager
    def noting(self) -> Iterator[dict[int, Tensor]]:
        """Record what the layers choose in this forward pass."""
        self.noted = {}
        try:
            yield self.noted
        finally:
            self.noted = None

    def stacked_choices(self, noted: dict[int, Tensor]) -> Tensor | None:
        """[tokens, layers, k] int16; -1 for layers without experts. None if no layer chooses by topk."""
        if not noted:
            warn_once("No layer of this mixture of experts chooses by topk, so its experts cannot be replayed.")
            return None
        first_choice = next(iter(noted.values()))
        no_choice = torch.full_like(first_choice, -1)
        return torch.stack([noted.get(n, no_choice) for n in range(len(self.layers))], 1).short()

    def replay_counts(self) -> Tensor:
        """[2]: choices replayed since the last call, and those among them for which the layer itself would have taken
        other experts."""
        moved, self.moved = [*self.moved.values()], {}
        return torch.stack(moved).sum(0).double() if moved else torch.zeros(2, dtype=torch.float64)


def of(model: nn.Module, cfg: TrainConfig) -> tuple[Routing | None, Callable | None]:
    """The Routing of a transformers model, None if it is dense or --router_replay is off; and its `balance_loss`, None
    without --router_aux_coef."""
    routing = Routing(model) if cfg.router_replay != "off" and experts_of(model.config)[0] else None
    return routing, balance_loss(model) if cfg.router_aux_coef else None


def replay(policy: nn.Module, inputs: dict) -> dict:
    """The inputs of a pass without "routed_experts", [R, L, layers, k], which goes to the model's layers instead, for
    this pass and its recomputation; with --router_aux_coef the model has to return its router logits."""
    if policy.routing is not None:
        choice = inputs.get("routed_experts")
        policy.routing.choice = None if choice is None else choice.flatten(0, 1)
        policy.routing.passes += 1
    kept = {name: x for name, x in inputs.items() if name != "routed_experts"}
    return kept | ({"output_router_logits": True} if policy.balance else {})


def balance_of(policy: nn.Module, out, inputs: dict) -> dict[str, Tensor]:
    """{"aux_loss": `balance_loss` of a pass in training, a scalar}; {} without --router_aux_coef."""
    if policy.balance is None or not torch.is_grad_enabled():
        return {}
    return {"aux_loss": policy.balance(out.router_logits, inputs["attention_mask"])}


def balance_term(outputs: dict[str, Tensor], part, cfg: TrainConfig, stats: dict) -> Tensor | float:
    """What --router_aux_coef adds to a micro-batch's loss: its `balance_loss`, which is a mean over the pass, weighted
    by the pass's share of the update's tokens. Logged by way of stats."""
    if "aux_loss" not in outputs:
        return 0.0
    stats["routing/aux_loss"] = outputs["aux_loss"]  # [B, T]
    share = part.loss_mask / max(part.update_tokens, 1)  # [B, T]
    return cfg.router_aux_coef * (outputs["aux_loss"] * share).sum()


def balance_loss(model: nn.Module) -> Callable[[tuple, Tensor], Tensor]:
    """transformers' load-balancing loss of this family (2101.03961, eq. 4 - 6): (router logits of each layer, attention
    mask [R, L]) -> loss. ConfigError if the family has none."""
    experts, chosen = experts_of(model.config)
    of_family = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if not experts or of_family is None:
        family = type(model).__name__
        raise ConfigError(f"--router_aux_coef: transformers has no load-balancing loss for {family}; leave it out.")
    return lambda logits, mask: of_family(logits, experts, chosen, mask)


def ask(generator, model: nn.Module, cfg: TrainConfig) -> None:
    """Have the generator report the experts of its tokens, if it can. ConfigError if it cannot and --router_replay is
    on."""
    experts, _ = experts_of(model.config)
    able = experts and generator.can_tell_experts()
    generator.tells_experts = bool(able) and cfg.router_replay != "off"
    if cfg.router_replay == "on" and not able:
        why = "the server does not tell its experts; its log says why" if experts else "the model has no experts"
        raise ConfigError(f"--router_replay on: {why}.")
    if cfg.router_replay == "auto" and experts and not able:
        why = "the server does not tell its experts; the beginning of its log says why"
        warn_once(f"This mixture of experts trains without router replay: {why}.")


def metrics(routing: Routing | None, batch) -> dict:
    """Over a step's passes: the share of replayed choices (one token in one layer) that the trainer would have made
    differently. Collective."""
    if routing is None or utils.all_max(int(batch.routed_experts is not None)) == 0:
        return {}
    replayed, moved = utils.all_sum(routing.replay_counts().to(batch.input_ids.device)).tolist()
    return {"routing/differs": moved / replayed} if replayed else {}
