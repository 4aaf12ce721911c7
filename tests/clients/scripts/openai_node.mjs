// openai-node: chats by runTools and responses, whole and streamed.
import OpenAI from "openai";
import { ABOUT, PARAMETERS, QUESTION, URL, calculator, finish } from "./task.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0 });
const described = { name: "calculator", description: ABOUT, parameters: PARAMETERS };
const callable = { ...described, parse: JSON.parse, function: calculator };

for (const stream of [false, true]) {
  const runner = client.chat.completions.runTools({
    model: "demo",
    messages: [{ role: "user", content: QUESTION }],
    tools: [{ type: "function", function: callable }],
    stream,
  });
  finish(`chat, stream ${stream}`, await runner.finalContent());
}

for (const streamed of [false, true]) {
  let input = [{ role: "user", content: QUESTION }];
  let response;
  do {
    const options = { model: "demo", input, tools: [{ type: "function", ...described }] };
    response = streamed
      ? await client.responses.stream(options).finalResponse()
      : await client.responses.create(options);
    const calls = response.output.filter((item) => item.type === "function_call");
    input = [...input, ...response.output];
    for (const { call_id, arguments: given } of calls) {
      const output = calculator(JSON.parse(given));
      input.push({ type: "function_call_output", call_id, output });
    }
  } while (input.at(-1).type === "function_call_output");
  finish(`responses, streamed ${streamed}`, response.output_text);
}
