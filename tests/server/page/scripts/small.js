// Controls that are hard to hit.
() => [...document.querySelectorAll("button, input, select, textarea, summary")]
  .filter((node) => node.checkVisibility() && !node.disabled && !["file", "checkbox"].includes(node.type))
  .filter((node) => node.getBoundingClientRect().height < 28 || node.getBoundingClientRect().width < 28)
  .map((node) => node.outerHTML.slice(0, 120))
