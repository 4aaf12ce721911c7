// Puts the page together: the bar, the panels, the conversations, the key, the models.

import { progress } from "./chat/answer.js";
import { ChatView } from "./chat/view.js";
import { Composer } from "./chat/composer.js";
import { imported, NEUTRAL, newConversation, textOf, tokensOf } from "./chat/conversation.js";
import { Session } from "./chat/session.js";
import { SettingsPanel } from "./chat/settings.js";
import { Sidebar } from "./chat/sidebar.js";
import { EngineView } from "./engine/view.js";
import { alertNow, announce } from "./lib/a11y.js";
import { countTokens, key, models } from "./lib/api.js";
import { askKey, confirmed, showKeys } from "./lib/dialogs.js";
import { el, excerpt, icon, iconButton, save } from "./lib/dom.js";
import { takeDrops } from "./lib/drops.js";
import { openStore, preferences } from "./lib/store.js";

const AGAIN = 3000; // ms between tries to reach the server
const THEMES = { "": "system", light: "light", dark: "dark" };
const KEYS = [
  ["Send the message", "Enter"], ["New line", "Shift", "Enter"], ["Stop the answer", "Esc"], ["Edit the last message, in an empty prompt", "↑"],
  ["New chat", "Ctrl", "Shift", "O"], ["Search conversations", "Ctrl", "K"], ["Rename the conversation in focus", "F2"],
  ["Go to the prompt", "/"], ["These shortcuts", "?"],
];
const UNSAVED = "This conversation is not kept";
const GONE = "This conversation was deleted in another tab.";
const byId = (id) => document.getElementById(id);

const store = await openStore();
const app = byId("app");
const panels = { settings: byId("settings"), engine: byId("engine") };

// --- the chat

const view = new ChatView({
  send: (text) => send(text, []),
  showVersion: (index, at) => session.showVersion(index, at),
  edit: (index, text) => session.edit(index, text),
  retry: (index) => session.retry(index),
  resume: (index) => session.resume(index),
  results: (messages) => session.results(messages),
});
const composer = new Composer({
  onSend: send,
  onStop: () => session.stop(),
  onRecall: () => view.editLast(),
  onThinking(choice) {
    changed({ thinking: choice });
    settings.show(session.conversation.settings);
  },
  count: (text) => countTokens(session.conversation.settings.model, text),
});
const session = new Session(store, view, {
  onBusy: (busy) => composer.setBusy(busy),
  onSaved() {
    if (notice.textContent.startsWith(UNSAVED)) banner("");
    showList();
  },
  onTokens: showContext,
  onCopied() {
    preferences.set("open", session.conversation.id);
    banner("Another tab has continued this conversation; here it goes on as a copy.");
  },
  onUnsaved: (error) => banner(`${UNSAVED}: ${error.message}`),
  onFailure: (error) => (error.status === 401 ? enterKey(error.message) : error.status === 0 && connect()),
});

async function send(text, files) {
  if (!settings.valid) {
    composer.set(text, files);
    showPanel("settings");
    return settings.focusProblem();
  }
  if (!cards.length) {
    composer.set(text, files); // until the models are known
    await connect();
    if (!cards.length || composer.input.value.trim() !== text) return; // changed meanwhile, or sent
    composer.set("");
  }
  session.send(text, files);
}

function showThinking() {
  composer.setThinking(card()?.thinking_switch ? session.conversation.settings.thinking : null);
}

/** How much of the model's context the conversation takes. */
function showContext() {
  const { messages } = session.conversation;
  composer.setContext(tokensOf(messages), card()?.max_model_len);
  const answer = messages.at(-1);
  composer.setProgress(answer?.state === "streaming" ? progress(answer) : "");
}

function open(conversation) {
  session.flush();
  session.open(conversation);
  settings.show(conversation.settings);
  chooseModel();
  showContext();
  preferences.set("open", conversation.id);
  showList();
  showSidebar(false);
}

function create() {
  const { settings: last } = session.conversation ?? { settings: preferences.get("settings", {}) };
  open(newConversation(last));
  composer.input.focus();
}

// --- conversations

const sidebar = new Sidebar(byId("sidebar"), {
  create,
  async open(id) {
    const conversation = await loaded(id);
    if (conversation) open(conversation);
  },
  async rename(id, title) {
    const conversation = await loaded(id);
    if (conversation) await session.save(Object.assign(conversation, { title, named: true }));
  },
  async search(term) {
    const pieces = new Map();
    await store.each((conversation) => {
      const piece = excerpt(textOf(conversation), term);
      if (piece) pieces.set(conversation.id, piece);
    });
    return pieces;
  },
  async exportOne(id) {
    session.flush();
    const conversation = await loaded(id);
    if (conversation) save(`${conversation.title.replaceAll(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}.json`, JSON.stringify([conversation], null, 1));
  },
  help: () => showKeys(KEYS),
  async remove(head) {
    if (!(await confirmed("Delete this conversation?", head.title, "Delete"))) return;
    await store.remove(head.id);
    if (head.id === session.conversation.id) create();
    else showList();
  },
  async exportAll() {
    save("jaxllm-conversations.json", JSON.stringify(await store.exportAll(), null, 1));
  },
  async importFile(file) {
    try {
      const found = JSON.parse(await file.text());
      for (const each of (Array.isArray(found) ? found : [found]).map(imported)) await store.save(each);
      banner("");
      announce("Imported.");
    } catch (error) {
      alertNow(`Not imported: ${error.message}`);
      banner(`Not imported: ${error.message}`);
    }
    showList();
  },
});

/** A conversation of the list; undefined, with a notice, where another tab has deleted it. */
async function loaded(id) {
  const conversation = id === session.conversation.id ? session.conversation : await store.load(id);
  if (conversation) return conversation;
  alertNow(GONE);
  banner(GONE);
  await showList();
}

async function clear() {
  if (!(await confirmed("Delete all conversations?", "They are kept in this browser alone and cannot be brought back.", "Delete all"))) return;
  await store.clear();
  create();
}

async function showList() {
  const { messages, title } = session.conversation;
  document.title = messages.length ? `${title} – jaxllm` : "jaxllm";
  sidebar.show(await store.list(), session.conversation?.id);
}

// --- the bar

const modelChoice = el("select", { class: "model", "aria-label": "Model", onchange: () => {
  changed({ model: modelChoice.value });
  showCard();
} });
const menu = iconButton("menu", "Conversations", () => showSidebar(!app.classList.contains("listed")), { class: "quiet menu", "aria-expanded": "false", "aria-controls": "sidebar" });
const toggles = {
  settings: toggle("sliders", "Settings", "settings"),
  engine: toggle("pulse", "Engine", "engine"),
};
const theme = iconButton("system", "Theme", nextTheme);
const keyButton = iconButton("key", "API key", () => enterKey("This server asks for a key. It is sent to this server alone."), { hidden: !key.get() });
byId("topbar").append(menu, modelChoice, el("span", { class: "space" }), toggles.engine, toggles.settings,
  keyButton, theme);

function toggle(name, label, panel) {
  const button = el("button", { type: "button", class: "quiet toggle", title: label, "aria-pressed": "false", "aria-controls": panel, onclick: () => showPanel(panels[panel].hidden ? panel : "") }, icon(name), el("span", {}, label));
  return button;
}

/** Show one panel, or none. */
function showPanel(name) {
  for (const [each, node] of Object.entries(panels)) {
    node.hidden = each !== name;
    toggles[each].setAttribute("aria-pressed", String(each === name));
  }
  app.dataset.panel = name;
  engine.open(name === "engine");
  preferences.set("panel", name);
}

function showSidebar(isShown) {
  if (isShown === app.classList.contains("listed")) return;
  app.classList.toggle("listed", isShown);
  byId("scrim").hidden = !isShown;
  menu.setAttribute("aria-expanded", String(isShown));
  (isShown ? byId("sidebar").querySelector("button") : menu).focus();
}

function nextTheme() {
  const names = Object.keys(THEMES);
  showTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
}

function showTheme(name) {
  document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem("jaxllm.theme", name);
  } catch {
    // it is only a preference
  }
  theme.replaceChildren(icon(THEMES[name]));
  theme.title = `Theme: ${THEMES[name]}`;
  theme.setAttribute("aria-label", theme.title);
}

// --- panels

const settings = new SettingsPanel(panels.settings, { onChange: changed, onClose: () => closePanel("settings"), onReset: reset, onClear: clear });
const engine = new EngineView(panels.engine, { onClose: () => closePanel("engine") });

function closePanel(name) {
  showPanel("");
  toggles[name].focus();
}

/** Leave everything to the server but the model. */
function reset() {
  changed({ ...NEUTRAL, model: session.conversation.settings.model });
  settings.show(session.conversation.settings);
}

function changed(values) {
  Object.assign(session.conversation.settings, values);
  preferences.set("settings", session.conversation.settings);
  showThinking();
  if (session.conversation.messages.length) session.keep();
}

// --- the server

const notice = el("p", { class: "banner", hidden: true });
let connecting = null; // a promise

function banner(text) {
  notice.textContent = text;
  notice.hidden = !text;
}

/** Ask for the models until the server answers, or wants a key. */
function connect() {
  connecting ??= ask().finally(() => (connecting = null));
  return connecting;
}

async function ask() {
  for (;;) {
    try {
      showModels(await models());
      return banner("");
    } catch (error) {
      banner(error.status === 0 ? `${error.message} Trying again …` : error.message);
      if (error.status === 401) return void enterKey(error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN));
  }
}

let cards = []; // of the served models

function showModels(found) {
  cards = found;
  modelChoice.replaceChildren(...cards.map(({ id }) => el("option", { value: id }, id)));
  chooseModel();
}

/** The card of the conversation's model. */
function card() {
  return cards.find(({ id }) => id === session.conversation.settings.model);
}

function showCard() {
  if (!card()) return;
  view.showModel(card());
  settings.showDefaults(card());
  showThinking();
  showContext();
}

/** Choose the conversation's model, or the first one where that is not served. */
function chooseModel() {
  const { settings: current } = session.conversation;
  if (cards.length && !card()) current.model = cards[0].id;
  modelChoice.value = current.model;
  showCard();
}

let asking = false;

async function enterKey(why) {
  if (asking) return;
  asking = true;
  keyButton.hidden = false;
  const entered = await askKey(key.get(), key.remembered(), why);
  asking = false;
  if (!entered) return;
  key.set(entered.value, entered.remember);
  connect();
}

// --- start

byId("chat").append(notice, view.node, composer.node);
byId("scrim").addEventListener("click", () => showSidebar(false));
document.addEventListener("keydown", (event) => {
  if (event.target.closest("dialog")) return;
  const isTyping = event.target.matches("input, textarea, select");
  const isControl = event.ctrlKey || event.metaKey;
  if (event.key === "Escape") return escape();
  if (isControl && event.shiftKey && event.code === "KeyO") create();
  else if (isControl && !event.shiftKey && event.code === "KeyK") search();
  else if (event.key === "/" && !isTyping && !isControl) composer.input.focus();
  else if (event.key === "?" && !isTyping) showKeys(KEYS);
  else return;
  event.preventDefault();
});

function escape() {
  if (app.classList.contains("listed")) return showSidebar(false);
  if (session.busy) session.stop();
}

function search() {
  showSidebar(matchMedia("(max-width: 760px)").matches);
  sidebar.search.focus();
}

takeDrops(byId("chat"), (files) => composer.attach(files));
document.addEventListener("visibilitychange", () => session.flush());
addEventListener("pagehide", () => session.flush());
showTheme(document.documentElement.dataset.theme);
showPanel(matchMedia("(min-width: 1000px)").matches ? preferences.get("panel", "") : "");
const last = await store.load(preferences.get("open", "")).catch(() => undefined);
open(last ?? newConversation(preferences.get("settings", {})));
connect();
if (matchMedia("(min-width: 761px)").matches) composer.input.focus(); // on a phone this would bring up the keyboard
