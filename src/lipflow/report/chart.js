"use strict";
// A chart in plain SVG: axes, series, and a cursor that shows their values, by pointer or by the arrow keys. Strings from
// runs are only set as text, so they cannot become markup.

function draw(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function make(name, className = "", ...children) {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((m) => m * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

const plain = (value) => String(+value.toFixed(6));
const power = (value) => {
  const n = Math.round(Math.log10(value));
  return Math.abs(n) < 3 ? plain(value) : "10" + [...String(n)].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit] ?? "⁻").join("");
};
// As in table.py: 0% only for 0 and 100% only for 1.
const percent = (value) => {
  const hundredths = Math.floor(1e4 * value + 0.5);
  return ((value < 1 ? Math.min(9999, Math.max(value > 0 ? 1 : 0, hundredths)) : hundredths) / 100).toFixed(2) + "%";
};

// Runs differ in colour and in their marks. The ninth run has the colour of the first one, and another mark.
const MARKS = [
  (x, y, r) => `M${x - r},${y}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  (x, y, r) => `M${x - r},${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
  (x, y, r) => `M${x},${y - 1.3 * r}l${1.3 * r},${1.3 * r}l${-1.3 * r},${1.3 * r}l${-1.3 * r},${-1.3 * r}z`,
  (x, y, r) => `M${x},${y - 1.2 * r}l${1.2 * r},${2.2 * r}h${-2.4 * r}z`,
];

const tone = (run) => (run === null ? "grey" : `c${run % 8}`);

const CROSS = (x, y, r) => `M${x - r},${y - r}l${2 * r},${2 * r}M${x - r},${y + r}l${2 * r},${-2 * r}`;

class Chart {
  // x, y: {low, high, label, format, log}; series: [{run, at(x) → y or null, read(x) → text, points, look, curve}]. `run`
  // is the number of a run, or null for a network of the paper, which is drawn in grey.
  constructor(box, options) {
    Object.assign(this, { box, chosen: null, cursor: null, step: 0.01 }, options);
    box.classList.add("chart");
    this.tip = make("div", "tip");
    this.tip.hidden = true;
    this.tip.setAttribute("role", "status");
    box.append(this.tip);
    new ResizeObserver(() => box.clientWidth !== this.width && this.render()).observe(box);
    box.addEventListener("pointermove", (event) => this.point(event));
    box.addEventListener("pointerleave", () => this.leave());
    box.addEventListener("click", (event) => this.pick && this.pick(this.value(event)));
    this.render();
  }

  px(x) { return this.left + ((x - this.x.low) / (this.x.high - this.x.low || 1)) * (this.right - this.left); }

  py(y) {
    const scale = this.y.log ? Math.log10 : (v) => v;
    const share = (scale(y) - scale(this.y.low)) / (scale(this.y.high) - scale(this.y.low) || 1);
    return this.bottom - share * (this.bottom - this.top);
  }

  value(event) {
    const inside = event.clientX - this.box.getBoundingClientRect().left;
    const share = (inside - this.left) / (this.right - this.left);
    return this.x.low + Math.min(1, Math.max(0, share)) * (this.x.high - this.x.low);
  }

  render() {
    this.width = this.box.clientWidth;
    const height = this.height || Math.round(Math.min(400, Math.max(230, this.width * 0.5)));
    Object.assign(this, { left: 50, right: Math.max(80, this.width - 10), top: 12, bottom: height - 44 });
    const svg = draw("svg", { height, viewBox: `0 0 ${Math.max(90, this.width)} ${height}`, tabindex: 0, role: "img",
      "aria-label": this.label + ". The left and right arrow keys show values." });
    svg.addEventListener("keydown", (event) => this.key(event));
    svg.addEventListener("blur", () => this.leave());
    svg.append(...this.axes());
    for (const series of this.shown()) svg.append(...this.trace(series));
    if (this.chosen !== null) svg.append(this.vertical(this.chosen, "chosen"));
    this.hair = this.vertical(this.x.low, "cursor");
    this.hair.setAttribute("visibility", "hidden");
    svg.append(this.hair);
    const had = this.svg && document.activeElement === this.svg;
    if (this.svg) this.svg.replaceWith(svg);
    else this.box.prepend(svg);
    this.svg = svg;
    if (had) svg.focus();
  }

  shown() { return this.series.filter((series) => !this.visible || this.visible(series)); }

  vertical(x, name) {
    return draw("line", { class: name, x1: this.px(x), x2: this.px(x), y1: this.top, y2: this.bottom });
  }

  axes() {
    const nodes = [];
    for (const x of ticks(this.x.low, this.x.high, Math.max(3, Math.min(10, this.width / 90)))) {
      nodes.push(draw("line", { class: "grid", x1: this.px(x), x2: this.px(x), y1: this.bottom, y2: this.bottom + 5 }));
      nodes.push(draw("text", { x: this.px(x), y: this.bottom + 19, "text-anchor": "middle" }, this.x.format(x)));
    }
    const decades = (low, high) => ticks(Math.floor(Math.log10(low)), Math.ceil(Math.log10(high)), 20)
      .filter(Number.isInteger).map((power) => 10 ** power).filter((y) => y >= low * 0.999 && y <= high * 1.001);
    for (const y of this.y.log ? decades(this.y.low, this.y.high) : ticks(this.y.low, this.y.high, 5)) {
      nodes.push(draw("line", { class: "grid", x1: this.left, x2: this.right, y1: this.py(y), y2: this.py(y) }));
      nodes.push(draw("text", { x: this.left - 8, y: this.py(y) + 4, "text-anchor": "end" }, this.y.format(y)));
    }
    nodes.push(draw("line", { class: "axis", x1: this.left, x2: this.right, y1: this.bottom, y2: this.bottom }));
    nodes.push(draw("text", { x: (this.left + this.right) / 2, y: this.bottom + 38, "text-anchor": "middle" }, this.x.label));
    return nodes;
  }

  trace(series) {
    const group = draw("g", { class: tone(series.run), "data-run": series.run ?? "none", "data-look": series.look });
    let path = "";
    if (series.curve) {
      for (let p = this.left, pen = "M"; p <= this.right; p += 0.5) {
        const y = series.at(this.x.low + ((p - this.left) / (this.right - this.left)) * (this.x.high - this.x.low));
        if (y !== null) path += `${pen}${p},${this.py(y).toFixed(1)}`;
        pen = y === null ? "M" : "L";
      }
    } else {
      const all = series.points.filter(([x, y]) => y !== null && x <= this.x.high * 1.0001);
      all.forEach(([x, y], i) => { path += `${i ? "L" : "M"}${this.px(x).toFixed(1)},${this.py(y).toFixed(1)}`; });
    }
    group.append(draw("path", { class: { solid: "line", dashed: "line dashed", paper: "paper" }[series.look], d: path }));
    for (const [x, y] of series.marked ? series.points : []) {
      if (x > this.x.high * 1.0001) continue;
      const mark = series.look === "paper" ? CROSS : MARKS[(series.run + Math.floor(series.run / 8)) % MARKS.length];
      group.append(draw("path", { class: "point", d: mark(this.px(x), this.py(y), 3.5) }));
    }
    return [group];
  }

  point(event) { if (event.pointerType !== "touch" || event.buttons || event.pressure) this.read(this.value(event)); }

  key(event) {
    const span = this.x.high - this.x.low;
    const start = this.cursor ?? this.chosen ?? this.x.low;
    const steps = { ArrowLeft: start - this.step * span, ArrowRight: start + this.step * span, Home: this.x.low, End: this.x.high };
    if (event.key === "Escape") this.leave();
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.read(Math.min(this.x.high, Math.max(this.x.low, steps[event.key])));
  }

  read(x) {
    this.cursor = x;
    const lines = this.shown().map((series) => [series, series.read(x)]).filter(([, text]) => text);
    this.tip.replaceChildren(make("p", "", this.x.say ? this.x.say(x) : `${this.x.label} ${this.x.format(x)}`));
    for (const [series, text] of lines) {
      this.tip.append(make("p", "", make("span", `swatch ${tone(series.run)}`), text));
    }
    this.tip.hidden = !lines.length;
    const at = this.px(x);
    for (const end of ["x1", "x2"]) this.hair.setAttribute(end, at);
    this.hair.setAttribute("visibility", "visible");
    const width = this.tip.offsetWidth;
    const beside = at + 12 + width > this.width ? at - 12 - width : at + 12;
    this.tip.style.left = `${Math.max(0, Math.min(beside, this.width - width))}px`;
  }

  leave() {
    this.cursor = null;
    this.tip.hidden = true;
    this.hair.setAttribute("visibility", "hidden");
  }
}
