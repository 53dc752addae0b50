"""What keeping every token costs: seconds in the loop, seconds beside it, bytes on disk. Needs no GPU.

python benchmarks/token_log.py                 # a made-up step of 512 completions of 1,000 tokens; a vocabulary
python benchmarks/token_log.py train           # the share of the demo's steps; flags go to the train script
"""

import functools
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import runlog.log
from batch import collate, record, start_record
from config import TrainConfig
from rollouts import Trajectory
from runlog.log import RunLog, completion_rows
from runlog.reading import read_metrics
from runlog.tokens import write_vocabulary

ROWS, PROMPT, TOKENS = 512, 200, 1000


def made_up_step() -> tuple[list[Trajectory], torch.Tensor, torch.Tensor]:
    """Trajectories with Zipf-like ids and log-probs as a model has them; the trainer's log-probs; entropies."""
    torch.manual_seed(0)
    ids = (49152 ** torch.rand(ROWS, TOKENS)).long().tolist()
    entropy = torch.rand(ROWS, TOKENS).pow(4) * 3
    sampled = -torch.rand(ROWS, TOKENS).log().neg().mul(entropy)
    rows = []
    for n in range(ROWS):
        info = {"completion": "word " * 800, "rewards": {"right": float(n % 2)}, "row_number": n // 8}
        ones, row = [1] * TOKENS, {"prompt": "word " * 150}
        scores = [0.0] * (TOKENS - 1) + [float(n % 2)]
        made = Trajectory(row, n // 8, ids[n // 8][:PROMPT], ids[n], ones, sampled[n].tolist(), scores, info=info)
        rows.append(made)
    return rows, sampled + 0.01 * torch.randn(ROWS, TOKENS), entropy


def synthetic() -> None:
    trajectories, trainers, entropy = made_up_step()
    with tempfile.TemporaryDirectory() as folder:
        for every in (0, 1):
            log = RunLog(TrainConfig(output_dir=folder, run_name=f"{every}", log_tokens_every=every), num_steps=9)
            spent, beside = [], []
            for step in range(1, 6):
                batch = collate(trajectories, 0, torch.device("cpu"))
                batch.advantages = batch.loss_mask * torch.randn(ROWS, 1)
                start = time.perf_counter()
                if every:
                    start_record(batch)
                    batch.record.scale = -1.0
                    logprobs = trainers.flatten().requires_grad_()
                    record(batch, batch.loss_mask.nonzero(as_tuple=True), logprobs, entropy.flatten())
                    (logprobs * (batch.advantages[:, :1] * torch.rand(ROWS, TOKENS)).flatten()).sum().backward()
                rows = completion_rows(trajectories, batch.scores.tolist(), [0.0] * ROWS, batch, bool(every))
                log.completions(step, rows)
                spent.append(time.perf_counter() - start)
                log.written()
                beside.append(time.perf_counter() - start - spent[-1])
            log.close()
            size = (log.dir / "completions" / "step_000005.parquet").stat().st_size
            name, each = "kept" if every else "not kept", size / ROWS / TOKENS
            print(f"tokens {name}: {statistics.median(spent):.3f} s in the loop, then", end=" ")
            print(f"{statistics.median(beside):.3f} s in the thread; {each:.2f} bytes on disk a sampled token")
        vocabulary = {f"Ġword{n}": n for n in range(150_000)}
        decoder = SimpleNamespace(__getstate__=lambda: b'{"type":"ByteLevel"}')
        tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary, added_tokens_decoder={}, all_special_ids=[0])
        tokenizer.backend_tokenizer = SimpleNamespace(decoder=decoder)
        start = time.perf_counter()
        write_vocabulary(Path(folder), tokenizer)
        size = (Path(folder) / "vocabulary.parquet").stat().st_size
        print(f"a vocabulary of 150,000: {time.perf_counter() - start:.2f} s, {size / 2**20:.1f} MiB")


def training(flags: list[str]) -> None:
    """One training with everything logged. What logging takes is timed where it happens: steps of runs with and without
    it differ by more than that, for other reasons."""
    import train_grpo
    from config import parse_args

    loop: dict[str, float] = defaultdict(float)  # seconds
    thread: list[float] = []  # CPU seconds, beside the training

    def timed(name: str, function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                loop[name] += time.perf_counter() - start

        return run

    def in_thread(*args):
        start = time.thread_time()
        write_table(*args)
        thread.append(time.thread_time() - start)

    def recorded(*args):
        plain, torch.Tensor.register_hook = torch.Tensor.register_hook, hooked
        try:
            record(*args)
        finally:
            torch.Tensor.register_hook = plain

    register = torch.Tensor.register_hook
    hooked = lambda tensor, hook: register(tensor, timed("in the backward pass", hook))  # noqa: E731
    write_table, runlog.log.write_table = runlog.log.write_table, in_thread
    train_grpo.record = timed("in the forward pass", recorded)
    train_grpo.start_record = timed("in the forward pass", start_record)
    train_grpo.completion_rows = timed("rows", completion_rows)
    RunLog.step = timed("line, terminal, trackers", RunLog.step)
    with tempfile.TemporaryDirectory() as folder:
        given = "--config examples/sums.yaml --generator hf --eval_steps 1000 --print_samples_every 1 --max_steps 8 "
        given += f"--report_to tensorboard --output_dir {folder} --run_name run"
        train_grpo.train(parse_args(train_grpo.TrainConfig, [*given.split(), *flags]))
        lines = [line for line in read_metrics(Path(folder) / "run") if "time/step" in line]
    whole = sum(line["time/step"] for line in lines)
    print(f"{len(lines)} steps of {whole / len(lines):.2f} s. Of that, or between steps:")
    for name, seconds in loop.items():
        print(f"  {name:26} {1000 * seconds / len(lines):8.2f} ms a step  {100 * seconds / whole:.3f} %")
    print(f"  {'all in the loop':26} {1000 * sum(loop.values()) / len(lines):8.2f} ms a step  ", end="")
    print(f"{100 * sum(loop.values()) / whole:.3f} %")
    print(f"  beside it, in the thread   {1000 * sum(thread) / len(lines):8.2f} ms of CPU a step")


if __name__ == "__main__":
    training(sys.argv[2:]) if sys.argv[1:2] == ["train"] else synthetic()
