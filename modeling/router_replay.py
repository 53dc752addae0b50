"""Which experts a token goes to: noted while sampling, replayed while training (R3, 2510.11370).

Generator and trainer round differently, and where two experts score nearly alike they choose differently: for about a
tenth of the tokens, and then the log-probs are those of another network. With replay the trainer's layers take the
experts that the generator took, and weigh them by their own scores, with the gradient that they have.

Routers score experts in many ways (softmax, sigmoid, a bias, groups) and choose in one: `topk` over all experts. So
`topk` is what is told the choice. It answers with the given experts, and their scores from the layer's own.

`balance_loss` is transformers' own loss that keeps experts evenly used (--router_aux_coef).
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
    """Stands in all layers of one model. `choice`, [tokens, layers, k], is what the next forward passes replay, with
    their recomputation; -1 leaves it to the layer, and None all of it. Tokens are numbered as they stand in
    [rows, columns]."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.experts, self.chosen = experts_of(model.config)
        self.layers = model.get_decoder().layers
        self.choice: Tensor | None = None
        self.noted: dict[int, Tensor] | None = None  # layer -> [tokens, k], while `noting`
        self.layer = self.passes = 0
        # By pass and layer, since checkpointing computes layers twice: how many choices were replayed, and how many of
        # them the layer had not made. [2] each
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
        scores, own = args[0], out.indices  # [..., E], [..., k]
        if scores.shape[-1] != self.experts or own.shape[-1] != self.chosen:
            return out  # of groups of experts, or of something else
        if self.noted is not None:
            chosen = own.detach().flatten(0, -2)  # -1 where a layer has two routers, as it is told one choice
            self.noted[self.layer] = torch.full_like(chosen, -1) if self.layer in self.noted else chosen
        if self.choice is None:
            return out
        given = self.choice[:, self.layer].to(own.device, own.dtype).view(own.shape)
        replayed = given >= 0
        with torch.no_grad():
            other = (given.sort(-1).values != own.sort(-1).values).any(-1) & replayed[..., 0]
            self.moved[self.passes, self.layer] = torch.stack([replayed[..., 0].sum(), other.sum()])
        chosen = torch.where(replayed, given, own)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))

    @contextlib.contextmanager
    def noting(self) -> Iterator[dict[int, Tensor]]:
        """What the layers choose in this forward pass."""
        self.noted = {}
        try:
            yield self.noted
        finally:
            self.noted = None

    def stacked(self, noted: dict[int, Tensor]) -> Tensor | None:
        """[tokens, layers, k] int16; -1 for layers without experts. None if no layer chooses by topk."""
        if not noted:
            warn_once("No layer of this mixture of experts chooses by topk, so its experts cannot be replayed.")
            return None
        some = next(iter(noted.values()))
        none = torch.full_like(some, -1)
        return torch.stack([noted.get(n, none) for n in range(len(self.layers))], 1).short()

    def differing(self) -> Tensor:
        """[2]: how many choices were replayed since the last call, and in how many the layer would have taken other
        experts."""
        moved, self.moved = [*self.moved.values()], {}
        return torch.stack(moved).sum(0).double() if moved else torch.zeros(2, dtype=torch.float64)


def of(model: nn.Module, cfg: TrainConfig) -> tuple[Routing | None, Callable | None]:
    """What replays in a transformers model, None for a dense one and where it is not asked for; and its `balance_loss`,
    with --router_aux_coef."""
    routing = Routing(model) if cfg.router_replay != "off" and experts_of(model.config)[0] else None
    return routing, balance_loss(model) if cfg.router_aux_coef else None


def replay(routing: Routing | None, inputs: dict) -> dict:
    """A pass's inputs as a model takes them; the experts among them, [R, L, layers, k], are for its layers, in this
    pass and in its recomputation."""
    if routing is not None:
        choice = inputs.get("routed_experts")
        routing.choice = None if choice is None else choice.flatten(0, 1)
        routing.passes += 1
    return {name: x for name, x in inputs.items() if name != "routed_experts"}


def balance_loss(model: nn.Module) -> Callable[[tuple, Tensor], Tensor]:
    """(router logits of each layer, attention mask [R, L]) -> the load-balancing loss, as transformers has it for this
    family (2101.03961, eq. 4 - 6). ConfigError where it has none: --router_aux_coef has nothing to balance."""
    experts, chosen = experts_of(model.config)
    of_family = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if not experts or of_family is None:
        raise ConfigError(
            f"--router_aux_coef: transformers has no load-balancing loss for {type(model).__name__}; leave it out."
        )
    return lambda logits, mask: of_family(logits, experts, chosen, mask)


def ask(generator, model: nn.Module, cfg: TrainConfig) -> None:
    """Have the generator tell the experts of its tokens, if it can. ConfigError if it cannot and is to."""
    experts, _ = experts_of(model.config)
    able = experts and generator.can_tell_experts()
    generator.tells_experts = bool(able) and cfg.router_replay != "off"
    if cfg.router_replay == "on" and not able:
        why = "the server does not tell its experts, why it says at start" if experts else "the model has no experts"
        raise ConfigError(f"--router_replay on: {why}.")
    if cfg.router_replay == "auto" and experts and not able:
        warn_once(
            "This mixture of experts trains without router replay: trainer and server will choose other experts for "
            "some tokens. The server says at its start why it does not tell its own."
        )


def metrics(routing: Routing | None, batch) -> dict:
    """Of a step's passes, over all ranks, which all call it: the share of replayed choices (a token in a layer) that
    the trainer would have made otherwise."""
    if routing is None or utils.all_max(int(batch.routed_experts is not None)) == 0:
        return {}
    replayed, moved = utils.all_sum(routing.differing().to(batch.input_ids.device)).tolist()
    return {"routing/differs": moved / replayed} if replayed else {}
