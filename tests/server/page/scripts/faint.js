// Texts that stand out too little from what is behind them (WCAG AA).
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = rgba(getComputedStyle(node).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const light = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let checked = 0;
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility({ visibilityProperty: true }) || node.closest(".unseen, .skip, option")) continue;
    const style = getComputedStyle(node);
    const [front, back] = [rgba(style.color), behind(node)].map(light).sort((a, b) => b - a);
    const ratio = (front + 0.05) / (back + 0.05);
    checked += 1;
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) faint.push(`${node.tagName}.${node.className}: ${ratio.toFixed(2)} ${walker.currentNode.data.slice(0, 40)}`);
  }
  return checked < 5 ? ["nothing was checked"] : faint;
}
