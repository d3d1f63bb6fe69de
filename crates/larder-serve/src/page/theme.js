// Light or dark colours: this browser's choice, or the system's. The script stands in the head, so that it is done before the first paint.
const THEME_KEY = "larder-theme";
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
let themeChoice = keptTheme();

/** The choice that is kept; the system's where there is none, or where the browser keeps nothing. */
function keptTheme() {
  try {
    const kept = localStorage.getItem(THEME_KEY);
    return ["light", "dark"].includes(kept) ? kept : "system";
  } catch {
    return "system";
  }
}

function keepTheme() {
  try {
    if (themeChoice === "system") localStorage.removeItem(THEME_KEY);
    else localStorage.setItem(THEME_KEY, themeChoice);
  } catch {
    // The choice then ends with the page.
  }
}

/** Sets the colours; `themechange` tells what draws them by itself. */
function applyTheme() {
  const isDark = themeChoice === "system" ? systemIsDark.matches : themeChoice === "dark";
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  document.dispatchEvent(new Event("themechange"));
}

function showTheme() {
  document.querySelector(`#theme [value="${themeChoice}"]`).checked = true;
}

applyTheme();
systemIsDark.addEventListener("change", applyTheme);
window.addEventListener("storage", ({ key }) => {
  // Another tab has chosen; without a key all was cleared.
  if (key !== THEME_KEY && key !== null) return;
  themeChoice = keptTheme();
  applyTheme();
  showTheme();
});
document.addEventListener("DOMContentLoaded", () => {
  showTheme();
  document.getElementById("theme").onchange = ({ target }) => {
    themeChoice = target.value;
    keepTheme();
    applyTheme();
  };
});
