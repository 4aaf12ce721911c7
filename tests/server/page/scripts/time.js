// Milliseconds to render a text in so many updates.
async ([text, updates]) => {
  const { MarkdownView } = await import("./page/lib/markdown.js");
  const began = performance.now();
  const view = new MarkdownView(document.createElement("div"));
  for (let at = 1; at <= updates; at += 1) view.update(text.slice(0, (text.length * at) / updates));
  return performance.now() - began;
}
