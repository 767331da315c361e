// Elements from plain values. Text is only ever set as text, so that no name can become markup.

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  Object.entries(attributes).forEach(([name, value]) => {
    if (name === "on") Object.entries(value).forEach(([event, action]) => element.addEventListener(event, action));
    else if (name === "checked" || name === "open" || name === "selected") element[name] = value;
    else if (value != null && value !== false) element.setAttribute(name, value);
  });
  element.append(...children.filter((child) => child != null));
  return element;
}

function find(id) {
  return document.getElementById(id);
}

// Puts new content in the place of old, and the keyboard back where it was.
function fill(element, ...children) {
  const key = element.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const scrolled = element.parentElement ? [element.parentElement.scrollLeft, element.parentElement.scrollTop] : null;
  element.replaceChildren(...children.filter((child) => child != null));
  if (scrolled) [element.parentElement.scrollLeft, element.parentElement.scrollTop] = scrolled;
  if (key != null) {
    const again = [...element.querySelectorAll("[data-key]")].find((one) => one.dataset.key === key);
    if (again) again.focus({ preventScroll: true });
  }
}

const SVG = "http://www.w3.org/2000/svg";
const DASH_STEPS = ["", "7 3", "2 3", "7 3 2 3", "11 4"];

function swatch(style) {
  const picture = document.createElementNS(SVG, "svg");
  picture.setAttribute("viewBox", "0 0 26 12");
  picture.setAttribute("class", "swatch");
  picture.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(SVG, "line");
  Object.entries({ x1: 1, x2: 25, y1: 6, y2: 6, stroke: colour(style.colour), "stroke-dasharray": DASH_STEPS[style.dash] })
    .forEach(([name, value]) => line.setAttribute(name, value));
  picture.append(line);
  return picture;
}

function named(style, text) {
  return make("div", { class: "named" }, swatch(style), make("h3", {}, text));
}

function empty(...words) {
  return make("p", { class: "empty" }, ...words);
}

function scrolling(label, table, extra = "") {
  return make("div", { class: `scroll ${extra}`, tabindex: "0", role: "region", "aria-label": `${label}, scrolls sideways` }, table);
}

// Fills a list of choices without losing the one that is made.
function fillSelect(select, options, chosen) {
  const text = JSON.stringify(options);
  if (select.dataset.options !== text) {
    select.dataset.options = text;
    const groups = [...new Set(options.map((option) => option.group || ""))];
    const entries = (group) => options.filter((option) => (option.group || "") === group)
      .map((option) => make("option", { value: option.value }, option.name));
    select.replaceChildren(...groups.flatMap((group) => (group && groups.length > 1
      ? [make("optgroup", { label: group }, ...entries(group))] : entries(group))));
  }
  select.value = chosen;
}
