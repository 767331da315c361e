// Learning curves: any recorded quantity against what it cost.

const UNIFIED_MOST = 8;
const TICKS_MOST = 10;

function quantities() {
  const keys = new Set(state.data.runs.flatMap((run) => Object.keys(run.series)));
  const order = [...Object.keys(QUANTITIES), ...keys].filter((key) => keys.has(key));
  const groups = Object.keys(QUANTITY_GROUPS);
  return [...new Set(order)].sort((a, b) => groups.indexOf(quantityGroup(a)) - groups.indexOf(quantityGroup(b)))
    .map((key) => ({ value: key, name: quantityNamed(key).name, group: QUANTITY_GROUPS[quantityGroup(key)] }));
}

// The mean of a value and those before it, `window` in all.
function trailingMean(values, window) {
  let sum = 0;
  return values.map((value, place) => {
    sum += value;
    if (place >= window) sum -= values[place - window];
    return sum / Math.min(place + 1, window);
  });
}

// A run's curve: only rounds in which the quantity was recorded.
function curveOf(run, quantity, axis, window) {
  const column = run.series[quantity] || [];
  const places = column.map((value, place) => place).filter((place) => column[place] != null);
  const raw = places.map((place) => column[place]);
  return {
    x: places.map((place) => run.axes[axis][place]),
    round: places.map((place) => run.axes.rounds[place]),
    raw,
    y: window > 1 ? trailingMean(raw, window) : raw,
  };
}

// The mean and the deviation over seeds, at rounds that all of them have.
function meanCurve(curves) {
  const maps = curves.map((curve) => new Map(curve.round.map((round, place) => [round, place])));
  const rounds = curves[0].round.filter((round) => maps.every((map) => map.has(round)));
  const at = (name, round) => curves.map((curve, number) => curve[name][maps[number].get(round)]);
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  const y = rounds.map((round) => mean(at("y", round)));
  const deviation = rounds.map((round, place) => {
    const values = at("y", round);
    if (values.length < 2) return 0;
    return Math.sqrt(values.reduce((sum, value) => sum + (value - y[place]) ** 2, 0) / (values.length - 1));
  });
  return { x: rounds.map((round) => mean(at("x", round))), y, round: rounds, deviation };
}

function hoverText(quantity) {
  const format = quantityNamed(quantity).share ? ".2%" : ".4~g";
  return `%{meta}: <b>%{y:${format}}</b>`;
}

function runTraces(bundle, few) {
  const run = bundle.runs[0];
  const curve = curveOf(run, state.quantity, state.axis, state.smooth);
  if (!curve.x.length) return [];
  const main = {
    type: "scatter", mode: curve.x.length < 3 ? "lines+markers" : "lines", x: curve.x, y: curve.y,
    line: lineOf(bundle.style), meta: plain(shortened(bundle.label, 60)), name: plain(bundle.label),
    customdata: curve.round, hovertemplate: `${hoverText(state.quantity)}${closest(few) ? "<br>round %{customdata}" : ""}<extra></extra>`,
  };
  if (state.smooth === 1 || !few) return [main];
  const faint = { type: "scatter", mode: "lines", x: curve.x, y: curve.raw, hoverinfo: "skip", line: { color: fainter(colour(bundle.style.colour), 0.22), width: 1 } };
  return [faint, main];
}

function bandTraces(bundle, few) {
  const curves = bundle.runs.map((run) => curveOf(run, state.quantity, state.axis, state.smooth)).filter((curve) => curve.x.length);
  if (!curves.length) return [];
  const { x, y, deviation, round } = meanCurve(curves);
  const main = {
    type: "scatter", mode: "lines", x, y, line: lineOf(bundle.style), meta: plain(shortened(bundle.label, 60)), name: plain(bundle.label), customdata: round,
    hovertemplate: `${hoverText(state.quantity)}${closest(few) ? "<br>round %{customdata}" : ""}<extra></extra>`,
  };
  if (curves.length < 2) return [main];
  const band = {
    type: "scatter", mode: "lines", x: [...x, ...[...x].reverse()], fill: "toself", hoverinfo: "skip",
    y: [...y.map((value, n) => value + deviation[n]), ...y.map((value, n) => value - deviation[n]).reverse()],
    line: { width: 0 }, fillcolor: fainter(colour(bundle.style.colour), 0.16),
  };
  return [band, main];
}

function closest(few) {
  return !few || narrow();
}

function drawCurves() {
  const known = quantities();
  if (!known.some((one) => one.value === state.quantity) && known.length) state.quantity = (known.find((one) => one.value === state.data.monitor.key) || known[0]).value;
  fillSelect(find("quantity"), known, state.quantity);
  fillSelect(find("axis"), Object.entries(AXES).map(([value, axis]) => ({ value, name: axis.name })), state.axis);
  find("smooth").value = state.smooth;
  find("smooth-value").textContent = state.smooth > 1 ? `mean of ${state.smooth}` : "off";
  const shown = bundles(shownRuns());
  const few = shown.length <= UNIFIED_MOST;
  const traces = shown.flatMap((bundle) => (state.together ? bandTraces(bundle, few) : runTraces(bundle, few)));
  const quantity = quantityNamed(state.quantity);
  const axis = AXES[state.axis];
  const layout = {
    hovermode: closest(few) ? "closest" : "x unified",
    uirevision: `${state.quantity} ${state.axis} ${state.logarithmic}`,
    xaxis: axisLook({ title: axis.name, ...wholeRounds(traces), tickformat: axis.format, ticksuffix: axis.suffix || "", hoverformat: state.axis === "rounds" ? ",d" : ".4~s", showspikes: !closest(few), spikethickness: 1, spikedash: "solid", spikecolor: themed("--line"), unifiedhovertitle: { text: unifiedTitle() } }),
    yaxis: axisLook({ title: narrow() ? "" : quantity.name, tickformat: quantity.share ? ".0%" : "~g", type: state.logarithmic ? "log" : "linear" }),
  };
  const words = `${quantity.name} against ${axis.name} of ${counted(shown.length, state.together ? "experiment" : "run")}`;
  draw(find("curves-chart"), traces, layout, `Chart: ${words}. The numbers are in the summary table.`);
  find("curves-caption").textContent = curvesCaption(traces, shown);
}

// Few rounds: a tick for each, and none between two.
function wholeRounds(traces) {
  const last = Math.max(1, ...traces.flatMap((trace) => trace.x));
  return state.axis === "rounds" && last <= TICKS_MOST ? { dtick: 1 } : {};
}

function unifiedTitle() {
  return state.axis === "rounds" ? "round %{x}" : `%{x}${AXES[state.axis].suffix || ""}`;
}

function curvesCaption(traces, shown) {
  if (!state.data.runs.some((run) => run.done)) return "No round is finished yet.";
  if (!shown.length) return "All runs are hidden: press one in the legend, or Show all.";
  const parts = [];
  if (!traces.length) parts.push(`None of the shown runs has recorded ${quantityNamed(state.quantity).name}.`);
  if (state.smooth > 1) parts.push(`Each point is the mean of the last ${state.smooth} recorded values.`);
  if (state.together && shown.some((bundle) => bundle.runs.length > 1)) parts.push("Lines are means over seeds, bands one deviation.");
  if (shown.some((bundle) => bundle.runs.some((run) => run.thinned))) parts.push("Long runs are thinned to a thousand rounds.");
  return parts.join(" ");
}

function startCurves() {
  find("quantity").addEventListener("change", (event) => { state.quantity = event.target.value; drawCurves(); });
  find("axis").addEventListener("change", (event) => { state.axis = event.target.value; drawCurves(); });
  find("smooth").addEventListener("input", (event) => { state.smooth = Number(event.target.value); drawCurves(); });
  find("logarithmic").addEventListener("change", (event) => { state.logarithmic = event.target.checked; drawCurves(); });
}
