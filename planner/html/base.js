"use strict";
// What all parts of the page share. Text from the model only ever enters through textContent.
const data = JSON.parse(document.getElementById("data").textContent);

function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  for (const child of children || []) node.append(child);
  return node;
}
const el = (name, attributes, children) =>
  put(document.createElement(name), attributes, children);
const svg = (name, attributes, children) =>
  put(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
const byId = (id) => document.getElementById(id);

const bytes = (n) => (n >= 1e8 ? (n / 1e9).toFixed(3) + " GB" : (n / 1e6).toFixed(2) + " MB");
const ms = (ns) => {
  const value = ns / 1e6;
  return (value >= 100 || value === 0 ? value.toFixed(0) : value.toPrecision(3)) + " ms";
};
const percent = (x) => (100 * x).toFixed(2) + " %";
const text = (index) => data.strings[index];
const place = (path) => path.split(/[\\/]/).slice(-2).join("/"); // the end of a long file name

function rows(table, lines, numbers) {
  const body = table.tBodies[0] || table.createTBody();
  for (const line of lines) {
    body.append(el("tr", {}, line.map((cell, i) =>
      el(i === 0 ? "th" : "td", { text: cell, class: i >= numbers ? "number" : "" }))));
  }
}

function theme() {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme || (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
}

function summary() {
  const s = data.summary;
  byId("lead").textContent = s.lead;
  rows(byId("figures"), s.rows, 1);
  for (const note of s.notes) byId("notes").append(el("li", { text: note }));
}
