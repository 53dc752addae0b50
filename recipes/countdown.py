"""Countdown, as TinyZero has it: reach `target` from the numbers `nums` by + - * / and brackets, each used once."""

import ast
import operator
import re
from fractions import Fraction

from published import published

from rewards import completion_text

SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
ASK = """A user asks a question. The assistant first thinks about it, then answers.
User: Reach {target} from the numbers {nums}, with + - * / and brackets; use each number exactly once. Show your work \
in <think> </think>, and give the expression in <answer> </answer>, such as <answer>(1 + 2) / 3</answer>.
Assistant: Let me think step by step.
<think>"""


def rows(split: str = "train", seed: int = 42, source: str | None = None) -> list[dict]:
    """TinyZero's test rows are the last ones, too: the data set has one split."""
    found = published("Jiayi-Pan/Countdown-Tasks-3to4", split, source, test=None)
    return [{"prompt": ASK.format(**row), "target": row["target"], "nums": list(row["nums"])} for row in found]


def countdown(completions, target, nums, **columns) -> list[float]:
    """1 for an expression in the last <answer> that is right; .1 for any other one; 0 without an <answer>."""
    scores = []
    for completion, wanted, given in zip(completions, target, nums, strict=True):
        before, tag, _ = completion_text(completion).rpartition("</answer>")
        _, opened, expression = before.rpartition("<answer>")
        found = tag and opened
        scores.append(0.0 if not found else 1.0 if value(expression.strip(), given) == wanted else 0.1)
    return scores


countdown.per_trajectory = True


def value(expression: str, nums: list[int]) -> Fraction | None:
    """What it comes to, exactly; None if it is none of these numbers. TinyZero's grader evaluates it in python, so that
    it takes 2**3 for 2 and 3, too, and (9**9**9) takes hours."""
    if len(expression) > 200 or not re.fullmatch(r"[0-9\s+*/().-]*", expression):  # python has 3_4, 0x3 and True, too
        return None
    if sorted(map(int, re.findall(r"[0-9]+", expression))) != sorted(nums):
        return None
    try:
        return reckon(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def reckon(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int()):  # no bool: see `value`
            return Fraction(node.value)
        case ast.BinOp() if type(node.op) in SIGNS:
            return SIGNS[type(node.op)](reckon(node.left), reckon(node.right))
        case ast.UnaryOp(op=ast.USub()):
            return -reckon(node.operand)
    raise ValueError(f"{ast.dump(node)} is no part of an expression")
