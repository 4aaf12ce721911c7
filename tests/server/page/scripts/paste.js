// A file, or without a name a text, is pasted into the prompt.
([name, text]) => {
  const clipboardData = new DataTransfer();
  if (name) clipboardData.items.add(new File([text], name, { type: "text/plain" }));
  else clipboardData.setData("text/plain", text);
  const event = new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true });
  document.querySelector("#prompt").dispatchEvent(event);
}
