// TeX's mathematics → MathML, which browsers lay out by themselves. A command that is not known is shown as its source; a formula
// that cannot be read at all, such as one with a brace too many, is shown as its source as a whole.

import { el } from "../dom.js";
import { ACCENTS, DELIMITERS, ENVIRONMENTS, FUNCTIONS, INTEGRALS, LARGE, LETTERS, LIMITS, OPERATORS, SIZES, SPACES, STYLES, styled, UNDER, UPRIGHT } from "./symbols.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MAX_SOURCE = 10_000; // characters of a formula
const MAX_DEPTH = 60;
const UNBROKEN = 9; // elements of a formula within a text that stay on one line
const BREAKS = /^[=<>≤≥≠≈≡∼→⇒⟹⇔⟺←∈+−,;]$/;
const TOKEN = /\\(?:(?:operatorname|hspace|vspace|tag)\*|[A-Za-z]+|[\s\S])|[0-9]+(?:\.[0-9]+)?|[\s\S]/gu;
const NUMBER = /^[0-9]/;
const FENCES = new Set(["(", ")", "[", "]", "|"]);
const TEXTS = new Set(["text", "textrm", "textnormal", "textit", "textsf", "texttt", "mbox", "hbox", "textup", "tag"]);
const DROPPED = new Set(["limits", "nolimits", "displaylimits", "nonumber", "notag", "hline", "left.", "right.", "normalsize", "small", "large", "Large", "centering", "allowbreak", "mathstrut", "strut", "protect", "relax"]);
const ARGUMENT_DROPPED = new Set(["label", "hspace", "vspace", "kern", "require", "phantomsection"]);
const CLASSES = new Map(Object.entries({ boxed: "boxed", fbox: "boxed", cancel: "cancel", bcancel: "cancel", xcancel: "cancel", mathop: "", mathllap: "", mathrlap: "", mathclap: "", llap: "", rlap: "", mathclose: "", mathopen: "", mathbin: "", mathrel: "", mathord: "", mathinner: "", smash: "", ensuremath: "", underbar: "" }));
const NEGATED = new Map(Object.entries({ "=": "≠", "∈": "∉", "<": "≮", ">": "≯", "≤": "≰", "≥": "≱", "∃": "∄", "⊂": "⊄", "⊆": "⊈", "≡": "≢", "∼": "≁", "≈": "≉", "∣": "∤", "∥": "∦" }));

/** A formula as an element: `math`, or its source with the delimiters it had. */
export function formula(source, display, written) {
  try {
    if (source.length > MAX_SOURCE) throw new SyntaxError("too long");
    const content = new Parser(source).whole();
    if (!display && content.length > UNBROKEN) return broken(content);
    return node("math", { display: display ? "block" : "inline", alttext: source.trim() }, ...content);
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    return el("code", { class: display ? "tex display" : "tex" }, written);
  }
}

/** A long formula within a text, in parts: browsers break no line within one. */
function broken(content) {
  const parts = [[]];
  for (const each of content) {
    parts.at(-1).push(each);
    if (each.localName !== "mo" || !BREAKS.test(each.textContent)) continue;
    if (parts.at(-1).length > 1) each.setAttribute("form", /[,;]/.test(each.textContent) ? "postfix" : "infix");
    parts.push([]);
  }
  const formulas = parts.filter((nodes) => nodes.length).map((nodes) => node("math", {}, ...nodes));
  return el("span", { class: "formula" }, ...formulas.flatMap((each) => [each, el("wbr")]));
}

function node(tag, properties = {}, ...children) {
  const element = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(properties)) if (value !== undefined) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** One element of several. */
function row(nodes) {
  return nodes.length === 1 ? nodes[0] : node("mrow", {}, ...nodes);
}

const operator = (text, properties) => node("mo", properties, text);
const space = (width) => node("mspace", { width: `${width}em` });
const fence = (text, properties) => operator(text, { fence: "true", stretchy: "false", ...properties });

/** Reads tokens from the left to the right, without looking back. */
class Parser {
  #tokens;
  #at = 0;
  #depth = 0;
  #style = ""; // the alphabet of letters

  constructor(source) {
    this.#tokens = source.match(TOKEN) ?? [];
  }

  /** All of it. Throws SyntaxError. */
  whole() {
    const rows = this.#rows(() => this.#at >= this.#tokens.length);
    if (rows.length === 1 && rows[0].length === 1) return rows[0][0];
    return [this.#table(rows, "rl", true)];
  }

  // --- tokens

  #skipSpace() {
    while (/^\s$/.test(this.#tokens[this.#at] ?? "")) this.#at += 1;
  }

  /** The next token that is no white space; undefined at the end. */
  get #next() {
    this.#skipSpace();
    return this.#tokens[this.#at];
  }

  #take() {
    const token = this.#next;
    if (token === undefined) throw new SyntaxError("an argument is missing");
    this.#at += 1;
    return token;
  }

  #takes(token) {
    if (this.#next !== token) return false;
    this.#at += 1;
    return true;
  }

  /** The source of an argument in braces, as it is. */
  #raw(open = "{", close = "}") {
    if (!this.#takes(open)) return this.#take();
    const from = this.#at;
    for (let depth = 0; this.#at < this.#tokens.length; this.#at += 1) {
      const token = this.#tokens[this.#at];
      if (token === close && depth === 0) return this.#tokens.slice(from, this.#at++).join("");
      if (token === "{") depth += 1;
      if (token === "}") depth -= 1;
    }
    throw new SyntaxError("a brace is open");
  }

  // --- rows

  /** Elements until `ends` holds for the next token. */
  #list(ends) {
    this.#depth += 1;
    if (this.#depth > MAX_DEPTH) throw new SyntaxError("too deep");
    const nodes = [];
    while (!ends(this.#next)) {
      const token = this.#next;
      if (token === undefined) throw new SyntaxError("something is open");
      if (token === "\\over" || token === "\\choose") {
        this.#at += 1;
        const below = row(this.#list(ends));
        const above = row(nodes.splice(0));
        nodes.push(...(token === "\\over" ? [node("mfrac", {}, above, below)] : binomial(above, below)));
      } else if (/^\\(display|text|script)style$/.test(token)) {
        this.#at += 1;
        const style = token === "\\displaystyle" ? "true" : "false";
        nodes.push(node("mstyle", { displaystyle: style }, ...this.#list(ends)));
      } else {
        const before = nodes.at(-1)?.localName ?? "mo";
        if (isFunction(token) && before !== "mo" && before !== "mspace") nodes.push(space(0.167));
        nodes.push(...this.#scripted());
      }
    }
    this.#depth -= 1;
    return nodes;
  }

  /** Rows of cells, until `ends` holds. */
  #rows(ends) {
    const rows = [[]];
    while (true) {
      const cell = this.#list((token) => ends(token) || token === "&" || token === "\\\\" || token === "\\cr");
      rows.at(-1).push(cell);
      if (ends(this.#next)) break;
      if (this.#take() !== "&") {
        this.#takes("*");
        if (this.#next === "[" && /^\[[\d.]*(pt|em|ex|mm|cm)\]/.test(this.#tokens.slice(this.#at, this.#at + 8).join(""))) this.#raw("[", "]");
        rows.push([]);
      }
    }
    const last = rows.at(-1);
    if (rows.length > 1 && last.length === 1 && !last[0].length) rows.pop();
    return rows;
  }

  /** A table whose columns are aligned in turn as `columns` says: l, r or c. */
  #table(rows, columns, isDisplay = false) {
    const cell = (nodes, at) => node("mtd", { class: columns[at % columns.length] }, ...nodes);
    const lines = rows.map((cells) => node("mtr", {}, ...cells.map(cell)));
    return node("mtable", isDisplay ? { class: "aligned", displaystyle: "true" } : {}, ...lines);
  }

  // --- scripts

  /** An element with what is below and above it. */
  #scripted() {
    const first = this.#next;
    const bare = first === "^" || first === "_" || first === "'";
    const base = bare ? [node("mrow")] : this.#atom();
    if (!base.length) return base;
    let places = first.startsWith("\\") ? limitsOf(first.slice(1)) : null;
    let below;
    let above;
    let primes = "";
    for (;;) {
      if (this.#takes("\\limits")) places = "fixed";
      else if (this.#takes("\\nolimits")) places = null;
      else if (this.#takes("'")) primes += "′";
      else if (this.#next === "_" && !below) below = this.#script();
      else if (this.#next === "^" && !above) above = this.#script();
      else break;
    }
    if (primes) above = above ? node("mrow", {}, operator(primes), above) : operator(primes);
    const [last] = base.splice(-1);
    base.push(attached(last, below, above, places));
    if (isFunction(first) && !/^(?:[([{)\]},.;^_]|\\(?:left|big|right|\}|\)|,)|&|\\\\)/.test(this.#next ?? ")")) base.push(space(0.167));
    return base;
  }

  #script() {
    this.#at += 1;
    return this.#argument();
  }

  /** An argument: a group in braces, or the next token. */
  #argument() {
    const token = this.#next;
    if (token !== undefined && NUMBER.test(token) && token.length > 1) {
      this.#tokens.splice(this.#at, 1, ...token); // \frac12 is a half
    }
    if (token === undefined || token === "}" || token === "&" || token === "^" || token === "_") throw new SyntaxError("an argument is missing");
    const nodes = this.#atom();
    return nodes.length === 1 ? nodes[0] : node("mrow", {}, ...nodes);
  }

  #group() {
    const nodes = this.#list((token) => token === "}");
    this.#at += 1;
    return nodes;
  }

  // --- elements

  #atom() {
    const token = this.#take();
    if (token === "{") return [node("mrow", {}, ...this.#group())];
    if (token === "}" || token === "&") throw new SyntaxError(`unexpected ${token}`);
    if (token.startsWith("\\")) return this.#command(token.slice(1));
    if (NUMBER.test(token)) return [node("mn", {}, this.#lettered(token))];
    if (token === "~") return [space(0.25)];
    if (token === "-") return [operator("−")];
    if (token === "*") return [operator("∗")];
    if (token === "/") return [operator("/", { lspace: "0", rspace: "0" })];
    if (FENCES.has(token)) return [fence(token)];
    if (/^[A-Za-z]$/.test(token)) return [this.#letter(token)];
    if (/^\p{L}$/u.test(token)) return [/^[\u0370-\u03ff]$/.test(token) ? this.#letter(token) : node("mtext", {}, token)];
    return [operator(token)];
  }

  #lettered(text) {
    return this.#style ? [...text].map((char) => styled(char, this.#style)).join("") : text;
  }

  #letter(char) {
    if (this.#style === "normal") return node("mi", { mathvariant: "normal" }, char);
    return this.#style ? node("mi", { mathvariant: "normal" }, styled(char, this.#style)) : node("mi", {}, char);
  }

  #command(name) {
    if (LETTERS.has(name)) return [this.#letter(LETTERS.get(name))];
    if (UPRIGHT.has(name)) return [node("mi", { mathvariant: "normal" }, this.#lettered(UPRIGHT.get(name)))];
    if (LARGE.has(name)) return [operator(LARGE.get(name), INTEGRALS.has(name) ? {} : { movablelimits: "true" })];
    if (LIMITS.has(name)) return [operator(LIMITS.get(name), { movablelimits: "true", lspace: "0", rspace: "0" })];
    if (FUNCTIONS.has(name)) return [node("mi", {}, name)];
    if (SPACES.has(name)) return [space(SPACES.get(name))];
    if (SIZES.has(name)) return [this.#sized(SIZES.get(name))];
    if (STYLES.has(name)) return [this.#styled(STYLES.get(name))];
    if (TEXTS.has(name)) return this.#text(name);
    if (ACCENTS.has(name)) return [this.#accent("mover", ...ACCENTS.get(name))];
    if (UNDER.has(name)) return [this.#accent("munder", ...UNDER.get(name))];
    if (CLASSES.has(name)) return [node("mrow", { class: CLASSES.get(name) || undefined }, this.#argument())];
    if (DROPPED.has(name)) return [];
    if (ARGUMENT_DROPPED.has(name)) return this.#dropped();
    if (Object.hasOwn(COMMANDS, name)) return COMMANDS[name](this.#reader);
    if (OPERATORS.has(name)) return [operator(OPERATORS.get(name))];
    if (DELIMITERS.has(name)) return [fence(DELIMITERS.get(name))];
    if (/^[%$#&_]$/.test(name)) return [node("mi", { mathvariant: "normal" }, name)];
    return [node("mtext", { class: "unknown" }, this.#unknown(name))];
  }

  /** The source of a command that is not known, with its arguments. */
  #unknown(name) {
    let source = `\\${name}`;
    while (this.#next === "{") source += `{${this.#raw()}}`;
    return source;
  }

  /** What the commands of the table below may read. */
  get #reader() {
    return {
      argument: () => this.#argument(),
      optional: () => (this.#takes("[") ? row(this.#list((token) => token === "]")) : null),
      close: () => (this.#at += 1),
      raw: (...marks) => this.#raw(...marks),
      peek: () => this.#next,
      operatorname: () => this.#operatorname(),
      environment: () => this.#environment(),
      paired: () => this.#paired(),
      delimiter: () => this.#delimiter(),
      stacked: () => this.#stacked(),
      atom: () => this.#atom(),
    };
  }

  #dropped() {
    this.#takes("*");
    this.#raw();
    return [];
  }

  #styled(style) {
    const outer = this.#style;
    this.#style = style;
    const content = this.#argument();
    this.#style = outer;
    const letters = [...content.children];
    const isWord = style === "normal" && letters.length > 1 && letters.every((each) => each.localName === "mi");
    return isWord ? node("mi", {}, content.textContent) : content;
  }

  #text(name) {
    const text = this.#raw().replaceAll(/\\([%$#&_{} ])/g, "$1").replaceAll("~", "\u00a0").replaceAll(/^\s|\s$/g, "\u00a0");
    const parts = text.split(/\$([^$]*)\$/); // formulas within the text
    const nodes = parts.flatMap((part, at) => {
      if (at % 2) return [row(new Parser(part).#list((token) => token === undefined))];
      return part ? [node("mtext", {}, part)] : [];
    });
    return name === "tag" ? [space(2), operator("(", { stretchy: "false" }), ...nodes, operator(")", { stretchy: "false" })] : nodes;
  }

  #accent(tag, mark, stretchy = false) {
    return node(tag, tag === "mover" ? { accent: "true" } : { accentunder: "true" }, this.#argument(), operator(mark, { stretchy: String(stretchy) }));
  }

  #operatorname() {
    const name = this.#raw().replaceAll(/\\[,;:! ]/g, " ").replaceAll(/[\\{}]/g, "");
    return node("mi", { mathvariant: "normal" }, name);
  }

  // --- delimiters

  #delimiter() {
    const token = this.#take();
    if (token === ".") return "";
    if (token === "<") return "⟨";
    if (token === ">") return "⟩";
    if (!token.startsWith("\\")) return token;
    const name = token.slice(1);
    const found = DELIMITERS.get(name) ?? OPERATORS.get(name);
    if (found === undefined) throw new SyntaxError(`${token} is no delimiter`);
    return found;
  }

  #sized(size) {
    return fence(this.#delimiter(), { stretchy: "true", symmetric: "true", minsize: `${size}em`, maxsize: `${size}em` });
  }

  /** \left … \middle … \right: all as high as what is between them. */
  #paired() {
    const grown = { stretchy: "true", symmetric: "true" };
    const nodes = [fence(this.#delimiter(), { ...grown, form: "prefix" })];
    for (;;) {
      nodes.push(...this.#list((token) => token === "\\right" || token === "\\middle"));
      const isLast = this.#take() === "\\right";
      nodes.push(fence(this.#delimiter(), { ...grown, form: isLast ? "postfix" : "infix" }));
      if (isLast) return node("mrow", {}, ...nodes.filter((each) => each.localName !== "mo" || each.textContent));
    }
  }

  // --- environments

  #environment() {
    const written = this.#raw();
    const name = written.replace(/\*$/, "");
    if (!ENVIRONMENTS.has(name)) throw new SyntaxError(`the environment ${name} is not known`);
    const [before, after, aligned = ""] = ENVIRONMENTS.get(name);
    let columns = aligned;
    if (name === "array" || name === "subarray") columns = this.#raw().replaceAll(/[^lcr]/g, "");
    if (name.endsWith("at")) this.#raw();
    if (name.endsWith("matrix") && this.#next === "[") columns = this.#raw("[", "]").replaceAll(/[^lcr]/g, "");
    const rows = this.#rows((token) => token === "\\end");
    this.#at += 1;
    if (this.#raw() !== written) throw new SyntaxError("environments overlap");
    const table = this.#table(rows, columns, !/matrix|array|cases/.test(name));
    const grown = { stretchy: "true", symmetric: "true" };
    return node("mrow", {}, ...(before ? [fence(before, { ...grown, form: "prefix" })] : []), table, ...(after ? [fence(after, { ...grown, form: "postfix" })] : []));
  }

  #stacked() {
    if (!this.#takes("{")) throw new SyntaxError("an argument is missing");
    const rows = this.#rows((token) => token === "}");
    this.#at += 1;
    return this.#table(rows, "");
  }
}

/** Whether a token names a function, which stands apart from letters beside it. */
function isFunction(token) {
  const name = token.slice(1);
  return token.startsWith("\\") && (FUNCTIONS.has(name) || LIMITS.has(name) || name === "operatorname");
}

/** "movable" where limits go below and above in displays, "fixed" where they always do, else null. */
function limitsOf(name) {
  if ((LARGE.has(name) && !INTEGRALS.has(name)) || LIMITS.has(name)) return "movable";
  if (/^(over|under)(brace|bracket)$|^operatorname\*$|^stackrel$/.test(name)) return "fixed";
  return null;
}

/** `base` with `below` and `above` it, or as scripts. */
function attached(base, below, above, places) {
  if (!below && !above) return base;
  if (places === "fixed" && base.localName === "mo") base.setAttribute("movablelimits", "false");
  const isIntegral = !places && base.localName === "mo" && /^[∫∬∭∮∯]$/.test(base.textContent);
  if (isIntegral && above) above = node("mrow", {}, space(0.25), above); // fonts let the sign lean into its upper limit
  const names = places ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
  if (below && above) return node(names[2], {}, base, below, above);
  return below ? node(names[0], {}, base, below) : node(names[1], {}, base, above);
}

function binomial(above, below) {
  return [node("mrow", {}, operator("("), node("mfrac", { linethickness: "0" }, above, below), operator(")"))];
}

function fraction(displaystyle) {
  return ({ argument }) => {
    const above = argument();
    const part = node("mfrac", {}, above, argument());
    return [displaystyle ? node("mstyle", { displaystyle }, part) : part];
  };
}

/** Commands with arguments of their own: what they read → elements. */
const COMMANDS = {
  frac: fraction(""),
  dfrac: fraction("true"),
  cfrac: fraction("true"),
  tfrac: fraction("false"),
  binom: ({ argument }) => binomial(argument(), argument()),
  dbinom: ({ argument }) => binomial(argument(), argument()),
  tbinom: ({ argument }) => binomial(argument(), argument()),
  sqrt: ({ argument, optional, close }) => {
    const index = optional();
    if (index) close();
    const radicand = argument();
    return [index ? node("mroot", {}, radicand, index) : node("msqrt", {}, radicand)];
  },
  overset: ({ argument }) => {
    const above = argument();
    return [node("mover", {}, argument(), above)];
  },
  underset: ({ argument }) => {
    const below = argument();
    return [node("munder", {}, argument(), below)];
  },
  stackrel: ({ argument }) => {
    const above = argument();
    return [node("mover", {}, argument(), above)];
  },
  xrightarrow: ({ argument, optional, close }) => arrow("→", argument, optional, close),
  xleftarrow: ({ argument, optional, close }) => arrow("←", argument, optional, close),
  not: ({ atom }) => {
    const nodes = atom();
    const [first] = nodes;
    first.textContent = NEGATED.get(first.textContent) ?? `${first.textContent}\u0338`;
    return nodes;
  },
  operatorname: ({ operatorname }) => [operatorname()],
  "operatorname*": ({ operatorname }) => [operatorname()],
  left: ({ paired }) => [paired()],
  begin: ({ environment }) => [environment()],
  substack: ({ stacked }) => [stacked()],
  phantom: ({ argument }) => [node("mphantom", {}, argument())],
  hphantom: ({ argument }) => [node("mphantom", {}, argument())],
  vphantom: ({ argument }) => [node("mphantom", {}, argument())],
  color: ({ raw, peek, argument }) => {
    raw();
    return peek() === "{" ? [argument()] : [];
  },
  colorbox: ({ raw, argument }) => {
    raw();
    return [argument()];
  },
  abs: ({ argument }) => enclosed("|", argument(), "|"),
  norm: ({ argument }) => enclosed("‖", argument(), "‖"),
  ket: ({ argument }) => enclosed("|", argument(), "⟩"),
  bra: ({ argument }) => enclosed("⟨", argument(), "|"),
  braket: ({ argument }) => enclosed("⟨", argument(), "⟩"),
  ce: ({ raw }) => new Parser(chemistry(raw())).whole(),
  textcolor: ({ raw, argument }) => {
    raw();
    return [argument()];
  },
  pmod: ({ argument }) => [space(0.444), fence("("), node("mi", {}, "mod"), space(0.333), argument(), fence(")")],
  bmod: () => [operator("mod", { lspace: "0.222em", rspace: "0.222em" })],
  mod: ({ argument }) => [space(0.444), node("mi", {}, "mod"), space(0.333), argument()],
};

function enclosed(before, content, after) {
  const grown = { stretchy: "true", symmetric: "true" };
  return [node("mrow", {}, fence(before, { ...grown, form: "prefix" }), content, fence(after, { ...grown, form: "postfix" }))];
}

/** A chemical formula, such as 2H2O -> 2H2 + O2, as TeX. */
function chemistry(text) {
  const tex = text
    .replaceAll(/<=>|<-->/g, "\\rightleftharpoons ")
    .replaceAll(/<-/g, "\\leftarrow ")
    .replaceAll(/->/g, "\\rightarrow ")
    .replaceAll(/([A-Za-z)\]])(\d+)/g, "$1_{$2}")
    .replaceAll(/\^\{?(\d*[+-])\}?/g, "^{$1}");
  return `\\mathrm{${tex}}`;
}

function arrow(mark, argument, optional, close) {
  const below = optional();
  if (below) close();
  const above = argument();
  const base = operator(mark, { stretchy: "true" });
  return [below ? node("munderover", {}, base, below, above) : node("mover", {}, base, above)];
}
