// A field for a line: while it is typed, unknown words are marked, and known ones offered.

import { ask } from "./remote.js";
import { $, h, keepFocus, marks, reading } from "./views.js";

export class LineField {
  // `held` shows why a line is held back, and how to send it all the same.
  constructor({ line, shown, list, held }) {
    Object.assign(this, { line: $(line), shown: $(shown), list: $(list), held });
    this.reading = null; // of the line as it was last read
    this.read = null; // that line
    this.refused = null; // the line of which the model knows no word
    this.timer = 0;
    this.line.addEventListener("input", () => this.readSoon());
    this.line.addEventListener("scroll", () => (this.shown.scrollLeft = this.line.scrollLeft));
  }

  set(text) {
    this.line.value = text;
    this.readSoon();
  }

  clear() {
    this.line.value = "";
    this.reading = this.read = this.refused = null;
    this.render();
  }

  readSoon() {
    clearTimeout(this.timer);
    this.render();
    this.timer = setTimeout(() => this.readNow(), 160);
  }

  async readNow() {
    clearTimeout(this.timer);
    const line = this.line.value;
    if (!line.trim()) this.reading = this.read = null;
    else {
      try {
        this.reading = await ask("POST", "/read", { text: line });
        this.read = line;
      } catch {
        return; // it only helps
      }
    }
    if (this.line.value === line) this.render();
  }

  // Whether the model knows a word of the line; if not, it is held back.
  async passes() {
    const line = this.line.value;
    if (this.read !== line) await this.readNow();
    if (this.read !== line || !this.reading || this.reading.understood) return true;
    this.refuse(line, this.reading);
    return false;
  }

  refuse(line, found) {
    this.reading = found;
    this.refused = line;
    this.render();
    this.list.scrollIntoView({ block: "nearest" });
  }

  render() {
    const line = this.line.value;
    this.shown.replaceChildren(...marks(line, this.reading));
    this.shown.scrollLeft = this.line.scrollLeft;
    const found = reading(this.reading, (word, near) => this.replace(word, near));
    if (this.refused === line && line) found.unshift(...this.held(line));
    keepFocus(() => this.list.replaceChildren(...found), () => this.line);
  }

  replace(word, near) {
    const line = this.line.value;
    this.line.value = line.slice(0, word.start) + near + line.slice(word.end);
    this.line.focus();
    this.readNow();
  }
}

// What is shown of a line that is held back.
export function heldBack(text, button, id, onClick) {
  return [h("strong", {}, text), h("button", { type: "button", id, onclick: onClick }, button)];
}
