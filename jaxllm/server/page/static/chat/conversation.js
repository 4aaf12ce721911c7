// A conversation as data: what is kept, what is sent, and how chunks of an answer add up. No DOM.

import { everyMessage } from "./branches.js";
import { withFiles } from "./files.js";

export const NEUTRAL = {
  model: "", system: "", thinking: "", temperature: "", top_p: "", top_k: "", min_p: "", max_tokens: "",
  seed: "", stop: "", presence_penalty: "", frequency_penalty: "", repetition_penalty: "",
  tools: "", tool_choice: "", format: "", schema: "", extra: "",
};
export const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed",
  "presence_penalty", "frequency_penalty", "repetition_penalty",
];
const TITLE = 60; // characters

/** An empty conversation with the settings given. */
export function newConversation(settings) {
  const now = Date.now();
  return { id: newId(), title: "New chat", created: now, updated: now, settings: { ...NEUTRAL, ...settings }, messages: [] };
}

/** A random id; `crypto.randomUUID` is missing on pages served over plain HTTP. */
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** The title that a conversation gets from its first message. */
export function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE ? `${line.slice(0, TITLE - 1)}…` : line || "New chat";
}

/** An answer that has not begun. */
export function newAnswer() {
  return { role: "assistant", content: "", reasoning: "", tool_calls: [], state: "streaming", sent: Date.now() };
}

/** Add a chunk of a streamed completion to an answer. */
export function addChunk(answer, chunk) {
  if (chunk.usage) answer.usage = chunk.usage;
  const choice = chunk.choices?.find(({ index }) => !index); // of several, the first is shown
  if (!choice) return;
  const delta = choice.delta ?? {};
  const thought = delta.reasoning_content ?? delta.reasoning ?? "";
  if (thought || delta.content || delta.tool_calls) answer.first ??= Date.now();
  if (thought) answer.reasoning += thought;
  if (delta.content) {
    if (answer.reasoning) answer.thought ??= Date.now();
    answer.content += delta.content;
  }
  for (const part of delta.tool_calls ?? []) addCall(answer.tool_calls, part);
  if (choice.finish_reason) answer.finish_reason = choice.finish_reason;
}

function addCall(calls, { index = 0, id, function: called = {} }) {
  calls[index] ??= { id: "", name: "", arguments: "" };
  if (id) calls[index].id = id;
  if (called.name) calls[index].name = called.name;
  if (called.arguments) calls[index].arguments += called.arguments;
}

/** The calls of the last answer that have no result yet. */
export function openCalls(messages) {
  const at = messages.findLastIndex((message) => message.role === "assistant");
  const answered = new Set(messages.slice(at + 1).map((message) => message.tool_call_id));
  return at < 0 ? [] : messages[at].tool_calls.filter((call) => !answered.has(call.id));
}

function wire(message) {
  if (message.role !== "assistant") {
    const { role, tool_call_id } = message;
    const content = withFiles(message.content, message.files);
    return tool_call_id === undefined ? { role, content } : { role, content, tool_call_id };
  }
  const { content, reasoning, tool_calls } = message;
  return {
    role: "assistant",
    content,
    ...(reasoning && { reasoning_content: reasoning }),
    ...(tool_calls.length && {
      tool_calls: tool_calls.map((call) => ({
        id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
      })),
    }),
  };
}

/** The body of the request for the next answer. Throws an Error that names the setting at fault. */
export function requestBody({ settings, messages }) {
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const body = { ...(settings.model && { model: settings.model }), messages: [...system, ...messages.map(wire)] };
  for (const name of NUMBERS) if (settings[name] !== "") body[name] = Number(settings[name]);
  const stop = settings.stop.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  if (settings.thinking) body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  const tools = json("Tools", settings.tools, Array.isArray, "a list of tools");
  if (tools?.length) {
    body.tools = tools;
    if (settings.tool_choice) body.tool_choice = settings.tool_choice;
  }
  if (settings.format === "json_object") body.response_format = { type: "json_object" };
  if (settings.format === "json_schema") {
    const schema = json("JSON schema", settings.schema, isObject, "an object") ?? {};
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  const extra = json("Other fields", settings.extra, isObject, "an object");
  return { ...body, ...extra, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** The JSON of a setting; undefined when it is empty. */
export function json(label, text, legal, wanted) {
  if (!text.trim()) return undefined;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`${label}: ${error.message}`);
  }
  if (!legal(value)) throw new Error(`${label}: this must be ${wanted}`);
  return value;
}

/** Why a setting cannot be sent, or "". */
export function problemOf(name, text) {
  const kinds = { tools: ["Tools", Array.isArray, "a list of tools"], schema: ["JSON schema", isObject, "an object"], extra: ["Other fields", isObject, "an object"] };
  if (!(name in kinds)) return "";
  const [label, legal, wanted] = kinds[name];
  try {
    json(label, text, legal, wanted);
    return "";
  } catch (error) {
    return error.message;
  }
}

/** The tokens of a conversation so far, as the server counted them; 0 before its first answer. */
export function tokensOf(messages) {
  const usage = messages.findLast((message) => message.usage)?.usage;
  return usage ? usage.prompt_tokens + usage.completion_tokens : 0;
}

/** All that was said in a conversation, in every version, to be searched. */
export function textOf({ title, messages }) {
  const parts = [...everyMessage(messages)].map(({ content, files = [] }) => [content, ...files.map(({ name }) => name)].join("\n"));
  return [title, ...parts].join("\n");
}

/** A conversation from a file. Throws an Error unless it looks like one of ours. */
export function imported(value) {
  if (!isObject(value) || !Array.isArray(value.messages) || !value.messages.every((each) => isMessage(each, 0))) {
    throw new Error("this file holds no conversations of this page");
  }
  const strings = Object.entries(isObject(value.settings) ? value.settings : {}).filter(([name, text]) => Object.hasOwn(NEUTRAL, name) && typeof text === "string");
  const kept = { ...newConversation(Object.fromEntries(strings)), messages: value.messages.map(completed), title: titleOf(String(value.title ?? "Imported")) };
  return { ...kept, updated: Math.min(Number(value.updated) || kept.updated, kept.updated) };
}

const MAX_NESTED = 50; // versions within versions

function isMessage(value, depth) {
  if (!isObject(value) || !["user", "assistant", "tool"].includes(value.role) || typeof value.content !== "string") return false;
  const isText = (each) => each === undefined || typeof each === "string";
  const isCall = (each) => isObject(each) && [each.id, each.name, each.arguments].every((text) => typeof text === "string");
  const isFile = (each) => isObject(each) && typeof each.name === "string" && typeof each.text === "string";
  const { tool_calls = [], files = [], fork, usage } = value;
  const isUsage = usage === undefined || (isObject(usage) && Number.isFinite(usage.prompt_tokens) && Number.isFinite(usage.completion_tokens));
  return [value.reasoning, value.error, value.tool_call_id, value.state, value.finish_reason].every(isText) && Array.isArray(tool_calls) && tool_calls.every(isCall) &&
    Array.isArray(files) && files.every(isFile) && isUsage && (fork === undefined || isFork(fork, depth + 1));
}

function isFork(fork, depth) {
  if (depth > MAX_NESTED || !isObject(fork) || !Array.isArray(fork.tails) || !Number.isInteger(fork.at) || fork.tails[fork.at] !== null) return false;
  return fork.tails.every((tail, at) => at === fork.at || (Array.isArray(tail) && tail.length > 0 && tail.every((each) => isMessage(each, depth))));
}

/** A message of a file with all that one of ours has. */
function completed(message) {
  const whole = message.role === "assistant" ? { ...newAnswer(), state: "done", ...message } : { ...message };
  for (const name of ["sent", "first", "thought", "ended"]) if (!Number.isFinite(whole[name])) delete whole[name];
  if (whole.usage) whole.usage = { prompt_tokens: whole.usage.prompt_tokens, completion_tokens: whole.usage.completion_tokens };
  if (message.fork) whole.fork = { at: message.fork.at, tails: message.fork.tails.map((tail) => tail?.map(completed) ?? null) };
  return whole;
}
