// What the person has chosen, and which runs that leaves. New data never changes a choice.

const state = {
  data: null,
  hidden: new Set(),
  filter: "",
  sort: { column: null, down: true },
  together: false,
  quantity: null,
  axis: "rounds",
  smooth: 1,
  logarithmic: false,
  measure: null,
  surface: { part: null, logarithmic: false, camera: null },
  legendOpen: false,
  splitsOpen: false,
};

const COLOURS = {
  light: ["#0067a5", "#c44e00", "#00795a", "#a8478c", "#8a6100", "#5b62c9", "#4b5563"],
  dark: ["#5fb0ee", "#ff8f4d", "#35c79b", "#e58cc6", "#e5bd4a", "#a6a9ff", "#c2cad4"],
};
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const SYMBOLS = ["circle", "diamond", "square", "triangle-up", "x"];

function seedText(run) {
  return run.seed == null ? "" : `seed ${run.seed}`;
}

// Takes over new data: names that tell runs apart, and a style that stays with an experiment.
function adopt(data) {
  state.data = data;
  const groups = [...new Set(data.runs.map((run) => run.group))];
  const members = new Map(groups.map((group) => [group, data.runs.filter((run) => run.group === group)]));
  const severalSeeds = new Set(data.runs.map((run) => run.seed)).size > 1;
  const few = groups.length <= COLOURS.light.length;
  data.runs.forEach((run) => {
    const group = groups.indexOf(run.group);
    const dash = few ? members.get(run.group).indexOf(run) : Math.floor(group / COLOURS.light.length);
    run.style = { colour: group % COLOURS.light.length, dash: dash % DASHES.length };
    run.label = severalSeeds && run.seed != null ? `${run.name} · ${seedText(run)}` : run.name;
  });
  tellApart(data.runs);
  data.runs.forEach((run) => { run.words = searchable(run); });
}

function tellApart(runs) {
  const times = new Map();
  runs.forEach((run) => times.set(run.label, (times.get(run.label) || 0) + 1));
  runs.forEach((run) => { if (times.get(run.label) > 1 && run.label !== run.id) run.label += ` (${run.id})`; });
}

function searchable(run) {
  const settings = Object.entries(run.config).map(([key, value]) => `${key}=${value}`);
  return [run.label, run.id, run.method, seedText(run), ...settings].join(" ").toLowerCase();
}

function colour(index) {
  return COLOURS[theme()][index];
}

// Every word must be in a run's name, directory or settings; "seed 1" is that seed and no other.
function matching() {
  const wanted = state.filter.toLowerCase().match(/seed[\s=]*\d+|[^\s,]+/g) || [];
  const has = (run, word) => {
    const seed = word.match(/^seed[\s=]*(\d+)$/);
    return seed ? run.seed === Number(seed[1]) : run.words.includes(word);
  };
  return state.data.runs.filter((run) => wanted.every((word) => has(run, word)));
}

function shownRuns() {
  return matching().filter((run) => !state.hidden.has(run.id));
}

// Runs of one experiment, if seeds are taken together; otherwise every run for itself.
function bundles(runs) {
  if (!state.together) {
    return runs.map((run) => ({ key: run.id, label: run.label, runs: [run], style: run.style }));
  }
  const found = new Map();
  runs.forEach((run) => {
    if (!found.has(run.group)) {
      const dash = Math.floor([...new Set(state.data.runs.map((r) => r.group))].indexOf(run.group) / COLOURS.light.length);
      const style = { colour: run.style.colour, dash: dash % DASHES.length };
      found.set(run.group, { key: run.group, label: run.name, runs: [], style });
    }
    found.get(run.group).runs.push(run);
  });
  return [...found.values()];
}

function hasSeveralSeeds() {
  return new Set(state.data.runs.map((run) => run.group)).size < state.data.runs.length;
}

function setShown(ids, shown) {
  ids.forEach((id) => (shown ? state.hidden.delete(id) : state.hidden.add(id)));
  drawAll();
}
