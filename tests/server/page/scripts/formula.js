// The MathML of a formula, without attributes, or its source.
async (tex) => {
  const { formula } = await import("./page/lib/math/tex.js");
  const node = formula(tex, true, tex);
  if (node.localName !== "math") return `SOURCE ${node.textContent}`;
  return node.innerHTML.replaceAll(/ [\w-]+="[^"]*"/g, "").replaceAll("&nbsp;", "\u00a0");
}
