// The HTML of a Markdown text, without what only styles and names it.
async (text) => {
  const { MarkdownView } = await import("./page/lib/markdown.js");
  const node = document.createElement("div");
  new MarkdownView(node).update(text);
  for (const each of node.querySelectorAll("figcaption")) each.remove();
  return node.innerHTML.replaceAll(/ (class|dir|tabindex|role|aria-label|scope|target|rel)="[^"]*"/g, "");
}
