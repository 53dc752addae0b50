"""How a run takes its folder, and what follows where a resumed run differs from the one that made the checkpoint.

Compared are settings, number of ranks, rows, files with code of yours and package versions (docs/runs.md). A difference
is said and training goes on; --strict_resume refuses it.
"""

import base64
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

import data
import utils
from config import ConfigError, TrainConfig, public_config
from runlog import checkpoints
from runlog.log import claim_run, code_files, package_versions

# These change where and how a run goes on, but nothing that is sampled or learned.
FREE = (
    "resume strict_resume keep_going run_name output_dir server_urls server_token server_timeout "
    "request_timeout push_bucket_mb dist_timeout save_total_limit log_steps "
    "log_completions log_tokens_every print_samples_every colocate logprob_diff_limit report_to "
    "push_to_hub num_epochs eval_only preset"
).split()

SEEN_SECONDS = 10.0  # in which a network file system shows what another machine has written
COMPARED = 1000  # rows by which ranks see that they have the same: other ones, or another order, show in any of them


def begin(cfg: TrainConfig, rows, held_out, lr_at: Callable):
    """Take the run folder and look whether the run can go on there; nothing in it is changed. Collective.

    lr_at: the script's learning rates, to tell what follows from what changed.
    Returns the folder's lock (rank 0's, to be held), the steps that are done, and what the run is made with, for its
    checkpoints (of rank 0). An error on rank 0 ends all ranks.
    """
    check_same_settings(cfg)
    check_same_rows(rows, held_out)
    run_dir = Path(cfg.output_dir) / cfg.run_name
    lock = made_with = error = None
    start = 0
    try:
        if utils.is_main():
            start = checkpoints.last_step(run_dir, or_none=cfg.keep_going) if cfg.resume else 0
            lock = claim_run(cfg)
            made_with = fingerprint(cfg, rows, held_out, utils.world_size())
    except (ConfigError, OSError) as caught:
        error = caught
    utils.raise_together(error, "Taking the run folder")
    check_seen(run_dir, lock)
    start = utils.gather_objects(start)[0]
    if cfg.keep_going and not start and utils.is_main():
        print(f"--keep_going: {cfg.run_name} has no complete checkpoint, so it begins anew.", flush=True)
    while start:
        try:
            verified = checkpoints.check_sums(run_dir, start)
            state = checkpoints.read_state(run_dir, start)
        except ConfigError as caught:
            if not cfg.keep_going:
                raise
            start = set_aside(run_dir, start, caught)
            continue
        if utils.is_main():
            lines = differences(state, made_with, start, cfg, lr_at, verified)
            lines += memory_differences(checkpoints.folder_of(run_dir, start), utils.world_size())
            error = say_differences(lines, cfg, start)
        utils.raise_together(error, "Resuming")
        break
    return lock, start, made_with


def check_same_settings(cfg: TrainConfig) -> None:
    """ConfigError naming a rank with other settings or code than rank 0: each reads its own command line, --config file
    and files, so nodes can differ, and ranks would wait for each other or train other weights. Collective."""
    first, *others = utils.gather_objects(same_on_all_nodes(cfg))
    for rank, mine in enumerate(others, 1):
        if names := [name for name in first if name in mine and mine[name] != first[name]]:
            shown = ", ".join(f"{name} {mine[name]} and not {first[name]}" for name in names[:8])
            raise ConfigError(
                f"rank {rank} has other settings or code than rank 0: {shown}{' ...' * (len(names) > 8)}. Each node "
                "reads its own command line, --config file and code: start all of them alike, with the same files."
            )


def same_on_all_nodes(cfg: TrainConfig) -> dict:
    """Settings, but for paths and addresses, which may be a node's own, and digests of code by the file's name."""

    def is_a_place(value) -> bool:
        return any(isinstance(one, str) and ("/" in one or "." in one) for one in listed(value))

    settings = {name: value for name, value in flat(public_config(cfg)).items() if not is_a_place(value)}
    files = {f"the file {Path(path).name}": checkpoints.sha256(Path(path))[:12] for path in code_files(cfg)}
    return settings | files


def listed(value) -> list:
    return value if isinstance(value, list) else [value]


def check_same_rows(rows, held_out) -> None:
    """ConfigError naming the ranks that have other rows than rank 0: each takes its share of a step by row numbers,
    which would mean other rows there. Collective."""
    for what, mine in (("rows", rows), ("held-out rows", held_out)):
        first, *others = utils.gather_objects(glance(mine))
        if ranks := [f"rank {rank}" for rank, seen in enumerate(others, 1) if seen != first]:
            counts = {seen[0] for seen in others} - {first[0]}
            raise ConfigError(
                f"{', '.join(ranks[:8])}{' ...' * (len(ranks) > 8)}: other {what} than on rank 0, "
                + (f"{min(counts)} of them and not {first[0]}" if counts else "or in another order")
                + ". Each rank reads them itself. A function of rows must give all ranks the same: shuffle by its "
                "argument `seed`, and list no set() without sorting it; files must be the same on all nodes."
            )


def glance(rows) -> tuple[int, str]:
    """How many rows there are, and a digest of the prompts of some, in their order."""
    found = hashlib.sha256()
    for place in range(0, len(rows), -(-len(rows) // COMPARED) or 1):
        row = rows[place]
        found.update(row_hash({name: row.get(name) for name in ("prompt", "seed")}).to_bytes(8, "little", signed=True))
    return len(rows), found.hexdigest()


def set_aside(run_dir: Path, step: int, why: ConfigError) -> int:
    """Renames a damaged checkpoint, which nothing reads or removes from then on; the step of the one before it, or 0.
    Collective. An error here, as of a disk that is read only, is raised on all ranks."""
    error, before = None, 0
    try:
        if utils.is_main():
            folder = checkpoints.folder_of(run_dir, step)
            damaged = folder.with_name(f"damaged_step_{step}_{os.urandom(2).hex()}")
            folder.rename(damaged)
            before = checkpoints.last_step(run_dir, or_none=True)
            goes_on = f"goes on from step {before}" if before else "begins anew"
            print(
                f"--keep_going: {str(why).split('. ')[0]}. It is {damaged.name} now, and the run {goes_on}.", flush=True
            )
    except OSError as caught:
        error = caught
    utils.raise_together(error, "Setting a damaged checkpoint aside")
    return utils.gather_objects(before)[0]


def check_seen(run_dir: Path, lock) -> None:
    """ConfigError naming the ranks that do not see the folder which rank 0 has locked. Collective.

    They read what rank 0 wrote into the lock; a folder of the same name on a disk of their own has another text.
    """
    if lock is not None:
        os.fsync(lock.fileno())  # a network file system may keep it back while the file is locked

    def text() -> str | None:
        path = run_dir / "lock"
        return path.read_text(errors="replace", encoding="utf-8") if path.is_file() else None

    wanted, deadline = utils.gather_objects(text())[0], time.monotonic() + SEEN_SECONDS
    while text() != wanted and time.monotonic() < deadline:
        time.sleep(0.2)
    ranks = utils.gather_objects((socket.gethostname(), text()))
    if blind := [f"rank {rank} on {host}" for rank, (host, seen) in enumerate(ranks) if seen != wanted]:
        raise ConfigError(
            f"--output_dir={run_dir.parent}: {', '.join(blind[:8])}{' ...' * (len(blind) > 8)} "
            f"{'does' if len(blind) == 1 else 'do'} not see the run folder {run_dir.resolve()} of rank 0 on "
            f"{ranks[0][0]}. All ranks write checkpoints to it: give a folder that every node has mounted."
        )


def say_differences(lines: list[str], cfg: TrainConfig, start: int) -> ConfigError | None:
    """Print them, or return the error that --strict_resume makes of them."""
    text = "".join(f"\n  * {line}" for line in lines)
    if lines and cfg.strict_resume:
        return ConfigError(
            f"--strict_resume: {cfg.run_name} after step {start} would not go on as it was:{text}\n"
            "Restore what changed, or leave out --strict_resume to go on with it."
        )
    print(f"Resuming {cfg.run_name} after step {start}" + (f", with differences:{text}" if lines else "."), flush=True)


# ---- what a run is made with ----------------------------------------------------------------------------------------


def fingerprint(cfg: TrainConfig, rows, held_out, world: int) -> dict:
    """What is compared, as JSON values. Takes about 5 s for a million rows."""
    return {
        "settings": {name: value for name, value in public_config(cfg).items() if name not in FREE},
        "ranks": world,
        "domains": data.sizes(rows, cfg),
        "rows": base64.b64encode(row_hashes(rows).astype("<u8").tobytes()).decode(),
        "held_out": hashlib.sha256(row_hashes(held_out).tobytes()).hexdigest() if len(held_out) else None,
        "files": {path: checkpoints.sha256(Path(path)) for path in code_files(cfg)},
        "versions": package_versions(),
    }


def row_hashes(rows) -> np.ndarray:
    """[rows] of uint64. Of equal rows the second is another one, and so on."""
    found = data.each(rows, lambda part, _: [row_hash(row) for row in part], "hashing rows", data.file_of(row_hash))
    return told_apart(np.array(found, np.int64).view(np.uint64))


def _other(value) -> str:
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else type(value).__name__


ENCODER = json.JSONEncoder(default=_other, skipkeys=True)


def row_hash(row: dict) -> int:
    """64 bits of a row's texts, numbers and bytes; of anything else, such as a decoded image, the type alone."""
    digest = hashlib.blake2b(ENCODER.encode(row).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def told_apart(hashes: np.ndarray) -> np.ndarray:
    """Of equal values the second becomes another one, and so on."""
    return hashes + np.uint64(0x9E3779B97F4A7C15) * seen_before(hashes)


def seen_before(values: np.ndarray) -> np.ndarray:
    """How often each value stands further ahead.  [values] of uint64"""
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    begins = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
    counts = np.zeros(len(values), np.uint64)
    counts[order] = np.arange(len(values)) - np.repeat(begins, np.diff([*begins, len(values)]))
    return counts


# ---- what follows ---------------------------------------------------------------------------------------------------


def differences(
    state: dict, now: dict, start: int, cfg: TrainConfig, lr_at: Callable, verified: bool = True
) -> list[str]:
    """A line for each thing that is not as it was, and what follows from it.  state: the checkpoint's."""
    saved = state.get("made_with")
    lines = [] if verified else ["the checkpoint has no checksums (an older version wrote it): not verified"]
    if saved is None:
        return [*lines, "the checkpoint does not say what it was made with (an older version wrote it): not compared"]
    if saved["ranks"] != now["ranks"]:
        lines.append(f"ranks {saved['ranks']} -> {now['ranks']}: other random numbers and orders of sums from here on")
    # A setting that came later was what it is by default.
    new, kept = flat(now["settings"]), flat(saved["settings"])
    old = public_config(type(cfg)()) | kept
    for name in [*new, *(name for name in kept if name not in new)]:
        if name == "save_steps" and (cfg.push_steps == 1 or name not in kept):
            continue  # checkpoints change what is sampled where they come with a push that was not due
        if old.get(name) != new.get(name) and (name != "max_steps" or rates_differ(old[name], start, cfg, lr_at)):
            lines.append(f"{name} {old.get(name)} -> {new.get(name)}{follows(name, old, start, cfg, lr_at)}")
    lines += row_differences(state, now, start)
    if moved := moved_domains(saved.get("domains") or {}, now["domains"]):
        lines.append(f"domains {', '.join(moved)}: other row numbers, so `memory` may speak of other rows than it did")
    if saved["held_out"] and now["held_out"] and saved["held_out"] != now["held_out"]:
        lines.append("the held-out rows changed: evaluations before and after do not compare")
    before, after = saved["files"], now["files"]
    changed = [path for path in after if path in before and before[path] != after[path]]
    lines += [f"{path} changed: rewards, rows or rules may differ from those up to step {start}" for path in changed]
    packages = {**saved["versions"], **now["versions"]}
    moved = [name for name in packages if saved["versions"].get(name) != now["versions"].get(name)]
    return lines + [f"{name} {saved['versions'].get(name)} -> {now['versions'].get(name)}" for name in moved]


def flat(settings: dict) -> dict:
    """With what domains have of their own as settings, too."""
    listed = settings.get("domains", ())
    own = {f"domain {entry['name']}: {key}": value for entry in listed for key, value in entry.items() if key != "name"}
    return {name: value for name, value in settings.items() if name != "domains"} | own


def rates_differ(max_steps: int, start: int, cfg: TrainConfig, lr_at: Callable) -> bool:
    """Whether learning rates from step `start` on are others with `max_steps` than with cfg's; if not, a run may simply
    be made longer."""
    per_step, was = cfg.num_iterations * cfg.num_minibatches, replace(cfg, max_steps=max_steps)
    first, last = start * per_step, min(max_steps, cfg.max_steps) * per_step
    updates = [first, *range(first, last, max(1, (last - first) // 1000))]
    return any(lr_at(update, was) != lr_at(update, cfg) for update in updates)


def follows(name: str, old: dict, start: int, cfg: TrainConfig, lr_at: Callable) -> str:
    """What follows from a setting that changed, where that is not plain from its name."""
    if name == "max_steps":
        update = start * cfg.num_iterations * cfg.num_minibatches
        rates = [lr_at(update, replace(cfg, max_steps=steps)) for steps in (old[name], cfg.max_steps)]
        return f": the learning rate goes from {rates[0]:.3g} to {rates[1]:.3g}"
    if name == "model_id":
        return ": the weights are the checkpoint's; tokenizer, sizes and reference model come from the new one"
    if (name, True) in (("beta", cfg.kl_target is not None), ("entropy_coef", cfg.entropy_target is not None)):
        return ": not used, the run goes on with the value it had adapted"
    if name == "save_steps":
        return ": each checkpoint comes with a push, so weights are pushed at other steps"
    if name.startswith("eval_"):
        return ": evaluations before and after do not compare"
    return ""


def memory_differences(folder: Path, ranks: int) -> list[str]:
    """What the `memory` of after_rollout, which is each rank's own, lacks on fewer ranks."""
    kept = sorted(folder.glob("trainer/memory_*.pt"), key=lambda path: int(path.stem.partition("_")[2]))
    lost = [path.name for path in kept if int(path.stem.partition("_")[2]) >= ranks]
    if lost:
        return [f"`memory` of after_rollout: {', '.join(lost)}, which no rank reads: what is in them is forgotten"]
    return []


def row_differences(state: dict, now: dict, start: int) -> list[str]:
    """How the pass over the rows (of each domain) that is under way goes on with other rows, or in another order."""
    lines, saved, drawn = [], state["made_with"], state.get("domains", {}).get("drawn", {})
    orders = [tuple(made["settings"][name] for name in ("seed", "prompts_per_step")) for made in (saved, now)]
    old_rows, new_rows = rows_by_domain(saved), rows_by_domain(now)
    for name in [name for name in old_rows if name in new_rows]:
        old, new = old_rows[name], new_rows[name]
        if not len(old) or not len(new) or (np.array_equal(old, new) and orders[0] == orders[1]):
            continue

        def split(hashes: np.ndarray, seed: int, per_step: int, name=name) -> tuple[set, set]:
            """Rows of the pass under way that come before step `start`, and from it on."""
            epoch, position = divmod(drawn[name][1] if name in drawn else start * per_step, len(hashes))
            order = data.epochs_of(name, len(hashes), per_step, seed).order(epoch)
            return set(hashes[order[:position]].tolist()), set(hashes[order[position:]].tolist())

        taken, _ = split(old, *orders[0])
        _, left = split(new, *orders[1])
        before, after = set(old.tolist()), set(new.tolist())
        what = f"{len(after - before)} rows are new and {len(before - after)} gone" if before != after else ""
        what = what or (
            "the rows stand in another order" if not np.array_equal(old, new) else "the rows' order changed"
        )
        what = f"domain {name}: {what}" if name else what
        lines.append(
            f"{what}: of this pass over them, {len(after - taken - left)} skipped, {len(taken & left)} repeated"
        )
    return lines


def moved_domains(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Domains of both lists (with their numbers of rows) whose first row has another number now."""
    first = [dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False)) for sizes in (before, after)]
    return [name for name in before if name in after and first[0][name] != first[1][name]]


def rows_by_domain(made: dict) -> dict[str, np.ndarray]:
    """{domain: its rows' hashes} of a `fingerprint`; "" is the whole of a run without domains."""
    hashes = np.frombuffer(base64.b64decode(made["rows"]), "<u8")
    sizes = made.get("domains") or {"": len(hashes)}
    parts = np.split(hashes, np.cumsum([*sizes.values()])[:-1])
    return dict(zip(sizes, parts, strict=True))
