"""What keeping every token costs: seconds in the loop, seconds beside it, bytes on disk. Needs no GPU.

python benchmarks/token_log.py                 # a made-up step of 512 completions of 1,000 tokens; a vocabulary
python benchmarks/token_log.py train           # steps of the tiny model, with and without
"""

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
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


def training() -> None:
    """Runs by turns: what else the machine does hits both."""
    import train_grpo

    seconds = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "even.py").write_text(EVEN)
        cfg = TrainConfig(
            model_id="models/tiny", generator="hf", compute_dtype="float32", dataset_id="examples/sums.py:rows",
            reward_funcs=[f"{folder}/even.py:even"], prompts_per_step=4, num_generations=8, max_completion_length=128,
            min_completion_length=127, max_steps=10, print_samples_every=0, output_dir=folder,
        )  # fmt: skip
        for number in range(6):
            every = number % 2
            train_grpo.train(replace(cfg, run_name=f"{number}", log_tokens_every=every))
            ends = [line["time/unix"] for line in read_metrics(Path(folder) / f"{number}")]
            seconds[every] += [end - before for before, end in zip(ends[1:], ends[2:], strict=False)]
    for every, spent in seconds.items():
        low, median, high = statistics.quantiles(spent, n=4)
        name = "kept" if every else "not kept"
        print(f"tokens {name}: {median:.3f} s a step (quartiles {low:.3f}, {high:.3f}; {len(spent)} steps)")


EVEN = (
    "def even(completion_ids, **_):\n    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]\n"
)

if __name__ == "__main__":
    training() if sys.argv[1:] == ["train"] else synthetic()
