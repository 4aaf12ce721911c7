// Markdown within a block → DOM nodes. One pass: a marker without an end is searched for once.

import { el } from "./dom.js";
import { formula } from "./math/tex.js";

const SPECIAL = /[\\`*_~[!\n$<]|https?:\/\//g;
const BREAK = /<br ?\/?>/iy;
const SCRIPT = /<(su[bp])>([^<\n]{1,200})<\/\1>/iy;
const ADDRESS = /https?:\/\/[^\s<>"`]+/y;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const MAX_DEPTH = 8;
const MAX_LABEL = 1000;
const MAX_ADDRESS = 2000;

/** Append the nodes of `text` to `parent`. */
export function appendInline(parent, text, depth = 0) {
  if (depth > MAX_DEPTH) return parent.append(text);
  const scan = { text, missing: new Set(), depth };
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) parent.append(plain);
    plain = "";
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(at, next);
    if (next === text.length) break;
    const found = token(scan, next);
    if (found?.node) {
      flush();
      parent.append(found.node);
    }
    plain += found ? (found.text ?? "") : text[next];
    at = found ? found.end : next + 1;
  }
  flush();
}

/** What stands at a special character: a node or a text, and where it ends. */
function token(scan, at) {
  const { text } = scan;
  switch (text[at]) {
    case "$":
      return dollars(scan, at);
    case "\\":
      if (text[at + 1] === "(") return math(scan, at, "\\(", "\\)");
      if (text[at + 1] === "[") return math(scan, at, "\\[", "\\]");
      if (text[at + 1] === ")" || text[at + 1] === "]") return { text: text.slice(at, at + 2), end: at + 2 };
      return PUNCTUATION.test(text[at + 1] ?? "") ? { text: text[at + 1], end: at + 2 } : null;
    case "\n":
      return { node: el("br"), end: at + 1 };
    case "`":
      return code(scan, at);
    case "[":
      return link(scan, at);
    case "!":
      return text[at + 1] === "[" ? link(scan, at + 1) : null; // an image is a link: nothing is loaded
    case "<":
      return tag(scan, at);
    case "h":
      return address(text, at);
    default:
      return emphasis(scan, at);
  }
}

/** A formula between its delimiters, which stay, as all of it does, where the second is missing. */
function math({ text, missing }, at, open, close) {
  const end = missing.has(close) ? -1 : text.indexOf(close, at + open.length);
  if (end < 0) {
    missing.add(close);
    return { text: open, end: at + open.length };
  }
  const source = text.slice(at + open.length, end);
  const last = end + close.length;
  if (!source.trim()) return { text: text.slice(at, last), end: last };
  const display = open !== "\\(";
  const node = formula(source, display, text.slice(at, last));
  return { node: display ? el("span", { class: "formula display" }, node) : node, end: last };
}

/** $$…$$, or $…$ where it is no sum of money: no white space inside, no letter or digit outside. */
function dollars(scan, at) {
  const { text } = scan;
  if (text[at + 1] === "$") return math(scan, at, "$$", "$$");
  let end = at + 1;
  while (end < text.length && text[end] !== "$") end += text[end] === "\\" ? 2 : 1;
  const source = text.slice(at + 1, end);
  const isMath = end < text.length && source && source === source.trim() && !/[`]|\n\s*\n/.test(source) &&
    !/[\p{L}\p{N}]/u.test(text[at - 1] ?? "") && !/[\p{L}\p{N}]/u.test(text[end + 1] ?? "");
  if (!isMath) return { text: "$", end: at + 1 };
  return { node: formula(source, false, text.slice(at, end + 1)), end: end + 1 };
}

function code(scan, at) {
  const { text } = scan;
  let start = at;
  while (text[start] === "`") start += 1;
  const marker = text.slice(at, start);
  if (scan.missing.has(marker)) return { text: marker, end: start };
  let end = text.indexOf(marker, start);
  while (end >= 0 && text[end + marker.length] === "`") {
    while (text[end] === "`") end += 1;
    end = text.indexOf(marker, end);
  }
  if (end < 0) {
    scan.missing.add(marker);
    return { text: marker, end: start };
  }
  const inner = text.slice(start, end);
  const padded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
  return { node: el("code", {}, padded ? inner.slice(1, -1) : inner), end: end + marker.length };
}

const KINDS = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };

function emphasis(scan, at) {
  const { text } = scan;
  const char = text[at];
  const marker = text[at + 1] === char ? char + char : char;
  const tag = KINDS[marker];
  const inside = at + marker.length;
  const opens = tag && text[inside]?.trim() && !(char === "_" && /\w/.test(text[at - 1] ?? ""));
  const end = opens ? closing(scan, marker, inside) : -1;
  if (end < 0) return { text: marker, end: inside };
  const node = el(tag);
  appendInline(node, text.slice(inside, end), scan.depth + 1);
  return { node, end: end + marker.length };
}

/** Where the marker closes, or -1. */
function closing(scan, marker, from) {
  const { text, missing } = scan;
  if (missing.has(marker)) return -1;
  for (let end = text.indexOf(marker, from); end >= 0; ) {
    let run = end;
    while (text[run] === marker[0]) run += 1;
    const whole = marker.length === 1 ? (run - end) % 2 === 1 : run - end >= 2;
    const word = marker[0] === "_" && /\w/.test(text[run] ?? "");
    if (whole && !word && end > from && text[end - 1].trim()) return run - marker.length;
    end = text.indexOf(marker, run);
  }
  missing.add(marker);
  return -1;
}

function link(scan, at) {
  const { text, missing } = scan;
  if (missing.has("](")) return null;
  const middle = text.indexOf("](", at);
  if (middle < 0) {
    missing.add("](");
    return null;
  }
  const label = text.slice(at + 1, middle);
  if (label.length > MAX_LABEL || label.includes("[")) return null;
  const end = closingParenthesis(text, middle + 2);
  if (end < 0) return null;
  const target = safe(text.slice(middle + 2, end).trim().split(/\s+"/)[0]);
  if (!target) return null;
  const node = anchor(target);
  appendInline(node, label || target, scan.depth + 1);
  return { node, end: end + 1 };
}

function closingParenthesis(text, from) {
  let open = 0;
  for (let at = from; at < Math.min(text.length, from + MAX_ADDRESS); at += 1) {
    if (text[at] === "(") open += 1;
    else if (text[at] === ")" && open-- === 0) return at;
    else if (text[at] === "\n") return -1;
  }
  return -1;
}

/** The few tags that models write and that are no more than a mark: <br>, <sub>, <sup>, and <https://…>. */
function tag({ text, depth }, at) {
  BREAK.lastIndex = SCRIPT.lastIndex = at;
  const [line] = BREAK.exec(text) ?? [];
  if (line) return { node: el("br"), end: at + line.length };
  const [script, name, inner] = SCRIPT.exec(text) ?? [];
  if (script) {
    const node = el(name.toLowerCase());
    appendInline(node, inner, depth + 1);
    return { node, end: at + script.length };
  }
  const linked = text.startsWith("http", at + 1) ? address(text, at + 1) : null;
  return linked && text[linked.end] === ">" ? { ...linked, end: linked.end + 1 } : null;
}

function address(text, at) {
  ADDRESS.lastIndex = at;
  const found = ADDRESS.exec(text)?.[0].slice(0, MAX_ADDRESS).replace(/[.,;:!?'"*_)\]]{1,20}$/, "");
  const target = found && safe(found);
  if (!target) return null;
  const node = anchor(target);
  node.append(found);
  return { node, end: at + found.length };
}

function anchor(target) {
  return el("a", { href: target, target: "_blank", rel: "noopener noreferrer nofollow" });
}

/** An address that may be followed; null for javascript:, data: and the like. */
function safe(target) {
  try {
    const url = new URL(target);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}
