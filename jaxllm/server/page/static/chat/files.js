// Text files that go with a message, and how they stand in it.

export const MAX_FILES = 10; // of a message
const MAX_BYTES = 1 << 20; // of a file

/** A file as `{ name, text }`. Throws an Error that says why it cannot be sent. */
export async function readText(file) {
  if (/^(image|video|audio)\//.test(file.type) && file.type !== "image/svg+xml") {
    throw new Error(`“${file.name}” is ${/^[aeiou]/.test(file.type) ? "an" : "a"} ${file.type.split("/")[0]} file; only text can be sent.`);
  }
  if (file.size > MAX_BYTES) throw new Error(`“${file.name}” has ${sizeOf(file.size)}; a file may have ${sizeOf(MAX_BYTES)}.`);
  const text = decode(new Uint8Array(await file.arrayBuffer()));
  if (text === null) throw new Error(`“${file.name}” is no text file.`);
  if (!text.trim()) throw new Error(`“${file.name}” is empty.`);
  return { name: file.name.slice(-200), text };
}

/** The text of UTF-8, or of UTF-16 that says so; null when it is neither. */
function decode(bytes) {
  const mark = bytes[0] === 0xff && bytes[1] === 0xfe ? "utf-16le" : bytes[0] === 0xfe && bytes[1] === 0xff ? "utf-16be" : "utf-8";
  try {
    const text = new TextDecoder(mark, { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text.replaceAll("\r\n", "\n");
  } catch {
    return null;
  }
}

/** What the model is sent: each file in a fence that its text cannot end, then the message. */
export function withFiles(content, files = []) {
  const parts = files.map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`{3,}/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `File: ${name}\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, content].filter(Boolean).join("\n\n");
}

/** A size for people. */
export function sizeOf(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  if (bytes < 1 << 20) return `${(bytes / 1024).toFixed(bytes < 10_240 ? 1 : 0)} KiB`;
  return `${(bytes / (1 << 20)).toFixed(bytes % (1 << 20) ? 1 : 0)} MiB`;
}
