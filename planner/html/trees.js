// Modules as a tree, and the operations as rows with arcs between what is visible.
class Node {
  constructor(name, parent) {
    Object.assign(this, { name, parent, children: new Map(), ops: [], open: false, op: null });
    this.depth = parent ? parent.depth + 1 : -1;
  }
  child(name) {
    if (!this.children.has(name)) this.children.set(name, new Node(name, this));
    return this.children.get(name);
  }
  add(path, index) {
    let node = this;
    node.ops.push(index);
    for (const name of path) {
      node = node.child(name);
      node.ops.push(index);
    }
    return node;
  }
  sum(key) {
    this.sums = this.sums || {};
    if (!(key in this.sums)) this.sums[key] = this.ops.reduce((s, o) => s + key_of[key](data.ops[o]), 0);
    return this.sums[key];
  }
}
// An operation: [name, target, module, source, backward?, ns, runs, saved, saved without plan, inputs]
const key_of = {
  saved: (o) => o[7],
  plain: (o) => o[8],
  again: (o) => o[5] * (o[6] - 1),
  time: (o) => (o[4] ? 0 : o[5]),
  calls: (o) => o[6] - 1,
};
const pathOf = (o) => (text(o[2]) || "(outside of modules)").split(".");

class TreeTable {
  constructor(table, root, columns, drawn) {
    Object.assign(this, { table, root, columns, drawn });
    const names = ["module", ...columns.map((c) => c[0])];
    table.createTHead().append(el("tr", {}, names.map((name, i) =>
      el("th", { scope: "col", text: name, class: i && columns[i - 1][2] ? "number" : "" }))));
    this.body = table.createTBody();
    root.open = true;
  }
  visible() {
    const found = [];
    const walk = (node) => {
      if (node !== this.root) found.push(node);
      if (node.open) for (const child of node.children.values()) walk(child);
    };
    walk(this.root);
    return found;
  }
  draw(focus) {
    const nodes = this.visible();
    this.body.replaceChildren(...nodes.map((node) => this.row(node)));
    if (focus) this.body.rows[nodes.indexOf(focus)].querySelector("button").focus();
    if (this.drawn) this.drawn(nodes, [...this.body.rows]);
  }
  row(node) {
    const more = node.children.size > 0;
    const first = more
      ? el("button", { type: "button", text: node.open ? "\u25be" : "\u25b8",
          "aria-expanded": node.open, "aria-label": (node.open ? "close " : "open ") + node.name,
          onclick: () => { node.open = !node.open; this.draw(node); } })
      : el("span", { class: "leaf" });
    const cell = el("td", {}, [first, el("span", { class: "code", text: node.name })]);
    cell.style.paddingLeft = node.depth * 1.1 + "rem";
    return el("tr", {}, [cell, ...this.columns.map((column) => this.cell(node, column))]);
  }
  cell(node, [, show, kind, share]) {
    if (kind !== "bar") return el("td", { text: show(node), class: kind });
    const bar = el("span");
    bar.style.width = 100 * share(node) + "%";
    return el("td", { class: "bar number" }, [bar, el("span", { text: show(node) })]);
  }
  level(deeper) {
    const walk = (node, depth) => {
      node.open = depth < deeper;
      for (const child of node.children.values()) walk(child, depth + 1);
    };
    walk(this.root, 0);
    this.draw();
  }
}

function modules() {
  const root = new Node("", null);
  data.ops.forEach((op, i) => root.add(pathOf(op), i));
  const bar = (key) => (node) => (root.sum(key) ? node.sum(key) / root.sum(key) : 0);
  const tree = new TreeTable(byId("modules"), root, [
    ["kept for backward", (n) => bytes(n.sum("saved")), "bar", bar("saved")],
    ["kept without the plan", (n) => bytes(n.sum("plain")), "bar", bar("plain")],
    ["recomputed", (n) => ms(n.sum("again")), "bar", bar("again")],
    ["forward time", (n) => ms(n.sum("time")), "number"],
  ]);
  let only = root;
  while (only.children.size === 1 || only === root) {
    only.open = true;
    only = only.children.values().next().value;
    if (!only) break;
    only.open = true;
  }
  tree.draw();
  byId("modules-open").addEventListener("click", () => tree.level(99));
  byId("modules-close").addEventListener("click", () => tree.level(1));
}

function graph() {
  const root = new Node("", null);
  data.ops.forEach((op, i) => {
    const node = root.add([op[4] ? "backward" : "forward", ...pathOf(op), op[0]], i);
    node.op = op;
  });
  const marks = (n) => {
    const words = [];
    if (n.sum("saved")) words.push("\u25a0 keeps " + bytes(n.sum("saved")));
    if (n.sum("calls")) words.push("\u21bb runs again: " + ms(n.sum("again")));
    return words.join("   ");
  };
  const tree = new TreeTable(byId("graph"), root, [
    ["operator", (n) => (n.op ? text(n.op[1]) : n.ops.length + " operations"), "code"],
    ["what the plan does", marks, ""],
    ["source", (n) => (n.op ? place(text(n.op[3])) : ""), "code"],
  ], arcs);
  tree.level(1);
  byId("graph-more").addEventListener("click", () => tree.level(3));
  byId("graph-close").addEventListener("click", () => tree.level(1));
}

function arcs(nodes, lines) {
  const stands = new Int32Array(data.ops.length).fill(-1);
  nodes.forEach((node, i) => {
    if (!node.open || node.op) for (const o of node.ops) stands[o] = i;
  });
  const flow = new Map();
  data.ops.forEach((op, o) => {
    for (let k = 0; k < op[9].length; k += 2) {
      const [from, to] = [stands[op[9][k]], stands[o]];
      if (from === to || from < 0 || to < 0) continue;
      const key = from * nodes.length + to;
      flow.set(key, (flow.get(key) || 0) + op[9][k + 1]);
    }
  });
  const most = Math.max(1, ...flow.values());
  const middle = lines.map((row) => row.offsetTop + row.offsetHeight / 2);
  const drawn = [...flow].sort((a, b) => b[1] - a[1]).slice(0, 3000).map(([key, n]) => {
    const [from, to] = [Math.floor(key / nodes.length), key % nodes.length];
    const [y, z] = [middle[from], middle[to]];
    const bend = 145 - Math.min(135, 12 * Math.log2(1 + Math.abs(z - y) / 8));
    const path = svg("path", { d: `M148 ${y}C${bend} ${y} ${bend} ${z} 148 ${z}`,
      "stroke-width": 0.8 + 3 * Math.sqrt(n / most) });
    path.append(svg("title", { text: `${nodes[from].name} to ${nodes[to].name}: ${bytes(n)}` }));
    for (const i of [from, to]) {
      lines[i].addEventListener("pointerenter", () => path.classList.add("on"));
      lines[i].addEventListener("pointerleave", () => path.classList.remove("on"));
      lines[i].addEventListener("focusin", () => path.classList.add("on"));
      lines[i].addEventListener("focusout", () => path.classList.remove("on"));
    }
    return path;
  });
  byId("arcs").replaceChildren(...drawn);
}
