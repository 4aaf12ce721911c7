// Tool calls of an answer, with a form to answer the open ones by hand.

import { el, icon } from "../lib/dom.js";
import { onEnter } from "../lib/a11y.js";
import { CodeView } from "../lib/code/highlight.js";

/** The calls of one answer. `onResults` gets a result per open call, by its id. */
export class ToolCalls {
  #cards = [];

  constructor(onResults) {
    this.list = el("div");
    this.send = el("button", { type: "submit", class: "primary" }, "Send results");
    this.node = el("form", { class: "calls", hidden: true, onsubmit: (event) => this.#submit(event) }, this.list, this.send);
    this.onResults = onResults;
    this.results = new Map(); // of the calls that were answered
    this.open = false; // whether this is the last answer, so that results can still be sent
  }

  /** Show the calls so far. */
  update(answer, streaming) {
    this.node.hidden = !answer.tool_calls.length;
    for (const [at, call] of answer.tool_calls.entries()) {
      this.#cards[at] ??= this.#card();
      const card = this.#cards[at];
      card.call = call;
      card.name.textContent = call.name;
      showJson(card.arguments, streaming ? call.arguments : pretty(call.arguments));
      const result = this.results.get(call.id);
      card.result.textContent = result ?? "";
      card.answered.hidden = result === undefined;
      card.form.hidden = streaming || result !== undefined || !this.open;
    }
    this.send.hidden = this.#cards.every((card) => card.form.hidden);
  }

  #card() {
    const card = { name: el("strong"), arguments: el("code"), result: el("code") };
    card.input = el("textarea", { rows: "2", placeholder: "What the tool returns …", spellcheck: "false" });
    onEnter(card.input, () => this.node.requestSubmit());
    card.form = el("label", { class: "field" }, el("span", {}, "Result"), card.input);
    card.answered = el("div", {}, el("span", { class: "label" }, "Result"), el("pre", {}, card.result));
    const head = el("p", { class: "call-name" }, icon("tool"), card.name);
    this.list.append(el("section", { class: "call", "aria-label": "Tool call" }, head, el("pre", {}, card.arguments), card.answered, card.form));
    return card;
  }

  #submit(event) {
    event.preventDefault();
    const open = this.#cards.filter((card) => !card.form.hidden);
    const first = open.find((card) => !card.input.value.trim());
    if (first) return first.input.focus();
    this.onResults(open.map((card) => ({ role: "tool", tool_call_id: card.call.id, content: card.input.value })));
  }
}

/** Show JSON in colours; what is shown already stays, so that a selection in it does. */
function showJson(node, text) {
  if (node.textContent === text) return;
  node.replaceChildren();
  new CodeView(node, "json").update(text);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
