"""A machine with one GPU, borrowed for fifteen minutes, without network: what works there, and how fast.

    python scripts/gpu_day.py part1      # every check at once, then updates of a 1.5B model and whole steps, alone
    python scripts/gpu_day.py part2      # beside TRL, the demo, sampling, long completions, a push, 4 bits, 7B
    python scripts/gpu_day.py part1 --device cpu --quick      # a rehearsal

scripts/gpu_day_pack.sh puts together what has to be carried there. Each figure is a line of figures.jsonl in the folder
OUT (environment; unset: /tmp/gpu_day), written at once; logs.txt has the ends of all logs. Every step has a time limit,
and is left out when less than half of it is left of --limit. Where vLLM and network are at hand: scripts/gpu_check.sh.
"""

import argparse
import asyncio
import gc
import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT / "benchmarks")]

import gpu_check  # noqa: E402
import memory_worker  # noqa: E402
import torch  # noqa: E402
from gpu_checks import CHECKS, EVEN, PHASES, called, fastest, read_metrics, settled  # noqa: E402

import plan  # noqa: E402
import train_grpo as script  # noqa: E402
import utils  # noqa: E402
from config import TrainConfig, load_config  # noqa: E402
from runlog import gpu as counts  # noqa: E402

OUT = Path(os.environ.get("OUT") or "/tmp/gpu_day").resolve()
SCRATCH = Path("/tmp/gpu_day_scratch")  # models and runs, which do not come back
RANDOM = SCRATCH / "random"  # a model with random weights and a tokenizer
REAL = ROOT / "models" / "SmolLM2-135M-Instruct"
BEGIN = float(os.environ.setdefault("GPU_DAY_BEGIN", str(time.time())))  # of the part, also in its child processes

# Of Qwen2.5.
SHAPES = {
    "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12),
    "7B": dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28),
}
KEY_HEADS = {"1.5B": 2, "7B": 4}
SMALL = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)

# name -> model, prompts, completions of each, tokens of a prompt and of a completion, flags
UPDATES = {
    "shared prompts": ("1.5B", 4, 16, 512, 1024, ""),
    "plain rows": ("1.5B", 4, 16, 512, 1024, "--no-shared_prefix"),
    "transformers alone": ("1.5B", 4, 16, 512, 1024, "--no-shared_prefix"),
    "long prompts, shared": ("1.5B", 4, 16, 4096, 256, ""),
    "long prompts, plain rows": ("1.5B", 4, 16, 4096, 256, "--no-shared_prefix"),
    "no checkpointing": ("1.5B", 4, 16, 512, 1024, "--no-gradient_checkpointing"),
    "LoRA": ("1.5B", 4, 16, 512, 1024, "--use_peft --dtype bfloat16"),
    "activations in CPU memory": ("1.5B", 4, 16, 512, 1024, "--offload_activations"),
}
MORE_UPDATES = {
    "fsdp2": ("1.5B", 4, 16, 512, 1024, "--strategy fsdp2"),
    "7B LoRA": ("7B", 1, 16, 512, 1024, "--use_peft --dtype bfloat16"),
    "fsdp2, all in CPU memory": ("1.5B", 2, 16, 512, 1024, "--strategy fsdp2 --offload"),
    "compiled": ("1.5B", 4, 16, 512, 1024, "--compile"),
}
STEPS = {  # flags of whole steps of train_grpo.py --generator hf
    "all weights": "",
    "LoRA": "--use_peft --dtype bfloat16",
    "4-bit base": "--use_peft --load_in 4bit",
}


def note(**line) -> None:
    line = {"at": round(time.time() - BEGIN, 1)} | line
    with open(OUT / "figures.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


def why(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"


class Day:
    """What is left of the part's time, and on which device it is spent."""

    def __init__(self, device: str, quick: bool, limit: float):
        self.gpu, self.quick, self.limit = device == "cuda", quick, limit

    def run(self, name: str, words: list, seconds: float) -> bool:
        """Whether a command ended well within its seconds, of which a CPU has ten times as many."""
        seconds *= 1 if self.gpu else 10
        left = self.limit - (time.time() - BEGIN)
        if left < seconds / 2:
            note(left_out=name, seconds_left=round(left))
            return False
        begin = time.monotonic()
        log = SCRATCH / f"{''.join(c if c.isalnum() else '_' for c in name)}.txt"
        env = {"OMP_NUM_THREADS": "8"} if self.gpu else {"CUDA_VISIBLE_DEVICES": ""}
        status, text = called(words, log, min(seconds, left), **env)
        with open(OUT / "logs.txt", "a", encoding="utf-8") as file:
            file.write(f"\n==== {name}: {status}\n{text[-4000:]}")
        seconds, said = round(time.monotonic() - begin, 1), "" if status == 0 else text[-500:]
        note(ended=name, status="too late" if status is None else status, seconds=seconds, said=said)
        return status == 0

    def child(self, name: str, what: str, *words: str, seconds: float) -> bool:
        """A step of this file in a process of its own."""
        own = [sys.executable, Path(__file__), what, *words, "--device", "cuda" if self.gpu else "cpu"]
        return self.run(name, [*own, *["--quick"] * self.quick], seconds)


# ---- updates ---------------------------------------------------------------------------------------------------------


def config_folder(size: str, day: Day) -> Path:
    """A folder with nothing but the config of a model."""
    shape = SHAPES[size] if day.gpu else SMALL
    shape = shape | dict(num_key_value_heads=KEY_HEADS[size], vocab_size=151936 if day.gpu else 4096)
    shape |= dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"], tie_word_embeddings=size != "7B")
    shape |= dict(max_position_embeddings=131072)
    folder = SCRATCH / f"config_{size}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return folder


def gib(number: float) -> float:
    return round(number / 2**30, 2)


def peak(day: Day) -> float | None:
    """GiB since the last call."""
    if not day.gpu:
        return None
    found = gib(torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    return found


def updates(names: list[str], day: Day) -> None:
    script.load_hf_model = memory_worker.random_model
    _, _, device = utils.init_distributed(300)
    for name in names:
        try:
            one_update(name, day, device)
        except Exception as error:  # out of memory, say: the others go on
            note(update=name, failed=why(error))
        gc.collect()
        if day.gpu:
            torch.cuda.empty_cache()
            peak(day)


def one_update(name: str, day: Day, device: torch.device) -> None:
    size, prompts, group, prompt, completion, flags = (UPDATES | MORE_UPDATES)[name]
    if not day.gpu:
        prompts, group, prompt, completion = 2, 2, 16, 16
    words = (
        f"--model_id {config_folder(size, day)} --prompts_per_step {prompts} --num_generations {group} --max_steps 9 "
    )
    words += f"--max_prompt_length {prompt} --max_completion_length {completion} --learning_rate 1e-5 {flags}"
    cfg = load_config(TrainConfig, words.split() + ["--strategy", "ddp"] * ("--strategy" not in flags))
    cfg, warning = plan.settled(script.empty_policy, cfg, 1, utils.free_memory(device))
    with torch.device("meta"):
        empty = script.empty_policy(cfg)
    planned, sizes = plan.peak(plan.bytes_needed(plan.sizes_of(empty), cfg, 1)), counts.sizes(empty.hf_model)
    policy, inner = script.load_policy(cfg, device)
    optimizer, batch = script.make_optimizer(policy, cfg), memory_worker.batch_of(cfg, 1, device)
    wanted, cfg = cfg.shared_prefix, settled(cfg, policy, inner)

    def update() -> None:
        if name == "transformers alone":
            plain_update(inner.hf_model, optimizer, batch, device)
        else:
            script.update(policy, optimizer, batch, cfg, 0)

    seconds = fastest(update, day, 1 if day.quick else 2)
    flops = counts.update_flops(sizes, [(prompt, [completion] * group)] * prompts, cfg.shared_prefix)
    note(
        update=name, seconds=round(seconds, 3), tflops=round(flops / seconds / 1e12, 3), peak_gib=peak(day),
        completion_tokens_per_s=round(prompts * group * completion / seconds), planned_gib=gib(planned),
        parameters=round(sizes[0]), microbatch=cfg.tokens_per_microbatch, checkpointing=cfg.gradient_checkpointing,
        shared=cfg.shared_prefix, shared_was_wanted=wanted, warning=warning,
    )  # fmt: skip


def plain_update(model, optimizer, batch: script.Batch, device: torch.device) -> None:
    """What a short script of transformers and torch does: padded rows, autocast, whole logits, eight rows at a time."""
    total = batch.loss_mask.sum()
    for part in (batch.select(list(rows)) for rows in torch.arange(len(batch)).split(8)):
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=part.input_ids, attention_mask=part.attention_mask, use_cache=False).logits[:, :-1]
        targets = part.input_ids[:, 1:]
        logprobs = -torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
        ratio = (logprobs - logprobs.detach()).exp()
        (-(ratio * part.advantages[:, 1:] * part.loss_mask[:, 1:]).sum() / total).backward()
        del logits, logprobs, ratio
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def context(lengths: list[str], day: Day) -> None:
    """The longest completion that an update of all weights of a 1.5B takes, two of one prompt."""
    script.load_hf_model = memory_worker.random_model
    _, _, device = utils.init_distributed(300)
    for flags in ("", "--offload_activations"):
        policy = None
        for length in map(int, lengths):
            words = f"--model_id {config_folder('1.5B', day)} --max_steps 9 --prompts_per_step 1 --num_generations 2 "
            words += f"--max_prompt_length 512 --max_completion_length {length} --gradient_checkpointing "
            words += f"--tokens_per_microbatch {length + 512} {flags}"
            try:
                cfg = load_config(TrainConfig, words.split())
                with torch.device("meta"):
                    planned = plan.peak(plan.bytes_needed(plan.sizes_of(script.empty_policy(cfg)), cfg, 1))
                if policy is None:
                    policy, inner = script.load_policy(cfg, device)
                    optimizer = script.make_optimizer(policy, cfg)
                cfg, batch = settled(cfg, policy, inner), memory_worker.batch_of(cfg, 1, device)
                update = partial(script.update, policy, optimizer, batch, cfg, 0)
                seconds = fastest(update, day, 1)
                found = dict(seconds=round(seconds, 2), peak_gib=peak(day), planned_gib=gib(planned))
                note(context=length, flags=flags, **found)
            except Exception as error:  # out of memory, mostly: noted, and longer ones are not tried
                note(context=length, flags=flags, failed=why(error))
                break
        policy = inner = optimizer = batch = None
        gc.collect()
        if day.gpu:
            torch.cuda.empty_cache()


# ---- whole steps -----------------------------------------------------------------------------------------------------


def make(size: str, day: Day) -> None:
    """RANDOM: random weights, the tokenizer of models/tiny."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    with torch.device("cuda" if day.gpu else "cpu"):
        config = AutoConfig.from_pretrained(config_folder(size, day))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "tiny")
    for settings in (model.config, model.generation_config):
        settings.eos_token_id, settings.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        settings.bos_token_id = None
    model.save_pretrained(RANDOM)
    tokenizer.save_pretrained(RANDOM)


def sampling(sequences: list[str], day: Day) -> None:
    """Tokens a second of --generator hf."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_generator import HFGenerator

    model = AutoModelForCausalLM.from_pretrained(RANDOM, dtype=torch.bfloat16).to("cuda" if day.gpu else "cpu")
    generator, count = HFGenerator(model, AutoTokenizer.from_pretrained(RANDOM)), 128 if day.gpu else 6

    async def sample(number: int) -> int:
        asked = [
            generator.generate([5 + k] * (40 + k), n=number // 8, max_tokens=count, min_tokens=count) for k in range(8)
        ]
        return sum(len(one.token_ids) for found in await asyncio.gather(*asked) for one in found)

    for number in map(int, sequences):
        try:
            begin = time.perf_counter()
            tokens, seconds = asyncio.run(sample(number)), time.perf_counter() - begin
            note(sampling=number, tokens_per_s=round(tokens / seconds), ms_per_token=round(1000 * seconds / count, 2))
        except Exception as error:  # noted; the day goes on
            note(sampling=number, failed=why(error))


def steps(name: str, day: Day, seconds: float) -> None:
    """Seconds by phase of whole steps, the first left out."""
    reward, run, length = SCRATCH / "even.py", f"steps_{list(STEPS).index(name)}", 128 if day.gpu else 8
    reward.write_text(EVEN, encoding="utf-8")
    group = 16 if day.gpu else 2
    words = f"--generator hf --model_id {RANDOM} --dataset_id examples/sums.py:rows --reward_funcs {reward}:even "
    words += (
        f"--prompts_per_step 8 --num_generations {group} --max_prompt_length 128 --max_steps {2 if day.quick else 4} "
    )
    words += f"--max_completion_length {length} --min_completion_length {length} --learning_rate 1e-6 {STEPS[name]} "
    words += (
        f"--print_samples_every 0 --no-log_completions --logprob_diff_limit 10 --output_dir {SCRATCH} --run_name {run}"
    )
    if day.run(f"steps, {name}", [sys.executable, "train_grpo.py", *words.split()], seconds):
        lines = [line for line in read_metrics(SCRATCH / run) if "reward" in line][1:]
        names = (*PHASES, "time/step", "perf/tflops", "memory/peak_gb", "sampling/logprob_diff_mean")
        note(steps=name, **{key: round(min(line[key] for line in lines), 4) for key in names if key in lines[0]},
             sampled_per_s=round(8 * group * length / min(line["time/generate"] for line in lines)))  # fmt: skip


def beside_trl(day: Day, seconds: float) -> None:
    """Equal steps of train_grpo.py and TRL's GRPOTrainer: bf16 weights, no checkpointing, sampling in the process."""
    import vs_trl

    case, folder = trl_case(vs_trl, day), SCRATCH / "trl"
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("run", "trl"):
        (folder / name).mkdir(parents=True)
    prompts = folder / "prompts.jsonl"
    vs_trl.write_prompts(prompts, str(RANDOM), None)
    count = 2 if day.quick else 4
    options = dict(generator="hf", dtype="bfloat16", logprob_diff_limit=10.0)
    ours = vs_trl.our_command(str(RANDOM), str(prompts), case, count, folder, options)
    ours += ["--no-gradient_checkpointing", "--no-log_completions"]
    day.run("beside TRL: train_grpo.py", ours, seconds)
    day.child(
        "beside TRL: TRL", "trl", str(prompts), str(folder / "trl" / "metrics.jsonl"), str(count), seconds=seconds
    )
    for name, run in (("train_grpo.py", folder / "run"), ("TRL", folder / "trl")):
        lines = read_metrics(run)
        names = ("time/step", "time/generate", "time/update", "memory/peak_gb")
        note(beside_trl=name, **{key: [round(line[key], 2) for line in lines[1:] if key in line] for key in names})


def trl_case(vs_trl, day: Day):
    return vs_trl.Case(8, 16, 128, None, 16) if day.gpu else vs_trl.Case(2, 2, 8, None, 4)


def trl(prompts: str, metrics: str, count: str, day: Day) -> None:
    import trl
    import vs_trl

    plain = trl.GRPOConfig
    trl.GRPOConfig = lambda **given: plain(**given | dict(use_cpu=not day.gpu))
    vs_trl.run_trl(str(RANDOM), prompts, trl_case(vs_trl, day), int(count), Path(metrics))
    if day.gpu:
        note(beside_trl="TRL", peak_gib=gib(torch.cuda.max_memory_allocated()))


def demo(day: Day, seconds: float) -> None:
    """The demo's task with the real model, sampled in the process: held-out sums right."""
    words = f"--config examples/sums.yaml --model_id {REAL} --generator hf --output_dir {SCRATCH} --run_name sums "
    words += f"--max_steps {2 if day.quick else 30} --eval_steps {2 if day.quick else 10} --print_samples_every 0 "
    words += "--no-log_completions" + " --prompts_per_step 2 --num_generations 2 --eval_generations 1" * day.quick
    day.run("demo", [sys.executable, "train_grpo.py", *words.split()], seconds)
    lines = read_metrics(SCRATCH / "sums") if (SCRATCH / "sums").exists() else []
    right = [round(value, 3) for line in lines for key, value in line.items() if key.startswith("eval/mean@")]
    note(demo=right, step_seconds=[round(line["time/step"], 2) for line in lines if "time/step" in line][-5:])


def push(gigabytes: str, day: Day) -> None:
    """All weights to the copy that samples in the same process, bucket by bucket."""
    from transformers import AutoTokenizer

    from hf_generator import HFGenerator

    _, _, device = utils.init_distributed(300)
    layers = max(1, round(float(gigabytes) * 1e9 / 2 / (4 * 2048**2 + 3 * 2048 * 5632)))

    def model(cfg, dtype, **_):
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=16)
        with torch.device(device):
            return LlamaForCausalLM(LlamaConfig(vocab_size=4096, **shape)).to(dtype)

    script.load_hf_model = model
    policy, inner = script.load_policy(load_config(TrainConfig, ["--model_id", str(RANDOM), "--beta", "0"]), device)
    generator = HFGenerator(model(None, torch.bfloat16), AutoTokenizer.from_pretrained(RANDOM))
    size = sum(p.numel() for p in inner.hf_model.parameters()) * 2 / 1e9
    seconds = fastest(lambda: script.push_weights(policy, generator, 1, 256), day, 2)
    note(push="to the copy in this process", gigabytes=round(size, 2), seconds=round(seconds, 3))


# ---- the two parts ---------------------------------------------------------------------------------------------------


def checks(names: list[str], day: Day) -> None:
    """Checks of gpu_check.py; on a GPU all of them beside each other, for which it and 16 cores have room."""
    machine = gpu_check.this_machine("cuda" if day.gpu else "cpu", 1 if day.gpu else 9)
    how = dict(at_once=len(names), seconds=110) if day.gpu else {}
    for result in gpu_check.run_all(names, machine, **how):
        figures = dict(check=result.name, verdict=result.verdict, said=result.said, seconds=round(result.seconds, 1))
        note(**figures, details=result.details[-1500:] * (result.verdict == "failed"))


def part1(day: Day) -> None:
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(day.child, "random model", "make", "1.5B", seconds=60)
        checks([name for name in CHECKS if name not in ("speed", "demo")], day)
        made.result()
    day.child("speed", "check", "speed", seconds=50)
    day.child("updates", "updates", *UPDATES, seconds=110)
    for name in ("all weights", "LoRA"):
        steps(name, day, 55)


def part2(day: Day) -> None:
    with ThreadPoolExecutor(1) as pool:
        real = [sys.executable, "scripts/make_models.py", "smollm2", REAL]
        made = pool.submit(day.run, "real model", real, 60)
        if not RANDOM.exists():  # another machine than part 1 ran on
            day.child("random model", "make", "1.5B", seconds=60)
        beside_trl(day, 60)
        if made.result():
            demo(day, 90)
    day.child("sampling", "sampling", *(["64", "256"] if day.gpu else ["8"]), seconds=45)
    day.child("context", "context", *(["16000", "32000", "64000"] if day.gpu else ["64", "128"]), seconds=60)
    day.child("push", "push", "3" if day.gpu else "0.1", seconds=40)
    steps("4-bit base", day, 55)
    day.child("more updates", "updates", *MORE_UPDATES, seconds=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", choices=["part1", "part2", "check", "updates", "context", "make", "sampling", "trl", "push"]
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="as few repetitions as show that it runs")
    parser.add_argument("--limit", type=float, default=380, help="seconds of the whole part; --device cpu has none")
    args = parser.parse_args()
    for folder in (OUT, SCRATCH):
        folder.mkdir(parents=True, exist_ok=True)
    day = Day(args.device, args.quick, args.limit if args.device == "cuda" else float("inf"))
    lists = dict(updates=updates, context=context, sampling=sampling, check=checks)
    if args.what in lists:
        lists[args.what](args.words, day)
    else:
        dict(part1=part1, part2=part2, make=make, trl=trl, push=push)[args.what](*args.words, day)
    sys.stdout.flush()
    os._exit(0)  # without waiting for process groups and threads


if __name__ == "__main__":
    main()
