// What a screen reader hears, and where the keyboard is.

const LONGEST = 600; // characters of an answer that are read out by themselves

/** Say something when the reader is idle. */
export function announce(text) {
  document.getElementById("status").textContent = text;
}

/** Say something at once. */
export function alertNow(text) {
  document.getElementById("alert").textContent = "";
  document.getElementById("alert").textContent = text;
}

/** Say a finished answer, or how long it is. */
export function announceAnswer(text) {
  const words = text.trim().split(/\s+/).length;
  announce(text.length <= LONGEST ? `Answer: ${text}` : `The answer is complete. It has ${words} words.`);
}

/** Whether animations should be left out. */
export function prefersStillness() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}

/** Run `action` on Enter, unless Shift is held or an input method composes a character. */
export function onEnter(node, action) {
  node.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    action();
  });
}
