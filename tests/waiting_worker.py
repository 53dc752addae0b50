"""Four ranks in two copies of two shards, of which the last stalls. Run by test_waiting.py.

usage: waiting_worker.py SECONDS [stop]        what --dist_timeout says; with `stop` the whole process is stopped
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
import utils  # noqa: E402
from config import TrainConfig  # noqa: E402


def stall(how: list[str]) -> None:
    if how:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


def main(seconds: float, how: list[str]) -> None:
    rank, _, device = utils.init_distributed(seconds)
    cfg = TrainConfig(strategy="fsdp2", shard_size=2, dist_timeout=seconds)
    copies, shards = utils.device_mesh(device, cfg).get_all_groups()
    groups = dist.distributed_c10d._world.pg_map  # all that this process is in
    limits = [group._get_backend(device).options._timeout.total_seconds() for group in groups]
    print(f"limits of {len(groups)} groups: {sorted(set(limits))}", flush=True)
    time.sleep(2 * seconds)  # no collective is under way, so nobody waits
    for turn in range(3):
        if (rank, turn) == (3, 2):
            stall(how)
        for group in (copies, shards):
            dist.all_reduce(torch.ones(1), group=group)
    utils.all_sum(torch.ones(1))
    utils.end_process(0)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
