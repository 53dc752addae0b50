"""In-process generation (`--generator hf`): no server, one GPU or a laptop, tests. Same interface as `VLLMClient`.

It keeps its own copy of the model in the compute dtype, LoRA folded in, so that decoding needs neither autocast nor
gathering, however the policy is sharded. The copy gets its weights by the same push as a server. A base in 4 bits is
not copied (`PolicyGenerator`). If the model has transformers' plain cache, a prompt is run once and its cache repeated
for the n samples.
"""

import asyncio
import contextlib
import inspect
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import utils
from inputs.prompts import end_ids
from inputs.trajectory import Completion
from inputs.vision import TYPES, Prompt, join_inputs, per_token, placeholder_tokens
from modeling.model import backbone, evaluating, experts_of, logits_of, window_of


@dataclass(eq=False)
class _Request:
    prompt_ids: list[int]
    model_inputs: dict  # tensors of its images
    n: int
    max_tokens: int
    options: tuple  # sorted sampling options: requests with equal ones share a batch
    future: asyncio.Future


def decode_attention(module, query, key, value, attention_mask, scaling, **options):
    """Attention of one new token per sequence, as two small matrix products; longer queries go to SDPA.

    SDPA's CPU kernel is made for long queries: for a single one it takes 10 - 20 times as long, and needs keys and
    values once per query head.  query [S, heads, 1, D], key and value [S, kv heads, T, D], mask [S, 1, 1, T] of bool.
    """
    if query.shape[2] > 1 or (attention_mask is not None and attention_mask.dtype != torch.bool):
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, scaling=scaling, **options)
    grouped = query.reshape(*key.shape[:2], -1, query.shape[-1])  # [S, kv heads, query heads each, D]
    scores = (grouped @ key.transpose(2, 3)).float() * scaling  # [S, kv heads, query heads each, T]
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    out = scores.softmax(-1).to(value.dtype) @ value  # [S, kv heads, query heads each, value's D]
    return out.reshape(len(query), 1, -1, value.shape[-1]), None


AttentionInterface.register("decode", decode_attention)
AttentionMaskInterface.register("decode", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def has_plain_cache(model: torch.nn.Module) -> bool:
    """Whether the model has transformers' plain cache, of keys and values alone. Other caches (of recurrent layers, or
    with token counts) cannot all be repeated, selected and padded. For those, all tokens are run again for each new
    one, which is slow and always right."""
    names = inspect.signature(backbone(model).forward).parameters
    if model._is_stateful or not {"past_key_values", "position_ids"} <= names.keys():  # else it would count the padding
        return False
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return {type(layer) for layer in layers} <= {DynamicLayer, DynamicSlidingWindowLayer}


def select_sequences(cache: DynamicCache | Tensor, rows: Tensor):
    """The cache of these sequences, repeated where `rows` repeats them; or their tokens, if there is no cache."""
    if isinstance(cache, Tensor):
        return cache[rows]
    cache.batch_select_indices(rows)
    return cache


class HFGenerator:
    """Samples from its own copy of a causal LM.

    model: the copy, for this generator alone. max_sequences: sequences decoded at a time.
    `seed(n)` makes the next samples reproducible; the training loop calls it once per step.
    """

    receives_weights = True  # on every rank
    adapter = None  # LoRA comes folded into the weights
    tells_experts = False  # whether completions shall include the experts of their tokens
    rope_index = None  # for models with positions on three axes; see inputs/vision.py

    def __init__(self, model: torch.nn.Module, tokenizer, max_sequences: int = 256):
        self.model, self.tokenizer, self.max_sequences = model, tokenizer, max_sequences
        self.device, self.weight_dtype = model.device, model.dtype
        self._prepare()
        self.version, self.vocab_size = 0, model.get_input_embeddings().num_embeddings
        self.random = torch.Generator(self.device)
        self.eos_ids = end_ids(model, tokenizer)
        self.never = placeholder_tokens(model.config)
        self.backbone, self.cached = backbone(model), has_plain_cache(model)
        if not self.cached and utils.is_main():
            name = type(model).__name__
            print(f"--generator hf: {name} has no plain cache, so all tokens are run again for each new one: slow.")
        self.window = window_of(model.config)
        self.routing = None
        if experts_of(model.config)[0]:
            from modeling.router_replay import Routing

            self.routing = Routing(model)
        self._queue: list[_Request] = []
        self._due: asyncio.AbstractEventLoop | None = None  # the loop in which `_flush` is about to be called
        self._missing: set[str] = set()

    def _prepare(self) -> None:
        """Change what may be changed in a copy: no gradients, faster attention."""
        self.model.eval().requires_grad_(False)
        attention = self.model.config._attn_implementation
        if self.device.type == "cpu" and attention == "sdpa" and self.model._can_set_attn_implementation():
            self.model.set_attn_implementation("decode")

    def _passes(self):
        """The context in which the model runs."""
        return torch.inference_mode()

    def seed(self, seed: int) -> None:
        self.random.manual_seed(seed)

    def close(self) -> None:
        """Nothing to release; part of the interface for servers."""

    # ---- weights: the same three calls as VLLMClient; the copy's names are the trainer's ----

    def begin_push(self) -> None:
        self._missing = {name for name, _ in self.model.named_parameters()}

    def send_bucket(self, named: list[tuple[str, Tensor]]) -> None:
        weights = dict(named)
        if unknown := weights.keys() - self._missing:
            raise ValueError(f"the generator has no parameter {min(unknown)!r}, or it was sent twice")
        if not_finite := [name for name, weight in named if not weight.isfinite().all()]:
            raise ValueError(f"{not_finite[0]} is not finite after the last update: lower --learning_rate")
        self.model.load_state_dict(weights, strict=False)  # RuntimeError for one of another shape
        self._missing -= weights.keys()

    def finish_push(self, version: int) -> None:
        if self._missing:
            raise ValueError(f"the push left out {len(self._missing)} parameters, first {min(self._missing)!r}")
        self.version = version

    def abort_push(self) -> None:
        """Nothing to do: a failed push ends the run."""

    # ---- sampling ----

    async def generate(
        self, prompt_ids: list[int], *, max_tokens: int, n=1, images=(), expanded: Prompt | None = None, **options
    ) -> list[Completion]:
        """n samples of one prompt. Requests that arrive at about the same time run in one batch.

        expanded: the model's form of a prompt with images; `images` themselves are for servers. max_tokens may differ
        within a batch. options: temperature, min_tokens, top_p, top_k, stop of `_sample`.
        """
        prompt_ids, inputs = (expanded.token_ids, expanded.model_inputs) if expanded else (prompt_ids, {})
        max_tokens = min(max_tokens, (self.window or math.inf) - len(prompt_ids))
        if max_tokens < 1:
            fault = f"a prompt of {len(prompt_ids)} tokens, with its turns so far, fills the window of {self.window}"
            raise ValueError(f"{fault}; lower --max_prompt_length or --max_completion_length")
        options.pop("home", None)  # for servers
        loop = asyncio.get_running_loop()
        request = _Request(prompt_ids, inputs, n, max_tokens, tuple(sorted(options.items())), loop.create_future())
        self._queue.append(request)
        if self._due is not loop:  # an earlier loop may have ended by an error before `_flush` was called
            self._due = loop
            loop.call_later(0.003, self._flush)  # collects requests: after tool calls they come one by one
        return await request.future

    def _flush(self) -> None:
        queue, self._queue, self._due = self._queue, [], None
        while queue := [request for request in queue if not request.future.done()]:  # without the cancelled ones
            batch = self._together(queue)
            try:
                with self._passes():
                    results = self._sample(batch, **dict(batch[0].options))
                for request, result in zip(batch, results, strict=True):
                    if not request.future.done():  # cancelled meanwhile: by Ctrl-C
                        request.future.set_result(result)
            except Exception as error:  # any error of the model's code is raised where the request is awaited
                for request in batch:
                    if not request.future.done():
                        request.future.set_exception(error)

    def _together(self, queue: list[_Request]) -> list[_Request]:
        """The requests that can share a batch with the first one."""
        batch, sequences = [], 0
        for request in queue:
            fits_batch = request.options == queue[0].options
            fits_batch &= self.cached or len(request.prompt_ids) == len(queue[0].prompt_ids)
            if fits_batch and (not batch or sequences + request.n <= self.max_sequences):
                batch.append(request)
                sequences += request.n
        return batch

    def can_tell_experts(self) -> bool:
        return self.routing is not None

    def _sample(self, batch, *, temperature=1.0, min_tokens=0, top_p=1.0, top_k=0, stop=()):
        """Decode all requests of a batch together; sequences leave it when they end."""
        if not self.cached and any(request.model_inputs for request in batch):
            raise ValueError(f"{type(self.model).__name__} samples no prompts with images here; use --generator vllm")
        inputs, positions = self._inputs(batch)
        logits, cache, experts = self._run(inputs)
        repeat = torch.tensor([row for row, request in enumerate(batch) for _ in range(request.n)], device=self.device)
        cache = select_sequences(cache if self.cached else inputs["input_ids"], repeat)
        logits, mask = logits[repeat], inputs["attention_mask"][repeat]  # [S, V], [S, T]
        position = positions.amax((0, 2), keepdim=True).expand(len(positions), -1, -1)[:, repeat]  # [axes, S, 1]
        limits = [request.max_tokens for request in batch for _ in range(request.n)]
        tokens: list[list[int]] = [[] for _ in limits]
        logprobs: list[list[float]] = [[] for _ in limits]
        alive = list(range(len(limits)))  # sequences that have not ended
        paths: list[list] = [[] for _ in limits]  # experts of each token that was run
        if experts is not None:
            paths = [[experts[row, -len(batch[row].prompt_ids) :]] for row in repeat.tolist()]
        for count in range(max(limits)):
            scores = self._scores(logits, temperature, top_p, top_k, blocked=count < min_tokens)  # [S, V]
            token = self._draw(scores)  # [S, 1]
            logprob = scores.gather(1, token)
            for index, t, lp in zip(alive, token[:, 0].tolist(), logprob[:, 0].tolist(), strict=True):
                tokens[index].append(t)
                logprobs[index].append(lp)
            ended = [self._stopped(tokens[k], stop if count + 1 > min_tokens else ()) for k in alive]
            surviving = [i for i, k in enumerate(alive) if not ended[i] and len(tokens[k]) < limits[k]]
            if not surviving:
                break
            if len(surviving) < len(alive):
                rows = torch.tensor(surviving, device=self.device)
                cache = select_sequences(cache, rows)
                token, mask, position = token[rows], mask[rows], position[:, rows]
                alive = [alive[i] for i in surviving]
            position = position + 1
            mask = torch.cat([mask, torch.ones_like(token)], dim=1)
            if self.cached:
                step = dict(input_ids=token, position_ids=self._axes(position), attention_mask=mask)
                logits, cache, experts = self._run(step | dict(past_key_values=cache))
            else:  # `cache` has the tokens so far, without padding: prompts of such a batch are equally long
                cache = torch.cat([cache, token], dim=1)
                logits, _, experts = self._run(dict(input_ids=cache))
            for place, index in enumerate(alive if experts is not None else ()):
                paths[index].append(experts[place, -1:])
        samples = iter(zip(tokens, logprobs, paths, strict=True))
        return [[self._completion(request, stop, *next(samples)) for _ in range(request.n)] for request in batch]

    def _run(self, inputs: dict) -> tuple:
        """(logits after the last tokens [S, V]; the cache; experts of the tokens [S, tokens, layers, k], None unless
        `tells_experts`)"""
        with self.routing.noting() if self.tells_experts else contextlib.nullcontext() as noted:
            out = self.backbone(**inputs, use_cache=self.cached)
        experts = self.routing.stacked_choices(noted) if self.tells_experts else None
        if experts is not None:
            experts = experts.unflatten(0, (len(inputs["input_ids"]), -1)).cpu().numpy()
        logits = logits_of(self.model, out.last_hidden_state[:, -1])
        return logits, out.past_key_values if self.cached else None, experts

    def _inputs(self, batch: list[_Request]) -> tuple[dict, Tensor]:
        """The prompts, left-padded [P, T], and their positions [axes, P, T]."""

        def padded(rows: list[Tensor]) -> Tensor:  # of [T] or [T, axes] each
            return pad_sequence(rows, batch_first=True, padding_side="left").to(self.device)

        def token_values(name: str) -> Tensor:  # per token, from the prompts' images
            return padded([per_token(r.model_inputs, name, len(r.prompt_ids))[..., 0, :].movedim(-1, 0) for r in batch])

        ids = padded([torch.tensor(r.prompt_ids) for r in batch])
        mask = padded([torch.ones(len(r.prompt_ids), dtype=torch.long) for r in batch])
        names = {name for r in batch for name in r.model_inputs}
        positions = (mask.cumsum(1) - 1).clamp(min=0)[None]
        if "position_ids" in names:
            positions = token_values("position_ids").permute(2, 0, 1)
        inputs = join_inputs([r.model_inputs for r in batch], self.device)
        inputs |= {name: token_values(name) for name in names & {*TYPES.values()}}
        return inputs | dict(input_ids=ids, attention_mask=mask, position_ids=self._axes(positions)), positions

    def _axes(self, positions: Tensor) -> Tensor:
        """[axes, S, T] in the model's form: without the first dimension if there is one axis."""
        return positions if len(positions) > 1 else positions[0]

    def _stopped(self, tokens: list[int], stop: tuple[str, ...]) -> bool:
        """Whether the last token ends the turn or completes one of the texts `stop`."""
        if tokens[-1] in self.eos_ids:
            return True
        ending = tokens[-8 - max(map(len, stop), default=0) :]  # n characters are at most n tokens, except rare ones
        return bool(stop) and any(text in self.tokenizer.decode(ending, skip_special_tokens=True) for text in stop)

    def _completion(
        self, request: _Request, stop: tuple[str, ...], tokens: list[int], logprobs: list[float], path: list
    ) -> Completion:
        reason = "stop" if self._stopped(tokens, stop) else "length"
        experts = np.concatenate(path)[: len(request.prompt_ids) + len(tokens) - 1] if path else None
        return Completion(tokens, logprobs, reason, self.version, request.prompt_ids, routed_experts=experts)

    def _draw(self, scores: Tensor) -> Tensor:
        """One sample per row by inverting the distribution function, from one random number.  [S, V] -> [S, 1]

        torch.multinomial draws a random number for each token of the vocabulary, on a CPU one after another: 15 % of a
        short decode. A token of probability 0 is never drawn, since the cumulative sum does not grow there.
        """
        cumulative = scores.double().exp().cumsum(-1)  # [S, V]
        draw = torch.rand(len(scores), 1, dtype=torch.float64, device=self.device, generator=self.random)
        return torch.searchsorted(cumulative, draw * cumulative[:, -1:], right=True)

    def _scores(self, logits: Tensor, temperature, top_p, top_k, blocked: bool) -> Tensor:
        """Log-probs of the sampling distribution: temperature, then the filters.  [S, V] -> [S, V]"""
        logits = logits.float()
        if blocked:
            logits[:, list(self.eos_ids)] = -torch.inf
        if self.never:
            logits[:, self.never] = -torch.inf
        if temperature == 0:  # greedy: all mass on the likeliest token
            best = torch.full_like(logits, -torch.inf)
            return best.scatter(1, logits.argmax(1, keepdim=True), 0.0)
        scores = logits / temperature
        if top_k:
            scores = TopKLogitsWarper(top_k)(None, scores)
        if top_p < 1:  # of the probability that is left, as in vLLM
            scores = TopPLogitsWarper(top_p)(None, scores)
        return scores.log_softmax(-1)


class PolicyGenerator(HFGenerator):
    """Samples from the trained model itself, with LoRA layers as PEFT computes them, so that a base in 4 bits is in
    memory only once. A push copies nothing: the newest adapters sample. dtype: compute dtype of the policy."""

    adapter = "policy"  # pushes bring adapters alone

    def __init__(self, model: torch.nn.Module, tokenizer, dtype: torch.dtype, max_sequences: int = 256):
        super().__init__(model, tokenizer, max_sequences)
        self.weight_dtype = dtype

    def _prepare(self) -> None:
        """Nothing: the model is being trained."""

    @contextlib.contextmanager
    def _passes(self):
        # No inference mode: tensors that modules keep from a pass, such as position tables, must allow training.
        cast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.weight_dtype == torch.bfloat16)
        with torch.no_grad(), cast, evaluating(self.model):
            yield

    def begin_push(self) -> None:
        """Nothing to send: it samples from the policy itself."""

    def send_bucket(self, named: list[tuple[str, Tensor]]) -> None:
        """Likewise."""

    def finish_push(self, version: int) -> None:
        self.version = version
