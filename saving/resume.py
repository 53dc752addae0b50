"""A run takes its folder, and a resumed run reports how it differs from the run that made the checkpoint.

It compares settings, the number of ranks, rows (by a digest), your code files and package versions. Differences are
printed, and training continues.
"""

import hashlib
import json
import socket
from pathlib import Path

import utils
from config import ConfigError, TrainConfig, public_config
from runlog.log import claim_run, code_files, package_versions
from saving import checkpoints

# Settings that do not change what is sampled or learned.
FREE = (
    "resume run_name output_dir server_urls server_token server_timeout "
    "request_timeout push_bucket_mb dist_timeout save_steps save_total_limit log_steps "
    "log_completions print_samples_every colocate logprob_diff_limit report_to "
    "num_epochs eval_only preset"
).split()
COMPARED = 1000  # rows, at equal distances, in the digest


def begin(cfg: TrainConfig, rows, held_out):
    """Take the run folder and check that the run can continue there; nothing in it is changed. Collective.

    Returns the folder's lock (rank 0's, to be held), the number of steps done, and the `fingerprint` for checkpoints.
    An error on one rank ends all.
    """
    made_with = fingerprint(cfg, rows, held_out)
    check_same(made_with)
    run_dir = Path(cfg.output_dir) / cfg.run_name
    lock = error = None
    start = 0
    try:
        if utils.is_main():
            start = checkpoints.last_step(run_dir) if cfg.resume else 0
            lock = claim_run(cfg)
            if start:
                lines = differences(checkpoints.read_state(run_dir, start), made_with, cfg) or ["none"]
                print(f"Resuming {cfg.run_name} after step {start}. Differences:", *lines, sep="\n  * ", flush=True)
            elif cfg.resume:
                print(f"--resume: {run_dir} has no complete checkpoint, so {cfg.run_name} begins.", flush=True)
    except (ConfigError, OSError) as caught:
        error = caught
    utils.raise_together(error, "Taking the run folder")
    check_visible(run_dir)
    return lock, utils.gather_objects(start)[0], made_with


def fingerprint(cfg: TrainConfig, rows, held_out) -> dict:
    """All that a resumed run is compared by, as JSON values."""
    free = {*FREE} - ({"save_steps"} if cfg.push_steps > 1 else set())  # a checkpoint comes with a push
    settings = {name: value for name, value in flat(public_config(cfg)).items() if name not in free}
    return {
        "settings": settings,
        "ranks": utils.world_size(),
        "rows": digest(rows),
        "held-out rows": digest(held_out),
        "files": {path: hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12] for path in code_files(cfg)},
        "versions": package_versions(),
    }


def flat(settings: dict) -> dict:
    """The settings, with those of each domain on the same level."""
    parts = settings.get("domains", ())
    extra = {f"domain {part['name']}: {key}": value for part in parts for key, value in part.items() if key != "name"}
    return {name: value for name, value in settings.items() if name != "domains"} | extra


def digest(rows) -> str:
    """A digest of the number of rows and of some rows in their order; it changes with the rows and with their order."""
    sha = hashlib.sha256(str(len(rows)).encode())
    columns = [name for name in ("prompt", "seed", "answer") if name in getattr(rows, "column_names", ())]
    rows = rows.select_columns(columns) if columns else rows  # no images are read
    for place in range(0, len(rows), -(-len(rows) // COMPARED) or 1):
        row = rows[place]
        columns_of_row = {name: row.get(name) for name in ("prompt", "seed", "answer")}
        sha.update(json.dumps(columns_of_row, sort_keys=True, default=str).encode("utf-8", "surrogatepass"))
    return sha.hexdigest()


def check_same(made_with: dict) -> None:
    """ConfigError naming a rank with other settings, rows or code than rank 0. Nodes may differ in these, and their
    ranks would then wait for each other, or train different weights. Collective."""

    def comparable(values: dict) -> dict:
        path_settings = {n for n, v in values["settings"].items() if "/" in str(v)}  # a node may have its own paths
        settings = {name: value for name, value in values["settings"].items() if name not in path_settings}
        files = {f"the file {Path(path).name}": value for path, value in values["files"].items()}
        return settings | files | {name: values[name] for name in ("rows", "held-out rows")}

    first, *others = utils.gather_objects(comparable(made_with))
    for rank, other in enumerate(others, 1):
        if names := [name for name in first if name in other and other[name] != first[name]]:
            diff = ", ".join(f"{name} {str(other[name])[:60]} and not {str(first[name])[:60]}" for name in names[:8])
            raise ConfigError(
                f"rank {rank} has other settings, rows or code than rank 0: {diff}. Start all nodes alike, with the "
                "same files. A function of rows must give all ranks the same: shuffle by its argument `seed`, and sort "
                "what comes from a set()."
            )


def check_visible(run_dir: Path) -> None:
    """ConfigError naming the ranks that do not see the run folder of rank 0. Collective."""
    ranks = utils.gather_objects((socket.gethostname(), run_dir.is_dir()))
    if blind := [f"rank {rank} on {host}" for rank, (host, is_visible) in enumerate(ranks) if not is_visible]:
        fault = f"{', '.join(blind[:8])} cannot see the run folder of rank 0 on {ranks[0][0]}"
        raise ConfigError(f"--output_dir={run_dir.parent}: {fault}; give a folder that every node has mounted.")


def differences(state: dict, now: dict, cfg: TrainConfig) -> list[str]:
    """A line for each difference. state: the checkpoint's."""
    saved, lines = state["made_with"], []
    if saved["ranks"] != now["ranks"]:
        note = "; `memory` of after_rollout on ranks that are gone is forgotten" * (saved["ranks"] > now["ranks"])
        lines.append(f"ranks {saved['ranks']} -> {now['ranks']}: other random numbers and orders of sums{note}")
    old, new = public_config(type(cfg)()) | saved["settings"], now["settings"]  # a new setting had its default
    for name in {**new, **saved["settings"]}:
        extends = name == "max_steps" and cfg.lr_schedule == "constant" and not 0 < (cfg.warmup_steps or 0) < 1
        if old.get(name) != new.get(name) and not extends:
            lines.append(f"{name} {old.get(name)} -> {new.get(name)}")
    if saved["rows"] != now["rows"]:
        lines.append("the rows changed, or their order: this pass over them will repeat some and miss others")
    if saved["held-out rows"] != now["held-out rows"]:
        lines.append("the held-out rows changed: evaluations before and after are not comparable")
    changed_files = [path for path, value in now["files"].items() if saved["files"].get(path, value) != value]
    lines += [f"{path} changed: rewards, rows or rules may differ from those before" for path in changed_files]
    packages = {**saved["versions"], **now["versions"]}
    changed_packages = [name for name in packages if saved["versions"].get(name) != now["versions"].get(name)]
    return lines + [f"{name} {saved['versions'].get(name)} -> {now['versions'].get(name)}" for name in changed_packages]
