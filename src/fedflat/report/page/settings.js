// What differs between the experiments, and what they have in common.

function drawSettings() {
  const body = find("settings-body");
  const runs = matching().filter((run) => Object.keys(run.config).length);
  if (!runs.length) { fill(body, empty("No run says what it is.")); return; }
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  const differs = (key) => new Set(runs.map((run) => run.config[key] ?? "")).size > 1;
  const different = keys.filter(differs);
  const common = keys.filter((key) => !differs(key));
  const open = body.querySelector("details") ? body.querySelector("details").open : runs.length === 1;
  fill(body, different.length ? scrolling("Settings that differ", differenceTable(runs, different), "high") : empty(runs.length > 1 ? "All runs have the same settings." : ""), commonPart(runs[0], common, open));
}

function differenceTable(runs, keys) {
  const head = make("thead", {}, make("tr", {}, make("th", { scope: "col", class: "text" }, "Run"), ...keys.map((key) => make("th", { scope: "col", class: "text" }, key))));
  const rows = runs.map((run) => make("tr", {},
    make("th", { scope: "row" }, make("div", { class: "named" }, swatch(run.style), make("span", { class: "words", title: run.label }, run.label))),
    ...keys.map((key) => make("td", { class: "text" }, run.config[key] || MISSING))));
  return make("table", {}, head, make("tbody", {}, ...rows));
}

function commonPart(run, keys, open) {
  const rows = keys.map((key) => make("tr", {}, make("th", { scope: "row" }, key), make("td", { class: "text" }, run.config[key] || MISSING)));
  return make("details", { class: "fold", open }, make("summary", { "data-key": "common" }, `In common: ${counted(keys.length, "setting")}`),
    make("div", { class: "inside scroll" }, make("table", {}, make("tbody", {}, ...rows))));
}
