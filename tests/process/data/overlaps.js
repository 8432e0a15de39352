(() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), boxes = [];
  const clips = (style) => [style.overflowX, style.overflowY].some((each) => each !== "visible");
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    if (!node.data.trim() || /^(script|style|title)$/i.test(parent.tagName) || !parent.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const found of range.getClientRects()) {
      let [left, top, right, bottom] = [found.left, found.top, found.right, found.bottom];
      for (let each = parent; each && each !== document.body; each = each.parentElement) {
        if (each instanceof SVGElement || !clips(getComputedStyle(each))) continue;
        const box = each.getBoundingClientRect();
        left = Math.max(left, box.left); right = Math.min(right, box.right);
        top = Math.max(top, box.top); bottom = Math.min(bottom, box.bottom);
      }
      if (right - left > 1 && bottom - top > 1) boxes.push({ node, left, top, right, bottom });
    }
  }
  const bad = [];
  boxes.forEach((a, index) => boxes.slice(index + 1).forEach((b) => {
    const width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    const isSticky = [a, b].some((each) => each.node.parentElement.tagName === "TH");
    if (a.node !== b.node && !isSticky && width > 1 && height > 3) bad.push([a.node.data, b.node.data]);
  }));
  return { texts: boxes.length, bad, width: document.documentElement.scrollWidth };
})()
