// Elements beyond the sides of the screen.
() => [...document.querySelectorAll("body *")]
  .filter((node) => node.checkVisibility() && !node.closest("pre, .table, div.formula, .formula.display, .unseen, .skip, .sidebar"))
  .filter((node) => node.getBoundingClientRect().right > innerWidth + 0.5 || node.getBoundingClientRect().left < -0.5)
  .map((node) => `${node.tagName}.${node.className}`)
