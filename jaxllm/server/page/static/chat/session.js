// The open conversation and the answer on its way: send, stop, edit, retry, tool results, keep.

import { chat } from "../lib/api.js";
import { ChangedElsewhere } from "../lib/store.js";
import { alertNow, announce, announceAnswer } from "../lib/a11y.js";
import { branchOff, everyMessage, showVersion } from "./branches.js";
import { addChunk, newAnswer, newId, openCalls, requestBody, titleOf } from "./conversation.js";

const SAVE_AFTER = 800; // ms

/** `view` shows messages; hooks: `onBusy(busy)`, `onSaved()`, `onTokens()`, `onCopied()`, `onUnsaved(error)`, `onFailure(error)`. */
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
    for (const message of everyMessage(conversation.messages)) if (message.state === "streaming") message.state = "interrupted";
    this.conversation = conversation;
    this.view.show(conversation);
  }

  async send(text, files = []) {
    const { messages } = this.conversation;
    if (!messages.length) this.#name(text || files[0].name);
    for (const call of openCalls(messages)) messages.push({ role: "tool", tool_call_id: call.id, content: "(no result)" });
    await this.#continue([question(text, files)]);
  }

  /** Ask an earlier question with another text; the first version and what followed it are kept. */
  async edit(index, text) {
    this.stop();
    const { messages } = this.conversation;
    const { files } = messages[index];
    const fork = branchOff(messages, index);
    if (!index) this.#name(text || files[0].name);
    this.view.show(this.conversation);
    await this.#continue([{ ...question(text, files), fork }]);
  }

  /** Generate an answer anew; the first one and what followed it are kept. */
  async retry(index) {
    this.stop();
    const fork = branchOff(this.conversation.messages, index);
    this.view.show(this.conversation);
    await this.#continue([], fork);
  }

  /** Go on with an answer that ended early. */
  async resume(index) {
    this.stop();
    const { conversation } = this;
    const answer = conversation.messages[index];
    let body;
    try {
      body = { ...requestBody(conversation), continue_final_message: true, add_generation_prompt: false };
    } catch (error) {
      return alertNow(error.message);
    }
    Object.assign(answer, { state: "streaming", sent: Date.now(), first: undefined, ended: undefined, finish_reason: undefined, error: undefined });
    this.view.refresh();
    this.view.toEnd();
    await this.#stream(conversation, answer, body);
  }

  /** Show another version of what there is from a message on. */
  showVersion(index, at) {
    this.stop();
    showVersion(this.conversation.messages, index, at);
    this.view.show(this.conversation, index);
    this.keep(true);
  }

  /** A title from the first message, unless the user gave one. */
  #name(text) {
    if (!this.conversation.named) this.conversation.title = titleOf(text);
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
    this.#saving = now ? 0 : setTimeout(() => this.save(conversation), SAVE_AFTER);
    if (now) this.save(conversation);
  }

  /** Save a conversation; one that another tab has continued becomes a copy. */
  async save(conversation) {
    if (conversation === this.conversation) this.#saving = 0;
    const { id } = conversation;
    try {
      await this.store.save(conversation);
      this.hooks.onSaved();
    } catch (error) {
      if (!(error instanceof ChangedElsewhere)) return this.hooks.onUnsaved(error);
      const isFirst = conversation.id === id; // of the saves under way
      if (isFirst) conversation.id = newId();
      await this.save(conversation);
      if (isFirst) this.hooks.onCopied();
    }
  }

  /** Save what has not been saved yet. */
  flush() {
    if (this.#saving) this.keep(true);
  }

  async #continue(added, fork) {
    const { conversation, view } = this;
    conversation.messages.push(...added);
    for (const message of added) view.append(message);
    let body;
    const answer = { ...newAnswer(), ...(fork && { fork }) };
    try {
      body = requestBody(conversation);
    } catch (error) {
      Object.assign(answer, { state: "failed", error: error.message });
    }
    conversation.messages.push(answer);
    view.append(answer);
    view.refresh();
    view.toEnd();
    this.keep(true); // so that the list shows it at once
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
        if (chunk.usage) this.hooks.onTokens();
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
    if (conversation !== this.conversation) return void this.save(conversation);
    if (!conversation.messages.includes(answer)) return void this.keep(); // it belongs to another version now
    this.view.refresh();
    this.hooks.onTokens();
    if (answer.error) alertNow(answer.error);
    else if (answer.state === "stopped") announce("Stopped.");
    else if (answer.tool_calls.length) announce("The model calls a tool and waits for its result.");
    else announceAnswer(answer.content);
    this.keep(true);
  }
}

function question(content, files = []) {
  return { role: "user", content, ...(files.length && { files }) };
}
