// The page of `troupe inspect --html`: memory over time, its peak, queues, measurements, the program.
"use strict";

const OPS = DATA.operations;
const TOTAL = OPS.kind.length;
const MEASURED = DATA.measured ?? {};
const kindOf = op => OPS.kinds[OPS.kind[op]];
const placeOf = op => `${DATA.phases[OPS.phase[op]]}` +
  (OPS.layer[op] >= 0 ? `, layer ${OPS.layer[op]}` : "") +
  (OPS.micro_batch[op] >= 0 ? `, micro-batch ${OPS.micro_batch[op]}` : "");

// ---- Memory ----

function memory() {
  const plan = DATA.plan, bench = MEASURED.bench;
  const roles = Object.keys(plan.bytes).filter(role => plan.bytes[role] + plan.host_bytes[role] > 0);
  const onHost = roles.some(role => plan.host_bytes[role] > 0);
  const rows = roles.map(role => [role, bytes(plan.bytes[role]), ...(onHost ? [bytes(plan.host_bytes[role])] : [])]);
  rows.push(["total", bytes(plan.total_bytes), ...(onHost ? [""] : [])]);
  const shown = Object.keys(DATA.memory.bytes).filter(role => DATA.memory.bytes[role].some(each => each > 0));
  const chart = lineChart("Memory of the step over its operations, by role, without what outlives the step",
    () => shown.map((role, i) => ({label: role, colour: colour(i), fill: i === 0 ? "origin" : "-1",
      points: DATA.memory.operations.map((x, k) => ({x, y: DATA.memory.bytes[role][k], own: DATA.memory.bytes[role][k]}))})),
    {x: () => "operation", yText: bytes, stacked: true});
  const peak = DATA.peak;
  section("Memory", make("p", {class: "dim"}, DATA.command),
    table(["role", "planned", ...(onHost ? ["on the host"] : [])], rows),
    bench ? make("p", {id: "measured_memory"}, `Measured by bench: ${bytes(bench.allocated_bytes)} allocated, ` +
      `${bytes(bench.planned_bytes)} planned on the rank with most` +
      (bench.other_device_bytes ? `; ${bytes(bench.other_device_bytes)} beside it for the driver and libraries` : "") + ".") : "",
    legend(shown), chart);
  section("What the peak is made of",
    make("p", {}, `Most is live at operation ${peak.operation} (${peak.kind}, ${placeOf(peak.operation)}): ` +
      `${bytes(peak.bytes)}, of which these are the largest${peak.names > peak.values.length ? ` of ${peak.names} names` : ""}.`),
    table(["value", "role", "bytes", "share", "copies", "from operation", "to operation"],
      peak.values.map(value => [value.name, value.role, bytes(value.bytes),
        `${(100 * value.bytes / Math.max(1, peak.bytes)).toFixed(1)}\u00a0%`, String(value.count), String(value.first), String(value.last)])));
}

// ---- Queues ----

// Bars of operations, one lane for each queue: in the order of the program, all of one width, or as
// they were measured. Dragging moves, the buttons zoom.
function queues() {
  const spans = {
    order: OPS.kind.map((_, op) => [op, op, 1]),
    measured: MEASURED.spans ?? [],
  };
  const lanes = [...new Set(OPS.queue)].sort((a, b) => a - b);
  let mode = MEASURED.spans ? "measured" : "order";
  let begin, end;
  const reset = () => {
    begin = Math.min(...[spans[mode][0][1]], ...spans[mode].slice(0, 50).map(span => span[1]));
    end = spans[mode].reduce((most, span) => Math.max(most, span[1] + span[2]), begin + 1e-9);
  };
  reset();
  const text = x => mode === "order" ? `operation ${Math.round(x)}` : duration((x - spans.measured[0][1]) / 1e6);
  const readout = make("p", {class: "readout"}, "Point at an operation.");
  const laneHeight = 46, top = 16;
  const canvas = drawing(top + lanes.length * laneHeight + 20, (context, wide, high) => {
    context.clearRect(0, 0, wide, high);
    const scale = wide / (end - begin);
    for (const [op, from, time] of spans[mode]) {
      if (from + time < begin || from > end) continue;
      context.fillStyle = colour(OPS.phase[op]);
      const lane = lanes.indexOf(OPS.queue[op]);
      const long = Math.max(time * scale, .7);
      context.fillRect((from - begin) * scale, top + lane * laneHeight + 16, long > 3 ? long - 1 : long, laneHeight - 20);
      if (long > 60) {
        context.fillStyle = ofStyle("--back");
        context.fillText(kindOf(op).slice(0, long / 7), (from - begin) * scale + 4, top + lane * laneHeight + 33);
      }
    }
    context.fillStyle = context.strokeStyle = ofStyle("--dim");
    if (mode === "order" && lanes.length > 1 && end - begin < 300) {
      const middle = op => top + lanes.indexOf(OPS.queue[op]) * laneHeight + 28;
      for (const [before, after] of DATA.waits) {
        if (after < begin || before > end) continue;
        context.beginPath();
        context.moveTo((before + .9 - begin) * scale, middle(before));
        context.lineTo((after + .1 - begin) * scale, middle(after));
        context.stroke();
      }
    }
    lanes.forEach((queue, lane) => context.fillText(DATA.queues[queue], 2, top + lane * laneHeight + 11));
    context.fillText(text(begin), 0, high - 4);
    context.fillText(text(end), wide - context.measureText(text(end)).width, high - 4);
  });
  const zoom = factor => {
    const middle = (begin + end) / 2, half = (end - begin) / 2 * factor;
    begin = middle - half;
    end = middle + half;
    canvas.draw();
  };
  let held = null;
  canvas.onpointerdown = event => { held = event.clientX; canvas.setPointerCapture(event.pointerId); };
  canvas.onpointerup = canvas.onpointercancel = () => { held = null; };
  canvas.onpointermove = event => {
    const box = canvas.getBoundingClientRect();
    const unit = (end - begin) / box.width;
    if (held !== null) {
      begin -= (event.clientX - held) * unit;
      end -= (event.clientX - held) * unit;
      held = event.clientX;
      canvas.draw();
    }
    const x = begin + (event.clientX - box.left) * unit;
    const lane = Math.floor((event.clientY - box.top - top) / laneHeight);
    const span = spans[mode].find(([op, from, time]) => x >= from && x <= from + time && lanes.indexOf(OPS.queue[op]) === lane);
    if (span) {
      readout.textContent = `${span[0]} ${kindOf(span[0])}, ${placeOf(span[0])}` +
        (mode === "measured" ? `, ${duration(span[2] / 1e6)}` : "");
    }
  };
  const choice = make("select", {"aria-label": "what is drawn", onchange: () => { mode = choice.value; reset(); canvas.draw(); }},
    ...(MEASURED.spans ? [make("option", {value: "measured"}, "as measured")] : []),
    make("option", {value: "order"}, "in order, all of one width"));
  section("Queues",
    make("p", {class: "dim"}, `${TOTAL} operations; ${DATA.waits.length} times one waits for another queue` +
      (lanes.length > 1 ? " (lines, when zoomed in)." : ".")),
    make("div", {class: "controls"}, choice,
      make("button", {onclick: () => zoom(.5)}, "zoom in"), make("button", {onclick: () => zoom(2)}, "zoom out"),
      make("button", {onclick: () => { reset(); canvas.draw(); }}, "all")),
    legend(DATA.phases), make("div", {class: "panel", id: "queues"}, canvas, readout));
}

// ---- Kinds, planned and measured ----

function kinds() {
  const bench = MEASURED.bench;
  const times = new Map((bench?.kinds ?? []).map(each => [each.kind, each]));
  const all = [...DATA.kinds].sort((a, b) =>
    (times.get(b.kind)?.time_s ?? 0) - (times.get(a.kind)?.time_s ?? 0) || b.flops - a.flops || b.traffic_bytes - a.traffic_bytes);
  const share = (rate, limit) => rate === undefined || !limit ? "" : ` (${Math.round(100 * rate / limit)}\u00a0%)`;
  section(bench ? "Work by kind, planned and measured" : "Work by kind, planned",
    bench ? make("p", {id: "measured_step"}, `Measured by bench: step ${duration(bench.step_time_s)}, ${count(bench.tokens_per_s)} tokens/s, ` +
      `${plain(bench.tflops_per_gpu)} TFLOP/s of a rank, ${Math.round(100 * bench.matmul_limit_share)} % of the limit.`) : "",
    table(["kind", "operations", "flops", "bytes read and written", ...(bench ? ["time", "flop/s (of the limit)", "bytes/s (of the limit)"] : [])],
      all.map(each => {
        const time = times.get(each.kind);
        return [each.kind, String(each.count), count(each.flops), bytes(Math.round(each.traffic_bytes)),
          ...(bench ? [duration(time?.time_s),
            count(time?.flops_per_s) + share(time?.flops_per_s, bench.matmul_limit_flops_per_s),
            count(time?.bytes_per_s) + share(time?.bytes_per_s, bench.copy_limit_bytes_per_s)] : [])];
      })));
}

// ---- Program ----

function program() {
  const box = make("div", {class: "panel program", tabindex: 0});
  const found = make("span", {class: "dim"});
  const most = 2000;
  const show = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(word => word);
    // Of operations: headings and comments only where nothing is searched.
    const lines = words.length === 0 ? DATA.lines : DATA.lines.filter(line =>
      !line.startsWith("#") && line && words.every(word => line.toLowerCase().includes(word)));
    box.textContent = lines.slice(0, most).map(line => line.trimEnd()).join("\n");
    found.textContent = `${lines.length} lines` + (lines.length > most ? `, of which the first ${most} are shown` : "");
  };
  const search = make("input", {type: "search", placeholder: "search: words that a line must hold", "aria-label": "search", oninput: show});
  section("Program",
    make("div", {class: "controls"}, search, found), box,
    DATA.lines_left_out > 0 ? make("p", {class: "note"}, `${DATA.lines_left_out} further lines are not on this page; ` +
      "--layer, --micro-batch and --phase choose operations.") : "");
  show();
}

memory();
queues();
kinds();
program();
document.getElementById("page").append(make("p", {class: "dim"}, `Written by troupe ${DATA.version}. Charts: Chart.js.`));
