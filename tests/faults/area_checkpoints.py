"""Checkpoints: damaged ones, full disks, resuming with something changed."""

import contextlib
import ctypes
import os
import pickle
import shutil

from case import BASE, SMALL, Seen, either, goes_on, named, says, wait_until
from server_fixture import TINY

RESUME = "--resume --max_steps 3 "
DAMAGED = "checksum|damaged|corrupt|cannot be read|does not fit|truncated"
REMEDY = "remove|older|earlier|another checkpoint"


def _trained(at, flags: str = "", **how):
    """A run of two steps with a checkpoint at each; its newest checkpoint's folder."""
    end = at.train(f"--save_steps 1 --save_total_limit 2 {flags}", **how)
    if end.status != 0:
        raise RuntimeError(f"the run itself failed: {end.text[-500:]}")
    return at.runs / "run" / "checkpoints" / "step_2"


def _resumed(at, flags: str = "", **how):
    return at.train(f"--save_steps 1 {RESUME}{flags}", **how)


def _flip(path, place: float = 0.5) -> None:
    """One bit, at this part of the file."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1 << 6
    path.write_bytes(data)


def _state_file(checkpoint):
    return max((checkpoint / "trainer" / "state").glob("*.distcp"), key=lambda path: path.stat().st_size)


# ---- damaged checkpoints ---------------------------------------------------------------------------------------------


def bit_in_weights(at):
    """a bit flipped in the checkpoint's model.safetensors -> named: on resume, which file"""
    checkpoint = _trained(at)
    _flip(checkpoint / "model.safetensors")
    return named(_resumed(at), DAMAGED, REMEDY)


def bit_in_optimizer(at):
    """a bit flipped in the saved state of weights and moments -> named: on resume, which file"""
    checkpoint = _trained(at)
    _flip(_state_file(checkpoint), 0.6)
    return named(_resumed(at), DAMAGED, REMEDY)


def bit_in_rng(at):
    """a bit flipped in the saved random state -> named: on resume, which file"""
    checkpoint = _trained(at)
    _flip(checkpoint / "trainer" / "rng_0.pt")
    return named(_resumed(at), DAMAGED, REMEDY)


def truncated_state(at):
    """the saved state cut in half -> named: on resume"""
    path = _state_file(_trained(at))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return named(_resumed(at), DAMAGED, REMEDY)


def truncated_rng(at):
    """the saved random state cut to 100 bytes -> named: on resume"""
    path = _trained(at) / "trainer" / "rng_0.pt"
    path.write_bytes(path.read_bytes()[:100])
    return named(_resumed(at), DAMAGED, REMEDY)


def truncated_state_json(at):
    """state.json cut in the middle, as a full disk leaves it -> named: on resume"""
    path = _trained(at) / "trainer" / "state.json"
    path.write_text(path.read_text(encoding="utf-8")[:20], encoding="utf-8")
    return named(_resumed(at), f"state.json|{DAMAGED}", REMEDY)


def no_state_json(at):
    """state.json is missing -> named: on resume"""
    (_trained(at) / "trainer" / "state.json").unlink()
    return named(_resumed(at), "state.json|incomplete|damaged|missing", REMEDY)


def no_state_folder(at):
    """the folder of the saved state is missing -> named: on resume"""
    shutil.rmtree(_trained(at) / "trainer" / "state")
    return named(_resumed(at), f"missing|{DAMAGED}", REMEDY)


def other_numbers_in_state(at):
    """state.json of another form (a list; texts for numbers) -> named: on resume"""
    path = _trained(at) / "trainer" / "state.json"
    path.write_text('{"step": "two", "num_tokens": "many", "beta": null}', encoding="utf-8")
    return named(_resumed(at), f"state.json|{DAMAGED}", REMEDY)


class _Command:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def pickle_in_rng(at):
    """a pickle that runs a command in the place of the random state -> named: not run"""
    path, mark = _trained(at) / "trainer" / "rng_0.pt", at.folder / "mark"
    path.write_bytes(pickle.dumps(_Command(str(mark))))
    end = _resumed(at)
    return Seen("leaked", "the pickle's command ran") if mark.exists() else named(end, DAMAGED + "|rng", REMEDY)


def pickle_in_torch_file(at):
    """the same inside a file of torch's own form -> named: not run"""
    import torch

    path, mark = _trained(at) / "trainer" / "rng_0.pt", at.folder / "mark"
    torch.save({"torch": _Command(str(mark)), "python": None, "cuda": []}, path)
    end = _resumed(at)
    return Seen("leaked", "the pickle's command ran") if mark.exists() else named(end, DAMAGED + "|rng", REMEDY)


def damaged_keeps_the_run(at):
    """a resume that fails for a damaged checkpoint -> named: metrics and config of the run are as they were"""
    checkpoint = _trained(at)
    files = [at.runs / "run" / name for name in ("metrics.jsonl", "config.json")]
    (at.runs / "run" / "metrics.jsonl").open("a", encoding="utf-8").write('{"step": 3, "reward": 0.5}\n')
    before = [path.read_text(encoding="utf-8") for path in files]
    _state_file(checkpoint).write_bytes(b"")
    seen = named(_resumed(at), DAMAGED, REMEDY)
    return (
        Seen("silent", f"rewritten ({seen.what})") if [p.read_text(encoding="utf-8") for p in files] != before else seen
    )


def falls_back_by_hand(at):
    """the newest checkpoint is removed, as the message says -> survived: resumed from the one before"""
    shutil.rmtree(_trained(at))
    return goes_on(_resumed(at), steps=3)


def stale_incomplete(at):
    """incomplete_step_3 of a killed run lies there, with files and a folder in the way -> survived"""
    checkpoint = _trained(at)
    shutil.copytree(checkpoint, checkpoint.with_name("incomplete_step_3"))
    (checkpoint.with_name("incomplete_step_1") / "trainer").mkdir(parents=True)
    return goes_on(_resumed(at), steps=3)


def stale_incomplete_file(at):
    """a file, and a folder of another user, where incomplete_step_3 has to go -> survived or named"""
    checkpoint = _trained(at)
    checkpoint.with_name("incomplete_step_3").write_text("in the way", encoding="utf-8")
    return either(_resumed(at), "incomplete_step_3", "remove")


def killed_while_saving(at):
    """kill -9 while a checkpoint is half written, then --resume -> survived"""
    held = at.folder / "held"
    run = at.start("--max_steps 3 --save_steps 2 ", script="tests/faults/held.py", first=("saving", str(held)))
    if not wait_until(held.with_suffix(".reached").exists, 30):
        return Seen("broken", run.text[-300:])
    run.kill()
    end = at.train("--resume --max_steps 3 ")
    if end.status:
        seen = named(end, "no complete checkpoint", "without --resume|anew")
        return goes_on(at.train("--run_name again --max_steps 3 ", run="again")) if seen.verdict == "named" else seen
    return goes_on(end, steps=3)


# ---- the disk --------------------------------------------------------------------------------------------------------


def _small_disk(at, megabytes: int):
    """A file system of its own at the output folder, seen by this fault's processes only."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x20000) or libc.mount(None, b"/", None, 0x4000 | 0x40000, None):
        return False
    return libc.mount(b"tmpfs", str(at.runs).encode(), b"tmpfs", 0, f"size={megabytes}m".encode()) == 0


def full_disk(at):
    """the disk is full when the checkpoint is written -> named: no half checkpoint counts as whole"""
    if not _small_disk(at, 5):
        return Seen("skipped", "no mounts allowed here")
    end = at.train("--save_steps 1 --max_steps 4 ")
    whole = [p.name for p in at.runs.glob("run/checkpoints/step_*") if not (p / "trainer" / "state.json").exists()]
    seen = named(end, "no space|disk|space left", "checkpoint|free|space|output_dir")
    return Seen("silent", f"half checkpoints: {whole}") if whole else seen


def full_disk_resumed(at):
    """after a full disk there is space again, and the run is resumed -> survived"""
    if not _small_disk(at, 60):
        return Seen("skipped", "no mounts allowed here")
    filler = at.runs / "filler"
    if at.train("--save_steps 1 --max_steps 1 ").status:
        return Seen("broken", "the first run failed")
    with contextlib.suppress(OSError), open(filler, "wb") as file:
        while True:
            file.write(bytes(1 << 16))
    first = at.train("--resume --save_steps 1 --max_steps 3 ")
    filler.unlink()
    if first.status in (0, None):
        return goes_on(first, "status 0 on a full disk")
    return goes_on(at.train("--resume --save_steps 1 --max_steps 3 "), steps=3)


def file_size_limit(at):
    """files may have 1 MB (RLIMIT_FSIZE) -> named: the checkpoint could not be written"""
    flags = f"{SMALL} {BASE}--output_dir {at.runs} --run_name run".split()
    code = f"""
import resource, runpy, signal
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.argv = ["train_grpo.py", *{flags!r}]
runpy.run_path("train_grpo.py", run_name="__main__")
"""
    return named(at.python(code), "too large|File|space|checkpoint", "checkpoint|write|limit")


def read_only_output(at):
    """the output folder is on a read-only file system -> named: before anything is sampled"""
    if not _small_disk(at, 5):
        return Seen("skipped", "no mounts allowed here")
    ctypes.CDLL(None).mount(None, str(at.runs).encode(), None, 32 | 1, None)
    end = at.train("")
    return named(end, "read-only", "output_dir")


def output_is_a_file(at):
    """the output folder is a file -> named"""
    return named(at.train(f"--output_dir {at.file('file', 'x')} "), "file|not a directory|exists", "output_dir")


def folder_removed(at):
    """the run's folder is removed while it runs -> named: not status 0"""
    run = at.start("--max_steps 15 --save_steps 1 ")
    at.reached(run, "step 2/")
    shutil.rmtree(at.runs / "run", ignore_errors=True)
    shutil.rmtree(at.runs / "run", ignore_errors=True)
    return either(at.ended(run), "run|no such file|removed", "", None)


def odd_run_names(at):
    """run names with .., slashes, 300 characters, line ends -> survived or named: nothing outside --output_dir"""
    outside = at.folder / "outside"
    said = []
    for name in ("../outside", "a/b", "x" * 300, ".."):
        end = at.train(f"--run_name {name} --max_steps 1 ", run="x")
        if outside.exists():
            return Seen("leaked", "a run folder outside --output_dir")
        said.append(f"{name[:10]}: {end.status}")
        if end.status is None or (end.status and not says(end.text, "run_name|name")):
            return Seen("ended", f"{name[:12]!r}: {end.tail}")
    return Seen("survived", ", ".join(said))


def metrics_torn(at):
    """the last line of metrics.jsonl is torn -> survived: resumed, the line is made again"""
    _trained(at)
    path = at.runs / "run" / "metrics.jsonl"
    path.write_text(path.read_text(encoding="utf-8")[:-30], encoding="utf-8")
    return goes_on(_resumed(at), None if len(path.read_text(encoding="utf-8").splitlines()) >= 2 else "lines are lost")


def metrics_garbage(at):
    """a line in the middle of metrics.jsonl is garbage -> named: on resume, which line"""
    _trained(at)
    path = at.runs / "run" / "metrics.jsonl"
    path.write_bytes(b"\xff\xfe{]\n" + path.read_bytes())
    return either(_resumed(at), "metrics.jsonl", "line|remove")


def config_garbage(at):
    """config.json of the run is cut in the middle -> survived or named: on resume"""
    _trained(at)
    (at.runs / "run" / "config.json").write_text('{"model_id": "mod', encoding="utf-8")
    return either(_resumed(at), "config.json", "remove|cannot be read|damaged")


def foreign_files(at):
    """files of others in the run's folders (step_x.parquet, checkpoints/step_best, notes) -> survived: resumed"""
    _trained(at)
    run = at.runs / "run"
    (run / "completions" / "step_x.parquet").write_text("not ours", encoding="utf-8")
    (run / "completions" / "notes.txt").write_text("not ours", encoding="utf-8")
    (run / "checkpoints" / "step_best").mkdir()
    return goes_on(_resumed(at), steps=3)


# ---- resuming with something changed ---------------------------------------------------------------------------------


def _data(at, first: int, name: str = "rows.jsonl") -> str:
    return at.rows([{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(first, first + 12)], name)


def data_changed(at):
    """--resume with other rows under the same file name -> survived: says that the data differ, and what follows"""
    _trained(at, _data(at, 0))
    end = _resumed(at, _data(at, 5))
    return goes_on(
        end,
        None
        if says(end.text, "data.{0,80}(differ|changed|other)|(differ|changed|other).{0,80}data")
        else "not a word about other data",
    )


def data_changed_strict(at):
    """the same with --strict_resume -> named: refused"""
    _trained(at, _data(at, 0))
    return named(_resumed(at, _data(at, 5) + " " + at.known("--strict_resume")), "data|rows", "strict_resume")


def reward_changed(at):
    """--resume with another reward function in the same file -> survived: says so"""
    path = at.file("my_reward.py", "def mine(completions, **c):\n    return [1.0] * len(completions)\n")
    _trained(at, f"--reward_funcs {path}:mine ")
    at.file("my_reward.py", "def mine(completions, **c):\n    return [2.0] * len(completions)\n")
    end = _resumed(at, f"--reward_funcs {path}:mine ")
    told = says(
        end.text,
        "(my_reward|reward).{0,80}(differ|changed|other|edited)|(differ|changed|other).{0,80}(my_reward|reward)",
    )
    return goes_on(end, None if told else "not a word about another reward")


def settings_changed(at):
    """--resume with other settings -> survived: they are named"""
    _trained(at)
    end = _resumed(at, "--learning_rate 5e-4 --temperature 0.7 ")
    return goes_on(end, None if says(end.text, "learning_rate.*5e-4|learning_rate.*0.0005") else "not said")


def ranks_changed(at):
    """--resume of one rank's run on two -> survived: says so"""
    _trained(at)
    end = _resumed(at, ranks=2)
    return goes_on(end, None if says(end.text, "rank.{0,60}(1|2)|world") else "not said")


def adapters_changed(at):
    """--resume with --use_peft of a run without -> named"""
    _trained(at)
    return named(_resumed(at, "--use_peft "), "does not fit|use_peft", "use_peft|remove")


def model_changed(at):
    """--resume with a model of another shape -> named"""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    _trained(at)
    other = at.given / "other"
    AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(TINY, hidden_size=64, num_hidden_layers=1)
    ).save_pretrained(other)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(other)
    return named(_resumed(at, f"--model_id {other} "), "does not fit|model", "model|saved with")


def nothing_to_resume(at):
    """--resume of a run that is not there -> named"""
    return named(at.train("--resume --run_name absent "), "no complete checkpoint", "output_dir|run_name")


def name_taken(at):
    """a run name that is taken, without --resume -> named"""
    _trained(at)
    return named(at.train(""), "holds a run already", "resume|another name")
