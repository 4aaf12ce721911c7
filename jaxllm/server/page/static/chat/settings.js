// The settings of a conversation as a form. An empty field leaves the choice to the server.

import { el, iconButton } from "../lib/dom.js";
import { problemOf } from "./conversation.js";

const EXAMPLES = {
  tools: [{ type: "function", function: { name: "get_weather", description: "The weather in a city.", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }],
  schema: { type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"], additionalProperties: false },
};
// Name: label, least, most, step, hint
const SAMPLING = {
  temperature: ["Temperature", 0, 2, "any", "0 picks the likeliest token"],
  top_p: ["Top p", 0, 1, "any", "likeliest tokens up to this probability"],
  top_k: ["Top k", -1, undefined, 1, "so many likeliest tokens; 0 is all"],
  min_p: ["Min p", 0, 1, "any", "least probability, relative to the likeliest"],
  max_tokens: ["Most tokens", 1, undefined, 1, "of an answer"],
  seed: ["Seed", undefined, undefined, 1, "makes draws repeatable"],
  presence_penalty: ["Presence penalty", -2, 2, "any", ""],
  frequency_penalty: ["Frequency penalty", -2, 2, "any", ""],
  repetition_penalty: ["Repetition penalty", 0.001, 1000, "any", ""],
};

/** The form. `onChange(settings)` gets every change; `onReset()` empties it, `onClear()` deletes all conversations. */
export class SettingsPanel {
  #fields = new Map();
  #problems = new Map();

  constructor(node, { onChange, onClose, onReset, onClear }) {
    this.onChange = onChange;
    const form = el("form", { class: "settings", onsubmit: (event) => event.preventDefault() },
      this.#text("system", "System prompt", 4, "How the model should behave"),
      this.#select("thinking", "Thinking", { "": "As the server decides", on: "On", off: "Off" }),
      el("fieldset", {}, el("legend", {}, "Sampling"), el("div", { class: "grid" }, ...Object.entries(SAMPLING).map(([name, row]) => this.#number(name, ...row))),
        this.#text("stop", "Stop texts", 2, "One on each line")),
      el("fieldset", {}, el("legend", {}, "Tools"),
        this.#json("tools", "Tools as JSON", "A list, as in the API. You type the results."),
        this.#select("tool_choice", "Tool choice", { "": "As the server decides", auto: "Auto", required: "Required", none: "None" })),
      el("fieldset", {}, el("legend", {}, "Answer"),
        this.#select("format", "Format", { "": "Text", json_object: "A JSON object", json_schema: "JSON that follows a schema" }),
        this.#json("schema", "JSON schema", "Used with the format above.")),
      el("fieldset", {}, el("legend", {}, "Other"), this.#json("extra", "Other fields as JSON", 'Sent as they are, such as {"logit_bias": {}}'),
        el("button", { type: "button", class: "start", onclick: onReset }, "Leave all to the server")),
      el("fieldset", {}, el("legend", {}, "Conversations"), el("small", {}, "They are kept in this browser alone, the latest 200."),
        el("button", { type: "button", class: "quiet danger-text", onclick: onClear }, "Delete all conversations")),
    );
    node.append(el("header", {}, el("h2", {}, "Settings"), iconButton("close", "Close the settings", onClose)), form);
  }

  /** Show the settings of a conversation. */
  show(settings) {
    this.settings = settings;
    for (const [name, field] of this.#fields) {
      field.value = settings[name];
      this.#check(name);
    }
  }

  /** Show what the server takes for fields that are empty: a model's card. */
  showDefaults(card) {
    const values = { ...card?.default_parameters, max_tokens: "what is left", seed: "random" };
    for (const name of Object.keys(SAMPLING)) this.#fields.get(name).placeholder = String(values[name] ?? "default");
  }

  /** Whether every field can be sent. */
  get valid() {
    return [...this.#fields.values()].every((field) => field.validity.valid);
  }

  /** Focus the first field that cannot be sent. */
  focusProblem() {
    [...this.#fields.values()].find((field) => !field.validity.valid)?.focus();
  }

  #field(name, label, control, hint) {
    control.id = `setting-${name}`;
    const note = el("small", { id: `${control.id}-hint` }, hint);
    const problem = el("small", { id: `${control.id}-problem`, class: "problem", hidden: true });
    control.setAttribute("aria-describedby", `${problem.id} ${note.id}`);
    control.addEventListener("input", () => {
      this.settings[name] = control.value;
      this.#check(name);
      this.onChange(this.settings);
    });
    this.#fields.set(name, control);
    this.#problems.set(name, problem);
    return el("div", { class: "field" }, el("label", { for: control.id }, label), control, problem, hint && note);
  }

  #check(name) {
    const field = this.#fields.get(name);
    field.setCustomValidity(problemOf(name, field.value));
    const problem = this.#problems.get(name);
    problem.textContent = field.validationMessage;
    problem.hidden = field.validity.valid;
    field.setAttribute("aria-invalid", String(!field.validity.valid));
  }

  #text(name, label, rows, hint) {
    return this.#field(name, label, el("textarea", { rows: String(rows) }), hint);
  }

  #number(name, label, min, max, step, hint) {
    return this.#field(name, label, el("input", { type: "number", inputmode: "decimal", min, max, step, placeholder: "default" }), hint);
  }

  #select(name, label, options) {
    return this.#field(name, label, el("select", {}, ...Object.entries(options).map(([value, text]) => el("option", { value }, text))), "");
  }

  #json(name, label, hint) {
    const area = el("textarea", { rows: "5", class: "mono", spellcheck: "false" });
    const field = this.#field(name, label, area, hint);
    if (EXAMPLES[name]) field.append(el("button", { type: "button", class: "link", onclick: () => {
      area.value = JSON.stringify(EXAMPLES[name], null, 2);
      area.dispatchEvent(new Event("input"));
      area.focus();
    } }, "Insert an example"));
    return field;
  }
}
