// The verdict in pictures: differences with their intervals, the response to one varied number, the steps of a ladder.
"use strict";

const OUTCOME_INK = { better: "better", worse: "worse" };
const outcomeColour = (row) => (row.grey ? ink.soft : ink[OUTCOME_INK[row.outcome]] || ink.soft);
const narrow = () => innerWidth < 620;
// Long labels stand on several lines, broken between words.
function wrapped(text, width) {
  const lines = [""];
  for (const word of String(text).split(" ")) {
    const last = lines.length - 1;
    if (lines[last] && (lines[last] + " " + word).length > width) lines.push(word);
    else lines[last] = lines[last] ? lines[last] + " " + word : word;
  }
  return lines.map(plain).join("<br>");
}

FIGURES.forest = () => {
  const all = DATA.verdict.forest;
  const rows = (all || []).filter((row) => row.mean !== null && shownRuns(row.group).length);
  if (!rows.length) return null;
  const y = rows.map((_, i) => i), traces = [], shapes = [], annotations = [], margin = DATA.verdict.margin;
  const ends = rows.flatMap((r) => [r.mean, r.low, r.high, ...(r.all || []), r.detectable, r.detectable === null ? null : -r.detectable]);
  // A row with very little power must not flatten the others.
  const inner = highest(rows.flatMap((r) => [r.mean, r.low, r.high].map((v) => (v === null ? null : Math.abs(v)))));
  const reach = Math.min(1.15 * highest(ends.map((v) => (v === null ? null : Math.abs(v)))), 2.2 * inner) || 1;
  if (margin) shapes.push({ type: "rect", xref: "x", yref: "paper", x0: -Math.min(margin, reach), x1: Math.min(margin, reach), y0: 0, y1: 1, fillcolor: fade(ink.grey, 0.16), line: { width: 0 }, layer: "below" });
  shapes.push({ type: "line", xref: "x", yref: "paper", x0: 0, x1: 0, y0: 0, y1: 1, line: { color: ink.soft, width: 1 }, layer: "below" });
  rows.forEach((r, i) => {
    const colour = outcomeColour(r), label = plain(DATA.groups[r.group].label), segment = (from, to, width, more = {}) =>
      traces.push({ type: "scatter", mode: "lines", x: [from, to], y: [i, i], line: { color: colour, width }, hoverinfo: "skip", meta: { group: r.group }, ...more });
    if (r.all) segment(...r.all, 1.2, { meta: { group: r.group, simultaneous: true } });
    if (r.low !== null) segment(r.low, r.high, r.grey ? 3 : 5, { meta: { group: r.group, interval: true } });
    if (r.detectable !== null && r.detectable <= reach && !r.grey) {
      traces.push({ type: "scatter", mode: "markers", x: [-r.detectable, r.detectable], y: [i, i], marker: { symbol: "line-ns-open", size: 14, color: ink.soft, line: { width: 1 } }, meta: { group: r.group, detectable: true },
        hovertemplate: `smallest difference detected with 80 % power<br>±${short(r.detectable)} ${DATA.unit}<extra>${label}</extra>` });
    }
    const interval = r.low === null ? "no interval" : `95 % interval ${short(r.low)} to ${short(r.high)}`;
    const p = r.p === null ? "" : `<br>p = ${r.p < 0.001 ? "below 0.001" : r.p.toFixed(3)} (Holm)`;
    traces.push({ type: "scatter", mode: "markers", x: [r.mean], y: [i], marker: { color: r.grey ? ink.paper : colour, size: 11, symbol: "circle", line: { color: r.grey ? colour : ink.paper, width: 1.5 } }, meta: { group: r.group },
      hovertemplate: `${r.mean > 0 ? "+" : ""}${short(r.mean)} ${plain(DATA.unit)}<br>${interval}${p}<br>${r.n} seeds<extra>${label}: ${r.outcome}</extra>` });
    const words = r.more ? `${r.outcome}; ${r.more}` : r.outcome;
    annotations.push(narrow()
      ? { x: 0, xref: "paper", y: i, yshift: 19, xanchor: "left", text: `${label}: ${words}`, align: "left" }
      : { x: 1.01, xref: "paper", y: i, xanchor: "left", text: wrapped(words, 22), align: "left" });
    Object.assign(annotations.at(-1), { yref: "y", yanchor: "middle", showarrow: false, font: { size: 12, color: r.outcome in OUTCOME_INK ? colour : ink.soft } });
  });
  const baselines = [...new Set(rows.map((r) => r.baseline))], against = baselines.length === 1 ? baselines[0] : "its baseline";
  const lower = DATA.verdict.lowerIsBetter;
  const notes = ["Dot: mean over paired seeds. Thick bar: 95 % interval, as in the table. Thin bar: simultaneous 95 % interval for all comparisons (Bonferroni)."];
  if (margin) notes.push(`Shaded: differences within ±${short(margin)} are negligible.`);
  notes.push("Vertical ticks: the smallest true difference that these seeds detect with 80 % power.");
  if (rows.some((r) => r.grey)) notes.push("Grey, hollow: unequal budgets, not judged.");
  return {
    title: `Difference from ${against} in ${DATA.title}, ${DATA.split} split (left is ${lower ? "better" : "worse"})`, note: notes.join(" "), traces,
    height: 92 + (narrow() ? 52 : 42) * rows.length,
    layout: { shapes, annotations, margin: { l: 20, r: narrow() ? 12 : 170, t: narrow() ? 22 : 26, b: 46 },
      xaxis: { title: { text: `difference in ${DATA.unit}` }, range: [-1.04 * reach, 1.04 * reach], nticks: narrow() ? 5 : 9, zeroline: false },
      yaxis: { range: [rows.length - 0.5, narrow() ? -0.9 : -0.5], tickvals: y, ticktext: narrow() ? y.map(() => "") : rows.map((r) => wrapped(DATA.groups[r.group].label, 26)), automargin: !narrow(), showgrid: false, ticks: "" } },
  };
};

FIGURES.response = () => {
  const response = DATA.verdict.response;
  if (!response) return null;
  const points = response.points.filter((p) => shownRuns(p.group).length);
  if (points.length < 2) return null;
  const blocks = [...new Set(points.map((p) => DATA.groups[p.group].block))], traces = [];
  for (const block of blocks) {
    const own = points.filter((p) => DATA.groups[p.group].block === block).sort((a, b) => a.x - b.x);
    const colour = blocks.length > 1 ? ink.groups[own[0].group] : ink.accent, withEnds = own.filter((p) => p.low !== null);
    if (withEnds.length > 1) traces.push({ type: "scatter", mode: "lines", x: [...withEnds.map((p) => p.x), ...withEnds.map((p) => p.x).reverse()], y: [...withEnds.map((p) => p.high), ...withEnds.map((p) => p.low).reverse()],
      fill: "toself", fillcolor: fade(colour, 0.14), line: { width: 0 }, hoverinfo: "skip", meta: { band: true } });
    traces.push({ type: "scatter", mode: "markers", x: own.flatMap((p) => p.seeds.map(() => p.x)), y: own.flatMap((p) => p.seeds), marker: { color: fade(colour, 0.4), size: 6 }, hovertemplate: "%{y:.4g}<extra>a seed</extra>", meta: {} });
    traces.push({ type: "scatter", mode: "lines+markers", x: own.map((p) => p.x), y: own.map((p) => p.mean), line: { color: colour, width: 2.2 }, meta: {},
      marker: { color: colour, size: own.map((p) => (p.baseline ? 13 : 8)), symbol: own.map((p) => (p.baseline ? "diamond" : "circle")), line: { color: ink.paper, width: 1.5 } },
      hovertemplate: `${plain(response.name)} = %{x}: %{y:.4g}<extra>${plain(block)}, mean</extra>` });
  }
  const base = points.find((p) => p.baseline), fits = response.fits.filter((f) => shownRuns(f.group).length);
  for (const fit of fits) traces.push({ type: "scatter", mode: "lines", x: fit.x, y: fit.y, line: { color: blocks.length > 1 ? ink.groups[fit.group] : ink.accent, width: 1.4, dash: "dash" }, hoverinfo: "skip", meta: { fit: true } });
  const doubling = fits.length ? ` Dashed: loss = a + b·log₂(width), fitted to all seeds; doubling the width changes the loss by ${fits.map((f) => `${f.block} ${short(f.perDoubling)}`).join(", ")}.` : "";
  return { title: `${sentence(DATA.title)} against ${response.name}` + (base ? ` (baseline: ${response.name} = ${base.x})` : ""), traces,
    note: `On the whole ${DATA.split} split. Line: mean over seeds; band: 95 % interval of each mean; dots: seeds; diamond: the baseline.${doubling}`,
    layout: { xaxis: { title: { text: response.key }, type: response.log ? "log" : "linear", ...(response.log ? { tickvals: [...new Set(points.map((p) => p.x))], ticktext: [...new Set(points.map((p) => p.x))].map(String) } : {}) },
      yaxis: { title: { text: DATA.title } } } };
};

FIGURES.waterfall = () => {
  const steps = (DATA.verdict.waterfall || []).filter((s) => s.mean !== null && s.level !== null);
  if (!steps.length) return null;
  const names = [DATA.groups[steps[0].before].label, ...steps.map((s) => DATA.groups[s.group].label)], text = names.map((n) => wrapped(n, 12));
  const start = steps[0].level, traces = [], levels = [start];
  steps.forEach((s) => levels.push(levels.at(-1) + s.mean));
  const x = (i) => i, low = lowest(levels), high = highest(levels), room = 0.25 * (high - low || 0.01);
  traces.push({ type: "scatter", mode: "lines", x: levels.flatMap((_, i) => [i - 0.4, i + 0.4, null]), y: levels.flatMap((v) => [v, v, null]), line: { color: ink.soft, width: 2 }, meta: {}, hoverinfo: "skip" });
  steps.forEach((s, k) => {
    const i = k + 1, colour = outcomeColour(s), from = levels[k];
    traces.push({ type: "bar", x: [x(i)], y: [s.mean], base: [from], width: 0.62, marker: { color: fade(colour, 0.55), line: { color: colour, width: 1 } }, meta: { group: s.group },
      hovertemplate: `${s.mean > 0 ? "+" : ""}${short(s.mean)}${s.low === null ? "" : `, 95 %: ${short(s.low)} to ${short(s.high)}`}<extra>${plain(names[k])} → ${plain(names[i])}: ${s.outcome}</extra>` });
    if (s.low !== null) traces.push({ type: "scatter", mode: "lines", x: [x(i), x(i)], y: [from + s.low, from + s.high], line: { color: ink.text, width: 1.3 }, meta: { group: s.group }, hoverinfo: "skip" });
  });
  const all = [...levels, ...steps.flatMap((s, k) => (s.low === null ? [] : [levels[k] + s.low, levels[k] + s.high]))];
  const shown = steps.filter((s) => s.outcome in OUTCOME_INK).length;
  return { title: `Change by each step: ${shown} of ${steps.length} shown, ${short(levels.at(-1) - start)} ${DATA.unit} in total`, traces,
    note: `From ${names[0]} to ${names.at(-1)}, each step is compared with the one before on paired seeds. Vertical lines: 95 % interval of each step. Coloured: significant after the Holm correction for all comparisons of this page.`,
    layout: { barmode: "overlay", xaxis: { tickvals: names.map((_, i) => i), ticktext: text, tickangle: narrow() ? -90 : 0, showgrid: false, automargin: true },
      yaxis: { title: { text: DATA.title }, range: [Math.max(lowest(all), low - 2 * room) - 0.1 * room, Math.min(highest(all), high + 2 * room) + 0.1 * room] } } };
};
