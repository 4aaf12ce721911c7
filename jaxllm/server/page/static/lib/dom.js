// Makes elements. Strings become text nodes: nothing here, or anywhere in the page, parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element; properties that start with "on" are listeners, the rest attributes or properties. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== undefined && child !== null && child !== false));
  return node;
}

// Strokes on a 24 × 24 grid
const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M8.5 7h7A1.5 1.5 0 0 1 17 8.5v7a1.5 1.5 0 0 1-1.5 1.5h-7A1.5 1.5 0 0 1 7 15.5v-7A1.5 1.5 0 0 1 8.5 7z",
  clip: "M19 11.5l-7.2 7.2a4.6 4.6 0 0 1-6.5-6.5l7.6-7.6a3.1 3.1 0 0 1 4.4 4.4l-7.5 7.5a1.6 1.6 0 0 1-2.2-2.2l6.9-6.9",
  file: "M7 3.5h7l4 4V20.5H7zM14 3.5v4h4M10 12h5M10 15.5h5",
  search: "M10.5 4.5a6 6 0 1 0 0 12 6 6 0 0 0 0-12zM15 15l5 5",
  more: "M6 12h.01M12 12h.01M18 12h.01",
  keyboard: "M3 6.5h18v11H3zM7 10h.01M10.5 10h.01M14 10h.01M17.5 10h.01M8 14h8",
  before: "M14.5 6l-6 6 6 6",
  after: "M9.5 6l6 6-6 6",
  copy: "M9 9h10v11H9zM15 9V4H5v11h4",
  check: "M5 12.5l4.5 4.5L19 7.5",
  edit: "M4 20l1-4L16.5 4.5l3 3L8 19zM14 7l3 3",
  retry: "M19 12a7 7 0 1 1-2.2-5.1M19 4v4h-4",
  resume: "M6 6v12M10 6l9 6-9 6z",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  download: "M12 4v11M7 10.5l5 5 5-5M5 20h14",
  upload: "M12 16V5M7 9.5l5-5 5 5M5 20h14",
  close: "M6 6l12 12M18 6L6 18",
  down: "M6 10l6 6 6-6",
  sliders: "M4 8h9M19 8h1M4 16h1M11 16h9M16 5.5v5M8 13.5v5",
  pulse: "M3 12h4l3-7 4 14 3-7h4",
  key: "M7.5 8.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7zM11 12h9.5v3.5M16.5 12v2.5",
  light: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 3v2M12 19v2M3 12h2M19 12h2M5.6 5.6l1.4 1.4M17 17l1.4 1.4M5.6 18.4L7 17M17 7l1.4-1.4",
  dark: "M19 14.5A7.5 7.5 0 0 1 9.5 5 7.5 7.5 0 1 0 19 14.5z",
  system: "M4 5h16v11H4zM9 20h6M12 16v4",
  tool: "M14.5 6.5a4 4 0 0 1 5-1l-3 3 1 2 2 1 3-3a4 4 0 0 1-5.5 5L9 21l-3-3 7.5-8z",
  thought: "M9 18h6M10 21h4M12 3a6 6 0 0 0-3.5 11c.7.6 1 1.3 1 2h5c0-.7.3-1.4 1-2A6 6 0 0 0 12 3z",
};

/** A decorative icon; the control around it carries the name. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("icon", name);
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button that shows an icon, and its name to screen readers and as a tooltip. */
export function iconButton(name, label, onclick, props = {}) {
  return el("button", { type: "button", class: "quiet", title: label, "aria-label": label, onclick, ...props }, icon(name));
}

/** A piece of a text around the first place of a term: [before, the term as it stands, after]; null without one. */
export function excerpt(text, term) {
  const at = text.toLowerCase().indexOf(term.toLowerCase());
  if (at < 0) return null;
  const from = Math.max(0, at - 24);
  const end = at + term.length;
  const line = (part) => part.replaceAll(/\s+/g, " ");
  return [`${from ? "…" : ""}${line(text.slice(from, at))}`, line(text.slice(at, end)), line(text.slice(end, end + 80))];
}

/** Copy text, also where the page is not served over a secure connection. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea", { class: "unseen", value: text });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A button that copies what `text()` returns and says so. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    await copyText(text());
    button.replaceChildren(icon("check"));
    button.setAttribute("aria-label", "Copied");
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.setAttribute("aria-label", label);
    }, 1500);
  });
  return button;
}

/** Offer a file for saving. */
export function save(name, text) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
