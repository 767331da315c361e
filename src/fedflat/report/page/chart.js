// The plotting library, in this page's colours and manners.

const CONFIG = {
  displaylogo: false,
  responsive: true,
  showTips: false,
  modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d", "resetCameraLastSave3d", "tableRotation"],
};

function narrow() {
  return window.innerWidth < 640;
}

function axisLook(extra = {}) {
  return {
    gridcolor: themed("--line"), zerolinecolor: themed("--line"), linecolor: themed("--line"),
    tickfont: { color: themed("--soft") }, automargin: true, ...extra,
    title: { text: extra.title || "", font: { color: themed("--soft"), size: 13 }, standoff: 8 },
  };
}

function look(extra) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, autosize: true,
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: themed("--ink") },
    margin: { l: narrow() ? 44 : 60, r: 12, t: 14, b: 46 },
    hoverlabel: { bgcolor: themed("--card"), bordercolor: themed("--line"), font: { color: themed("--ink"), size: 12 }, namelength: 40 },
    ...extra,
  };
}

// A chart is as wide as its place, also when the page around it moves.
const resizer = new ResizeObserver((entries) => entries.forEach(({ target }) => {
  const drawn = target._fullLayout;
  if (drawn && target.clientWidth && Math.abs(drawn.width - target.clientWidth) > 1) Plotly.Plots.resize(target);
}));

// Draws or redraws a chart in an element, and says in words what it shows.
function draw(element, traces, layout, words) {
  element.setAttribute("aria-label", words);
  resizer.observe(element);
  return Plotly.react(element, traces, look({ uirevision: "kept", ...layout }), { ...CONFIG, displayModeBar: narrow() ? false : "hover" });
}

function lineOf(style, width = 2) {
  return { color: colour(style.colour), dash: DASHES[style.dash], width };
}

function fainter(hex, opacity) {
  const parts = [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
  return `rgba(${parts.join(",")},${opacity})`;
}
