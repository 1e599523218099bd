// Reads the data of the page, draws the charts, and handles the choice of runs and of ε.

const DATA = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const all = (selector) => [...document.querySelectorAll(selector)];
const hidden = new Set();
const charts = [];

function visible(series) {
  return !hidden.has(`run ${series.run}`) && !hidden.has(`kind ${series.kind}`);
}

// The sorted radii of the images with the right label, as float64. `of` is a run, or its part (the first images, if only
// they were attacked).
for (const of of DATA.runs.flatMap((run) => [run, run.part ?? {}])) {
  if (of.radii === undefined) continue;
  const bytes = Uint8Array.from(atob(of.radii), (letter) => letter.charCodeAt(0));
  of.sorted = new Float64Array(bytes.buffer);
}

// The number of images with the right label and R > ε. It is exact: both are float64, and ε is rounded down.
function certified(run, eps) {
  let low = 0, high = run.sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (run.sorted[middle] > eps) high = middle;
    else low = middle + 1;
  }
  return eps < 0 ? run.sorted.length : run.sorted.length - low;
}

// At ε = 0 it is the clean accuracy, which counts images of radius 0 too.
const accuracy = (run, eps) => (eps === 0 ? run.sorted.length : certified(run, eps)) / Math.max(1, run.images);

// An attack that succeeds in a ball also does in a larger one: an attack at a smaller ε bounds the accuracy from above.
const attackedAt = (run, eps) => run.attacked.filter((point) => point[1] <= eps).at(-1) ?? null;

function attackText(run, eps) {
  const point = attackedAt(run, eps);
  if (point === null) return "–";
  return point[1] === eps ? percent(point[2]) : `≤ ${percent(point[2])}`;
}

// If only some images were attacked, the certified and clean accuracy are of the same images.
function attackedText(run, eps) {
  const attack = `under attack ${attackText(run, eps)}`;
  if (!run.part) return `${run.name}: ${attack}`;
  const [proved, clean] = [eps, 0].map((x) => percent(accuracy(run.part, x)));
  return `${run.name}, first ${run.part.images} images: certified ${proved}, ${attack}, clean ${clean}`;
}

// Accuracy against ε

function curves() {
  const box = byId("epsilon-chart");
  if (!box) return;
  const series = [];
  DATA.runs.forEach((run, index) => {
    if (run.sorted) {
      series.push({ run: index, kind: "certified", look: "solid", curve: true, at: (x) => accuracy(run, x),
        marked: true, points: DATA.marks.map(({ value }) => [value, accuracy(run, value)]),
        read: (x) => `${run.name}: certified ${percent(accuracy(run, x))}` });
    }
    if (run.attacked.length) {
      series.push({ run: index, kind: "attacked", look: "dashed", marked: true,
        points: run.attacked.map(([, x, y]) => [x, y]), read: (x) => attackedText(run, x) });
    }
  });
  for (const { title, points } of DATA.published) {
    const near = (x) => points.find((point) => Math.abs(point[1] - x) < 0.012 * DATA.reach);
    series.push({ run: null, kind: "published", look: "paper", marked: true, points: points.map(([, x, y]) => [x, y]),
      read: (x) => (near(x) ? `the paper's ${title}: ${plain(100 * near(x)[2])}% at ${near(x)[0]}` : "") });
  }
  const chart = new Chart(box, { series, visible, label: "Accuracy against ε",
    x: { low: 0, high: DATA.reach, label: "ε, the L2 norm of the perturbation", format: plain, say: (x) => `ε = ${x.toFixed(3)}` },
    y: { low: 0, high: 1, format: (y) => `${Math.round(100 * y)}%` } });
  charts.push(chart);
  dial(chart);
}

function dial(chart) {
  const slider = byId("epsilon"), output = byId("epsilon-value"), buttons = all(".marks button");
  function choose(eps, text) {
    const shown = text ?? plain(eps);
    output.textContent = shown;
    slider.value = eps;
    slider.setAttribute("aria-valuetext", `ε = ${shown}`);
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(DATA.marks[i].value === eps)));
    chart.chosen = eps;
    chart.render();
    all(".readout tr[data-run]").forEach((row) => readOff(row, DATA.runs[row.dataset.run], eps));
  }
  slider.addEventListener("input", () => choose(Number(slider.value)));
  buttons.forEach((button, i) => button.addEventListener("click", () => choose(DATA.marks[i].value, DATA.marks[i].text)));
  chart.pick = (x) => choose(Math.round(x / slider.step) * slider.step);
  const first = DATA.marks[0] ?? { value: DATA.reach / 4 };
  choose(first.value, first.text);
}

function readOff(row, run, eps) {
  const of = row.dataset.of === "part" ? run.part : run;
  const point = of === (run.part ?? run) ? attackedAt(run, eps) : null;
  const [proved, clean] = [eps, 0].map((x) => (of.sorted ? percent(accuracy(of, x)) : "–"));
  const left = row.querySelector(".left");
  row.querySelector(".proved").textContent = proved;
  row.querySelector(".clean").textContent = clean;
  left.textContent = point === null ? "–" : attackText(run, eps);
  left.title = point === null ? "not attacked" : `attacked at ε = ${point[0]}`;
  row.querySelector(".is").style.width = of.sorted ? proved : "0";
  row.querySelector(".may").style.width = point === null ? "0" : percent(point[2]);
}

// Radii

function histograms() {
  const shares = DATA.runs.filter((run) => run.histogram && run.images)
    .flatMap((run) => run.histogram.right.map((count, i) => (count + run.histogram.wrong[i]) / run.images));
  const top = Math.min(1, 1.05 * Math.max(0.001, ...shares));
  for (const box of all("[data-histogram]")) {
    const index = Number(box.dataset.histogram), run = DATA.runs[index], held = run.histogram, width = DATA.reach / DATA.bins;
    const bin = (x) => Math.min(DATA.bins - 1, Math.floor(x / width));
    const series = { run: index, kind: "radii", look: "solid", read: (x) => {
      const i = bin(x), more = i === DATA.bins - 1 ? " or more" : ` to ${plain((i + 1) * width)}`;
      return `R from ${plain(i * width)}${more}: ${held.right[i]} right, ${held.wrong[i]} wrong`;
    } };
    charts.push(new Chart(box, { series: [series], height: 220, step: 1 / DATA.bins,
      trace() { return bars(this, index, run, width); }, label: `Certified radii of ${run.name}`,
      x: { low: 0, high: DATA.reach, label: "certified radius R", format: plain, say: () => run.name },
      y: { low: 0, high: top, format: (y) => `${plain(100 * y)}%` } }));
  }
}

function bars(chart, index, run, width) {
  const group = draw("g", { class: `c${index % 8}` });
  run.histogram.right.forEach((right, i) => {
    const wrong = run.histogram.wrong[i], x = chart.px(i * width) + 0.5, w = Math.max(1, chart.px((i + 1) * width) - x - 1);
    const [a, b] = [chart.py(right / run.images), chart.py((right + wrong) / run.images)];
    if (right) group.append(draw("rect", { class: "right", x, width: w, y: a, height: chart.bottom - a }));
    if (wrong) group.append(draw("rect", { class: "wrong", x: x + 0.5, width: Math.max(1, w - 1), y: b, height: a - b }));
  });
  return [group];
}

// Training

function training() {
  const numbered = DATA.runs.map((run, index) => ({ ...run, index }));
  const nearest = (points, x) => points.reduce((best, p) => (Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best));
  const line = (run, points, look, say) => ({ run: run.index, kind: "training", look, points, marked: points.length < 4,
    read: (x) => (points.length ? say(nearest(points, x)[1]) : "") });
  const axis = (label, points) => ({ low: Math.min(1, ...points.map((p) => p[0])), high: Math.max(2, ...points.map((p) => p[0])),
    label, format: plain, say: (x) => `${label} ${Math.round(x)}` });

  // Some losses, such as `certificate`, can be negative: then the axis is linear.
  const log = numbered.every((run) => run.losses.every((p) => p[1] >= 0));
  const losses = numbered.map((run) => [run, run.losses.filter((p) => p[1] > 0 || !log)]).filter(([, points]) => points.length);
  if (losses.length && byId("loss-chart")) {
    const every = losses.flatMap(([, points]) => points), values = every.map((p) => p[1]);
    charts.push(new Chart(byId("loss-chart"), { visible, label: "Training loss", height: 260, x: axis("step", every),
      y: log ? { low: 10 ** Math.floor(Math.log10(Math.min(...values))), high: 10 ** Math.ceil(Math.log10(1.001 * Math.max(...values))),
        log, format: power } : { low: Math.min(...values), high: Math.max(...values), format: plain },
      series: losses.map(([run, points]) => line(run, points, "solid", (y) => `${run.name}: ${y.toPrecision(3)}`)) }));
  }
  const checked = numbered.filter((run) => run.epochs.length);
  if (checked.length && byId("validation-chart")) {
    const column = (run, i) => run.epochs.map((e) => [e[0], e[i]]).filter((p) => p[1] !== null);
    const every = checked.flatMap((run) => run.epochs);
    charts.push(new Chart(byId("validation-chart"), { visible, label: "Validation accuracy", height: 260, x: axis("epoch", every),
      step: 1 / Math.max(1, Math.max(...every.map((e) => e[0])) - 1),
      y: { low: 0, high: 1, format: (y) => `${Math.round(100 * y)}%` },
      series: checked.flatMap((run) => [
        line(run, column(run, 1), "dashed", (y) => `${run.name}: clean ${percent(y)}`),
        line(run, column(run, 2), "solid", (y) => `${run.name}: certified at ${run.estimatedAt}, estimated ${percent(y)}`)]) }));
  }
}

// Choices

for (const box of all("input[data-hides]")) {
  box.addEventListener("change", () => {
    for (const twin of all("input[data-hides]")) if (twin.dataset.hides === box.dataset.hides) twin.checked = box.checked;
    if (box.checked) hidden.delete(box.dataset.hides);
    else hidden.add(box.dataset.hides);
    for (const node of all("tr[data-run], div[data-run]")) node.hidden = hidden.has(`run ${node.dataset.run}`);
    for (const chart of charts) chart.render();
  });
}

byId("differences")?.addEventListener("change", (event) => {
  byId("gallery").classList.toggle("differences", event.target.checked);
});

const THEMES = { auto: ["light dark", "those of the system"], light: ["light", "light"], dark: ["dark", "dark"] };
byId("theme").addEventListener("click", (event) => {
  const names = Object.keys(THEMES), button = event.currentTarget;
  const next = names[(names.indexOf(button.textContent) + 1) % names.length];
  button.textContent = next;
  button.setAttribute("aria-label", `Colours: ${THEMES[next][1]}`);
  document.documentElement.style.colorScheme = THEMES[next][0];
});

curves();
histograms();
training();
