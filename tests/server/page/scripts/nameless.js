// Controls and pictures without a name, and ids used twice.
() => {
  const named = (node) => node.getAttribute("aria-label")?.trim() || node.textContent.trim() || node.labels?.length || node.alt !== undefined && node.hasAttribute("alt");
  const nodes = [...document.querySelectorAll("button, input, select, textarea, a, img, canvas, summary, dialog, [role]")];
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  return [...nodes.filter((node) => node.checkVisibility() && !(node.type === "file") && !["status", "alert"].includes(node.role) && !named(node)).map((node) => node.outerHTML.slice(0, 200)),
    ...ids.filter((id, at) => ids.indexOf(id) !== at)];
}
