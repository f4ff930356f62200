// The game of this page, and what a player does to it. It shows nothing itself: it calls `page`.

import { Away, Follower, Refused, ask } from "./remote.js";
import { said, t } from "./text.js";
import { $ } from "./views.js";

export const state = {
  server: null, // what is played here
  game: null, // the game as the server has it
  shown: null, // id of an earlier turn that is looked at; null: the last
  progress: { status: "idle" },
  picture: null, // a first picture of the turn that is played
  pending: null, // the turn that was sent and is not played yet
  given: "", // the line that undo has filled in
  raced: false, // another window was faster with a turn
  boarded: null, // id of the turn to which the story was scrolled
  ended: "", // the day whose end was shown
  note: { text: "", bad: false },
  away: false,
};
let follower = null;

// What the page does when something has changed; app.js sets it.
export const page = {
  onGame() {},
  onProgress() {},
  onPicture() {},
  onLine() {}, // the page fills in the line, or clears it
  onUnknown() {}, // the model knows no word of a line
  onAway() {},
  onGone() {},
  onLogin() {},
};

// --- the state ---

export function shownTurn() {
  const turns = state.game?.turns ?? [];
  return turns.find((turn) => turn.id === state.shown) ?? turns.at(-1) ?? null;
}

// Whether an earlier turn is looked at.
export function looksBack() {
  const turn = shownTurn();
  return state.shown !== null && turn !== null && turn.id !== state.game.head;
}

export function playing() {
  return ["waiting", "playing"].includes(state.progress.status);
}

export function note(message, bad = false) {
  state.note = { text: message, bad };
  page.onProgress();
}

function setPicture(picture) {
  if (state.picture === picture) return;
  state.picture = picture;
  page.onPicture();
}

// --- the server's side of a game ---

export function follow(name) {
  follower?.close();
  follower = new Follower(name, {
    onState: receive,
    onProgress: (progress) => {
      if (["stopped", "failed"].includes(progress.status)) settle(progress);
      state.progress = progress;
      if (progress.status === "waiting") setPicture(null);
      if (!playing()) expirePicture();
      page.onProgress();
    },
    onPicture: setPicture,
    onAway: setAway,
    onGone: (error) => (error.status === 401 ? page.onLogin() : page.onGone(error)),
  });
}

export function pauseFollowing() {
  follower?.close();
}

export function leave() {
  follower?.close();
  follower = null;
  Object.assign(state, { game: null, shown: null, pending: null, picture: null, boarded: null, given: "", raced: false });
  state.progress = { status: "idle" };
  state.note = { text: "", bad: false };
}

export function receive(game) {
  if (state.game && state.game.game !== game.game) return;
  const before = state.game;
  state.game = game;
  if (before && before.head !== game.head) {
    state.shown = state.picture = null;
    if (state.note.bad || !state.acting) state.note = { text: "", bad: false };
    if (state.raced) state.note = { text: t("raced"), bad: true };
    state.raced = false;
  }
  const sent = state.pending;
  if (sent && game.head !== sent.head) {
    state.pending = null; // it is played, here or before the server went away
  }
  page.onGame();
}

// A turn has ended. Its clip comes with the game's state and takes the picture's place; without one
// the picture goes.
function expirePicture() {
  const { picture } = state;
  if (picture) setTimeout(() => state.picture === picture && !playing() && setPicture(null), 1000);
}

// A turn has ended without a clip: if it was sent here, its line comes back.
function settle(progress) {
  const sent = state.pending;
  state.pending = null;
  state.raced = false;
  setPicture(null);
  if (sent?.line && !$("#line").value) page.onLine(sent.line);
  note(said(progress.error) || t("stopped"), progress.status === "failed");
}

export function setAway(away) {
  if (state.away === away) return;
  state.away = away;
  if (away && state.pending) state.pending.lost = true; // perhaps: it is looked at again
  page.onAway();
  if (!away && state.pending?.lost) resend();
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
  const { line, head, again: retry, options } = sent;
  sent.lost = false;
  state.progress = { status: "waiting", queue_position: 0 };
  page.onProgress();
  const body = retry ? { head, ...options } : { instruction: line, head, ...options };
  try {
    const path = `/games/${state.game.game}/${retry ? "again" : "turns"}?reply=accepted`;
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
    page.onProgress();
    if (!retry && !$("#line").value) page.onLine(line);
    if (error.code === "unknown words") {
      page.onUnknown(line, error.reading);
      note("");
      return;
    }
    if (error.code === "conflict") {
      receive(await ask("GET", `/games/${state.game.game}`));
      note(t(retry ? "changed" : "raced"), true);
      return;
    }
    state.raced = !retry && error.message.startsWith("a turn of this game is being played");
    throw error;
  }
}

// --- what a player does ---

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

export async function send(line, { anyway = false } = {}) {
  if (state.pending || !state.game) return;
  performance.mark("sent");
  note("");
  const options = { ...settings(), anyway };
  state.pending = { line, head: state.game.head, options };
  if ($("#line").value === line) page.onLine("");
  await attempt(() => post(state.pending));
}

export async function again() {
  if (state.pending) return;
  note("");
  state.pending = { line: "", head: state.game.head, again: true, options: settings() };
  await attempt(() => post(state.pending));
}

// Changes the game in one of the ways that answer with its state.
export async function change(path, body = {}, method = "POST") {
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

export async function undo() {
  const line = state.game.turns.at(-1)?.instruction ?? "";
  if (!(await change("undo"))) return;
  const typed = $("#line").value;
  if (typed && typed !== state.given) return; // the player's own
  state.given = line;
  page.onLine(line);
  note(t("undone"));
}

export async function redo() {
  if (!(await change("redo"))) return;
  if (state.given && $("#line").value === state.given) page.onLine("");
}

export function look(turn) {
  state.shown = turn.id === state.game.head ? null : turn.id;
  state.note = { text: "", bad: false };
  page.onGame();
}

// Runs something that asks the server, and shows what goes wrong.
export async function attempt(work, { onRefused } = {}) {
  try {
    return await work();
  } catch (error) {
    if (error instanceof Away) setAway(true);
    else if (!(error instanceof Refused)) throw error;
    else if (error.status === 401) page.onLogin();
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
