// Markdown → DOM nodes, while it grows. Blocks are parsed line by line without looking back, so all
// blocks but the last are final: an update parses and renders from the last block on.

import { CodeView } from "./code/highlight.js";
import { copyButton, el } from "./dom.js";
import { appendInline } from "./inline.js";
import { formula } from "./math/tex.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^ {0,3}([-*+]|(\d{1,9})[.)])(?:[ \t]+|$)/;
const DIVIDER = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MATH = /^[ \t]*(\$\$|\\\[|\\begin\{((?:equation|align|alignat|gather|multline|eqnarray|displaymath|flalign)\*?)\})/;
const TASK = /^\[([ xX])\][ \t]+/;
const MAX_LINE = 2000; // characters of a line that may begin a block other than a paragraph
const MAX_INLINE = 20_000; // characters of a block in which markers are looked for
const MAX_DEPTH = 8;

/** The kind of block that a line begins. */
function kindOf(line, next) {
  if (!line.trim()) return "blank";
  if (line.length > MAX_LINE) return "paragraph";
  if (FENCE.test(line)) return "fence";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "item";
  if (opensMath(line)) return "math";
  const divided = next !== undefined && next.length <= MAX_LINE && next.includes("-") && line.includes("|");
  return divided && DIVIDER.test(next) ? "table" : "paragraph";
}

/** What closes the formula that a line opens. */
function mathEnd([, open, environment]) {
  if (environment) return `\\end{${environment}}`;
  return open === "$$" ? "$$" : "\\]";
}

/** Whether a line begins a formula on lines of its own: nothing stands behind its end. */
function opensMath(line) {
  const opened = MATH.exec(line);
  if (!opened) return false;
  const close = mathEnd(opened);
  const end = line.indexOf(close, opened[0].length);
  return end < 0 || !line.slice(end + close.length).trim();
}

/** The blocks of some lines, each with the numbers of its first line and of the line after it. */
export function parse(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    const kind = kindOf(lines[at], lines[at + 1]);
    if (kind === "blank") {
      at += 1;
      continue;
    }
    const block = READERS[kind](lines, at);
    blocks.push({ kind, first: at, ...block });
    at = block.last;
  }
  return blocks;
}

/** Whether a line belongs to the item above it. */
function indented(line) {
  return (line.startsWith("  ") || line.startsWith("\t")) && line.trim();
}

/** The first line from `at` on for which `ends` holds. */
function until(lines, at, ends) {
  while (at < lines.length && !ends(lines[at], lines[at + 1])) at += 1;
  return at;
}

const READERS = {
  fence(lines, at) {
    const [, marker, language] = FENCE.exec(lines[at]);
    const indent = lines[at].search(/\S/);
    const end = until(lines, at + 1, (line) => {
      const bare = line.trim();
      return bare.length >= marker.length && bare.length < MAX_LINE && bare === marker[0].repeat(bare.length);
    });
    const text = lines.slice(at + 1, end).map((line) => (indent && !line.slice(0, indent).trim() ? line.slice(indent) : line));
    return { language: language.trim(), text: text.join("\n"), closed: end < lines.length, last: end + 1 };
  },
  heading(lines, at) {
    const [, marks, text] = HEADING.exec(lines[at]);
    return { level: marks.length, text: text.trim(), last: at + 1 };
  },
  math(lines, at) {
    const opened = MATH.exec(lines[at]);
    const close = mathEnd(opened);
    const closes = (line, from) => line.indexOf(close, from) >= 0;
    let end = at;
    if (!closes(lines[at], opened[0].length)) end = until(lines, at + 1, (line) => closes(line, 0) || !line.trim());
    const isClosed = end < lines.length && closes(lines[end], end === at ? opened[0].length : 0);
    const last = isClosed ? end + 1 : end;
    const written = lines.slice(at, last).join("\n");
    if (!isClosed) return { text: written, written, closed: false, last };
    const from = opened[2] ? 0 : opened[0].length;
    const to = written.lastIndexOf(close) + (opened[2] ? close.length : 0);
    return { text: written.slice(from, to), rest: written.slice(written.lastIndexOf(close) + close.length), written, closed: true, last };
  },
  rule: (lines, at) => ({ last: at + 1 }),
  quote(lines, at) {
    const last = until(lines, at, (line) => !QUOTE.test(line.slice(0, 8)));
    return { lines: lines.slice(at, last).map((line) => line.replace(QUOTE, "")), last };
  },
  item(lines, at) {
    const [marker, , number] = ITEM.exec(lines[at]);
    let last = at + 1;
    for (; last < lines.length; last += 1) {
      const line = lines[last];
      const belongs = line.trim()
        ? indented(line) || (lines[last - 1].trim() && kindOf(line) === "paragraph")
        : indented(lines[last + 1] ?? "");
      if (!belongs) break;
    }
    const width = Math.min(marker.length, 4);
    const rest = lines.slice(at + 1, last).map((line) => line.slice(Math.min(width, Math.max(0, line.search(/\S/)))));
    return { number, lines: [lines[at].slice(marker.length), ...rest], last };
  },
  table(lines, at) {
    const last = until(lines, at + 2, (line) => !line.includes("|") || !line.trim());
    const align = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : "start"));
    return { align, head: cells(lines[at]), rows: lines.slice(at + 2, last).map(cells), last };
  },
  paragraph(lines, at) {
    const last = until(lines, at + 1, (line, next) => kindOf(line, next) !== "paragraph");
    return { text: lines.slice(at, last).join("\n").trim(), last };
  },
};

/** The cells of a table's row. */
function cells(line) {
  const bare = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return bare.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function inline(parent, text) {
  if (text.length > MAX_INLINE) parent.append(text);
  else appendInline(parent, text);
  return parent;
}

/** "rtl" for a text whose first letter is written from the right. By hand, because `dir="auto"` looks through a whole list whenever
 * it grows. */
function direction(text) {
  const [letter] = /\p{L}/u.exec(text.slice(0, MAX_LINE)) ?? [];
  return letter && /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]/.test(letter) ? "rtl" : undefined;
}

/** The element of a block; an item's is its `li`. */
function render(block, depth) {
  switch (block.kind) {
    case "fence":
      return codeBlock(block);
    case "heading":
      return inline(el(`h${Math.min(6, block.level + 2)}`, { dir: direction(block.text) }), block.text.replace(/[ \t]#{1,6}$/, ""));
    case "math":
      return mathBlock(block);
    case "rule":
      return el("hr");
    case "quote":
      return fill(el("blockquote", { dir: direction(block.lines[0]) }), block.lines, depth);
    case "item":
      return item(block, depth);
    case "table":
      return table(block);
    default:
      return inline(el("p", { dir: direction(block.text) }), block.text);
  }
}

/** A formula that scrolls by itself where it is wide; its source until it is complete. */
function mathBlock({ text, rest, written, closed }) {
  if (!closed) return el("p", { class: "tex" }, written);
  const node = el("div", { class: "formula", tabindex: "0", role: "group", "aria-label": "Formula" }, formula(text, true, written.trim()));
  return rest.trim() ? el("div", {}, node, inline(el("p"), rest.trim())) : node;
}

const codeViews = new WeakMap(); // element of a code block → its CodeView

function codeBlock({ language, text }) {
  const code = el("code");
  const name = (/[^\s,{}:]+/.exec(language)?.[0] ?? "").slice(0, 40);
  const label = name || "text";
  const view = new CodeView(code, name);
  view.update(text);
  const bar = el("figcaption", {}, el("span", {}, label), copyButton("Copy code", () => view.text));
  const node = el("figure", { class: "code", dir: "ltr" }, bar, el("pre", { tabindex: "0", "aria-label": `Code, ${label}` }, code));
  codeViews.set(node, view);
  return node;
}

function item(block, depth) {
  const task = TASK.exec(block.lines[0]);
  const node = el("li", { class: task && "task" });
  if (task) {
    const done = task[1] !== " ";
    node.append(el("input", { type: "checkbox", disabled: true, checked: done, "aria-label": done ? "done" : "open" }));
  }
  const lines = task ? [block.lines[0].slice(task[0].length), ...block.lines.slice(1)] : block.lines;
  return fill(node, lines, depth);
}

function table({ align, head, rows }) {
  const row = (tag, texts) =>
    el("tr", {}, ...head.map((_, at) => inline(el(tag, { class: align[at], scope: tag === "th" && "col" }), texts[at] ?? "")));
  const body = el("table", { dir: direction(head.join(" ")) }, el("thead", {}, row("th", head)), el("tbody", {}, ...rows.map((texts) => row("td", texts))));
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, body);
}

/** Render lines into an element; a single paragraph stays without one of its own. */
function fill(parent, lines, depth) {
  if (depth >= MAX_DEPTH) return inline(parent, lines.join("\n"));
  const blocks = parse(lines);
  const place = new Place(parent, depth + 1);
  for (const [at, block] of blocks.entries()) {
    if (at === 0 && block.kind === "paragraph" && parent.tagName === "LI") inline(parent, block.text);
    else place.add(block);
  }
  return parent;
}

/** Where blocks are appended: items that follow each other share a list. */
class Place {
  #parent;
  #depth;

  constructor(parent, depth = 0) {
    this.#parent = parent;
    this.#depth = depth;
  }

  add(block) {
    const node = render(block, this.#depth);
    if (block.kind !== "item") {
      this.#parent.append(node);
      return node;
    }
    const tag = block.number === undefined ? "UL" : "OL";
    let list = this.#parent.lastElementChild;
    if (list?.tagName !== tag) {
      list = el(tag, { dir: direction(block.lines[0]), start: block.number > 1 && block.number });
      this.#parent.append(list);
    }
    list.append(node);
    return node;
  }

  remove(node) {
    const list = node.parentElement;
    node.remove();
    if (list !== this.#parent && !list.childElementCount) list.remove();
  }
}

/** A text in an element, rendered as it grows. */
export class MarkdownView {
  #place;
  #text = "";
  #start = 0; // of the blocks that may still change
  #tail = []; // their elements
  #open = null; // the CodeView of a code block that has no end yet

  constructor(parent) {
    this.parent = parent;
    this.#place = new Place(parent);
  }

  /** Show `text`, which continues the one before. */
  update(text) {
    if (text === this.#text) return;
    this.#text = text;
    const lines = text.slice(this.#start).split("\n");
    const blocks = parse(lines);
    if (this.#growCode(blocks)) return;
    for (const node of this.#tail) this.#place.remove(node);
    // A block that begins in an unfinished line may turn out to belong to the one before
    let final = Math.max(0, blocks.length - 1);
    while (final > 0 && blocks[final].first >= lines.length - 1) final -= 1;
    for (const block of blocks.slice(0, final)) this.#place.add(block);
    this.#tail = blocks.slice(final).map((block) => this.#place.add(block));
    if (final) this.#start += lines.slice(0, blocks[final].first).reduce((sum, line) => sum + line.length + 1, 0);
    const last = blocks.at(-1);
    const growing = blocks.length - final === 1 && last.kind === "fence" && !last.closed;
    this.#open = growing ? codeViews.get(this.#tail[0]) : null;
  }

  /** Append to a code block that is all there is to render; false when it is not. */
  #growCode(blocks) {
    const [block] = blocks;
    if (!this.#open || blocks.length !== 1 || block.kind !== "fence" || block.closed) return false;
    if (!block.text.startsWith(this.#open.text)) return false;
    this.#open.update(block.text);
    return true;
  }
}
