"""Agents as their libraries' first pages have them, pointed at the trainer: nothing in them knows of training."""

import json

EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
FUNCTION = {"name": "calculator", "description": "Evaluates an expression.", "parameters": EXPRESSION}


def asked(row) -> str:
    return row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]


def reward(text, row) -> float:
    """Of a random model, too: right, or even."""
    return float(str(row["answer"]) in str(text)) + len(str(text)) % 7 / 7


def compute(expression: str) -> str:
    from envs.tools import calculator

    try:
        return calculator(expression)
    except Exception as error:
        return f"Error: {error}"


async def sdk(row, endpoint):
    """The tool loop of the openai package's documentation."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages = [{"role": "user", "content": asked(row)}]
    for _ in range(3):
        tools = [{"type": "function", "function": FUNCTION}]
        done = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=tools)
        message = done.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            content = compute(json.loads(call.function.arguments).get("expression", ""))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return reward(message.content, row)


def _smol(row, endpoint, kind: str):
    import smolagents
    from smolagents import OpenAIModel, tool

    @tool
    def calculator(expression: str) -> str:
        """Evaluates an expression.

        Args:
            expression: such as 3 * 4
        """
        return compute(expression)

    model = OpenAIModel(endpoint.model, api_base=endpoint.base_url, api_key=endpoint.api_key)
    agent = getattr(smolagents, kind)(tools=[calculator], model=model, max_steps=2, verbosity_level=0)
    if kind == "ToolCallingAgent":  # the usual one has 2,000 tokens, more than the small model's window
        agent.prompt_templates["system_prompt"] = "Call tools, final_answer at the end."
    else:
        agent.prompt_templates["system_prompt"] = "Write code in <code>...</code>. At the end call final_answer(...)."
    return reward(agent.run(asked(row)), row)


def tool_calling_agent(row, endpoint):
    return _smol(row, endpoint, "ToolCallingAgent")


def code_agent(row, endpoint):
    return _smol(row, endpoint, "CodeAgent")


async def agents_sdk(row, endpoint):
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    model = OpenAIChatCompletionsModel(model=endpoint.model, openai_client=client)
    tool = function_tool(compute, name_override="calculator", description_override="Evaluates an expression.")
    agent = Agent(name="Adder", instructions="Use the calculator.", model=model, tools=[tool])
    done = await Runner.run(agent, asked(row), max_turns=3)
    return reward(done.final_output, row)


def langchain(row, endpoint):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    calculator = tool("calculator", description="Evaluates an expression.")(compute)
    llm = ChatOpenAI(model=endpoint.model, base_url=endpoint.base_url, api_key=endpoint.api_key, temperature=1)
    llm, messages = llm.bind_tools([calculator]), [HumanMessage(asked(row))]
    for _ in range(3):
        messages.append(answer := llm.invoke(messages))
        if not answer.tool_calls:
            break
        messages += [
            ToolMessage(calculator.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls
        ]
    return reward(answer.content, row)
