// Ours beside the papers' numbers, for runs that are cells of their tables.

const papersSort = { column: null, down: true };

function drawPapers() {
  const body = find("papers-body");
  const groups = new Set(matching().map((run) => run.group));
  const entries = state.data.published.filter((entry) => groups.has(entry.group));
  if (!entries.length) {
    fill(body, empty("None of these runs is a cell of a paper's table: ", make("code", {}, "fedflat papers"), " lists the tables, ", make("code", {}, "fedflat reproduce"), " runs them."));
    return;
  }
  if (!find("papers-table")) {
    fill(body, scrolling("Papers' numbers", make("table", { id: "papers-table" }), "high"), make("p", { class: "hint", id: "papers-hint" }));
  }
  drawPapersTable(entries);
  const misprints = entries.filter((entry) => entry.misprint).map((entry) => `${entry.row}, ${entry.column}: ${entry.misprint}`);
  const notes = entries.flatMap((entry) => entry.notes);
  const marked = notes.length ? ["‡ The data or the protocol are not the paper's:", ...new Set(notes)] : [];
  find("papers-hint").textContent = ["± over seeds. A run is compared with a table if its experiment is the table's, seeds and machine aside.", ...marked, ...new Set(misprints)].join(" ");
}

function drawPapersTable(entries) {
  const share = (entry) => entry.unit === "percent" || entry.unit === "fraction";
  const scale = (entry) => (entry.unit === "fraction" ? 100 : 1);
  const number = (entry, value) => (value == null ? MISSING : share(entry) ? (scale(entry) * value).toFixed(2) : significant(value));
  const both = (entry, value, deviation) => number(entry, value) + (deviation == null ? "" : ` ± ${number(entry, deviation)}`);
  const gap = (entry) => (entry.ours == null || entry.paper == null ? null : scale(entry) * (entry.ours - entry.paper));
  const columns = [
    { key: "name", title: "Method", value: (e) => e.row.toLowerCase(), text: (e) => e.row },
    { key: "where", title: "Table", value: (e) => e.where, text: (e) => e.where, words: true },
    { key: "column", title: "Setting", value: (e) => e.column, text: (e) => e.column, words: true },
    { key: "statistic", title: "Statistic", value: (e) => e.statistic, text: (e) => e.statistic, words: true },
    { key: "seeds", title: "Seeds", value: (e) => e.seeds, text: (e) => `${e.seeds}${e.unfinished ? " (unfinished)" : ""}` },
    { key: "ours", title: "Ours", value: (e) => e.ours, text: (e) => both(e, e.ours, e.ours_std) },
    { key: "paper", title: "Paper", value: (e) => e.paper, text: (e) => e.paper_note || both(e, e.paper, e.paper_std) },
    { key: "gap", title: "Difference", value: gap, text: (e) => (gap(e) == null ? MISSING : `${gap(e) >= 0 ? "+" : "−"}${number({ ...e, unit: share(e) ? "percent" : e.unit }, Math.abs(gap(e)))}${e.notes.length ? " ‡" : ""}`) },
  ];
  const head = make("thead", {}, make("tr", {}, ...columns.map((column) => sortingHead(column, papersSort, () => drawPapersTable(entries)))));
  const rows = sorted(entries, columns, papersSort).map((entry) => make("tr", {},
    make("th", { scope: "row" }, columns[0].text(entry)),
    ...columns.slice(1).map((column) => make("td", { class: column.words ? "text" : "" }, column.text(entry)))));
  fill(find("papers-table"), head, make("tbody", {}, ...rows));
}
