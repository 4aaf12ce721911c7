// anthropic-sdk for JavaScript: messages with a tool, whole and streamed.
import Anthropic from "@anthropic-ai/sdk";
import { ABOUT, PARAMETERS, QUESTION, URL, calculator, finish } from "./task.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: "none", maxRetries: 0 });
const tools = [{ name: "calculator", description: ABOUT, input_schema: PARAMETERS }];

for (const streamed of [false, true]) {
  const messages = [{ role: "user", content: QUESTION }];
  let message;
  do {
    const options = { model: "demo", max_tokens: 200, messages, tools };
    message = streamed
      ? await client.messages.stream(options).finalMessage()
      : await client.messages.create(options);
    const calls = message.content.filter((block) => block.type === "tool_use");
    const results = calls.map(({ id, input }) => ({
      type: "tool_result",
      tool_use_id: id,
      content: calculator(input),
    }));
    messages.push({ role: "assistant", content: message.content });
    messages.push({ role: "user", content: results });
  } while (message.stop_reason === "tool_use");
  finish(`messages, streamed ${streamed}`, message.content.find(({ type }) => type === "text").text);
}
