"""Rollouts of users that return something else than they were asked for, nothing, or never; groups of odd sizes.

A copy of a user's script enters the rollout in ROLLOUTS, below an ordinary one, and runs two steps.
"""

from case import ROOT, Seen, goes_on, named

ROLLOUT = """
import asyncio, sys, time
sys.path.insert(0, {root!r})
import train_grpo
from config import TrainConfig, parse_args
from dataclasses import replace
from rollouts import ROLLOUTS, single_turn

async def mine(rows, generator, cfg):
    good = await single_turn(rows, generator, cfg)
{body}

ROLLOUTS["mine"] = mine
{more}
if __name__ == "__main__":
    train_grpo.main(parse_args(TrainConfig))
"""
ASKED = "rollout 'mine', asked for 4"


def _run(at, body: str, flags: str = "", more: str = "", **how):
    """A run of two steps with a rollout of this body; `good` is what would be right."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    path = at.file("mine.py", ROLLOUT.format(root=str(ROOT), body=lines, more=more))
    return at.train(f"--rollout mine {flags}", script=str(path), **how)


def _refused(at, body: str, came: str, remedy: str, flags: str = "", **how) -> Seen:
    return named(_run(at, body, flags, **how), f"{ASKED}.*{came}", remedy)


# ---- what comes back -------------------------------------------------------------------------------------------------


def too_many(at):
    """a rollout returns 16 trajectories for 4 -> named: both numbers, and how to say that it decides itself"""
    return _refused(at, "return [replace(t) for t in good * 4]", "returned 16", "any_number = True")


def too_few(at):
    """a rollout returns the best of four alone -> named: both numbers"""
    return _refused(at, "return good[:1]", "returned 1", "any_number = True")


def nothing_at_all(at):
    """a rollout forgets its return -> named: None, and what to return"""
    return _refused(at, "good.clear()", "returned None", "Return a list of Trajectory")


def no_trajectories(at):
    """a rollout that decides itself how many it returns gives none for a row -> named: asked and came"""
    return named(_run(at, "return []", more="mine.any_number = True"), f"{ASKED}.*returned 0", "at least one")


def other_rows(at):
    """a rollout returns the trajectories of another row -> named: both rows"""
    return _refused(at, "return [replace(t, row=dict(t.row, prompt='1 + 1 =')) for t in good]", "another row", "row:")


def one_for_all(at):
    """a rollout returns one trajectory four times -> named: copies teach nothing"""
    return _refused(at, "return good[:1] * 4", "one of them several times", "each by itself")


def groups_of_its_own(at):
    """a rollout numbers its trajectories 0 to 3 as groups -> named: those of a row are compared"""
    return _refused(at, "return [replace(t, group=n) for n, t in enumerate(good)]", "groups", "after_rollout")


def dicts(at):
    """a rollout returns dicts, as a JSON API gave them -> named: the kind, and what to return"""
    return _refused(at, "return [vars(t) for t in good]", "a dict", "Trajectory objects")


def a_generator(at):
    """a rollout yields its trajectories -> named: no coroutine"""
    end = _run(at, "for t in good: yield t")
    return named(end, "rollout 'mine' is no coroutine.*async_generator", "async def.*return")


def not_async(at):
    """a rollout is a plain function -> named: no coroutine"""
    more = "def mine(rows, generator, cfg):\n    return []\nROLLOUTS['mine'] = mine"
    return named(_run(at, "return good", more=more), "rollout 'mine' is no coroutine", "async def")


# ---- numbers ---------------------------------------------------------------------------------------------------------


def nan_logprobs(at):
    """a rollout has no log-probs and gives nan -> named: nan for a sampled token"""
    body = "return [replace(t, logprobs=[float('nan')] * len(t.logprobs)) for t in good]"
    return _refused(at, body, "logprobs have nan", "Completion.logprobs")


def probabilities(at):
    """a rollout gives probabilities for log-probs -> named: above 0, or no agreement of the two"""
    body = "import math\nreturn [replace(t, logprobs=[math.exp(p) for p in t.logprobs]) for t in good]"
    return named(_run(at, body), "logprobs have|log-prob", "at most 0|logprob_diff_limit")


def zeros_as_logprobs(at):
    """a rollout gives 0 for every log-prob -> named: trainer and generator do not agree"""
    body = "return [replace(t, logprobs=[0.0] * len(t.logprobs)) for t in good]"
    return named(_run(at, body), "log-prob", "logprob_diff_limit")


def nan_rewards(at):
    """a rollout's own token_rewards hold nan -> named: nan, and what rewards may be"""
    body = "return [replace(t, token_rewards=[float('nan')] * len(t.token_rewards)) for t in good]"
    return _refused(at, body, "token_rewards have nan", "finite")


def shared_zeros(at):
    """one list of zeros is token_rewards of all four -> survived: each has its own reward"""
    body = "zeros = [0.0] * 8\n"
    body += "return [replace(t, token_rewards=zeros) if len(t.token_rewards) == 8 else t for t in good]"
    end = _run(at, body)
    least = min((step["reward"] for step in end.steps), default=0)
    return goes_on(end, f"the reward is {least}, its least is -1" if least < -1.001 else None, steps=2)


def outside_the_vocabulary(at):
    """a rollout writes an id that the model does not have -> named: the ids, and where they end"""
    body = "return [replace(t, token_ids=[10**6, *t.token_ids[1:]]) for t in good]"
    return _refused(at, body, "token ids go from \\d+ to 1000000", "go from 0 to")


def tensors(at):
    """a rollout gives tensors for lists -> named: the field, and .tolist()"""
    body = "import torch\nfor t in good:\n    t.token_ids = torch.tensor(t.token_ids)\nreturn good"
    return _refused(at, body, "token_ids is a Tensor", "tolist")


def ragged_lists(at):
    """a rollout appends to token_ids alone -> named: the four lengths"""
    return _refused(at, "for t in good:\n    t.token_ids.append(5)\nreturn good", "differ in length", "per token")


def too_long(at):
    """a rollout goes on past --max_completion_length -> named: the length and the flag"""
    body = "names = ('token_ids', 'loss_mask', 'logprobs', 'token_rewards')\n"
    body += "return [replace(t, **{name: getattr(t, name) * 50 for name in names}) for t in good]"
    return _refused(at, body, "tokens are over --max_completion_length", "finish_reason 'length'")


def old_weights(at):
    """a rollout leaves policy_version at its default -> named at the second step: copy it"""
    body = "return [replace(t, policy_version=0, policy_version_last=None) for t in good]"
    end = _run(at, body)
    seen = named(end, "come from weights 0", "policy_version")
    return seen if len(end.steps) == 1 else Seen("silent", f"{len(end.steps)} steps")


# ---- endings ---------------------------------------------------------------------------------------------------------


def never_ends(at):
    """a rollout waits for ever for every row -> named: the limit, after --max_failed"""
    end = _run(at, "await asyncio.sleep(1e6)", "--rollout_timeout 3 ", limit=40)
    return named(end, "rollout 'mine' took over 3 s", "rollout_timeout.*max_failed")


def never_ends_at_times(at):
    """a rollout waits for ever for one row in eight -> survived: that row is left out and counted"""
    body = "mine.n = getattr(mine, 'n', 0) + 1\nif mine.n == 2: await asyncio.sleep(1e6)\nreturn good"
    end = _run(at, body, "--rollout_timeout 6 --max_failed 0.5 ")
    failed = sum(step["rollout/failed"] for step in end.steps)
    return goes_on(end, None if failed == 4 else f"rollout/failed is {failed}", steps=2)


def blocks_the_loop(at):
    """a rollout sleeps without await -> named: where it stands, and what to write"""
    end = _run(at, "time.sleep(1e6)", "--rollout_timeout 2 ", limit=50)
    return named(end, "rollout 'mine' took over 2 s.*it blocks the event loop", "asyncio.to_thread")


def swallows_its_cancellation(at):
    """a rollout catches CancelledError and goes on -> named: it catches it"""
    body = "while True:\n    try:\n        await asyncio.sleep(1)\n    except asyncio.CancelledError:\n        pass"
    return named(_run(at, body, "--rollout_timeout 2 ", limit=50), "took over 2 s", "CancelledError|rollout_timeout")


def raises_at_a_row(at):
    """a rollout raises KeyError -> named: the rollout and the row"""
    return named(_run(at, "return good['trajectories']"), "TypeError.*Raised by rollout 'mine' for the row with prompt")


def cancels_itself(at):
    """a rollout lets CancelledError of something of its own through -> named: it, not a silent end"""
    return named(_run(at, "raise asyncio.CancelledError"), "ended by asyncio.CancelledError", "catch it")


def exits(at):
    """a rollout calls sys.exit(0) -> named: not status 0 without a step"""
    return named(_run(at, "sys.exit(0)"), "rollout 'mine' called sys.exit.0.", "TrajectoryError")


def gives_up_a_row(at):
    """a rollout raises TrajectoryError for one row in eight -> survived: left out and counted"""
    body = "from rollouts import TrajectoryError\nmine.n = getattr(mine, 'n', 0) + 1\n"
    body += "if mine.n == 2: raise TrajectoryError('no way on', rows[0])\nreturn good"
    end = _run(at, body, "--max_failed 0.5 ")
    failed = sum(step["rollout/failed"] for step in end.steps)
    return goes_on(end, None if failed == 4 else f"rollout/failed is {failed}", steps=2)


# ---- evaluation and baselines ----------------------------------------------------------------------------------------


def sixteen_in_an_evaluation(at):
    """a rollout returns what it likes in evaluations -> named: asked for 2, returned 16, for 'eval'"""
    body = "return good if cfg.purpose == 'train' else [replace(t) for t in good * 8]"
    flags = "--eval_steps 1 --eval_generations 2 --eval_dataset_id examples/sums.py:rows "
    return named(_run(at, body, flags), "asked for 2 .*'eval'.* returned 16", "any_number = True")


def several_baselines(at):
    """a tree search returns four greedy baselines (remax) -> named: a baseline is one"""
    body = "return good if cfg.purpose == 'train' else [replace(t) for t in good * 4]"
    end = _run(at, body, "--advantage remax ", more="mine.any_number = True")
    return named(end, "asked for 1 .*'baseline'.* returned 4", "1 for a greedy baseline")


# ---- sizes of groups -------------------------------------------------------------------------------------------------


def _sized(at, sizes, flags: str = "", **how):
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1), "num_generations": size} for n, size in enumerate(sizes)]
    return at.train(f"{at.rows(rows)} --prompts_per_step 2 {flags}", **how)


def sizes_by_row(at):
    """rows ask for 2, 5 and the usual 4 completions -> survived: as many were sampled"""
    end = _sized(at, [2, 5, 2, 5], "--num_epochs 1 ")
    count = sum(step["completions/count"] for step in end.steps)
    return goes_on(end, None if count == 14 else f"{count} completions", steps=2)


def sizes_on_two_ranks(at, limit=120):
    """groups of 2 to 9 on two ranks, in minibatches, with a KL that adapts -> survived: as many were sampled"""
    flags = "--prompts_per_step 4 --num_minibatches 2 --num_iterations 2 --beta 0.01 --kl_target 0.1 --max_steps 2 "
    end = _sized(at, [2, 9, 3, 4], flags, ranks=2)
    counts = [step["completions/count"] for step in end.steps]
    return goes_on(end, None if counts == [18, 18] else f"{counts} completions", steps=2)


def no_size(at):
    """a row asks for 0 completions -> named: the row, and what the column means"""
    return named(_sized(at, [4, 0, 4, 4]), "column num_generations is 0.*1 \\+ 1", "format_row")


def size_in_words(at):
    """a row's num_generations is a text -> named: the row, and what the column means"""
    return named(_sized(at, ["four"] * 4), "column num_generations is 'four'", "whole one")


def size_of_one(at):
    """a row asks for 1 completion where completions are compared -> named: at least 2"""
    return named(_sized(at, [4, 1, 4, 4]), "column num_generations.*grpo compares", "at least 2")


# ---- spans -----------------------------------------------------------------------------------------------------------


def _spans(at, spans: str, flags: str = "--env_errors stop "):
    path = at.file("spans.py", f"def f(completions, **_):\n    return [{{'spans': {spans}}} for c in completions]\n")
    return at.scripted(["Five. It is 5."], f"--reward_funcs {path}:f {flags}")


def spans_past_the_end(at):
    """a reward's span ends behind the text -> named: the span and the text's length"""
    return named(
        _spans(at, "[(0, 5, 1.0), (6, 99, 1.0)]"), "'f' returned.*\\(6, 99, 1.0\\) is no span.*<= 14", "spans are"
    )


def spans_of_nan(at):
    """a span's reward is nan -> named: a reward must be finite"""
    return named(_spans(at, "[(0, 5, float('nan'))]"), "'f' returned.*must be finite", "return a list")


def spans_without_number(at):
    """spans are pairs, without a value -> named: what a span is"""
    return named(_spans(at, "[(0, 5)]"), "'f' returned.*is no span", "start, end, value")


def spans_of_sentences(at):
    """a reward gives each sentence its own number -> survived: their sum is the reward"""
    end = _spans(at, "[(0, 5, 0.25), (6, 14, 0.5)]")
    return goes_on(end, None if abs(end.mean("reward") - 0.75) < 1e-6 else f"reward {end.mean('reward')}", steps=1)
