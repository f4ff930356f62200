// The interface's texts in the player's language.

let texts = { errors: {} };
export const languages = ["en", "ja", "zh"];

export function preferred() {
  const kept = localStorage.getItem("animegamer.language");
  if (languages.includes(kept)) return kept;
  const wanted = navigator.languages.map((name) => name.slice(0, 2));
  return wanted.find((name) => languages.includes(name)) ?? "en";
}

export async function load(language) {
  const answer = await fetch(`/assets/lang/${language}.json`);
  if (!answer.ok) throw new Error(language);
  texts = await answer.json();
  document.documentElement.lang = language;
  for (const element of document.querySelectorAll("[data-t]")) {
    element.textContent = t(element.dataset.t);
  }
  for (const element of document.querySelectorAll("[data-label]")) {
    element.setAttribute("aria-label", t(element.dataset.label));
  }
  for (const element of document.querySelectorAll("[data-placeholder]")) {
    element.placeholder = t(element.dataset.placeholder);
  }
}

// A text by its name, with values for the names in braces.
export function t(name, values = {}) {
  const text = texts[name] ?? name;
  return text.replace(/\{(\w+)\}/g, (whole, key) => values[key] ?? whole);
}

// A message of the server, which speaks a programmer's English, in the player's language: by the
// first pattern that matches it. A value that names a field is shown as the field's label.
export function said(message) {
  for (const [pattern, text] of Object.entries(texts.errors)) {
    const found = message.match(new RegExp(pattern));
    if (!found) continue;
    return text.replace(/\{(\d)\}/g, (_, number) => texts[found[number]] ?? found[number]);
  }
  return message;
}
