"""Agents of others against the recorder: rows as counted by hand, tokens as they were sampled, and what goes wrong."""

import asyncio
import json
import time
from dataclasses import replace

import openai
import psutil
import pytest
import requests
import test_turns
import torch
from live import ROOT, SMALL, trained
from test_server import moved, named, push
from tiers import by_default
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentic import agents
from agentic.recorder import Conversation, read_answer, recorder
from config import TrainConfig
from inputs.trajectory import TrajectoryError
from rollouts import trajectory_fault
from vllm_client import VLLMClient

CALL = '<tool_call>{"name":"add","arguments": {"a": 2,  "b": 3}}</tool_call>'  # blanks as no template writes them
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]
SYSTEM, ASKED = {"role": "system", "content": "You add."}, {"role": "user", "content": "What is 2 + 3?"}
ROW = {"prompt": [ASKED], "answer": 5}


class Scripted(test_turns.Scripted):
    """Says its turns one after another, whoever asks."""

    def __init__(self, template: str, turns: list[str], seconds: float = 0.0):
        super().__init__(test_turns.tokenizer_of(template), turns, lambda: seconds)

    def next_turn(self, sent) -> str:
        return self.turns[len(self.said) % len(self.turns)]

    @property
    def log(self) -> list[tuple[list[int], list[int]]]:
        return [(turn["sent"], turn["ids"]) for turn in self.said]


def config(agent, **settings) -> TrainConfig:
    given = dict(agent=f"{__file__}:{agent}", agent_timeout=20, tool_parser="hermes", max_prompt_length=1000)
    return TrainConfig(**given | settings)


def played(agent: str, sampler, **settings):
    cfg = config(agent, **settings)
    return asyncio.run(agents.play(ROW, 0, sampler, cfg))


def rows_of(t) -> list[tuple[list[int], list[int], list[int]]]:
    """(ids, mask, log-probs) of each row."""
    start, out = len(t.prompt_ids), []
    whole = t.prompt_ids + t.token_ids, [0] * start + t.loss_mask, [0.0] * start + t.logprobs
    bounds = [0, *(start + place for place in t.info["restarts"]), len(whole[0])]
    for a, b in zip(bounds, bounds[1:], strict=False):
        out.append(tuple(values[a:b] for values in whole))
    return out


def check_rows(t, sampler, chains: list[list[int]]) -> None:
    """chains: by hand, the calls of each row that are trained there. Ids are what the generator saw and sampled."""
    assert trajectory_fault(t, sampler, config("tools")) is None
    assert sorted(sum(chains, [])) == list(range(len(sampler.log))), "each answer is trained once"
    rows = rows_of(t)
    assert len(rows) == len(chains)
    for (ids, mask, logprobs), calls in zip(rows, chains, strict=True):
        assert ids == sum(sampler.log[calls[-1]], []), "the last call saw all that is before its answer"
        expected, seen = [], 0
        for call in calls:
            sent, sampled = sampler.log[call]
            assert sent == ids[: len(sent)]
            expected += [0] * (len(sent) - seen) + [1] * len(sampled)
            seen = len(sent) + len(sampled)
            assert logprobs[len(sent) : seen] == [-0.5 - i for i in range(len(sampled))]
        assert mask == expected and all(p == 0 for p, m in zip(logprobs, mask, strict=True) if not m)


# ---- what agents do --------------------------------------------------------------------------------------------------


def say(endpoint, messages, **how):
    client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
    return client.chat.completions.create(model=endpoint.model, messages=messages, **how).choices[0].message


def plain(message) -> dict:
    """As most clients keep an answer: without its thinking."""
    kept = message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
    return {"content": None} | kept


def result(message, text: str = "5") -> dict:
    return {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": text}


def tools(row, endpoint, messages=(SYSTEM, ASKED)):
    """Calls until there is an answer."""
    messages = list(messages)
    for _ in range(4):
        answer = say(endpoint, messages, tools=TOOLS)
        messages.append(plain(answer))
        if not answer.tool_calls:
            return {"reward": float("5" in answer.content), "turns_taken": len(messages)}
        assert json.loads(answer.tool_calls[0].function.arguments) == {"a": 2, "b": 3}
        messages.append(result(answer))


def sub_agent(row, endpoint):
    """Asks, lets a helper with another system prompt look twice, and goes on."""
    messages = [SYSTEM, ASKED, plain(say(endpoint, [SYSTEM, ASKED]))]
    helper = [{"role": "system", "content": "You help."}, ASKED]
    for _ in range(2):
        helper += [plain(say(endpoint, helper)), {"role": "user", "content": "Sure?"}]
    say(endpoint, [*messages, {"role": "user", "content": "The helper agrees."}])
    return 1.0


def compaction(row, endpoint):
    messages = [SYSTEM, ASKED]
    for _ in range(2):
        messages += [plain(say(endpoint, messages)), {"role": "user", "content": "Go on."}]
    say(endpoint, [SYSTEM, {"role": "user", "content": "So far: 2 + 3. Go on."}])


def retry(row, endpoint):
    """Three turns, then the second again, from the first, and one more behind it."""
    messages = [SYSTEM, ASKED]
    for _ in range(3):
        messages += [plain(say(endpoint, messages)), {"role": "user", "content": "Go on."}]
    again = messages[:4]
    again += [plain(say(endpoint, again)), {"role": "user", "content": "And now?"}]
    say(endpoint, again)


def two_questions(row, endpoint):
    """A call, its result, an answer; then another question, and again a call and its result."""
    messages = [SYSTEM, ASKED]
    for _ in range(2):
        call = say(endpoint, messages, tools=TOOLS)
        messages += [plain(call), result(call)]
        messages += [plain(say(endpoint, messages, tools=TOOLS)), {"role": "user", "content": "And 3 + 2?"}]


APPENDED = dict(on_rewrite="append", reward_funcs=["last_number"])
THINKS = [f"<think>\nhm\n</think>\n\n{CALL}", "<think>\nso\n</think>\n\nIt is 5."]
CASES = [
    ("tools", "qwen2_5", [CALL, CALL, "It is 5."], [[0, 1, 2]]),
    ("sub_agent", "qwen2_5", ["a", "b", "c", "d"], [[0, 3], [1, 2]]),
    ("compaction", "smollm2", ["a", "b", "c"], [[0, 1], [2]]),
    ("retry", "llama3", ["a", "b", "c", "d", "e"], [[0, 1, 2], [3, 4]]),
    ("two_questions", "qwen3", THINKS, [[0, 1], [2, 3]]),  # which leaves out the thinking before the last question
    ("two_questions", "qwen2_5", THINKS, [[0, 1, 2, 3]]),  # which leaves nothing out
]


@pytest.mark.parametrize("agent, template, turns, chains", CASES, ids=[f"{a}-{t}" for a, t, *_ in CASES])
def test_rows_are_those_that_are_counted_by_hand(agent, template, turns, chains):
    sampler = Scripted(template, turns)
    t = played(agent, sampler, reward_funcs=["last_number"])
    check_rows(t, sampler, chains)
    assert t.turns == len(sampler.log) and t.policy_version == 3


def test_what_an_agent_returns_is_its_reward():
    t = played("tools", Scripted("qwen2_5", [CALL, "It is 5."]))
    assert [turn["reward"] for turn in t.info["turns"]] == [0, 1] and t.info["metrics"] == {"turns_taken": 5}
    assert [c["name"] for c in t.info["turns"][0]["info"]["calls"]] == ["add"]
    assert t.info["turns"][0]["observation"][0]["content"] == "5"


def test_thinking_is_apart_and_what_is_left_out_of_a_history_is_not_trained_twice():
    sampler = Scripted("qwen3", THINKS)
    t = played("two_questions", sampler, reward_funcs=["last_number"])
    first, second = (sampler.tokenizer.decode(ids) for ids, _, _ in rows_of(t))
    assert first.count("<think>") == 2 and second.count("<think>") == 2 and second.count("It is 5.") == 2
    check_rows(played("two_questions", again := Scripted("qwen3", THINKS), **APPENDED), again, [[0, 1, 2, 3]])


@pytest.mark.parametrize(
    "said, thought, content, called",
    [
        (f"<think>\nhm\n</think>\n\nSo: {CALL}", "hm", "So:", 1),
        (f"hm\n</think>\n\n{CALL}<tool_call>{{oh</tool_call>", "hm", None, 1),  # the prompt has begun the thinking
        ("Sure <tool_call>{oh</tool_call>", None, "Sure <tool_call>{oh</tool_call>", 0),
        ("<think>\nwithout an end", "without an end", "", 0),
        ("Yes.<|im_end|>", None, "Yes.", 0),
    ],
)
def test_thinking_text_and_calls_are_apart(said, thought, content, called):
    message, _ = read_answer(said, TOOLS, "hermes", (), test_turns.tokenizer_of("qwen3"))
    assert (message.get("reasoning_content"), message["content"]) == (thought, content)
    assert len(message.get("tool_calls", [])) == called


def streams(row, endpoint):
    client, messages = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key), [SYSTEM, ASKED]
    for _ in range(2):
        text, calls = "", {}
        options = dict(stream=True, stream_options={"include_usage": True}, tools=TOOLS)
        for chunk in client.chat.completions.create(model=endpoint.model, messages=messages, **options):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                calls |= {call.index: call for call in choice.delta.tool_calls or ()}
        made = [call.model_dump(exclude={"index"}) for call in calls.values()]
        messages.append({"role": "assistant", "content": text} | ({"tool_calls": made} if made else {}))
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in made]
    assert chunk.usage.completion_tokens > 0
    return float("5" in text)


def test_streaming_gives_the_same_rows():
    both = [played(agent, Scripted("qwen2_5", [CALL, "It is 5."])) for agent in ("tools", "streams")]
    assert vars(both[0])["token_ids"] == both[1].token_ids and both[0].loss_mask == both[1].loss_mask
    assert [t.info["turns"][-1]["reward"] for t in both] == [1, 1]


# ---- faults that people meet -----------------------------------------------------------------------------------------


def raises(row, endpoint):
    say(endpoint, [ASKED])
    raise KeyError("no such file")


def endless(row, endpoint):
    while True:
        say(endpoint, [ASKED])


def silent(row, endpoint):
    return 1.0


def gives_nothing(row, endpoint):
    say(endpoint, [ASKED])


@pytest.mark.parametrize(
    "agent, message",
    [
        ("raises", "raised KeyError.*no such file"),
        ("endless", "took over 1 s"),
        ("silent", "ended without an answer"),
        ("gives_nothing", "returned no reward"),
    ],
)
def test_an_agent_that_fails_costs_its_trajectory(agent, message):
    start = time.monotonic()
    with pytest.raises(TrajectoryError, match=message):
        played(agent, Scripted("smollm2", ["a"], seconds=0.01), agent_timeout=1)
    assert time.monotonic() - start < 10 and not recorder().conversations


def many(row, endpoint):
    for n in range(1000):
        say(endpoint, [{"role": "user", "content": f"Question {n % 500}"}])
    return 1.0


@pytest.mark.slow
def test_a_thousand_calls():
    sampler = Scripted("smollm2", ["a"])
    check_rows(played("many", sampler, agent_timeout=300), sampler, [[n] for n in range(1000)])


def at_once(row, endpoint):
    """Two calls at the same time that continue the same answer: one of them has to begin a row."""

    async def both():
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        first = [SYSTEM, ASKED, plain(say(endpoint, [SYSTEM, ASKED]))]
        asked = ([*first, {"role": "user", "content": text}] for text in ("Sure?", "Why?"))
        calls = (client.chat.completions.create(model=endpoint.model, messages=messages) for messages in asked)
        await asyncio.gather(*calls)

    asyncio.run(both())


def test_two_conversations_with_one_key():
    sampler = Scripted("smollm2", ["a", "b", "c"], seconds=0.1)
    check_rows(played("at_once", sampler, reward_funcs=["last_number"]), sampler, [[0, 1], [2]])


def leaves(row, endpoint):
    """Does not wait for an answer, asks again, and calls once more when its time is over."""
    body = {"model": endpoint.model, "messages": [ASKED]}
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    try:
        requests.post(endpoint.base_url + "/chat/completions", json=body, headers=headers, timeout=0.2)
    except requests.Timeout:
        time.sleep(0.5)
    say(endpoint, [ASKED])
    return 1.0


def test_an_answer_that_nobody_waited_for_is_not_trained():
    sampler = Scripted("smollm2", ["a", "b"], seconds=0.4)
    t = played("leaves", sampler)
    assert len(sampler.log) == 2 and t.turns == 1 and t.token_ids == sampler.log[1][1]


def test_what_is_not_served_is_answered_as_openai_does():
    cfg = config("tools", max_prompt_length=60, max_completion_length=20, max_turn_length=4)
    url, message = recorder().url, {"role": "user", "content": "Hi"}
    whole = {"model": cfg.model_id, "messages": [message]}

    async def asked() -> list[tuple[int, dict]]:
        key = recorder().open(Conversation(ROW, Scripted("smollm2", ["a b c d e f g h"]), cfg))

        def post(body, route="/chat/completions", key=key, method="POST") -> tuple[int, dict]:
            data = body if isinstance(body, str) else json.dumps(body)
            answer = requests.request(
                method, url + route, data=data, headers={"Authorization": f"Bearer {key}"}, timeout=20
            )
            return answer.status_code, answer.json()

        bodies = [whole, "{", "[1]", {"model": cfg.model_id}, whole | {"n": 2}, whole | {"logprobs": True}]
        bodies += [
            whole | {"max_tokens": 0},
            whole | {"messages": [message | {"role": "boss"}]},
            whole | {"tools": [{}]},
        ]
        bodies += [whole | {"messages": [message, {"role": "assistant", "content": "-"}]}]
        bodies += [whole | {"messages": [message | {"content": [{"type": "video"}]}]}]
        bodies += [whole | {"messages": [message | {"content": "word " * 200}]}, whole | {"model": "gpt-4o"}]
        found = [await asyncio.to_thread(post, body) for body in bodies]
        found.append(await asyncio.to_thread(post, whole, "/embeddings"))
        found.append(await asyncio.to_thread(post, "", "/models", method="GET"))
        recorder().close(key)
        return [*found, await asyncio.to_thread(post, whole)]

    (first, *found, models, late) = asyncio.run(asked())
    assert first[0] == 200 and first[1]["choices"][0]["finish_reason"] == "length"
    assert first[1]["usage"]["completion_tokens"] == 4
    assert models == (200, {"object": "list", "data": [models[1]["data"][0]]})
    assert [status for status, _ in found] == [400] * 11 + [404, 404] and late[0] == 401
    assert all(set(answer["error"]) == {"message", "type", "param", "code"} for _, answer in [*found, late])
    assert found[-3][1]["error"]["code"] == "context_length_exceeded"


def test_what_is_wrong_with_the_generator_ends_the_run():
    class Gone(Scripted):
        async def generate(self, *given, **options):
            raise ConnectionError("the server has ended")

    with pytest.raises(ConnectionError, match="has ended"):
        played("tools", Gone("smollm2", []))


# ---- commands --------------------------------------------------------------------------------------------------------

ASK = """
import json, os, pathlib, subprocess, sys, openai
row = json.loads(pathlib.Path(sys.argv[1]).read_text())
assert os.getcwd() != {root!r} and not os.listdir()
subprocess.Popen(["sleep", "1234.5"], start_new_session=True)
answer = openai.OpenAI().chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=row["prompt"])
print("said", answer.choices[0].message.content)
{end}
"""


def test_a_command_is_any_program_and_ends_with_all_it_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = {"sys.exit(3)": None, "import time; time.sleep(60)": "took over 4 s.*said a", "os.abort()": "signal 6"}
    for end, message in cases.items():
        (tmp_path / "ask.py").write_text(ASK.format(root=str(tmp_path), end=end), encoding="utf-8")
        cfg = TrainConfig(
            agent="python ask.py {row_file}", reward_funcs=["last_number"], agent_timeout=4 if message else 60
        )
        agents.check_agent(cfg)
        playing = agents.play(ROW, 0, Scripted("smollm2", ["a"]), cfg)
        if message:
            with pytest.raises(TrajectoryError, match=message):
                asyncio.run(playing)
        else:
            assert asyncio.run(playing).info["agent"] == {"status": 3, "last_line": "said a"}
        time.sleep(0.1)
        assert not [p for p in psutil.process_iter(["cmdline"]) if "1234.5" in (p.info["cmdline"] or ())]


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(agent="no_such_program --x"), "no program 'no_such_program'"),
        (dict(agent="python -c 'x"), "No closing quotation"),
        (dict(agent="python ask.py"), "returns no reward"),
        (dict(agent=f"{__file__}:missing"), "has no 'missing'"),
        (dict(agent=f"{__file__}:tools", tools=["calculator"]), "--agent .* --tools"),
    ],
)
def test_an_agent_that_cannot_work_is_refused_at_start(settings, message):
    with pytest.raises(ValueError, match=message):
        agents.check_agent(TrainConfig(**settings))


# ---- agents of others ------------------------------------------------------------------------------------------------

OTHERS = ROOT / "tests" / "agents_of_others.py"
COMPUTES = '<tool_call>{"name":"calculator","arguments": {"expression":"2+3"}}</tool_call>'
KEPT = [("sdk", [[0, 1]]), ("langchain", [[0, 1]]), ("agents_sdk", [[0, 1]]), ("tool_calling_agent", [[0], [1], [2]])]
NAMES = [name for name, _ in KEPT] + ["code_agent", "bash"]


def agent_of(name: str) -> str:
    return f"{ROOT}/tests/ask.sh {{row_file}}" if name == "bash" else f"{OTHERS}:{name}"


@pytest.mark.parametrize("name, chains", KEPT, ids=NAMES[:4])
def test_what_a_library_sends_back_continues_what_was_sampled(name, chains):
    """Each writes a call's JSON in its own way. smolagents makes text of calls: a history written anew each time."""
    sampler = Scripted("qwen2_5", [COMPUTES, "It is 5."])
    cfg = replace(config("tools"), agent=agent_of(name), agent_timeout=60)
    check_rows(asyncio.run(agents.play(ROW, 0, sampler, cfg)), sampler, chains)


class Logged:
    """The server's client, which remembers what the server was sent and sampled."""

    def __init__(self, client: VLLMClient):
        self.client, self.tokenizer, self.log, self.rope_index = client, client.tokenizer, [], None
        self.asked = asyncio.Event()

    async def generate(self, sent, **how):
        self.asked.set()
        found = await self.client.generate(sent, **how)
        self.log += [(list(sent), sample.token_ids, sample.logprobs) for sample in found]
        return found


@pytest.fixture
def logged(server):
    client = VLLMClient([server.url], server.token)
    client.tokenizer = AutoTokenizer.from_pretrained(server.model_dir)
    yield Logged(client)
    client.close()


def model_at(server):
    return AutoModelForCausalLM.from_pretrained(server.model_dir, dtype=torch.float32)


@pytest.mark.parametrize("name", by_default(["sdk", "bash", "tool_calling_agent"], NAMES))
def test_rows_of_agents_of_others_are_what_the_server_sampled(name, server, logged):
    model, client = model_at(server), logged.client
    push(client, named(model), 1)
    settings = dict(agent=agent_of(name), agent_timeout=60, tool_parser="hermes", reward_funcs=["last_number"])
    cfg = TrainConfig(**settings, max_prompt_length=256, max_completion_length=200, max_turn_length=12)
    t = asyncio.run(agents.play(ROW, 0, logged, cfg))
    assert trajectory_fault(t, None, cfg) is None and t.policy_version == 1
    trained = {}
    for ids, mask, logprobs in rows_of(t):
        with torch.no_grad():
            ours = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
        for start in (n for n, m in enumerate(mask) if m and not mask[n - 1]):
            end = next((n for n in range(start, len(mask)) if not mask[n]), len(mask))
            trained[tuple(ids[:start])] = ids[start:end], logprobs[start:end]
            assert torch.allclose(ours[start - 1 : end - 1, 0], torch.tensor(logprobs[start:end]), atol=1e-4)
    assert trained == {tuple(sent): (sampled, logprobs) for sent, sampled, logprobs in logged.log}


def long_answer(row, endpoint):
    say(endpoint, [ASKED])
    return 1.0


def test_a_push_in_the_middle_of_an_answer(server, logged):
    model, client = model_at(server), logged.client
    client.run = "agents"
    push(client, named(model), 1)
    lengths = dict(max_prompt_length=100, max_completion_length=400, min_completion_length=400)
    cfg = config("long_answer", agent_timeout=100, **lengths)

    async def across():
        task = asyncio.ensure_future(agents.play(ROW, 0, logged, cfg))
        await logged.asked.wait()
        await client.generate(list(range(5, 15)), max_tokens=20, min_tokens=20)  # by its end the answer is under way
        await asyncio.to_thread(push, client, named(moved(model, 2)), 2)
        return await task

    t = asyncio.run(across())
    (old, start, pushed), (new, after, end) = t.info["spans"]
    assert (t.policy_version, t.policy_version_last) == (1, 2) == (old, new)
    assert (start, end) == (0, len(t.token_ids)) and 0 < pushed == after < end


@pytest.mark.parametrize("name", by_default(["sdk"], NAMES))
def test_agents_of_others_train_beside_a_server(name, server, tmp_path):
    flags = f"{SMALL} --generator vllm --server_urls {server.url} --max_steps 3 "
    flags += "--max_prompt_length 256 --max_completion_length 200 --max_turn_length 12 --agent_timeout 100 "
    flags += "--tool_parser hermes --reward_funcs " + ("last_number" if name == "bash" else "environment")
    lines = trained(tmp_path, f"{flags} --agent '{agent_of(name)}'", VLLM_SERVER_TOKEN=server.token)
    lines = [line for line in lines if "reward" in line]
    assert len(lines) == 3 and all(line["sampling/logprob_diff_max"] < 1e-4 for line in lines)
    assert all(line["agent/calls"] >= line["agent/rows"] >= 1 and line["rollout/failed"] == 0 for line in lines)
