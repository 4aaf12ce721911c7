// Files that are dragged over a part of the page.

/** Call `onFiles(files)` when files are dropped on `node`, which has the class "dropping" while they are above it. */
export function takeDrops(node, onFiles) {
  let depth = 0; // of the elements that were entered and not left
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  const show = (by) => {
    depth = Math.max(0, depth + by);
    node.classList.toggle("dropping", depth > 0);
  };
  node.addEventListener("dragenter", (event) => hasFiles(event) && show(1));
  node.addEventListener("dragleave", (event) => hasFiles(event) && show(-1));
  node.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  node.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    depth = 0;
    show(0);
    onFiles([...event.dataTransfer.files]);
  });
  // A file that is dropped beside it must not replace the page
  for (const name of ["dragover", "drop"]) addEventListener(name, (event) => hasFiles(event) && event.preventDefault());
}
