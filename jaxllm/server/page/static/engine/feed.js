// Frames of the engine's statistics, as long as somebody watches; and what two of them say.

import { events, request } from "../lib/api.js";

const PAUSE = 2000; // ms before another try
export const SPAN = 60; // frames over which rates of the cache and of steps are taken

/** Calls `onHistory(samples)` with what was before, `onFrame(frame)` each second and `onProblem(error)` when there is none, until stopped. */
export class Feed {
  #controller = null;

  constructor(onHistory, onFrame, onProblem) {
    this.onHistory = onHistory;
    this.onFrame = onFrame;
    this.onProblem = onProblem;
  }

  start() {
    if (this.#controller) return;
    this.#controller = new AbortController();
    this.#run(this.#controller.signal);
  }

  stop() {
    this.#controller?.abort();
    this.#controller = null;
  }

  async #run(signal) {
    while (!signal.aborted) {
      try {
        for await (const { name, value } of events(await request("stats/stream", { signal }))) {
          if (signal.aborted) return;
          if (name === "history") this.onHistory(samples(value));
          else this.onFrame(value);
        }
      } catch (error) {
        if (signal.aborted) return;
        this.onProblem(error);
      }
      await new Promise((resolve) => setTimeout(resolve, PAUSE));
    }
  }
}

/** The server's columns as samples, which are frames with less in them. */
function samples(columns) {
  const names = Object.keys(columns);
  return columns.time.map((_, at) => Object.fromEntries(names.map((name) => [name, columns[name][at]])));
}

/** The frames of the last minute. */
export class History {
  #frames = [];

  clear() {
    this.#frames = [];
  }

  /** Add a frame. Counters that went down belong to another engine process: history starts anew. */
  push(frame) {
    if (this.#frames.length && frame.steps < this.#frames.at(-1).steps) this.#frames = [];
    this.#frames = [...this.#frames, frame].slice(-SPAN);
  }

  /** How much a counter grew a second, over so many frames; 0 for the first one. */
  rate(name, frames) {
    const { first, last, seconds } = this.#ends(frames);
    return seconds > 0 ? (last[name] - first[name]) / seconds : 0;
  }

  /** The share of prompt tokens that the prefix cache had; null when none was looked up. */
  hitRate(frames) {
    const { first, last } = this.#ends(frames);
    const queries = last.prefix_queries - first.prefix_queries;
    return queries ? (last.prefix_hits - first.prefix_hits) / queries : null;
  }

  /** Steps, seconds and tokens by kind over the minute; over all time while there were none. */
  steps() {
    const { last } = this.#ends(SPAN);
    const first = this.#frames.find((frame) => frame.step_totals) ?? last;
    const now = last.step_totals ?? {};
    const grown = Object.entries(now).map(([kind, total]) => {
      const before = first.step_totals?.[kind] ?? { steps: 0, seconds: 0, tokens: 0 };
      return [kind, { steps: total.steps - before.steps, seconds: total.seconds - before.seconds, tokens: total.tokens - before.tokens }];
    });
    const recent = grown.some(([, total]) => total.steps > 0);
    return { recent, seconds: last.time - first.time, kinds: recent ? Object.fromEntries(grown) : now };
  }

  #ends(frames) {
    const last = this.#frames.at(-1);
    const first = this.#frames.at(-Math.min(frames + 1, this.#frames.length));
    return { first, last, seconds: last.time - first.time };
  }
}
