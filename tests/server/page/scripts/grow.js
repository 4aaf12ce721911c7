// Steps in which a growing text ends otherwise than the whole.
async ([text, steps]) => {
  const { MarkdownView } = await import("./page/lib/markdown.js");
  const shown = (updates) => {
    const node = document.createElement("div");
    const view = new MarkdownView(node);
    for (const each of updates) view.update(each);
    return node.innerHTML;
  };
  const whole = shown([text]);
  const prefixes = (step) => Array.from({ length: Math.ceil(text.length / step) }, (_, at) => text.slice(0, (at + 1) * step));
  return steps.filter((step) => shown(prefixes(step)) !== whole);
}
