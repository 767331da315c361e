"use strict";
// Numbers and names as a person reads them.

const MISSING = "–";

function percent(value, digits = 2) {
  return value == null ? MISSING : `${(100 * value).toFixed(digits)}`;
}

function withDeviation(mean, write) {
  if (mean == null) return MISSING;
  return mean[1] == null ? write(mean[0]) : `${write(mean[0])} ± ${write(mean[1])}`;
}

function significant(value, digits = 4) {
  if (value == null) return MISSING;
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(digits - 2);
  return String(Number(value.toPrecision(digits)));
}

function whole(value) {
  return value == null ? MISSING : Math.round(value).toLocaleString("en");
}

function bytes(value) {
  if (value == null) return MISSING;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (value >= 1000 && power < units.length - 1) { value /= 1000; power += 1; }
  return `${Number(value.toPrecision(3))} ${units[power]}`;
}

function duration(seconds) {
  if (seconds == null) return MISSING;
  if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function counted(number, one, several) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : several || `${one}s`}`;
}

// The plotting library reads tags and entities in its texts: a run's name must not be read so.
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%\{/g, "% {");
}

function shortened(text, most) {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

const AXES = {
  rounds: { name: "rounds", format: ",~f" },
  bytes: { name: "traffic (bytes down + up)", format: "~s", suffix: "B" },
  passes: { name: "passes (forward + backward)", format: "~s" },
  seconds: { name: "seconds of training", format: "~s", suffix: "s" },
};

const QUANTITIES = {
  accuracy: { name: "accuracy", share: true },
  loss: { name: "test loss" },
  train_loss: { name: "train loss" },
  train_loss_std: { name: "train loss, deviation over clients" },
  lr: { name: "learning rate" },
  "client_accuracy.mean": { name: "client accuracy, mean", share: true },
  "client_accuracy.std": { name: "client accuracy, deviation", share: true },
  "client_accuracy.worst_decile": { name: "client accuracy, worst decile", share: true },
};

const QUANTITY_GROUPS = {
  "": "Always",
  metrics: "Metrics",
  client_accuracy: "Clients",
  accuracy_by_group: "Users or domains",
  measures: "Flatness",
  scalars: "Method",
};

// Where the server has no test set, clients test what they receive; null where some runs are of one kind, some of the other.
function testedByClients() {
  const kinds = new Set(state.data.runs.filter((run) => run.done).map((run) => run.tested_by_clients));
  return kinds.size === 1 ? [...kinds][0] : kinds.size ? null : false;
}

// The metric that runs are compared by, as numbers and in words.
function monitorName() {
  return state.data.monitor.title + (testedByClients() ? " reported by clients" : "");
}

function monitorText(value) {
  return state.data.monitor.share ? percent(value) : significant(value);
}

function accuracyName() {
  return testedByClients() ? "accuracy reported by clients" : "accuracy";
}

function lossName() {
  const reported = testedByClients();
  return reported === null ? "loss" : reported ? "loss reported by clients" : "test loss";
}

// A real federation's data is not where the report is made.
const NO_DATA = "The data is on the clients' own nodes, so that nothing can be measured on it here; ff.load_run(RUN, federation) gives the model, to measure on data that you have.";

function allOnNodes() {
  return state.data.runs.length > 0 && state.data.runs.every((run) => run.on_nodes);
}

function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

function quantityNamed(key) {
  const name = key.slice(key.indexOf(".") + 1);
  const found = QUANTITIES[key] || (key.startsWith("accuracy_by_group.") ? { name: `accuracy, ${name}`, share: true } : { name });
  return key === "accuracy" ? { ...found, name: accuracyName() } : key === "loss" ? { ...found, name: lossName() } : found;
}

function quantityGroup(key) {
  return key.includes(".") ? key.slice(0, key.indexOf(".")) : "";
}
