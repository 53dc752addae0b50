"""Bytes that a training step takes on one rank, from the model's config alone, before anything is loaded.

plan.py prints them; train_grpo.py chooses --tokens_per_microbatch by them. What is kept from step to step (weights,
gradients, optimizer) is arithmetic. What a pass takes (activations, logits) is counted: the policy itself runs forward
and backward on tensors that have a shape and no memory, and the bytes that would be alive are added up.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from batch import Batch
from config import TrainConfig
from inputs.model import BYTES_IN_4_BITS, backbone, chunk_size
from inputs.packing import most_tokens, pack

GIB = 2**30
SPARE = 0.1  # of a GPU's memory that is left to CUDA, NCCL and fragmentation
BUDGETS = [16384, 12288, 8192, 6144, 4096, 3072, 2048, 1024]  # --tokens_per_microbatch to choose from


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made under it that are alive, by kind, and what they were at their peaks.

    vocabulary: tensors with a last dimension of this size are logits. Tensors that exist already do not count.
    """

    def __init__(self, vocabulary: int = 0, existing: Iterable[Tensor] = ()):
        super().__init__()
        self.vocabulary, self.now, self.place, self.most = vocabulary, Counter(), "head", {"head": Counter()}
        self.existing = {tensor.untyped_storage()._cdata for tensor in existing}
        self.sizes: dict[int, tuple[str, int]] = {}  # of storages that are alive

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returned = described(function, args, kwargs or {})
        for tensor in tree_leaves(returned):
            if isinstance(tensor, Tensor):  # of a DTensor its shard; of one that is still to arrive its place
                self.add(getattr(tensor, "_local_tensor", getattr(tensor, "elem", tensor)))
        if self.now.total() > self.most[self.place].total():
            self.most[self.place] = self.now.copy()
        return returned

    def enter(self, place: str) -> None:
        """From now on, peaks count as those of `place`."""
        self.place = place
        self.most.setdefault(place, self.now.copy())

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.existing or key in self.sizes:
            return
        kind = "logits" if tensor.ndim and tensor.shape[-1] == self.vocabulary else "activations"
        self.now[kind] += size
        self.sizes[key] = kind, size
        weakref.finalize(storage, self.drop, key)

    def drop(self, key: int) -> None:
        kind, size = self.sizes.pop(key)
        self.now[kind] -= size


def described(function: Callable, args: tuple, kwargs: dict):
    """function(*args, **kwargs). Torch computes the product of a mixture's experts in float32, too (as under autocast),
    and describes it in bfloat16 alone: so it is asked in that, and the result is one of float32."""
    if function is not torch.ops.aten._grouped_mm.default or args[0].dtype is not torch.float32:
        return function(*args, **kwargs)
    return function(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs).float()


def one_rank(cfg: TrainConfig, ranks: int) -> TrainConfig:
    """Settings of a pass: as many groups as a rank has, or as fill a micro-batch; alike in what changes nothing."""
    filling = -(-most_tokens(cfg) // cfg.max_completion_length)  # rows: the prompts, shared or not, come on top
    groups = min(cfg.prompts_per_step // ranks // cfg.num_minibatches, -(-filling // cfg.num_generations))
    alike = dict(num_minibatches=1, strategy="ddp" if cfg.strategy == "ddp" else "fsdp2", offload=False)
    alike |= dict(gradient_checkpointing=bool(cfg.gradient_checkpointing or cfg.offload_activations))
    alike |= dict(offload_activations=False, shard_size=None, generator="vllm", push_lora="auto")
    return replace(cfg, prompts_per_step=max(groups, 1), **alike)


def longest_pass(cfg: TrainConfig) -> tuple[dict, Tensor, Tensor, Tensor]:
    """What `pack` makes of the largest micro-batch there can be: prompts and completions as long as they may be, and a
    row or all of them shortened, so that it is full."""
    prompt, limit, rows = cfg.max_prompt_length, most_tokens(cfg), cfg.prompts_per_step * cfg.num_generations
    longest = prompt + cfg.max_completion_length
    number = min(rows, -(-limit // longest))
    lengths = [longest if number == 1 else min(longest, limit // number)] * number  # plain rows are padded
    if cfg.shared_prefix and number > 1:
        lengths, room = [], limit
        while len(lengths) < rows and (room := room - prompt * (len(lengths) % cfg.num_generations == 0)) > 0:
            lengths.append(min(longest, prompt + room))
            room -= lengths[-1] - prompt
    lengths, tokens = torch.tensor(lengths)[:, None], torch.arange(max(lengths))  # [B, 1], [T]
    groups = torch.arange(len(lengths)) // cfg.num_generations
    there = (tokens < lengths).float()  # [B, T]
    sampled = there * (tokens >= (lengths - 1).clamp(max=prompt))
    batch = Batch(groups[:, None] + tokens, there, sampled, torch.zeros(there.shape), groups)
    return pack(batch, cfg)


COUNTED: dict[tuple, tuple[dict, list]] = {}  # what `pass_bytes` has returned: plan.py asks for the same often


def pass_bytes(make_policy: Callable[[TrainConfig], nn.Module], cfg: TrainConfig) -> tuple[dict, list]:
    """Bytes by kind at the peaks of a forward and a backward pass, in the layers and in the head, without those of
    weights and gradients; and what `parameters` says of the policy, and whether in 4 bits. cfg: `one_rank`'s."""
    if (make_policy, repr(cfg)) in COUNTED:
        return COUNTED[make_policy, repr(cfg)]
    inputs, *where = longest_pass(cfg)
    with torch.device("meta"):
        policy = make_policy(cfg)
    segments = inputs.pop("segments", None)
    kept, more = copied_keys(segments, policy, cfg) if segments else (0, 0)
    packed = [getattr(p, "in_4_bits", False) for p in policy.parameters()]
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.device("cpu"):
        claim_memory(policy, None if cfg.strategy == "ddp" else getattr(torch, cfg.compute_dtype))
        if segments:  # their kernel keeps what that of causal attention keeps
            policy.hf_model.set_attn_implementation("sdpa")
            # One for all pairs: without any, transformers makes one of L x L of positions that begin anew.
            inputs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        else:
            rows, length = inputs["attention_mask"].shape
            inputs["attention_mask"] = torch.ones(rows, 1, length, length, dtype=torch.bool)
        inputs = {key: fake.from_tensor(x) if type(x) is Tensor else x for key, x in inputs.items()}
        where = [fake.from_tensor(x) for x in where]
        existing = list(policy.parameters())
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)  # as from the second micro-batch on
                existing.append(parameter.grad)
        vocabulary = policy.hf_model.config.get_text_config().vocab_size
        between: Counter = Counter()  # layers: what is kept of each with gradient checkpointing
        turn: Counter = Counter()  # what is alive when the head's backward pass has ended and that of layers begins
        policy.chunk = policy.chunk or chunk_size(vocabulary, on_gpu=True)
        live = LiveBytes(vocabulary, [*existing, *policy.parameters(), *policy.buffers()])

        def say_when_backward(module, inputs, returned) -> None:
            def enter(gradient: Tensor) -> None:
                if live.place == "head":
                    turn.update(live.now)
                live.enter("layers")

            returned = tree_leaves(returned)[0]
            returned.register_hook(enter)
            if live.place == "head":  # not when it is computed again
                between["activations"] += returned.untyped_storage().nbytes()

        for layer in decoder_layers(policy):
            layer.register_forward_hook(say_when_backward)
        with live:
            policy(inputs, *where)[0].sum().backward()
    table = [(*row, in_4_bits) for row, in_4_bits in zip(parameters(policy), packed, strict=True)]
    # On GPUs the peak may be within attention, when what comes behind it in its layer is gone.
    copied = [live.most.get("layers", Counter()) + Counter(activations=kept)]
    copied += [(between if cfg.gradient_checkpointing else copied[0]) + Counter(activations=more + kept)]
    peaks = live.most | {"turn": turn, "between": between, "layers on GPUs": max(copied, key=Counter.total)}
    COUNTED[make_policy, repr(cfg)] = peaks, table
    return COUNTED[make_policy, repr(cfg)]


def copied_keys(segments: list, policy: nn.Module, cfg: TrainConfig) -> tuple[int, int]:
    """Bytes that GPUs' attention behind shared prompts (attend_in_one_call) takes beyond that of one long row. What is
    kept for the backward pass: keys and values of a prompt once for each of its completions, of one layer or, if none
    is computed again, of all; and what its own backward pass takes on top: their gradients, which torch's kernel makes
    for all query heads first, and one of them in float32."""
    text, size = policy.hf_model.config.get_text_config(), itemsizes(cfg)[1]
    heads = getattr(text, "num_attention_heads", 0)  # none where all layers are recurrent
    if not heads:
        return 0, 0
    kv = getattr(text, "num_key_value_heads", None) or heads
    prompts = sum(segments[front][0] for _, front in segments if front is not None)
    if not prompts:
        return 0, 0
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    keys = (sum(size for size, _ in segments) + prompts) * width  # numbers of a head
    layers = 1 if cfg.gradient_checkpointing else len(decoder_layers(policy))
    return keys * 2 * kv * size * layers, keys * (2 * kv * size + 2 * heads * size * (heads > kv) + 4 * kv)


def claim_memory(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Under FakeTensorMode: meta tensors become tensors of the CPU, as kernels see it, parameters in `dtype`, as shards
    are gathered; None: in their own. Tied ones stay one."""
    copies: dict[int, Tensor] = {}
    for store in [store for part in module.modules() for store in (part._parameters, part._buffers)]:
        for name, old in store.items():
            if old is not None and old.is_meta and id(old) not in copies:
                parameter = isinstance(old, nn.Parameter)
                new = torch.empty(old.shape, dtype=dtype if dtype and parameter else old.dtype)
                copies[id(old)] = nn.Parameter(new, old.requires_grad) if parameter else new
            store[name] = copies.get(id(old), old)


def decoder_layers(policy: nn.Module) -> list[nn.Module]:
    """What FSDP makes a unit of each."""
    kinds = set(policy.hf_model._no_split_modules or [])
    return [module for module in policy.modules() if type(module).__name__ in kinds]


def parameters(policy: nn.Module) -> list[tuple]:
    """(shape, whether trained, number of its decoder layer or -1, whether a critic has no use for it, number of the
    module whose own it is) of each parameter. A critic has no output layer; tied to the embeddings, it is needed all
    the same."""
    owner = {id(p): n for n, m in enumerate(policy.modules()) for p in m.parameters(recurse=False)}
    layer_of = {id(p): number for number, layer in enumerate(decoder_layers(policy)) for p in layer.parameters()}
    used = {id(p) for p in backbone(policy.hf_model).parameters()}
    return [
        (tuple(p.shape), p.requires_grad, layer_of.get(id(p), -1), id(p) not in used, owner[id(p)])
        for p in policy.parameters()
    ]


def rank_bytes(
    make_policy: Callable[[TrainConfig], nn.Module],
    cfg: TrainConfig,
    ranks: int,
    critic: bool = False,
    sends: bool = True,
    copies: bool = True,
) -> Counter:
    """Bytes on the GPU of rank 0, which has the largest shards and sends pushes, by kind. `peak` adds up what is there
    together.

    make_policy: (cfg) -> the policy, unsharded, without values (train_grpo.empty_policy). critic: there is a critic of
    the same size (train_ppo.py). Its update comes before the policy's, and takes no more. sends: False for a rank that
    gathers a push with the others and sends none of it. copies: False on CPUs (`copied_keys`).
    Activations are those of the largest micro-batch from the second one on, when there are gradients already.
    """
    peaks, table = pass_bytes(make_policy, one_rank(cfg, ranks))
    if copies:
        peaks = {**peaks, "layers": peaks["layers on GPUs"]}
    ranks = cfg.shard_size or ranks
    need = kept_bytes(make_policy, table, cfg, ranks, critic)
    gathered = gathered_bytes(table, cfg, ranks)
    place = max(gathered, key=lambda place: peaks.get(place, Counter()).total() + gathered[place])
    need += Counter(peaks.get(place, Counter())) + Counter(gathered=gathered[place])
    if cfg.offload_activations:  # the input of each layer waits in CPU memory
        moved = min(need["activations"], peaks["between"].total())
        need["in CPU memory"] += moved
        need["activations"] -= moved
    need["push"] = push_bytes(table, cfg, ranks, need["kept gradients"], sends)
    return need


def kept_bytes(make_policy: Callable, table: list[tuple], cfg: TrainConfig, ranks: int, critic: bool) -> Counter:
    """Weights, gradients, optimizer, and the models beside the policy. table: `pass_bytes`'."""
    master, compute = itemsizes(cfg)
    trained_in = 4 if cfg.use_peft else master  # bytes: adapters are float32
    size = {True: 0, False: 0}  # elements on this rank, by whether they are trained
    pinned = 0  # ... and with what torch adds to each block of pinned memory, up to a power of two
    in_4_bits, scaled = 0, 0  # of those that are not; on all ranks, each of which has all scales
    of_critic = 0  # those that a critic trains
    for shape, trained, _, unused, _, packed in table:
        own = largest_share(shape, ranks if cfg.strategy != "ddp" else 1)
        size[trained] += own
        pinned += 1 << max(own - 1, 0).bit_length()
        in_4_bits, scaled = in_4_bits + own * packed, scaled + torch.Size(shape).numel() * packed
        of_critic += own * (trained and not unused)
    frozen = master * (size[False] - in_4_bits) + round(BYTES_IN_4_BITS * scaled + (in_4_bits - scaled) / 2)
    need = Counter(weights=frozen + trained_in * size[True], optimizer=2 * trained_in * size[True])
    # FSDP1 lets go of gradients at the next forward pass only. DDP's buckets stay, and what micro-batches before the
    # last add up does not lie in them.
    keeps = cfg.strategy == "fsdp" or (cfg.strategy == "ddp" and ranks > 1)
    need["kept gradients"] = trained_in * size[True] * keeps
    need["gradients"] = trained_in * size[True] * (cfg.strategy != "fsdp")
    if critic:  # its other gradients are gone when the policy's come
        need["critic"] = need["weights"] + (2 + keeps) * trained_in * of_critic
    if cfg.beta > 0 and not cfg.use_peft:
        need["reference"] = (4 if cfg.ref_sync_steps else compute) * sum(size.values())
    if cfg.teacher_id:
        with torch.device("meta"):
            teacher = make_policy(replace(cfg, model_id=cfg.teacher_id, use_peft=False, load_in=None))
        shares = (largest_share(p.shape, ranks if cfg.strategy != "ddp" else 1) for p in teacher.parameters())
        need["reference"] += compute * sum(shares)
    if cfg.offload:
        rounded = sum(need.pop(kind, 0) for kind in ("weights", "gradients", "critic", "reference"))
        need["in CPU memory"] = need.pop("optimizer") + round(rounded * pinned / sum(size.values()))
    if cfg.generator == "hf" and not cfg.load_in:
        need["generator"] = compute * sum(torch.Size(shape).numel() for shape, *_ in table)
    return need


def gathered_bytes(table: list[tuple], cfg: TrainConfig, ranks: int) -> dict[str, int]:
    """What FSDP has gathered at the places of an update where there may be most: in the output layer, when its backward
    pass turns to the layers, in these, and at the end. A weight made anew of 4 bits is such, too."""
    _, compute = itemsizes(cfg)
    layers: Counter = Counter()  # bytes of each unit of FSDP when it is gathered, and
    learning: Counter = Counter()  # elements of it that are trained
    last, of_last, unpacked = 0, 0, 0  # the same of an output layer that is not tied; the largest weight in 4 bits
    for shape, trained, layer, unused, _, packed in table:
        number = torch.Size(shape).numel()
        size = number // 2 if packed else compute * number
        layers[layer] += size
        learning[layer] += number * trained
        unpacked = max(unpacked, compute * number * packed)
        if layer < 0 and unused:
            last, of_last = last + size, of_last + number * trained
    root, of_root = layers[-1], learning[-1]
    layer, of_layer = max(layers[n] for n in layers if n >= 0), max(learning[n] for n in learning if n >= 0)
    if cfg.strategy == "ddp":
        return {"head": 0, "layers": unpacked, "end": 0}
    if last and cfg.strategy == "fsdp2":  # units of their own
        summed = last + 3 * compute * of_last  # a chunk's gradient, the sum of those before, and the new one
        reduced = (compute + 4) * of_last + 4 * of_last // ranks  # the sum, laid out for the ranks
        # A layer's backward pass begins when the one before, the first time the output layer, is on its way.
        return {
            "head": last,
            "layers": 2 * layer + compute * of_layer + 4 * max(of_layer, of_last) + unpacked,
            "turn": layer + max(summed, reduced),
            "end": (compute + 4) * (of_root - of_last) + 4 * (of_root - of_last) // ranks,
        }
    # The output layer's gradient waits for the rest of the root's; tied, it is counted with the pass.
    return {
        "head": root,
        "layers": root + 2 * layer + compute * (of_layer + of_last) + 4 * of_layer + unpacked,
        "end": (2 * compute + 4) * of_root + 4 * of_root // ranks,  # gradients as computed, as summed
    }


def push_bytes(table: list[tuple], cfg: TrainConfig, ranks: int, kept_gradients: int, sends: bool = True) -> int:
    """What a push takes beside what is kept, on the rank that sends it or on another one."""
    master, compute = itemsizes(cfg)
    numbers = [torch.Size(shape).numel() for shape, *_ in table]
    if cfg.load_in or cfg.push_lora == "adapters":  # these alone travel: rounded copies, on their way to a file
        buckets = bucket_bytes((n for n, (_, trained, *_) in zip(numbers, table, strict=True) if trained), cfg)
        return 2 * max(buckets)
    units: Counter = Counter()  # elements of each unit of FSDP, and
    learning: Counter = Counter()  # those that are trained
    modules: Counter = Counter()  # elements that each has of its own: a bucket ends with one
    for number, (_, trained, layer, _, owner, _) in zip(numbers, table, strict=True):
        units[layer] += number
        learning[layer] += number * trained
        modules[owner] += number
    whole, root, of_root = sum(numbers), units[-1], learning[-1]
    layer = max(units[n] for n in units if n >= 0)
    bucket = (cfg.push_bucket_mb or push_bucket_mb(whole)) * 2**20
    # A layer's update is folded in: float32 weights, their change or how they are rounded, and the sum.
    fold = cfg.use_peft * 12 * max(n for n, row in zip(numbers, table, strict=True) if row[2] >= 0)
    buckets = bucket_bytes(modules.values(), cfg)
    if cfg.strategy == "ddp":  # live weights, but for what is folded: a bucket, and the one before
        gathering, full = cfg.use_peft * (2 * bucket + fold // 6) + fold, 0
    elif cfg.strategy == "fsdp2":  # a bucket's shards are rounded, and laid out to be gathered; or one is folded
        full, rounded = max(buckets), master != compute and not cfg.offload  # in CPU memory, then
        gathering = max(
            sends * last + size + max(size // ranks * (1 + rounded), fold // ranks)
            for last, size in zip([0, *buckets], buckets, strict=False)
        )
    else:  # units are gathered whole, the root first, and lose their gradients; rounded copies fill the bucket
        full = min(bucket + compute * max(numbers), compute * whole)
        before = max(map(sum, zip(buckets, buckets[1:], strict=False)), default=0) - max(buckets)  # sent, still there
        at_root = (master + compute) * root - (4 if cfg.use_peft else master) * of_root // ranks
        at_root += compute * root // ranks * (master == compute)
        at_layer = min(bucket, compute * (whole - layer)) + (master + compute) * layer + fold - kept_gradients
        gathering = max(at_root, at_layer) + before
    return max(gathering, sends * (sending(buckets, cfg) + full))


def itemsizes(cfg: TrainConfig) -> tuple[int, int]:
    """Bytes of a number of the weights, and of one as it is computed with."""
    return getattr(torch, cfg.dtype).itemsize, getattr(torch, cfg.compute_dtype).itemsize


def largest_share(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of a parameter on the first of the ranks that share it by its rows."""
    return -(-shape[0] // ranks) * (torch.Size(shape).numel() // shape[0])


def push_bucket_mb(parameters: int) -> int:
    """For --push_bucket_mb: a large model's servers would else be asked a hundred times a push."""
    return 1024 if parameters >= 30e9 else 256


def bucket_bytes(sizes: Iterable[int], cfg: TrainConfig) -> list[int]:
    """Of each bucket of a push. sizes: elements of each parameter, in the order in which they are sent. A bucket ends
    with the tensor that fills it, which is whole: one with the embeddings is as large as they are."""
    sizes, buckets, itemsize = list(sizes), [0], getattr(torch, cfg.compute_dtype).itemsize
    most = (cfg.push_bucket_mb or push_bucket_mb(sum(sizes))) * 2**20
    for size in sizes:
        buckets += [0] * (buckets[-1] >= most)
        buckets[-1] += itemsize * size
    return buckets


def sending(buckets: list[int], cfg: TrainConfig) -> int:
    """Bytes on rank 0's GPU of the packed bucket of a push. What goes by gloo is packed in CPU memory."""
    return 0 if cfg.generator != "vllm" or cfg.colocate else max(buckets, default=0)


def receiving(sizes: list[int], cfg: TrainConfig, split: int) -> int:
    """Bytes that a push takes on each GPU of a server that splits the model over `split` GPUs: the largest bucket,
    which is sent whole, and beside it the layer that vLLM's reload makes anew."""
    itemsize = getattr(torch, cfg.compute_dtype).itemsize
    return max(bucket_bytes(sizes, cfg)) + itemsize * max(sizes) // split


def kept(need: Counter) -> int:
    """Bytes between two steps."""
    return sum(need[kind] for kind in ("weights", "optimizer", "kept gradients", "critic", "reference", "generator"))


def update_peak(need: Counter) -> int:
    return kept(need) + sum(need[kind] for kind in ("gradients", "gathered", "activations", "logits"))


def peak(need: Counter) -> int:
    """Bytes of the phase of a step that takes most: the update, or the push, when there are no gradients."""
    return max(update_peak(need), kept(need) + need["push"])


def fitted(
    make_policy: Callable, cfg: TrainConfig, ranks: int, gpu_bytes: float, critic: bool = False
) -> tuple[TrainConfig, Counter]:
    """The settings with a --tokens_per_microbatch, and what they need: the given one, or the largest of BUDGETS with
    which a step fits; the smallest if none does. SPARE of the memory stays free."""

    def with_tokens(tokens: int) -> tuple[TrainConfig, Counter]:
        chosen = replace(cfg, tokens_per_microbatch=tokens)
        return chosen, rank_bytes(make_policy, chosen, ranks, critic)

    def fits(choice: tuple[TrainConfig, Counter]) -> bool:
        return peak(choice[1]) <= gpu_bytes * (1 - SPARE)

    smallest = with_tokens(cfg.tokens_per_microbatch or BUDGETS[-1])
    if cfg.tokens_per_microbatch or not fits(smallest):
        return smallest
    return next(filter(fits, map(with_tokens, BUDGETS)))


def settled(
    make_policy: Callable, cfg: TrainConfig, ranks: int, gpu_bytes: float | None, critic: bool = False
) -> tuple[TrainConfig, str]:
    """The settings with what was left to us, and a warning where they cannot fit, else "".

    gpu_bytes: free on the GPU that has least; None without one: then no checkpointing, and 16,384 tokens. critic: as
    for `rank_bytes`.
    """
    if gpu_bytes is None:
        tokens = cfg.tokens_per_microbatch or BUDGETS[0]
        return replace(cfg, gradient_checkpointing=bool(cfg.gradient_checkpointing), tokens_per_microbatch=tokens), ""
    if cfg.gradient_checkpointing is None:
        cfg = replace(cfg, gradient_checkpointing=True)

    def attempt(cfg: TrainConfig) -> tuple[TrainConfig, int]:
        chosen, need = fitted(make_policy, cfg, ranks, gpu_bytes, critic)
        return chosen, peak(need)

    try:
        chosen, size = attempt(cfg)
    except Exception as error:  # whatever a model's own code raises that cannot run without values; it may train
        tokens = cfg.tokens_per_microbatch or BUDGETS[0]
        unknown = f"Whether it fits cannot be told beforehand ({type(error).__name__}: {error!s:.200})."
        return replace(cfg, tokens_per_microbatch=tokens), unknown
    usable = gpu_bytes * (1 - SPARE)
    if size <= usable:
        return chosen, ""
    warning = (
        f"Warning: this needs about {size / GIB:.1f} GiB on a GPU, and {usable / GIB:.1f} GiB can be used "
        f"(--strategy {cfg.strategy}, {ranks} rank(s), {chosen.tokens_per_microbatch} tokens a micro-batch). "
    )
    sharding = [dict(strategy="fsdp2")] * (ranks > 1) + [dict(strategy="fsdp2", offload=True), dict(use_peft=True)]
    changes = [*sharding, dict(strategy="fsdp2", use_peft=True), dict(use_peft=True, load_in="4bit")]
    for change in changes if not cfg.load_in else ():
        _, other = attempt(replace(cfg, **change))
        if other <= usable:
            words = [f"--{name}" if value is True else f"--{name} {value}" for name, value in change.items()]
            return chosen, warning + f"{' '.join(words)} needs {other / GIB:.1f} GiB. See plan.py."
    return chosen, warning + "Neither shards nor LoRA would fit: more GPUs, or shorter completions. See plan.py."
