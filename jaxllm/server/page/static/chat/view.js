// The messages of a conversation, and where the reader is in them.

import { copyButton, el, iconButton, icon } from "../lib/dom.js";
import { prefersStillness } from "../lib/a11y.js";
import { AnswerView, figures } from "./answer.js";
import { openCalls } from "./conversation.js";
import { sizeOf } from "./files.js";

const NEAR = 40; // pixels from the end within which the view follows the answer
const EXAMPLES = ["Explain how a hash table works.", "Write a haiku about the sea.", "Give me three ideas for a rainy day."];

/** Actions: `edit(index, text)`, `retry(index)`, `resume(index)`, `showVersion(index, at)`, `results(messages)`, `send(text)`. */
export class ChatView {
  #answers = new Map(); // message → AnswerView
  #articles = new Map(); // message → its element
  #follows = true;
  #top = 0; // where the reader is

  constructor(actions) {
    this.actions = actions;
    this.list = el("div", { class: "messages", role: "log", "aria-live": "off", "aria-label": "Messages", tabindex: "0" });
    this.jump = el("button", { type: "button", class: "jump", hidden: true, onclick: () => this.toEnd() }, icon("down"), "Latest");
    this.node = el("div", { class: "scroller" }, this.list, this.jump);
    this.sizes = new ResizeObserver(() => this.#follow()); // also when the browser lays out what it had skipped
    this.list.addEventListener("scroll", () => this.#scrolled(), { passive: true });
  }

  /** Show a conversation, at its end or at one of its messages. */
  show(conversation, index) {
    this.conversation = conversation;
    this.#answers.clear();
    this.#articles.clear();
    this.sizes.disconnect();
    this.sizes.observe(this.list);
    this.list.replaceChildren();
    if (!conversation.messages.length) this.list.append(this.#welcome());
    for (const message of conversation.messages) this.append(message);
    this.refresh();
    if (index === undefined) return this.toEnd(true);
    this.#follows = false;
    const article = this.#articles.get(conversation.messages[index]);
    article.scrollIntoView({ block: "nearest" });
    article.querySelector(".versions button:not(:disabled)").focus();
    this.#scrolled();
  }

  /** Show what the model says of itself: its card. */
  showModel(card) {
    this.card = card;
    const welcome = this.list.querySelector(".welcome");
    if (welcome) welcome.replaceWith(this.#welcome());
  }

  /** Show one more message. */
  append(message) {
    this.list.querySelector(".welcome")?.remove();
    if (message.role === "tool") return;
    const article = message.role === "user" ? this.#question(message) : this.#answer(message);
    this.#articles.set(message, article);
    this.list.append(article);
    this.sizes.observe(article);
  }

  /** Something arrived for an answer. */
  changed(answer) {
    this.#answers.get(answer)?.schedule();
  }

  /** An answer has ended: show all of it, its buttons and figures. */
  refresh() {
    const { messages } = this.conversation;
    const open = openCalls(messages).length > 0;
    const results = new Map(messages.filter((each) => each.role === "tool").map((each) => [each.tool_call_id, each.content]));
    for (const [answer, view] of this.#answers) {
      view.calls.results = results;
      view.calls.open = open && answer === messages.findLast((each) => each.role === "assistant");
      view.show();
      const article = this.#articles.get(answer);
      article.querySelector(".figures").textContent = figures(answer);
      article.querySelector("footer").hidden = answer.state === "streaming";
      article.querySelector(".resume").hidden = answer !== messages.at(-1) || !isUnfinished(answer);
    }
  }

  /** Scroll to the end and stay there. */
  toEnd(atOnce = false) {
    this.#follows = true;
    this.#top = 0; // the list may have been cut shorter meanwhile, which is no move of the reader
    this.list.scrollTo({ top: this.list.scrollHeight, behavior: atOnce || prefersStillness() ? "instant" : "smooth" });
    this.jump.hidden = true;
  }

  /** Edit the last question. */
  editLast() {
    const question = this.conversation.messages.findLast((each) => each.role === "user");
    if (question) this.#edit(question);
  }

  /** Only a reader moves up; what is laid out meanwhile moves the end down. */
  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.list;
    if (scrollHeight - scrollTop - clientHeight < NEAR) this.#follows = true;
    else if (scrollTop < this.#top) this.#follows = false;
    this.#top = scrollTop;
    this.jump.hidden = this.#follows;
  }

  #follow() {
    if (this.#follows) this.list.scrollTop = this.list.scrollHeight;
  }

  #indexOf(message) {
    return this.conversation.messages.indexOf(message);
  }

  #welcome() {
    const { id, description, examples, max_model_len: most, family, dtype } = this.card ?? {};
    const prompts = examples?.length ? examples : EXAMPLES;
    const facts = [family, dtype, most && `${most.toLocaleString("en")} tokens of context`].filter(Boolean).join(" · ");
    return el("div", { class: "welcome" }, el("h1", {}, id ? `Talk to ${id.split("/").pop()}` : "Talk to the model"),
      description && el("p", { class: "about", dir: "auto" }, description),
      el("p", { class: "card-line" }, facts || "Waiting for the server …"),
      el("div", { class: "examples", hidden: !this.card }, ...prompts.map((text) => el("button", { type: "button", class: "example", dir: "auto", onclick: () => this.actions.send(text) }, text))));
  }

  #question(message) {
    const { content, files = [] } = message;
    const edit = iconButton("edit", "Edit this message", () => this.#edit(message));
    const footer = el("footer", {}, this.#versions(message), copyButton("Copy this message", () => content), edit);
    const shown = files.map((file) => el("details", { class: "attachment" }, el("summary", {}, icon("file"), el("span", { class: "name" }, file.name), el("small", {}, sizeOf(new Blob([file.text]).size))),
      el("pre", { tabindex: "0" }, file.text)));
    const bubble = content && el("div", { class: "bubble", dir: "auto" }, content);
    return el("article", { class: "question", "aria-label": "Your message" }, ...shown, bubble, isLong(content) && unfolded(bubble), footer);
  }

  /** ‹ 2/3 ›, where a message has several versions. */
  #versions(message) {
    const { fork } = message;
    if (!fork) return "";
    const count = fork.tails.length;
    const step = (name, label, by) => iconButton(name, label, () => {
      this.actions.showVersion(this.#indexOf(message), fork.at + by);
    }, { disabled: !(fork.at + by in fork.tails) });
    return el("span", { class: "versions", role: "group", "aria-label": `Version ${fork.at + 1} of ${count}` },
      step("before", "Version before", -1), el("span", { "aria-hidden": "true" }, `${fork.at + 1}/${count}`), step("after", "Version after", 1));
  }

  #answer(message) {
    const view = new AnswerView(message, (results) => this.actions.results(results));
    this.#answers.set(message, view);
    const retry = iconButton("retry", "Try again", () => this.actions.retry(this.#indexOf(message)));
    const resume = iconButton("resume", "Continue this answer", () => this.actions.resume(this.#indexOf(message)), { class: "quiet resume" });
    const copy = copyButton("Copy this answer", () => message.content);
    const footer = el("footer", { hidden: message.state === "streaming" }, this.#versions(message), copy, retry, resume, el("span", { class: "figures" }));
    return el("article", { class: "answer", "aria-label": "Answer" }, view.node, footer);
  }

  #edit(message) {
    const article = this.#articles.get(message);
    const whole = [...article.children];
    const input = el("textarea", { "aria-label": "Edit your message", dir: "auto", rows: String(Math.min(12, message.content.split("\n").length + 1)), value: message.content });
    const close = () => {
      article.replaceChildren(...whole);
      article.querySelector("footer button:last-child").focus();
    };
    const submit = (event) => {
      event.preventDefault();
      if (input.value.trim() || message.files) this.actions.edit(this.#indexOf(message), input.value.trim());
    };
    const buttons = el("div", { class: "buttons" }, el("button", { type: "button", onclick: close }, "Cancel"), el("button", { type: "submit", class: "primary" }, "Send"));
    const form = el("form", { class: "edit", onsubmit: submit }, input, buttons);
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
      else return;
      event.stopPropagation();
    });
    article.replaceChildren(form);
    input.focus();
  }
}

/** Whether an answer ended before the model was done, and can go on where it ended. */
function isUnfinished({ state, content, finish_reason: reason, tool_calls: calls }) {
  return Boolean(content) && !calls.length && (reason === "length" || ["stopped", "interrupted", "failed"].includes(state));
}

const LONG_TEXT = 1500; // characters of a message that is folded
const LONG_LINES = 16;

function isLong(text) {
  return text.length > LONG_TEXT || text.split("\n", LONG_LINES + 1).length > LONG_LINES;
}

/** Fold a long message; the button that shows all of it. */
function unfolded(bubble) {
  bubble.classList.add("folded");
  const button = el("button", { type: "button", class: "link", "aria-expanded": "false", onclick: () => {
    const isFolded = bubble.classList.toggle("folded");
    button.textContent = isFolded ? "Show all" : "Show less";
    button.setAttribute("aria-expanded", String(!isFolded));
  } }, "Show all");
  return button;
}
