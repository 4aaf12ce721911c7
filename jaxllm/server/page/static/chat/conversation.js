// A conversation as data: what is kept, what is sent, and how chunks of an answer add up. No DOM.

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
function newId() {
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
    const { role, content, tool_call_id } = message;
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
  return { ...body, ...extra, stream: true, stream_options: { include_usage: true } };
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

/** A conversation from a file. Throws an Error unless it looks like one of ours. */
export function imported(value) {
  const isText = (each) => each === undefined || typeof each === "string";
  const call = (each) => isObject(each) && [each.id, each.name, each.arguments].every((text) => typeof text === "string");
  const calls = ({ tool_calls = [] }) => Array.isArray(tool_calls) && tool_calls.every(call);
  const message = (each) => isObject(each) && ["user", "assistant", "tool"].includes(each.role) && typeof each.content === "string" &&
    [each.reasoning, each.error, each.tool_call_id].every(isText) && calls(each);
  if (!isObject(value) || !Array.isArray(value.messages) || !value.messages.every(message)) {
    throw new Error("this file holds no conversations of this page");
  }
  const strings = Object.entries(isObject(value.settings) ? value.settings : {}).filter(([name, text]) => Object.hasOwn(NEUTRAL, name) && typeof text === "string");
  const messages = value.messages.map((each) => (each.role === "assistant" ? { ...newAnswer(), state: "done", ...each } : each));
  const kept = { ...newConversation(Object.fromEntries(strings)), messages, title: titleOf(String(value.title ?? "Imported")) };
  return { ...kept, updated: Math.min(Number(value.updated) || kept.updated, kept.updated) };
}
