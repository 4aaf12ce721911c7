// The list of conversations: by age, searched, renamed, exported, deleted.

import { el, icon, iconButton } from "../lib/dom.js";
import { shownMenu } from "../lib/menus.js";

const SEARCH_AFTER = 150; // ms
const DAY = 86_400_000; // ms

/** The heading under which a time stands in the list. */
function ageOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  if (time >= midnight - 7 * DAY) return "Last seven days";
  if (time >= midnight - 30 * DAY) return "Last thirty days";
  return "Older";
}

/** Actions: `create()`, `open(id)`, `rename(id, title)`, `remove(head)`, `exportOne(id)`, `exportAll()`, `importFile(file)`, `search(term)`
 * (a promise of pieces of text by id) and `help()`. */
export class Sidebar {
  #heads = [];
  #current = "";
  #timer = 0;

  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.list = el("ul", { class: "conversations" });
    this.search = el("input", { type: "search", placeholder: "Search", "aria-label": "Search conversations", autocomplete: "off", oninput: () => this.#searchSoon() });
    this.search.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.search.value) return;
      event.stopPropagation();
      this.search.value = "";
      this.#searchSoon();
    });
    const file = el("input", { type: "file", class: "imported", accept: "application/json,.json", hidden: true, onchange: () => {
      if (file.files[0]) actions.importFile(file.files[0]);
      file.value = "";
    } });
    node.append(
      el("div", { class: "brand" }, el("img", { src: new URL("../icon.svg", import.meta.url).href, alt: "", width: "26", height: "26" }), el("strong", {}, "jaxllm")),
      el("button", { type: "button", class: "new", title: "New chat (Ctrl+Shift+O)", onclick: () => actions.create() }, icon("plus"), "New chat"),
      el("div", { class: "search" }, icon("search"), this.search),
      this.list,
      el("div", { class: "tools" },
        iconButton("download", "Export all conversations", () => actions.exportAll()),
        iconButton("upload", "Import conversations", () => file.click()),
        el("span", { class: "space" }),
        iconButton("keyboard", "Keyboard shortcuts", () => actions.help()),
        file),
    );
  }

  /** Show the conversations, with the open one marked. */
  show(heads, current) {
    this.#heads = heads;
    this.#current = current;
    if (this.search.value.trim()) return this.#find();
    this.#list(heads);
  }

  #searchSoon() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => (this.search.value.trim() ? this.#find() : this.#list(this.#heads)), SEARCH_AFTER);
  }

  async #find() {
    const term = this.search.value.trim();
    const pieces = await this.actions.search(term);
    if (term !== this.search.value.trim()) return; // another search came after it
    this.#list(this.#heads.filter((head) => pieces.has(head.id)), pieces);
  }

  #list(heads, pieces) {
    if (this.list.querySelector("input")) return; // a title is being written
    const rows = [];
    let before = "";
    for (const head of heads) {
      const age = pieces ? "" : ageOf(head.updated);
      if (age && age !== before) rows.push(el("li", { class: "age" }, age));
      before = age;
      rows.push(this.#row(head, pieces?.get(head.id)));
    }
    if (!heads.length) rows.push(el("li", { class: "empty" }, pieces ? "Nothing found." : "Nothing here yet."));
    this.list.replaceChildren(...rows);
  }

  #row(head, piece) {
    const isCurrent = head.id === this.#current;
    const title = el("span", { class: "title", dir: "auto" }, head.title);
    const open = el("button", { type: "button", class: "open", title: head.title, "aria-current": isCurrent && "true", onclick: () => this.actions.open(head.id) }, title);
    if (piece) open.append(found(piece));
    open.addEventListener("dblclick", () => this.#rename(row, head));
    open.addEventListener("keydown", (event) => event.key === "F2" && this.#rename(row, head));
    const more = iconButton("more", `More about “${head.title}”`, () => this.#menu(row, head, more), { "aria-haspopup": "menu" });
    const row = el("li", {}, open, more);
    return row;
  }

  #menu(row, head, button) {
    shownMenu(button, [
      ["edit", "Rename", () => this.#rename(row, head)],
      ["download", "Export", () => this.actions.exportOne(head.id)],
      ["trash", "Delete …", () => this.actions.remove(head)],
    ]);
  }

  #rename(row, head) {
    const input = el("input", { "aria-label": "Title of the conversation", value: head.title, maxlength: "120" });
    const whole = [...row.children];
    let isOver = false;
    const close = (isKept) => {
      if (isOver) return;
      isOver = true;
      const title = input.value.trim();
      row.replaceChildren(...whole);
      whole[0].focus();
      if (isKept && title && title !== head.title) this.actions.rename(head.id, title);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) close(true);
      else if (event.key === "Escape") close(false);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    input.addEventListener("blur", () => close(true));
    row.replaceChildren(input);
    input.focus();
    input.select();
  }
}

/** A piece of a text with the searched words marked: [before, match, after]. */
function found([before, match, after]) {
  return el("small", { class: "piece", dir: "auto" }, before, el("mark", {}, match), after);
}
