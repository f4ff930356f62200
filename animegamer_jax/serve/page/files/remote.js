// The server: requests, and the events of a game. A server that is away is noticed at once.

const BASE = "/api/v1";

export class Refused extends Error {
  constructor(status, answer) {
    super(answer.error ?? `HTTP ${status}`);
    this.status = status;
    this.code = answer.code ?? "";
    this.reading = answer.reading ?? null;
  }

  // Whether the game cannot be followed: it is not there, or needs a login or a free place.
  get final() {
    return [401, 422].includes(this.status);
  }
}

export class Away extends Error {}

async function reach(address, options) {
  let answer;
  try {
    answer = await fetch(address, options);
  } catch {
    throw new Away();
  }
  if ([502, 503, 504].includes(answer.status)) throw new Away();
  return answer;
}

// Returns a file of the server.
export async function download(address) {
  const answer = await reach(address);
  if (!answer.ok) throw new Refused(answer.status, await answer.json().catch(() => ({})));
  return answer.blob();
}

export async function ask(method, path, body) {
  const options = { method, headers: {} };
  if (body instanceof FormData) options.body = body;
  else if (body !== undefined) {
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  const answer = await reach(BASE + path, options);
  const type = answer.headers.get("content-type") ?? "";
  const found = type.includes("json") ? await answer.json() : {};
  if (!answer.ok) throw new Refused(answer.status, found);
  return found;
}

export async function login(name, password) {
  const form = new URLSearchParams({ username: name, password });
  const answer = await fetch("/login", { method: "POST", body: form });
  if (answer.ok) return;
  throw new Refused(answer.status, answer.status === 429 ? await answer.json() : {});
}

// Follows a game until `close`; tries again when the server is away.
export class Follower {
  constructor(game, { onState, onProgress, onPicture, onAway, onGone }) {
    this.game = game;
    this.handlers = { onState, onProgress, onPicture, onAway, onGone };
    this.open();
  }

  open() {
    const { onState, onProgress, onPicture, onAway, onGone } = this.handlers;
    this.source?.close();
    const source = (this.source = new EventSource(`${BASE}/games/${this.game}/events`));
    source.addEventListener("state", (event) => onState(JSON.parse(event.data)));
    source.addEventListener("progress", (event) => onProgress(JSON.parse(event.data)));
    source.addEventListener("picture", (event) => onPicture(JSON.parse(event.data)));
    const lost = async () => {
      if (this.source !== source) return;
      source.close();
      try {
        await ask("GET", `/games/${this.game}`); // the server is there: is the game?
        onAway(false);
      } catch (error) {
        if (error instanceof Refused && error.final) return onGone(error);
        onAway(true); // or too busy for one more request
      }
      this.timer = setTimeout(() => this.open(), 700);
    };
    source.addEventListener("closing", () => {
      onAway(true);
      lost();
    });
    source.onerror = () => {
      onAway(true);
      lost();
    };
    source.onopen = () => onAway(false);
  }

  close() {
    clearTimeout(this.timer);
    const source = this.source;
    this.source = null;
    source?.close();
  }
}
