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

function newestFirst(heads) {
  return heads.sort((a, b) => b.updated - a.updated);
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
    return newestFirst(await settled(this.#stores("readonly").heads.getAll()));
  }

  async load(id) {
    return settled(this.#stores("readonly").bodies.get(id));
  }

  /** Save a conversation; the oldest others go when all of them exceed the bounds. Throws an Error
   * when it is too large by itself, or when the browser gives no more space. */
  async save(conversation) {
    const head = headOf(conversation);
    const { heads, bodies, done } = this.#stores("readwrite");
    heads.put(head);
    bodies.put(conversation);
    for (const { id } of excess(await settled(heads.getAll()), head)) {
      heads.delete(id);
      bodies.delete(id);
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

  /** Call `visit` with each conversation, one at a time in memory. */
  async each(visit) {
    const request = this.#stores("readonly").bodies.openCursor();
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
