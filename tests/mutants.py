"""Puts plausible bugs into a copy of the tree, one at a time, and says which of them no test saw.

    python tests/mutants.py                    # all; half an hour on two cores
    python tests/mutants.py gspo_sign          # some, by name

Not part of the tests: run before a release, and after a change to what is listed. Exit status 1 if one survived. A text
that is not exactly once in its file is an error: the code has changed, and the entry has to follow.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GRPO, LOSSES = "train_grpo.py", "algorithms/losses.py"
# name: (file, text, replacement, tests that should see it)
MUTANTS = {
    "gspo_sign": (GRPO, "clipped_surrogate(sequence_ratio(logprobs, batch), batch, cfg)",
                  "clipped_surrogate(-sequence_ratio(logprobs, batch), batch, cfg)", "algorithms -k gspo"),
    "cispo_unclipped": (LOSSES, "return -ratio.clamp(low, high) * batch.advantages", "return -ratio * batch.advantages",
                        "algorithms -k cispo"),
    "dual_clip_either_sign": (GRPO, "torch.where(advantages < 0, torch.min(loss, -advantages * cfg.dual_clip), loss)",
                              "torch.min(loss, -advantages * cfg.dual_clip)",
                              "algorithms -k vanilla"),
    "rloo_with_itself": ("algorithms/advantages.py", "* size / (size - 1).clamp(min=1)", "", "algorithms -k rloo"),
    "seq_mean_is_token_mean": (GRPO, "loss_mask / loss_mask.sum(1, keepdim=True).clamp(min=1) / max(num_sequences, 1)",
                               "loss_mask / max(num_tokens, 1)", "algorithms -k published"),
    "counts_of_one_rank": (GRPO, "num_tokens, num_sequences = utils.all_sum(torch.tensor(",
                           "num_tokens, num_sequences = (torch.tensor(", "ranks -k counts"),
    "no_world_size": (GRPO, "two_stage.backward(loss * utils.world_size(),", "two_stage.backward(loss,",
                      "gradient -k two_ranks"),
    "last_pass_dropped": (GRPO, "for number, rows in enumerate(passes):",
                          "for number, rows in enumerate(passes[: max(len(passes) - 1, 1)]):", "gradient -k any_cut"),
    "temperature_forgotten": (GRPO, "policy(inputs, at_rows, at_columns, targets, cfg.temperature)",
                              "policy(inputs, at_rows, at_columns, targets, 1.0)", "ideas_hold -k sampled_with"),
    "kl_of_the_policy_itself": (GRPO, 'batch.ref_logprobs = all_logprobs(reference, batch, cfg)["logprobs"]',
                                'batch.ref_logprobs = all_logprobs(policy, batch, cfg)["logprobs"]', "reference"),
    "kl_with_adapters_on": (GRPO, "with unwrapped(policy).model.disable_adapter():", "with contextlib.nullcontext():",
                            "reference"),
    "kl_without_beta": (GRPO, "per_token + cfg.beta * kl\n", "per_token + kl\n", "reference"),
    "kl_in_reward_added": (GRPO, "batch.rewards - cfg.beta * kl", "batch.rewards + cfg.beta * kl", "update -k kl"),
    "entropy_punished": (GRPO, "per_token - cfg.entropy_coef * entropy", "per_token + cfg.entropy_coef * entropy",
                         "update -k entropy"),
    "correction_unbounded": (GRPO, "w = w.clamp(cfg.correction_min, cfg.correction_max)", "pass",
                             "update -k corrections"),
    "silent_groups_kept": (GRPO, "return differs and low", "return low",
                           "update -k silent"),
    "push_left_out": (GRPO, "if (step + 1) % cfg.push_steps == 0 or evaluates or saves:",
                      "if step % 2 == 0 or evaluates or saves:", "train -k learns[grpo]"),
    "stale_weights_pushed": (GRPO, 'utils.raise_together(attempt(generator.begin_push), "Starting the weight push")',
                             "utils.raise_together(attempt(generator.begin_push), 'x')\n    policy = generator.__dict__"
                             ".setdefault('_first', __import__('copy').deepcopy(policy))", "train -k learns[grpo]"),
    "end_not_learned": ("rollouts.py", "loss_mask=[1] * len(sample.token_ids),",
                        "loss_mask=[1] * (len(sample.token_ids) - 1) + [0],", "first_hand"),
    "end_of_turn_not_learned": ("envs/turns.py", "[0] * len(new) + [1] * len(sample.token_ids)",
                                "[0] * len(new) + [1] * (len(sample.token_ids) - 1) + [0]", "turns"),
    "observation_learned": ("envs/turns.py", "mask += [0] * len(new)", "mask += [1] * len(new)", "turns"),
    "reward_columns_shifted": ("rewards.py", "[row.get(column) for row in rows] for column in columns",
                               "[row.get(column) for row in rows[1:] + rows[:1]] for column in columns", "first_hand"),
    "prompt_filter_off_by_one": ("inputs/vision.py", "> (limit or cfg.max_prompt_length):",
                                 "> (limit or cfg.max_prompt_length) + 1:", "data"),
    "pictures_reversed": ("inputs/vision.py", "    if not parts:\n        return column\n",
                          "    if not parts:\n        return column[::-1]\n", "first_hand"),
    "pictures_of_parts_reversed": ("inputs/vision.py", "unplaced = iter(column)", "unplaced = iter(column[::-1])",
                                   "first_hand"),
    "groups_mixed": ("batch.py", "[t.group + rank * GROUPS for t in", "[t.group // 2 + rank * GROUPS for t in",
                     "minimal -k those_of_train_grpo"),
    "restarts_seen_through": ("batch.py", "    if not any(batch.restarts):", "    if True:", "restarts"),
    "std_of_all": ("batch.py", "def group_std(scores: Tensor, groups: Tensor) -> Tensor:\n",
                   "def group_std(scores: Tensor, groups: Tensor) -> Tensor:\n    groups = torch.zeros_like(groups)\n",
                   "algorithms -k published"),
    "gae_without_lambda": ("train_ppo.py", "delta + cfg.gamma * cfg.lam * next_advantage",
                           "delta + cfg.gamma * next_advantage", "ppo -k gae"),
    "one_step_staler": ("train_async.py", "g.born < step - cfg.max_staleness]",
                        "g.born < step - cfg.max_staleness - 1]", "async -k bounded"),
    "lora_scale_lost": ("modeling/model.py", "alpha=layer.scaling[name]", "alpha=1.0", "loading -k reaches"),
    "adam_forgotten": ("saving/checkpoints.py", 'if "optimizer" in state[name]:', "if False:", "resume -k PPO"),
}  # fmt: skip


def run(folder: Path, tests: str) -> subprocess.CompletedProcess:
    """The tests of a row: files by the middle of their names, then options."""
    words = tests.split()
    files = [f"tests/test_{word}.py" for word in words[: words.index("-k") if "-k" in words else None]]
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", "not slow", *files]
    command += words[words.index("-k") :] if "-k" in words else []
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1800)


def main(names: list[str]) -> int:
    chosen, wrong = {name: MUTANTS[name] for name in names or MUTANTS}, {}
    for name, (file, text, *_) in chosen.items():
        if (count := (ROOT / file).read_text(encoding="utf-8").count(text)) != 1:
            print(f"{name}: {text!r} is {count} times in {file}, not once; bring the entry up to date")
            wrong[name] = "no such text"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "tree"
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
        )
        for file in filter(lambda file: (ROOT / file).is_file(), listed.stdout.splitlines()):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / file)
        if not (folder / "models" / "tiny").exists():
            (folder / "models").symlink_to(ROOT / "models")
        for tests in {row[3] for name, row in chosen.items() if name not in wrong}:
            if (done := run(folder, tests)).returncode:
                raise SystemExit(f"without any bug {tests!r} does not pass:\n{done.stdout[-3000:]}")
        for name, (file, text, replacement, tests) in chosen.items():
            if name in wrong:
                continue
            sound = (folder / file).read_text(encoding="utf-8")
            (folder / file).write_text(sound.replace(text, replacement), encoding="utf-8")
            seen = run(folder, tests).returncode == 1  # a failed test; other statuses are no result
            (folder / file).write_text(sound, encoding="utf-8")
            print(f"{name}: {'seen' if seen else 'SURVIVED'}", flush=True)
            if not seen:
                wrong[name] = "survived"
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} seen; {wrong or 'none survived'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
