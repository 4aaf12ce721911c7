// One answer of the model: its thought, its text, its tool calls, what went wrong, and its figures.

import { MarkdownView } from "../lib/markdown.js";
import { el, icon } from "../lib/dom.js";
import { ToolCalls } from "./tools.js";

const LEAST_PAUSE = 40; // ms between two renderings
const LONGEST_PAUSE = 1000;
const LEAST_TOKENS = 5; // of an answer whose speed is told
const LEAST_TIME = 50; // ms that it took
const SHARE = 4; // a rendering is followed by a pause so many times as long

const NOTES = new Map([
  ["length", "The answer was cut off at the limit of tokens."],
  ["stopped", "You stopped this answer."],
  ["interrupted", "This answer was interrupted."],
]);

/** The element of an answer, updated as the answer grows. */
export class AnswerView {
  #timer = 0;
  #resting = 0; // until when (performance.now)

  constructor(answer, onResults) {
    this.answer = answer;
    const thought = el("div", { class: "markdown" });
    this.summary = el("span");
    this.thinking = el("details", { class: "thinking", hidden: true }, el("summary", {}, icon("thought"), this.summary), thought);
    const body = el("div", { class: "markdown" });
    this.thought = new MarkdownView(thought);
    this.text = new MarkdownView(body);
    this.calls = new ToolCalls(onResults);
    this.note = el("p", { class: "note", hidden: true });
    this.wait = el("p", { class: "wait", hidden: true }, el("i", { class: "caret", "aria-hidden": "true" }), el("span", { class: "unseen" }, "Waiting for the answer"));
    this.body = body;
    this.node = el("div", {}, this.thinking, body, this.calls.node, this.wait, this.note);
    this.show();
  }

  /** Show what has arrived, soon: long answers are rendered less often, so that the page stays quick. */
  schedule() {
    if (this.#timer) return;
    const wait = Math.max(0, this.#resting - performance.now());
    this.#timer = setTimeout(() => requestAnimationFrame(() => this.show()), wait);
  }

  /** Show what has arrived. */
  show() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const began = performance.now();
    this.#show();
    const took = performance.now() - began;
    this.#resting = performance.now() + Math.min(LONGEST_PAUSE, Math.max(LEAST_PAUSE, SHARE * took));
  }

  #show() {
    const { answer } = this;
    const streaming = answer.state === "streaming";
    const hasText = Boolean(answer.content || answer.tool_calls.length);
    this.thinking.hidden = !answer.reasoning;
    if (answer.reasoning) {
      this.summary.textContent = thoughtLabel(answer, streaming && !hasText);
      this.thought.update(answer.reasoning);
    }
    this.text.update(answer.content);
    this.calls.update(answer, streaming);
    this.wait.hidden = !streaming || hasText || Boolean(answer.reasoning);
    this.thinking.classList.toggle("live", streaming && !hasText);
    this.body.classList.toggle("live", streaming && Boolean(answer.content) && !answer.tool_calls.length);
    const note = answer.error ?? NOTES.get(answer.state) ?? NOTES.get(answer.finish_reason) ?? "";
    this.note.hidden = !note;
    this.note.textContent = note;
    this.note.classList.toggle("error", Boolean(answer.error));
    this.node.toggleAttribute("aria-busy", streaming);
  }
}

function thoughtLabel(answer, thinking) {
  if (thinking) return "Thinking …";
  const seconds = ((answer.thought ?? answer.ended ?? answer.first) - answer.first) / 1000;
  return seconds >= 0.1 ? `Thought for ${seconds.toFixed(1)} s` : "Thought";
}

const number = (value) => value.toLocaleString("en");

/** Tokens a second; nothing where they are too few to say. */
function speed(tokens, milliseconds) {
  return milliseconds >= LEAST_TIME && tokens >= LEAST_TOKENS ? ` · ${number(Math.round((1000 * (tokens - 1)) / milliseconds))} tokens/s` : "";
}

const counted = (tokens) => (tokens === 1 ? "1 token" : `${number(tokens)} tokens`);

/** Tokens, speed and time to the first token, as a line. */
export function figures(answer) {
  const tokens = answer.usage?.completion_tokens;
  if (!tokens || !answer.ended || !answer.first) return "";
  const cached = answer.usage.prompt_tokens_details?.cached_tokens;
  const reused = cached ? ` · ${number(cached)} of ${number(answer.usage.prompt_tokens)} prompt tokens cached` : "";
  return `${counted(tokens)}${speed(tokens, answer.ended - answer.first)} · first after ${wait(answer.first - answer.sent)}${reused}`;
}

/** How far an answer is that is being written. */
export function progress(answer) {
  const tokens = answer.usage?.completion_tokens;
  return tokens && answer.first ? `${counted(tokens)}${speed(tokens, Date.now() - answer.first)}` : "";
}

function wait(milliseconds) {
  return milliseconds < 1000 ? `${Math.max(0, milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}
