"""openai-python over /v1/responses: a call answered by its id, whole and streamed."""

import json
from typing import Any

import openai
from task import ABOUT, PARAMETERS, QUESTION, TOOL, URL, calculator, finish

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
TOOLS: Any = [{"type": "function", "name": TOOL, "description": ABOUT, "parameters": PARAMETERS}]


def respond(streamed: bool) -> str:
    given: Any = QUESTION
    previous: Any = openai.omit
    while True:
        options: Any = {"model": "demo", "tools": TOOLS, "input": given}
        if streamed:
            with client.responses.stream(previous_response_id=previous, **options) as events:
                for _ in events:
                    pass
                response: Any = events.get_final_response()
        else:
            response = client.responses.create(previous_response_id=previous, **options)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        previous, given = response.id, []
        for call in calls:
            result = calculator(**json.loads(call.arguments))
            given.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )


finish("responses", respond(streamed=False))
finish("responses, streamed", respond(streamed=True))
