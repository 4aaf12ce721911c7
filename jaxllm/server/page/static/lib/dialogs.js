// Modal dialogs: the browser keeps the focus inside, gives it back, and closes on Esc.

import { el } from "./dom.js";

function show(title, ...parts) {
  const dialog = el("dialog", { "aria-label": title }, el("h2", {}, title), ...parts);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
  });
}

const cancel = () => el("button", { type: "button", onclick: (event) => event.target.closest("dialog").close("") }, "Cancel");

/** Whether the user confirms. */
export async function confirmed(title, text, action) {
  const form = el("form", { method: "dialog" }, el("p", {}, text), el("div", { class: "buttons" }, cancel(), el("button", { value: "yes", class: "danger" }, action)));
  return (await show(title, form)) === "yes";
}

/** Show names and keys: `[[name, key, …], …]`. */
export async function showKeys(rows) {
  const list = el("dl", { class: "keys" }, ...rows.map(([name, ...keys]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, ...keys.flatMap((key, at) => (at ? [" + ", el("kbd", {}, key)] : [el("kbd", {}, key)]))))));
  await show("Keyboard shortcuts", list, el("form", { method: "dialog" }, el("div", { class: "buttons" }, el("button", { class: "primary" }, "Close"))));
}

/** The key that the user enters and whether to keep it: `{ value, remember }`; null when cancelled. */
export async function askKey(current, remembered, why) {
  const input = el("input", { type: "password", id: "key", autocomplete: "off", spellcheck: "false", value: current });
  const remember = el("input", { type: "checkbox", checked: remembered });
  const form = el("form", { method: "dialog" },
    el("p", {}, why),
    el("div", { class: "field" }, el("label", { for: "key" }, "API key"), input),
    el("label", { class: "check" }, remember, "Keep it in this browser, not only in this tab"),
    el("div", { class: "buttons" }, cancel(), el("button", { value: "yes", class: "primary" }, "Save")));
  return (await show("API key", form)) === "yes" ? { value: input.value.trim(), remember: remember.checked } : null;
}
