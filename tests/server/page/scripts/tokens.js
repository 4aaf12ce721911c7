// The tokens of a code block by kind, and its whole text.
async ([language, code]) => {
  const { MarkdownView } = await import("./page/lib/markdown.js");
  const node = document.createElement("div");
  new MarkdownView(node).update(`~~~~~${language}\n${code}\n~~~~~`);
  const tokens = [...node.querySelectorAll(".token")].map((each) => `${each.className.slice(6)} ${each.textContent.trim()}`);
  return { text: node.querySelector("code").textContent, tokens };
}
