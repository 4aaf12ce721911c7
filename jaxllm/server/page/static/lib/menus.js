// A small menu beside a button: arrows move, Escape and a click elsewhere close.

import { el, icon } from "./dom.js";

let close = () => {};

/** Show a menu of `[icon, name, action]` beside a button. */
export function shownMenu(button, items) {
  close();
  const buttons = items.map(([picture, name, action]) =>
    el("button", { type: "button", role: "menuitem", onclick: () => {
      close();
      action();
    } }, icon(picture), name));
  const menu = el("div", { class: "menu-list", role: "menu", "aria-label": button.getAttribute("aria-label") }, ...buttons);
  const outside = (event) => {
    if (!menu.contains(event.target) && !button.contains(event.target)) close();
  };
  const key = (event) => {
    const at = buttons.indexOf(document.activeElement);
    if (event.key === "Escape" || event.key === "Tab") close();
    else if (event.key === "ArrowDown") buttons[(at + 1) % buttons.length].focus();
    else if (event.key === "ArrowUp") buttons.at(at - 1).focus();
    else return;
    if (event.key !== "Tab") event.preventDefault();
    event.stopPropagation();
  };
  close = () => {
    close = () => {};
    document.removeEventListener("pointerdown", outside, true);
    menu.remove();
    button.setAttribute("aria-expanded", "false");
    button.focus();
  };
  document.body.append(menu);
  const { bottom, top, right } = button.getBoundingClientRect();
  const { width, height } = menu.getBoundingClientRect();
  const isBelow = bottom + height + 8 < innerHeight;
  menu.style.left = `${Math.max(8, Math.min(right - width, innerWidth - width - 8))}px`;
  menu.style.top = `${isBelow ? bottom + 4 : Math.max(8, top - height - 4)}px`;
  button.setAttribute("aria-expanded", "true");
  menu.addEventListener("keydown", key);
  document.addEventListener("pointerdown", outside, true);
  buttons[0].focus();
}
