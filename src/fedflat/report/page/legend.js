// Which line is which; pressing one hides or shows it everywhere.

const LEGEND_MOST = 12;

function drawLegend() {
  const entries = bundles(matching());
  const some = state.legendOpen || entries.length <= LEGEND_MOST ? entries : entries.slice(0, LEGEND_MOST);
  const more = entries.length > LEGEND_MOST ? make("button", {
    type: "button", class: "plain", "data-key": "more", "aria-expanded": String(state.legendOpen),
    on: { click: () => { state.legendOpen = !state.legendOpen; drawLegend(); } },
  }, state.legendOpen ? "Fewer" : `All ${entries.length}`) : null;
  fill(find("legend"), ...some.map(legendButton), more);
}

function legendButton(entry) {
  const ids = entry.runs.map((run) => run.id);
  const on = ids.some((id) => !state.hidden.has(id));
  return make("button", {
    type: "button", "aria-pressed": String(on), "data-key": entry.key, title: entry.label,
    on: { click: () => setShown(ids, !on) },
  }, swatch(entry.style), make("span", {}, entry.label));
}
