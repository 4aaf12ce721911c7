"""openai-agents: a run by chats and by responses, whole and streamed."""

import asyncio

import agents
from openai import AsyncOpenAI
from task import QUESTION, URL, calculator, finish

agents.set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


@agents.function_tool(name_override="calculator")
def tool(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return calculator(expression)


async def main() -> None:
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        agent = agents.Agent(name="a", model=kind("demo", client), tools=[tool])
        whole = await agents.Runner.run(agent, QUESTION)
        finish(f"{kind.__name__}", whole.final_output)
        streamed = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in streamed.stream_events():
            pass
        finish(f"{kind.__name__}, streamed", streamed.final_output)


asyncio.run(main())
