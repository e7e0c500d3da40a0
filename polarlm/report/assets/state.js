// What is shown and how: kept in the session so that a reloading page (--watch) stays as the reader left it.
"use strict";

const BANDS = ["range", "interval", "none"];
const state = {
  axis: "tokens", logX: false, logY: false, each: true, band: "interval", smoothing: 0.6, theme: null,
  hidden: [],        // addresses of runs (names may repeat)
  chosen: {},        // figure → select class → value
  scroll: 0, paused: false,
};
const STORE = "polarlm:" + location.pathname;

function restore() {
  try { Object.assign(state, JSON.parse(sessionStorage.getItem(STORE) || "{}")); } catch (error) { /* no storage: start afresh */ }
}

function remember() {
  state.scroll = window.scrollY;
  try { sessionStorage.setItem(STORE, JSON.stringify(state)); } catch (error) { /* private mode */ }
}

const $ = (selector, root = document) => root.querySelector(selector);

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// In the narrow list a setting breaks after its = or _, not inside a word.
function breakable(label) { return label.split(/(?<=[=_])/).flatMap((part, i) => (i ? [element("wbr"), part] : [part])); }

// Plotly reads a small HTML in labels; a run's name is text, whatever characters it has.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function isDark() {
  return state.theme ? state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function applyTheme(dark = isDark()) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  Object.assign(ink, { text: read("--ink"), soft: read("--soft"), grid: read("--grid"), line: read("--line"), paper: read("--paper"), raised: read("--raised"), grey: read("--c0"), accent: read("--accent"), better: read("--better"), worse: read("--worse") });
  // Unequal budgets are greyed: their curves are shown and not blended in.
  ink.groups = DATA.groups.map((g) => (g.unequal ? mix(ink.line, ink.soft, 0.35) : mix(read("--c" + g.colour), ink.paper, g.shade)));
  document.querySelectorAll("[data-swatch]").forEach((s) => { s.style.borderColor = ink.groups[s.dataset.swatch]; });
}

const ink = {};
const DASHES = ["solid", "dash", "dot", "dashdot"];

function channels(hex) { return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)); }
function mix(colour, other, share) {
  const a = channels(colour), b = channels(other);
  return "#" + a.map((v, i) => Math.round(v + (b[i] - v) * share).toString(16).padStart(2, "0")).join("");
}
function fade(colour, alpha) { return `rgba(${channels(colour).join(",")},${alpha})`; }

function swatch(group) {
  const made = element("span", { className: "swatch d" + DATA.groups[group].dash });
  made.dataset.swatch = group;
  if (ink.groups) made.style.borderColor = ink.groups[group];
  return made;
}

const isShown = (run) => !HIDDEN.has(run.href);
const shownRuns = (group) => DATA.runs.filter((run) => run.group === group && isShown(run));
const shownGroups = () => DATA.groups.map((_, g) => g).filter((g) => shownRuns(g).length);
let HIDDEN = new Set();

function setHidden(names) {
  HIDDEN = new Set(names);
  state.hidden = [...HIDDEN];
  document.querySelectorAll("#groups input").forEach((box) => {
    const runs = DATA.runs.filter((run) => box.dataset.run ? run.href === box.dataset.run : run.group === Number(box.dataset.group));
    const shown = runs.filter(isShown).length;
    box.checked = shown > 0;
    box.indeterminate = shown > 0 && shown < runs.length;
  });
}

function buildSidebar() {
  DATA.groups.forEach((group, g) => {
    const runs = DATA.runs.filter((run) => run.group === g);
    const box = element("input", { type: "checkbox", ariaLabel: "Show " + group.label });
    box.dataset.group = g;
    box.addEventListener("click", (event) => event.stopPropagation());
    box.addEventListener("change", () => toggle(runs, box.checked));
    const seeds = runs.length === 1 ? "1 run" : runs.length + " runs";
    const summary = element("summary", { title: "Open for single runs; double-click to show this group alone" },
      box, swatch(g), element("span", { className: "label" }, ...breakable(group.label)), element("small", { textContent: seeds }));
    summary.addEventListener("dblclick", () => { setHidden(DATA.runs.filter((r) => r.group !== g).map((r) => r.href)); redraw(); });
    const folder = element("details", { className: "group" }, summary);
    for (const run of runs) {
      const one = element("input", { type: "checkbox" });
      one.dataset.run = run.href;
      one.addEventListener("change", () => toggle([run], one.checked));
      const note = run.status === "finished" ? "" : ` (${run.status})`;
      folder.append(element("label", { title: run.name }, one, element("span", { textContent: `seed ${run.seed}${note} · ${run.name}` })));
    }
    $("#groups").append(folder);
  });
  $("#show-all").onclick = () => { setHidden([]); redraw(); };
  $("#show-none").onclick = () => { setHidden(DATA.runs.map((run) => run.href)); redraw(); };
  $("#filter").oninput = () => {
    const wanted = $("#filter").value.toLowerCase();
    document.querySelectorAll("#groups .group").forEach((folder) => { folder.hidden = !folder.textContent.toLowerCase().includes(wanted); });
  };
}

function toggle(runs, show) {
  const names = new Set(HIDDEN);
  runs.forEach((run) => (show ? names.delete(run.href) : names.add(run.href)));
  setHidden(names);
  redraw();
}

function buildToolbar() {
  document.querySelectorAll("#axis button").forEach((button) => {
    button.onclick = () => { state.axis = button.dataset.axis; syncToolbar(); redraw(); };
  });
  for (const [id, key] of [["#log-x", "logX"], ["#log-y", "logY"], ["#each", "each"]]) {
    $(id).onchange = () => { state[key] = $(id).checked; redraw(); };
  }
  $("#band").onchange = () => { state.band = $("#band").value; redraw(); };
  $("#smoothing").oninput = () => { state.smoothing = Number($("#smoothing").value); redraw(); };
  $("#theme").onclick = () => { state.theme = isDark() ? "light" : "dark"; applyTheme(); redraw(); };
}

function syncToolbar() {
  document.querySelectorAll("#axis button").forEach((button) => button.setAttribute("aria-pressed", button.dataset.axis === state.axis));
  $("#log-x").checked = state.logX;
  $("#log-y").checked = state.logY;
  $("#each").checked = state.each;
  $("#band").value = BANDS.includes(state.band) ? state.band : "interval";
  $("#smoothing").value = state.smoothing;
}
