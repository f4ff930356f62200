// Filters, sorts and groups the clips of the page; the address keeps what is chosen (#level=3).
"use strict";
const page = JSON.parse(document.getElementById("page").textContent);
const form = document.querySelector("form");
const place = document.getElementById("clips");
const OWN = ["search", "sort", "rows"]; // in the address, but no facet

function element(name, attributes = {}, ...children) {
  const namespace = ["svg", "line", "polyline", "text"].includes(name) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const made = document.createElementNS(namespace, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function curve(clip) {
  const [left, right, top, bottom] = [34, 214, 8, 50];
  const most = Math.max(...clip.flow, 0);
  const x = k => left + (right - left) * (clip.flow.length > 1 ? k / (clip.flow.length - 1) : 0);
  const y = value => bottom - (bottom - top) * (most ? value / most : 0);
  const label = (text, at) => element("text", at, text);
  return element("svg", { class: "curve", viewBox: "0 0 220 66", role: "img", "aria-label": `motion of each pair of frames, at most ${most.toFixed(2)} pixels per frame` },
    element("line", { x1: left, x2: left, y1: top, y2: bottom }),
    element("line", { x1: left, x2: right, y1: bottom, y2: bottom }),
    label(most.toFixed(1), { x: left - 3, y: top + 3, "text-anchor": "end" }),
    label("0", { x: left - 3, y: bottom, "text-anchor": "end" }),
    label("0 s", { x: left, y: bottom + 11 }),
    label("pixels per frame", { x: (left + right) / 2, y: bottom + 11, "text-anchor": "middle" }),
    label(`${page.seconds.toFixed(1)} s`, { x: right, y: bottom + 11, "text-anchor": "end" }),
    element("polyline", { points: clip.flow.map((value, k) => `${x(k).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }));
}

// The video is loaded when the pointer, the focus or a finger reaches the picture.
function shot(clip) {
  const box = element("button", { class: "shot", type: "button", "aria-label": "play" },
    element("img", { src: clip.poster, alt: "", loading: "lazy" }));
  const stop = () => box.querySelector("video")?.remove();
  const play = () => {
    if (box.querySelector("video")) return;
    const video = element("video", { src: clip.video, loop: "", playsinline: "" });
    video.muted = true;
    box.append(video);
    video.play().catch(() => {}); // it was removed before it began
  };
  for (const kind of ["pointerenter", "focus"]) box.addEventListener(kind, play);
  for (const kind of ["pointerleave", "blur"]) box.addEventListener(kind, stop);
  return box;
}

function card(clip) {
  const facts = Object.entries(clip.facts).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
  const shown = clip.video ? shot(clip) : element("img", { src: clip.poster, alt: "first frame of a dropped clip", loading: "lazy" });
  const why = clip.tags.dropped ? [element("dt", { class: "dropped" }, "dropped"), element("dd", { class: "dropped" }, clip.tags.dropped)] : [];
  return element("article", { class: "card" }, shown, ...(clip.flow.length ? [curve(clip)] : []), element("dl", {}, ...why, ...facts));
}

const cards = page.clips.map(card);
const text = page.clips.map(clip => Object.values({ ...clip.facts, ...clip.tags }).join("\n").toLowerCase());

function chosen() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

function choose(changes) {
  const kept = Object.entries({ ...chosen(), ...changes }).filter(([, value]) => value !== "");
  const hash = new URLSearchParams(kept).toString();
  history.replaceState(null, "", hash ? `#${hash}` : "#");
  show();
}

function show() {
  const now = chosen();
  const facets = Object.entries(now).filter(([name]) => !OWN.includes(name));
  const words = (now.search ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  let shown = page.clips.map((_, k) => k).filter(k =>
    facets.every(([name, value]) => (page.clips[k].tags[name] ?? "") === (value === "none" ? "" : value)) &&
    words.every(word => text[k].includes(word)));
  if (now.sort) {
    const sign = now.sort === "fast" ? -1 : 1;
    shown.sort((a, b) => sign * (page.clips[a].motion - page.clips[b].motion) || a - b);
  }
  if (now.rows) {
    const rows = new Map();
    for (const k of shown) rows.set(page.clips[k].row, [...(rows.get(page.clips[k].row) ?? []), k]);
    place.className = "";
    place.replaceChildren(...[...rows].map(([name, some]) =>
      element("section", { class: "row" }, element("h3", {}, name), element("div", {}, ...some.map(k => cards[k])))));
  } else {
    place.className = "grid";
    place.replaceChildren(...shown.map(k => cards[k]));
  }
  for (const field of form.elements) {
    if (field.type === "checkbox") field.checked = Boolean(now[field.name]);
    else if (field.name && field !== document.activeElement) field.value = now[field.name] ?? "";
  }
  const unlisted = facets.filter(([name]) => !form.elements[name]);
  document.getElementById("chips").replaceChildren(...unlisted.map(([name, value]) => {
    const chip = element("button", { class: "chip", type: "button" }, `${name}: ${value}`);
    chip.addEventListener("click", () => choose({ [name]: "" }));
    return chip;
  }));
  document.getElementById("count").textContent = `${shown.length} of ${page.clips.length} clips here; ${page.some}`;
}

form.addEventListener("submit", event => event.preventDefault());
form.addEventListener("input", event => {
  const field = event.target;
  choose({ [field.name]: field.type === "checkbox" ? (field.checked ? "yes" : "") : field.value });
});
document.getElementById("all").addEventListener("click", () => {
  history.replaceState(null, "", "#");
  form.reset();
  show();
});
document.addEventListener("click", event => {
  const link = event.target.closest?.("a[data-facet]");
  if (!link) return;
  event.preventDefault();
  choose({ [link.dataset.facet]: link.dataset.value });
  document.getElementById("all-clips").scrollIntoView();
});
addEventListener("hashchange", show);
show();
