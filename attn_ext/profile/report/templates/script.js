
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

for (const title of document.querySelectorAll("svg title")) {
  title.parentNode.dataset.tip = title.textContent;
  title.remove();
}

function show(node) {
  tip.hidden = !node;
  if (!node) return;
  tip.textContent = node.dataset.tip;
  const box = (node.querySelector("rect, path") ?? node).getBoundingClientRect(), gap = 6;
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

// A label is shown where enough of it fits: half of one in a bar says less than the legend.
const labels = [...document.querySelectorAll(".box text")].map((text) => {
  const whole = text.textContent.length * 6.8 + 8;
  return { text, box: text.parentNode, least: text.closest(".bars") ? whole : Math.min(whole, 44) };
});
function fit() {
  const widths = labels.map(({ box }) => box.firstElementChild.getBoundingClientRect().width);
  labels.forEach(({ text, least }, at) => text.classList.toggle("unfit", widths[at] < least));
}
fit();
addEventListener("resize", fit);
document.addEventListener("toggle", fit, true);

// What a call started lights up with it.
document.addEventListener("pointerover", (event) => {
  for (const lit of document.querySelectorAll(".hot")) lit.classList.remove("hot");
  const part = event.target.closest?.("[data-c]");
  if (!part) return;
  const picture = part.closest(".timeline");
  for (const twin of picture.querySelectorAll(`[data-c="${part.dataset.c}"]`)) twin.classList.add("hot");
});

// A timeline is zoomed by its width: everything in it is placed in percent.
for (const zoom of document.querySelectorAll(".zoom")) {
  const pan = zoom.parentNode.querySelector(".pan"), picture = pan.querySelector("svg");
  let scale = 1;
  const set = (wanted, at) => {
    const centre = (pan.scrollLeft + at) / picture.clientWidth;
    scale = Math.max(1, Math.min(64, wanted));
    picture.style.width = scale * 100 + "%";
    picture.classList.toggle("zoomed", scale >= 6);
    pan.scrollLeft = centre * picture.clientWidth - at;
    fit();
  };
  zoom.hidden = false;
  zoom.addEventListener("click", (event) => {
    const factor = event.target.dataset.zoom;
    if (factor) set(scale * factor, pan.clientWidth / 2);
  });
  pan.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    set(scale * 2 ** (-event.deltaY / 200), event.clientX - pan.getBoundingClientRect().left);
  }, { passive: false });
}
