// Conversations in IndexedDB, bounded; small preferences in localStorage. Nothing leaves the browser.

import { BASE } from "./api.js";

export const MAX_CONVERSATIONS = 200;
export const MAX_BYTES = 32 << 20; // of all conversations together
const NAME = `jaxllm ${BASE.pathname}`;

/** Preferences; a browser that refuses storage forgets them. */
export const preferences = {
  get(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(`${NAME} ${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`${NAME} ${name}`, JSON.stringify(value));
    } catch {
      // full or forbidden: it is only a preference
    }
  },
};

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** What the list shows of a conversation. Throws an Error when it is too large by itself. */
function headOf(conversation) {
  const { id, title, updated } = conversation;
  const size = 2 * JSON.stringify(conversation).length;
  if (size > MAX_BYTES) throw new Error(`it has more than ${MAX_BYTES >> 20} MiB`);
  return { id, title, updated, size };
}

/** Of the heads, those that have to go for this one: the oldest beyond the bounds. */
function excess(heads, { id, size }) {
  let bytes = size;
  let count = 1;
  return newestFirst(heads.filter((each) => each.id !== id)).filter((each) => {
    bytes += each.size;
    count += 1;
    return bytes > MAX_BYTES || count > MAX_CONVERSATIONS;
  });
}

function isSame(one, other) {
  return one.tab === other?.tab && one.number === other.number;
}

function newestFirst(heads) {
  return heads.sort((a, b) => b.updated - a.updated);
}

/** Another tab has saved the conversation since this one read it. */
export class ChangedElsewhere extends Error {}

/** Conversations by id. `heads` has what the list shows, so that a list loads no texts, and which save of which tab wrote it. */
export class Store {
  #tab = Math.random();
  #saves = 0;
  #read = new Map(); // id → the save that `load` gave

  static async open() {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("heads", { keyPath: "id" });
      request.result.createObjectStore("bodies", { keyPath: "id" });
    };
    return new Store(await settled(request));
  }

  constructor(database) {
    this.database = database;
  }

  #stores(mode = "readonly") {
    const transaction = this.database.transaction(["heads", "bodies"], mode);
    return { transaction, heads: transaction.objectStore("heads"), bodies: transaction.objectStore("bodies") };
  }

  /** Do all of `work(heads, bodies)` or nothing of it. Throws the reason why nothing was done: that of the transaction, not that of
   * the request which it ended. */
  async #write(work) {
    const { transaction, heads, bodies } = this.#stores("readwrite");
    const done = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
    const working = work(heads, bodies).catch((error) => {
      if (!transaction.error) transaction.abort();
      throw error;
    });
    const [worked, written] = await Promise.allSettled([working, done]);
    const failed = [written, worked].find(({ reason }) => reason);
    if (failed) throw failed.reason;
    if (written.status === "rejected") throw new Error("the browser ended the transaction");
  }

  /** Heads, newest first. */
  async list() {
    return newestFirst(await settled(this.#stores().heads.getAll()));
  }

  /** A conversation; undefined where it is gone. */
  async load(id) {
    const { heads, bodies } = this.#stores();
    const [head, body] = await Promise.all([settled(heads.get(id)), settled(bodies.get(id))]);
    this.#read.set(id, head?.saved);
    return body;
  }

  /** Save a conversation; the oldest others go when all of them exceed the bounds. Throws an Error
   * when it is too large by itself, or when the browser gives no more space, and ChangedElsewhere. */
  async save(conversation) {
    const head = { ...headOf(conversation), saved: { tab: this.#tab, number: (this.#saves += 1) } };
    return this.#write(async (heads, bodies) => {
      const all = heads.getAll(); // a page that goes waits for nothing, so all is asked for at once
      heads.put(head);
      bodies.put(conversation);
      await settled(all);
      const before = all.result.find(({ id }) => id === head.id)?.saved;
      if (before && before.tab !== this.#tab && !isSame(before, this.#read.get(head.id))) throw new ChangedElsewhere();
      for (const { id } of excess(all.result, head)) {
        heads.delete(id);
        bodies.delete(id);
      }
    });
  }

  async remove(id) {
    return this.#write(async (heads, bodies) => {
      heads.delete(id);
      bodies.delete(id);
    });
  }

  async clear() {
    return this.#write(async (heads, bodies) => {
      heads.clear();
      bodies.clear();
    });
  }

  async exportAll() {
    return settled(this.#stores().bodies.getAll());
  }

  /** Call `visit` with each conversation, one at a time in memory. */
  async each(visit) {
    const request = this.#stores().bodies.openCursor();
    return new Promise((resolve, reject) => {
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        const cursor = request.result;
        if (!cursor) return resolve();
        visit(cursor.value);
        cursor.continue();
      };
    });
  }
}

/** The same in memory, for browsers that refuse IndexedDB. */
export class MemoryStore {
  #kept = new Map(); // id → head and body
  list = async () => newestFirst([...this.#kept.values()].map(({ head }) => head));
  load = async (id) => structuredClone(this.#kept.get(id)?.body);
  remove = async (id) => void this.#kept.delete(id);
  clear = async () => this.#kept.clear();
  exportAll = async () => [...this.#kept.values()].map(({ body }) => body);
  each = async (visit) => this.#kept.forEach(({ body }) => visit(body));

  async save(conversation) {
    const head = headOf(conversation);
    this.#kept.set(head.id, { head, body: structuredClone(conversation) });
    for (const { id } of excess(await this.list(), head)) this.#kept.delete(id);
  }
}

/** The store of this browser. */
export async function openStore() {
  try {
    return await Store.open();
  } catch {
    return new MemoryStore();
  }
}
