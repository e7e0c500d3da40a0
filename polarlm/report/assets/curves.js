// Learning curves and what they cost.
"use strict";

const AXES = { tokens: "training tokens", flops: "training FLOPs", seconds: "training time (s)" };
// Student's t, 97.5 %, by degrees of freedom.
const T = [NaN, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12];
const tQuantile = (df) => (df < T.length ? T[df] : 1.96 + 2.5 / df);

function along(run, kind) {
  const curve = run[kind];
  if (state.axis === "seconds") return curve.seconds;
  if (state.axis === "flops") return curve.tokens.map((t) => (t === null || !run.flopsPerToken ? null : t * run.flopsPerToken));
  return curve.tokens;
}

// Exponential moving average without the pull of its start; a gap stays a gap.
function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0, norm = 0;
  return values.map((v) => {
    if (v === null) return null;
    sum = weight * sum + (1 - weight) * v;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

// Mean and band of a group's runs at equal steps; runs that stopped early would bend the mean and are left to their own lines.
function average(runs, kind, read) {
  const alive = runs.filter((run) => run.status === "finished" || run.status === "running");
  const counted = (alive.length ? alive : runs).filter((run) => run[kind].at.length);
  if (!counted.length) return null;
  const tables = counted.map((run) => {
    const x = along(run, kind), y = read(run);
    return new Map(run[kind].at.map((at, i) => [at, [x[i], y[i]]]));
  });
  const made = { x: [], mean: [], low: [], high: [], n: counted.length };
  for (const at of tables[0].keys()) {
    const points = tables.map((table) => table.get(at));
    if (points.some((p) => p === undefined || p[0] === null)) continue;
    const ys = points.map((p) => p[1]), broken = ys.some((y) => y === null), centre = broken ? null : mean(ys);
    let low = centre, high = centre;
    if (!broken && ys.length > 1) {
      if (state.band === "interval") {
        const sd = Math.sqrt(ys.reduce((s, y) => s + (y - centre) ** 2, 0) / (ys.length - 1));
        const half = (tQuantile(ys.length - 1) * sd) / Math.sqrt(ys.length);
        low = centre - half; high = centre + half;
      } else { low = Math.min(...ys); high = Math.max(...ys); }
    }
    made.x.push(mean(points.map((p) => p[0]))); made.mean.push(centre); made.low.push(low); made.high.push(high);
  }
  return made;
}

function curveFigure(kind, unit, read, title, note) {
  const groups = shownGroups(), traces = [], ends = [], weight = kind === "train" ? state.smoothing : 0;
  const single = state.each && DATA.runs.filter(isShown).length <= 60;
  const drawn = [];
  let spread = false;
  for (const g of groups) {
    const runs = shownRuns(g).filter((run) => finite(read(run)).length), label = plain(DATA.groups[g].label);
    if (!runs.length) continue;
    const curve = average(runs, kind, (run) => smooth(read(run), weight));
    const hover = `%{y:.4g} ${unit}<br>%{x:.3s} ${AXES[state.axis]}`;
    if (state.band !== "none" && curve && curve.n > 1) {
      const at = curve.mean.map((v, i) => (v === null ? -1 : i)).filter((i) => i >= 0), pick = (list) => at.map((i) => list[i]);
      traces.push(band(g, pick(curve.x), pick(curve.low), pick(curve.high)));
      spread = true;
    }
    for (const run of runs) {
      const alone = runs.length === 1 || !curve || curve.x.length === 0;
      if (!single && !alone) continue;
      traces.push(line(g, { x: along(run, kind), y: smooth(read(run), weight), width: alone ? 2 : 0.7, opacity: alone ? 1 : 0.4,
        mode: kind === "val" && run.val.at.length < 3 ? "lines+markers" : "lines",
        meta: { group: g, run: run.href }, hovertemplate: `${plain(run.name)}<br>${hover}<extra>${label}, seed ${run.seed}</extra>` }));
    }
    if (curve && curve.x.length && runs.length > 1) {
      traces.push(line(g, { x: curve.x, y: curve.mean, width: 2.2, hovertemplate: `${hover}<extra>${label}, mean of ${curve.n}</extra>` }));
    }
    drawn.push(g);
    const last = curve && curve.x.length ? finite(curve.mean).at(-1) : mean(runs.map((run) => finite(smooth(read(run), weight)).at(-1)));
    ends.push({ group: g, value: last });
  }
  if (!traces.length) return null;
  const bandWord = spread ? (state.band === "interval" ? " Band: 95 % interval of the mean." : " Band: range of seeds.") : "";
  return {
    title: title(ends, DATA.runs.some((run) => isShown(run) && run.status === "running") ? "stands at" : "ends at"), note: note + bandWord, groups: drawn, traces,
    layout: {
      uirevision: [state.axis, state.logX, state.logY].join(), hovermode: "closest",
      xaxis: { title: { text: AXES[state.axis] }, type: state.logX ? "log" : "linear", exponentformat: "SI" },
      yaxis: { title: { text: unit }, type: state.logY ? "log" : "linear", range: usefulRange(traces), nticks: 7 },
    },
  };
}

// The first steps fall from log V and would flatten everything that follows; double-click shows the whole.
function usefulRange(traces) {
  let low = Infinity, high = -Infinity;
  for (const trace of traces) {
    if (trace.meta.band) continue;
    const ys = finite(trace.y);
    low = Math.min(low, lowest(ys));
    high = Math.max(high, highest(ys.slice(Math.floor(ys.length * (ys.length > 40 ? 0.1 : 0)))));
  }
  if (!(high > low)) return undefined;
  if (state.logY) return [Math.log10(low) - 0.01, Math.log10(high) + 0.01];
  return [low - 0.05 * (high - low), high + 0.05 * (high - low)];
}

const byValue = (ends) => [...ends].sort((a, b) => a.value - b.value);
const digits = (v) => Number(v.toPrecision(4)).toString();

FIGURES.bits = () => curveFigure("val", "bits per byte", (run) => run.val.bpb,
  (ends, verb) => `Validation bits per byte ${verb}: ` + perGroup(byValue(ends), digits),
  "Bits per byte does not depend on the tokenizer. During training part of the validation split is used, at the end all of it.");

FIGURES.perplexity = () => curveFigure("val", "perplexity", (run) => run.val.loss.map((v) => (v === null ? null : Math.exp(v))),
  (ends, verb) => (DATA.oneTokenizer ? `Validation perplexity ${verb}: ` + perGroup(byValue(ends), digits) : "Perplexities of different tokenizers: not comparable"),
  DATA.oneTokenizer ? "Per token; the same data as above." : "Each counts its own tokens. Compare bits per byte.");

FIGURES.training = () => curveFigure("train", "loss (nats per token)", (run) => run.train.loss,
  (ends, verb) => `Training loss ${verb}: ` + perGroup(byValue(ends), digits),
  "Averaged over short stretches of steps" + (state.smoothing ? `, then smoothed (${state.smoothing}).` : "."));

FIGURES.throughput = () => {
  const groups = shownGroups(), traces = [], speeds = [];
  for (const g of groups) {
    const runs = shownRuns(g).filter((run) => run.speed);
    if (!runs.length) continue;
    const value = mean(runs.map((run) => run.speed)), label = plain(DATA.groups[g].label);
    speeds.push({ group: g, value });
    traces.push({ type: "bar", orientation: "h", x: [value], y: [label], width: 0.55, marker: { color: fade(ink.groups[g], 0.28) }, meta: { group: g },
      hovertemplate: "%{x:.4s} tokens/s, mean<extra>%{y}</extra>" });
    traces.push({ type: "scatter", mode: "markers", x: runs.map((r) => r.speed), y: runs.map(() => label), marker: { color: ink.groups[g], size: 8 }, meta: { group: g },
      text: runs.map((r) => plain(r.name)), hovertemplate: "%{text}<br>%{x:.4s} tokens/s<extra></extra>" });
  }
  if (!speeds.length) return null;
  const base = speeds[0].value, others = speeds.slice(1).map((s) => ({ ...s, value: (100 * s.value) / base }));
  const first = DATA.groups[speeds[0].group].label;
  return {
    title: others.length ? `Training speed relative to ${first}: ` + perGroup(others, (v) => Math.round(v) + " %") : `${first} trains at ${short(base)} tokens/s`,
    note: "Tokens per second of training; each dot is a run. Only runs on the same, otherwise idle machine can be compared.", traces,
    height: Math.max(200, 70 + 34 * speeds.length),
    layout: { xaxis: { title: { text: "tokens per second" }, rangemode: "tozero", exponentformat: "SI" },
      yaxis: { autorange: "reversed", showgrid: false, ticks: "", type: "category", automargin: true }, barmode: "overlay", margin: { l: 20, r: 12, t: 6, b: 42 } },
  };
};

// Equal costs must not be spread over the whole axis by their last digit.
function padded(traces) {
  const all = traces.flatMap((trace) => trace.x), low = lowest(all), high = highest(all), margin = Math.max(0.04 * high, 0.08 * (high - low));
  return { range: [low - margin, high + margin] };
}

FIGURES.value = () => {
  const costs = [["flops", "training FLOPs"], ["seconds", "training time (s)"], ["parameters", "parameters"], ["tokens", "training tokens"]]
    .filter(([name]) => DATA.runs.some((run) => run.cost[name]));
  if (!costs.length) return null;
  const cost = choose("value", "quantity", costs.map(([value, text]) => ({ value, text })), "flops");
  const traces = [], drawn = [];
  for (const g of shownGroups()) {
    const runs = shownRuns(g).filter((run) => run.final !== null && run.cost[cost]);
    if (!runs.length) continue;
    drawn.push(g);
    traces.push({ type: "scatter", mode: "markers", x: runs.map((r) => r.cost[cost]), y: runs.map((r) => r.final), meta: { group: g },
      marker: { color: fade(ink.groups[g], 0.55), size: 7 }, text: runs.map((r) => plain(r.name)), hovertemplate: "%{text}<br>%{y:.4g} at %{x:.3s}<extra></extra>" });
    traces.push({ type: "scatter", mode: "markers", x: [mean(runs.map((r) => r.cost[cost]))], y: [mean(runs.map((r) => r.final))], meta: { group: g },
      marker: { color: ink.groups[g], size: 13, symbol: "diamond", line: { color: ink.paper, width: 1.5 } },
      hovertemplate: `%{y:.4g} at %{x:.3s}<extra>${plain(DATA.groups[g].label)}, mean</extra>` });
  }
  const name = costs.find(([c]) => c === cost)[1];
  return traces.length ? { title: `Final ${DATA.unit} against ${name}`, note: `On the whole ${DATA.split} split; each dot is a run, diamonds are means over seeds. Lower left is better.`, groups: drawn, traces,
    layout: { xaxis: { title: { text: name }, exponentformat: "SI", nticks: 6, ...padded(traces) }, yaxis: { title: { text: DATA.unit } } } } : null;
};
