// Learning curves and what they cost.
"use strict";

const AXES = { tokens: "training tokens", flops: "training FLOPs", seconds: "training time (s)" };
// The same interval as in the table: Student's t by degrees of freedom.
const tQuantile = (df) => DATA.verdict.t[df];

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

// [x, y of every run] where all runs have one: at equal steps, or at equal times, between which runs are interpolated.
function aligned(counted, kind, read) {
  const curves = counted.map((run) => ({ x: along(run, kind), y: read(run), at: run[kind].at }));
  if (state.axis !== "seconds") {
    const tables = curves.map(({ x, y, at }) => new Map(at.map((step, i) => [step, [x[i], y[i]]])));
    return [...tables[0].keys()].map((step) => tables.map((table) => table.get(step))).filter((points) => points.every((p) => p !== undefined && p[0] !== null))
      .map((points) => [mean(points.map((p) => p[0])), points.map((p) => p[1])]);
  }
  const timed = curves.map(({ x, y }) => x.map((t, i) => [t, y[i]]).filter(([t]) => t !== null));
  if (timed.some((points) => !points.length)) return [];
  const from = Math.max(...timed.map((points) => points[0][0])), to = Math.min(...timed.map((points) => points.at(-1)[0]));
  const grid = [...new Set([...timed[0].map(([t]) => t).filter((t) => t >= from && t <= to), to])];
  return grid.map((t) => [t, timed.map((points) => valueAt(points, t))]);
}

function valueAt(points, t) {
  let i = points.findIndex(([time]) => time >= t);
  if (i < 0) return null;
  if (points[i][0] === t || i === 0) return points[i][1];
  const [t0, y0] = points[i - 1], [t1, y1] = points[i];
  return y0 === null || y1 === null ? null : y0 + ((y1 - y0) * (t - t0)) / (t1 - t0);
}

// Mean and band of a group's finished runs (else of the running ones): a run that has just begun or stopped early would
// cut the mean short or bend it, and is left to its own line.
// `back` maps what is averaged to what is shown: perplexities are averaged as losses.
function average(runs, kind, read, back = (v) => v) {
  const having = runs.filter((run) => run[kind].at.length), of = (status) => having.filter((run) => run.status === status);
  const counted = [of("finished"), of("running"), having].find((list) => list.length) || [];
  if (!counted.length) return null;
  const made = { x: [], mean: [], low: [], high: [], n: counted.length };
  for (const [x, ys] of aligned(counted, kind, read)) {
    const broken = ys.some((y) => y === null || y === undefined), centre = broken ? null : mean(ys);
    let low = centre, high = centre;
    if (!broken && ys.length > 1) {
      if (state.band === "interval") {
        const sd = Math.sqrt(ys.reduce((s, y) => s + (y - centre) ** 2, 0) / (ys.length - 1));
        const half = (tQuantile(ys.length - 1) * sd) / Math.sqrt(ys.length);
        low = centre - half; high = centre + half;
      } else { low = Math.min(...ys); high = Math.max(...ys); }
    }
    const show = (v) => (v === null ? null : back(v));
    made.x.push(x); made.mean.push(show(centre)); made.low.push(show(low)); made.high.push(show(high));
  }
  return made;
}

function curveFigure(kind, unit, read, title, note, { back = (v) => v, reference = null, smoothed = kind === "train" } = {}) {
  const groups = shownGroups(), traces = [], ends = [], weight = smoothed ? state.smoothing : 0;
  const single = state.each && DATA.runs.filter(isShown).length <= 60;
  const drawn = [];
  let spread = false;
  for (const g of groups) {
    const runs = shownRuns(g).filter((run) => finite(read(run)).length), label = plain(DATA.groups[g].label);
    if (!runs.length) continue;
    const curve = average(runs, kind, (run) => smooth(read(run), weight), back);
    const shown = (run) => smooth(read(run), weight).map((v) => (v === null ? null : back(v)));
    const hover = `%{y:.4g} ${unit}<br>%{x:.3s} ${AXES[state.axis]}`;
    if (state.band !== "none" && curve && curve.n > 1) {
      const at = curve.mean.map((v, i) => (v === null ? -1 : i)).filter((i) => i >= 0), pick = (list) => at.map((i) => list[i]);
      traces.push(band(g, pick(curve.x), pick(curve.low), pick(curve.high)));
      spread = true;
    }
    for (const run of runs) {
      const alone = runs.length === 1 || !curve || curve.x.length === 0;
      if (!single && !alone) continue;
      traces.push(line(g, { x: along(run, kind), y: shown(run), width: alone ? 2 : 0.7, opacity: alone ? 1 : 0.4,
        mode: kind === "val" && run.val.at.length < 3 ? "lines+markers" : "lines",
        meta: { group: g, run: run.href }, hovertemplate: `${plain(run.name)}<br>${hover}<extra>${label}, seed ${run.seed}</extra>` }));
    }
    if (curve && curve.x.length && runs.length > 1) {
      traces.push(line(g, { x: curve.x, y: curve.mean, width: 2.2, hovertemplate: `${hover}<extra>${label}, mean of ${curve.n}</extra>` }));
    }
    drawn.push(g);
    const last = curve && curve.x.length ? finite(curve.mean).at(-1) : mean(runs.map((run) => finite(shown(run)).at(-1)));
    ends.push({ group: g, value: last });
  }
  if (!traces.length) return null;
  const { shapes, annotations, range } = references(reference && DATA.references[reference], usefulRange(traces));
  const bandWord = spread ? (state.band === "interval" ? " Band: 95 % interval of the mean." : " Band: range of seeds.") : "";
  return {
    title: title(ends, DATA.runs.some((run) => isShown(run) && !["finished", "failed"].includes(run.status)) ? "is now" : "ends at"), note: note + bandWord, groups: drawn, traces,
    layout: {
      uirevision: [state.axis, state.logX, state.logY].join(), hovermode: "closest", shapes, annotations,
      xaxis: { title: { text: AXES[state.axis] }, type: state.logX ? "log" : "linear", exponentformat: "SI" },
      yaxis: { title: { text: unit }, type: state.logY ? "log" : "linear", range, nticks: 7 },
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

// What a unigram or bigram table reaches: a dotted line where it fits, else a word at the edge.
function references(known, range) {
  const shapes = [], annotations = [];
  if (!known || !range) return { shapes, annotations, range };
  const scale = (v) => (state.logY ? Math.log10(v) : v), span = range[1] - range[0];
  const list = Object.entries(known).map(([name, value]) => [name, scale(value), value]).sort((a, b) => a[1] - b[1]);
  const near = list.filter(([, at]) => at <= range[1] + 0.6 * span && at >= range[0] - 0.6 * span);
  const top = Math.max(range[1], ...near.map(([, at]) => at + 0.06 * span)), bottom = Math.min(range[0], ...near.map(([, at]) => at - 0.03 * span));
  const above = [], below = [];
  for (const [name, at, value] of list) {
    if (at > top || at < bottom) { (at > top ? above : below).push(`${name} ${digits(value)}`); continue; }
    shapes.push({ type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: value, y1: value, line: { color: ink.soft, width: 1, dash: "dot" }, layer: "below" });
    annotations.push({ xref: "paper", yref: "y", x: 1, y: at, xanchor: "right", yanchor: "bottom", showarrow: false, text: plain(`${name} ${digits(value)}`), font: { size: 11, color: ink.soft } });
  }
  if (above.length) annotations.push({ xref: "paper", yref: "paper", x: 0, y: 1, xanchor: "left", yanchor: "bottom", showarrow: false, text: plain("above: " + above.join(", ")), font: { size: 11, color: ink.soft } });
  if (below.length) annotations.push({ xref: "paper", yref: "paper", x: 0.02, y: 0, xanchor: "left", yanchor: "bottom", showarrow: false, text: plain("below: " + below.join(", ")), font: { size: 11, color: ink.soft } });
  return { shapes, annotations, range: [bottom, top] };
}

const digits = (v) => Number(v.toPrecision(4)).toString();

// Numbers stand in the page's order, not ranked: ranks are for the verdict.
// A validation metric of the table in polarlm/evaluation/metrics.py, or null where no run has it.
function metricFigure(name) {
  const metric = DATA.metrics[name];
  if (!metric) return null;
  const fair = metric.comparable || DATA.oneTokenizer, known = (run) => run.val[name] || [];
  return curveFigure("val", metric.title === metric.unit ? metric.unit : `${metric.title} (${metric.unit})`,
    metric.log ? (run) => known(run).map((v) => (v > 0 ? Math.log(v) : null)) : known,
    (ends, verb) => (fair ? `Validation ${metric.title} ${verb}: ` + perGroup(ends, digits) : `Validation ${metric.title} of different tokenizers: not comparable`),
    metric.meaning + (metric.log ? " Mean and interval are computed on logarithms." : "") + " " + DATA.validation, { back: metric.log ? Math.exp : undefined, reference: fair ? name : null });
}

FIGURES.bits = () => metricFigure(choose("bits", "quantity", Object.entries(DATA.metrics).map(([value, metric]) => ({ value, text: metric.title })), "bits_per_byte"));
FIGURES.perplexity = () => metricFigure("perplexity");

// The number in a title is where the drawn curve ends, so a title says when that curve is smoothed.
const smoothedWord = (name) => sentence(state.smoothing ? `smoothed ${name}` : name);

FIGURES.training = () => curveFigure("train", "loss (nats per token)", (run) => run.train.loss,
  (ends, verb) => `${smoothedWord("training loss")} ${verb}: ` + perGroup(ends, digits),
  "Averaged over short intervals of steps" + (state.smoothing ? `, then smoothed (${state.smoothing}).` : "."), { reference: DATA.oneTokenizer ? "loss" : null });

FIGURES.gradient = () => curveFigure("train", "gradient norm", (run) => run.train.gradNorm,
  (ends, verb) => `${smoothedWord("gradient norm")} ${verb}: ` + perGroup(ends), "Before clipping, averaged over short intervals of steps" + (state.smoothing ? `, then smoothed (${state.smoothing}).` : "."));

FIGURES.rate = () => curveFigure("train", "learning rate", (run) => run.train.lr,
  (ends) => "Highest learning rate logged: " + perGroup(ends.map(({ group }) => ({ group, value: highest(shownRuns(group).flatMap((run) => finite(run.train.lr))) }))),
  "The schedule of the learning rate.", { smoothed: false });

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
    note: "Tokens per second of training; each dot is a run. Compare only runs from the same, otherwise idle machine.", traces,
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
