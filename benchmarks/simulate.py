"""What a step of train_grpo.py takes of GPUs that are not there.

    python benchmarks/simulate.py                          benchmarks/results/simulate.md: ten minutes on one core
    python benchmarks/simulate.py qwen2.5-7b --gpus 8      a row of its table, in half a minute

Takes a name of MODELS and every flag of plan.py; --gpus are the trainer's. The script's own functions run as one rank
runs them (`--rank`): load_policy, all_logprobs, update (micro-batches, clipping, AdamW) and push_weights. torch's FSDP2
is the real one, too.
Tensors have shapes and no memory (FakeTensorMode); they claim a device "gpu", as in tests/claimed.py. The other ranks
are torch's fake process group. Small tensors whose values decide what is done next (lengths, masks, segments) have
values.

    simulated   bytes: each storage once while it is alive, in blocks of 512, as CUDA's allocator counts
    not         time; kernels' own work space, fragmentation, a server, sampling, rewards, ranks that differ in length,
                values: nothing here says that a gradient is right; FSDP1, and DDP on more than one GPU

Only three passes of an update are simulated; of more, those in the middle are alike.
"""

import contextlib
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoConfig

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import claimed  # noqa: E402
import memory_worker  # noqa: E402
import tiny_vlms  # noqa: E402

import plan  # noqa: E402
import train_grpo as script  # noqa: E402
from config import ConfigError, load_config  # noqa: E402
from inputs import vision  # noqa: E402
from inputs.processor import load_processor, takes_images  # noqa: E402
from modeling.loading import set_up_4_bits  # noqa: E402
from modeling.model import rope_index_of  # noqa: E402
from modeling.parameters import move  # noqa: E402
from plan import GIB  # noqa: E402
from rollouts import Trajectory  # noqa: E402

GPU, aten = claimed.GPU, torch.ops.aten


class SimulateConfig(plan.PlanConfig):
    strategy: Literal["fsdp2", "ddp"] = "fsdp2"  # ddp on one GPU, which has no one to talk to: --load_in 4bit wants it
    # --- simulate ---
    model: str = "qwen2.5-7b"  # a name in MODELS (benchmarks/simulate.py)
    hsdp: bool = False  # --shard_size: copies of the model on each machine, in shards
    rank: int = 0  # whose view; -1: the last one's
    layers: int | None = None  # so many of its decoder layers; unset: all


VISION = dict(
    text_config=dict(
        **dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16),
        **dict(num_key_value_heads=2, vocab_size=151936, max_window_layers=36),
    ),
    vision_config=dict(
        **dict(hidden_size=1280, intermediate_size=3420, depth=32, num_heads=16, out_hidden_size=2048),
        **dict(patch_size=14, window_size=112, fullatt_block_indexes=[7, 15, 23, 31]),
    ),
    tie_word_embeddings=True,
)
MIXTURE = dict(
    **dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48),
    **dict(num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128),
    **dict(num_experts_per_tok=8, vocab_size=151936, norm_topk_prob=True, tie_word_embeddings=False),
)
TOWER = VISION["vision_config"]


def dense(kind: str, hidden: int, wide: int, layers: int, heads: int, kv_heads: int, words: int, tied=False) -> tuple:
    sizes = dict(hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers, num_attention_heads=heads)
    return kind, sizes | dict(num_key_value_heads=kv_heads, vocab_size=words, tie_word_embeddings=tied)


MODELS = {  # published shapes: transformers' kind of model, and arguments of its config
    "qwen2.5-1.5b": dense("qwen2", 1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-7b": dense("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-32b": dense("qwen2", 5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": dense("qwen2", 8192, 29568, 80, 64, 8, 152064),
    "qwen3-30b-a3b": ("qwen3_moe", MIXTURE),
    "qwen2.5-vl-3b": ("qwen2_5_vl", VISION),
}
SIDE = 448  # pixels of a picture's sides, one in each prompt of a model that takes them

# ---- a machine without memory ----------------------------------------------------------------------------------------

SMALL = 2**21  # elements of a tensor whose value is kept, if it is known


def held(tensor: Tensor) -> Tensor | None:
    """What a tensor holds, if that is known: a real tensor."""
    value = getattr(tensor, "held", None) if isinstance(tensor, FakeTensor) else tensor
    forgotten = value is not None and value.numel() and not value.untyped_storage().nbytes()
    return None if forgotten else value


class Machine(memory_worker.Recorder):
    """One rank: its memory on the GPU, what it does, what it knows of values."""

    def __init__(self):
        super().__init__()
        self.aside, self.phase = False, "start"
        self.peaks: dict[str, int] = {}  # of each phase the most bytes alive

    def enter(self, name: str) -> None:
        """What comes from now on belongs to this phase."""
        self.peaks[self.phase] = self.most
        self.phase, self.most = name, self.now

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, packet = kwargs or {}, func.overloadpacket
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self.aside:
            return func(*args, **kwargs)
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:  # a device mesh looks at its ranks
            return compute(func, args, kwargs)
        if packet in (aten._pin_memory, aten.is_pinned):
            return args[0].clone() if packet is aten._pin_memory else True
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = all(held(x) is not None for x in tensors)
        dynamic = torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
        if packet in claimed.INDEXING:
            dynamic = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if packet is torch.ops.c10d.allgather_into_tensor_coalesced_:  # which the meta device does not know
            out = FakeWork().boxed()
        elif dynamic:
            out = self.look(func, args, kwargs, tensors, known)
        else:
            out = func(*args, **kwargs)
            self.remember(func, args, kwargs, tensors, out, known)
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor) and tensor.device.type == GPU.type:
                self.see(tensor)
        return out

    # -- values --

    def look(self, func, args, kwargs, tensors: list[Tensor], known: bool):
        """An operation whose result or its shape depends on values. What is read and is not known is 1, or true."""
        if known:
            return tree_map(partial(self.shaped, like=tensors[0]), compute(func, args, kwargs))
        if func.overloadpacket is not aten._local_scalar_dense:
            raise RuntimeError(f"{func} of a tensor without values")
        return True if tensors[0].dtype == torch.bool else 1.0 if tensors[0].is_floating_point() else 1

    def shaped(self, value, like: Tensor):
        if not isinstance(value, Tensor):
            return value
        tensor = torch.empty(value.shape, dtype=value.dtype, device=like.device)
        tensor.held = value
        return tensor

    def remember(self, func, args, kwargs, tensors: list[Tensor], out, known: bool) -> None:
        """Compute small results of known tensors; forget what was overwritten by something unknown."""
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        random = torch.Tag.nondeterministic_seeded in func.tags or func.__name__.startswith("empty")
        small = all(x.numel() <= SMALL and x.device.type != "meta" for x in made)
        if known and small and not random and func.namespace == "aten":
            values = [x for x in tree_leaves(compute(func, args, kwargs)) if isinstance(x, Tensor)]
            for tensor, value in zip(made, values, strict=True):
                if isinstance(tensor, FakeTensor) and not any(tensor is given for given in tensors):
                    tensor.held = value
            return
        if not func._schema.is_mutable or func.namespace == "c10d":  # of which the other ranks bring the same
            return
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(given):
                    if isinstance(tensor, FakeTensor) and (value := held(tensor)) is not None:
                        value.untyped_storage().resize_(0)


def compute(func, args, kwargs):
    """An operation on what its tensors hold, on the CPU."""

    def real(x):
        return held(x) if isinstance(x, Tensor) else torch.device("cpu") if isinstance(x, torch.device) else x

    with no_dispatch():
        args, kwargs = tree_map(real, (args, kwargs))
        return func(*args, **{name: x for name, x in kwargs.items() if name != "pin_memory"})


def as_list(tensor: Tensor) -> list:
    """Tensor.tolist, which torch refuses to tensors without values: one copy to the host."""
    tensor, value = tensor.cpu(), held(tensor)
    with no_dispatch():
        return (torch.ones(tensor.shape, dtype=tensor.dtype) if value is None else value).tolist()


def autocast_on(real, kind: str = GPU.type) -> bool:
    """torch.is_autocast_enabled, which means CUDA's where no device is named."""
    return real(kind)


@cache
def register() -> torch.library.Library:
    """Make torch know the device, and that it has a kernel for silu's backward pass: else that is taken apart."""
    claimed.register()
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    library.impl("silu_backward", lambda *arguments: NotImplemented)  # never called: shapes are all there is
    return library


@contextlib.contextmanager
def simulated(cfg: SimulateConfig):
    """Within, tensors have no memory, GPU is a device, and this process is rank --rank of --gpus."""
    register()

    def shape_of(*arguments, find=ShardingPropagator._propagate_tensor_meta_non_cached):
        machine.aside = True  # DTensor has it computed on tensors without shards
        try:
            return find(*arguments)
        finally:
            machine.aside = False

    def gather(out, value, group=None):
        out[:] = [value] * len(out)

    anything = mock.MagicMock()  # as torch.cuda.Stream and Event, where nothing takes time
    cuda_like = dict(Stream=anything, Event=anything, current_stream=anything, stream=contextlib.nullcontext)
    dist.init_process_group("fake", store=FakeStore(), rank=cfg.rank % cfg.gpus, world_size=cfg.gpus)
    try:
        with (
            mock.patch.multiple(FakeTensor, create=True, tolist=as_list, is_cuda=property(lambda x: x.device == GPU)),
            mock.patch.multiple(torch.gpu, create=True, **cuda_like),
            mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            mock.patch.object(torch, "is_autocast_enabled", partial(autocast_on, torch.is_autocast_enabled)),
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", shape_of),
            mock.patch.object(torch.nn.Module, "_apply", lambda module, *_, **__: module),  # PEFT has nothing to move
            mock.patch.object(dist, "all_gather_object", gather),
            mock.patch.object(dist.ProcessGroup, "set_timeout", lambda *_: None),
            mock.patch.object(script.fsdp, "CPUOffloadPolicy", partial(script.fsdp.CPUOffloadPolicy, pin_memory=True)),
            torch.autograd.set_multithreading_enabled(False),
            FakeTensorMode(allow_non_fake_inputs=True),
            Machine() as machine,
        ):
            yield machine
    finally:
        dist.destroy_process_group()


# ---- a step ----------------------------------------------------------------------------------------------------------


@cache
def with_pictures(kind: str) -> tuple[tempfile.TemporaryDirectory, dict]:
    """A folder with the processor of a model that takes pictures, and the config of a tiny one on its tokens."""
    folder, processor = tempfile.TemporaryDirectory(), tiny_vlms.processor_of(kind)  # removed when this process ends
    processor.image_processor.size = {"shortest_edge": 56 * 56, "longest_edge": 1024 * 1024}  # pixels
    config = tiny_vlms.config_of(kind, processor)
    processor.save_pretrained(folder.name)
    AutoConfig.for_model(kind, **config).save_pretrained(folder.name)
    return folder, config


def config_of(cfg: SimulateConfig):
    """transformers' config of --model, with --layers of its layers."""
    if cfg.model not in MODELS:
        raise ConfigError(f"--model={cfg.model}: known are {', '.join(MODELS)}.")
    kind, sizes = MODELS[cfg.model]
    if kind in tiny_vlms.MARK:  # with the tokens of its processor
        known = with_pictures(kind)[1]
        rope = known["text_config"]["rope_parameters"] | {"mrope_section": [16, 24, 24]}
        text = known["text_config"] | {"head_dim": None} | sizes["text_config"] | {"rope_parameters": rope}
        sizes = known | sizes | {"text_config": text, "vision_config": known["vision_config"] | TOWER}
    config = AutoConfig.for_model(kind, **sizes)
    text = config.get_text_config()
    text.num_hidden_layers = cfg.layers or text.num_hidden_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    return config


def claim_memory(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Meta tensors become tensors of the CPU, as kernels see it, parameters in `dtype`. Tied ones stay one."""
    copies: dict[int, Tensor] = {}
    for store in [store for part in module.modules() for store in (part._parameters, part._buffers)]:
        for name, old in store.items():
            if old is not None and old.is_meta and id(old) not in copies:
                parameter = isinstance(old, torch.nn.Parameter)
                new = torch.empty(old.shape, dtype=dtype if parameter else old.dtype)
                copies[id(old)] = torch.nn.Parameter(new, old.requires_grad) if parameter else new
            store[name] = copies.get(id(old), old)


def pack(model: torch.nn.Module, dtype: torch.dtype, cfg: SimulateConfig) -> None:
    """Make linear layers bitsandbytes' own, their weights in 4 bits, layer by layer as they are read. (Its class of
    parameters cannot be one of a tensor without memory: what the layer asks of it stands at a plain one.)"""
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Linear4bit

    model.is_loaded_in_4bit = True
    for layer in [part for part in model.modules() if getattr(getattr(part, "weight", None), "in_4_bits", False)]:
        weight = torch.empty(layer.weight.shape, dtype=dtype, device=GPU)
        packed, state = quantize_4bit(weight, compress_statistics=True, quant_type="nf4", quant_storage=torch.uint8)
        layer.__class__ = Linear4bit
        layer.weight = torch.nn.Parameter(packed, requires_grad=False)
        vars(layer.weight).update(quant_state=state, compress_statistics=True, quant_type="nf4", in_4_bits=True)
        vars(layer).update(compute_dtype=getattr(torch, cfg.compute_dtype), compute_type_is_set=True, quant_state=state)


def find_state(layer: torch.nn.Module) -> None:
    """For bitsandbytes' function of a longer name: a weight that FSDP2 has gathered gets back what is known of it."""
    layer.weight.quant_state = layer.quant_state


def picture_of(cfg: SimulateConfig, config) -> vision.Prompt | None:
    """A prompt with a picture, which needs values. None for a model without."""
    if not takes_images(config):
        return None
    with torch.device("meta"):
        model = script.empty_policy(cfg, config).hf_model
    processor = load_processor(cfg.model_id)
    asks = SimpleNamespace(tokenizer=processor, rope_index=rope_index_of(model))
    row = {"prompt": "What does the picture show?", "image": tiny_vlms.picture(0, SIDE, SIDE)}
    return vision.build_prompt(row, asks, cfg)


def settled(cfg: SimulateConfig) -> SimulateConfig:
    """With what a run would choose by itself. ConfigError for what is not simulated."""
    if cfg.strategy == "ddp" and cfg.gpus > 1:
        raise ConfigError(f"--strategy ddp is simulated on one GPU, not on {cfg.gpus}: --gpus 1, or --strategy fsdp2.")
    if MODELS[cfg.model][0] in tiny_vlms.MARK:
        cfg = replace(cfg, model_id=with_pictures(MODELS[cfg.model][0])[0].name)
    if cfg.hsdp:
        cfg = replace(cfg, shard_size=cfg.node_gpus)
    usual = dict(tokens_per_microbatch=cfg.tokens_per_microbatch or plan.BUDGETS[0], max_steps=1)
    return replace(cfg, prompts_per_step=max(cfg.prompts_per_step, 8 * cfg.gpus), **usual)


def batch_of(cfg: SimulateConfig, passes: int, shown: vision.Prompt | None = None) -> script.Batch:
    """Completions that fill so many passes, the last of each shortened. shown: a prompt with a picture."""
    prompt, longest, lengths = cfg.max_prompt_length, cfg.max_completion_length, []
    room = cfg.tokens_per_microbatch
    while (room := room - prompt * (len(lengths) % cfg.num_generations == 0)) > 0:
        lengths.append(min(longest, room))
        room -= lengths[-1]
    rows, asked = [], {}
    for number in range(passes):
        for place, length in enumerate(lengths):
            group = number * len(lengths) + place // cfg.num_generations
            ids, known, info = [5 + group % 90] * prompt, [1] * length, {}
            if shown:  # the picture's tokens, and text behind them
                asked[group] = asked.get(group) or vision.continued_prompt(shown, ids[len(shown.token_ids) :])
                ids, info = asked[group].token_ids, {"model_inputs": asked[group].model_inputs}
            scores = [0.0] * (length - 1) + [place % 2.0]
            rows.append(Trajectory({}, group, ids, [7] * length, known, [-1.0] * length, scores, info=info))
    batch = script.collate(rows, 0, GPU)
    batch.advantages = torch.where(torch.arange(len(rows), device=GPU) % 2 == 0, 1.0, -1.0)[:, None] * batch.loss_mask
    return batch


@dataclass
class Result:
    peaks: dict[str, float]  # of each phase, bytes on the GPU
    kept: float  # between two steps


PASSES = ("first pass", "middle pass", "last pass")


def simulate(cfg: SimulateConfig) -> Result:
    """A step, phase by phase."""
    cfg, config, real = settled(cfg), config_of(cfg), script.load_hf_model

    def load(cfg, dtype, given=None):
        with torch.device("meta"):
            model = real(cfg, dtype, given or config)
        if torch.get_default_device().type != "meta":
            if cfg.load_in:
                pack(model, dtype, cfg)
            claim_memory(model, dtype)
            set_up_4_bits(model, cfg)
        return model

    shown = picture_of(cfg, config)
    found = "bitsandbytes.nn.modules.fix_4bit_weight_quant_state_from_module"
    states = mock.patch(found, find_state) if cfg.load_in else contextlib.nullcontext()
    with mock.patch.object(script, "load_hf_model", load), states, simulated(cfg) as machine:
        machine.enter("load")
        with torch.device(GPU if cfg.load_in else "cpu"):  # a base in 4 bits is read to where it stays
            policy = script.load_policy(cfg, GPU)
        optimizer, batch = script.make_optimizer(policy, cfg), batch_of(cfg, len(PASSES), shown)
        trained = [p for p in policy.parameters() if p.requires_grad]
        for parameter in trained:  # makes the optimizer's state
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        run_passes(machine, policy, optimizer, batch, cfg)
        machine.enter("push")
        if cfg.colocate:
            moves = SimpleNamespace(modules={"policy": (policy, optimizer)}, reference=None, teacher=None)
            move(moves, torch.device("cpu"))
        kept, server = machine.now, memory_worker.Sender(dist.get_rank())
        server.adapter = "policy" if cfg.load_in else None  # nothing can be folded into 4 bits: adapters travel alone
        script.push_weights(policy, server, 1, cfg.push_bucket_mb or plan.push_bucket_mb(0))
        machine.enter("end")
    return Result(machine.peaks, kept)


def run_passes(machine, policy, optimizer, batch: script.Batch, cfg: SimulateConfig) -> None:
    """Log-probs of a pass, and an update."""
    number = len(script.micro_batches(batch, cfg))
    assert number == len(PASSES), f"{number} passes"
    machine.enter("old log-probs")
    script.all_logprobs(policy, batch.select(list(range(len(batch) // number))), cfg)
    names = iter(PASSES)

    def pass_loss(*arguments):
        machine.enter(next(names))
        return script.micro_loss(*arguments)

    def clip(*arguments, clip=script.clip_gradients):
        machine.enter("optimizer")
        return clip(*arguments)

    machine.enter("before the update")
    script.start_record(batch)
    with mock.patch.object(script, "clip_gradients", clip):
        script.update(policy, optimizer, batch, cfg, 0, pass_loss)


def predicted(cfg: SimulateConfig) -> Counter:
    """What plan.py says of the same."""
    cfg = settled(cfg)
    with torch.device("meta"):
        sizes = plan.sizes_of(script.empty_policy(cfg, config_of(cfg)))
    return plan.bytes_needed(sizes, cfg, cfg.gpus)


def errors(found: Result, need: Counter) -> dict[str, tuple[int, int]]:
    """(bytes simulated, bytes that plan.py says) on the GPU: kept between steps, in an update."""
    update = max(found.peaks[name] for name in (*PASSES, "optimizer"))
    return {"kept": (found.kept, plan.kept_bytes(need)), "update": (update, plan.peak(need))}


# ---- tables ----------------------------------------------------------------------------------------------------------

LENGTHS = "--prompt 500 --completion 4000 --max_prompt_length 500 --max_completion_length 4000"
CASES = [
    "qwen2.5-7b --gpus 8", "qwen2.5-1.5b --gpus 8", "qwen2.5-7b --gpus 8 --use_peft",
    "qwen2.5-7b --gpus 8 --offload --colocate", "qwen3-30b-a3b --gpus 16", "qwen2.5-7b --gpus 16",
    "qwen2.5-7b --gpus 64 --hsdp", "qwen2.5-7b --gpus 256", "qwen2.5-7b --gpus 256 --rank -1",
    "qwen2.5-7b --gpus 256 --hsdp", "qwen2.5-32b --gpus 16", "qwen2.5-72b --gpus 64", "qwen2.5-72b --gpus 256 --hsdp",
    "qwen2.5-1.5b --gpus 1", "qwen2.5-vl-3b --gpus 8",
    "qwen2.5-7b --gpus 1 --strategy ddp --dtype bfloat16 --use_peft",
    "qwen2.5-7b --gpus 1 --strategy ddp --dtype bfloat16 --use_peft --load_in 4bit",
    "qwen2.5-72b --gpus 8 --dtype bfloat16 --use_peft --load_in 4bit",
]  # fmt: skip


def row_of(words: str) -> str:
    """Of a case, in the table."""
    cfg = load_config(SimulateConfig, f"--model {words} {LENGTHS}".split())
    found, cells = simulate(cfg), [words]
    for simulated, said in errors(found, predicted(cfg)).values():
        apart = f"{said / simulated - 1:+.1%}" if simulated > GIB / 10 else "-"
        cells += [f"{simulated / GIB:.2f}", f"{said / GIB:.2f}", apart]
    cells.append(f"{found.peaks['push'] / GIB:.2f}")
    row = f"| {' | '.join(cells)} |"
    print(row, flush=True)
    return row


def main(words: list[str]) -> None:
    if words:
        row_of(" ".join(words))
        return
    rows = [row_of(words) for words in CASES]
    out = ROOT / "benchmarks/results/simulate.md"  # its words stay
    table = "\n".join(rows) + "\n"
    out.write_text(re.sub(r"(?<=-\|\n)(?:\|.*\n)+", table, out.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"simulate.py: error: {error}")
