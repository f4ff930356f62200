// The page's controls, the line first; and its start.

import { again, attempt, change, follow, note, page, pauseFollowing, playing, redo, send, state, undo } from "./game.js";
import { LineField, heldBack } from "./line.js";
import { Away, ask, download, login } from "./remote.js";
import {
  nextDay, open, openMeters, openTree, renderAway, renderGame, renderPicture, renderProgress, renderServer, showEnding,
} from "./show.js";
import { begin, followHistory, goBack, goHome, keep, kept, openGames, route, showGone, upload } from "./start.js";
import * as text from "./text.js";
import { said, t } from "./text.js";
import { $, METERS, h, parts } from "./views.js";

// --- the line ---

const line = new LineField({
  line: "#line",
  shown: "#marks",
  list: "#reading",
  held: (text) => heldBack(t("not_understood"), t("play_anyway"), "anyway", () => send(text, { anyway: true })),
});
const pictureLine = new LineField({
  line: "#picture-text",
  shown: "#picture-marks",
  list: "#picture-reading",
  held: () => heldBack(t("not_understood"), t("begin_anyway"), "begin-anyway", beginFromPicture),
});

// Plays a line if the model knows a word of it; else asks first.
async function sendRead(text) {
  if (await line.passes()) await send(text);
}

// --- what is clicked and typed ---

const on = (selector, event, work) => $(selector).addEventListener(event, work);

function connect() {
  Object.assign(page, {
    onGame: renderGame,
    onProgress: renderProgress,
    onPicture: renderPicture,
    onLine: (text) => (text ? line.set(text) : line.clear()),
    onUnknown: (text, found) => line.refuse(text, found),
    onAway: () => {
      renderAway();
      if (!state.away) refreshServer();
    },
    onGone: showGone,
    onLogin: () => open("#login"),
  });
  connectGame();
  connectStart();
  addEventListener("popstate", followHistory);
  document.addEventListener("visibilitychange", () => {
    if (!state.game) return;
    if (document.hidden) pauseFollowing();
    else follow(state.game.game);
  });
}

function connectGame() {
  on(".skip", "click", (event) => {
    event.preventDefault(); // the address names the game
    (document.body.classList.contains("starting") ? $("#question") : $("#line")).focus();
  });
  on("#say", "submit", (event) => {
    event.preventDefault();
    const text = $("#line").value;
    if (playing()) return;
    if (state.game.day?.ending) return showEnding();
    if (!text.trim()) return note(said("expected an instruction, found nothing: say what happens next"), true);
    sendRead(text);
  });
  on("#line", "input", () => state.note.text && note(""));
  on("#stop", "click", () => attempt(() => ask("POST", `/games/${state.game.game}/stop`)));
  on("#undo", "click", undo);
  on("#redo", "click", redo);
  on("#again", "click", again);
  on("#branch", "click", () => change("go", { turn: state.shown }));
  on("#open-parts", "click", () => {
    $("#parts").hidden = !$("#parts").hidden;
    $("#open-parts").setAttribute("aria-expanded", String(!$("#parts").hidden));
  });
}

function connectDialogs() {
  on("#open-tree", "click", openTree);
  on("#open-meters", "click", openMeters);
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
  for (const kind of ["mp4", "gif"]) {
    on(`#film-${kind}`, "click", (event) => {
      event.preventDefault();
      saveFilm(event.currentTarget, `animegamer.${kind}`);
    });
  }
  on("#link", "click", async () => {
    await navigator.clipboard.writeText(location.href).catch(() => prompt("", location.href));
    $("#link-done").textContent = t("copied");
  });
  on("#rules", "change", () => {
    keep("rules", $("#rules").checked);
    if (state.game) change("rules", { rules: $("#rules").checked ? "day" : "off" }, "PUT");
  });
  on("#next-day", "click", nextDay);
  on("#play-on", "click", () => {
    $("#ending").close();
    change("rules", { rules: "off" }, "PUT");
  });
  on("#language", "change", async () => {
    localStorage.setItem("animegamer.language", $("#language").value);
    await text.load($("#language").value);
    rebuild();
  });
  on("#login-form", "submit", async (event) => {
    event.preventDefault();
    try {
      await login($("#login-name").value, $("#login-password").value);
      location.reload();
    } catch (error) {
      $("#login-error").textContent = error.status === 429 ? said(error.message) : t("wrong_password");
    }
  });
}

// Fetches a film, which takes a while, and then saves it.
async function saveFilm(link, name) {
  if (!link.href || link.ariaDisabled === "true") return;
  const label = link.textContent;
  link.ariaDisabled = "true";
  link.textContent = t("making_film");
  $("#link-done").textContent = "";
  const onRefused = (error) => ($("#link-done").textContent = said(error.message));
  await attempt(async () => saveAs(await download(link.href), name), { onRefused });
  link.ariaDisabled = null;
  link.textContent = label;
}

function saveAs(file, name) {
  const address = URL.createObjectURL(file);
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

function connectStart() {
  on("#home", "click", goHome);
  on("#back", "click", goBack);
  on("#just-type", "click", () => begin({}));
  on("#load", "click", () => $("#load-file").click());
  on("#load-file", "change", () => upload("archive", { archive: $("#load-file").files[0] }));
  on("#own-picture", "click", () => {
    $("#picture-error").textContent = "";
    $("#picture-text").placeholder = state.server.words.examples[0] ?? "";
    open("#picture");
  });
  on("#picture-form", "submit", async (event) => {
    event.preventDefault();
    const text = $("#picture-text").value;
    $("#picture-error").textContent = "";
    if (!$("#picture-file").files.length) $("#picture-error").textContent = said("expected a picture");
    else if (!text.trim()) $("#picture-error").textContent = said("expected a text with the picture");
    else if (await pictureLine.passes()) beginFromPicture();
  });
}

function beginFromPicture() {
  const [picture] = $("#picture-file").files;
  const rules = kept("rules", true) ? "day" : "off";
  return upload("picture", { picture, text: $("#picture-text").value, rules });
}

// --- the start ---

async function refreshServer() {
  try {
    state.server = await ask("GET", "/server");
  } catch (error) {
    if (error.status === 401) open("#login");
    else if (error instanceof Away) setTimeout(refreshServer, 1000);
    return;
  }
  renderServer();
  renderProgress();
  if (state.server.status === "warming up") setTimeout(refreshServer, 1000);
}

// Builds what depends on the server's words and on the language.
function buildLists() {
  const character = () => state.game?.scene.character;
  $("#parts").replaceChildren(...parts(state.server.words, { character, onLine: (text) => line.set(text) }));
  const levels = state.server.motion_levels.map((level) => h("option", { value: level }, `${level}`));
  $("#level").replaceChildren(h("option", { value: 0 }, t("level_auto")), ...levels);
}

function rebuild() {
  buildLists();
  renderServer();
  if (state.game) renderGame();
  else route();
  line.render();
  pictureLine.render();
}

// Runs something until the server answers, and says meanwhile that it is away.
async function insist(work) {
  for (;;) {
    try {
      const found = await work();
      $("#banner").hidden = true;
      return found;
    } catch (error) {
      if (error.status === 401) {
        open("#login"); // whoever logs in loads the page again
        await new Promise(() => {});
      }
      $("#banner").hidden = false;
      await new Promise((done) => setTimeout(done, 1000));
    }
  }
}

async function start() {
  const language = text.preferred();
  $("#language").value = language;
  $("#bar").inert = $("main").inert = true; // until it is known what is played here
  await insist(() => text.load(language));
  connectDialogs();
  state.server = await insist(() => ask("GET", "/server"));
  const { server } = state;
  connect();
  renderServer();
  if (server.status === "warming up") setTimeout(refreshServer, 1000);
  $("#steps").max = server.max_steps;
  $("#steps").placeholder = `${server.steps}`;
  $("#window").max = server.window;
  $("#window").placeholder = `${server.window}`;
  $("#rules").checked = kept("rules", true);
  document.title = `AnimeGamer: ${server.model}`;
  buildLists();
  route();
  $("#bar").inert = $("main").inert = false;
  document.body.dataset.ready = "";
}

start();
