"""Which experts a token goes to: noted while sampling, replayed while training (R3, 2510.11370).

Generator and trainer round differently, and where two experts score nearly alike they choose differently: for about a
tenth of the tokens, and then the log-probs are those of another network. With replay the trainer's layers take the
experts that the generator took, and weigh them by their own scores, with the gradient that they have.

Routers score experts in many ways (softmax, sigmoid, a bias, groups) and choose in one: `topk` over all experts. So
`topk` is what is told the choice. It answers with the given experts, and their scores from the layer's own.

What is here of the loss that keeps experts evenly used is its gradient within a layer; see inputs/balance.py.
"""

import contextlib
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

import utils
from config import ConfigError, TrainConfig
from inputs.backbone import experts_of, text_model
from safety.calls import warn_once


def routers_of(model: nn.Module) -> dict[nn.Module, int]:
    """The modules that score experts, as transformers knows them where it is to return router logits; and which of
    their outputs the logits are."""
    found = {}
    for part in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
        told = (part._can_record_outputs or {}).get("router_logits", [])
        for recorder in told if isinstance(told, list) else [told]:
            recorder = recorder if isinstance(recorder, OutputRecorder) else OutputRecorder(recorder, index=1)
            where = f".{recorder.layer_name}." if recorder.layer_name else ""
            for name, module in part.named_modules():
                if isinstance(module, recorder.target_class) and where in f".{name}.":
                    found[module] = recorder.index
    return found


class Pulled(torch.autograd.Function):
    """Hidden states as they are, with `term` hung on them, a loss that was computed within the layer: when the backward
    pass comes through, it gets the gradient 1, as if it had been added to the loss. If it had been, its gradient would
    reach the layer's weights when FSDP has dropped them, or before checkpointing has computed its insides anew."""

    @staticmethod
    def forward(ctx, hidden: Tensor, term: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones((), dtype=torch.float32)


class Routing(TorchFunctionMode):
    """Stands in all layers of one model. `choice`, [tokens, layers, k], is what the next forward passes replay, with
    their recomputation; -1 leaves it to the layer, and None all of it. Tokens are numbered as they stand in
    [rows, columns]."""

    def __init__(self, model: nn.Module, balances: bool = False):
        super().__init__()
        self.experts, self.chosen = experts_of(model.config)
        self.layers = text_model(model).layers
        self.choice: Tensor | None = None
        self.noted: dict[int, Tensor] | None = None  # layer -> [tokens, k], while `noting`
        self.layer = self.passes = 0
        self.choosing: set[int] = set()  # layers that were seen to choose
        # By pass and layer, since checkpointing computes layers twice: how many choices were replayed, and how many of
        # them the layer had not made. [2] each
        self.moved: dict[tuple[int, int], Tensor] = {}
        self.routers = routers_of(model) if balances else {}
        self.routed = [n for n, layer in enumerate(self.layers) if not self.routers.keys().isdisjoint(layer.modules())]
        self.weights: Tensor | None = None  # [tokens] of a pass: how many tokens that are learned from each predicts
        self.taken: Tensor | None = None  # [E] how often experts were chosen for those, while it is counted
        self.pull: Tensor | None = None  # [E] what a token's probability of an expert costs: inputs/balance.py
        self.terms: list[Tensor] = []  # of the layer that is being computed
        self.cost: dict[tuple[int, nn.Module], Tensor] = {}  # by pass and router, of the step's updates
        self.updates = 0
        for number, layer in enumerate(self.layers):
            layer.forward = partial(self._within, number, layer.forward)
        for router, index in self.routers.items():
            router.register_forward_hook(partial(self._scored, index))

    def _within(self, number: int, forward, *inputs, **options):
        if self.choice is None and self.noted is None and self.taken is None and self.pull is None:
            return forward(*inputs, **options)
        self.layer, self.terms = number, []  # a recomputation may have ended within a layer
        with self:
            out = forward(*inputs, **options)
        if not self.terms:
            return out
        term = torch.stack(self.terms).sum()
        return Pulled.apply(out, term) if isinstance(out, Tensor) else (Pulled.apply(out[0], term), *out[1:])

    def _scored(self, index: int, router: nn.Module, _, output) -> None:
        if self.pull is None or not torch.is_grad_enabled():
            return
        logits = output if isinstance(output, Tensor) else output[index]
        probabilities = logits.float().softmax(-1).flatten(0, -2)  # [tokens, E]
        term = ((probabilities * self.weights[:, None]).sum(0) * self.pull).sum()
        self.terms.append(term)
        self.cost[self.passes, router] = term.detach()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return out
        scores, own = args[0], out.indices  # [..., E], [..., k]
        if scores.shape[-1] != self.experts or own.shape[-1] != self.chosen:
            return out  # of groups of experts, or of something else
        self.choosing.add(self.layer)
        if self.noted is not None:
            self.noted[self.layer] = self._agreed(own.detach().flatten(0, -2), self.noted.get(self.layer))
        chosen = own
        if self.choice is not None:
            given = self.choice[:, self.layer].to(own.device, own.dtype).view(own.shape)
            replayed = given >= 0
            with torch.no_grad():
                other = (given.sort(-1).values != own.sort(-1).values).any(-1) & replayed[..., 0]
                self.moved[self.passes, self.layer] = torch.stack([replayed[..., 0].sum(), other.sum()])
            chosen = torch.where(replayed, given, own)
            out = torch.return_types.topk((scores.gather(-1, chosen), chosen))
        if self.taken is not None:
            self.taken.index_add_(0, chosen.flatten(), self.weights.double().repeat_interleave(self.chosen))
        return out

    @staticmethod
    def _agreed(chosen: Tensor, before: Tensor | None) -> Tensor:
        """What a layer chooses now, and -1 for tokens for which it chose others `before`: a layer with experts in its
        attention, too, has two routers, and is told one choice.  [tokens, k]"""
        if before is None or before.shape != chosen.shape:
            return chosen
        same = (chosen.sort(-1).values == before.sort(-1).values).all(-1, keepdim=True)
        return torch.where(same, chosen, -1)

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

    def mean_cost(self, cfg: TrainConfig) -> float:
        """The balancing loss, without its coefficient, of the updates since the last call (at least one), on average.
        Collective."""
        cost, updates = torch.stack([*self.cost.values()]).sum(), self.updates
        self.cost, self.updates = {}, 0
        return utils.all_sum(cost).item() / (updates * cfg.router_aux_coef * utils.world_size())


def of(model: nn.Module, cfg: TrainConfig) -> Routing | None:
    """What replays and balances in a transformers model; None for a dense one, and where neither is asked for."""
    wanted = cfg.router_replay != "off" or cfg.router_aux_coef
    return Routing(model, cfg.router_aux_coef > 0) if wanted and experts_of(model.config)[0] else None


def replay(routing: Routing | None, inputs: dict, rows: Tensor, columns: Tensor) -> dict:
    """A pass's inputs as a model takes them; the experts among them are for its layers, in this pass and in its
    recomputation.  routed_experts [R, L, layers, k]; rows, columns [N]: the places that predict what is learned from"""
    if routing is not None:
        choice, ids = inputs.get("routed_experts"), inputs["input_ids"]
        routing.choice = None if choice is None else choice.flatten(0, 1)
        routing.passes += 1
        if routing.routers:
            once = torch.ones(len(rows), device=ids.device)
            routing.weights = once.new_zeros(ids.numel()).index_add_(0, rows * ids.shape[1] + columns, once)
    return {name: x for name, x in inputs.items() if name != "routed_experts"}


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


def metrics(routing: Routing | None, batch, cfg: TrainConfig) -> dict:
    """Of a step's passes, over all ranks, which all call it: the share of replayed choices (a token in a layer) that
    the trainer would have made otherwise, and how evenly the sampled tokens went to the experts."""
    out = {"routing/aux_loss": routing.mean_cost(cfg)} if routing is not None and routing.updates else {}
    if routing is None or utils.all_max(int(batch.routed_experts is not None)) == 0:
        return out
    replayed, moved = utils.all_sum(routing.differing().to(batch.input_ids.device)).tolist()
    load = torch.zeros(len(routing.layers), routing.experts, dtype=torch.float64)
    if batch.routed_experts is not None:
        rows, columns = batch.loss_mask.cpu().nonzero(as_tuple=True)
        before = batch.routed_experts[rows, columns - 1].long()  # [N, layers, k] of the tokens that predict them
        layers = torch.arange(len(routing.layers))[None, :, None].expand_as(before)
        known = before >= 0
        load.index_put_((layers[known], before[known]), torch.ones(1, dtype=torch.float64), accumulate=True)
    load = utils.all_sum(load.to(batch.input_ids.device)).cpu()
    load = load[sorted(routing.choosing)]  # what the server tells of layers without experts is all 0
    load = load[load.sum(1) > 0]  # [layers with experts, E]
    share = load / load.sum(1, keepdim=True)
    out |= {"routing/differs": moved / replayed} if replayed else {}
    if len(load):
        out |= {"routing/load_max": float(share.max() * routing.experts)}
        out |= {"routing/unused": float((load == 0).double().mean())}
    return out


def collated(choices: list[np.ndarray | None], rows: int, length: int) -> Tensor | None:
    """[B, T, layers, k] int16, -1 where nothing is known, of `rows` trajectories; None if of none of them."""
    known = next((choice for choice in choices if choice is not None), None)
    if known is None:
        return None
    out = torch.full((rows, length, *known.shape[1:]), -1, dtype=torch.int16)
    for row, choice in enumerate(choices):
        if choice is not None:
            out[row, : len(choice)] = torch.from_numpy(choice)
    return out
