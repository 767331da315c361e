// Who has what: samples by client and class, of every split that the shown runs use.

const SPLITS_MOST = 4;

function drawSplits() {
  const used = new Map();
  shownRuns().forEach((run) => {
    if (run.split == null) return;
    if (!used.has(run.split)) used.set(run.split, []);
    used.get(run.split).push(run);
  });
  const pictures = state.data.splits.filter((split) => used.has(split.id));
  const body = find("splits-body");
  if (!pictures.length) {
    fill(body, empty(state.data.splits.length ? "The runs whose splits are known are hidden." : "No split is known: a run needs its experiment.yaml, and the report was perhaps made with --no-splits."));
    return;
  }
  const some = state.splitsOpen ? pictures : pictures.slice(0, SPLITS_MOST);
  const wanted = new Set(some.map((split) => split.id));
  [...body.children].forEach((child) => {
    if (wanted.has(child.dataset.split)) return;
    const chart = child.querySelector(".chart");
    if (chart) Plotly.purge(chart);
    child.remove();
  });
  some.forEach((split) => drawSplit(body, split, used.get(split.id)));
  if (pictures.length > SPLITS_MOST) {
    body.append(make("p", { class: "empty" }, make("button", { type: "button", on: { click: () => { state.splitsOpen = !state.splitsOpen; drawSplits(); } } }, state.splitsOpen ? "Fewer" : `All ${pictures.length} splits`)));
  }
}

function drawSplit(body, split, runs) {
  let card = [...body.children].find((child) => child.dataset.split === split.id);
  if (!card) {
    card = make("figure", { class: "card", "data-split": split.id }, make("h3", {}, split.title), make("div", {}), make("figcaption", {}));
    if (split.counts) card.children[1].append(make("div", { class: "chart", role: "img" }));
  }
  body.append(card);
  const usedBy = runs.length === state.data.runs.length && runs.length > 1 ? "Used by all runs." : `Used by ${runs.slice(0, 3).map((run) => run.label).join("; ")}${runs.length > 3 ? ` and ${runs.length - 3} more` : ""}.`;
  if (!split.counts) {
    card.lastChild.textContent = `Not shown: ${split.missing} ${usedBy}`;
    return;
  }
  card.lastChild.textContent = [`${counted(split.samples, "sample")} over ${counted(split.clients, "client")}.`, split.note, usedBy].filter(Boolean).join(" ");
  drawCounts(card.querySelector(".chart"), split);
}

function drawCounts(element, split) {
  const { counts } = split;
  const classes = counts[0].map((_, label) => counts.map((row) => row[label] || null));
  const dark = theme() === "dark";
  const scale = dark ? [[0, "#1f3a52"], [1, "#9fd4ff"]] : [[0, "#cfe3f5"], [1, "#08306b"]];
  const trace = {
    type: "heatmap", x: split.names, z: classes, colorscale: scale, zmin: 0, xgap: counts.length <= 120 ? 1 : 0, ygap: classes.length <= 60 ? 1 : 0, hoverongaps: false,
    colorbar: { thickness: 8, outlinewidth: 0, tickfont: { color: themed("--soft"), size: 10 }, nticks: 4, len: 0.9 },
    hovertemplate: "client %{x}, class %{y}: <b>%{z:,d}</b><extra></extra>",
  };
  draw(element, [trace], {
    margin: { l: 40, r: 6, t: 10, b: 40 },
    xaxis: axisLook({ title: "client", showgrid: false, zeroline: false }), yaxis: axisLook({ title: "class", showgrid: false, zeroline: false, nticks: 11 }),
  }, `Picture: ${split.samples} samples of ${classes.length} classes over ${split.clients} clients by ${split.title}.`);
}
