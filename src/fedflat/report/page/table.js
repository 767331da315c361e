// The summary: a row per run, or per experiment; sorts and filters.

function summaryColumns() {
  const { last, target, runs } = state.data;
  const monitored = (name) => ({ value: (row) => (row.summary[name] || [null])[0], text: (row) => withDeviation(row.summary[name], monitorText), better: state.data.monitor.larger_is_better ? 1 : -1 });
  const share = (name) => ({ value: (row) => (row.summary[name] || [null])[0], text: (row) => withDeviation(row.summary[name], percent), better: 1 });
  const plainly = (name, write) => ({ value: (row) => row.summary[name], text: (row) => write(row.summary[name]) });
  const columns = [
    { key: "name", title: state.together ? "Experiment" : "Run", value: (row) => row.label.toLowerCase() },
    { key: "last", title: `${capital(monitorName())}, last ${last}`, ...monitored("last") },
    { key: "within", title: "± within", value: (row) => row.summary.within, text: (row) => monitorText(row.summary.within) },
    { key: "best", title: "Best", ...monitored("best") },
    { key: "worst", title: "Worst clients", ...share("worst_decile") },
    { key: "loss", title: capital(lossName()), ...plainly("loss", significant) },
    state.together
      ? { key: "seeds", title: "Seeds", value: (row) => row.runs.length, text: (row) => String(row.runs.length) }
      : null,
    { key: "rounds", title: "Rounds", value: (row) => row.done, text: (row) => roundsText(row) },
    { key: "bytes", title: "Traffic", value: (row) => row.summary.bytes_down + row.summary.bytes_up, text: (row) => bytes(row.summary.bytes_down + row.summary.bytes_up) },
    { key: "passes", title: "Passes F / B", value: (row) => row.summary.forward + row.summary.backward, text: (row) => `${whole(row.summary.forward)} / ${whole(row.summary.backward)}` },
    { key: "seconds", title: "Time", ...plainly("seconds", duration) },
  ];
  if (target != null) {
    columns.push(
      { key: "rounds_to", title: `Rounds to ${state.data.monitor.share ? `${percent(target, 0)} %` : significant(target)}`, value: (row) => (row.summary.rounds_to || [null])[0], text: (row) => withDeviation(row.summary.rounds_to, whole), better: -1 },
      { key: "megabytes_to", title: "MB to it", value: (row) => (row.summary.megabytes_to || [null])[0], text: (row) => withDeviation(row.summary.megabytes_to, whole), better: -1 },
      { key: "seconds_to", title: "Seconds to it", value: (row) => (row.summary.seconds_to || [null])[0], text: (row) => withDeviation(row.summary.seconds_to, whole), better: -1 },
    );
  }
  return columns.filter((column) => column && (runs.length || column.key === "name"));
}

function roundsText(row) {
  const planned = Math.max(...row.runs.map((run) => run.rounds || 0));
  return row.runs.every((run) => run.finished) || !planned ? whole(row.done) : `${whole(row.done)} of ${whole(planned)}`;
}

function summaryRows() {
  return bundles(matching()).map((bundle) => ({
    ...bundle,
    done: Math.max(...bundle.runs.map((run) => run.done)),
    finished: bundle.runs.every((run) => run.finished),
    summary: bundle.runs.length === 1 && !state.together ? bundle.runs[0].summary : summaryTogether(bundle),
  }));
}

// Over seeds: accuracies as `fedflat compare` gives them, costs as means.
function summaryTogether(bundle) {
  const mean = (name) => {
    const values = bundle.runs.map((run) => run.summary[name]).filter((value) => value != null);
    return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
  };
  const costs = Object.fromEntries(["bytes_down", "bytes_up", "forward", "backward", "seconds", "loss"].map((name) => [name, mean(name)]));
  const ids = bundle.runs.map((run) => run.id);
  const group = state.data.groups.find((one) => one.runs.some((id) => ids.includes(id)));
  return { ...costs, ...(group ? group.summary : bundle.runs[0].summary) };
}

function sorted(rows, columns, sort) {
  const column = columns.find((one) => one.key === sort.column);
  if (!column) return rows;
  const sign = sort.down ? -1 : 1;
  return rows.map((row, place) => ({ row, place, value: column.value(row) })).sort((a, b) => {
    if (a.value == null || b.value == null) return (a.value == null) - (b.value == null) || a.place - b.place;
    return (a.value < b.value ? -sign : a.value > b.value ? sign : 0) || a.place - b.place;
  }).map((entry) => entry.row);
}

// A header cell whose button sorts; what was sorted up is sorted down when pressed again.
function sortingHead(column, sort, redraw) {
  const here = sort.column === column.key;
  const press = () => {
    sort.down = here ? !sort.down : column.key !== "name";
    sort.column = column.key;
    redraw();
  };
  const arrow = make("span", { class: "arrow", "aria-hidden": "true" }, here ? (sort.down ? "▾" : "▴") : "");
  const button = make("button", { type: "button", "data-key": `sort ${column.key}`, on: { click: press } }, column.title, arrow);
  const order = here ? (sort.down ? "descending" : "ascending") : "none";
  return make("th", { scope: "col", class: column.key === "name" || column.words ? "text" : "", "aria-sort": order }, button);
}

function bestOf(rows, column) {
  const values = rows.map(column.value).filter((value) => value != null);
  if (!column.better || values.length < 2) return null;
  return column.better > 0 ? Math.max(...values) : Math.min(...values);
}

function drawTable() {
  const columns = summaryColumns();
  const rows = sorted(summaryRows(), columns, state.sort);
  const best = new Map(columns.map((column) => [column.key, bestOf(rows, column)]));
  const head = make("thead", {}, make("tr", {}, ...columns.map((column) => sortingHead(column, state.sort, drawTable))));
  const body = make("tbody", {}, ...rows.map((row) => summaryRow(row, columns, best)));
  fill(find("table"), head, body);
  const shown = shownRuns().length;
  find("count").textContent = `${counted(state.data.runs.length, "run")}, ${shown} shown.`;
  const seeds = new Set(state.data.runs.map((run) => run.group)).size <= COLOURS.light.length;
  const inPerCent = "Accuracies in per cent.";
  find("legend-hint").textContent = state.data.runs.length > 1
    ? `A colour is an experiment${seeds && hasSeveralSeeds() && !state.together ? ", a line pattern a seed" : ""}, in every picture. ${inPerCent}` : inPerCent;
  const reported = state.data.runs.filter((run) => run.tested_by_clients);
  if (reported.length) {
    const whose = reported.length === state.data.runs.length ? "" : ` of ${reported.map((run) => run.label).join("; ")}`;
    find("legend-hint").textContent += ` Accuracy and loss${whose} are reported by clients: the server has no test set, and each client tests the model that it receives on its own test set, or else on what it trains on. The model of the last round has not been tested.`;
  }
}

function summaryRow(row, columns, best) {
  const ids = row.runs.map((run) => run.id);
  const on = ids.some((id) => !state.hidden.has(id));
  const box = make("input", {
    type: "checkbox", checked: on, "data-key": `show ${row.key}`, "aria-label": `Show ${row.label} in the charts`,
    on: { change: (event) => setShown(ids, event.target.checked) },
  });
  const words = make("span", { class: "words", title: row.label }, row.label);
  const first = make("th", { scope: "row" }, make("div", { class: "named" }, make("label", {}, box, swatch(row.style), words)));
  const cells = columns.slice(1).map((column) => make("td", {
    class: [best.get(column.key) != null && column.value(row) === best.get(column.key) ? "best" : "", column.key === "rounds" && !row.finished ? "state" : ""].join(" ").trim(),
  }, column.text(row)));
  return make("tr", { class: on ? "" : "off" }, first, ...cells);
}
