"""Pictures and the parts of messages: what is damaged, odd, or of a kind that nobody shows."""

import base64
import io
import json
import os
import re

import numpy as np
import tiny_vlms
from case import Seen, goes_on, named
from PIL import Image

FLAGS = "--max_prompt_length 400 --max_steps 2 "


def _file(image: Image.Image | None = None, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    (image or tiny_vlms.picture(1)).save(out, kind, **options)
    return out.getvalue()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


URL = f"data:image/png;base64,{_text(_file())}"
GOOD = {"prompt": "What is it?", "image": _text(_file())}
DAMAGED = tiny_vlms.damaged(_file())


def _rows(at, row: dict, flags: str = "", family: str = "idefics3", **how):
    """A run on seven good rows and this one."""
    model = tiny_vlms.make(family, at.given / "vlm")
    return at.train(f"--model_id {model} {at.rows([*[GOOD] * 7, row])} {FLAGS}{flags}", **how)


def _said(*parts) -> dict:
    return {"prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]}


def _seen(at, row: dict, number: int = 8, **how) -> Seen:
    """All of two steps' pictures were processed, this row's among them."""
    end = _rows(at, row, "--prompts_per_step 8 --num_generations 2 ", **how)
    counts = [step.get("images/processed") for step in end.steps]
    return goes_on(end, None if counts == [number] * 2 else f"{counts} pictures processed, not {number}", steps=2)


# ---- parts of prompts ------------------------------------------------------------------------------------------------


def part_image_url(at):
    """a prompt's part is OpenAI's image_url with a data: URL -> survived: its picture is seen"""
    return _seen(at, _said({"type": "image_url", "image_url": {"url": URL, "detail": "high"}}))


def part_image_url_of_a_file(at):
    """a prompt's part is an image_url with a path, another with a file: URL -> survived: both are seen"""
    path = at.file("a.png", _file())
    urls = (str(path), f"file://{path}")
    return _seen(at, _said(*({"type": "image_url", "image_url": {"url": url}} for url in urls)), 9)


def part_image_url_of_the_net(at):
    """a prompt's part is an image_url with an address -> named: the row, that nothing is fetched"""
    part = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    return named(_rows(at, _said(part)), "row 7.*example.org", "nothing is fetched; download")


def part_base64_in_anthropics_form(at):
    """a prompt's part is {"type": "image", "source": {...}} -> named: the row, the key, the keys that are read"""
    part = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _text(_file())}}
    return named(_rows(at, _said(part)), "row 7.*message 0.*part 0.*'source'", "image, url, path, base64")


def part_video(at):
    """a prompt's part is a video -> named: the row, the type, the types that are read"""
    part = {"type": "video", "video": "a.mp4"}
    return named(_rows(at, _said(part)), "row 7.*message 0.*part 0.*'video'", "text, image and image_url")


def part_audio_of_a_text_model(at):
    """a prompt's part is a sound, and the model reads text -> named: the row, the type"""
    part = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    rows = at.rows([{"prompt": "Say something."}] * 7 + [_said(part)])
    return named(at.train(rows), "row 7.*part 0.*'input_audio'", "text, image and image_url")


def parts_of_a_text_model(at):
    """prompts are lists of texts, and the model's template wants text -> survived: it reads all of them"""
    end = at.train(at.rows([_said("One,", {"type": "text", "text": "two."})] * 8) + " --log_tokens_every 1")
    if end.status == 0 and (words := _prompts(end)) and not all("One,\ntwo.\nWhat is it?" in text for text in words):
        return Seen("silent", f"the model read {words[0]!r}")
    return goes_on(end, steps=2)


def _prompts(end) -> list[str]:
    """The prompts' tokens of a run, as text."""
    import pyarrow.parquet
    from transformers import AutoTokenizer

    tokenizer, found = AutoTokenizer.from_pretrained("models/tiny"), []
    for path in end.run.glob("completions/*.parquet"):
        table = pyarrow.parquet.read_table(path)
        found += [
            tokenizer.decode(ids) for n in table.column_names if "prompt_ids" in n for ids in table[n].to_pylist()
        ]
    return found


def part_and_column(at):
    """a row has a picture in its column, another one in a part of its prompt -> named: which is shown is not guessed"""
    row = _said({"type": "image", "image": URL}) | {"image": URL}
    return named(_rows(at, row), "row 7.*1 images in a column", "Take the column away")


def nobody_to_ask(at):
    """a row has a picture, and its prompt no user's message -> named: the row"""
    row = {"prompt": [{"role": "system", "content": "Look."}], "image": URL}
    return named(_rows(at, row), "row 7.*no user message", "")


# ---- parts of tools and environments ---------------------------------------------------------------------------------


def _tool(at, result: str) -> object:
    """A run whose model calls a tool, which returns `result`, a python expression."""
    path = at.file("tool.py", f"def look() -> list:\n    '''Looks.'''\n    return {result}\n")
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    model = tiny_vlms.make("idefics3", at.given / "vlm")
    flags = f"--model_id {model} --tools {path}:look --reward_funcs tool_use --dataset_id examples/sums.py:rows "
    return at.scripted([call, "Well."], flags)


def tool_gives_image_url(at):
    """a tool answers in OpenAI's form, a text and an image_url -> survived: both are seen"""
    end = _tool(at, repr([{"type": "text", "text": "Here."}, {"type": "image_url", "image_url": {"url": URL}}]))
    return goes_on(end, None if "image placeholders" in end.text else "its picture was not shown", steps=1)


def tool_gives_video(at):
    """a tool answers with a text and a video -> survived: the model reads an error that names the video"""
    end = _tool(at, repr([{"type": "text", "text": "Here."}, {"type": "video", "video": "a.mp4"}]))
    failed = end.mean("tools/failure_frequency")
    return goes_on(end, None if failed == 1 else f"share of failed calls {failed}", steps=1)


def _environment(at, part: str, flags: str = "") -> object:
    """An environment whose every fourth trajectory is answered with a text and this part."""
    code = f"""
from envs import Environment
count = [0]
class Mine(Environment):
    def reset(self, row, seed):
        count[0] += 1
        self.odd = count[0] % 8 == 0
        return "Say something."
    async def step(self, text):
        part = {part}
        answer = [{{"type": "text", "text": "Go on."}}] + [part] * self.odd
        return [{{"role": "user", "content": answer}}], 1.0, False, {{}}
"""
    path = at.file("mine.py", code)
    flags = f"--env {path}:Mine --reward_funcs environment --max_turns 2 --dataset_id seeds:64 {flags}"
    flags += "--prompts_per_step 4 --num_generations 4 --max_failed .5 "
    return at.scripted(["Well."], flags)


def environment_gives_audio(at):
    """an environment's message has a text and a sound -> survived: it costs the trajectory, by name"""
    end = _environment(at, "{'type': 'audio', 'audio': 'AAAA'}")
    wrong = (
        None if end.mean("rollout/failed") == 2 and "'audio'" in end.text else f"failed {end.mean('rollout/failed')}"
    )
    return goes_on(end, wrong, steps=1)


def environment_gives_damage(at):
    """an environment's picture is damaged -> survived: it costs the trajectory"""
    model = tiny_vlms.make("idefics3", at.given / "vlm")
    end = _environment(at, f"{{'type': 'image', 'image': {DAMAGED!r}}}", f"--model_id {model} ")
    return goes_on(end, None if end.mean("rollout/failed") == 2 else f"failed {end.mean('rollout/failed')}", steps=1)


# ---- kinds of pictures -----------------------------------------------------------------------------------------------


def _shades(at, **files: bytes) -> Seen:
    """Every file's pixels are as bright as its name says, for trainer and server."""
    wrong = []
    for name, data in files.items():
        path = at.file(f"{name}.img", data)
        code = f"""
import base64, numpy as np
from vllm_server import decode_image
from inputs.prompts import load_image
image, sent = load_image({str(path)!r})
there = decode_image(base64.b64encode(sent).decode())
print("SHADE", round(float(np.asarray(image).mean())), round(float(np.asarray(there).mean())))
"""
        end = at.python(code)
        found = re.findall(r"SHADE (\d+) (\d+)", end.text)
        if end.status != 0 or not found:
            return Seen("ended", f"{name}: {end.tail}")
        wanted = name.rpartition("_")[2]
        wrong += [f"{name}: {found[0]}"] * (found[0] != (wanted, wanted))
    return Seen("silent", "; ".join(wrong)) if wrong else Seen("survived", ", ".join(files))


def sixteen_bits(at):
    """grey pictures of 16 bits, PNG and TIFF -> survived: grey, not white"""
    image = Image.fromarray(np.full((8, 8), 127 * 257, np.uint16))
    return _shades(at, png_127=_file(image), tiff_127=_file(image, "TIFF"))


def floats(at):
    """TIFFs of floats from 0 to 1 -> survived: grey, not black"""
    values = np.full((8, 8), 127 / 255, np.float32)
    values[0], values[1] = 0, 1
    return _shades(at, tiff_127=_file(Image.fromarray(values), "TIFF"))


def transparent(at):
    """black, on what is transparent, as RGBA, with a palette, as a GIF -> survived: on white"""
    image = Image.new("RGBA", (8, 8))
    image.paste((0, 0, 0, 255), (0, 0, 8, 4))
    return _shades(at, rgba_128=_file(image), palette_128=_file(image.quantize(4)), gif_128=_file(image, "GIF"))


def floats_of_any_size(at):
    """a TIFF of heights in metres, -3 to 8,848 -> named: the row, the numbers, what to do"""
    values = np.linspace(-3, 8848, 64, dtype=np.float32).reshape(8, 8)
    row = GOOD | {"image": _text(_file(Image.fromarray(values), "TIFF"))}
    return named(_rows(at, row), "row 7, image 0.*numbers from -3 to 8848", "scale them")


def animation(at):
    """a GIF of three frames -> named: the row, how to give frames"""
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "green", "blue")]
    row = GOOD | {"image": _text(_file(frames[0], "GIF", save_all=True, append_images=frames[1:]))}
    return named(_rows(at, row), "row 7, image 0.*animation", "frame")


def broken_exif(at):
    """a photograph whose EXIF is garbage -> survived: it is shown as it is"""
    exif = b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\xff" * 60
    return _seen(at, GOOD | {"image": _text(_file(kind="JPEG", exif=exif))})


def long_base64(at):
    """80 kB of plain base64, in one line and in many -> survived: no path"""
    data = _file(tiny_vlms.picture(2, 160, 160))
    lines = base64.encodebytes(data).decode()
    return _seen(at, {"prompt": "What are they?", "images": [_text(data), lines]}, 9)


def a_point(at):
    """pictures of 1 x 1 and of 1 x 3 pixels -> survived"""
    images = [_text(_file(Image.new("RGB", size, "red"))) for size in ((1, 1), (1, 3))]
    return _seen(at, {"prompt": "What are they?", "images": images}, 9)


def a_line(at):
    """a picture of 100,000 x 1 pixels, for a model that refuses such -> named: the row"""
    row = GOOD | {"image": _text(_file(Image.new("L", (100_000, 1))))}
    return named(_rows(at, row, family="qwen2_5_vl"), "row 7.*refuses images of.*100000", "aspect ratio")


def bomb(at):
    """PNGs of 400 million pixels in 49 kB, refused by Pillow itself, and of 25 million -> named: the row"""
    for number, side in enumerate((20_000, 5_000)):
        row = GOOD | {"image": _text(_file(Image.new("1", (side, side))))}
        seen = named(_rows(at, row, f"--run_name r{number} "), "row 7, image 0.*pixels", "")
        if seen.verdict != "named":
            return seen
    return seen


def odd_files(at):
    """paths of a pipe, a folder, an empty file, a file of 1 GB, an SVG -> named: the row, within seconds"""
    os.mkfifo(at.given / "pipe.png")
    huge = at.file("huge.png", _file())
    os.truncate(huge, 2**30)
    paths = (at.given / "pipe.png", at.given, at.file("empty.png", b""), huge, at.file("a.svg", "<svg/>"))
    for number, path in enumerate(paths):
        end = _rows(at, GOOD | {"image": f"file://{path}"}, f"--run_name r{number} ", limit=20)
        if (seen := named(end, "row 7, image 0.*cannot be read", "")).verdict != "named":
            return Seen(seen.verdict, f"{path.name}: {seen.what}")
    return seen


# ---- damage ----------------------------------------------------------------------------------------------------------


def damaged_at_start(at):
    """a PNG whose header is right and whose pixels are not -> named: the row, before training"""
    return named(_rows(at, GOOD | {"image": _text(DAMAGED)}), "row 7, image 0.*cannot be read", "Mend|leave")


def damaged_jpeg(at):
    """a JPEG that ends in the middle, and has its end mark all the same -> survived or named: the row"""
    data = _file(tiny_vlms.picture(1, 200, 200), "JPEG")
    end = _rows(at, GOOD | {"image": _text(data[: len(data) // 2] + data[-2:])})
    return goes_on(end, steps=2) if end.status == 0 else named(end, "row 7, image 0.*cannot be read", "Mend|leave")


def damaged_in_a_parquet(at):
    """a data set of `datasets` with a damaged picture -> named: the row, before training"""
    import datasets

    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    images = [{"bytes": DAMAGED if n == 5 else _file(), "path": None} for n in range(8)]
    rows = datasets.Dataset.from_dict({"prompt": ["What is it?"] * 8, "image": images}, features)
    rows.to_parquet(at.given / "rows.parquet")
    model = tiny_vlms.make("idefics3", at.given / "vlm")
    end = at.train(f"--model_id {model} --dataset_id {at.given}/rows.parquet {FLAGS}")
    return named(end, "row 5, image 0.*cannot be read", "Mend|leave")


LATER = """
import os
from pathlib import Path
HERE = Path(__file__).parent

def rows(split, seed):
    return [{"prompt": f"What is picture {n}?", "image": str(HERE / f"{n}.png")} for n in range(8)]

def breaks(completion_ids, image, **_):
    for n in BROKEN:
        HOW
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]
"""
WRITE = "(HERE / f'{n}.png').write_bytes((HERE / 'damaged').read_bytes())"


def _later(at, broken: list[int], how: str = WRITE, flags: str = "--max_steps 4 ", **more):
    """A run whose reward breaks pictures that were whole at the start."""
    for n in range(8):
        at.file(f"{n}.png", _file(tiny_vlms.picture(n)))
    at.file("damaged", DAMAGED)
    task = at.file("task.py", LATER.replace("BROKEN", json.dumps(broken)).replace("HOW", how))
    model = tiny_vlms.make("idefics3", at.given / "vlm")
    data = f"--dataset_id {task}:rows --reward_funcs {task}:breaks --max_prompt_length 400 "
    return at.train(f"--model_id {model} {data}{flags}", **more)


def _costs(end, steps: int, groups: int) -> Seen:
    failed = sum(step.get("rollout/failed", 0) for step in end.steps)
    wrong = None if failed == 4 * groups else f"{failed} completions failed, not {4 * groups}"
    told = "row 5 of those in use is left out" in end.text and "5.png" in end.text
    return goes_on(end, wrong or (None if told else "the row was not named"), steps=steps)


def damaged_later(at):
    """a picture is damaged while the run goes on -> survived: it costs its row, which is named"""
    return _costs(_later(at, [5]), 4, _times_drawn(at, 4))


def _times_drawn(at, steps: int) -> int:
    """How often row 5 of 8 comes up after the first step of four, whose rewards break its picture."""
    from train_grpo import PromptSampler

    sampler = PromptSampler(8, 4, 42, 0, 1)
    return sum(5 in list(sampler.next(step)) for step in range(1, steps))


def damaged_then_resumed(at):
    """the same, and the run is resumed behind it -> survived: it costs the row again, not the run"""
    first = _later(at, [5], flags="--max_steps 4 --save_steps 4 ")
    if (seen := _costs(first, 4, _times_drawn(at, 4))).verdict != "survived":
        return seen
    return _costs(_later_again(at), 8, _times_drawn(at, 8))


def _later_again(at):
    task, model = at.given / "task.py", at.given / "vlm"
    (at.given / "5.png").write_bytes(DAMAGED)
    data = f"--dataset_id {task}:rows --reward_funcs {task}:breaks --max_prompt_length 400 --env_errors drop "
    return at.train(f"--model_id {model} {data} --max_steps 8 --save_steps 4 --resume ")


def gone_later(at):
    """a picture's file is gone while the run goes on -> survived: it costs its row, which is named"""
    how = "(HERE / f'{n}.png').unlink(missing_ok=True)"
    return _costs(_later(at, [5], how), 4, _times_drawn(at, 4))


def all_gone_later(at):
    """all pictures are gone while the run goes on, as with a disk -> named: it does not go on with nothing"""
    end = _later(at, list(range(8)), "(HERE / f'{n}.png').unlink(missing_ok=True)")
    return named(end, "row with prompt.*of this step failed", "max_failed")


def damaged_later_and_strict(at):
    """a picture is damaged while the run goes on, with --env_errors stop -> named: the file"""
    return named(_later(at, [5], flags="--max_steps 4 --env_errors stop "), "5.png.*cannot be read", "")


def large_data_set(at, limit=90):
    """480 megapixels, a damaged picture in one row of two that nobody decodes -> survived; named with --check_images"""
    whole = _file(Image.new("1", (4000, 4000)))
    for n in range(30):
        at.file(f"{n}.png", tiny_vlms.damaged(whole) if n == 5 else whole)
    rows = at.rows([{"prompt": "What is it?", "image": str(at.given / f"{n}.png")} for n in range(30)])
    model = tiny_vlms.make("idefics3", at.given / "vlm")
    flags = f"--model_id {model} {rows} --max_prompt_length 2000 --max_pixels 4096 --max_steps 1 "
    seen = goes_on(end := at.train(flags), None if "--check_images" in end.text else "not said what was looked at", 1)
    if seen.verdict != "survived":
        return seen
    strict = named(at.train(f"{flags} --check_images --run_name r1 "), "row 5, image 0.*cannot be read", "Mend|leave")
    return seen if strict.verdict == "named" else strict
