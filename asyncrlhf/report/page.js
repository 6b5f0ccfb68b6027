"use strict";
// Draws every chart of the page from its data, over the chosen axis, without the series that the legend hides.
const page = JSON.parse(document.getElementById("data").textContent);
const plots = [...document.querySelectorAll(".plot")];
const hidden = new Set();
let axis = page.axes[0].name;

const faded = (color, alpha) => color + Math.round(alpha * 255).toString(16).padStart(2, "0");

// The trace's arrays without the points of hidden series; null where nothing is left.
function shown(trace) {
  const of = trace.of, keep = i => !hidden.has(of[i]);
  if (!of) return hidden.has(trace.s) ? null : trace_arrays(trace, list => list);
  return of.every(s => hidden.has(s)) ? null : trace_arrays(trace, list => list.filter((_, i) => keep(i)));
}

function trace_arrays(trace, pick) {
  const found = {text: trace.text && pick(trace.text), of: trace.of && pick(trace.of)};
  for (const key of ["x", "y", "low", "high", "error"]) if (key in trace) found[key] = pick(page.arrays[trace[key]]);
  return found;
}

// What plotly draws of one trace. The colour is the series'; dash and mark are, where the series stands alone.
function drawn(trace) {
  const at = shown(trace);
  if (!at) return [];
  const one = trace.kind === "front" ? {label: "Pareto front", color: "#888888", dash: "dot", mark: "circle"} : page.series[trace.s];
  const base = {type: "scatter", x: at.x, y: at.y, name: one.label, meta: trace.kind, hoverinfo: "skip", connectgaps: true};
  const line = {color: one.color, width: 2, dash: one.dash};
  const told = {hoverinfo: "x+y+name", hoverlabel: {namelength: -1}};
  const marks = at.of && at.of.map(s => page.series[s].mark);
  switch (trace.kind) {
    case "faint": return [{...base, mode: "lines", line: {color: one.color, width: 1}, opacity: 0.3}];
    case "band": return [{...base, mode: "lines", line: {width: 0}, fill: "toself", fillcolor: faded(one.color, Math.min(0.16, 0.5 / page.series.length)),
      x: [...at.x, ...[...at.x].reverse()], y: [...at.high, ...[...at.low].reverse()]}];
    case "seeds": return [{...base, mode: "markers", text: at.text, hovertemplate: "%{text}: %{y:.3f}<extra></extra>",
      hoverinfo: "all", opacity: 0.35, marker: {color: one.color, size: 6, symbol: marks}}];
    case "marks": return [{...base, mode: "lines+markers", text: at.text, hovertemplate: "%{text}: %{y:.3f}<extra></extra>",
      hoverinfo: "all", line: {...line, dash: "solid"}, marker: {color: one.color, size: 10, symbol: marks}}];
    case "front": return [{...base, mode: "lines+markers", line: {...line, width: 1.4, shape: "hv"},
      marker: {color: one.color, size: 18, symbol: "circle-open"}}];
    case "points": return [{...base, ...told, mode: "lines+markers", line: {...line, width: 1.6},
      marker: {color: one.color, symbol: one.mark, size: 7},
      error_y: at.error && {type: "data", array: at.error, color: one.color, thickness: 1.2, width: 3}}];
    default: return [{...base, ...told, mode: one.marked ? "lines+markers" : "lines", line,
      marker: {color: one.color, symbol: one.mark, size: 7, maxdisplayed: 8}}];
  }
}

function layout(chart, count) {
  const title = page.axes.find(one => one.name === axis).title;
  const lines = {automargin: true, gridcolor: "#ececec", zerolinecolor: "#ccc", linecolor: "#bbb"};
  const x = {...lines, title: {text: chart.x || title, standoff: 6}, nticks: 7};
  const y = {...lines, nticks: 7, ...(chart.swapped ? {title: {text: title, standoff: 4}} : {})};
  const every = Math.ceil(chart.categories.length / 8), shown = chart.categories.map((_, i) => i).filter(i => i % every === 0);
  if (shown.length) Object.assign(x, {tickvals: shown, ticktext: shown.map(i => chart.categories[i])});
  if (chart.limits) y.range = [chart.limits[0] - 0.02, chart.limits[1] + 0.02];
  if (chart.from_zero || chart.swapped) y.rangemode = "tozero";
  const made = {xaxis: x, yaxis: y, font: {size: 12}, margin: {l: 44, r: 14, t: 10, b: 40}, showlegend: false, dragmode: "zoom",
    hovermode: chart.x && !chart.categories.length || count > 6 ? "closest" : "x unified", uirevision: axis};
  if (chart.bound !== null) {
    made.shapes = [{type: "line", xref: "paper", x0: 0, x1: 1, y0: chart.bound, y1: chart.bound, line: {color: "#888", width: 1.3, dash: "dot"}}];
    made.annotations = [{xref: "paper", x: 1, y: chart.bound, xanchor: "right", yanchor: "bottom", showarrow: false, text: "bound " + chart.bound, font: {size: 11, color: "#666"}}];
  }
  return made;
}

function draw(number) {
  const chart = page.charts[number];
  const traces = (chart.traces[axis] || chart.traces[""] || []).flatMap(drawn);
  const made = layout(chart, page.series.length - hidden.size);
  if (!traces.length) made.annotations = [{xref: "paper", yref: "paper", x: 0.5, y: 0.5, showarrow: false, text: "nothing to show here"}];
  return Plotly.react(plots[number], traces, made, {displaylogo: false, responsive: true, displayModeBar: false});
}

// One chart after the other, so that the page answers meanwhile; a later call ends the one under way.
let round = 0;
async function drawAll() {
  const mine = ++round;
  document.body.dataset.drawn = "no";
  for (let number = 0; number < plots.length; number++) {
    await draw(number);
    await new Promise(next => setTimeout(next));
    if (mine !== round) return;
  }
  document.body.dataset.drawn = "yes";
}

function filter() {
  for (const button of document.querySelectorAll("[data-toggle]")) button.setAttribute("aria-pressed", !hidden.has(Number(button.dataset.toggle)));
  for (const element of document.querySelectorAll("[data-series]")) element.hidden = hidden.has(Number(element.dataset.series));
  drawAll();
}

const numbers = page.series.map((_, number) => number);
function toggle(members) {
  const hide = members.some(number => !hidden.has(number));
  for (const number of members) hide ? hidden.add(number) : hidden.delete(number);
  filter();
}
document.querySelector("nav").addEventListener("click", event => {
  const button = event.target.closest("button");
  if (!button) return;
  const {axis: chosen, toggle: one, members, every} = button.dataset;
  if (chosen) {
    axis = chosen;
    for (const other of document.querySelectorAll("[data-axis]")) other.setAttribute("aria-pressed", other === button);
    for (const note of document.querySelectorAll("[data-for-axis]")) note.hidden = note.dataset.forAxis !== axis;
    drawAll();
  }
  if (one) toggle([Number(one)]);
  if (members) toggle(members.split(" ").map(Number));
  if (every) { for (const number of numbers) every === "hide" ? hidden.add(number) : hidden.delete(number); filter(); }
});
document.querySelector("nav").addEventListener("dblclick", event => {
  const button = event.target.closest("[data-toggle]");
  if (!button) return;
  for (const number of numbers) hidden.add(number);
  hidden.delete(Number(button.dataset.toggle));
  filter();
});
drawAll();

// A fold's content that was kept as a template is drawn now: its scripts run as it is inserted.
function unfold(fold) {
  const kept = fold.querySelector("template");
  if (kept) kept.replaceWith(document.importNode(kept.content, true));
  // A chart that was drawn in a closed fold has no width.
  for (const chart of fold.querySelectorAll(".js-plotly-plot")) Plotly.Plots.resize(chart);
}
for (const fold of document.querySelectorAll("details[open]")) unfold(fold); // opened before this script was read
