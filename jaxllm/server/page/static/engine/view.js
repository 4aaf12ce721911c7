// The engine, live: throughput, requests, latencies, KV pages, the prefix cache, steps.

import { el, iconButton } from "../lib/dom.js";
import { Chart } from "./charts.js";
import { Feed, History, SPAN } from "./feed.js";
import { PageMap } from "./pages.js";

const SMOOTH = 3; // frames over which a speed is shown
const KINDS = ["decode", "mixed", "prefill"];

const number = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(value >= 10 || Number.isInteger(value) ? 0 : 1));
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

/** A time in the unit that fits it. */
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 10) return `${seconds.toFixed(0)} s`;
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return `${(1000 * seconds).toFixed(seconds >= 0.1 ? 0 : seconds >= 0.01 ? 1 : 2)} ms`;
}

/** The times between which a percentile lies, which is all that is known of it. */
function between(bounds) {
  if (!bounds) return "–";
  const [low, high] = bounds;
  const isSmall = (high ?? low) < 1;
  const text = (seconds) => String(Number((isSmall ? 1000 * seconds : seconds).toPrecision(3)));
  const unit = isSmall ? "ms" : "s";
  if (high === null) return `> ${text(low)} ${unit}`;
  return low ? `${text(low)}–${text(high)} ${unit}` : `< ${text(high)} ${unit}`;
}

/** A figure with its name, and a chart below it. */
class Tile {
  constructor(name, unit, kind) {
    this.value = el("strong", {}, "–");
    const canvas = el("canvas", { class: `chart ${kind}`, role: "img", "aria-label": `${name}, last two minutes` });
    this.detail = el("span", { class: "detail" });
    this.node = el("section", { class: "tile" }, el("h3", {}, name), el("p", { class: "figure" }, this.value, " ", el("span", {}, unit), this.detail), canvas);
    this.chart = new Chart(canvas, number);
  }

  show(value, detail = "") {
    this.value.textContent = number(value);
    this.detail.textContent = detail;
    this.chart.push(value);
  }
}

/** The panel; it asks for frames while it is open and the page is in front. */
export class EngineView {
  #maps = [];
  #history = new History();

  constructor(node, { onClose }) {
    this.feed = new Feed((samples) => this.#seed(samples), (frame) => this.show(frame), (error) => this.#problem(error));
    this.state = el("span", { class: "pill" }, "connecting");
    this.output = new Tile("Generated", "tokens/s", "output");
    this.input = new Tile("Prompts", "tokens/s", "input");
    this.running = new Tile("Running", "", "running");
    this.waiting = new Tile("Waiting", "", "waiting");
    this.latency = el("tbody");
    this.latencyNote = el("small");
    this.pools = el("div");
    this.usage = el("strong", {}, "–");
    this.prefix = el("dl", { class: "facts" });
    this.steps = el("tbody");
    this.stepsNote = el("small");
    this.facts = el("dl", { class: "facts" });
    node.append(el("header", {}, el("h2", {}, "Engine"), this.state, iconButton("close", "Close the engine view", onClose)), this.#body());
    document.addEventListener("visibilitychange", () => this.#toggle());
  }

  open(isOpen) {
    this.isOpen = isOpen;
    this.#toggle();
  }

  #toggle() {
    if (this.isOpen && !document.hidden) this.feed.start();
    else this.feed.stop();
  }

  #body() {
    const head = (...names) => el("thead", {}, el("tr", {}, ...names.map((name) => el("th", { scope: "col" }, name))));
    return el("div", { class: "engine" },
      el("div", { class: "tiles" }, this.output.node, this.input.node, this.running.node, this.waiting.node),
      el("section", { class: "card" }, el("h3", {}, "Latency ", this.latencyNote), el("table", {}, head("", "p50", "p90", "p99", "mean"), this.latency), el("small", {}, "Percentiles are counted in buckets: each lies between its two times.")),
      el("section", { class: "card" }, el("h3", {}, "KV pages ", this.usage), this.pools, this.prefix),
      el("section", { class: "card" }, el("h3", {}, "Steps ", this.stepsNote), el("table", {}, head("", "per second", "mean", "tokens", "share"), this.steps)),
      el("section", { class: "card" }, el("h3", {}, "This engine"), this.facts));
  }

  /** Show what was before this page watched. */
  #seed(samples) {
    this.#history.clear();
    const series = new Map([this.output, this.input, this.running, this.waiting].map((tile) => [tile, []]));
    for (const sample of samples) {
      this.#history.push(sample);
      series.get(this.output).push(this.#history.rate("generation_tokens", SMOOTH));
      series.get(this.input).push(this.#history.rate("prompt_tokens", SMOOTH));
      series.get(this.running).push(sample.running);
      series.get(this.waiting).push(sample.waiting);
    }
    for (const [tile, values] of series) tile.chart.set(values);
  }

  /** Show a frame. */
  show(frame) {
    this.#history.push(frame);
    const stalled = frame.silent_seconds > 5 || !frame.pools;
    this.#state(!frame.alive ? "restarting" : stalled ? "busy" : "live");
    this.output.show(this.#history.rate("generation_tokens", SMOOTH));
    this.input.show(this.#history.rate("prompt_tokens", SMOOTH));
    this.running.show(frame.running, `of ${frame.max_num_seqs}`);
    this.waiting.show(frame.waiting);
    this.#showLatency(frame);
    this.#showPages(frame);
    this.#showSteps();
    facts(this.facts, {
      Model: frame.model, Context: `${frame.max_model_len.toLocaleString("en")} tokens`, Steps: frame.steps.toLocaleString("en"),
      Preemptions: frame.preemptions.toLocaleString("en"), "Compiled while serving": frame.compiles_after_warmup, Version: frame.version,
    });
  }

  #showLatency({ ttft, itl }) {
    this.latencyNote.textContent = !ttft.count ? "no requests yet" : ttft.recent || itl.recent ? "last minute" : "since start";
    const row = (name, title, times) => el("tr", {}, el("th", { scope: "row" }, el("abbr", { title }, name)), 
      ...["p50", "p90", "p99"].map((at) => el("td", {}, between(times.between[at]))), el("td", {}, duration(times.mean)));
    this.latency.replaceChildren(row("TTFT", "Time to first token", ttft), row("ITL", "Inter-token latency: from one token to the next", itl));
  }

  #showPages(frame) {
    for (const [at, pool] of (frame.pools ?? []).entries()) {
      if (!this.#maps[at]) {
        this.#maps[at] = new PageMap();
        this.pools.append(this.#maps[at].node);
      }
      this.#maps[at].update(pool);
    }
    this.usage.textContent = percent(frame.kv_usage);
    const minute = this.#history.hitRate(SPAN);
    const whole = frame.prefix_queries ? frame.prefix_hits / frame.prefix_queries : null;
    facts(this.prefix, {
      "Prefix hits, last minute": minute === null ? "–" : percent(minute),
      "Prefix hits, since start": whole === null ? "–" : percent(whole),
      "Prompt tokens found": frame.prefix_hits.toLocaleString("en"),
      ...(frame.host_usage > 0 && { "Host memory": percent(frame.host_usage) }),
    });
  }

  #showSteps() {
    const { recent, seconds: span, kinds } = this.#history.steps();
    const all = Object.values(kinds).reduce((sum, total) => sum + total.seconds, 0);
    this.stepsNote.textContent = all ? (recent ? "last minute" : "since start") : "none yet";
    this.steps.replaceChildren(...KINDS.map((kind) => {
      const { steps = 0, seconds = 0, tokens = 0 } = kinds[kind] ?? {};
      const bar = el("i", { class: "bar" });
      bar.style.width = percent(all ? seconds / all : 0).replace(" ", "");
      return el("tr", {}, el("th", { scope: "row" }, kind), el("td", {}, recent ? number(steps / Math.max(1, span)) : "–"),
        el("td", {}, steps ? duration(seconds / steps) : "–"), el("td", {}, steps ? number(tokens / steps) : "–"),
        el("td", { class: "share" }, el("span", {}, all ? percent(seconds / all) : "–"), bar));
    }));
  }

  #problem(error) {
    this.#state(error.status === 401 ? "needs a key" : error.code === "stats_full" ? "too many watch" : "not reached");
  }

  #state(text) {
    this.state.textContent = text;
    this.state.dataset.state = text;
  }
}

/** Show names and values as a list. */
function facts(list, values) {
  list.replaceChildren(...Object.entries(values).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))));
}
