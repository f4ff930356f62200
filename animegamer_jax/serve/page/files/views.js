// Pieces of the page, made of a game's state. A player's text is set as text, never as HTML.

import { said, t } from "./text.js";

export const $ = (selector) => document.querySelector(selector);

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// Runs something that may replace, hide or disable the button that has the focus; then the one in
// its place has it, or `other`: a neighbour of a tool does something else.
export function keepFocus(work, other) {
  const before = document.activeElement;
  const group = before?.closest("#board, #suggestions, .reading, #cards, #tools, #say, #games-list");
  if (!group) return work();
  const buttons = () => [...group.querySelectorAll("button")].filter((one) => !one.disabled && one.getClientRects().length);
  const place = buttons().indexOf(before);
  work();
  if (before.isConnected && !before.disabled && before.getClientRects().length) return undefined;
  const { turn, take } = before.dataset;
  const found = buttons();
  const same = found.find((one) => (turn ? one.dataset.turn === turn : take && one.dataset.take));
  const near = group.id === "tools" ? null : found[Math.min(place, found.length - 1)];
  (same ?? near ?? other())?.focus({ preventScroll: true });
  return undefined;
}

export const METERS = ["stamina", "social", "entertainment"];

// The three meters; `turn` is the one whose changes are shown.
export function meters(values, turn) {
  return METERS.map((name) => {
    const edited = turn && turn.meters[name] !== values[name]; // by the player, after the turn
    const change = turn && !edited ? turn.changes[name] : 0;
    const sign = change > 0 ? `+${change}` : `${change || ""}`.replace("-", "−");
    return h(
      "div",
      { class: "meter", "data-meter": name, "data-value": values[name] },
      h("span", {}, t(name)),
      h("span", { class: change > 0 ? "up" : "down" }, sign),
      h("span", {}, `${values[name]}`),
      h(
        "div",
        {
          class: "track", role: "meter", "aria-label": t(name), "aria-valuemin": 0,
          "aria-valuemax": 100, "aria-valuenow": values[name],
        },
        h("div", { class: name, style: { width: `${values[name]}%` } }),
      ),
    );
  });
}

export function day(found) {
  const goal = t(`goal_${found.goal.kind}`, { target: found.goal.target });
  const reached = found.goal.met ? "★" : `(${t("so_far", { reached: found.goal.reached })})`;
  const turns = t("day", { number: found.number, played: found.played, turns: found.turns });
  const isNew = found.number === 1 && found.played < 2;
  const hint = isNew ? h("small", {}, t("goal_hint", { turns: found.turns })) : null;
  return [h("strong", {}, turns), h("span", {}, `${goal} `, h("span", { class: "whole" }, reached)), ...(hint ? [hint] : [])];
}

// An instruction without the labels of its parts.
export function plain(instruction) {
  const parts = instruction.replace(/\.$/, "").split(";").map((part) => part.trim());
  if (parts.every((part) => /^[^:]{1,14}:\s*\S/.test(part))) {
    return parts.map((part) => part.replace(/^[^:]*:\s*/, "")).join(" · ");
  }
  return instruction;
}

// A line in the caption, which shows the start of a long one.
export function line(text) {
  return h("span", { class: "said", title: text }, text);
}

export function caption(turn, total) {
  const notes = [t("turn_of", { turn: turn.turn, total })];
  if (turn.unknown.length) notes.push(t("not_known", { words: turn.unknown.join(", ") }));
  return [line(plain(turn.instruction)), h("small", {}, notes.join(" · "))];
}

// Of a turn that is being played: its line, and what is seen meanwhile.
export function firstCaption(picture) {
  return [line(plain(picture.instruction)), h("small", {}, t("first_picture"))];
}

export function suggestion(found, onClick) {
  const text = found.kind === "example" ? found.words : t(`suggest_${found.kind}`, found);
  return h("button", { type: "button", "data-instruction": found.instruction, onclick: onClick }, text);
}

// One of several pictures side by side, as the background of a card.
export function card(name, sheet, onClick) {
  const face = h("span", { class: "face" });
  const number = sheet ? sheet.names.indexOf(name) : -1;
  if (number >= 0) {
    const count = sheet.names.length;
    face.style.backgroundImage = `url("${sheet.address}")`;
    face.style.backgroundSize = `${count * 100}% 100%`;
    face.style.backgroundPosition = `${count > 1 ? (number / (count - 1)) * 100 : 0}% 0`;
  }
  const once = (event) => event.detail < 2 && onClick(); // a double click would press what comes next
  return h(
    "button",
    { type: "button", class: number >= 0 ? "card" : "card plain", "data-name": name, onclick: once },
    face,
    h("span", { class: "name" }, name),
  );
}

// The turns of the current line, and after it those that `redo` brings back. Where a turn has
// other takes, they can be gone through.
export function board(game, shown, { onShow, onGo }) {
  const all = [...game.turns, ...game.others];
  const columns = [];
  const column = (turn, ahead) => {
    const takes = all.filter((other) => other.after === turn.after);
    takes.sort((a, b) => (a.id.length - b.id.length) || (a.id < b.id ? -1 : 1));
    const text = t("show_turn", { turn: turn.turn, text: plain(turn.instruction) });
    const button = h(
      "button",
      {
        type: "button", class: ahead ? "turn ahead" : "turn", "data-turn": turn.id,
        "aria-current": turn.id === shown ? "true" : "false", "aria-label": text, title: text,
        onclick: () => (ahead ? onGo(turn) : onShow(turn)),
      },
      h("img", { src: turn.picture, alt: "", loading: "lazy" }),
      h("span", {}, `${turn.turn}${turn.new_day ? " ☾" : ""}`),
    );
    const parts = [button];
    if (takes.length > 1) {
      const place = takes.indexOf(turn);
      const next = takes[(place + 1) % takes.length];
      const label = t("take", { take: place + 1, takes: takes.length });
      parts.push(
        h("span", { class: "takes" }, h("button", {
          type: "button", "data-take": next.id, "aria-label": t("next_take", { label }),
          onclick: () => onGo(next),
        }, `${label} ↻`)),
      );
    }
    columns.push(h("div", { class: "column" }, ...parts));
  };
  for (const turn of game.turns) column(turn, false);
  let last = game.head;
  for (;;) {
    const ahead = game.others.filter((other) => other.after === last).at(-1);
    if (!ahead) break;
    column(ahead, true);
    last = ahead.id;
  }
  return columns;
}

// All turns of a game as a tree: a row for each line, below the turn where it leaves another one.
export function tree(game, onGo) {
  const all = [...game.turns, ...game.others];
  const current = new Set(game.turns.map((turn) => turn.id));
  const children = (id) => {
    const found = all.filter((turn) => turn.after === id);
    return found.sort((a, b) => current.has(b.id) - current.has(a.id));
  };
  const rows = [];
  const line = (first) => {
    const buttons = [];
    const left = [];
    for (let turn = first; turn; ) {
      const text = t("show_turn", { turn: turn.turn, text: plain(turn.instruction) });
      const here = turn;
      buttons.push(h(
        "button",
        {
          type: "button", class: "turn", "data-go": turn.id, title: text, "aria-label": text,
          "aria-current": turn.id === game.head ? "true" : "false", onclick: () => onGo(here),
        },
        h("img", { src: turn.picture, alt: "", loading: "lazy" }),
        h("span", {}, `${turn.turn}`),
      ));
      const [next, ...others] = children(turn.id);
      left.push(...others);
      turn = next;
    }
    rows.push(h("div", { class: "row", style: { paddingLeft: `${68 * (first.turn - 1)}px` } }, ...buttons));
    left.reverse().forEach(line);
  };
  children("").forEach(line);
  return rows;
}

// A line with the words marked that the model does not know.
export function marks(line, reading) {
  const parts = [];
  let end = 0;
  for (const word of reading?.unknown ?? []) {
    if (line.slice(word.start, word.end) !== word.word) continue;
    parts.push(line.slice(end, word.start), h("mark", {}, word.word));
    end = word.end;
  }
  parts.push(line.slice(end));
  return parts;
}

// What the model does not know of a line, with known words to take instead.
export function reading(found, onReplace) {
  if (!found) return [];
  if (found.error) return [h("span", { class: "bad" }, said(found.error))];
  if (!found.unknown.length) return [];
  const groups = found.unknown.slice(0, 4).map((word) =>
    h(
      "span",
      { class: "group" },
      word.near.length ? `${word.word} → ` : word.word,
      ...word.near.map((near) => {
        const label = t("replace", { word: word.word, near });
        return h("button", { type: "button", "data-word": near, "aria-label": label, onclick: () => onReplace(word, near) }, near);
      }),
    ),
  );
  return [h("span", {}, t("unknown")), ...groups];
}

// Lists from which a line is built in parts; `character` returns who is there.
export function parts(words, { character, onLine }) {
  const partner = (motion) => words.characters.find((name) => motion.endsWith(` ${name}`)) ?? "";
  const base = (motion) => (partner(motion) ? motion.slice(0, -partner(motion).length - 1) : motion);
  const motions = [...new Set(words.motions.map(base))];
  const lists = {
    character: words.characters, adverb: words.adverbs, motion: motions,
    partner: words.characters, time: words.times, place: words.places,
  };
  const selects = {};
  const labels = Object.entries(lists).filter(([, list]) => list.length).map(([name, list]) => {
    const options = ["", ...list].map((word) => h("option", { value: word }, word || t("as_it_is")));
    selects[name] = h("select", { id: `part-${name}`, onchange: compose }, ...options);
    return h("label", {}, t(`part_${name}`), selects[name]);
  });
  function compose() {
    const value = (name) => selects[name]?.value ?? "";
    const needs = words.motions.some((one) => partner(one) && base(one) === value("motion"));
    if (selects.partner) {
      selects.partner.parentElement.hidden = !needs;
      if (needs && !value("partner")) {
        const now = value("character") || character();
        selects.partner.value = words.characters.find((name) => name !== now) ?? "";
      }
    }
    const motion = [value("adverb"), value("motion"), needs ? value("partner") : ""];
    const groups = [["Character", [value("character")]], ["Motion", motion], ["Background", [value("time"), value("place")]]];
    const said = groups.map(([label, some]) => [label, some.filter(Boolean).join(" ")]);
    const line = said.filter(([, some]) => some).map(([label, some]) => `${label}: ${some}`).join("; ");
    onLine(line && `${line}.`);
  }
  if (selects.partner) selects.partner.parentElement.hidden = true;
  return labels;
}
