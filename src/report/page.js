// What all pages need: the data, elements, numbers for people, colours of the two modes, charts.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const DARK = matchMedia("(prefers-color-scheme: dark)");

// An element with attributes (or properties, such as onclick) and children, which may be text.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on") || name === "value") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function section(title, ...children) {
  const found = make("section", {}, make("h2", {}, title), ...children);
  document.getElementById("page").append(found);
  return found;
}

// A table of texts or elements in a box that scrolls by itself.
function table(head, rows) {
  const line = (cells, tag) => make("tr", {}, ...cells.map((cell, i) =>
    make(i === 0 ? "th" : tag, {}, cell ?? "–")));
  return make("div", {class: "scroll"}, make("table", {},
    make("thead", {}, line(head, "th")), make("tbody", {}, ...rows.map(row => line(row, "td")))));
}

// ---- Numbers ----

function count(number) {
  if (number === null || number === undefined) return "–";
  for (const [bound, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(number) >= bound) return `${(number / bound).toPrecision(3)}\u00a0${unit}`;
  }
  return plain(number);
}

function plain(number) {
  if (number === null || number === undefined) return "–";
  if (Number.isInteger(number)) return String(number);
  return Math.abs(number) < 1e-3 ? number.toExponential(2) : String(+number.toPrecision(4));
}

function bytes(number) {
  if (number === null || number === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(number) >= 1024 && unit < 4) { number /= 1024; ++unit; }
  return unit === 0 ? `${number}\u00a0B` : `${number.toFixed(2)}\u00a0${units[unit]}`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 3600) return `${(seconds / 3600).toFixed(1)}\u00a0h`;
  if (seconds >= 60) return `${(seconds / 60).toFixed(1)}\u00a0min`;
  if (seconds >= 1) return `${seconds.toFixed(2)}\u00a0s`;
  return seconds >= 1e-3 ? `${(seconds * 1e3).toFixed(2)}\u00a0ms` : `${(seconds * 1e6).toFixed(1)}\u00a0µs`;
}

// ---- Colours ----

// Told apart also by people who are colour-blind (Okabe and Ito), by mode.
const COLOURS = {
  light: ["#0072b2", "#d55e00", "#00815f", "#a8528b", "#8a6d00", "#2f8fc4", "#555f6b", "#b3261e"],
  dark: ["#56b4e9", "#ff9a56", "#2fcf9f", "#e39ac8", "#f0e442", "#9ecae1", "#c0c7cf", "#ff8a80"],
};
const colour = index => {
  const all = COLOURS[DARK.matches ? "dark" : "light"];
  return all[index % all.length];
};
const ofStyle = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function legend(names) {
  const box = make("div", {class: "legend"});
  drawn(() => box.replaceChildren(...names.map((name, i) => make("span", {},
    make("span", {class: "swatch", style: `background:${colour(i)}`}), name))));
  return box;
}

// Draws now, and again when the mode or the width changes.
const redraws = [];
function drawn(draw) {
  redraws.push(draw);
  draw();
}
function redraw() { for (const draw of redraws) draw(); }
DARK.addEventListener("change", redraw);
let width = innerWidth;
addEventListener("resize", () => {
  if (width === innerWidth) return;  // a phone's bar that comes and goes
  width = innerWidth;
  redraw();
});

// ---- Charts ----

Chart.defaults.animation = false;
Chart.defaults.font.family = "system-ui, sans-serif";

// A panel with curves. `lines()`: [{label, points: [{x, y}], colour, dash, fill}], asked for anew at
// each drawing; `settings`: {x, xText, y, yText, logarithmic, fromZero, stacked}, texts being of numbers.
function lineChart(title, lines, settings = {}) {
  const canvas = make("canvas", {role: "img", "aria-label": title});
  const panel = make("div", {class: "panel"}, make("h3", {}, title),
    make("div", {class: "chart"}, canvas));
  const xText = settings.xText ?? count, yText = settings.yText ?? plain;
  let chart = null;
  panel.draw = () => {
    chart?.destroy();
    const dim = ofStyle("--dim"), grid = ofStyle("--line");
    const axis = (name, text, more) => ({
      title: {display: Boolean(name), text: name, color: dim},
      ticks: {color: dim, maxTicksLimit: 6, maxRotation: 0, callback: value => text(value)},
      grid: {color: grid, borderColor: grid}, ...more});
    chart = new Chart(canvas, {
      type: "line",
      data: {datasets: lines().map(line => ({
        label: line.label, data: line.points, borderColor: line.colour, borderDash: line.dash ?? [],
        backgroundColor: line.colour + (settings.stacked ? "cc" : ""), fill: line.fill ?? false,
        borderWidth: settings.stacked ? 0 : 1.6, stepped: settings.stacked ?? false,
        pointRadius: line.points.length > 1 ? 0 : 4, pointHitRadius: 6}))},
      options: {
        responsive: true, maintainAspectRatio: false, parsing: false, normalized: true,
        interaction: {mode: settings.stacked ? "index" : "nearest", axis: "x", intersect: false},
        scales: {
          x: axis(settings.x?.() ?? "", value => xText(value), {type: "linear"}),
          y: axis(settings.y ?? "", yText, {
            type: settings.logarithmic ? "logarithmic" : "linear", stacked: settings.stacked ?? false,
            beginAtZero: settings.fromZero ?? false})},
        plugins: {
          legend: {display: false},
          tooltip: {callbacks: {
            title: items => items.length ? `${settings.x?.() ?? ""} ${xText(items[0].parsed.x)}` : "",
            label: item => `${item.dataset.label}: ${yText(item.raw.own ?? item.parsed.y)}`}}}},
    });
  };
  queueMicrotask(() => drawn(panel.draw));  // when it is in the page and has a size
  return panel;
}

// A canvas as wide as its panel that `paint(context, width, height)` fills.
function drawing(height, paint) {
  const canvas = make("canvas", {class: "drawn"});
  canvas.draw = () => {
    const ratio = devicePixelRatio || 1, wide = canvas.clientWidth;
    canvas.style.height = `${height}px`;
    canvas.width = wide * ratio;
    canvas.height = height * ratio;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    paint(context, wide, height);
  };
  queueMicrotask(() => drawn(canvas.draw));
  return canvas;
}
