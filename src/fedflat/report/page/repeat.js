// How to get every run once more.

const opened = new Set();

function drawRepeat() {
  const runs = matching();
  fill(find("repeat-body"), ...runs.map((run) => repeatPart(run, runs.length === 1)));
}

function repeatPart(run, alone) {
  const details = make("details", { class: "fold", open: opened.has(run.id) || alone }, make("summary", { "data-key": run.id }, run.label));
  const build = () => { if (details.children.length === 1) details.append(repeatInside(run)); };
  details.addEventListener("toggle", () => { (details.open ? opened.add(run.id) : opened.delete(run.id)); if (details.open) build(); });
  if (details.open) build();
  return details;
}

function repeatInside(run) {
  const { commands, experiment, versions, commit, started, finished } = run.repeat;
  const about = [
    `Directory: ${run.id}`,
    Object.entries(versions).map(([name, version]) => `${name} ${version}`).join(", "),
    commit && `commit ${commit}`,
    started && `started ${started}`,
    finished && `finished ${finished}`,
  ].filter(Boolean);
  return make("div", { class: "inside" },
    ...commands.flatMap(({ what, command }) => [make("div", {}, what), commandLine(command)]),
    commands.length ? null : empty("It was started in Python: repeat it with the same arguments of ff.train, which run.json lists."),
    experiment ? make("pre", { tabindex: "0", "aria-label": `Experiment file of ${run.label}` }, experiment) : null,
    make("p", { class: "hint" }, about.join(" · ")));
}

function commandLine(command) {
  const button = make("button", { type: "button", on: { click: () => copy(command, button) } }, "Copy");
  return make("div", { class: "command" }, make("code", { tabindex: "0" }, command), button);
}

function copy(text, button) {
  const tell = (word) => { button.textContent = word; setTimeout(() => { button.textContent = "Copy"; }, 1500); };
  if (!navigator.clipboard) { tell("Select it by hand"); return; }
  navigator.clipboard.writeText(text).then(() => tell("Copied"), () => tell("Select it by hand"));
}
