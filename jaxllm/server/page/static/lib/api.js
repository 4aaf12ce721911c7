// The server's API. Addresses are relative to this file, so the page works below any path.

export const BASE = new URL("../..", import.meta.url);
const KEY = `jaxllm.key ${BASE.pathname}`;

/** An error with the server's own message; status 0 means that there was no answer. */
export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

let unstored = ""; // the key where the browser refuses storage

function stored(storage) {
  try {
    return globalThis[storage].getItem(KEY);
  } catch {
    return null;
  }
}

/** The API key: kept for this tab, or in this browser when asked to. */
export const key = {
  get: () => stored("sessionStorage") ?? stored("localStorage") ?? unstored,
  remembered: () => stored("localStorage") !== null,
  set(value, remember) {
    unstored = value;
    try {
      sessionStorage.removeItem(KEY);
      localStorage.removeItem(KEY);
      if (value) (remember ? localStorage : sessionStorage).setItem(KEY, value);
    } catch {
      // it lasts as long as the page
    }
  },
};

/** A successful response. Throws ApiError. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, BASE), {
      method: body === undefined ? "GET" : "POST",
      body: body === undefined ? undefined : JSON.stringify(body),
      headers,
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0, "unreachable");
  }
  if (response.ok) return response;
  const reply = await response.json().catch(() => null);
  const found = reply?.error ?? {};
  throw new ApiError(found.message ?? `The server answered ${response.status}.`, response.status, found.code);
}

/** The events of a stream, each with its name, "" for most, and its JSON value, until [DONE]. Throws ApiError when it breaks off. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const [, name = "", data = ""] = /^(?:event: (.*)\n)?data: (.*)$/.exec(part) ?? [];
        if (data === "[DONE]") return;
        if (data) yield { name, value: JSON.parse(data) };
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection to the server was lost.", 0, "lost");
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new ApiError("The server ended the stream early.", 0, "lost");
}

/** The chunks of a streamed chat completion. Throws ApiError, also for an error inside the stream. */
export async function* chat(body, signal) {
  for await (const { value: chunk } of events(await request("v1/chat/completions", { body, signal }))) {
    if (chunk.error) throw new ApiError(chunk.error.message, 200, chunk.error.code);
    yield chunk;
  }
}

/** The served models. */
export async function models() {
  return (await (await request("v1/models")).json()).data;
}

/** How many tokens a text has. */
export async function countTokens(model, prompt) {
  return (await (await request("tokenize", { body: { ...(model && { model }), prompt } })).json()).count;
}
