// The loss around every model, side by side: one scale for all, and turning one turns all.

const SURFACES_MOST = 8; // a browser gives a page about sixteen 3-D drawings
const CAMERA = { eye: { x: 1.5, y: 1.5, z: 1.0 }, up: { x: 0, y: 0, z: 1 }, center: { x: 0, y: 0, z: -0.16 } };
let turning = false;

function withLandscape(runs) {
  return runs.filter((run) => run.landscape.losses && Object.keys(run.landscape.losses).length);
}

let seen = false;

// 3-D drawings are dear: they wait until the person comes near.
function startSurfaces() {
  const watcher = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    watcher.disconnect();
    seen = true;
    drawSurfaces();
  }, { rootMargin: "500px" });
  watcher.observe(find("surfaces"));
}

function drawSurfaces() {
  if (!seen) return;
  const all = withLandscape(matching());
  const parts = [...new Set(all.flatMap((run) => Object.keys(run.landscape.losses)))];
  if (!parts.includes(state.surface.part)) [state.surface.part] = parts.includes("train") ? ["train"] : parts;
  drawSurfaceTools(parts);
  const able = withLandscape(shownRuns()).filter((run) => run.landscape.losses[state.surface.part]);
  const shown = able.slice(0, SURFACES_MOST);
  const body = find("surfaces-body");
  if (!shown.length) {
    clearSurfaces(body, []);
    find("surfaces-hint").textContent = "";
    fill(body, all.length ? empty("The runs that have a landscape are hidden.") : allOnNodes() ? empty(NO_DATA) : empty("No run has a landscape yet: ", make("code", {}, "fedflat landscape RUNS…"), " computes the loss around trained models."));
    return;
  }
  clearSurfaces(body, shown);
  const range = lossRange(shown);
  shown.forEach((run) => drawSurface(surfaceCard(body, run), run, range));
  find("surfaces-hint").textContent = surfacesHint(able, shown);
}

function drawSurfaceTools(parts) {
  const tools = find("surfaces-tools");
  if (!parts.length) { fill(tools); return; }
  if (!find("surface-part")) {
    fill(tools,
      make("label", {}, make("span", {}, "Loss on"), make("select", { id: "surface-part", on: { change: (event) => { state.surface.part = event.target.value; drawSurfaces(); } } })),
      make("label", { class: "check" }, make("input", { id: "surface-log", type: "checkbox", on: { change: (event) => { state.surface.logarithmic = event.target.checked; drawSurfaces(); } } }), "Logarithmic"),
      make("button", { id: "surface-reset", type: "button", on: { click: () => turnAll(CAMERA) } }, "Reset view"));
  }
  fillSelect(find("surface-part"), parts.map((part) => ({ value: part, name: `${part} data` })), state.surface.part);
}

function clearSurfaces(body, shown) {
  const wanted = new Set(shown.map((run) => run.id));
  [...body.children].forEach((child) => {
    if (wanted.has(child.dataset.run)) return;
    const chart = child.querySelector(".chart");
    if (chart) Plotly.purge(chart);
    child.remove();
  });
}

function surfaceCard(body, run) {
  let card = [...body.children].find((child) => child.dataset.run === run.id);
  if (!card) {
    card = make("figure", { class: "card", "data-run": run.id }, make("div", { class: "title" }), make("div", { class: "chart", role: "img", tabindex: "0" }));
    card.querySelector(".chart").addEventListener("keydown", turnByKey);
  }
  body.append(card); // also puts cards into the order of the runs
  card.querySelector(".title").replaceChildren(named(run.style, run.label));
  return card.querySelector(".chart");
}

function flatNumbers(grid) {
  return grid.flat(2).filter((value) => value != null);
}

function lossRange(runs) {
  const values = runs.flatMap((run) => flatNumbers(run.landscape.losses[state.surface.part]));
  const positive = values.filter((value) => value > 0);
  return { low: Math.min(...values), high: Math.max(...values), positive: positive.length ? Math.min(...positive) : 1e-6 };
}

function drawSurface(element, run, range) {
  const losses = run.landscape.losses[state.surface.part];
  const values = flatNumbers(losses);
  const words = `The ${state.surface.part} loss around the model of ${run.label}: from ${significant(Math.min(...values))} to ${significant(Math.max(...values))}.`;
  if (run.landscape.axes.length === 1) { drawLossLine(element, run, losses, range, words); return; }
  const log = state.surface.logarithmic;
  const height = losses.map((row) => row.map((value) => (value == null ? null : log ? Math.log10(Math.max(value, range.positive)) : value)));
  const bounds = log ? [Math.log10(range.positive), Math.log10(range.high)] : [range.low, range.high];
  const slack = 0.03 * (bounds[1] - bounds[0] || 1);
  const trace = {
    type: "surface", x: run.landscape.axes[1], y: run.landscape.axes[0], z: height, customdata: losses, colorscale: "Viridis", cmin: bounds[0], cmax: bounds[1], showscale: false,
    contours: { z: { show: true, usecolormap: true, project: { z: true }, width: 1 } },
    hovertemplate: "a %{y:.2f}, b %{x:.2f}<br>loss <b>%{customdata:.4~g}</b><extra></extra>",
  };
  const axis = (title, extra = {}) => ({ title: { text: title, font: { size: 12 } }, color: themed("--soft"), gridcolor: themed("--line"), zerolinecolor: themed("--line"), showbackground: false, showspikes: false, nticks: 5, ...extra });
  const ticks = log ? logTicks(bounds) : {};
  const layout = {
    margin: { l: 0, r: 0, t: 0, b: 0 }, uirevision: "camera",
    scene: { xaxis: axis("b"), yaxis: axis("a"), zaxis: axis(narrow() ? "" : "loss", { range: [bounds[0] - slack, bounds[1] + slack], ...ticks }), camera: state.surface.camera || CAMERA, aspectmode: "cube", dragmode: "turntable" },
  };
  draw(element, [trace], layout, `${words} Arrow keys turn it.`);
  if (!element.dataset.linked) {
    element.dataset.linked = "yes";
    element.on("plotly_relayouting", (change) => linkCamera(element, change));
    element.on("plotly_relayout", (change) => linkCamera(element, change));
  }
}

function logTicks([low, high]) {
  const values = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) values.push(...[1, 2, 5].map((step) => power + Math.log10(step)));
  const inside = values.filter((value) => value >= low - 0.01 && value <= high + 0.01);
  return { tickvals: inside, ticktext: inside.map((value) => significant(10 ** value, 2)) };
}

function drawLossLine(element, run, losses, range, words) {
  draw(element, [{ type: "scatter", mode: "lines", x: run.landscape.axes[0], y: losses, line: lineOf(run.style), hovertemplate: "a %{x:.2f}: <b>%{y:.4~g}</b><extra></extra>" }], {
    xaxis: axisLook({ title: "a" }),
    yaxis: axisLook({ title: "loss", type: state.surface.logarithmic ? "log" : "linear", range: state.surface.logarithmic ? [Math.log10(range.positive), Math.log10(range.high)] : [range.low, range.high] }),
  }, words);
}

function surfaceCharts() {
  return [...find("surfaces-body").querySelectorAll(".chart")].filter((chart) => chart.layout && chart.layout.scene);
}

function linkCamera(element, change) {
  const camera = change["scene.camera"];
  if (!camera || turning) return;
  state.surface.camera = camera;
  turnOthers(element, camera);
}

function turnOthers(element, camera) {
  turning = true;
  const others = surfaceCharts().filter((chart) => chart !== element);
  Promise.all(others.map((chart) => Plotly.relayout(chart, { "scene.camera": camera }))).finally(() => { turning = false; });
}

function turnAll(camera) {
  state.surface.camera = camera;
  turnOthers(null, camera);
}

function turnByKey(event) {
  const steps = { ArrowLeft: [-0.15, 0], ArrowRight: [0.15, 0], ArrowUp: [0, 0.15], ArrowDown: [0, -0.15] };
  const step = steps[event.key];
  if (!step) return;
  event.preventDefault();
  const camera = state.surface.camera || CAMERA;
  const { x, y, z } = camera.eye;
  const angle = step[0];
  const eye = { x: x * Math.cos(angle) - y * Math.sin(angle), y: x * Math.sin(angle) + y * Math.cos(angle), z: z + step[1] };
  turnAll({ ...camera, eye });
}

function surfacesHint(able, shown) {
  const parts = [];
  if (able.length > shown.length) parts.push(`The first ${shown.length} of ${able.length} shown runs with a landscape: hide some to see others.`);
  const seeds = new Set(shown.map((run) => run.landscape.seed));
  const reaches = new Set(shown.map((run) => JSON.stringify(run.landscape.axes)));
  if (shown.length > 1) parts.push(seeds.size === 1 && reaches.size === 1 ? "All along the same random directions, in units of each model's filters; one scale for all." : "These were computed along different directions or reaches: their shapes are not to be compared.");
  parts.push("Drag, or use the arrow keys, to turn all of them.");
  return parts.join(" ");
}
