// Code in colours, while it grows: a line that is complete is coloured once, and the mode at its end is kept.

import { el } from "../dom.js";
import { LANGUAGES } from "./languages.js";

const MAX_LINE = 2000; // characters of a line in which tokens are looked for
const MAX_CODE = 300_000; // characters of a block that are coloured

/** One pattern for all rules of a mode, with a group for each. */
function compiled(language) {
  const modes = Object.entries(language).map(([name, rules]) => {
    const isUnicode = rules.some(([pattern]) => pattern.unicode);
    const pattern = new RegExp(rules.map(([rule]) => `(${rule.source})`).join("|"), isUnicode ? "gu" : "g");
    return [name, { rules, pattern }];
  });
  return new Map(modes);
}

const cache = new Map(); // language → its compiled modes

function modesOf(name) {
  const language = LANGUAGES.get(name);
  if (!language) return null;
  if (!cache.has(language)) cache.set(language, compiled(language));
  return cache.get(language);
}

/** A text with its kind: [kind, text], and the mode behind a line that begins in `mode`. */
function tokens(modes, line, mode) {
  const found = [];
  const add = (kind, text) => {
    const last = found.at(-1);
    if (last && last[0] === kind) last[1] += text;
    else if (text) found.push([kind, text]);
  };
  for (let at = 0; at < line.length; ) {
    const { rules, pattern } = modes.get(mode);
    pattern.lastIndex = at;
    const match = pattern.exec(line);
    if (!match || !match[0]) {
      add("", line.slice(at));
      break;
    }
    add("", line.slice(at, match.index));
    const [, kind, next] = rules[match.findIndex((text, group) => group > 0 && text !== undefined) - 1];
    at = match.index + match[0].length;
    add(typeof kind === "function" ? kind(match[0], line[at]) : kind, match[0]);
    mode = next ?? mode;
  }
  return { found, mode };
}

/** The text of a code block in an element. */
export class CodeView {
  #modes;
  #mode = "main"; // at the end of the complete lines
  #done = 0; // characters of the complete lines
  #rest = []; // nodes of the last line

  constructor(node, language) {
    this.node = node;
    this.#modes = modesOf(language.toLowerCase());
  }

  text = "";

  /** Show `text`, which continues the one before. */
  update(text) {
    this.text = text;
    for (const each of this.#rest) each.remove();
    const end = text.lastIndexOf("\n") + 1;
    if (end > this.#done) {
      for (const line of text.slice(this.#done, end - 1).split("\n")) this.#mode = this.#append(line, "\n").mode;
      this.#done = end;
    }
    this.#rest = end < text.length ? this.#append(text.slice(end), "").nodes : [];
  }

  /** Append the nodes of a line; the mode behind it. */
  #append(line, close) {
    const isPlain = !this.#modes || line.length > MAX_LINE || this.#done > MAX_CODE;
    const { found, mode } = isPlain ? { found: [["", line]], mode: this.#mode } : tokens(this.#modes, line, this.#mode);
    const nodes = found.filter(([, text]) => text).map(([kind, text]) => (kind ? el("span", { class: `token ${kind}` }, text) : document.createTextNode(text)));
    if (close) nodes.push(document.createTextNode(close));
    this.node.append(...nodes);
    return { nodes, mode };
  }
}
