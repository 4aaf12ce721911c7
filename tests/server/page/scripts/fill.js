// Saves more conversations than are kept; says what is left.
async (kind) => {
  const { MemoryStore, Store, MAX_CONVERSATIONS, MAX_BYTES } = await import("./page/lib/store.js");
  const store = kind === "memory" ? new MemoryStore() : await Store.open();
  await store.clear();
  const conversation = (id, size) => ({ id: String(id), title: "t", updated: id, messages: [{ content: "x".repeat(size) }] });
  for (let id = 1; id <= MAX_CONVERSATIONS + 5; id += 1) await store.save(conversation(id, 10));
  const few = (await store.list()).map((head) => Number(head.id));
  for (let id = 1001; id <= 1005; id += 1) await store.save(conversation(id, MAX_BYTES / 8));
  const refused = await store.save(conversation(2000, MAX_BYTES)).then(() => "", (error) => error.message);
  const bytes = (await store.list()).reduce((sum, head) => sum + head.size, 0);
  return { few: few.length, oldest: Math.min(...few), bytes, most: MAX_BYTES, refused, newest: (await store.list())[0].id };
}
