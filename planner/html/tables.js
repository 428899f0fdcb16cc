// The cut points: sortable by every column, filtered by any text in a row.
const FIRST = 200;

function cuts() {
  const table = byId("cuts");
  const columns = [
    ["value", (c) => c[0], (c) => c[0], "code fixed"],
    ["module", (c) => text(c[1]), (c) => text(c[1]), "code"],
    ["operator", (c) => text(c[2]), (c) => text(c[2]), "code fixed"],
    ["shape", (c) => c[3], (c) => c[3], "code fixed"],
    ["MB", (c) => (c[5] / 1e6).toFixed(2), (c) => c[5], "number"],
    ["ms avoided", (c) => (c[6] / 1e6).toPrecision(3), (c) => c[6], "number"],
    ["weight", (c) => (100 * c[9]).toPrecision(2) + " %", (c) => c[9], "number"],
    ["why it is kept", (c) => c[8], (c) => c[8], ""],
    ["source", (c) => place(text(c[7])), (c) => text(c[7]), "code fixed", (c) => text(c[7])],
  ];
  let order = null, down = false, most = FIRST;
  const head = el("tr");
  columns.forEach(([name, , , kind], i) => {
    const button = el("button", { type: "button", text: name, onclick: () => {
      down = order === i ? !down : kind === "number";
      order = i;
      draw();
    } });
    head.append(el("th", { scope: "col", class: kind === "number" ? "number" : "" }, [button]));
  });
  table.createTHead().append(head);
  const body = table.createTBody();
  const lines = data.cuts.map((cut, i) => ({
    cut, i, words: columns.map((c) => c[1](cut)).concat([cut[4], text(cut[7])]).join(" ").toLowerCase(),
  }));

  function draw() {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = lines.filter((line) => words.every((w) => line.words.includes(w)));
    if (order !== null) {
      const key = columns[order][2];
      const sign = down ? -1 : 1;
      found.sort((a, b) => {
        const [x, y] = [key(a.cut), key(b.cut)];
        return (x < y ? -sign : x > y ? sign : 0) || a.i - b.i;
      });
    }
    [...head.cells].forEach((th, i) => {
      if (i === order) th.setAttribute("aria-sort", down ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
    });
    body.replaceChildren(...found.slice(0, most).map(({ cut }) => el("tr", {},
      columns.map(([, show, , kind, title]) => el("td",
        { text: show(cut), class: kind, ...(title && { title: title(cut) }) })))));
    const shown = Math.min(found.length, most);
    byId("cut-count").textContent =
      `${shown} of ${found.length} shown, ${lines.length} cut points in all`;
    byId("more").hidden = found.length <= most;
  }
  byId("filter").addEventListener("input", draw);
  byId("more").addEventListener("click", () => { most = Infinity; draw(); });
  draw();
}
