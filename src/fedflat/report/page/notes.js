// What to know before comparing runs with a paper, and what is missing, run by run.

function drawNotes() {
  const { runs, left } = state.data;
  const noted = runs.filter((run) => run.notes.length);
  const caveats = new Map();
  runs.forEach((run) => run.caveats.forEach((sentence) => caveats.set(sentence, [...(caveats.get(sentence) || []), run])));
  const place = find("notes");
  if (!noted.length && !left.length && !caveats.size) { fill(place); return; }
  const before = place.querySelector("details");
  const unlike = runs.filter((run) => run.caveats.length).length;
  const parts = [unlike && `${counted(unlike, "run")} with data or settings unlike a paper's`, noted.length && `Something is missing from ${counted(noted.length, "run")}`, left.length && `${counted(left.length, "run")} left out`];
  fill(place, make("details", { class: "notes", open: before ? before.open : noted.length + left.length + caveats.size <= 3 },
    make("summary", { "data-key": "notes" }, parts.filter(Boolean).join("; ")),
    make("ul", {},
      ...[...caveats].map(([sentence, those]) => make("li", {}, make("strong", {}, those.length === 1 ? those[0].label : counted(those.length, "run")), `: ${sentence}`)),
      ...left.map((one) => make("li", {}, make("strong", {}, one.path), `, left out: ${one.why}`)),
      ...noted.map((run) => make("li", {}, make("strong", {}, run.label), `: ${run.notes.join(" ")}`)))));
}
