// The map of a pool's KV pages: one square for a page, or for several where there are many.

import { el } from "../lib/dom.js";
import { context } from "./charts.js";

const FULL = 15;
const HEIGHT = 190; // pixels that a map may take
const GLOW = 4; // frames for which a hit is marked
const KINDS = { held: "held by one request", shared: "shared by several", cached: "free, prefix kept", free: "free", hit: "just found by its prefix" };

/** The number behind a hexadecimal digit's character code. */
const digit = (code) => (code < 58 ? code - 48 : code - 87);

/** The map of one pool. */
export class PageMap {
  #before = null;
  #glow = new Uint8Array(0);
  #pool = null;

  constructor() {
    this.canvas = el("canvas", { class: "map", role: "img" });
    this.title = el("p", { class: "map-title" });
    this.swatches = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, el("i", { class: `swatch ${kind}` })]));
    const legend = el("ul", { class: "legend" }, ...Object.entries(KINDS).map(([kind, text]) => el("li", {}, this.swatches[kind], text)));
    this.node = el("div", { class: "pool" }, this.title, this.canvas, legend);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  /** Show a pool's pages, as they are in a frame. */
  update(pool) {
    const { pages, page_size, held, cached, per_cell, window } = pool;
    const cells = decode(pool.cells);
    this.#markHits(cells);
    this.#pool = cells;
    const squares = per_cell > 1 ? `; a square is ${per_cell} pages` : "";
    const layers = window ? `, layers that see ${window} tokens` : "";
    this.title.textContent = `${pages.toLocaleString("en")} pages of ${page_size} tokens${layers}${squares}`;
    this.canvas.setAttribute("aria-label", `${held} of ${pages} pages held, ${cached} keep a prefix, ${cells.shared} squares shared`);
    this.draw();
  }

  /** A page that was only cached and is held now, or is held by more requests, was found. */
  #markHits(cells) {
    const before = this.#before?.count === cells.count ? this.#before : null;
    if (!before) this.#glow = new Uint8Array(cells.count);
    for (let at = 0; before && at < cells.count; at += 1) {
      const revived = cells.cached[at] < before.cached[at] && cells.held[at] > before.held[at];
      const shared = cells.most[at] > Math.max(1, before.most[at]);
      this.#glow[at] = revived || shared ? GLOW : Math.max(0, this.#glow[at] - 1);
    }
    this.#before = cells;
  }

  draw() {
    const cells = this.#pool;
    if (!cells || !this.canvas.clientWidth) return;
    const width = this.canvas.clientWidth;
    const size = Math.max(4, Math.min(16, Math.floor(Math.sqrt((width * HEIGHT) / cells.count))));
    const columns = Math.floor(width / size);
    const pitch = width / columns;
    this.canvas.style.height = `${Math.ceil(Math.ceil(cells.count / columns) * pitch)}px`;
    const { drawing } = context(this.canvas);
    const colours = Object.fromEntries(Object.entries(this.swatches).map(([kind, node]) => [kind, getComputedStyle(node).backgroundColor]));
    const side = pitch - (size > 5 ? 1.5 : 1);
    for (let at = 0; at < cells.count; at += 1) {
      const left = (at % columns) * pitch;
      const top = Math.floor(at / columns) * pitch;
      const bar = (colour, from, share) => {
        drawing.fillStyle = colours[colour];
        drawing.fillRect(left, top + side * (1 - from - share), side, side * share);
      };
      bar("free", 0, 1);
      const held = cells.held[at] / FULL;
      if (held) bar(cells.most[at] > 1 ? "shared" : "held", 0, held);
      if (cells.cached[at]) bar("cached", held, Math.min(1 - held, cells.cached[at] / FULL));
      if (this.#glow[at]) {
        drawing.strokeStyle = colours.hit;
        drawing.lineWidth = 1.5;
        drawing.globalAlpha = this.#glow[at] / GLOW;
        drawing.strokeRect(left + 0.5, top + 0.5, side - 1, side - 1);
        drawing.globalAlpha = 1;
      }
    }
  }
}

/** Three digits a square → shares of held and cached pages, and the most references to a page. */
function decode(text) {
  const count = text.length / 3;
  const cells = { count, shared: 0, held: new Uint8Array(count), cached: new Uint8Array(count), most: new Uint8Array(count) };
  for (let at = 0; at < count; at += 1) {
    cells.held[at] = digit(text.charCodeAt(3 * at));
    cells.cached[at] = digit(text.charCodeAt(3 * at + 1));
    cells.most[at] = digit(text.charCodeAt(3 * at + 2));
    cells.shared += cells.most[at] > 1;
  }
  return cells;
}
