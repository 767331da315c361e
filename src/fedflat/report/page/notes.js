// What is missing, run by run.

function drawNotes() {
  const { runs, left } = state.data;
  const noted = runs.filter((run) => run.notes.length);
  const place = find("notes");
  if (!noted.length && !left.length) { fill(place); return; }
  const before = place.querySelector("details");
  const parts = [noted.length && `Something is missing from ${counted(noted.length, "run")}`, left.length && `${counted(left.length, "run")} left out`];
  fill(place, make("details", { class: "notes", open: before ? before.open : noted.length + left.length <= 3 },
    make("summary", { "data-key": "notes" }, parts.filter(Boolean).join("; ")),
    make("ul", {},
      ...left.map((one) => make("li", {}, make("strong", {}, one.path), `, left out: ${one.why}`)),
      ...noted.map((run) => make("li", {}, make("strong", {}, run.label), `: ${run.notes.join(" ")}`)))));
}
