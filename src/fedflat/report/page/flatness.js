// Flatness beside the monitored metric: all that was measured, as a table, a scatter, and curves where there are any.

const flatnessSort = { column: null, down: true };

// Of the trained model; where that was not measured, what the run last recorded of itself.
function measuresOf(run) {
  const recorded = {};
  Object.entries(run.series).forEach(([key, column]) => {
    if (quantityGroup(key) !== "measures") return;
    const values = column.filter((value) => value != null);
    if (values.length) recorded[quantityNamed(key).name] = values[values.length - 1];
  });
  return { ...recorded, ...(run.flatness.numbers || {}) };
}

function monitoredOf(run) {
  return run.summary.last ? run.summary.last[0] : null;
}

function drawFlatness() {
  const body = find("flatness-body");
  const measured = matching().filter((run) => Object.keys(measuresOf(run)).length);
  if (!measured.length) {
    fill(body, allOnNodes() ? empty(NO_DATA) : empty("Nothing was measured yet: ", make("code", {}, "fedflat flatness RUNS…"), " measures trained models, ", make("code", {}, "fedflat run --measure sharpness"), " while they train."));
    return;
  }
  if (!find("measure")) fill(body, ...flatnessParts());
  const names = [...new Set(measured.flatMap((run) => Object.keys(measuresOf(run))))];
  if (!names.includes(state.measure)) state.measure = names.includes("sharpness") ? "sharpness" : names[0];
  drawFlatnessTable(measured, names);
  fillSelect(find("measure"), names.map((name) => ({ value: name, name })), state.measure);
  const shown = measured.filter((run) => !state.hidden.has(run.id));
  drawScatter(shown);
  drawRadius(shown);
  drawDensity(shown);
}

function flatnessParts() {
  const chart = (id) => make("div", { id, class: "chart", role: "img" });
  const choose = make("label", {}, make("span", {}, "Accuracy against"), make("select", { id: "measure", on: { change: (event) => { state.measure = event.target.value; drawFlatness(); } } }));
  return [
    scrolling("Flatness table", make("table", { id: "flatness-table" }), "high"),
    make("p", { class: "hint" }, "Of the trained model where it was measured, otherwise the last that the run recorded. Less is flatter."),
    make("div", { class: "pair" },
      make("figure", {}, make("div", { class: "tools" }, choose), chart("scatter")),
      make("figure", { id: "radius-figure", hidden: "" }, make("h3", {}, "Loss at growing distance (mean over directions; dotted: uphill)"), chart("radius")),
      make("figure", { id: "density-figure", hidden: "" }, make("h3", {}, "Density of the Hessian's eigenvalues"), chart("density"))),
  ];
}

function drawFlatnessTable(runs, names) {
  const columns = [
    { key: "name", title: "Run", value: (run) => run.label.toLowerCase() },
    { key: "accuracy", title: capital(state.data.monitor.title), value: monitoredOf, text: (run) => monitorText(monitoredOf(run)) },
    ...names.map((name) => ({ key: `m ${name}`, title: name, value: (run) => measuresOf(run)[name], text: (run) => significant(measuresOf(run)[name]) })),
  ];
  const head = make("thead", {}, make("tr", {}, ...columns.map((column) => sortingHead(column, flatnessSort, () => drawFlatnessTable(runs, names)))));
  const rows = sorted(runs, columns, flatnessSort).map((run) => make("tr", { class: state.hidden.has(run.id) ? "off" : "" },
    make("th", { scope: "row" }, make("div", { class: "named" }, swatch(run.style), make("span", { class: "words", title: run.label }, run.label))),
    ...columns.slice(1).map((column) => make("td", {}, column.text(run)))));
  fill(find("flatness-table"), head, make("tbody", {}, ...rows));
}

function drawScatter(runs) {
  const points = runs.filter((run) => measuresOf(run)[state.measure] != null && monitoredOf(run) != null);
  const traces = points.map((run) => ({
    type: "scatter", mode: "markers", x: [measuresOf(run)[state.measure]], y: [monitoredOf(run)], meta: plain(run.label),
    marker: { size: 12, color: colour(run.style.colour), symbol: SYMBOLS[run.style.dash], line: { width: 1, color: themed("--card") } },
    hovertemplate: `%{meta}<br>${plain(state.data.monitor.title)} <b>%{y:${state.data.monitor.share ? ".2%" : ".4~g"}}</b><br>${plain(state.measure)} <b>%{x:.4~g}</b><extra></extra>`,
  }));
  draw(find("scatter"), traces, {
    hovermode: "closest", uirevision: state.measure,
    xaxis: axisLook({ title: plain(state.measure), tickformat: "~g", nticks: 6 }),
    yaxis: axisLook({ title: state.data.monitor.title, tickformat: state.data.monitor.share ? ".1%" : "~g" }),
  }, `Scatter: ${state.data.monitor.title} against ${state.measure} of ${counted(points.length, "run")}. The numbers are in the table above.`);
}

function drawRadius(runs) {
  const entries = runs.flatMap((run) => Object.values(run.flatness.radius || {}).map((profile) => ({ run, profile })));
  find("radius-figure").hidden = !entries.length;
  if (!entries.length) return;
  const traces = entries.flatMap(({ run, profile }) => {
    const line = { color: colour(run.style.colour), width: 2 };
    const template = `${plain(shortened(run.label, 50))}<br>radius %{x}: <b>%{y:.4~g}</b>`;
    return [
      { type: "scatter", mode: "lines", x: [...profile.radii, ...[...profile.radii].reverse()], y: [...profile.high, ...[...profile.low].reverse()], fill: "toself", fillcolor: fainter(colour(run.style.colour), 0.14), line: { width: 0 }, hoverinfo: "skip" },
      { type: "scatter", mode: "lines", x: profile.radii, y: profile.random, line: { ...line, dash: DASHES[run.style.dash] }, hovertemplate: `${template}, random<extra></extra>` },
      { type: "scatter", mode: "lines", x: profile.radii, y: profile.gradient, line: { ...line, width: 1.4, dash: "dot" }, hovertemplate: `${template}, uphill<extra></extra>` },
    ];
  });
  draw(find("radius"), traces, { hovermode: "closest", xaxis: axisLook({ title: "distance from the model" }), yaxis: axisLook({ title: "loss" }) },
    `Chart: the loss at growing distance from the models of ${counted(entries.length, "run")}.`);
}

function drawDensity(runs) {
  const entries = runs.flatMap((run) => Object.values(run.flatness.density || {}).map((curve) => ({ run, curve })));
  find("density-figure").hidden = !entries.length;
  if (!entries.length) return;
  const traces = entries.map(({ run, curve }) => ({
    type: "scatter", mode: "lines", x: curve.grid, y: curve.density.map((value) => (value > 1e-8 ? value : null)), line: lineOf(run.style),
    hovertemplate: `${plain(shortened(run.label, 50))}<br>λ = %{x:.4~g}: <b>%{y:.3~g}</b><extra></extra>`,
  }));
  draw(find("density"), traces, { hovermode: "closest", xaxis: axisLook({ title: "eigenvalue" }), yaxis: axisLook({ title: "density", type: "log", exponentformat: "power", nticks: 6 }) },
    `Chart: the density of the Hessian's eigenvalues of ${counted(entries.length, "run")}.`);
}
