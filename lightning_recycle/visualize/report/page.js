"use strict";
(() => {
  // The theme: of the system, light or dark; remembered where the browser allows it.
  const themes = ["system", "light", "dark"], button = document.getElementById("theme"), root = document.documentElement;
  const show = (theme) => {
    if (theme === "system") delete root.dataset.theme; else root.dataset.theme = theme;
    button.textContent = "Theme: " + theme;
  };
  let theme = "system";
  try { theme = localStorage.getItem("recycle-theme") || theme; } catch (error) { /* no storage for files here */ }
  show(themes.includes(theme) ? theme : "system");
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    show(theme);
    try { localStorage.setItem("recycle-theme", theme); } catch (error) { /* it is the page's theme until it is closed */ }
  });

  // Legends: a series is drawn unless one of its names is switched off.
  for (const legend of document.querySelectorAll(".legend")) {
    const charts = legend.nextElementSibling, off = new Set();
    legend.addEventListener("click", (event) => {
      const item = event.target.closest("button");
      if (!item) return;
      const key = "s-" + item.dataset.series, pressed = item.getAttribute("aria-pressed") === "true";
      item.setAttribute("aria-pressed", String(!pressed));
      if (pressed) off.add(key); else off.delete(key);
      for (const series of charts.querySelectorAll(".series")) {
        series.classList.toggle("off-series", [...series.classList].some((name) => off.has(name)));
      }
    });
  }

  // What is under the pointer, or was touched last.
  const tip = document.getElementById("tip");
  const point = (event) => {
    const target = event.target.closest && event.target.closest("[data-tip]");
    tip.hidden = !target;
    if (!target) return;
    tip.textContent = target.dataset.tip;
    const width = tip.offsetWidth, height = tip.offsetHeight;
    tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - width - 4)) + "px";
    tip.style.top = (event.clientY - height - 10 < 4 ? event.clientY + 16 : event.clientY - height - 10) + "px";
  };
  addEventListener("pointermove", point);
  addEventListener("pointerdown", point);
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
})();
