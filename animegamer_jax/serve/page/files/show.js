// Shows the state: stage, meters, story, tools, and what is said about the turn that is played.

import { change, look, looksBack, playing, send, shownTurn, state } from "./game.js";
import { Stage } from "./stage.js";
import { t } from "./text.js";
import { $, METERS, board, caption, day, firstCaption, h, keepFocus, line, meters, plain, suggestion, tree } from "./views.js";

export const stage = new Stage($("#stage"), { onPlaying: (address) => performance.mark(`playing ${address}`) });

// Where the focus goes if nothing is left where it was.
function other() {
  return playing() ? $("#stop") : ($("#board [aria-current=true]") ?? $("#open-parts"));
}

export function renderGame() {
  if (state.game) keepFocus(() => renderAll(state.game), other);
}

function renderAll(game) {
  const turn = shownTurn();
  const values = looksBack() ? turn.meters : game.meters;
  $("#meters").replaceChildren(...meters(values, turn));
  $("#day").hidden = !game.day;
  $("#day").replaceChildren(...(game.day ? day(game.day) : []));
  if (turn) {
    const label = t("clip_label", { turn: turn.turn, text: plain(turn.instruction) });
    stage.name({ play: t("clip_play"), pause: t("clip_pause") }, label);
    stage.show(turn.clip);
  } else if (game.picture) stage.showStill(game.picture.picture, t("picture_alt"));
  else stage.clear();
  renderPicture();
  $("#suggestions").replaceChildren(...(game.day?.ending ? nextSteps() : suggestions(game)));
  renderBoard(turn);
  $("#branch").hidden = !looksBack();
  $("#rules").checked = game.rules === "day";
  for (const [id, address] of [
    ["film-mp4", fileAddress("film.mp4")],
    ["film-gif", fileAddress("film.gif")],
    ["card", cardAddress()],
    ["archive", fileAddress("game.zip")],
  ]) {
    const link = $(`#${id}`);
    if (game.turns.length) link.href = address;
    else link.removeAttribute("href");
  }
  renderProgress();
  renderEnding();
}

function suggestions(game) {
  return game.suggestions.map((found) => suggestion(found, () => send(found.instruction, { anyway: true })));
}

// What is left to do when the day is over.
function nextSteps() {
  const button = (name, onclick, type = "") => h("button", { type: "button", class: type, "data-step": name, onclick }, t(name));
  return [button("next_day", nextDay, "primary"), button("card", showEnding)];
}

export function nextDay() {
  $("#ending").close();
  change("day");
}

// The first picture of the turn that is played covers the clip before it, with its own line. It
// is for the eyes alone: the line is the player's, and the clip has a name of its own.
export function renderPicture() {
  const { game, picture } = state;
  const turn = shownTurn();
  const visible = Boolean(game && picture && !looksBack());
  if (visible) stage.showGuess(picture.picture);
  else stage.dropGuess();
  $("#stage").classList.toggle("guessed", visible);
  if (!game) return;
  if (visible) $("#caption").replaceChildren(...firstCaption(picture));
  else if (turn) $("#caption").replaceChildren(...caption(turn, game.turns.length));
  else if (game.picture) $("#caption").replaceChildren(line(plain(game.picture.instruction)), h("small", {}, t("starting_picture")));
  else $("#caption").textContent = t("no_turn");
}

// The story so far; it is scrolled to the last turn when there is a new one.
function renderBoard(turn) {
  const { game } = state;
  const scrolled = $("#board").scrollLeft;
  $("#board").replaceChildren(...board(game, turn?.id, { onShow: look, onGo: (to) => change("go", { turn: to.id }) }));
  const current = $("#board [aria-current=true]");
  if (state.boarded !== game.head && current) {
    const place = current.parentElement;
    $("#board").scrollLeft = place.offsetLeft + place.offsetWidth - $("#board").clientWidth + 80;
    state.boarded = game.head;
  } else $("#board").scrollLeft = scrolled;
}

export function renderProgress() {
  keepFocus(renderTools, other);
  renderStatus();
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
  for (const button of document.querySelectorAll("#suggestions button")) button.disabled = busy || Boolean(state.pending);
  $("#play").hidden = playing();
  $("#stop").hidden = !playing();
}

function renderStatus() {
  const found = state.away ? { status: "away" } : state.progress; // which is not known then
  let message = state.note.text;
  let share = 0;
  if (found.status === "waiting") {
    const count = found.queue_position;
    message = count ? t("waiting", { count }) : t("waiting_next");
    if (state.server?.status === "warming up") message = t("warming_turn");
  } else if (found.status === "playing") {
    message = t("mllm");
    if (found.stage === "decoder") {
      const left = found.seconds_left ?? 0;
      const values = { step: found.step, steps: found.steps, seconds: Math.round(left) };
      message = t(left >= 1 ? "decoder_left" : "decoder", values);
      share = found.steps ? found.step / found.steps : 0;
    } else if (found.stage === "vae") [message, share] = [t("vae"), 1];
  } else if (!message && looksBack()) {
    message = t("looking_back", { turn: shownTurn()?.turn });
  }
  $("#stage").classList.toggle("waiting", playing());
  $("#veil").hidden = found.status !== "playing";
  $("#veil .bar div").style.width = `${100 * share}%`;
  if ($("#status").textContent !== message) $("#status").textContent = message;
  $("#status").classList.toggle("bad", state.note.bad && !playing());
}

export function renderServer() {
  const server = state.server;
  $("#own-picture").hidden = !server.pictures;
  if (state.away) return;
  const warming = server.status === "warming up";
  const trouble = server.status === "failing" ? t("failing") : "";
  $("#banner").textContent = warming ? t("warming") : trouble;
  $("#banner").classList.toggle("calm", warming);
  $("#banner").hidden = !$("#banner").textContent;
}

export function renderAway() {
  $("#banner").classList.remove("calm");
  $("#banner").hidden = !state.away;
  $("#banner").textContent = state.away ? t("away") : "";
  renderProgress();
}

// The card of the day, in the language of the page.
function cardAddress() {
  return `${fileAddress("card.png")}&language=${document.documentElement.lang}`;
}

function fileAddress(name) {
  return `/api/v1/games/${state.game.game}/${name}?head=${state.game.head}`;
}

// Shows the end of a day by itself, once.
function renderEnding() {
  const { day: now, turns } = state.game;
  const mark = now?.ending ? `${state.game.game} ${now.number} ${state.game.head}` : "";
  if (!mark || mark === state.ended) return;
  state.ended = mark;
  // The last clip is seen first.
  setTimeout(() => {
    if (state.ended === mark && state.game?.day?.ending && state.game.turns.length === turns.length) showEnding();
  }, 2200);
}

export function showEnding() {
  const now = state.game.day;
  const name = state.game.scene.character || t("somebody");
  const number = now.number;
  $("#ending-title").textContent = now.ending === "exhausted" ? t("exhausted", { name }) : t("evening", { number });
  $("#ending-stars").textContent = "★".repeat(now.stars) + "☆".repeat(3 - now.stars);
  $("#ending-stars").setAttribute("role", "img");
  $("#ending-stars").setAttribute("aria-label", t("stars", { stars: now.stars }));
  const goal = now.goal.met ? t("goal_met") : t("goal_missed");
  $("#ending-text").textContent = now.ending === "exhausted" ? `${t("exhausted_text")} ${goal}` : goal;
  const address = cardAddress();
  $("#ending-card").src = address;
  $("#ending-card").alt = t("card_alt");
  $("#ending-save").href = address;
  open("#ending");
}

// --- dialogs ---

export function open(selector) {
  const dialog = $(selector);
  if (!dialog.open) dialog.showModal();
}

export function openTree() {
  const go = (turn) => {
    $("#tree").close();
    change("go", { turn: turn.id });
  };
  $("#tree-lines").replaceChildren(...tree(state.game, go));
  open("#tree");
}

export function openMeters() {
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
