"""Which parameters make_optimizer of a script puts into which group, under each --strategy. Run by test_readme.py.

usage: optimizer_worker.py SCRIPT.py OUT.json
"""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import ragged  # noqa: E402

import utils  # noqa: E402
from config import ConfigError  # noqa: E402


def main(path: str, out: str) -> None:
    spec = importlib.util.spec_from_file_location("edited", path)
    script = importlib.util.module_from_spec(spec)
    sys.modules["edited"] = script
    spec.loader.exec_module(script)
    script.load_hf_model = lambda cfg, dtype, config=None: ragged.small_llama(cfg, dtype)
    rank, _, device = utils.init_distributed(60)
    found: dict = {}
    for strategy in ("ddp", "fsdp", "fsdp2"):
        cfg = replace(script.TrainConfig(compute_dtype="float32"), strategy=strategy)
        policy, _ = script.load_policy(cfg, device)
        before = {name: p.shape for name, p in policy.named_parameters()}
        try:
            optimizer = script.optimizer_of(script.make_optimizer, policy, cfg)
        except ConfigError as error:
            found[strategy] = str(error)
            continue
        assert {name: p.shape for name, p in policy.named_parameters()} == before, "the shards have their shapes again"
        names = {p: script.clean_name(name) for name, p in policy.named_parameters()}
        found[strategy] = [[group.get("lr_scale", 1), sorted(names[p] for p in group["params"])] for group in
                           optimizer.param_groups]  # fmt: skip
    if rank == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    utils.end_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
