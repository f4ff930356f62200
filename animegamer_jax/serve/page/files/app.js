// The page: one game on the stage, or the choice of a new one.

import { Away, Follower, Refused, ask, login } from "./remote.js";
import { Stage } from "./stage.js";
import * as text from "./text.js";
import { said, t } from "./text.js";
import { $, METERS, board, caption, card, day, h, marks, meters, plain, reading, suggestion, tree } from "./views.js";

const state = {
  server: null, // what is played here
  game: null, // the game as the server has it
  shown: null, // id of an earlier turn that is looked at; null: the last
  progress: { status: "idle" },
  reading: null, // of the line that is typed
  pending: null, // the turn that was sent and is not played yet
  character: "", // chosen on the first screen
  ended: "", // the day whose end was shown
  note: { text: "", bad: false },
  away: false,
};
let follower = null;
const stage = new Stage($("#stage"), { onPlaying: (address) => performance.mark(`playing ${address}`) });

// --- what this browser keeps ---

function kept(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(`animegamer.${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

function keep(name, value) {
  try {
    localStorage.setItem(`animegamer.${name}`, JSON.stringify(value));
  } catch {
    // A browser that keeps nothing plays on.
  }
}

function keepGame(name) {
  keep("games", [name, ...kept("games", []).filter((other) => other !== name)].slice(0, 60));
}

// --- showing the state ---

function shownTurn() {
  const turns = state.game?.turns ?? [];
  return turns.find((turn) => turn.id === state.shown) ?? turns.at(-1) ?? null;
}

function playing() {
  return ["waiting", "playing"].includes(state.progress.status);
}

function note(message, bad = false) {
  state.note = { text: message, bad };
  renderStatus();
}

function renderGame() {
  const game = state.game;
  if (!game) return;
  const turn = shownTurn();
  const back = state.shown !== null && turn && turn.id !== game.head;
  const values = back ? turn.meters : game.meters;
  $("#meters").replaceChildren(...meters(values, turn));
  $("#day").hidden = !game.day;
  $("#day").replaceChildren(...(game.day ? day(game.day) : []));
  if (turn) {
    $("#caption").replaceChildren(...caption(turn, game.turns.length));
    const label = t("clip_label", { turn: turn.turn, text: plain(turn.instruction) });
    stage.name({ play: t("clip_play"), pause: t("clip_pause") }, label);
    stage.show(turn.clip);
  } else if (game.picture) {
    $("#caption").textContent = `${plain(game.picture.instruction)} — ${t("starting_picture")}`;
    stage.showStill(game.picture.picture, t("picture_alt"));
  } else {
    $("#caption").textContent = t("no_turn");
    stage.clear();
  }
  $("#suggestions").replaceChildren(
    ...game.suggestions.map((found) => suggestion(found, () => send(found.instruction, { anyway: true }))),
  );
  const scrolled = $("#board").scrollLeft;
  $("#board").replaceChildren(...board(game, turn?.id, { onShow: look, onGo: (to) => change("go", { turn: to.id }) }));
  const current = $("#board [aria-current=true]");
  if (state.boarded !== game.head && current) {
    const place = current.parentElement;
    $("#board").scrollLeft = place.offsetLeft + place.offsetWidth - $("#board").clientWidth + 80;
    state.boarded = game.head;
  } else $("#board").scrollLeft = scrolled;
  $("#branch").hidden = !back;
  $("#rules").checked = game.rules === "day";
  for (const [id, kind] of [["film-mp4", "film.mp4"], ["film-gif", "film.gif"], ["card", "card.png"], ["archive", "game.zip"]]) {
    const link = $(`#${id}`);
    if (game.turns.length) link.href = `/api/v1/games/${game.game}/${kind}?head=${game.head}`;
    else link.removeAttribute("href");
  }
  renderTools();
  renderStatus();
  renderEnding();
}

function renderTools() {
  const game = state.game;
  const busy = playing() || state.away;
  $("#undo").disabled = busy || !game?.turns.length;
  $("#redo").disabled = busy || !game?.redo;
  $("#again").disabled = busy || !game?.turns.length;
  $("#open-tree").hidden = !game?.others.length;
  $("#open-meters").disabled = busy || !game;
  $("#branch").disabled = busy;
  $("#play").hidden = playing();
  $("#stop").hidden = !playing();
}

function renderStatus() {
  const found = state.progress;
  let message = state.note.text;
  let share = 0;
  if (found.status === "waiting") {
    const count = found.queue_position;
    message = count ? t("waiting", { count }) : t("waiting_next");
    if (state.server?.status === "warming up") message = t("warming");
  } else if (found.status === "playing") {
    message = t("mllm");
    if (found.stage === "decoder") {
      const left = found.seconds_left ?? 0;
      const values = { step: found.step, steps: found.steps, seconds: Math.round(left) };
      message = t(left >= 1 ? "decoder_left" : "decoder", values);
      share = found.steps ? found.step / found.steps : 0;
    } else if (found.stage === "vae") [message, share] = [t("vae"), 1];
  } else if (!message && state.shown !== null && shownTurn()?.id !== state.game?.head) {
    message = t("looking_back", { turn: shownTurn()?.turn });
  }
  $("#stage").classList.toggle("waiting", playing());
  $("#veil").hidden = !playing();
  $("#veil .bar div").style.width = `${100 * share}%`;
  if ($("#status").textContent !== message) $("#status").textContent = message;
  $("#status").classList.toggle("bad", state.note.bad && !playing());
}

function renderServer() {
  const server = state.server;
  $("#own-picture").hidden = !server.pictures;
  if (state.away) return;
  const warming = server.status === "warming up";
  const trouble = server.status === "failing" ? t("failing") : "";
  $("#banner").textContent = warming ? t("warming") : trouble;
  $("#banner").hidden = !$("#banner").textContent;
}

function renderReading() {
  const line = $("#line").value;
  $("#marks").replaceChildren(...marks(line, state.reading));
  $("#marks").scrollLeft = $("#line").scrollLeft;
  const parts = reading(state.reading, replaceWord);
  if (state.refused === line && line) {
    const anyway = { type: "button", id: "anyway", onclick: () => send(line, { anyway: true }) };
    parts.unshift(h("strong", {}, t("not_understood")), h("button", anyway, t("play_anyway")));
  }
  $("#reading").replaceChildren(...parts);
}

function renderEnding() {
  const { day: now, turns } = state.game;
  const mark = now?.ending ? `${state.game.game} ${now.number} ${state.game.head}` : "";
  if (!mark || mark === state.ended) return;
  state.ended = mark;
  const name = state.game.scene.character || t("somebody");
  const number = now.number;
  $("#ending-title").textContent = now.ending === "exhausted" ? t("exhausted", { name }) : t("evening", { number });
  $("#ending-stars").textContent = "★".repeat(now.stars) + "☆".repeat(3 - now.stars);
  $("#ending-stars").setAttribute("role", "img");
  $("#ending-stars").setAttribute("aria-label", t("stars", { stars: now.stars }));
  const goal = now.goal.met ? t("goal_met") : t("goal_missed");
  $("#ending-text").textContent = now.ending === "exhausted" ? `${t("exhausted_text")} ${goal}` : goal;
  const address = `/api/v1/games/${state.game.game}/card.png?head=${state.game.head}`;
  $("#ending-card").src = address;
  $("#ending-card").alt = t("card_alt");
  $("#ending-save").href = address;
  // The last clip is seen first.
  setTimeout(() => {
    if (state.ended === mark && state.game?.turns.length === turns.length) open("#ending");
  }, 2200);
}

// --- the first screen ---

function showStart() {
  follower?.close();
  follower = null;
  Object.assign(state, { game: null, shown: null, pending: null, progress: { status: "idle" } });
  state.note = { text: "", bad: false };
  if (location.hash) history.pushState(null, "", location.pathname);
  document.body.classList.add("starting");
  chooseCharacter();
  const [last] = kept("games", []);
  $("#continue").hidden = !last;
  $("#continue").replaceChildren();
  if (last) {
    const go = { type: "button", class: "primary", id: "go-on", onclick: () => openGame(last) };
    $("#continue").append(h("button", go, t("continue")));
  }
  renderStatus();
}

function hero(character, place) {
  const { openings } = state.server;
  const found = openings.find((one) => (!character || one.character === character) && (!place || one.place === place));
  if (!found) return stage.clear();
  stage.name({ play: t("clip_play"), pause: t("clip_pause") }, t("hero_label"));
  stage.show(found.clip);
}

function chooseCharacter() {
  state.character = "";
  const { words, portraits } = state.server;
  $("#question").textContent = words.characters.length ? t("who") : t("what_next");
  $("#back").hidden = true;
  $("#cards").replaceChildren(
    ...words.characters.map((name) => card(name, portraits, () => choosePlace(name))),
  );
  hero("", "");
}

function choosePlace(name) {
  state.character = name;
  const { words, places } = state.server;
  if (!words.places.length) return begin({ line: [name] });
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
  $("#question").focus({ preventScroll: true });
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

async function begin(wanted, line = "") {
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

// Shows a game that the server has just answered with.
function enter(game) {
  $("#line").value = "";
  state.reading = null;
  state.shown = null;
  state.note = { text: game.note ?? "", bad: false };
  document.body.classList.remove("starting");
  keepGame(game.game);
  if (location.hash !== `#game=${game.game}`) history.pushState(null, "", `#game=${game.game}`);
  receive(game);
  follow(game.game);
  renderReading();
  if (matchMedia("(hover: hover)").matches) $("#line").focus({ preventScroll: true });
  else scrollTo(0, 0);
}

async function openGame(name) {
  await attempt(async () => enter(await ask("GET", `/games/${name}`)), {
    onRefused: () => {
      keep("games", kept("games", []).filter((other) => other !== name));
      showStart();
      note(t("gone"), true);
    },
  });
}

// --- the server's side of a game ---

function follow(name) {
  follower?.close();
  follower = new Follower(name, {
    onState: receive,
    onProgress: (progress) => {
      if (["stopped", "failed"].includes(progress.status)) settle(progress);
      state.progress = progress;
      renderTools();
      renderStatus();
    },
    onAway: setAway,
    onGone: (error) => {
      if (error.status === 401) return askLogin();
      showStart();
      note(t("gone"), true);
    },
  });
}

function receive(game) {
  if (state.game && state.game.game !== game.game) return;
  const before = state.game;
  state.game = game;
  if (before && before.head !== game.head) {
    state.shown = null;
    if (state.note.bad || !state.acting) state.note = { text: "", bad: false };
  }
  const sent = state.pending;
  if (sent && game.head !== sent.head) {
    state.pending = null; // it is played, here or before the server went away
  }
  renderGame();
}

// A turn has ended without a clip: if it was sent here, its line comes back.
function settle(progress) {
  const sent = state.pending;
  state.pending = null;
  if (sent && !$("#line").value) $("#line").value = sent.line;
  note(said(progress.error) || t("stopped"), progress.status === "failed");
}

function setAway(away) {
  if (state.away === away) return;
  state.away = away;
  if (away && state.pending) state.pending.lost = true; // perhaps: it is looked at again
  $("#banner").hidden = !away;
  $("#banner").textContent = away ? t("away") : "";
  renderTools();
  if (!away) {
    refreshServer();
    if (state.pending?.lost) resend();
  }
}

async function resend() {
  const sent = state.pending;
  await attempt(async () => {
    const game = await ask("GET", `/games/${state.game.game}`);
    receive(game);
    if (state.pending !== sent) return;
    const { status } = await ask("GET", `/games/${state.game.game}/progress`);
    if (status !== "idle") return void (sent.lost = false); // only the connection was lost
    note(t("resent"));
    await post(sent);
  });
}

async function post(sent) {
  const { line, head, again, options } = sent;
  sent.lost = false;
  state.progress = { status: "waiting", queue_position: 0 };
  renderTools();
  renderStatus();
  const body = again ? { head, ...options } : { instruction: line, head, ...options };
  try {
    const path = `/games/${state.game.game}/${again ? "again" : "turns"}?reply=accepted`;
    await ask("POST", path, body); // its progress comes as an event
  } catch (error) {
    if (error instanceof Away) {
      sent.lost = true;
      state.progress = { status: "idle" };
      setAway(true);
      return;
    }
    state.pending = null;
    state.progress = { status: "idle" };
    renderTools();
    if (!again && !$("#line").value) $("#line").value = line;
    if (error.code === "unknown words") {
      state.reading = error.reading;
      state.refused = line;
      renderReading();
      note("");
      return;
    }
    if (error.code === "conflict") {
      receive(await ask("GET", `/games/${state.game.game}`));
      note(t("changed"), true);
      return;
    }
    throw error;
  }
}

function settings() {
  const options = {};
  const level = Number($("#level").value);
  if (level) options.level = level;
  for (const name of ["steps", "window"]) {
    const value = $(`#${name}`).valueAsNumber;
    if (Number.isInteger(value)) options[name] = value;
  }
  return options;
}

async function send(line, { anyway = false } = {}) {
  if (state.pending || !state.game) return;
  performance.mark("sent");
  note("");
  const emptied = $("#line").value === line;
  const options = { ...settings(), anyway };
  state.pending = { line, head: state.game.head, options };
  if (emptied) {
    $("#line").value = "";
    state.reading = state.refused = null;
    renderReading();
  }
  await attempt(() => post(state.pending));
}

// Plays a line if the model knows a word of it; else asks first.
async function sendRead(line) {
  clearTimeout(readTimer);
  if (state.read !== line) await readNow();
  if (state.read === line && state.reading && !state.reading.understood) {
    state.refused = line;
    return renderReading();
  }
  return send(line);
}

async function again() {
  if (state.pending) return;
  note("");
  state.pending = { line: "", head: state.game.head, again: true, options: settings() };
  await attempt(() => post(state.pending));
}

// Changes the game in one of the ways that answer with its state.
async function change(path, body = {}, method = "POST") {
  note("");
  return attempt(async () => {
    state.acting = true;
    try {
      const game = await ask(method, `/games/${state.game.game}/${path}`, { head: state.game.head, ...body });
      state.shown = null;
      receive(game);
      return true;
    } catch (error) {
      if (error.code !== "conflict") throw error;
      receive(await ask("GET", `/games/${state.game.game}`));
      note(t("changed"), true);
    } finally {
      state.acting = false;
    }
  });
}

async function undo() {
  const line = state.game.turns.at(-1)?.instruction ?? "";
  if (await change("undo")) {
    if (!$("#line").value) $("#line").value = line;
    note(t("undone"));
    readSoon();
  }
}

function look(turn) {
  state.shown = turn.id === state.game.head ? null : turn.id;
  state.note = { text: "", bad: false };
  renderGame();
}

// Runs something that asks the server, and shows what goes wrong.
async function attempt(work, { onRefused } = {}) {
  try {
    return await work();
  } catch (error) {
    if (error instanceof Away) setAway(true);
    else if (!(error instanceof Refused)) throw error;
    else if (error.status === 401) askLogin();
    else if (onRefused) onRefused(error);
    else note(said(error.message), true);
    if (error instanceof Away && !follower) retryServer();
  }
  return undefined;
}

function retryServer() {
  setTimeout(async () => {
    try {
      await ask("GET", "/server");
      setAway(false);
    } catch {
      retryServer();
    }
  }, 1000);
}

// --- the line ---

let readTimer = 0;

function readSoon() {
  clearTimeout(readTimer);
  renderReading();
  readTimer = setTimeout(readNow, 160);
}

async function readNow() {
  const line = $("#line").value;
  if (!line.trim()) state.reading = null;
  else {
    try {
      state.reading = await ask("POST", "/read", { text: line });
      state.read = line;
    } catch {
      return; // it only helps
    }
  }
  if ($("#line").value === line) renderReading();
}

function replaceWord(word, near) {
  const line = $("#line").value;
  $("#line").value = line.slice(0, word.start) + near + line.slice(word.end);
  $("#line").focus();
  readNow();
}

// --- an instruction in parts ---

function buildParts() {
  const { words } = state.server;
  const partner = (motion) => words.characters.find((name) => motion.endsWith(` ${name}`)) ?? "";
  const base = (motion) => (partner(motion) ? motion.slice(0, -partner(motion).length - 1) : motion);
  const motions = [...new Set(words.motions.map(base))];
  const lists = {
    character: words.characters, adverb: words.adverbs, motion: motions,
    partner: words.characters, time: words.times, place: words.places,
  };
  const selects = {};
  const parts = Object.entries(lists).filter(([, list]) => list.length).map(([name, list]) => {
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
        const now = value("character") || state.game?.scene.character;
        selects.partner.value = words.characters.find((name) => name !== now) ?? "";
      }
    }
    const motion = [value("adverb"), value("motion"), needs ? value("partner") : ""];
    const groups = [["Character", [value("character")]], ["Motion", motion], ["Background", [value("time"), value("place")]]];
    const said = groups.map(([label, some]) => [label, some.filter(Boolean).join(" ")]);
    const line = said.filter(([, some]) => some).map(([label, some]) => `${label}: ${some}`).join("; ");
    $("#line").value = line && `${line}.`;
    readSoon();
  }
  $("#parts").replaceChildren(...parts);
  if (selects.partner) selects.partner.parentElement.hidden = true;
}

// --- dialogs ---

function open(selector) {
  const dialog = $(selector);
  if (!dialog.open) dialog.showModal();
}

async function openGames() {
  const names = kept("games", []);
  open("#games");
  await attempt(async () => {
    const found = names.length ? await ask("GET", `/games?ids=${names.join(",")}`) : [];
    $("#games-list").replaceChildren(
      ...found.map((one) => {
        const count = one.turns === 1 ? t("one_turn") : t("turns", { count: one.turns });
        const when = new Date(1000 * one.changed).toLocaleString(document.documentElement.lang);
        return h(
          "button",
          {
            type: "button", class: "card", "data-game": one.game,
            onclick: () => {
              $("#games").close();
              openGame(one.game);
            },
          },
          one.picture ? h("img", { src: one.picture, alt: "", loading: "lazy" }) : h("span", { class: "face" }),
          h("span", { class: "name" }, plain(one.title) || "—", h("small", {}, `${count} · ${when}`)),
        );
      }),
    );
    if (!found.length) $("#games-list").append(h("p", {}, t("no_games")));
  });
}

function openMeters() {
  const sliders = METERS.map((name) => {
    const value = h("output", {}, `${state.game.meters[name]}`);
    const range = h("input", { type: "range", min: 0, max: 100, step: 5, id: `set-${name}`, name });
    range.value = state.game.meters[name];
    range.addEventListener("input", () => (value.textContent = range.value));
    return h("label", {}, h("span", {}, t(name)), range, value);
  });
  $("#sliders").replaceChildren(...sliders);
  $("#edit").returnValue = "";
  open("#edit");
}

function askLogin() {
  open("#login");
}

function connect() {
  const on = (selector, event, work) => $(selector).addEventListener(event, work);
  on("#home", "click", showStart);
  on("#back", "click", chooseCharacter);
  on("#just-type", "click", () => begin({}));
  on("#say", "submit", (event) => {
    event.preventDefault();
    const line = $("#line").value;
    if (playing()) return;
    if (!line.trim()) return note(said("expected an instruction, found nothing: say what happens next"), true);
    sendRead(line);
  });
  on("#line", "input", () => {
    if (state.note.text) note("");
    readSoon();
  });
  on("#line", "scroll", () => ($("#marks").scrollLeft = $("#line").scrollLeft));
  on("#stop", "click", () => attempt(() => ask("POST", `/games/${state.game.game}/stop`)));
  on("#undo", "click", undo);
  on("#redo", "click", () => change("redo"));
  on("#again", "click", again);
  on("#branch", "click", () => change("go", { turn: state.shown }));
  on("#open-tree", "click", () => {
    const go = (turn) => {
      $("#tree").close();
      change("go", { turn: turn.id });
    };
    $("#tree-lines").replaceChildren(...tree(state.game, go));
    open("#tree");
  });
  on("#open-meters", "click", openMeters);
  on("#open-parts", "click", () => {
    $("#parts").hidden = !$("#parts").hidden;
    $("#open-parts").setAttribute("aria-expanded", String(!$("#parts").hidden));
  });
  on("#open-games", "click", openGames);
  on("#open-save", "click", () => {
    $("#link-done").textContent = "";
    open("#save");
  });
  on("#open-settings", "click", () => open("#settings"));
  for (const button of document.querySelectorAll("button.close")) {
    button.addEventListener("click", () => button.closest("dialog").close());
  }
  on("#edit", "close", () => {
    if ($("#edit").returnValue !== "set") return;
    const values = Object.fromEntries(METERS.map((name) => [name, Number($(`#set-${name}`).value)]));
    change("meters", { meters: values }, "PUT");
  });
  on("#link", "click", async () => {
    await navigator.clipboard.writeText(location.href).catch(() => prompt("", location.href));
    $("#link-done").textContent = t("copied");
  });
  on("#rules", "change", () => {
    keep("rules", $("#rules").checked);
    if (state.game) change("rules", { rules: $("#rules").checked ? "day" : "off" }, "PUT");
  });
  on("#next-day", "click", () => {
    $("#ending").close();
    change("day");
  });
  on("#play-on", "click", () => {
    $("#ending").close();
    change("rules", { rules: "off" }, "PUT");
  });
  on("#language", "change", async () => {
    localStorage.setItem("animegamer.language", $("#language").value);
    await text.load($("#language").value);
    rebuild();
  });
  on("#load", "click", () => $("#load-file").click());
  on("#load-file", "change", () => upload("archive", { archive: $("#load-file").files[0] }));
  on("#own-picture", "click", () => {
    $("#picture-error").textContent = "";
    $("#picture-text").placeholder = state.server.words.examples[0] ?? "";
    open("#picture");
  });
  on("#picture-form", "submit", (event) => {
    event.preventDefault();
    const [file] = $("#picture-file").files;
    if (!file) return ($("#picture-error").textContent = said("expected a picture"));
    const rules = kept("rules", true) ? "day" : "off";
    upload("picture", { picture: file, text: $("#picture-text").value, rules });
  });
  on("#login-form", "submit", async (event) => {
    event.preventDefault();
    if (await login($("#login-name").value, $("#login-password").value)) location.reload();
    else $("#login-error").textContent = t("wrong_password");
  });
  addEventListener("hashchange", () => openHash() || showStart());
  document.addEventListener("visibilitychange", () => {
    if (!state.game) return;
    if (document.hidden) follower?.close();
    else follow(state.game.game);
  });
}

async function upload(kind, fields) {
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

function openHash() {
  const name = new URLSearchParams(location.hash.slice(1)).get("game");
  if (!name) return false;
  if (name !== state.game?.game) openGame(name);
  return true;
}

// --- the start ---

async function refreshServer() {
  try {
    state.server = await ask("GET", "/server");
  } catch (error) {
    if (error.status === 401) askLogin();
    else if (error instanceof Away) setTimeout(refreshServer, 1000);
    return false;
  }
  renderServer();
  renderStatus();
  if (state.server.status === "warming up") setTimeout(refreshServer, 1000);
  return true;
}

function rebuild() {
  buildParts();
  const levels = state.server.motion_levels.map((level) => h("option", { value: level }, `${level}`));
  $("#level").replaceChildren(h("option", { value: 0 }, t("level_auto")), ...levels);
  renderServer();
  if (state.game) renderGame();
  else showStart();
  renderReading();
}

async function start() {
  const language = text.preferred();
  $("#language").value = language;
  const [, answered] = await Promise.all([text.load(language), refreshServer()]);
  connect();
  if (!answered) return;
  const { server } = state;
  $("#steps").max = server.max_steps;
  $("#steps").placeholder = `${server.steps}`;
  $("#window").max = server.window;
  $("#window").placeholder = `${server.window}`;
  $("#rules").checked = kept("rules", true);
  document.title = `AnimeGamer: ${server.model}`;
  buildParts();
  const levels = server.motion_levels.map((level) => h("option", { value: level }, `${level}`));
  $("#level").replaceChildren(h("option", { value: 0 }, t("level_auto")), ...levels);
  if (!openHash()) showStart();
  document.body.dataset.ready = "";
}

start();
