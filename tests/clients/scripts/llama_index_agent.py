"""llama-index: an agent with a tool, and plain chats and completions, streamed."""

import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from task import ABOUT, QUESTION, TOOL, URL, calculator, finish

OPTIONS = {"model": "demo", "api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
model = OpenAILike(is_chat_model=True, is_function_calling_model=True, **OPTIONS)
tool = FunctionTool.from_defaults(calculator, name=TOOL, description=ABOUT)


async def main() -> None:
    for streaming in (False, True):
        agent = FunctionAgent(tools=[tool], llm=model, system_prompt="", streaming=streaming)
        finish(f"agent, streamed {streaming}", str(await agent.run(QUESTION)))


asyncio.run(main())
*_, last = OpenAILike(is_chat_model=False, max_tokens=8, **OPTIONS).stream_complete("27 + 58 =")
assert "85" in last.text, last.text
