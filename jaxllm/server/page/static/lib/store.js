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

/** Conversations by id. `heads` has what the list shows, so that a list loads no texts. */
export class Store {
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

  #stores(mode) {
    const transaction = this.database.transaction(["heads", "bodies"], mode);
    const done = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = transaction.onerror = () => reject(transaction.error);
    });
    return { heads: transaction.objectStore("heads"), bodies: transaction.objectStore("bodies"), done };
  }

  /** Heads, newest first. */
  async list() {
    const heads = await settled(this.#stores("readonly").heads.getAll());
    return heads.sort((a, b) => b.updated - a.updated);
  }

  async load(id) {
    return settled(this.#stores("readonly").bodies.get(id));
  }

  /** Save a conversation; the oldest others go when all of them exceed the bounds. Throws an Error
   * when it is too large by itself, or when the browser gives no more space. */
  async save(conversation) {
    const { id, title, updated } = conversation;
    const size = 2 * JSON.stringify(conversation).length;
    if (size > MAX_BYTES) throw new Error(`it has more than ${MAX_BYTES >> 20} MiB`);
    const { heads, bodies, done } = this.#stores("readwrite");
    heads.put({ id, title, updated, size });
    bodies.put(conversation);
    const all = (await settled(heads.getAll())).sort((a, b) => b.updated - a.updated);
    let bytes = size;
    let count = 1;
    for (const head of all.filter((each) => each.id !== id)) {
      bytes += head.size;
      count += 1;
      if (bytes <= MAX_BYTES && count <= MAX_CONVERSATIONS) continue;
      heads.delete(head.id);
      bodies.delete(head.id);
    }
    return done;
  }

  async remove(id) {
    const { heads, bodies, done } = this.#stores("readwrite");
    heads.delete(id);
    bodies.delete(id);
    return done;
  }

  async clear() {
    const { heads, bodies, done } = this.#stores("readwrite");
    heads.clear();
    bodies.clear();
    return done;
  }

  async exportAll() {
    return settled(this.#stores("readonly").bodies.getAll());
  }
}

/** The same in memory, for browsers that refuse IndexedDB. */
export class MemoryStore {
  #kept = new Map();
  list = async () => [...this.#kept.values()].sort((a, b) => b.updated - a.updated);
  load = async (id) => structuredClone(this.#kept.get(id));
  save = async (conversation) => void this.#kept.set(conversation.id, structuredClone(conversation));
  remove = async (id) => void this.#kept.delete(id);
  clear = async () => this.#kept.clear();
  exportAll = async () => [...this.#kept.values()];
}

/** The store of this browser. */
export async function openStore() {
  try {
    return await Store.open();
  } catch {
    return new MemoryStore();
  }
}
