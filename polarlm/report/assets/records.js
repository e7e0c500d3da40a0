// Curves that eval.py left in the run folders: loss by position, length, robustness, calibration.
"use strict";

const RECORD_SECTION = "evaluations";

function buildRecords() {
  const panels = DATA.records || [], section = document.getElementById(RECORD_SECTION);
  if (!panels.length && !$("table", section)) { section.remove(); return; }
  panels.forEach((panel, i) => {
    const id = "record-" + i;
    $(".grid", section).append(element("figure", { id }, element("figcaption"), element("div", { className: "key" }), element("div", { className: "plot" })));
    FIGURES[id] = () => recordFigure(panel);
  });
}

function recordFigure(panel) {
  const traces = [], drawn = [];
  for (const curve of panel.lines) {
    if (!shownRuns(curve.group).length || !curve.at.length) continue;
    if (curve.n > 1 && state.band !== "none") traces.push(band(curve.group, curve.at, curve.low, curve.high));
    traces.push(line(curve.group, { x: curve.at, y: curve.mean, mode: curve.at.length <= 24 ? "lines+markers" : "lines", marker: { size: 6 }, hovertemplate: `%{y:.4g} at %{x}<extra>${plain(DATA.groups[curve.group].label)}, ${curve.n} seed${curve.n > 1 ? "s" : ""}</extra>` }));
    drawn.push(curve.group);
  }
  if (!traces.length) return null;
  if (panel.diagonal) traces.unshift({ type: "scatter", mode: "lines", x: [0, 1], y: [0, 1], line: { color: ink.soft, width: 1, dash: "dot" }, hoverinfo: "skip", meta: {} });
  const note = [panel.protocol && `Protocol: ${panel.protocol}.`, "Mean over seeds" + (state.band === "none" ? "." : "; band: range of seeds.")];
  const values = [...new Set(panel.lines.flatMap((l) => l.at))], ticks = panel.log && values.length <= 10 ? { tickvals: values, ticktext: values.map((v) => v.toLocaleString("en")) } : {};
  return { title: sentence(panel.title), note: note.filter(Boolean).join(" "), groups: drawn, traces,
    layout: { xaxis: { title: { text: panel.x }, type: panel.log ? "log" : "linear", ...ticks }, yaxis: { title: { text: panel.y } } } };
}
