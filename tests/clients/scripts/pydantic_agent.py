"""pydantic-ai: an agent by chats and by responses, whole and streamed."""

import asyncio

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from task import QUESTION, URL, calculator, finish

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")


async def main() -> None:
    for model in (
        OpenAIChatModel("demo", provider=provider),
        OpenAIResponsesModel("demo", provider=provider),
    ):
        agent = Agent(model, tools=[calculator])
        finish(type(model).__name__, (await agent.run(QUESTION)).output)
        async with agent.run_stream(QUESTION) as stream:
            finish(f"{type(model).__name__}, streamed", await stream.get_output())


asyncio.run(main())
