// The prompt: a text area that grows, and one button that sends or stops.

import { el, icon } from "../lib/dom.js";
import { onEnter } from "../lib/a11y.js";

/** `onSend(text)`, `onStop()` and `onRecall()`, which is ↑ in an empty prompt. */
export class Composer {
  constructor({ onSend, onStop, onRecall }) {
    this.onSend = onSend;
    this.onStop = onStop;
    this.busy = false;
    this.input = el("textarea", { id: "prompt", rows: "1", placeholder: "Write a message …", "aria-label": "Message", oninput: () => this.#grow() });
    this.button = el("button", { type: "submit", class: "primary round" });
    this.node = el("form", { class: "composer", onsubmit: (event) => this.#submit(event) }, this.input, this.button);
    onEnter(this.input, () => this.busy || this.#submit());
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "ArrowUp" && !this.input.value) onRecall();
    });
    this.setBusy(false);
  }

  /** Whether an answer is on its way: then the button stops it. */
  setBusy(busy) {
    this.busy = busy;
    const label = busy ? "Stop" : "Send";
    this.button.replaceChildren(icon(busy ? "stop" : "send"));
    this.button.setAttribute("aria-label", label);
    this.button.title = busy ? "Stop (Esc)" : "Send (Enter; Shift+Enter for a new line)";
  }

  /** Put a text into the prompt. */
  set(text) {
    this.input.value = text;
    this.#grow();
    this.input.focus();
  }

  #submit(event) {
    event?.preventDefault();
    if (this.busy) return this.onStop();
    const text = this.input.value.trim();
    if (!text) return this.input.focus();
    this.set("");
    this.onSend(text);
  }

  #grow() {
    this.input.style.height = "auto";
    this.input.style.height = `${this.input.scrollHeight}px`;
  }
}
