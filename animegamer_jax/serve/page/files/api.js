// Shows the OpenAPI description of the API as a page.

import { $, h } from "./views.js";

function kind(schema) {
  if (!schema) return "";
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1);
    return h("a", { href: `#${name}` }, name);
  }
  if (schema.anyOf) {
    const parts = schema.anyOf.flatMap((one, number) => [number ? " or " : "", kind(one)]);
    return h("span", {}, ...parts);
  }
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(", ");
  if (schema.const) return JSON.stringify(schema.const);
  if (schema.type === "array") return h("span", {}, "list of ", kind(schema.items));
  if (schema.additionalProperties) return h("span", {}, "object of ", kind(schema.additionalProperties));
  return schema.format ?? schema.type ?? "file";
}

function row(name, schema, required, text) {
  return h(
    "tr",
    {},
    h("td", {}, h("code", {}, name), required ? "" : " (optional)"),
    h("td", {}, kind(schema)),
    h("td", {}, text ?? schema?.description ?? ""),
  );
}

function fields(schema) {
  const required = schema.required ?? [];
  const rows = Object.entries(schema.properties ?? {});
  return h("table", {}, ...rows.map(([name, one]) => row(name, one, required.includes(name))));
}

function operation(method, path, found) {
  const parts = [h("p", {}, found.description ?? "")];
  if (found.parameters?.length) {
    parts.push(h("table", {}, ...found.parameters.map((one) => row(one.name, one.schema, one.required, one.description))));
  }
  const body = Object.values(found.requestBody?.content ?? {})[0]?.schema;
  if (body) parts.push(h("p", {}, "Body: ", kind(body)));
  for (const [status, answer] of Object.entries(found.responses)) {
    const [media, content] = Object.entries(answer.content ?? {})[0] ?? ["", {}];
    parts.push(h("p", {}, `${status}: `, content.schema?.$ref || content.schema?.type ? kind(content.schema) : media));
  }
  return h("details", {}, h("summary", {}, h("code", {}, `${method.toUpperCase()} ${path}`), ` ${found.summary ?? ""}`), ...parts);
}

const found = await (await fetch("/api/v1/openapi.json")).json();
$("#title").textContent = `${found.info.title}: the API, version ${found.info.version}`;
$("#about").textContent = found.info.description;
for (const [path, methods] of Object.entries(found.paths)) {
  for (const [method, one] of Object.entries(methods)) $("#paths").append(operation(method, path, one));
}
for (const [name, schema] of Object.entries(found.components.schemas)) {
  const about = h("p", {}, schema.description ?? "");
  $("#schemas").append(h("details", { id: name }, h("summary", {}, h("code", {}, name)), about, fields(schema)));
}
