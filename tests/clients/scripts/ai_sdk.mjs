// Vercel's ai-sdk over its three providers: text with tools, whole and streamed, and an object.
import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { ABOUT, QUESTION, URL, calculator, finish } from "./task.mjs";

const options = { baseURL: `${URL}/v1`, apiKey: "none" };
const compatible = createOpenAICompatible({
  ...options,
  name: "local",
  supportsStructuredOutputs: true,
  includeUsage: true,
})("demo");
const models = {
  compatible,
  responses: createOpenAI(options)("demo"),
  messages: createAnthropic(options)("demo"),
};
const inputSchema = z.object({ expression: z.string() });
const tools = { calculator: tool({ description: ABOUT, inputSchema, execute: calculator }) };

for (const [name, model] of Object.entries(models)) {
  const request = { model, tools, prompt: QUESTION, stopWhen: stepCountIs(4), maxRetries: 0 };
  finish(name, (await generateText(request)).text);
  const streamed = streamText(request);
  finish(`${name}, streamed`, await streamed.text);
  assert((await streamed.totalUsage).outputTokens > 0);
}
const schema = z.object({ name: z.string(), age: z.number().int() });
const prompt = "Make JSON: name Ann, age 30.";
const { object } = await generateObject({ model: compatible, schema, prompt });
assert(typeof object.name === "string" && Number.isInteger(object.age));
