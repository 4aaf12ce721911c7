// The open conversation and the answer on its way: send, stop, edit, retry, tool results, keep.

import { chat } from "../lib/api.js";
import { alertNow, announce, announceAnswer } from "../lib/a11y.js";
import { addChunk, newAnswer, openCalls, requestBody, titleOf } from "./conversation.js";

const SAVE_AFTER = 800; // ms

/** `view` shows messages; hooks: `onBusy(busy)`, `onSaved()`, `onUnsaved(error)`, `onFailure(error)`. */
export class Session {
  #controller = null;
  #saving = 0;

  constructor(store, view, hooks) {
    this.store = store;
    this.view = view;
    this.hooks = hooks;
  }

  get busy() {
    return this.#controller !== null;
  }

  /** Show a conversation. An answer that a closed page left behind is marked. */
  open(conversation) {
    this.stop();
    for (const message of conversation.messages) if (message.state === "streaming") message.state = "interrupted";
    this.conversation = conversation;
    this.view.show(conversation);
  }

  async send(text) {
    const { messages } = this.conversation;
    if (!messages.length) this.conversation.title = titleOf(text);
    for (const call of openCalls(messages)) messages.push({ role: "tool", tool_call_id: call.id, content: "(no result)" });
    await this.#continue([{ role: "user", content: text }]);
  }

  /** Answer an earlier question anew, with another text; what followed it is dropped. */
  async edit(index, text) {
    this.stop();
    this.conversation.messages.length = index;
    if (!index) this.conversation.title = titleOf(text);
    this.view.show(this.conversation);
    await this.#continue([{ role: "user", content: text }]);
  }

  /** Generate an answer anew; what followed it is dropped. */
  async retry(index) {
    this.stop();
    this.conversation.messages.length = index;
    this.view.show(this.conversation);
    await this.#continue([]);
  }

  async results(messages) {
    await this.#continue(messages);
  }

  stop() {
    this.#controller?.abort();
  }

  /** Save soon, or now. */
  keep(now = false) {
    clearTimeout(this.#saving);
    const { conversation } = this;
    this.#saving = now ? 0 : setTimeout(() => this.#save(conversation), SAVE_AFTER);
    if (now) this.#save(conversation);
  }

  async #save(conversation) {
    this.#saving = 0;
    try {
      await this.store.save(conversation);
      this.hooks.onSaved();
    } catch (error) {
      this.hooks.onUnsaved(error);
    }
  }

  /** Save what has not been saved yet. */
  flush() {
    if (this.#saving) this.keep(true);
  }

  async #continue(added) {
    const { conversation, view } = this;
    conversation.messages.push(...added);
    for (const message of added) view.append(message);
    let body;
    const answer = newAnswer();
    try {
      body = requestBody(conversation);
    } catch (error) {
      Object.assign(answer, { state: "failed", error: error.message });
    }
    conversation.messages.push(answer);
    view.append(answer);
    view.refresh();
    view.toEnd();
    if (body) await this.#stream(conversation, answer, body);
    else this.#end(conversation, answer);
  }

  async #stream(conversation, answer, body) {
    const controller = new AbortController();
    this.#controller = controller;
    this.hooks.onBusy(true);
    announce("The model is answering.");
    try {
      for await (const chunk of chat(body, controller.signal)) {
        addChunk(answer, chunk);
        this.view.changed(answer);
        if (!this.#saving) this.keep();
      }
      answer.state = "done";
    } catch (error) {
      if (controller.signal.aborted) answer.state = "stopped";
      else Object.assign(answer, { state: "failed", error: error.message });
      if (answer.state === "failed") this.hooks.onFailure(error);
    }
    if (this.#controller === controller) {
      this.#controller = null;
      this.hooks.onBusy(false);
    }
    this.#end(conversation, answer);
  }

  #end(conversation, answer) {
    answer.ended = Date.now();
    conversation.updated = answer.ended;
    if (conversation !== this.conversation) return void this.#save(conversation);
    if (!conversation.messages.includes(answer)) return; // edited away meanwhile
    this.view.refresh();
    if (answer.error) alertNow(answer.error);
    else if (answer.state === "stopped") announce("Stopped.");
    else if (answer.tool_calls.length) announce("The model calls a tool and waits for its result.");
    else announceAnswer(answer.content);
    this.keep(true);
  }
}
