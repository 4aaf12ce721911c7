// The task of every client: a product that the model leaves to the calculator.
import assert from "node:assert";

export const URL = process.argv[2];
export const QUESTION = "What is 4839 * 273? Use the calculator.";
export const ABOUT = "Evaluate an arithmetic expression.";
export const PARAMETERS = {
  type: "object",
  properties: { expression: { type: "string" } },
  required: ["expression"],
};
let called = 0;

export function calculator({ expression }) {
  called += 1;
  const [a, b] = expression.split("*").map(Number);
  return String(a * b);
}

// The way `what` ended with `text`; the calculator was asked once.
export function finish(what, text) {
  assert(text?.replaceAll(",", "").includes("1321047"), `${what}: ${text}`);
  assert.strictEqual(called, 1, what);
  called = 0;
  console.log(what, "ok");
}
