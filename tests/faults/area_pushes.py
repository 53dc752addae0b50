"""Weight pushes: broken ones, what happens in their middle, and whose weights are evaluated."""

import contextlib
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import requests
import torch
from case import ROOT, Seen, lives, named, shorten, wait_until
from server_fixture import TINY

NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"


def _client(at, timeout: float = 15):
    from vllm_client import VLLMClient

    client = VLLMClient([at.server.url], at.server.token, timeout=timeout)
    at.stack.callback(client.close)
    client.connect_weights("cpu")
    return client


def _model():
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).named_parameters())


def _push(client, weights: dict, version: int = 0) -> None:
    client.begin_push()
    named_ = list(weights.items())
    client.send_bucket(named_[:5])
    client.send_bucket(named_[5:])
    client.finish_push(version)


def _refused(at, change, words: str, **how) -> Seen:
    """A push that `change` has broken is refused, naming `words`; the server says 503 until a good one comes."""

    client, weights = _client(at, **how), _model()
    try:
        _push(client, change(dict(weights)), 5)
        seen = Seen("silent", "taken")
    except Exception as error:
        right = re.search(words, str(error), re.IGNORECASE | re.DOTALL)
        seen = Seen("named" if right else "ended", f"{type(error).__name__}: {error}")
        answer = at.request("POST", "/generate", json={"prompt_ids": [5], "max_tokens": 2})
        if answer.status_code not in (503, 200):
            seen = Seen("ended", f"then {answer.status_code}: {answer.text}")
    _push(client, weights, 0)
    return Seen("ended", f"after a good push: {wrong}") if (wrong := at.generates()) else seen


def _with(name: str, change):
    def changed(weights: dict) -> dict:

        with torch.no_grad():
            weights[name] = change(weights[name].detach().clone())
        return weights

    return changed


def push_nan(at, server):
    """a push with a NaN in one tensor -> named: refused before it is put in place, by its name"""

    def change(tensor):
        tensor.view(-1)[3] = float("nan")
        return tensor

    return _refused(at, _with(UP, change), "finite|nan")


def push_infinity(at, server):
    """a push with an infinity in one vector -> named: refused before it is put in place"""

    def change(tensor):
        tensor[0] = float("inf")
        return tensor

    return _refused(at, _with(NORM, change), "finite|inf")


def push_missing(at, server):
    """a push without one parameter -> named: which"""
    return _refused(at, lambda weights: {k: v for k, v in weights.items() if k != NORM}, f"missing.*{NORM}")


def push_wrong_shape(at, server):
    """a push with a transposed matrix -> named: which"""
    return _refused(at, _with(UP, lambda tensor: tensor.T.contiguous()), "up_proj")


def push_unknown(at, server):
    """a push with a parameter that the server has not -> named: which"""
    return _refused(at, lambda weights: weights | {"model.layers.0.foo.weight": weights[NORM]}, "layers.0.foo.weight")


def push_no_tensor(at, server):
    """bucket descriptions with dtypes, names and shapes that are none -> survived: refused, a good push recovers"""
    client, codes = _client(at, 3), []
    session = client._links[0].session
    good = {"names": ["x"], "dtypes": ["float32"], "shapes": [[2]], "checksums": [0]}
    wrong = [{"dtypes": ["__class__"]}, {"shapes": [[-5]]}, {"shapes": [[2**40]]}, {"names": 7, "shapes": "x"}]
    for update in (good | one for one in wrong):
        at.request("POST", "/start_weight_update", json={"session": session})
        codes.append(
            at.request("POST", "/update_weights", 30, json={"session": session, "update_info": update}).status_code
        )
        client = _client(at, 3)
        session = client._links[0].session
    _push(client, _model(), 0)
    wrong = [code for code in codes if not 400 <= code < 500]
    return Seen("ended", f"answers {codes}") if wrong else lives(at, f"answers {codes}")


def push_trainer_killed(at, server):
    """kill -9 of a trainer in mid-push -> survived: 503 with the reason, then a new trainer's push recovers"""
    code = f"""
import torch, time
from vllm_client import VLLMClient
client = VLLMClient([{server.url!r}], {server.token!r}, timeout=3)
client.connect_weights("cpu")
client.begin_push()
client.send_bucket([("model.norm.weight", torch.ones(128))])
print("half", flush=True)
time.sleep(60)
"""
    path = at.file("dying.py", f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}")
    run = at.command(sys.executable, path)
    if not at.reached(run, "half"):
        return Seen("broken", run.text[-300:])
    run.kill()
    answer = at.request("POST", "/generate", 20, json={"prompt_ids": [5], "max_tokens": 2})
    said = answer.status_code == 503 and "silent" in answer.text
    _push(_client(at), _model(), 0)
    return lives(at, "503, then well again") if said else Seen("ended", f"{answer.status_code}: {answer.text}")


def push_by_another(at, server):
    """a second trainer connects to the same server between two steps -> named: the first is told"""
    run = at.served("--max_steps 400 ")
    if not at.reached(run, "step 2/"):
        return Seen("broken", run.text[-300:])
    _push(_client(at), _model(), 0)
    return named(at.ended(run, 30), "another trainer", "server of its own|only the last|each run")


def evaluation_of_other_weights(at, server):
    """the server's weights are replaced between the last push and the evaluation -> named: not evaluated as ours"""
    held = at.folder / "held"
    rows = at.file("held_out.jsonl", '{"prompt": "1 + 1 ="}\n{"prompt": "Count to three:"}\n')
    flags = f"--generator vllm --server_urls {server.url} --max_steps 1 --eval_steps 1 --eval_generations 2 "
    flags += f"--eval_dataset_id {rows} "
    run = at.start(flags, script="tests/faults/held.py", first=("logged", str(held)))
    if not wait_until(held.with_suffix(".reached").exists, 40):
        return Seen("broken", run.text[-300:])
    _push(_client(at), {name: tensor.detach() * 1.5 for name, tensor in _model().items()}, 77)
    held.with_suffix(".go").touch()
    end = at.ended(run, 30)
    _push(_client(at), _model(), 0)
    return named(end, "weights|version|fresh", "another|own server|restart|server of its own|push")


def store_without_secret(at, server):
    """a stranger joins the rendezvous store of a weight transfer -> survived: no key of it can be listed or read"""
    client = _client(at)
    port = client._links[0].store.port
    code = f"""
from datetime import timedelta
import torch.distributed as dist
try:
    store = dist.TCPStore("127.0.0.1", {port}, None, False, timedelta(seconds=3), False)
    keys = store.list_keys() if hasattr(store, "list_keys") else store.num_keys()
    print("JOINED", keys)
except Exception as error:
    print("REFUSED", type(error).__name__)
"""
    end = at.python(code)
    joined = "JOINED" in end.text and end.text.rpartition("JOINED")[2].strip() not in ("[]", "0")
    return Seen("leaked", end.tail) if joined else lives(at, end.tail)


def resume_in_mid_push(at, doomed):
    """/resume, /pause, /sleep, /wake_up and the cache routes in mid-push -> survived: refused, the push is finished"""
    client, weights = _client(at), list(_model().items())
    client.begin_push()
    client.send_bucket(weights[:5])
    codes = {}
    for path in ("/resume", "/pause", "/sleep", "/wake_up", "/reset_prefix_cache", "/reset_mm_cache"):
        with contextlib.suppress(requests.RequestException):
            codes[path] = at.request("POST", path, 5).status_code
    try:
        client.send_bucket(weights[5:])
        client.finish_push(3)
    except Exception as error:
        return Seen("ended", f"{codes}: {error}")
    if codes.get("/resume", 500) < 400 or codes.get("/wake_up", 500) < 400:
        return Seen("silent", f"done in mid-push: {codes}")
    return lives(at, str(codes))


def generation_in_mid_push(at, doomed):
    """vLLM's own routes that generate, and ours, in mid-push -> survived: they wait or are refused"""
    client, weights = _client(at), list(_model().items())
    model = str(doomed.model_dir)
    client.begin_push()
    client.send_bucket(weights[:5])
    bodies_ = {
        "/v1/completions": {"model": model, "prompt": "x", "max_tokens": 4},
        "/generate": {"prompt_ids": [5], "max_tokens": 4},
    }
    bodies_["/v1/chat/completions"] = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    bodies_["/inference/v1/generate"] = {"model": model, "token_ids": [5], "sampling_params": {"max_tokens": 4}}

    def ask(path):
        try:
            return at.request("POST", path, 15, json=bodies_[path]).status_code
        except requests.RequestException as error:
            return type(error).__name__

    with ThreadPoolExecutor(4) as pool:
        answers = {path: pool.submit(ask, path) for path in bodies_}
        at.request("GET", "/health", 10)
        at.request("POST", "/resume", 5)
        try:
            client.send_bucket(weights[5:])
            client.finish_push(3)
        except Exception as error:
            return Seen("ended", shorten(str(error)))
        codes = {path: answer.result() for path, answer in answers.items()}
    return lives(at, str(codes))
