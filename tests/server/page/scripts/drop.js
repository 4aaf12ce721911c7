// A text file is dragged over the chat ("enter"), or dropped there.
([kind, name, text]) => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([text], name, { type: "text/plain" }));
  const event = new DragEvent(kind === "enter" ? "dragenter" : "drop", { dataTransfer, bubbles: true, cancelable: true });
  document.querySelector(".messages").dispatchEvent(event);
}
