
"use strict";
// Titles become one tooltip that mouse, keyboard and touch reach alike. Without this script they
// stay what they are.
const tip = Object.assign(document.createElement("div"), { id: "tip", role: "tooltip", hidden: true });
document.body.append(tip);
for (const node of document.querySelectorAll("[title]")) {
  node.dataset.tip = node.title;
  node.setAttribute("aria-description", node.title);
  node.removeAttribute("title");
}

function show(node) {
  tip.hidden = !node;
  if (!node) return;
  tip.textContent = node.dataset.tip;
  const box = node.getBoundingClientRect(), gap = 6;
  const left = box.left + box.width / 2 - tip.offsetWidth / 2;
  const above = box.top - tip.offsetHeight - gap;
  tip.style.left = Math.max(gap, Math.min(left, innerWidth - tip.offsetWidth - gap)) + "px";
  tip.style.top = (above >= gap ? above : box.bottom + gap) + "px";
}

const tipped = (event) => event.target.closest?.("[data-tip]");
for (const kind of ["pointerover", "focusin", "click"]) {
  document.addEventListener(kind, (event) => {
    if (kind !== "pointerover" || event.pointerType === "mouse") show(tipped(event));
  });
}
addEventListener("scroll", () => show(null), { capture: true, passive: true });
addEventListener("keydown", (event) => event.key === "Escape" && show(null));
