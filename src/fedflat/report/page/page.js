// Starts the page, and draws all of it.

function drawAbout() {
  const { runs, made, version } = state.data;
  const live = find("live");
  const going = runs.filter((run) => !run.finished).length;
  find("about").textContent = `${counted(runs.length, "run")}${going ? `, ${going} not finished` : ""} · ${made}`;
  if (live) find("about").append(" · ", live);
  find("foot").textContent = `Made by fedflat ${version}. This page holds all it shows and asks nothing of any network.`;
}

function drawAll() {
  drawAbout();
  drawNotes();
  drawTable();
  drawCurves();
  drawLegend();
  drawFlatness();
  drawSurfaces();
  drawSplits();
  drawPapers();
  drawSettings();
  drawRepeat();
}

function startTools() {
  find("filter").addEventListener("input", (event) => { state.filter = event.target.value; drawAll(); });
  find("together").addEventListener("change", (event) => { state.together = event.target.checked; drawAll(); });
  find("show-all").addEventListener("click", () => setShown(matching().map((run) => run.id), true));
  find("show-none").addEventListener("click", () => setShown(matching().map((run) => run.id), false));
}

function start() {
  adopt(JSON.parse(find("data").textContent));
  state.together = hasSeveralSeeds() && state.data.runs.length > 8;
  find("together").checked = state.together;
  startTheme();
  startTools();
  startCurves();
  drawAll();
  startSurfaces();
  startLive();
}

start();
