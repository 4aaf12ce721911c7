// Small charts on canvases: areas over the last two minutes.

const LENGTH = 120; // samples
const STEPS = [1, 2, 5, 10];

/** The least round number that is not below `value`. */
export function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return unit * STEPS.find((step) => step * unit >= value);
}

/** Prepare a canvas for its size on this screen; null while it is hidden. */
export function context(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width) return null;
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const drawing = canvas.getContext("2d");
  drawing.scale(ratio, ratio);
  return { drawing, width, height };
}

/** An area chart of one series in the canvas's own colour; `label(value)` names its top. */
export class Chart {
  #values = [];

  constructor(canvas, label) {
    this.canvas = canvas;
    this.label = label;
  }

  /** Show a series from its start. */
  set(values) {
    this.#values = values.slice(-LENGTH);
    this.draw();
  }

  push(value) {
    this.#values = [...this.#values, value].slice(-LENGTH);
    this.draw();
  }

  draw() {
    const place = context(this.canvas);
    if (!place) return;
    const { drawing, width, height } = place;
    const style = getComputedStyle(this.canvas);
    const top = roundUp(Math.max(0, ...this.#values));
    const x = (at) => width - ((this.#values.length - 1 - at) * width) / (LENGTH - 1);
    const y = (value) => height - 1 - ((height - 4) * value) / top;
    drawing.strokeStyle = style.borderBottomColor;
    drawing.beginPath();
    for (const share of [0, 0.5, 1]) {
      drawing.moveTo(0, Math.round(y(share * top)) - 0.5);
      drawing.lineTo(width, Math.round(y(share * top)) - 0.5);
    }
    drawing.stroke();
    if (!this.#values.length) return;
    drawing.strokeStyle = drawing.fillStyle = style.color;
    drawing.lineWidth = 1.5;
    drawing.lineJoin = "round";
    drawing.beginPath();
    for (const [at, value] of this.#values.entries()) drawing.lineTo(x(at), y(value));
    drawing.stroke();
    drawing.lineTo(width, height);
    drawing.lineTo(x(0), height);
    drawing.globalAlpha = 0.16;
    drawing.fill();
    drawing.globalAlpha = 1;
    drawing.fillStyle = style.outlineColor;
    drawing.font = `11px ${style.fontFamily}`;
    drawing.fillText(this.label(top), 2, 13);
  }
}
