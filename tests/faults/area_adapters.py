"""LoRA adapters that travel alone: broken pushes of one run beside a sound one, and who may have a name or a slot."""

import os
import re
import shutil
import signal
import sys

import torch
from case import ROOT, Seen, named, wait_until
from server_fixture import TINY, free_port, start_server

ME, OTHER = "a" * 32, "b" * 32  # runs
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
ALONE = "--use_peft --generator vllm --push_lora adapters --compute_dtype float32 "


def _shapes(rank: int = 4) -> dict[str, list[int]]:
    """[rank, inputs, outputs] of two layers of models/tiny."""
    from transformers import AutoConfig

    c = AutoConfig.from_pretrained(TINY)
    return {LAYERS[0]: [rank, c.hidden_size, c.hidden_size], LAYERS[1]: [rank, c.intermediate_size, c.hidden_size]}


def _tensors(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    found = {}
    for name, (rank, inputs, outputs) in shapes.items():
        found |= {f"{name}.lora_A.weight": torch.randn(rank, inputs) / 9}
        found |= {f"{name}.lora_B.weight": torch.randn(outputs, rank) / 9}
    return found


def _client(at, name: str, owner: str | None = ME, timeout: float = 15, shapes=None, versions: int = 1):
    from vllm_client import VLLMClient

    client = VLLMClient([at.server.url], at.server.token, timeout=timeout)
    at.stack.callback(client.close)
    client.adapter, client.owner, client.versions = name, owner, versions
    client.adapter_shapes = shapes or _shapes()
    client.connect_weights("cpu")
    return client


def _push(client, version: int, tensors: dict | None = None) -> None:
    client.begin_push()
    pairs = list((_tensors(client.adapter_shapes) if tensors is None else tensors).items())
    client.send_bucket(pairs[:2])
    client.send_bucket(pairs[2:])
    client.finish_push(version)


def _version(at, name: str) -> int | None:
    """Of what samples for this adapter; None: nothing does."""
    answer = at.request("POST", "/generate", json={"prompt_ids": [5, 6], "max_tokens": 2, "adapter": name})
    return answer.json()["policy_version"] if answer.status_code == 200 else None


def _runs(at) -> dict:
    return at.request("GET", "/server_info").json()["runs"]


def _beside(at, fault, words: str) -> Seen:
    """`fault(client)`, of a run at version 1 beside another at 7, is refused, naming `words`. Both versions are served
    then, and both runs can push."""
    client, neighbour = _client(at, "mine"), _client(at, "neighbour", OTHER)
    _push(client, 1)
    _push(neighbour, 7)
    try:
        fault(client)
        return Seen("silent", "taken")
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    if not re.search(words, text, re.IGNORECASE | re.DOTALL):
        return Seen("ended", text)
    return _both_go_on(at, client, neighbour, "named", text)


def _both_go_on(at, client, neighbour, verdict: str, text: str) -> Seen:
    if (found := (_version(at, "mine"), _version(at, "neighbour"))) != (1, 7):
        return Seen("silent", f"versions {found} afterwards, not 1 and 7 ({text})")
    client.adapter_shapes = _shapes()
    _push(client, 2)
    _push(neighbour, 8)
    found = _version(at, "mine"), _version(at, "neighbour")
    return Seen(verdict, text) if found == (2, 8) else Seen("ended", f"after good pushes: versions {found}")


def _of(change):
    """A push of tensors that `change` has altered."""

    def fault(client):
        tensors = _tensors(client.adapter_shapes)
        _push(client, 5, change(tensors))

    return fault


A, B = f"{LAYERS[0]}.lora_A.weight", f"{LAYERS[1]}.lora_B.weight"


def _filled(tensors: dict, name: str, value: str) -> dict:
    tensors[name][0] = float(value)
    return tensors


def adapter_nan(at, adapted):
    """an adapter with a NaN -> named: which matrix; the version before is served, and the other run's"""
    return _beside(at, _of(lambda tensors: _filled(tensors, A, "nan")), "nan or inf in.*q_proj")


def adapter_infinity(at, adapted):
    """an adapter with an infinity in its last matrix -> named: which matrix"""
    return _beside(at, _of(lambda tensors: _filled(tensors, B, "inf")), "inf in.*down_proj")


def adapter_missing(at, adapted):
    """an adapter without one matrix -> named: which"""
    return _beside(at, _of(lambda tensors: {k: t for k, t in tensors.items() if k != B}), "missing.*down_proj")


def adapter_unknown(at, adapted):
    """an adapter with a matrix that was not announced -> named: which"""
    return _beside(at, _of(lambda tensors: tensors | {"model.norm.lora_A.weight": tensors[A]}), "model.norm")


def adapter_transposed(at, adapted):
    """an adapter with a transposed matrix -> named: which"""
    return _beside(at, _of(lambda tensors: tensors | {A: tensors[A].T.contiguous()}), "q_proj.lora_A.*shape")


def adapter_other_rank(at, adapted):
    """an adapter of rank 8 where rank 4 was announced -> named: which matrix"""
    return _beside(at, _of(lambda tensors: _tensors(_shapes(8))), "lora_A.*shape")


def adapter_twice(at, adapted):
    """an adapter with one matrix sent twice -> named: which"""

    def fault(client):
        client.begin_push()
        pairs = list(_tensors(client.adapter_shapes).items())
        client.send_bucket(pairs)
        client.send_bucket(pairs[:1])
        client.finish_push(5)

    return _beside(at, fault, "sent twice.*q_proj.lora_A")


def _announced(shapes: dict):
    def fault(client):
        client.adapter_shapes = shapes
        _push(client, 5)

    return fault


def adapter_rank_too_large(at, adapted):
    """an adapter of a higher rank than the server takes -> named: the flag"""
    return _beside(at, _announced(_shapes(128)), "rank 128 is above.*--max-lora-rank 128")


def adapter_wrong_base(at, adapted):
    """an adapter of a model of other widths -> named: both shapes"""
    return _beside(at, _announced({LAYERS[0]: [4, 96, 96]}), "another shape.*96 -> 96")


def adapter_unknown_layer(at, adapted):
    """an adapter of a layer that the model has not -> named: which"""
    return _beside(at, _announced({"model.layers.77.mlp.up_proj": [4, 8, 8]}), "no adapters of.*layers.77")


def adapter_of_embeddings(at, adapted):
    """an adapter of the embeddings, which vLLM does not serve -> named"""
    return _beside(at, _announced({"model.embed_tokens": [4, 8, 8]}), "no adapters of.*embed_tokens.*--lora_targets")


def adapter_of_nothing(at, adapted):
    """an adapter of no layer at all -> named"""

    def fault(client):
        client.adapter_shapes = {}
        client.begin_push()

    return _beside(at, fault, "no layer")


def _damaged(client):
    import serving.pushing as pushing

    client.begin_push()
    sound, pushing.checksums = pushing.checksums, lambda bucket, starts: [1 for _ in starts]
    try:
        client.send_bucket(list(_tensors(client.adapter_shapes).items()))
    finally:
        pushing.checksums = sound
    client.finish_push(5)


def adapter_damaged(at, adapted):
    """a bucket of an adapter whose checksums are not those announced -> named"""
    return _beside(at, _damaged, "checksum|damaged")


def adapter_finished_at_once(at, adapted):
    """a push of an adapter that is finished before its first bucket -> named: all that is missing"""

    def fault(client):
        client.begin_push()
        client.finish_push(5)

    return _beside(at, fault, "missing.*q_proj")


def adapter_begun_twice(at, adapted):
    """a push of an adapter begun in the middle of the same -> named"""

    def fault(client):
        client.begin_push()
        client.begin_push()

    return _beside(at, fault, "push is under way")


def _broken_off(at, buckets: int, break_off) -> Seen:
    """A push that ends after so many buckets; the versions before are served meanwhile."""
    client, neighbour = _client(at, "mine", timeout=3), _client(at, "neighbour", OTHER)
    _push(client, 1)
    _push(neighbour, 7)
    client.begin_push()
    for pair in list(_tensors(client.adapter_shapes).items())[:buckets]:
        client.send_bucket([pair])
    client._settle()
    if (found := (_version(at, "mine"), _version(at, "neighbour"))) != (1, 7):
        return Seen("silent", f"versions {found} in mid-push")
    break_off(client)
    if not wait_until(lambda: not _runs(at)["mine"]["pushing"], 20):
        return Seen("hung", "the push is still under way after 20 s")
    client._drop_groups()
    return _both_go_on(at, client, neighbour, "survived", f"broken off after {buckets} buckets")


def _give_up(client):
    client.abort_push("for the campaign")


def adapter_broken_off_at_start(at, adapted):
    """a push of an adapter given up before its first bucket -> survived: the versions before go on"""
    return _broken_off(at, 0, _give_up)


def adapter_broken_off_half_way(at, adapted):
    """a push of an adapter given up after half of its matrices -> survived: the versions before go on"""
    return _broken_off(at, 2, _give_up)


def adapter_broken_off_before_its_end(at, adapted):
    """a push of an adapter given up when all has arrived -> survived: the versions before go on"""
    return _broken_off(at, 4, _give_up)


def adapter_silent(at, adapted):
    """a trainer falls silent in the middle of its adapter's push -> survived: broken off after its time limit"""
    return _broken_off(at, 1, lambda client: None)


def adapter_groups_gone(at, adapted):
    """the transfer groups of an adapter's push close in its middle -> survived: broken off, then well again"""
    return _broken_off(at, 1, lambda client: client._drop_groups())


def adapter_connected_again(at, adapted):
    """a run connects anew in the middle of its own push -> survived: that push ends, the version before goes on"""
    return _broken_off(at, 3, lambda client: client.connect_weights("cpu"))


PROGRAM = """
import asyncio, contextlib, sys, time, torch
sys.path[:0] = [{root!r}, {tests!r}, {faults!r}]
from pathlib import Path
from types import SimpleNamespace
import area_adapters as area
at = SimpleNamespace(server=SimpleNamespace(url={url!r}, token={token!r}), stack=contextlib.ExitStack())
"""


def _program(at, code: str):
    """A process of its own, with clients of the shared server."""
    where = dict(root=str(ROOT), tests=str(ROOT / "tests"), faults=str(ROOT / "tests" / "faults"))
    where |= dict(url=at.server.url, token=at.server.token)
    return at.command(sys.executable, at.file(f"program_{len(at.started)}.py", PROGRAM.format(**where) + code))


KILLED = """
client = area._client(at, {name!r}, area.ME, 3)
area._push(client, 1)
client.begin_push()
client.send_bucket(list(area._tensors(client.adapter_shapes).items())[:1])
client._settle()
print("half", flush=True)
time.sleep(300)
"""


def _killed(at, name: str) -> Seen | None:
    """A process with the adapter `name` at version 1 is killed in mid-push."""
    run = _program(at, KILLED.format(name=name))
    if not at.reached(run, "half"):
        return Seen("broken", run.text[-300:])
    run.kill()
    return None


def adapter_trainer_killed(at, adapted):
    """kill -9 in the middle of an adapter's push -> survived: version 1 goes on, and the same run resumes"""
    if failed := _killed(at, "mine"):
        return failed
    neighbour = _client(at, "neighbour", OTHER)
    _push(neighbour, 7)
    if _version(at, "mine") != 1:
        return Seen("silent", f"version {_version(at, 'mine')} after the kill")
    return _both_go_on(at, _client(at, "mine"), neighbour, "survived", "version 1 went on, then the run was resumed")


def adapter_name_taken(at, adapted):
    """a second run with the name of one that is there -> named: --adapter; the first is not disturbed"""
    return _beside(at, lambda client: _client(at, "neighbour", ME), "neighbour belongs to another run.*--adapter")


def adapter_slots_exhausted(at, adapted):
    """a run whose versions have no room beside the others' -> named: --max-loras and the number"""
    words = r"wide needs 7 slots, beside mine \(1\), neighbour \(1\).*--max-loras 10"
    return _beside(at, lambda client: _client(at, "wide", "c" * 32, versions=7), words)


def adapter_beside_whole_weights(at, adapted):
    """whole weights pushed to a server on which runs have adapters -> named: whose"""

    def fault(client):
        from vllm_client import VLLMClient

        whole = VLLMClient([at.server.url], at.server.token, timeout=15)
        at.stack.callback(whole.close)
        whole.connect_weights("cpu")

    return _beside(at, fault, "shared by adapters of mine, neighbour.*server of its own")


def adapter_trainer_of_whole_weights(at, adapted):
    """a trainer without --use_peft on a server on which a run has an adapter -> named: whose"""
    _push(_client(at, "mine"), 1)
    return named(at.ended(at.served()), "shared by adapters of mine", "server of its own")


def adapter_trainer_of_too_high_rank(at, adapted):
    """a trainer with --lora_r 128 where the server takes 64 -> named: --max-lora-rank, before a step"""
    return named(
        at.ended(at.served(f"{ALONE}--lora_r 128 ")), "rank 128 is above the server's 64", "--max-lora-rank 128"
    )


def _answers(at, requests: list[tuple[str, dict]], verdict: str = "survived") -> Seen:
    """All are refused with 4xx, and a run that was there goes on."""
    client, neighbour = _client(at, "mine"), _client(at, "neighbour", OTHER)
    _push(client, 1)
    _push(neighbour, 7)
    codes = [at.request("POST", f"/adapters/{step}", json=body).status_code for step, body in requests]
    if wrong := [code for code in codes if not 400 <= code < 500]:
        return Seen("ended", f"{wrong} among {codes}")
    return _both_go_on(at, client, neighbour, verdict, f"answers {codes}")


def adapter_others_lease(at, adapted):
    """one run says for another that it is there, and lets go of its name -> survived: refused, the name is kept"""
    seen = _answers(at, [(step, {"adapter": "neighbour", "owner": "d" * 32}) for step in ("lease", "release")])
    return seen if _runs(at)["neighbour"]["held"] else Seen("silent", "the name was let go of")


def adapter_others_session(at, adapted):
    """steps of a push with a session that is none -> survived: refused"""
    body = {"adapter": "mine", "session": "e" * 32}
    more = {"start": {"modules": _shapes()}, "bucket": {"update_info": {}}, "finish": {"weight_version": 9}}
    return _answers(at, [(step, body | what) for step, what in more.items()])


def adapter_names_that_are_none(at, adapted):
    """adapters named by paths, by nothing and by 65 letters -> survived: refused"""
    bodies = [{"adapter": name, "session": "s", "init_info": {}} for name in ("../x", "", "x" * 65, "a b", 7, None)]
    return _answers(at, [("connect", body) for body in bodies])


def adapter_bodies_that_are_none(at, adapted):
    """owners, versions and shapes that are none -> survived: refused"""
    body = {"adapter": "new", "session": "s", "init_info": {}}
    odd = [("connect", body | what) for what in ({"owner": "../x"}, {"versions": 0}, {"versions": -1})]
    shapes = ({"x": [4]}, {"x": [4, 8, "y"]}, {}, {LAYERS[0]: [-4, 8, 8]}, [1], {LAYERS[0]: [4, 2**60, 8]})
    return _answers(at, odd + [("check", {"modules": shape}) for shape in shapes])


def adapter_that_never_came(at, adapted):
    """a request for an adapter that nobody pushed -> named: which, and the others go on"""

    def fault(client):
        answer = at.request("POST", "/generate", json={"prompt_ids": [5], "max_tokens": 2, "adapter": "nobodys"})
        if answer.status_code != 200:
            raise ValueError(answer.text)

    return _beside(at, fault, "no complete push of adapter nobodys")


STOPPED = """
slots = dict(mine=1, wide=4, patient=1)
clients = {{name: area._client(at, name, area.ME, 30, versions=n) for name, n in slots.items()}}
for client in clients.values():
    area._push(client, 1)
print("connected", flush=True)
while not Path({go!r}).exists():
    time.sleep(0.1)
for name, client in clients.items():
    try:
        asked = asyncio.run(client.generate([5, 6], max_tokens=2))
        area._push(client, 2)
        print(name, "went on from version", asked[0].policy_version, flush=True)
    except Exception as error:
        print(name, "ended:", error, flush=True)
print("over", flush=True)
time.sleep(300)
"""


def adapter_lease_lapsed(at, adapted, limit=180):
    """three runs are stopped (SIGSTOP) for longer than a lease; others take the name of one and the slots of another;
    then they continue -> survived: those two say what they met, the third goes on, and the new runs are not harmed"""
    go = at.folder / "go"
    run = _program(at, STOPPED.format(go=str(go)))
    if not at.reached(run, "connected"):
        return Seen("broken", run.text[-300:])
    os.kill(run.members[0].pid, signal.SIGSTOP)
    if not wait_until(lambda: not any(_runs(at)[name]["held"] for name in ("mine", "wide", "patient")), 90):
        return Seen("silent", f"still held after 90 s: {_runs(at)}")
    rival, greedy = _client(at, "mine", OTHER), _client(at, "greedy", "c" * 32, versions=3)
    _push(rival, 7)
    _push(greedy, 9)
    go.touch()
    os.kill(run.members[0].pid, signal.SIGCONT)
    if not at.reached(run, "\nover", 60):
        return Seen("hung", run.text[-300:])
    said = {line.split()[0]: line for line in run.text.splitlines() if re.match("(mine|wide|patient) ", line)}
    for name, words in (
        ("mine", "another trainer has connected.*an adapter .now --adapter mine. or a server of its own"),
        ("wide", r"not heard of for \d+ s.*wide needs 4 slots, beside .*greedy \(3\).*--max-loras 10"),
        ("patient", "went on from version 1"),
    ):
        if not re.search(words, said.get(name, ""), re.DOTALL):
            return Seen("silent" if "went on" in said.get(name, "") else "ended", f"{name}: {said.get(name)}")
    told, wanted = _runs(at), {"mine": True, "wide": False, "patient": True, "greedy": True}
    held = {name: told[name]["held"] for name in wanted if name in told}
    if held != wanted:
        return Seen("silent", f"held afterwards: {held}")
    found = [_version(at, name) for name in ("mine", "greedy", "patient")]
    _push(rival, 8)
    _push(greedy, 10)
    found += [_version(at, name) for name in ("mine", "greedy", "patient")]
    return Seen("survived" if found == [7, 9, 2, 8, 10, 2] else "silent", f"versions {found}")


SLOW = """
import time
from pathlib import Path
def slow(completion_ids, **_):
    Path({go!r} + ".reached").touch()
    while not Path({go!r}).exists():
        time.sleep(0.1)
    return [float(len(ids)) for ids in completion_ids]
"""


def adapter_server_restarted(at, limit=240):
    """a server is killed and started again while one run scores its completions; another pushes to it first -> named:
    each is told, the other's adapter is left alone, and both go on after pushing again"""
    port = str(free_port())
    words = ["--port", port, "--dtype", "float32", "--max-model-len", "512", "--enable-lora", "--max-loras", "8"]

    def begin(**env: str):
        at.server = start_server(TINY, *words, **env)
        at.stack.callback(shutil.rmtree, at.server.log.parent)
        at.stack.callback(at.server.stop)
        at.server.url = f"http://127.0.0.1:{port}"
        at.server.wait(at.remaining)

    begin()
    token, go = at.server.token, at.folder / "go"
    neighbour = _client(at, "neighbour", OTHER)
    _push(neighbour, 7)
    flags = f"{ALONE}--reward_funcs {at.file('slow.py', SLOW.format(go=str(go)))}:slow --max_steps 2 --save_steps 1 "
    run = at.served(flags, run="mine", VLLM_SERVER_TOKEN=token)
    if not wait_until((at.folder / "go.reached").exists, 90):
        return Seen("broken", run.text[-300:])
    at.server.process.kill()
    at.server.process.wait()
    begin(VLLM_SERVER_TOKEN=token)
    at.server.token = token
    try:
        _push(neighbour, 8)
        return Seen("silent", "pushed to a server that knows nothing of it")
    except Exception as error:
        told = str(error)
    if not re.search("no trainer has connected for adapter neighbour since this server was started", told):
        return Seen("ended", told)
    _push(neighbour, 8)
    go.touch()
    # What it is told depends on what it asked last: for more completions while the server was gone or knew no adapter,
    # or to take the next push.
    told = "adapter mine (is here: none came )?since this server was started|is gone: no connection"
    seen = named(at.ended(run, 60, "mine"), told, "resume the run|is resumed|start it again")
    if seen.verdict != "named":
        return seen
    if (found := (_version(at, "neighbour"), _version(at, "mine"))) != (8, None):
        return Seen("silent", f"versions {found}, not 8 and none ({seen.what})")
    end = at.ended(at.served(flags, run="mine", VLLM_SERVER_TOKEN=token), 90, "mine")
    if end.status or len(end.steps) != 2:
        return Seen("ended", f"started again: status {end.status}, {len(end.steps)} steps: {end.tail}")
    _push(neighbour, 9)
    found = _version(at, "neighbour"), _version(at, "mine")
    return seen if found == (9, 2) else Seen("silent", f"versions {found} in the end, not 9 and 2")
