// What the probe saw: radial growth, precision, attention, parameters.
"use strict";

const probed = () => shownGroups().filter((g) => DATA.diagnostics[g]);
const named = (part) => [...new Set(DATA.diagnostics.flatMap((d) => (d ? Object.keys(d[part]) : [])))].sort();
const finalMean = (g, name) => { const part = DATA.diagnostics[g].final[name]; return part ? part.mean : undefined; };
const dimensions = (value) => (Array.isArray(value) ? 1 + dimensions(value[0]) : 0);
const having = (wanted) => named("final").filter((name) => DATA.diagnostics.some((d) => d && d.final[name] && dimensions(d.final[name].mean) === wanted));
const options = (names) => names.map((value) => ({ value, text: `${value.split("/")[0]}: ${quantity(value).title}` }));
// A sentence for a reader who has not met the quantity, then how it was measured.
const explained = (name, note) => [quantity(name).meaning, note].filter(Boolean).join(" ");
// Deeper layers and later heads have stronger colours.
const shade = (g, i, n) => mix(ink.groups[g], ink.paper, n > 1 ? 0.65 * (1 - i / (n - 1)) : 0);

FIGURES.depth = () => {
  const names = having(1);
  if (!names.length) return null;
  const name = choose("depth", "quantity", options(names), "radial/residual_rms");
  const traces = [], drawn = [], first = [], growth = [], ends = [];
  let embedding = false;
  for (const g of probed()) {
    const part = DATA.diagnostics[g].final[name];
    if (!part) continue;
    embedding ||= part.mean.length > DATA.diagnostics[g].layers;
    const x = part.mean.map((_, i) => i);
    if (part.low && state.band !== "none") traces.push(band(g, x, part.low, part.high));
    traces.push(line(g, { x, y: part.mean, mode: "lines+markers", marker: { size: 6 }, hovertemplate: `layer %{x}: %{y:.4g}<extra>${plain(DATA.groups[g].label)}</extra>` }));
    drawn.push(g);
    // Embeddings are small by their initialisation, and the first layer makes up for that: two factors, not one.
    first.push({ group: g, value: part.mean[1] / part.mean[0] });
    growth.push({ group: g, value: part.mean.at(-1) / part.mean[1] });
    ends.push({ group: g, value: part.mean.at(-1) });
  }
  if (!traces.length) return null;
  const title = name === "radial/residual_rms" ? "The residual stream grows from embedding to layer 1: " + perGroup(first, (v) => short(v) + "×") + "; from layer 1 to the last: " + perGroup(growth, (v) => short(v) + "×")
    : `${sentence(quantity(name).title)} at the last layer: ` + perGroup(ends);
  return { title, note: explained(name, "At the newest probe, mean over tokens and seeds" + (state.band !== "none" ? "; band: range of seeds." : ".")), groups: drawn, traces,
    layout: { uirevision: name + state.logY, xaxis: { title: { text: embedding ? "after layer (0 = embedding)" : "layer" }, ...wholeTicks(traces) },
      yaxis: { title: { text: quantity(name).axis }, type: state.logY ? "log" : "linear" } } };
};

function wholeTicks(traces) {
  const most = Math.max(...traces.map((trace) => highest(trace.x)));
  return { dtick: Math.max(1, Math.ceil(most / 12)) };
}

// Measured quantity → its slope and R² over tokens, which the probe fits in every layer.
const MEASURED = {
  "radial/growth_latent": ["radial/growth_latent_slope", "radial/growth_latent_r2"],
  "radial/growth_attention": ["radial/growth_slope", "radial/growth_r2"],
  "radial/growth_latent_unprojected": [null, null],
};

FIGURES.growth = () => {
  const predicted = "radial/growth_predicted", names = Object.keys(MEASURED).filter((n) => having(1).includes(n));
  if (!having(1).includes(predicted) || !names.length) return null;
  const name = choose("growth", "quantity", options(names), "radial/growth_latent"), [slope, r2] = MEASURED[name];
  const traces = [], drawn = [], fits = [], all = [];
  for (const g of probed()) {
    const x = finalMean(g, predicted), y = finalMean(g, name);
    if (!x || !y) continue;
    const last = x.length - 1, fill = x.map((_, i) => shade(g, i, x.length));
    traces.push({ type: "scatter", mode: "markers+text", x, y, meta: { group: g }, text: x.map((_, i) => (i === 0 || i === last ? String(i) : "")),
      textposition: "top center", cliponaxis: false, textfont: { size: 10, color: ink.soft }, marker: { size: 9, color: fill, line: { width: 1, color: ink.groups[g] } },
      hovertemplate: `predicted %{x:.3g}, measured %{y:.3g}<extra>${plain(DATA.groups[g].label)}, layer %{pointNumber}</extra>` });
    drawn.push(g);
    all.push(...x, ...y);
    fits.push({ group: g, ...lineThrough(x, y), tokens: slope ? mean(finalMean(g, slope) || []) : NaN, r2Tokens: r2 ? mean(finalMean(g, r2) || []) : NaN });
  }
  if (!traces.length) return null;
  const from = Math.min(0, lowest(all)), to = Math.max(0, highest(all));
  traces.unshift({ type: "scatter", mode: "lines", x: [from, to], y: [from, to], line: { color: ink.soft, width: 1, dash: "dot" }, hoverinfo: "skip", meta: {} });
  const known = fits.filter((f) => Number.isFinite(f.slope));
  return {
    title: known.length ? "Regression of measured on predicted growth over layers, slope (R²): " + slopes(known, "slope", "r2") : "Measured against predicted growth",
    note: explained(name, "One point per layer (first and last are numbered, deeper layers have stronger colours). Dotted: measured = predicted." + overTokens(fits)),
    groups: drawn, traces,
    layout: { xaxis: { title: { text: quantity(predicted).axis } }, yaxis: { title: { text: quantity(name).axis } } },
  };
};

// Least squares through the points that are drawn.
function lineThrough(x, y) {
  const at = x.map((v, i) => i).filter((i) => Number.isFinite(x[i]) && Number.isFinite(y[i])), mx = mean(at.map((i) => x[i])), my = mean(at.map((i) => y[i]));
  const sum = (f) => at.reduce((total, i) => total + f(x[i] - mx, y[i] - my), 0), xx = sum((a) => a * a), yy = sum((a, b) => b * b), xy = sum((a, b) => a * b);
  return at.length > 2 && xx > 0 && yy > 0 ? { slope: xy / xx, r2: (xy * xy) / (xx * yy) } : { slope: NaN, r2: NaN };
}

function overTokens(fits) {
  const known = fits.filter((f) => Number.isFinite(f.tokens));
  return known.length ? ` Over the tokens of a layer, mean slope (R²): ${slopes(known, "tokens", "r2Tokens")}.` : "";
}

// Of few groups each; of many the range, so that none is left out.
function slopes(fits, slope, r2) {
  if (fits.length <= 4) return fits.map((f) => `${DATA.groups[f.group].label} ${short(f[slope])} (${short(f[r2])})`).join(", ");
  const range = (key) => `${short(lowest(fits.map((f) => f[key])))} to ${short(highest(fits.map((f) => f[key])))}`;
  return `${range(slope)} (${range(r2)}) over ${fits.length} groups`;
}

const MOST_MAPS = 12;
// Blue below zero, red above, the paper's own colour at zero: told apart with every common kind of colour vision.
const aroundZero = () => [[0, "#2166ac"], [0.25, "#79b0d6"], [0.5, ink.raised], [0.75, "#ec9a76"], [1, "#b2182b"]];

FIGURES.heat = () => {
  const names = having(2);
  if (!names.length) return null;
  const name = choose("heat", "quantity", options(names), "precision/log_evidence");
  const groups = probed().filter((g) => finalMean(g, name)).slice(0, MOST_MAPS);
  if (!groups.length) return null;
  const all = groups.flatMap((g) => flat(finalMean(g, name))), low = lowest(all), high = highest(all);
  // A quantity whose scale differs between blocks gets a scale per map, said in its label.
  const within = quantity(name).within && groups.length > 1;
  const scaleOf = (from, to) => (from < 0 && to > 0 ? { colorscale: aroundZero(), from: -Math.max(-from, to), to: Math.max(-from, to) } : { colorscale: "Cividis", from, to });
  const shared = scaleOf(low, high);
  const columns = Math.min(groups.length, narrow() ? 1 : innerWidth < 1000 ? 2 : 4), rows = Math.ceil(groups.length / columns), gapX = 0.05;
  const room = narrow() ? 46 : Math.floor(Math.min(innerWidth, 1400) / (12.5 * columns)), longest = Math.max(...groups.map((g) => DATA.groups[g].label.length + (within ? 20 : 0))), twice = longest > room;
  const gapY = (twice ? 0.3 : 0.2) / rows;
  const width = (1 - gapX * (columns - 1)) / columns, height = (1 - gapY * (rows - 1)) / rows;
  const layout = { annotations: [], margin: { l: 52, r: 12, t: twice ? 58 : 26, b: 42 }, coloraxis: within ? undefined : { colorscale: shared.colorscale, cmin: shared.from, cmax: shared.to,
    colorbar: { thickness: 10, outlinewidth: 0, tickfont: { color: ink.soft, size: 11 }, title: { text: quantity(name).axis, side: "right", font: { size: 12, color: ink.soft } } } } };
  const traces = groups.map((g, i) => {
    const c = i % columns, r = Math.floor(i / columns), n = i ? String(i + 1) : "", x = c * (width + gapX), top = 1 - r * (height + gapY);
    layout["xaxis" + n] = { domain: [x, x + width], anchor: "y" + n, title: { text: r === rows - 1 || i + columns >= groups.length ? "head" : "" }, dtick: 1, showgrid: false, showline: false };
    layout["yaxis" + n] = { domain: [top - height, top], anchor: "x" + n, title: { text: c === 0 ? "layer" : "" }, dtick: 1, showgrid: false, showline: false };
    const values = flat(finalMean(g, name));
    const scale = within ? { zmin: lowest(values), zmax: highest(values), colorscale: "Cividis", showscale: false } : { coloraxis: "coloraxis" };
    const label = DATA.groups[g].label + (within ? ` (${short(lowest(values))} to ${short(highest(values))})` : "");
    layout.annotations.push({ text: wrapped(label, room), align: "left", x, y: top, xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom", showarrow: false, font: { size: twice ? 11 : 12, color: ink.text } });
    return { type: "heatmap", z: finalMean(g, name), xaxis: "x" + n, yaxis: "y" + n, ...scale, xgap: 1, ygap: 1, meta: { group: g },
      hovertemplate: `layer %{y}, head %{x}: %{z:.4g}<extra>${plain(DATA.groups[g].label)}</extra>` };
  });
  const spreads = groups.map((g) => { const values = flat(finalMean(g, name)); return { group: g, value: highest(values) - lowest(values) }; });
  return { title: `${sentence(quantity(name).title)} differs between heads by up to: ` + perGroup(spreads), traces, layout, height: (twice ? 90 : 60) + (twice ? 250 : 230) * rows,
    note: explained(name, (within ? "Each map has its own colour scale. " : "") + "By layer and head at the newest probe, mean over tokens and seeds." + (probed().length > MOST_MAPS ? ` The first ${MOST_MAPS} shown groups.` : "")) };
};

// One line per group, per layer, or per head of one layer; `read(g)` gives [layer][head][x].
function lineChoices(id, cubes) {
  const layers = Math.max(...cubes.map((c) => c.length)), heads = Math.max(...cubes.map((c) => c[0].length));
  const choices = [{ value: "mean", text: "mean over layers and heads" }];
  if (layers > 1) choices.push({ value: "layers", text: "one line per layer" });
  if (heads > 1) for (let l = 0; l < layers; l++) choices.push({ value: "layer " + l, text: `heads of layer ${l}` });
  return choose(id, "lines", choices, layers * cubes.length <= 24 ? "layers" : "mean");
}

function cubeLines(g, cube, x, lines, unit) {
  const across = (list) => x.map((_, i) => { const m = mean(list.map((y) => y[i])); return Number.isFinite(m) ? m : null; });
  const label = plain(DATA.groups[g].label);
  const make = (y, name, i, n) => line(g, { x, y, colour: shade(g, i, n), width: n > 1 ? 1.5 : 2.2, mode: x.length < 3 ? "lines+markers" : "lines", hovertemplate: `%{y:.4g} at %{x}${unit}<extra>${label}${name}</extra>` });
  if (lines === "mean") return [make(across(cube.flat()), "", 0, 1)];
  if (lines === "layers") return cube.map((heads, l) => make(across(heads), `, layer ${l}`, l, cube.length));
  const heads = cube[Number(lines.split(" ")[1])] || [];
  return heads.map((y, h) => make(y, `, head ${h}`, h, heads.length));
}

FIGURES.lag = () => {
  const names = named("profiles");
  if (!names.length) return null;
  const name = choose("lag", "quantity", options(names), "precision/log_kappa");
  const groups = probed().filter((g) => DATA.diagnostics[g].profiles[name]);
  if (!groups.length) return null;
  const profile = (g) => DATA.diagnostics[g].profiles[name], cubes = groups.map((g) => profile(g).y), lines = lineChoices("lag", cubes);
  const traces = groups.flatMap((g, i) => {
    // Lag 0 (the token itself) has no place on a logarithmic axis.
    const from = profile(g).x.findIndex((lag) => lag > 0), x = profile(g).x.slice(from);
    return cubeLines(g, cubes[i].map((heads) => heads.map((y) => y.slice(from))), x, lines, " tokens");
  });
  const isLog = /log_/.test(name);
  const change = groups.map((g, i) => {
    const from = profile(g).x.findIndex((lag) => lag > 0), at = (k) => mean(cubes[i].flat().map((y) => y.at(k)));
    return { group: g, value: isLog ? Math.exp(at(-1) - at(from)) : at(-1) / at(from) };
  });
  const symbol = quantity(name).title.replace(/^log /, ""), farthest = profile(groups[0]).x.at(-1);
  const doublings = Array.from({ length: 1 + Math.floor(Math.log2(Math.max(1, farthest))) }, (_, n) => 2 ** n);
  return { groups, traces, note: explained(name, "At the newest probe, mean over queries and seeds; deeper layers have stronger colours."),
    title: `${sentence(symbol)} at lag ${farthest} relative to lag 1: ` + perGroup(change, (v) => short(v) + "×"),
    layout: { uirevision: name, xaxis: { title: { text: profile(groups[0]).xlabel + " (tokens)" }, type: "log", tickvals: doublings }, yaxis: { title: { text: quantity(name).axis } } } };
};

// The quantity that training moved most, relative to where it started.
function liveliest(names) {
  const moved = (name) => Math.max(...DATA.diagnostics.filter((d) => d && d.history[name]).map((d) => {
    const first = mean(flat(d.history[name][0]).map(Math.abs)), steps = flat(d.history[name].at(-1)).map((v, i) => Math.abs(v - flat(d.history[name][0])[i]));
    return first > 0 ? mean(steps) / first : 0;
  }));
  return names.map((name) => [moved(name), name]).sort((a, b) => b[0] - a[0]).map(([, name]) => name)[0];
}

FIGURES.trajectory = () => {
  const names = [...new Set(DATA.diagnostics.flatMap((d) => (d ? Object.keys(d.history) : [])))].sort((a, b) => b.startsWith("parameters/") - a.startsWith("parameters/") || (a < b ? -1 : 1));
  if (!names.length) return null;
  const name = choose("trajectory", "quantity", options(names), liveliest(names.filter((n) => n.startsWith("parameters/"))) || "radial/residual_rms");
  const groups = probed().filter((g) => DATA.diagnostics[g].history[name]);
  if (!groups.length) return null;
  // [probe][layer][head] → [layer][head][probe], whatever of the last two axes there is.
  const cubes = groups.map((g) => {
    const history = DATA.diagnostics[g].history[name], deep = dimensions(history);
    const full = history.map((row) => (deep === 1 ? [[row]] : deep === 2 ? row.map((v) => [v]) : row));
    return full[0].map((heads, l) => heads.map((_, h) => full.map((row) => row[l][h])));
  });
  const lines = lineChoices("trajectory", cubes);
  const traces = groups.flatMap((g, i) => cubeLines(g, cubes[i], DATA.diagnostics[g].tokens, lines, " tokens"));
  const moves = groups.slice(0, 4).map((g, i) => {
    const [from, to] = [0, -1].map((k) => short(mean(cubes[i].flat().map((y) => y.at(k)))));
    return DATA.groups[g].label + (from === to ? ` stays at ${to}` : ` ${from} → ${to}`);
  });
  return { title: `${sentence(quantity(name).title)} over training` + (groups.length > 4 ? "" : ": " + moves.join(", ")), groups, traces,
    note: explained(name, "Mean over seeds; deeper layers (later heads) have stronger colours."),
    layout: { uirevision: name + state.logY, xaxis: { title: { text: AXES.tokens }, exponentformat: "SI" }, yaxis: { title: { text: quantity(name).axis }, type: state.logY ? "log" : "linear" } } };
};
