// Runs before the first paint, so that a chosen theme does not flash. "" follows the system.
(() => {
  try {
    document.documentElement.dataset.theme = localStorage.getItem("jaxllm.theme") ?? "";
  } catch {
    document.documentElement.dataset.theme = "";
  }
})();
