// The first screen: a new game by character and place, from a file, or one that was played before.

import { attempt, follow, leave, note, page, receive, send, state } from "./game.js";
import { ask } from "./remote.js";
import { open, renderProgress, stage } from "./show.js";
import { said, t } from "./text.js";
import { $, card, h, keepFocus, plain } from "./views.js";

// --- what this browser keeps ---

export function kept(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(`animegamer.${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

export function keep(name, value) {
  try {
    localStorage.setItem(`animegamer.${name}`, JSON.stringify(value));
  } catch {
    // A browser that keeps nothing plays on.
  }
}

function keepGame(name) {
  keep("games", [name, ...kept("games", []).filter((other) => other !== name)].slice(0, 60));
}

function forgetGame(name) {
  keep("games", kept("games", []).filter((other) => other !== name));
}

// --- a new game ---

// Shows what the page's address and its place in the browser's history name: a game, the choice of
// a place, or the first screen.
export function route() {
  const name = new URLSearchParams(location.hash.slice(1)).get("game");
  if (name) return name === state.game?.game ? undefined : openGame(name);
  const { character } = history.state ?? {};
  if (state.server.words.characters.includes(character)) return showStart(() => choosePlace(character));
  if (location.hash && state.game) return undefined; // it names nothing
  return showStart();
}

// Follows the browser's Back and Forward.
export function followHistory() {
  route();
  if (document.body.classList.contains("starting")) focusQuestion();
}

export function goHome() {
  if (location.hash || history.state?.character) history.pushState(null, "", location.pathname);
  showStart();
}

export function goBack() {
  if (history.state?.character) history.back();
  else showStart();
  focusQuestion();
}

function focusQuestion() {
  $("#question").focus({ preventScroll: true });
}

function showStart(choose = chooseCharacter) {
  leave();
  document.body.classList.add("starting");
  choose();
  showContinue();
  page.onPicture();
  renderProgress();
}

function showContinue() {
  const [last] = kept("games", []);
  $("#continue").hidden = !last;
  $("#continue").replaceChildren();
  if (last) {
    const go = { type: "button", class: "primary", id: "go-on", onclick: () => openGame(last) };
    $("#continue").append(h("button", go, t("continue")));
  }
}

export function showGone(error) {
  goHome();
  note(error.code === "no game" ? t("gone") : said(error.message), true);
}

// A prepared shot, above the cards.
function hero(character, place) {
  const { openings } = state.server;
  const found = openings.find((one) => (!character || one.character === character) && (!place || one.place === place));
  if (!found) return stage.clear();
  stage.name({ play: t("clip_play"), pause: t("clip_pause") }, t("hero_label"));
  stage.show(found.clip);
}

function chooseCharacter() {
  const { words, portraits } = state.server;
  $("#question").textContent = words.characters.length ? t("who") : t("what_next");
  $("#back").hidden = true;
  $("#cards").replaceChildren(
    ...words.characters.map((name) => card(name, portraits, () => goToPlace(name))),
  );
  hero("", "");
}

function goToPlace(name) {
  if (!state.server.words.places.length) return begin({}, `Character: ${name}.`);
  history.pushState({ character: name }, "", location.pathname);
  choosePlace(name);
  return focusQuestion();
}

function choosePlace(name) {
  const { words, places } = state.server;
  $("#question").textContent = t("where", { name });
  $("#back").hidden = false;
  $("#cards").replaceChildren(
    ...words.places.map((place) => {
      const button = card(place, places[name], () => beginAt(name, place));
      const look = () => hero(name, place);
      button.addEventListener("pointerenter", look);
      button.addEventListener("focus", look);
      return button;
    }),
  );
  hero(name, "");
}

async function beginAt(character, place) {
  const prepared = state.server.openings.some((one) => one.character === character && one.place === place);
  if (prepared) return begin({ character, place });
  const { motions, times } = state.server.words;
  const motion = motions.find((one) => one.startsWith("wav")) ?? motions[0] ?? "";
  const parts = [`Character: ${character}`, motion && `Motion: ${motion}`];
  parts.push(`Background: ${[times[0], place].filter(Boolean).join(" ")}.`);
  await begin({}, parts.filter(Boolean).join("; "));
}

let beginning = false;

// Runs what begins a game: once, however often it is clicked.
async function once(work) {
  if (beginning) return;
  beginning = true;
  try {
    await work();
  } finally {
    beginning = false;
  }
}

export function begin(wanted, line = "") {
  return once(() => beginOnce(wanted, line));
}

async function beginOnce(wanted, line) {
  const settings = { rules: kept("rules", true) ? "day" : "off" };
  const seed = $("#seed").valueAsNumber;
  if (Number.isInteger(seed)) settings.seed = seed;
  if (!wanted.character) {
    for (const name of ["steps", "window"]) {
      const value = $(`#${name}`).valueAsNumber;
      if (Number.isInteger(value)) settings[name] = value;
    }
  }
  await attempt(async () => {
    const game = await ask("POST", "/games", { ...settings, ...wanted });
    enter(game);
    if (line) await send(line, { anyway: true });
  });
}

// --- a game that is there ---

// Shows a game that the server has just answered with.
function enter(game) {
  if (state.game?.game !== game.game) leave();
  page.onLine("");
  state.shown = null;
  state.note = { text: game.note ?? "", bad: false };
  document.body.classList.remove("starting");
  keepGame(game.game);
  if (location.hash !== `#game=${game.game}`) history.pushState(null, "", `#game=${game.game}`);
  receive(game);
  follow(game.game);
  if (matchMedia("(hover: hover)").matches) $("#line").focus({ preventScroll: true });
  else scrollTo(0, 0);
}

export async function openGame(name) {
  await attempt(async () => enter(await ask("GET", `/games/${name}`)), {
    onRefused: (error) => {
      if (error.code === "no game") forgetGame(name); // else it may be had later
      showGone(error);
    },
  });
}

// The games of this browser.
export async function openGames() {
  const names = kept("games", []);
  open("#games");
  await attempt(async () => {
    const found = names.length ? await ask("GET", `/games?ids=${names.join(",")}`) : [];
    $("#games-list").replaceChildren(...found.map(gameEntry));
    if (!found.length) $("#games-list").append(h("p", {}, t("no_games")));
  });
}

function gameEntry(one) {
  const count = one.turns === 1 ? t("one_turn") : t("turns", { count: one.turns });
  const when = new Date(1000 * one.changed).toLocaleString(document.documentElement.lang);
  const title = plain(one.title) || "—";
  const go = () => {
    $("#games").close();
    openGame(one.game);
  };
  const forget = () => {
    forgetGame(one.game);
    keepFocus(() => entry.remove(), () => $("#games .close"));
    if (document.body.classList.contains("starting")) showContinue();
  };
  const entry = h(
    "div",
    { class: "entry" },
    h(
      "button",
      { type: "button", class: "card", "data-game": one.game, onclick: go },
      one.picture ? h("img", { src: one.picture, alt: "", loading: "lazy" }) : h("span", { class: "face" }),
      h("span", { class: "name" }, title, h("small", {}, `${count} · ${when}`)),
    ),
    h("button", { type: "button", class: "forget", "aria-label": t("forget_game", { text: title }), onclick: forget }, t("forget")),
  );
  return entry;
}

// Begins a game from a file: a picture, or a downloaded game.
export function upload(kind, fields) {
  return once(async () => {
    showReading(kind, true);
    await uploadOnce(kind, fields).finally(() => showReading(kind, false));
  });
}

function showReading(kind, busy) {
  if (kind === "picture") {
    if (busy) $("#picture-error").textContent = "";
    $("#picture-form .primary").disabled = busy;
    $("#picture-status").textContent = busy ? t("reading_picture") : "";
  } else if (busy) note(t("reading_game"));
  else if (!state.note.bad && !state.game) note("");
}

async function uploadOnce(kind, fields) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
  await attempt(
    async () => {
      const game = await ask("POST", `/games/${kind}`, form);
      $("#picture").close();
      $("#load-file").value = "";
      enter(game);
    },
    {
      onRefused: (error) => {
        if (kind === "picture") $("#picture-error").textContent = said(error.message);
        else note(said(error.message), true);
        $("#load-file").value = "";
      },
    },
  );
}
