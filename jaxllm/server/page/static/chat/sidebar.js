// The list of conversations, and what can be done with all of them.

import { el, icon, iconButton } from "../lib/dom.js";

/** Actions: `create()`, `open(id)`, `remove(head)`, `exportAll()`, `importFile(file)`, `clear()`. */
export class Sidebar {
  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.list = el("ul", { class: "conversations" });
    const file = el("input", { type: "file", accept: "application/json,.json", hidden: true, onchange: () => {
      if (file.files[0]) actions.importFile(file.files[0]);
      file.value = "";
    } });
    node.append(
      el("div", { class: "brand" }, el("img", { src: new URL("../icon.svg", import.meta.url).href, alt: "", width: "24", height: "24" }), el("strong", {}, "jaxllm")),
      el("button", { type: "button", class: "new", onclick: () => actions.create() }, icon("plus"), "New chat"),
      this.list,
      el("div", { class: "tools" },
        iconButton("download", "Export all conversations", () => actions.exportAll()),
        iconButton("upload", "Import conversations", () => file.click()),
        iconButton("trash", "Delete all conversations", () => actions.clear()),
        file),
    );
  }

  /** Show the conversations, with the open one marked. */
  show(heads, current) {
    this.list.replaceChildren(...heads.map((head) => this.#row(head, head.id === current)));
    if (!heads.length) this.list.append(el("li", { class: "empty" }, "Nothing here yet."));
  }

  #row(head, isCurrent) {
    const open = el("button", { type: "button", class: "open", title: head.title, "aria-current": isCurrent && "true", onclick: () => this.actions.open(head.id) }, head.title);
    const remove = iconButton("trash", `Delete “${head.title}”`, () => this.actions.remove(head));
    return el("li", {}, open, remove);
  }
}
