"""What TRL's GRPOTrainer and train_grpo.py learn of the demo's task with equal settings, by sampled tokens.

    pip install -r benchmarks/requirements-bench.txt
    python benchmarks/vs_trl_curve.py --seeds 42 43 44       # 25 minutes a seed on one core, 20 of them TRL's

Equal: model (fp32 weights, bf16 compute), LoRA, prompts a step, completions a prompt, tokens a completion, AdamW, the
falling learning rate, gradient norm, temperature, advantage (by the group's std), loss (every completion alike), beta
0, reward, and the held-out rows: each is sampled 4 times at temperature 1. Both sample in process. Not equal: the order
of the prompts, the random numbers, and --correction token, our default. Steps of the two are not timed by turns: that
is vs_trl.py's. Curves go to benchmarks/results/vs_trl_curve.json and .svg.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from safety.orphans import ends_with_us  # noqa: E402

MODEL = str(ROOT / "models" / "SmolLM2-135M-Instruct")
STEPS, EVERY, PROMPTS, GENERATIONS, TOKENS, HELD_OUT = 30, 5, 8, 8, 12, 4


def reward(completions, answer, **columns):
    from rewards import last_number

    return last_number(completions, answer)


def run_trl(seed: int, path: Path) -> None:
    """Writes a line of json per evaluation: step, completion tokens sampled so far, share of held-out samples right."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from examples.sums import rows

    class Evaluation(TrainerCallback):
        sampled = 0.0

        def on_log(self, args, state, control, logs, **_):
            if "completions/mean_length" in logs:
                self.sampled += logs["completions/mean_length"] * PROMPTS * GENERATIONS
                if state.global_step % EVERY == 0:
                    self.write(state.global_step)

        def on_train_begin(self, args, state, control, **_):
            self.write(0)

        @torch.no_grad()
        def write(self, step):
            tokenizer, model, held_out = trainer.processing_class, trainer.model, rows("test", seed)
            training = model.training
            model.eval()
            prompts = [
                tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
                for row in held_out
            ]
            ids = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
            how = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=TOKENS)
            with torch.autocast("cpu", torch.bfloat16):
                out = model.generate(**ids, num_return_sequences=HELD_OUT, **how)
            texts = tokenizer.batch_decode(out[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
            completions = [[{"role": "assistant", "content": text}] for text in texts]
            right = reward(completions, [row["answer"] for row in held_out for _ in range(HELD_OUT)])
            model.train(training)
            line = {"step": step, "tokens": self.sampled, "right": statistics.fmean(r == 1 for r in right)}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    cfg = GRPOConfig(
        output_dir=str(path.parent),
        seed=seed,
        per_device_train_batch_size=PROMPTS * GENERATIONS // 2,
        gradient_accumulation_steps=2,
        num_generations=GENERATIONS,
        max_completion_length=TOKENS,
        max_steps=STEPS,
        learning_rate=3e-4,
        lr_scheduler_type="linear",
        warmup_steps=0,
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        temperature=1.0,
        top_k=0,
        loss_type="grpo",
        scale_rewards="group",
        bf16=True,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
    )
    lora = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        model=MODEL,
        reward_funcs=reward,
        args=cfg,
        train_dataset=Dataset.from_list(rows("train", seed)),
        callbacks=[Evaluation()],
        peft_config=lora,
    )
    trainer.train()


def run_ours(seed: int, path: Path) -> None:
    """The same line from metrics.jsonl of train_grpo.py with the demo's settings."""
    command = [sys.executable, str(ROOT / "train_grpo.py"), "--config", "examples/sums.yaml", "--generator", "hf"]
    command += ["--seed", str(seed), "--eval_steps", str(EVERY), "--output_dir", str(path.parent), "--run_name", "ours"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, preexec_fn=ends_with_us())
    sampled, lines = 0.0, []
    for line in map(json.loads, (path.parent / "ours" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        if "eval/mean@4" in line:
            lines.append({"step": line["step"], "tokens": sampled, "right": line["eval/mean@4"]})
        else:
            sampled += line["completions/mean_length"] * PROMPTS * GENERATIONS
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def draw(runs: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for system, title, color in (("ours", "train_grpo.py", "#2563eb"), ("trl", "TRL 1.16 GRPOTrainer", "#d97706")):
        mine = [run["lines"] for run in runs if run["system"] == system]
        if not mine:
            continue
        tokens = [statistics.fmean(line["tokens"] for line in at) / 1000 for at in zip(*mine, strict=True)]
        right = [[line["right"] for line in at] for at in zip(*mine, strict=True)]
        axes.plot(tokens, [statistics.fmean(at) for at in right], color=color, marker="o", label=f"{title}, mean")
        axes.fill_between(tokens, [min(at) for at in right], [max(at) for at in right], color=color, alpha=0.15, lw=0)
    axes.set(xlabel="thousands of sampled tokens", ylabel="held-out sums right", ylim=(0, 1))
    axes.set_title(f"Like settings, {STEPS} steps; band: all seeds", fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eef0f3")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--systems", nargs="+", choices=["ours", "trl"], default=["ours", "trl"])
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results"))
    parser.add_argument("--trl_child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl_child:
        return run_trl(int(args.trl_child[0]), Path(args.trl_child[1]))
    kept = Path(args.out) / "vs_trl_curve.json"
    runs = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []  # seeds may be added later
    for seed in args.seeds:
        for system in args.systems:
            path = Path(tempfile.mkdtemp(prefix=f"curve_{system}_")) / "lines.jsonl"
            if system == "trl":
                command = [sys.executable, __file__, "--trl_child", str(seed), str(path)]
                with open(path.parent / "output.txt", "w", encoding="utf-8") as out:
                    subprocess.run(command, check=True, stdout=out, stderr=out, preexec_fn=ends_with_us())
            else:
                run_ours(seed, path)
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            runs = [run for run in runs if (run["system"], run["seed"]) != (system, seed)]
            runs.append({"system": system, "seed": seed, "lines": lines})
            print(system, seed, " ".join(f"{line['right']:.3f}" for line in lines), flush=True)
            kept.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
            draw(runs, kept.with_suffix(".svg"))


if __name__ == "__main__":
    main()
