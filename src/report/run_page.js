// The page of `troupe report`: DATA is what `troupe report --json` prints.
"use strict";

const RUNS = DATA.runs;
const AXES = {
  steps: {label: "step", text: value => value.toLocaleString("en")},
  tokens: {label: "tokens", text: count},
  seconds: {label: "time at work", text: duration},
};
const view = {axis: "steps", smooth: false};

// ---- Points ----

// Where a step lies on an axis of its run, between those that are known.
function placeOf(run, step) {
  const steps = run.axes.steps, places = run.axes[view.axis];
  if (view.axis === "steps") return step;
  let after = steps.findIndex(each => each >= step);
  if (after < 0) after = steps.length - 1;
  const before = Math.max(0, after - 1);
  const span = steps[after] - steps[before];
  const share = span > 0 ? (step - steps[before]) / span : 0;
  return places[before] + Math.min(1, Math.max(0, share)) * (places[after] - places[before]);
}

// Means over the last points, a fiftieth of them.
function smoothed(values) {
  const weight = 2 / (1 + Math.max(1, values.length / 50));
  let mean = values[0];
  return values.map(value => (mean += weight * (value - mean)));
}

function points(run, curve, mayBeSmooth) {
  const values = view.smooth && mayBeSmooth ? smoothed(curve.values) : curve.values;
  return curve.steps.map((step, i) => ({x: placeOf(run, step), y: values[i]}));
}

const charts = [];

// A chart of one curve of all runs that have it; nothing where none has.
function curveChart(title, name, settings = {}) {
  const having = RUNS.filter(run => run.curves[name]?.values.some(value => value !== null));
  if (having.length === 0) return [];
  if (settings.unlessZero && having.every(run => run.curves[name].values.every(v => v === 0))) return [];
  const isPositive = having.every(run => run.curves[name].values.every(value => value > 0));
  const chart = lineChart(title, () => having.map(run => ({
    label: run.name, points: points(run, run.curves[name], settings.smooth),
    colour: colour(RUNS.indexOf(run)), dash: RUNS.indexOf(run) > 7 ? [5, 3] : []})), {
    x: () => AXES[view.axis].label, xText: value => AXES[view.axis].text(value),
    ...settings, logarithmic: settings.logarithmic && isPositive});
  charts.push(chart);
  return [chart];
}

const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];

function evaluationChart() {
  const names = [...new Set(RUNS.flatMap(run => Object.keys(run.evaluations)))];
  if (names.length === 0) return [];
  const chart = lineChart("Validation loss", () => RUNS.flatMap((run, i) =>
    names.filter(name => run.evaluations[name]).map(name => ({
      label: names.length > 1 ? `${run.name} ${name}` : run.name,
      points: points(run, run.evaluations[name]), colour: colour(i),
      dash: DASHES[names.indexOf(name) % DASHES.length]}))), {
    x: () => AXES[view.axis].label, xText: value => AXES[view.axis].text(value)});
  if (names.length > 1) chart.append(make("p", {class: "dim"}, "Solid, dashed, dotted: " + names.join(", ")));
  charts.push(chart);
  return [chart];
}

// ---- Sections ----

const at = extreme => extreme ? `${plain(extreme.value)} (step\u00a0${extreme.step})` : "–";

function overview() {
  const newest = run => run.starts[run.starts.length - 1] ?? {};
  const rows = [
    ["model", run => `${run.model ? run.model + ", " : ""}${count(run.parameters)} parameters (${count(run.active_parameters)} active)`],
    ["where", run => `${newest(run).ranks === 1 ? "one rank" : `${newest(run).ranks ?? "–"} ranks`}, ${newest(run).device ?? "–"}, ${newest(run).host ?? "–"}`],
    ["steps", run => run.last_step === null ? "none" : `${run.last_step.toLocaleString("en")}, ${count(run.tokens)} tokens, ${duration(run.seconds)}`],
    ["starts", run => String(run.starts.length)],
    ["loss, last", run => at(run.summary.loss.last)],
    ["loss, lowest", run => at(run.summary.loss.lowest)],
    ...[...new Set(RUNS.flatMap(run => Object.keys(run.summary.evaluations)))].map(name =>
      [name, run => at(run.summary.evaluations[name]?.last)]),
    ["gradient norm, median", run => plain(run.summary.grad_norm.median)],
    ["gradient norm, highest", run => at(run.summary.grad_norm.highest)],
    ["step, median", run => duration(run.summary.step_time_s)],
    ...(RUNS.some(run => run.summary.planned_step_time_s) ? [["step, planned", run => {
      const planned = run.summary.planned_step_time_s?.value;
      return planned ? `${duration(planned)}, measured ${plain(run.summary.step_time_s / planned)} times that` : "–";
    }]] : []),
    ["tokens/s, median", run => count(run.summary.tokens_per_s)],
    ["TFLOP/s of a rank, median", run => plain(run.summary.tflops_per_gpu)],
    ["share of the limit, median", run => run.summary.limit_share === null ? "–" : `${Math.round(100 * run.summary.limit_share)}\u00a0%`],
    ["memory allocated at most", run => bytes(run.summary.peak_bytes?.value)],
    ["version", run => `${newest(run).version ?? "–"} ${newest(run).commit ?? ""}`],
  ];
  section("Overview",
    table(["", ...RUNS.map((run, i) => make("span", {}, make("span", {class: "swatch", "data-colour": i}), run.name))],
      rows.map(([name, text]) => [name, ...RUNS.map(text)])),
    ...RUNS.flatMap(run => run.notes.map(note =>
      make("p", {class: "note"}, RUNS.length > 1 ? `${run.name}: ${note}` : note))));
  drawn(() => {
    for (const swatch of document.querySelectorAll("[data-colour]")) {
      swatch.style.background = colour(Number(swatch.dataset.colour));
    }
  });
}

function curves() {
  const known = ["loss", "lr", "grad_norm", "tokens_per_s", "tflops_per_gpu", "limit_share",
    "load_imbalance", "dead_experts", "dropped", "router_entropy", "peak_bytes"];
  const others = [...new Set(RUNS.flatMap(run => Object.keys(run.curves)))].filter(name => !known.includes(name));
  const percent = value => `${plain(100 * value)}\u00a0%`;
  const all = [
    ...curveChart("Training loss", "loss", {smooth: true}), ...evaluationChart(),
    ...curveChart("Learning rate", "lr", {fromZero: true}),
    ...curveChart("Gradient norm", "grad_norm", {logarithmic: true, smooth: true}),
    ...curveChart("Tokens per second", "tokens_per_s", {yText: count, smooth: true}),
    ...curveChart("Share of the limit of matrix products", "limit_share", {yText: percent, smooth: true}),
    ...curveChart("Memory allocated at most", "peak_bytes", {yText: bytes, fromZero: true}),
    ...others.flatMap(name => curveChart(name, name, {smooth: true}))];
  if (all.length === 0) return;
  const show = () => { for (const chart of charts) chart.draw(); };
  const axis = make("select", {"aria-label": "horizontal axis", onchange: () => { view.axis = axis.value; show(); }},
    ...Object.entries(AXES).map(([value, {label}]) => make("option", {value}, label)));
  const smooth = make("input", {type: "checkbox", onchange: () => { view.smooth = smooth.checked; show(); }});
  section("Curves",
    make("div", {class: "controls"}, make("label", {}, "over ", axis), make("label", {}, smooth, " smoothed")),
    RUNS.length > 1 ? legend(RUNS.map(run => run.name)) : "", make("div", {class: "grid"}, ...all));
}

// From little (pale, or dark on a dark page) to much; red where there is nothing at all.
function heat(percent, most) {
  if (percent === 0) return DARK.matches ? "#ff5a4d" : "#d0312d";
  const share = Math.min(1, Math.log2(1 + percent / 100) / Math.log2(1 + most / 100));
  return DARK.matches ? `hsl(210 70% ${10 + 65 * share}%)` : `hsl(210 75% ${97 - 72 * share}%)`;
}

function loadMap() {
  const having = RUNS.filter(run => run.loads.layers.length > 0);
  if (having.length === 0) return [];
  let run = having[0], layer = -1;
  const readout = make("p", {class: "readout"}, "Point at a cell.");
  // Rows of the map: {label, cells}, cells by stretch in percent of the mean.
  const rowsOf = () => layer < 0
    ? run.loads.layers.map(each => ({label: `layer ${each.layer}`,
        cells: each.percent_of_mean.map(column => Math.max(...column))}))
    : run.loads.layers[layer].percent_of_mean[0].map((_, expert) => ({label: `expert ${expert}`,
        cells: run.loads.layers[layer].percent_of_mean.map(column => column[expert])}));
  let rows = rowsOf();
  const left = 72, height = 300, bottom = 18;
  const canvas = drawing(height, (context, wide) => {
    rows = rowsOf();
    const columns = run.loads.first_steps.length;
    const most = Math.max(200, ...rows.map(row => Math.max(...row.cells)));
    const cellWidth = (wide - left) / columns, cellHeight = (height - bottom) / rows.length;
    rows.forEach((row, r) => row.cells.forEach((percent, c) => {
      context.fillStyle = heat(percent, most);
      context.fillRect(left + c * cellWidth, r * cellHeight, cellWidth + .5, cellHeight + .5);
    }));
    context.fillStyle = ofStyle("--dim");
    const every = Math.ceil(rows.length / (height / 18));
    rows.forEach((row, r) => {
      if (r % every === 0) context.fillText(row.label, 0, (r + .5) * cellHeight + 4);
    });
    context.fillText(`step ${run.loads.first_steps[0]}`, left, height - 4);
    const end = `step ${run.last_step}`;
    context.fillText(end, wide - context.measureText(end).width, height - 4);
  });
  canvas.onpointermove = canvas.onpointerdown = event => {
    const box = canvas.getBoundingClientRect();
    const c = Math.floor((event.clientX - box.left - left) / (box.width - left) * run.loads.first_steps.length);
    const r = Math.floor((event.clientY - box.top) / (height - bottom) * rows.length);
    if (rows[r]?.cells[c] === undefined) return;
    readout.textContent = `${rows[r].label}, from step ${run.loads.first_steps[c]}: ` +
      `${(rows[r].cells[c] / 100).toFixed(2)} times the mean load`;
  };
  const layers = make("select", {"aria-label": "layer", onchange: () => { layer = Number(layers.value); canvas.draw(); }});
  const fill = () => {
    layer = -1;
    layers.replaceChildren(make("option", {value: -1}, "all layers: the expert with most rows"),
      ...run.loads.layers.map((each, i) => make("option", {value: i}, `layer ${each.layer}: each expert`)));
  };
  fill();
  const runs = make("select", {"aria-label": "run", onchange: () => { run = having[Number(runs.value)]; fill(); canvas.draw(); }},
    ...having.map((each, i) => make("option", {value: i}, each.name)));
  return [make("div", {class: "controls"}, ...(having.length > 1 ? [runs] : []), layers),
    make("div", {class: "panel", id: "load_map"}, make("h3", {}, "Load of experts, in units of the mean load of their layer"),
      canvas, readout, make("p", {class: "dim"}, "The stronger the blue, the more rows. Red: none at all in this stretch of steps."))];
}

function experts() {
  const all = [
    ...curveChart("Load imbalance: largest over mean load, worst layer", "load_imbalance", {smooth: true}),
    ...curveChart("Dead experts: without a row in the step, all layers", "dead_experts", {fromZero: true}),
    ...curveChart("Share of choices dropped", "dropped", {unlessZero: true}),
    ...curveChart("Entropy of the router, mean of layers (nats)", "router_entropy", {smooth: true})];
  if (!RUNS.some(run => run.loads.layers.length > 0)) return;
  section("Experts", ...loadMap(), make("div", {class: "grid", style: "margin-top:1rem"}, ...all));
}

function events() {
  const list = (steps, total) => total === 0 ? "none" : `${total}: step ${steps.join(", ")}${total > steps.length ? ", …" : ""}`;
  section("Skipped steps and overflow",
    table(["", "skipped steps", "steps in which the experts' room did not suffice", "factor that would do", "of the stash"],
      RUNS.map(run => [run.name, list(run.skipped, run.summary.skipped_steps),
        list(run.overflows.map(each => each.step), run.summary.overflowing_steps),
        plain(run.summary.room_needed), plain(run.summary.stash_needed)])),
    make("p", {class: "dim"}, "Of the steps that were logged (--log-interval)."));
}

function options() {
  const title = RUNS.length > 1 ? "Options that differ" : "Options that differ from their defaults";
  if (DATA.options.length === 0) {
    section(title, make("p", {}, RUNS.length > 1 ? "None." : "None is known."));
    return;
  }
  section(title, table(["", ...RUNS.map(run => run.name)],
    DATA.options.map(row => [row.name, ...row.values.map(value => value ?? "not given")])));
}

overview();
curves();
experts();
events();
options();
document.getElementById("page").append(make("p", {class: "dim"}, `Written by troupe ${DATA.version}. Charts: Chart.js.`));
