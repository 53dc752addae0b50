"""The rows of the data as the training reads them, and a row as the model will see it."""

import asyncio
import base64
import io
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import data
import domains
import rollouts
from cli import ConfigError, field_help, flags
from config import TrainConfig
from envs import adapters, formats
from inputs.pictures import load_image
from inputs.processor import load_processor, with_template_kwargs
from inputs.prompts import Prompt, build_prompt, image_sources
from looking.answers.settings import Script, settled
from runlog import samples
from runlog.reading import readable_prompt
from runlog.tokens import vocabulary_of
from safety.storable import text_of

SHOWN = 40  # rows of a list
BINS = 40
MOST_TEXT = 100_000  # characters of a column


def generator_of(processor) -> SimpleNamespace:
    """What makes a prompt of a row asks of a generator. Without positions on three axes, which are not shown."""
    return SimpleNamespace(tokenizer=processor, rope_index=None)


def read(script: Script, given: dict) -> dict:
    """The rows as the training reads them: {"cfg", "processor", "parts"}. Kept, until a setting or a file differs.

    A part is what one data set gives for one use: {"use", "name", "domain", "own": its config, "rows", "lengths",
    "bounds": whether lengths up to the limit may be upper bounds, as `prompts.lengths_on_disk` makes them}."""
    cfg, _ = settled(script, given)
    groups = field_help(script.config)
    follow = ("model", "data", "tools and environments")
    named = [field.name for field in flags(script.config) if groups.get(field.name, ("",))[0] in follow]
    named += [name for name in ("seed", "eval_steps", "eval_only", "rollout", "reward_funcs") if name not in named]
    key = repr([(name, getattr(own, name)) for own in cfg.by_domain() for name in named]), files_of(cfg)
    if script.kept.get("key") == key:
        return script.kept | {"cfg": formats.settled(cfg, script.kept["processor"])}
    script.kept = {}
    script.forget()
    adapters._MADE.clear()
    for own in cfg.by_domain():
        with domains.named(own):
            rollouts.check_rollout(own)
    processor = with_template_kwargs(load_processor(cfg.model_id), cfg.chat_template_kwargs)
    cfg = formats.settled(cfg, processor)
    parts, done, error = [], {}, None

    def measured(rows, name: str, own, uses: list) -> list[int]:
        lengths = rollouts.measure(rows, name, processor=processor, cfg=own)
        part = {"use": uses.pop(0), "name": name, "domain": own.domain, "own": own, "rows": rows}
        bounds = data.many_on_disk(rows) and getattr(processor, "is_fast", False)
        parts.append(part | {"lengths": np.array(lengths), "bounds": bounds})
        return lengths

    try:
        for own in cfg.by_domain():
            with domains.named(own):
                uses = list(data.sources(own))
                measure = partial(measured, own=own, uses=uses)
                data.load_data(own, script["format_row"], measure, cfg, done)
    except ConfigError as fault:
        if not parts:
            raise
        error = str(fault)  # such as that all are too long: which these are can be seen
    script.kept = {"key": key, "cfg": cfg, "processor": processor, "parts": parts, "error": error}
    return script.kept


def files_of(cfg) -> list:
    """When the files were changed that rows come from."""
    found = []
    for own in cfg.by_domain():
        for spec in (own.dataset_id, own.eval_dataset_id, own.mcp_config, own.env, *own.tools):
            path = Path(re.sub(r"(\.py):.*$", r"\1", (spec or "").partition("?")[0])).expanduser()
            if spec and path.is_file():
                found.append((str(path), path.stat().st_mtime_ns))
    return found


def rows(script: Script, given: dict) -> dict:
    """How many, their columns, lengths as a histogram, and which are left out."""
    try:
        known = read(script, given)
    except ConfigError as error:
        cfg, _ = settled(script, given)
        if "no column `prompt`" not in str(error) or not data.names_file(cfg.dataset_id):
            raise
        found = data.load_file(cfg.dataset_id)  # a file whose question stands in another column
        first = {name: text_of(value)[:300] for name, value in found[0].items()} if len(found) else {}
        return {"parts": [], "error": str(error), "file": {"path": cfg.dataset_id, "first": first}}
    told = []
    for number, part in enumerate(known["parts"]):
        lengths, limit = part["lengths"], part["own"].max_prompt_length
        out = np.flatnonzero(lengths > limit)
        edges = np.unique(np.linspace(0, max(int(lengths.max(initial=1)), 1) + 1, BINS + 1).astype(int))
        counts, _ = np.histogram(lengths, edges)
        listed = [*range(min(len(lengths), SHOWN)), *out[:SHOWN].tolist()]
        told.append(
            {
                **{"part": number, "use": part["use"], "name": part["name"], "domain": part["domain"]},
                **{"count": len(lengths), "left_out": len(out), "limit": limit, "columns": columns_of(part["rows"])},
                **{"edges": edges.tolist(), "counts": counts.tolist(), "median": float(np.median(lengths))},
                **{"longest": int(lengths.max()), "first_step": first_step(script, known, part)},
                **{"bounds": part["bounds"], "rows": [line(known, number, n) for n in dict.fromkeys(listed)]},
            }
        )
    return {"parts": told, "error": known["error"], "parser": known["cfg"].tool_parser}


def columns_of(rows) -> list[str]:
    if not isinstance(rows, list):
        return list(rows.column_names)
    return list(dict.fromkeys(name for row in rows[:1000] for name in row))


def first_step(script: Script, known: dict, part: dict) -> list[int]:
    """Numbers of the rows that the first step takes, among those in use."""
    cfg = known["cfg"]
    places = np.flatnonzero(part["lengths"] <= cfg.max_prompt_length)
    if part["use"] != "train" or cfg.domains or len(places) < cfg.prompts_per_step:
        return []
    sampler = script["PromptSampler"](len(places), cfg.prompts_per_step, cfg.seed, 0, 1, {})
    return [int(places[int(n)]) for n in sampler.next(0)]


def line(known: dict, number: int, place: int) -> dict:
    """Of a part, by its number, a row of the list."""
    part = known["parts"][number]
    prompt, length = part["rows"][place]["prompt"], int(part["lengths"][place])
    text = prompt if isinstance(prompt, str) else " ".join(text_of(m.get("content")) for m in prompt)
    if part["bounds"] and length <= part["own"].max_prompt_length:
        length = len(made(known, {"part": number, "row": place})[3].token_ids)
    return {"row": place, "tokens": length, "text": text[:200]}


def chosen(known: dict, given: dict) -> tuple[dict, dict]:
    """(part, row) that is asked for, by their numbers. The row is a copy."""
    part, number = given.get("part", 0), given.get("row", 0)
    parts = known["parts"]
    if not isinstance(part, int) or not 0 <= part < len(parts):
        raise ConfigError(f"there is no part {part!r:.40} of the data.")
    count = len(parts[part]["rows"])
    if not isinstance(number, int) or not 0 <= number < count:
        raise ConfigError(f"there is no row {number!r:.40}; there are {count}, from 0 on.")
    return parts[part], dict(parts[part]["rows"][number])


def own_row(known: dict, given: dict) -> tuple[TrainConfig, dict]:
    """The row that is scored, and its domain's config."""
    part, one = chosen(known, given)
    own = known["cfg"].of(one) if known["cfg"].domains else known["cfg"]
    return own, one


async def begun(row: dict, processor, own) -> tuple[dict, object]:
    """(the row as the model is shown it, the environment that began it, None without any)."""
    if own.rollout != "multi_turn":
        return row, None
    environment = await rollouts.take_environment(adapters.environment_maker(own), row, own)
    messages = await rollouts.reset(environment, row, own, processor)
    return rollouts.begun(row, messages, environment, processor, own)[0], environment


def made(known: dict, given: dict) -> tuple[TrainConfig, dict, dict, Prompt]:
    """(its config, the row that is asked for, the same as the model is shown it, its prompt)."""
    (own, one), processor = own_row(known, given), known["processor"]

    async def prompt():
        shown, environment = await begun(one, processor, own)
        built = build_prompt(one, generator_of(processor), own, shown)
        if environment is not None:
            await rollouts.put_away(environment, one, False, own)
        return shown, built

    return own, one, *asyncio.run(prompt())


def row(script: Script, given: dict) -> dict:
    """A row as the model will see it: token by token, with its columns and images."""
    known = read(script, given)
    own, one, shown, prompt = made(known, given)
    words = vocabulary_of(known["processor"])
    pictures = [picture(source, own) for source in image_sources(shown)[:8]]
    others = {name: text_of(value)[:MOST_TEXT] for name, value in one.items() if name not in ("image", "images")}
    return {
        "tokens": {"prompt": samples.spelled(np.array([], int), words), "columns": {}, "turns": []}
        | {"completion": samples.spelled(np.array(prompt.token_ids), words)},
        "length": len(prompt.token_ids),
        "limit": own.max_prompt_length,
        "columns": others,
        "images": pictures,
        "text": readable_prompt(text_of(shown["prompt"])),
        "generations": rollouts.group_size(one, own),
    }


def picture(source, cfg) -> str:
    """As the model gets it, after scaling."""
    image, _ = load_image(source, cfg)
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
