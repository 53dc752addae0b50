"""A run's record of every token: ids, per-token numbers, and the vocabulary that turns ids into text.

Columns of completions/step_N.parquet, lists of the length of token_ids; unknown numbers are null:

    token_ids                int32   everything after the prompt, which is prompt_ids
    tokens/trained           bool    in the loss
    tokens/version           int32   policy version that sampled it (the turn's oldest); 0 if not sampled
    tokens/sampler_logprob   half    the generator's, when it was sampled
    tokens/advantage         half
    tokens/logprob           half    the trainer's, in the last pass of the step's updates that had it
    tokens/entropy           half    of the distribution it was drawn from, in the same pass
    tokens/teacher_logprob   half    a teacher's, if there is one
    tokens/weight            half    minus the derivative of the update's loss by its log-prob, times its loss tokens
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from runfiles.storable import write_table

HALF_MAX = 65504.0


def half(values) -> np.ndarray:
    """A tensor in half precision: 3 digits, at most +-65504."""
    return values.clamp(-HALF_MAX, HALF_MAX).half().cpu().numpy()


def token_columns(trajectories: list, batch=None) -> list[dict]:
    """The columns above of each trajectory. batch: the trajectories' batch after the update; None, as in an evaluation:
    only columns from sampling."""
    from batch import collate  # here, so that a run folder can be written without torch

    batch = batch or collate(trajectories, 0, "cpu")
    columns = {"trained": (batch.loss_mask > 0).cpu().numpy()}  # [B, T] each
    if batch.advantages is not None:
        columns["advantage"] = half(batch.advantages)
    if batch.teacher_logprobs is not None:
        columns["teacher_logprob"] = half(batch.teacher_logprobs)
    if batch.record is not None:
        columns |= {name: half(getattr(batch.record, name)) for name in ("weight", "logprob", "entropy")}
    ids, sampler = batch.input_ids.int().cpu().numpy(), half(batch.sampling_logprobs)
    versions = batch.versions.int().cpu().numpy()
    rows = []
    for number, t in enumerate(trajectories):
        start, end = len(t.prompt_ids), len(t.prompt_ids) + len(t.token_ids)
        sampled = np.array(t.loss_mask, bool)
        row = {"prompt_ids": ids[number, :start], "token_ids": ids[number, start:end]}
        row |= {f"tokens/{name}": values[number, start:end] for name, values in columns.items()}
        for name in {"tokens/teacher_logprob"} & row.keys():
            row[name] = np.where(sampled, row[name], np.float16(np.nan))
        row["tokens/sampler_logprob"] = np.where(sampled, sampler[number, start:end], np.float16(np.nan))
        rows.append(row | {"tokens/version": np.where(sampled, versions[number, start:end], np.int32(0))})
    return rows


# ---- the vocabulary -------------------------------------------------------------------------------------------------


def write_vocabulary(run_dir: Path, processor) -> None:
    """Write vocabulary.parquet: id, piece (UTF-8 bytes; in a byte-level BPE perhaps part of a character), special. The
    joined pieces of a text's ids are the text; sentencepiece models may put a space before it."""
    path = Path(run_dir) / "vocabulary.parquet"
    if path.exists():  # a resumed run
        return
    tokenizer = getattr(processor, "tokenizer", processor)
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)
    read = reader(tokenizer)
    rows = [{"id": np.int32(n), "piece": read(tokens[n]), "special": n in special} for n in sorted(tokens)]
    write_table(path, rows)


def reader(tokenizer) -> Callable[[str], bytes]:
    """A function from a token's spelling in the vocabulary to its bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()  # JSON
    table = {character: byte for byte, character in bytes_to_unicode().items()}

    def piece(token: str) -> bytes:
        if is_byte_level and all(character in table for character in token):
            return bytes(table[character] for character in token)
        if not is_byte_level and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        # Added tokens of a byte-level BPE have their plain spelling.
        return (token if is_byte_level else token.replace("▁", " ")).encode("utf-8", "replace")

    return piece
