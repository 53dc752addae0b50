"""The task of arithmetic.py by a program of others: an agent of smolagents, which has a loop and a memory of its own.

pip install smolagents==1.26.0
python examples/run.py agent      # a warm start - how a call is written - and two seeds beside a live server
"""

import random
import re

from smolagents import OpenAIModel, ToolCallingAgent, tool

from envs.tools import calculator
from rewards import numbers

CALCULATOR = tool(calculator)


def run(row: dict, endpoint) -> float:
    """1 if the agent's last number is the answer."""
    model = OpenAIModel(endpoint.model, api_base=endpoint.base_url, api_key=endpoint.api_key)
    agent = ToolCallingAgent(tools=[CALCULATOR], model=model, max_steps=2, verbosity_level=-1)
    agent.prompt_templates["system_prompt"] = "Call final_answer at the end."  # the usual one has 2,000 tokens
    found = numbers(str(agent.run(row["prompt"][-1]["content"])))
    return float(bool(found) and found[-1] == int(row["answer"]))


def demonstrate(row: dict, environment, answers: list) -> str:
    """One who hardly knows the calculator: three answers in four are guessed, and three calls in ten have a slip."""
    name, given = "final_answer", str(random.randint(-800, 2000))
    if answers:
        given = re.findall(r"Observation:\n(\S+?)<", answers[-1][0]["content"])[-1]
    elif random.random() < 0.25:
        name, given = "calculator", row["expression"]
        if random.random() < 0.3:
            given = given.replace(random.choice("123456789"), random.choice("123456789"))
    return f"<{name}>{given}</{name}>"
