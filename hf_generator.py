"""In-process generation (`--generator hf`): no server, one GPU or a laptop, tests. Same interface as `VLLMClient`.

It keeps its own copy of the model in the compute dtype, LoRA folded in: decoding needs neither autocast nor gathering,
and sharded policies need no care. The copy gets its weights through the same push as a server does.
Prompts are run once and their cache is repeated for the n samples.
"""

import asyncio
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from inputs import routing
from inputs.packing import join_inputs
from inputs.prompts import Prompt, placeholder_tokens
from vllm_client import Completion


@dataclass(eq=False)
class _Request:
    prompt_ids: list[int]
    model_inputs: dict  # tensors of its images
    n: int
    max_tokens: int
    options: tuple  # sorted sampling options: requests with equal ones share a batch
    future: asyncio.Future


def decode_attention(module, query, key, value, attention_mask, scaling, **options):
    """Attention of one new token per sequence, as two small matrix products; anything longer goes to SDPA.

    SDPA's CPU kernel is built for long queries: with one it takes 10 - 20 times as long, and has to be given keys and
    values once per query head.  query [S, heads, 1, D], key and value [S, kv heads, T, D], mask [S, 1, 1, T] of bool.
    """
    if query.shape[2] > 1:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, scaling=scaling, **options)
    grouped = query.view(*key.shape[:2], -1, query.shape[-1])  # [S, kv heads, heads of one, D]
    scores = (grouped @ key.transpose(2, 3)).float() * scaling  # [S, kv heads, heads of one, T]
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    out = scores.softmax(-1).to(value.dtype) @ value  # [S, kv heads, heads of one, D]
    return out.reshape(len(query), 1, -1, query.shape[-1]), None


def use_decode_attention(model: torch.nn.Module) -> None:
    """For models of plain full attention under SDPA."""
    AttentionInterface.register("decode", decode_attention)
    AttentionMaskInterface.register("decode", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("decode")


class HFGenerator:
    """Samples from its own copy of a causal LM.

    model: the copy, used by nobody else. max_sequences: sequences decoded at a time.
    `seed(n)` makes the next samples reproducible; the training loop calls it once per step.
    """

    receives_weights, changes = True, None  # on every rank; all of them
    image_bytes = 0  # sent to servers
    tells_experts = False  # whether completions are to come with the experts of their tokens
    rope_index = None  # of models whose positions have three axes; see inputs/prompts.py

    def __init__(self, model: torch.nn.Module, tokenizer, max_sequences: int = 256):
        self.model, self.tokenizer, self.max_sequences = model.eval().requires_grad_(False), tokenizer, max_sequences
        text_tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self.device, self.weight_dtype = model.device, model.dtype
        if self.device.type == "cpu" and model.config._attn_implementation == "sdpa":
            use_decode_attention(model)
        self.version, self.vocab_size = 0, model.get_input_embeddings().num_embeddings
        self.random = torch.Generator(self.device)
        ids = model.generation_config.eos_token_id
        self.eos_ids = {*(ids if isinstance(ids, list) else [ids]), text_tokenizer.eos_token_id} - {None}
        self.never = placeholder_tokens(model.config)
        self.window = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.routing = routing.Routing(model) if routing.experts_of(model.config)[0] else None
        self._queue: list[_Request] = []
        self._missing: set[str] = set()
        self._sampled, self._since = 0.0, None  # seconds in all calls of _sample; when the one under way began

    def seed(self, seed: int) -> None:
        self.random.manual_seed(seed)

    def close(self) -> None:
        """Nothing to release; servers have."""

    # ---- weights: the same three calls as VLLMClient; the copy's names are the trainer's ----

    def begin_push(self) -> None:
        self._missing = {name for name, _ in self.model.named_parameters()}

    def send_bucket(self, named: list[tuple[str, Tensor]]) -> None:
        parameters = dict(self.model.named_parameters())
        for name, tensor in named:
            if name not in self._missing:
                raise ValueError(f"the generator has no parameter {name!r}, or it was sent twice")
            if parameters[name].shape != tensor.shape:
                raise ValueError(
                    f"parameter {name!r}: sent {tuple(tensor.shape)}, expected {tuple(parameters[name].shape)}"
                )
            parameters[name].data.copy_(tensor)
            self._missing.discard(name)

    def finish_push(self, version: int) -> None:
        if self._missing:
            raise ValueError(f"the push left out {len(self._missing)} parameters, first {min(self._missing)!r}")
        self.version = version

    def abort_push(self) -> None:
        """A failed push ends the run; there is no server to put back in order."""

    # ---- sampling ----

    def can_tell_experts(self) -> bool:
        return self.routing is not None

    def _run(self, model, **inputs):
        """A forward pass, and the experts of its tokens, [tokens, layers, k], if they are to be told."""
        if not self.tells_experts:
            return model(**inputs), None
        with self.routing.noting() as noted:
            out = model(**inputs)
        experts = self.routing.stacked(noted)
        return out, None if experts is None else experts.cpu().numpy()

    async def generate(
        self, prompt_ids: list[int], *, max_tokens: int, n=1, images=(), expanded: Prompt | None = None, **options
    ) -> list[Completion]:
        """n samples of one prompt. Requests of tasks that are ready together run in one batch.

        expanded: of a prompt with images, what the model is given; `images` themselves go to servers only.
        options: max_tokens, which may differ within a batch; temperature, min_tokens, top_p, top_k, min_p of `_sample`.
        """
        prompt_ids, inputs = (expanded.token_ids, expanded.model_inputs) if expanded else (prompt_ids, {})
        if self.window and len(prompt_ids) + 1 > self.window:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens does not fit the model's window of {self.window}; "
                "lower --max_prompt_length"
            )
        loop = asyncio.get_running_loop()
        request = _Request(prompt_ids, inputs, n, max_tokens, tuple(sorted(options.items())), loop.create_future())
        self._queue.append(request)
        if len(self._queue) == 1:
            loop.call_later(
                0.003, self._flush
            )  # what is asked for in the same moment is one batch; tools answer singly
        return await request.future

    def _flush(self) -> None:
        queue, self._queue = self._queue, []
        while queue := [request for request in queue if not request.future.done()]:  # without the cancelled ones
            batch, sequences = [], 0
            for request in queue:
                fits = sequences + request.n <= self.max_sequences or not batch
                if request.options == queue[0].options and fits:
                    batch.append(request)
                    sequences += request.n
            queue = [request for request in queue if request not in batch]
            self._since = time.monotonic()
            try:
                results, error = self._sample(batch, **dict(batch[0].options)), None
            except Exception as raised:  # whatever the model's own code raises: it belongs to whoever awaits it
                results, error = [None] * len(batch), raised
            finally:
                self._sampled += time.monotonic() - self._since
                self._since = None
            for request, result in zip(batch, results, strict=True):
                if not request.future.done():
                    request.future.set_result(result) if error is None else request.future.set_exception(error)

    def seconds_sampling(self) -> float:
        """For how long it has sampled so far. The event loop stood still meanwhile, through no rollout's fault."""
        since = self._since
        return self._sampled + (0.0 if since is None else time.monotonic() - since)

    @torch.inference_mode()
    def _sample(self, batch, *, temperature=1.0, min_tokens=0, top_p=1.0, top_k=0, min_p=0.0):
        """Decode all requests of a batch together; sequences that ended leave it."""
        lengths = [len(request.prompt_ids) for request in batch]
        longest = max(lengths)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)  # [P, T] left-padded
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, longest - lengths[row] :] = torch.tensor(request.prompt_ids)
            mask[row, longest - lengths[row] :] = 1
        positions, types = (mask.cumsum(1) - 1).clamp(min=0)[None], torch.zeros_like(ids)  # [axes, P, T], [P, T]
        for row, request in enumerate(batch):
            if "position_ids" in request.model_inputs:
                positions = positions.expand(3, -1, -1).clone()
                positions[:, row, longest - lengths[row] :] = request.model_inputs["position_ids"][:, 0]
            if "token_type_ids" in request.model_inputs:
                types[row, longest - lengths[row] :] = request.model_inputs["token_type_ids"][0, :-1]
        ids, mask, positions = ids.to(self.device), mask.to(self.device), positions.to(self.device)
        inputs = join_inputs([request.model_inputs for request in batch], self.device)
        if any("token_type_ids" in request.model_inputs for request in batch):
            inputs["token_type_ids"] = types.to(self.device)
        inputs |= dict(input_ids=ids, attention_mask=mask, position_ids=self._axes(positions))
        out, experts = self._run(self.model.base_model, **inputs, use_cache=True)
        repeat = torch.tensor([row for row, request in enumerate(batch) for _ in range(request.n)], device=self.device)
        cache = out.past_key_values
        cache.batch_select_indices(repeat)
        logits = self.model.get_output_embeddings()(out.last_hidden_state[:, -1])[repeat]  # [S, V]
        mask = mask[repeat]  # [S, T]
        position = positions.amax((0, 2), keepdim=True).expand(len(positions), -1, -1)[:, repeat]  # [axes, S, 1]
        most = torch.tensor([request.max_tokens for request in batch])[repeat.cpu()].tolist()
        budget = min(max(most), self.window - longest) if self.window else max(most)
        paths: list[list] = [[] for _ in repeat]  # experts of each token that was run
        if experts is not None:
            experts = experts.reshape(len(batch), longest, *experts.shape[1:])
            paths = [[experts[row, longest - lengths[row] :]] for row in repeat.tolist()]
        tokens: list[list[int]] = [[] for _ in repeat]
        logprobs: list[list[float]] = [[] for _ in repeat]
        alive = list(range(len(repeat)))
        for count in range(budget):
            scores = self._scores(logits, temperature, top_p, top_k, min_p, blocked=count < min_tokens)  # [S, V]
            token = self._draw(scores)  # [S, 1]
            logprob = scores.gather(1, token)
            for index, t, lp in zip(alive, token[:, 0].tolist(), logprob[:, 0].tolist(), strict=True):
                tokens[index].append(t)
                logprobs[index].append(lp)
            keep = [i for i, k in enumerate(alive) if tokens[k][-1] not in self.eos_ids and len(tokens[k]) < most[k]]
            if not keep or count + 1 == budget:
                break
            if len(keep) < len(alive):
                rows = torch.tensor(keep, device=self.device)
                cache.batch_select_indices(rows)
                token, mask, position = token[rows], mask[rows], position[:, rows]
                alive = [alive[i] for i in keep]
            position = position + 1
            mask = torch.cat([mask, torch.ones_like(token)], dim=1)
            step = dict(input_ids=token, attention_mask=mask, position_ids=self._axes(position))
            out, experts = self._run(self.model, **step, past_key_values=cache, use_cache=True)
            for place, index in enumerate(alive if experts is not None else ()):
                paths[index].append(experts[place : place + 1])
            logits = out.logits[:, -1]
        samples = iter(zip(tokens, logprobs, paths, strict=True))
        return [[self._completion(request, *next(samples)) for _ in range(request.n)] for request in batch]

    def _axes(self, positions: Tensor) -> Tensor:
        """[axes, S, T] as the model wants it: without the first dimension if there is one axis."""
        return positions if len(positions) > 1 else positions[0]

    def _completion(self, request: _Request, tokens: list[int], logprobs: list[float], path: list) -> Completion:
        reason = "stop" if tokens[-1] in self.eos_ids else "length"
        experts = np.concatenate(path) if path else None
        return Completion(tokens, logprobs, reason, self.version, request.prompt_ids, routed_experts=experts)

    def _draw(self, scores: Tensor) -> Tensor:
        """One sample a row by inverting the distribution function: a random number a row.  [S, V] -> [S, 1]

        torch.multinomial draws one per token of the vocabulary, on a CPU one after another: 15 % of a short decode.
        A token of probability 0 is never drawn: the sum does not grow over it.
        """
        cumulative = scores.double().exp().cumsum(-1)  # [S, V]
        draw = torch.rand(len(scores), 1, dtype=torch.float64, device=self.device, generator=self.random)
        return torch.searchsorted(cumulative, draw * cumulative[:, -1:], right=True)

    def _scores(self, logits: Tensor, temperature, top_p, top_k, min_p, blocked: bool) -> Tensor:
        """Log-probs of the distribution that is sampled from: temperature, then the filters.  [S, V] -> [S, V]"""
        logits = logits.float()
        if blocked:
            logits[:, list(self.eos_ids)] = -torch.inf
        if self.never:
            logits[:, self.never] = -torch.inf
        if temperature == 0:  # greedy: all mass on the likeliest token
            best = torch.full_like(logits, -torch.inf)
            return best.scatter(1, logits.argmax(1, keepdim=True), 0.0)
        scores = (logits / temperature if temperature != 1 else logits).log_softmax(-1)
        if top_k:
            scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], -torch.inf)
        if min_p:
            scores = scores.masked_fill(
                scores < scores.max(1, keepdim=True).values + torch.tensor(min_p).log(), -torch.inf
            )
        if top_p < 1:
            ordered, order = scores.sort(descending=True)
            outside = ordered.exp().cumsum(1) - ordered.exp() > top_p
            scores = scores.masked_fill(outside.scatter(1, order, outside), -torch.inf)
        return scores.log_softmax(-1) if top_k or min_p or top_p < 1 else scores
