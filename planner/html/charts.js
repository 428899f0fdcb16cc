// Two charts: memory over the step, and overhead against the budget.
function ticks(least, most, count) {
  const rough = (most - least) / count;
  if (!(rough > 0)) return [least];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let i = Math.ceil(least / step); i * step <= most; i++) found.push(i * step);
  return found;
}

class Chart {
  constructor(id, xMost, yMost, xText, yText, xTitle, yTitle, label, xLeast = 0) {
    Object.assign(this, { xMost, yMost, xLeast });
    [this.left, this.right, this.top, this.bottom] = [70, 930, 26, 290];
    this.root = svg("svg", { viewBox: "0 0 960 340", role: "img", "aria-label": label });
    byId(id).prepend(this.root);
    for (const t of ticks(0, yMost, 5)) {
      this.line(this.left, this.y(t), this.right, this.y(t), "grid");
      this.text(this.left - 8, this.y(t) + 4, yText(t), "end");
    }
    for (const t of ticks(xLeast, xMost, 8)) {
      const x = this.x(t);
      this.line(x, this.bottom, x, this.bottom + 5, "axis");
      this.text(x, this.bottom + 20, xText(t), "middle");
    }
    this.line(this.left, this.bottom, this.right, this.bottom, "axis");
    this.text(this.right, this.bottom + 40, xTitle, "end");
    this.text(this.left - 60, 14, yTitle, "start");
  }
  x(v) {
    const share = (v - this.xLeast) / (this.xMost - this.xLeast || 1);
    return this.left + share * (this.right - this.left);
  }
  y(v) { return this.bottom - (v / (this.yMost || 1)) * (this.bottom - this.top); }
  line(x1, y1, x2, y2, kind) {
    return this.root.appendChild(svg("line", { x1, y1, x2, y2, class: kind }));
  }
  text(x, y, words, anchor) {
    this.root.append(svg("text", { x, y, text: words, "text-anchor": anchor }));
  }
  path(points, kind, stepped) {
    let d = "";
    points.forEach(([px, py], i) => {
      const [x, y] = [this.x(px).toFixed(1), this.y(py).toFixed(1)];
      d += i === 0 ? `M${x} ${y}` : stepped ? `H${x}V${y}` : `L${x} ${y}`;
    });
    this.root.append(svg("path", { d, class: kind }));
  }
  mark(x, y) {
    return this.root.appendChild(svg("circle", { cx: this.x(x), cy: this.y(y), r: 5, class: "mark" }));
  }
}

function memory() {
  const { plan, plain, boundary, budget, end, top } = data.memory;
  const chart = new Chart("memory", end, top * 1.08, (v) => (v / 1e6).toPrecision(3),
    (v) => (v / 1e9).toPrecision(3), "milliseconds of the cost model", "GB held",
    "Memory held over the step, with the plan and without recomputation");
  chart.line(chart.x(boundary), chart.top, chart.x(boundary), chart.bottom, "axis");
  chart.text(chart.x(boundary) - 6, chart.top + 4, "forward", "end");
  chart.text(chart.x(boundary) + 6, chart.top + 4, "backward", "start");
  if (budget <= top * 1.08) {
    chart.line(chart.left, chart.y(budget), chart.right, chart.y(budget), "limit");
    chart.text(chart.right, chart.y(budget) - 5, "budget " + bytes(budget), "end");
  }
  chart.path(plain, "plain", true);
  chart.path(plan, "plan", true);
  const peak = plan.reduce((best, p) => (p[1] > best[1] ? p : best));
  const side = chart.x(peak[0]) > 700 ? "end" : "start";
  chart.mark(peak[0], peak[1]);
  chart.text(chart.x(peak[0]) + (side === "end" ? -9 : 9), chart.y(peak[1]) + 16,
    "peak " + bytes(peak[1]), side);
  const line = chart.line(chart.x(peak[0]), chart.top, chart.x(peak[0]), chart.bottom, "here");
  const slider = byId("moment");
  const show = () => {
    const [at, held, name, what, module] = plan[+slider.value];
    line.setAttribute("x1", chart.x(at));
    line.setAttribute("x2", chart.x(at));
    byId("moment-text").textContent =
      `${ms(at)}: ${bytes(held)} held, ${what} ${name} ${text(module) ? "in " + text(module) : ""}`;
  };
  slider.max = plan.length - 1;
  slider.value = plan.indexOf(peak);
  slider.addEventListener("input", show);
  chart.root.addEventListener("pointermove", (event) => {
    const box = chart.root.getBoundingClientRect();
    const wide = ((event.clientX - box.left) / box.width) * 960;
    const at = ((wide - chart.left) / (chart.right - chart.left)) * end;
    let best = 0;
    plan.forEach((p, i) => { if (p[0] <= at) best = i; });
    slider.value = best;
    show();
  });
  show();
  rows(byId("breakdown"), data.peak.breakdown.map(([what, n]) => [what, bytes(n)]), 1);
  rows(byId("largest"), data.peak.largest.map(([what, n]) => [what, bytes(n)]), 1);
  byId("peak-text").textContent = data.peak.text;
}

function curve() {
  const { points, bounds, plan, least, most } = data.curve;
  const worst = Math.max(plan[1], ...points.map((p) => p[1]), ...bounds.map((p) => p[1]), 0.01);
  const low = Math.min(plan[0], least), high = Math.max(most, plan[0]);
  const pad = (high - low) * 0.04 || high * 0.1;
  const chart = new Chart("curve", high + pad, worst * 1.12, (v) => (v / 1e9).toPrecision(3),
    (v) => (100 * v).toPrecision(2) + " %", "GB at the peak", "added step time",
    "Trade-off between peak memory and added step time", low - pad);
  if (bounds.length > 1) chart.path(bounds, "bound", false);
  if (points.length > 1) chart.path(points, "plan", false);
  chart.mark(plan[0], plan[1]);
  const side = chart.x(plan[0]) > 700 ? "end" : "start";
  chart.text(chart.x(plan[0]) + (side === "end" ? -9 : 9), chart.y(plan[1]) - 9,
    "this plan " + percent(plan[1]), side);
  byId("curve-text").textContent = data.curve.text;
  rows(byId("curve-rows"), data.curve.rows, 0);
}
