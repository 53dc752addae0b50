"""Pushes that send only what has changed: bit for bit what whole pushes leave behind, on a live server and, from two
ranks, on the server's end of the wire."""

import asyncio
import json

import pytest
import torch
from live import Process, running
from transformers import AutoModelForCausalLM

import train_grpo as script
from serving import pushing, wire
from vllm_client import ServerError, VLLMClient

PROMPT = list(range(100, 140))


@pytest.fixture
def client(server):
    client = VLLMClient([server.url], server.token, timeout=30, request_timeout=120, over="gloo", changes_only=True)
    client.connect_weights("cpu")
    yield client
    client.close()


@pytest.fixture
def model(server):
    return AutoModelForCausalLM.from_pretrained(server.model_dir, dtype=torch.float32)


def disturb(model, share, seed):
    """Change this share of each weight, by about a tenth; some of it to the same value."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1 * (torch.rand_like(p) < share))


def push(client, model, version):
    policy = torch.nn.Module()
    policy.model = model  # as `Policy` holds it
    script.push_weights(policy, client, version, bucket_mb=4)
    return client.sent_bytes


def sampled(client):
    """Tokens and log-probs of four completions, the same whenever the weights are."""
    answers = asyncio.run(client.generate(PROMPT, n=4, max_tokens=20, seed=1))
    return [(one.token_ids, one.logprobs) for one in answers]


def difference(model, answers):
    worst = 0.0
    for tokens, logprobs in answers:
        ids = torch.tensor([PROMPT + tokens])
        with torch.no_grad():
            expected = model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        expected = expected.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(logprobs)).abs().max()))
    return worst


def test_fifty_pushes_of_changes_leave_what_one_whole_push_does(server, client, model):
    whole = push(client, model, 0)
    before = sampled(client)
    for version in range(1, 51):
        disturb(model, 0.01, version)
        assert push(client, model, version) < whole / 8
    after = sampled(client)
    assert after != before and difference(model, after) < 1e-4
    fresh = VLLMClient([server.url], server.token)
    fresh.connect_weights("cpu")
    assert push(fresh, model, 51) == whole
    assert sampled(fresh) == after  # exactly
    fresh.close()


def test_where_much_has_changed_the_whole_bucket_travels(client, model):
    whole = push(client, model, 0)
    disturb(model, 1.0, 0)
    assert push(client, model, 1) == whole
    assert difference(model, sampled(client)) < 1e-4
    assert push(client, model, 2) < whole / 100  # nothing has changed
    assert difference(model, sampled(client)) < 1e-4


def test_a_damaged_change_is_seen_and_the_next_push_is_whole(client, model, monkeypatch):
    whole = push(client, model, 0)
    disturb(model, 0.01, 0)
    broadcast = pushing.broadcast

    def damage(group, bucket):
        bucket[0] ^= 2  # a place of the first value: it lands beside its own
        return broadcast(group, bucket)

    monkeypatch.setattr(pushing, "broadcast", damage)
    with pytest.raises(ServerError, match="model.embed_tokens.weight arrived damaged"):
        push(client, model, 1)
    monkeypatch.undo()
    with pytest.raises(ServerError, match="503.*did not complete"):
        sampled(client)
    assert push(client, model, 2) == whole
    assert difference(model, sampled(client)) < 1e-4


def test_nan_in_a_change_is_not_sent(client, model):
    whole = push(client, model, 0)
    name, parameter = next(iter(model.named_parameters()))
    kept = float(parameter.data[3, 3])
    parameter.data[3, 3] = float("nan")
    with pytest.raises(FloatingPointError, match=f"nan or inf in {name}"):
        push(client, model, 1)
    parameter.data[3, 3] = kept
    assert push(client, model, 2) == whole


def test_a_server_with_another_base_takes_a_whole_push_only(server, client, model):
    """Another trainer's weights, or another push's, are no base."""
    whole = push(client, model, 0)
    other = VLLMClient([server.url], server.token, changes_only=True)
    other.connect_weights("cpu")
    push(other, model, 7)
    disturb(model, 0.01, 0)
    with pytest.raises(ServerError, match="another trainer has connected"):
        push(client, model, 1)
    assert push(client, model, 2) == whole
    disturb(model, 0.01, 1)
    client._base = "another push"
    with pytest.raises(ServerError, match="does not hold push another push.*push all weights"):
        push(client, model, 3)
    assert push(client, model, 4) == whole
    assert difference(model, sampled(client)) < 1e-4
    other.close()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.4, 1.0])
def test_changes_are_exact(share):
    torch.manual_seed(0)
    old = torch.randn(3 * wire.ALIGN // 2).bfloat16()
    new = torch.where(torch.rand(len(old)) < share, -old, old)
    before, after = old.view(torch.uint8), new.view(torch.uint8)
    places, are, were = wire.changes(after, before)
    assert places.tolist() == (old.view(torch.int16) != new.view(torch.int16)).nonzero()[:, 0].tolist()
    starts = [0, wire.ALIGN, wire.ALIGN]  # the second tensor is empty
    sums = wire.changed_checksums(wire.checksums(before, starts), starts, places, are, were)
    assert sums == wire.checksums(after, starts)
    packed = wire.pack_changes(places, are, torch.empty(wire.layout_changes(len(places))[2], dtype=torch.uint8))
    wire.change(before, *wire.unpack_changes(packed, len(places)))
    assert torch.equal(before, after)


def split_experts(named):
    """What transformers does to fused experts, and a new name that changes the order."""
    out = {}
    for name, tensor in named:
        if name == "gate_up":
            halves = [half.contiguous() for half in tensor.chunk(2, dim=1)]
            out |= {f"{n}.{kind}": e for kind, half in zip("gu", halves, strict=True) for n, e in enumerate(half)}
        else:
            out["a." + name] = tensor
    return sorted(out.items())


def test_changes_find_their_place_in_converted_tensors():
    torch.manual_seed(0)
    named = [("gate_up", torch.randn(3, 10, 7)), ("norm", torch.randn(5)), ("down", torch.randn(4, 6))]
    dtypes, shapes = [torch.bfloat16, torch.float32, torch.bfloat16], [list(t.shape) for _, t in named]
    starts, _, total = wire.layout(dtypes, shapes)
    old, new = (torch.empty(total, dtype=torch.uint8) for _ in range(2))
    wire.pack(named, dtypes, old, starts)

    def converted():
        pairs = split_experts(named)
        kinds = [wire.travels_as(t, torch.bfloat16) for _, t in pairs]
        firsts, _, size = wire.layout(kinds, [list(t.shape) for _, t in pairs])
        bucket = torch.empty(size, dtype=torch.uint8)
        wire.pack(pairs, kinds, bucket, firsts)
        return pairs, bucket

    pairs, held = converted()
    moves = wire.rearranged(named, pairs, split_experts, torch.bfloat16, held)
    for _, tensor in named:
        tensor[torch.rand(tensor.shape) < 0.3] += 1
    wire.pack(named, dtypes, new, starts)
    places, are, _ = wire.changes(new, old)
    wire.change(held, wire.moved(places, *moves), are)
    assert torch.equal(held, converted()[1])
    assert wire.rearranged(named, converted()[0], split_experts, torch.bfloat16, held) is not None
    held[0] ^= 1
    assert wire.rearranged(named, pairs, split_experts, torch.bfloat16, held) is None  # the values are not the same


def test_ranks_compare_their_own_shards(tmp_path):
    """Two ranks, every kind of sharding: what the server holds is what a whole push leaves, bit for bit, and what the
    ranks tell each other grows with what has changed. Nothing whole is gathered unless it is sent whole."""
    out = tmp_path / "out.json"
    with running(Process(["tests/changes_worker.py", str(out)], tmp_path / "log", 2)) as ranks:
        assert ranks.end() == 0, ranks.text[-4000:]
    results = json.loads(out.read_text(encoding="utf-8"))
    for case, found in results.items():
        assert found["equal"], case
        sent = {push: found[push]["sent"] for push in found if push != "equal"}
        assert sent["nothing"] == 0 and sent["fresh"] == sent["whole"], case
        assert 0 < sent["0.002"] < sent["0.02"] <= sent["0.9"] <= sent["whole"], (case, sent)
        told = {push: sum(found[push]["told"].values()) for push in sent}
        if case in ("fsdp2", "fsdp2, offload"):
            assert told["nothing"] < 1000 and told["0.002"] < told["0.02"] / 5 < told["whole"] / 10, (case, told)
            assert found["0.02"]["told"].keys() == {"allgather_", "gather_"}  # counts, and changes
        if case == "fsdp2, LoRA":
            assert told["0.02"] < told["whole"], told  # frozen weights stay where they are


@pytest.mark.parametrize("place", [-1, 3 * wire.ALIGN // 2])
def test_a_change_outside_the_bucket_is_refused(place):
    bucket = torch.zeros(3 * wire.ALIGN, dtype=torch.uint8)
    with pytest.raises(ValueError, match="damaged"):
        wire.change(bucket, torch.tensor([0, place], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int16))
    assert not bucket.any()
