// The prompt: a text area that grows, files that go with it, one button that sends or stops, and how full the context is.

import { el, icon, iconButton } from "../lib/dom.js";
import { announce, onEnter } from "../lib/a11y.js";
import { MAX_FILES, readText, sizeOf } from "./files.js";

const LONG_PASTE = 6000; // characters of a pasted text that becomes a file
const THINKING = { "": "as the server decides", on: "on", off: "off" };
const NEARLY_FULL = 0.85; // of the context

/** `onSend(text, files)`, `onStop()`, `onThinking(choice)`, `onRecall()`, which is ↑ in an empty prompt, and `count(text)`, a promise of its tokens. */
export class Composer {
  #files = [];
  most = Infinity; // tokens of the model's context

  constructor({ onSend, onStop, onRecall, onThinking, count }) {
    this.onSend = onSend;
    this.onStop = onStop;
    this.count = count;
    this.busy = false;
    this.input = el("textarea", { id: "prompt", rows: "1", dir: "auto", placeholder: "Write a message …", "aria-label": "Message", oninput: () => this.#changed() });
    this.button = el("button", { type: "submit", class: "primary round" });
    this.picker = el("input", { type: "file", multiple: true, hidden: true, class: "attached", onchange: () => {
      this.attach([...this.picker.files]);
      this.picker.value = "";
    } });
    this.chips = el("ul", { class: "chips", hidden: true, "aria-label": "Files of this message" });
    this.problem = el("p", { class: "problem", role: "alert", hidden: true });
    const attach = iconButton("clip", "Attach text files", () => this.picker.click(), { class: "quiet round" });
    this.thinking = el("button", { type: "button", class: "quiet think", hidden: true, onclick: () => {
      const choices = Object.keys(THINKING);
      onThinking(choices[(choices.indexOf(this.thinking.dataset.choice) + 1) % choices.length]);
    } }, icon("thought"), el("span", {}, "Think"));
    const form = el("form", { class: "composer", onsubmit: (event) => this.#submit(event) }, this.chips,
      el("div", { class: "line" }, attach, this.thinking, this.input, this.button));
    this.hint = el("span", { class: "hint" }, "Answers can be wrong.");
    this.ring = el("i", { class: "ring", "aria-hidden": "true" });
    this.used = el("span");
    this.context = el("p", { class: "context", hidden: true, title: "Tokens of this conversation, of those that the model can see" }, this.ring, this.used);
    this.node = el("div", { class: "prompt" }, this.problem, form, el("div", { class: "under" }, this.hint, this.context), this.picker);
    onEnter(this.input, () => this.busy || this.#submit());
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "ArrowUp" && !this.input.value) onRecall();
    });
    this.input.addEventListener("paste", (event) => this.#pasted(event));
    this.setBusy(false);
  }

  /** Whether an answer is on its way: then the button stops it. */
  setBusy(busy) {
    this.busy = busy;
    this.button.replaceChildren(icon(busy ? "stop" : "send"));
    this.button.setAttribute("aria-label", busy ? "Stop" : "Send");
    this.button.title = busy ? "Stop (Esc)" : "Send (Enter; Shift+Enter for a new line)";
    this.button.classList.toggle("stop", busy);
    this.#ready();
  }

  /** Show whether the model shall think: "", "on" or "off"; null where nobody can choose. */
  setThinking(choice) {
    this.thinking.hidden = choice === null;
    if (choice === null) return;
    this.thinking.dataset.choice = choice;
    this.thinking.title = `Thinking: ${THINKING[choice]}`;
    this.thinking.setAttribute("aria-label", this.thinking.title);
  }

  /** Show how an answer is coming along, or "". */
  setProgress(text) {
    this.hint.textContent = text || "Answers can be wrong.";
  }

  /** Show how many of the context's tokens are used. */
  setContext(tokens, most) {
    this.most = most ?? Infinity;
    this.context.hidden = !tokens || !most;
    if (this.context.hidden) return;
    const share = Math.min(1, tokens / most);
    this.used.textContent = `${tokens.toLocaleString("en")} of ${most.toLocaleString("en")} tokens`;
    this.ring.style.setProperty("--share", `${Math.round(360 * share)}deg`);
    this.context.classList.toggle("full", share >= NEARLY_FULL);
  }

  /** Put a text, and files, into the prompt. */
  set(text, files = []) {
    this.input.value = text;
    this.#files = files;
    this.#showFiles();
    this.#changed();
    this.input.focus();
  }

  get files() {
    return this.#files;
  }

  /** Attach files that a user chose, dropped or pasted. */
  async attach(chosen) {
    this.#say("");
    for (const file of chosen) {
      if (this.#files.length >= MAX_FILES) return this.#say(`A message takes ${MAX_FILES} files.`);
      try {
        this.#add(await readText(file));
      } catch (error) {
        this.#say(error.message);
      }
    }
    this.input.focus();
  }

  async #add(file) {
    this.#files = [...this.#files, file];
    this.#showFiles();
    announce(`${file.name} is attached.`);
    try {
      file.tokens = await this.count(file.text);
    } catch (error) {
      if (error.status !== 400) return; // the number is only a help
      file.tokens = Infinity;
    }
    this.#showFiles();
  }

  #pasted(event) {
    const { files } = event.clipboardData;
    if (files.length) {
      event.preventDefault();
      return this.attach([...files]);
    }
    const text = event.clipboardData.getData("text/plain");
    if (text.length < LONG_PASTE || this.#files.length >= MAX_FILES) return;
    event.preventDefault();
    this.#add({ name: "Pasted text.txt", text });
  }

  #showFiles() {
    const chips = this.#files.map((file) => {
      const isLong = file.tokens > this.most;
      const remove = iconButton("close", `Remove ${file.name}`, () => {
        this.#files = this.#files.filter((each) => each !== file);
        this.#showFiles();
        this.input.focus();
      });
      return el("li", {}, icon("file"), el("span", { class: "name", title: file.name }, file.name), el("small", { class: isLong && "problem" }, isLong ? "too long for the model" : amount(file)), remove);
    });
    this.chips.replaceChildren(...chips);
    this.chips.hidden = !chips.length;
    this.#ready();
  }

  #say(text) {
    this.problem.textContent = text;
    this.problem.hidden = !text;
  }

  #submit(event) {
    event?.preventDefault();
    if (this.busy) return this.onStop();
    const text = this.input.value.trim();
    const files = this.#files.map(({ name, text: content }) => ({ name, text: content }));
    if (!text && !files.length) return this.input.focus();
    this.#say("");
    this.set("");
    this.onSend(text, files);
  }

  #changed() {
    this.input.style.height = "auto";
    this.input.style.height = `${this.input.scrollHeight}px`;
    this.#ready();
  }

  /** A button that would do nothing looks like that. */
  #ready() {
    this.button.classList.toggle("idle", !this.busy && !this.input.value.trim() && !this.#files.length);
  }
}

function amount({ tokens, text }) {
  return tokens ? `${tokens.toLocaleString("en")} tokens` : sizeOf(new Blob([text]).size);
}
