// The frame of every figure: a title that says the finding, a key, a plot drawn only when it comes into view.
"use strict";

const FIGURES = {};      // id → () => { title, note, groups, traces, layout, height } or null when there is nothing to draw
const inView = new Set();
const stale = new Set();
const OPTIONAL = new Set(["forest", "response", "waterfall", "gradient", "rate"]);  // absent when there is nothing to draw
const LONGEST_KEY = 12;
const LONGEST_TITLE = 38;  // characters beside a plot

function redraw() {
  remember();
  Object.keys(FIGURES).forEach((id) => stale.add(id));
  // A hidden figure is never in view; it may have something to show now.
  requestAnimationFrame(() => Object.keys(FIGURES).filter((id) => stale.has(id) && (inView.has(id) || document.getElementById(id).hidden)).forEach(render));
}

function drawAll() { Object.keys(FIGURES).forEach(render); }

function render(id) {
  stale.delete(id);
  const figure = document.getElementById(id), plot = $(".plot", figure), made = FIGURES[id]();
  const caption = $("figcaption", figure), key = $(".key", figure);
  caption.replaceChildren(made ? unbroken(made.title) : "Nothing to show: all runs are hidden, or no run has this quantity.");
  if (made && made.note) caption.append(element("small", { textContent: unbroken(made.note) }));
  const groups = made && made.groups && made.groups.length <= LONGEST_KEY ? made.groups : [];  // the sidebar has them all
  if (key) key.replaceChildren(...groups.map((g) => element("span", {}, swatch(g), DATA.groups[g].label)));
  const onPaper = document.documentElement.classList.contains("printing");
  if (made && made.height) plot.style.height = (onPaper ? 0.7 : 1) * made.height + "px";
  figure.hidden = made === null && OPTIONAL.has(id);
  const layout = made ? frame(made.layout) : frame({ xaxis: { visible: false }, yaxis: { visible: false } });
  if (onPaper) Object.assign(layout, { width: plot.clientWidth, height: plot.clientHeight }, smallPrint(layout));
  return Plotly.react(plot, made ? made.traces : [], layout, { displaylogo: false, responsive: true, modeBarButtons: [[downloadButton(id), "zoom2d", "pan2d", "resetScale2d"]] })
    .then(() => { plot.dataset.drawn = made ? made.traces.length : 0; });
}

// A figure alone, for a paper or a slide: light colours on white, with a legend, at print size (6.5 × 4 inches).
const PRINT = { width: 624, height: 384 };
const figureName = (id) => (id.startsWith("record-") ? DATA.records[Number(id.slice(7))].name : id);

async function printFigure(id, format, titled) {
  const dark = isDark();
  applyTheme(false);
  const made = FIGURES[id]();
  if (!made) { applyTheme(dark); return null; }
  const layout = frame(made.layout), height = Math.max(PRINT.height, 0.8 * (made.height || 0));
  const groups = made.groups && made.groups.length <= LONGEST_KEY ? made.groups : [];
  const keys = groups.map((g) => line(g, { x: [null], y: [null], name: plain(DATA.groups[g].label), showlegend: true }));
  Object.assign(layout, { paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff", showlegend: groups.length > 0,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 } } }, smallPrint(layout, 11));
  if (titled) layout.title = { text: wrapped(made.title, 88), x: 0.01, xanchor: "left", font: { size: 13 }, automargin: true, yref: "container" };
  const traces = [...made.traces.map((trace) => ({ ...trace, showlegend: false })), ...keys];
  const options = { format, width: PRINT.width, height, scale: format === "png" ? 3 : 1 };
  const address = await Plotly.toImage({ data: traces, layout }, options);
  applyTheme(dark);
  const data = format === "png" ? address.slice(address.indexOf(",") + 1) : decodeURIComponent(address.slice(address.indexOf(",") + 1));
  return { name: figureName(id), title: made.title, note: made.note || "", width: PRINT.width, height, data };
}

const CAMERA = "M512 800c-97 0-176-79-176-176s79-176 176-176 176 79 176 176-79 176-176 176zM864 224H720l-48-96H352l-48 96H160c-35 0-64 29-64 64v544c0 35 29 64 64 64h704c35 0 64-29 64-64V288c0-35-29-64-64-64z";
const BUTTONS = {};  // the same object every time: Plotly draws a figure anew when its configuration changes
function downloadButton(id) {
  return BUTTONS[id] ??= { name: "download", title: "Download as a PNG (light colours, with a legend)", icon: { width: 1024, height: 1024, path: CAMERA },
    click: () => printFigure(id, "png", true).then((made) => made && element("a", { href: "data:image/png;base64," + made.data, download: made.name + ".png" }).click()) };
}

// report.html#print=all&format=svg leaves every figure in the document as text, for `compare --figure`.
async function printFigures(wanted, format, titled) {
  const ids = Object.keys(FIGURES).filter((id) => wanted === "all" || figureName(id) === wanted), figures = [];
  for (const id of ids) figures.push(await printFigure(id, format, titled));
  const answer = { names: Object.keys(FIGURES).filter((id) => FIGURES[id]()).map(figureName), figures: figures.filter(Boolean) };
  document.body.append(element("script", { type: "application/json", id: "printed", textContent: JSON.stringify(answer).replaceAll("<", "\\u003c") }));
}

// Paper has half the width of a screen: axis titles must not be longer than the axes.
function smallPrint(layout, size = 9) {
  const small = (axis) => ({ ...axis, tickfont: { ...axis.tickfont, size: size - 0.5 }, title: { ...axis.title, font: { ...(axis.title || {}).font, size } } });
  const axes = Object.entries(layout).filter(([name]) => /^[xy]axis\d*$/.test(name)).map(([name, axis]) => [name, small(axis)]);
  if (layout.coloraxis) axes.push(["coloraxis", { ...layout.coloraxis, colorbar: small(layout.coloraxis.colorbar) }]);
  const annotations = (layout.annotations || []).map((note) => ({ ...note, font: { ...note.font, size: size + 1 } }));
  return { ...Object.fromEntries(axes), annotations };
}

const AXIS = () => ({
  gridcolor: ink.grid, zeroline: false, linecolor: ink.line, showline: true, ticks: "outside", tickcolor: ink.line, ticklen: 4,
  tickfont: { color: ink.soft, size: 11 },
});

// An upright title longer than its axis would be cut off.
function twoLines(text) {
  const middle = text.lastIndexOf(" ", LONGEST_TITLE);
  return text.length > LONGEST_TITLE && middle > 0 ? `${text.slice(0, middle)}<br>${text.slice(middle + 1)}` : text;
}

function frame(layout) {
  const framed = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 80, r: 12, t: 26, b: 42 }, showlegend: false,
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink.text }, hovermode: "closest",
    hoverlabel: { bgcolor: ink.raised, bordercolor: ink.line, font: { color: ink.text, size: 12 }, align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: ink.line, activecolor: ink.soft },
  };
  for (const [name, value] of Object.entries(layout)) {
    if (value === undefined) continue;
    const title = { font: { size: 12, color: ink.soft }, standoff: 8, ...value.title };
    if (/^yaxis/.test(name) && title.text) title.text = twoLines(title.text);
    framed[name] = /^[xy]axis\d*$/.test(name) ? { ...AXIS(), ...value, title } : value;
  }
  return framed;
}

function line(group, extra = {}) {
  const { width = 2, dash, colour, ...rest } = extra;
  return { type: "scatter", mode: "lines", line: { color: colour || ink.groups[group], width, dash: dash || DASHES[DATA.groups[group].dash] }, meta: { group }, ...rest };
}

function band(group, x, low, high) {
  return { type: "scatter", mode: "lines", x: [...x, ...[...x].reverse()], y: [...high, ...[...low].reverse()], fill: "toself",
    fillcolor: fade(ink.groups[group], Math.min(0.14, 0.42 / DATA.groups.length)), line: { width: 0 }, hoverinfo: "skip", meta: { group, band: true } };
}

// 1.2k, 3.4M: as on the axes.
function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "n/a";
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return Number((value / (letter === "k" ? 1e3 : unit)).toPrecision(3)) + " " + letter;
  }
  const digits = size && size < 1e-3 ? Number(value.toPrecision(3)).toExponential() : String(Number(value.toPrecision(3)));
  return digits.replaceAll("-", "−");
}

// "standard 1.2, polar 1.1", or the spread when there are too many to read.
function perGroup(items, write = short) {
  const known = items.filter((item) => Number.isFinite(item.value));
  if (known.length === 0) return "unknown";
  if (known.length <= 4) return known.map((item) => DATA.groups[item.group].label + " " + write(item.value)).join(", ");
  const values = known.map((item) => item.value);
  if (write(Math.min(...values)) === write(Math.max(...values))) return `${write(values[0])} in all ${known.length} groups`;
  return `${write(Math.min(...values))} to ${write(Math.max(...values))} over ${known.length} groups`;
}

const finite = (list) => list.filter((v) => v !== null && Number.isFinite(v));
const mean = (list) => { const known = finite(list); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : NaN; };
const flat = (value) => (Array.isArray(value) ? value.flat(Infinity) : [value]);
// Extremes without spreading long lists into arguments.
const lowest = (list) => finite(list).reduce((a, b) => Math.min(a, b), Infinity);
const highest = (list) => finite(list).reduce((a, b) => Math.max(a, b), -Infinity);

// A select of a figure: offers what exists, keeps the reader's choice, redraws its figure.
function choose(id, kind, options, fallback) {
  const select = $(`#${id} select.${kind}`), wanted = (state.chosen[id] || {})[kind];
  const values = options.map((option) => option.value);
  const value = values.includes(wanted) ? wanted : values.includes(fallback) ? fallback : values[0];
  const known = [...select.options].map((o) => o.value).join("\n");
  if (known !== values.join("\n")) {
    select.replaceChildren(...options.map((o) => element("option", { value: o.value, textContent: o.text })));
    select.onchange = () => { (state.chosen[id] ||= {})[kind] = select.value; remember(); render(id); };
  }
  select.value = value;
  searchable(select);
  return value;
}

const SEARCH_FROM = 8;  // options
// A long menu can be searched: typing leaves the options that hold every word; Enter or a choice takes one.
function searchable(select) {
  if (select.options.length < SEARCH_FROM || (select.previousElementSibling && select.previousElementSibling.className === "find")) return;
  const find = element("input", { type: "search", className: "find", placeholder: "find a quantity", ariaLabel: "Find a quantity" });
  find.oninput = () => {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const option of select.options) option.hidden = !words.every((word) => (option.textContent + " " + option.value).toLowerCase().includes(word));
    const first = [...select.options].find((option) => !option.hidden), none = !first;
    find.classList.toggle("none", none);
    if (words.length && first && select.selectedOptions[0].hidden) { select.value = first.value; select.onchange(); }
  };
  select.before(find);
}

// No line begins with a percent sign.
const unbroken = (text) => text.replaceAll(" %", "\u00a0%");
const quantity = (name) => DATA.quantities[name] || { title: name, axis: name };
// The paper's symbols keep their letters: m∞ is not M∞.
const sentence = (text) => (/^[a-z]{2}/.test(text) ? text.charAt(0).toUpperCase() + text.slice(1) : text);
