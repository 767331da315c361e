// Light or dark: as the system says, until the person says otherwise.

const darkSystem = window.matchMedia("(prefers-color-scheme: dark)");

function theme() {
  return document.documentElement.dataset.theme || "light";
}

function remembered() {
  try { return window.localStorage.getItem("fedflat-theme"); } catch { return null; }
}

function remember(value) {
  try { window.localStorage.setItem("fedflat-theme", value); } catch { /* a page from disk may not keep anything */ }
}

function setTheme(value) {
  document.documentElement.dataset.theme = value;
  const button = find("theme");
  button.textContent = value === "dark" ? "☀ Light" : "☾ Dark";
  button.setAttribute("aria-label", value === "dark" ? "Use light colours" : "Use dark colours");
}

function startTheme() {
  setTheme(remembered() || (darkSystem.matches ? "dark" : "light"));
  find("theme").addEventListener("click", () => {
    setTheme(theme() === "dark" ? "light" : "dark");
    remember(theme());
    drawAll();
  });
  darkSystem.addEventListener("change", () => {
    if (remembered()) return;
    setTheme(darkSystem.matches ? "dark" : "light");
    drawAll();
  });
}

function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
