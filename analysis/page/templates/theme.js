"use strict";

// Light or dark, before anything is painted: what was chosen, else what the system prefers.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => {
    try { return localStorage.getItem("report-theme"); } catch { return null; }
  };
  const apply = () => {
    const theme = chosen() ?? (system.matches ? "dark" : "light");
    if (root.dataset.theme === theme) return;
    root.dataset.theme = theme;
    dispatchEvent(new Event("theme"));
  };
  apply();
  system.addEventListener("change", apply);
  window.toggleTheme = () => {
    const next = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("report-theme", next); } catch { /* not kept then */ }
    root.dataset.theme = next;
    dispatchEvent(new Event("theme"));
  };
})();
