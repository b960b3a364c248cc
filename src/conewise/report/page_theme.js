// Light and dark: as the system has it, or as the button says; remembered where a page may.
"use strict";
window.conewise = window.conewise || {};
(function (conewise) {
  const THEMES = ["auto", "light", "dark"];
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme"), listeners = [];
  conewise.isDark = () => root.dataset.theme === "dark" || (root.dataset.theme !== "light" && system.matches);
  // Call `act` when the colours have changed.
  conewise.whenDressed = act => listeners.push(act);
  const redress = () => { for (const act of listeners) act(); };
  function dress(theme) {
    if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
    button.querySelector("span").textContent = theme;
    try { localStorage.setItem("conewise-theme", theme); } catch { /* a page from disk may have no storage */ }
  }
  button.addEventListener("click", () => {
    dress(THEMES[(THEMES.indexOf(root.dataset.theme || "auto") + 1) % 3]);
    redress();
  });
  let kept = "auto";
  try { kept = localStorage.getItem("conewise-theme") || "auto"; } catch { /* as above */ }
  dress(THEMES.includes(kept) ? kept : "auto");
  system.addEventListener("change", redress);
})(window.conewise);
