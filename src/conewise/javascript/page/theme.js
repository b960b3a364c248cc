// Light and dark: as the system has it, or as the button says; remembered where a page may.
import { byId, inside } from "./elements.js";

const THEMES = ["auto", "light", "dark"];
const root = document.documentElement;
const system = matchMedia("(prefers-color-scheme: dark)");

/** @type {(() => void)[]} */
const listeners = [];

export const isDark = () =>
  root.dataset.theme === "dark" || (root.dataset.theme !== "light" && system.matches);

/**
 * Call `act` when the colours have changed.
 * @param {() => void} act
 */
export function whenDressed(act) {
  listeners.push(act);
}

function redress() {
  for (const act of listeners) act();
}

/**
 * @param {string} theme
 */
function dress(theme) {
  if (theme === "auto") delete root.dataset.theme;
  else root.dataset.theme = theme;
  inside(byId("theme"), "span").textContent = theme;
  try {
    localStorage.setItem("conewise-theme", theme);
  } catch {
    // A page from disk may have no storage.
  }
}

function remembered() {
  try {
    return localStorage.getItem("conewise-theme") ?? "auto";
  } catch {
    return "auto";
  }
}

export function startTheme() {
  byId("theme").addEventListener("click", () => {
    dress(THEMES[(THEMES.indexOf(root.dataset.theme ?? "auto") + 1) % THEMES.length]);
    redress();
  });
  const kept = remembered();
  dress(THEMES.includes(kept) ? kept : "auto");
  system.addEventListener("change", redress);
}
