// The page itself: the two views, what the address remembers, and the start.
"use strict";
(function (conewise) {
  const { data, names, state } = conewise;
  const root = document.documentElement;

  // -- light and dark ------------------------------------------------------------------------------
  conewise.whenDressed(() => {
    conewise.maps.redraw();
    conewise.site.show();
    conewise.spread.draw();
    conewise.inside.draw();
    speeds();
  });

  // -- the two views -------------------------------------------------------------------------------
  const tabs = ["results", "graph"].map(name => document.getElementById(`tab-${name}`));
  function open(name) {
    for (const tab of tabs) {
      const own = tab.id === `tab-${name}`;
      tab.setAttribute("aria-selected", String(own));
      tab.tabIndex = own ? 0 : -1;
      document.getElementById(`view-${tab.id.slice(4)}`).hidden = !own;
    }
    dispatchEvent(new Event("resize"));  // figures that were hidden find their width
    remember();
  }
  for (const tab of tabs) {
    tab.addEventListener("click", () => open(tab.id.slice(4)));
    tab.addEventListener("keydown", event => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const next = tabs[(tabs.indexOf(tab) + 1) % tabs.length];
      next.focus();
      open(next.id.slice(4));
    });
  }
  const view = () => tabs.find(tab => tab.getAttribute("aria-selected") === "true").id.slice(4);

  // -- what the address remembers --------------------------------------------------------------------
  let recalling = false;
  function remember() {
    if (recalling) return;
    const hash = new URLSearchParams();
    if (view() !== "results") hash.set("view", view());
    if (state.site >= 0) hash.set("site", names.nameOf(state.site));
    if (state.metric) hash.set("metric", data.metrics[state.metric]);
    if (state.shown !== "effect") hash.set("shown", state.shown);
    history.replaceState(null, "", `#${hash}`);
  }
  function recall() {
    const hash = new URLSearchParams(location.hash.slice(1));
    recalling = true;
    const metric = data.metrics.indexOf(hash.get("metric")), shown = hash.get("shown"), site = hash.get("site");
    if (metric > 0) { document.getElementById("metric").value = metric; conewise.set({ metric }); }
    const radio = [...document.querySelectorAll("[name=shown]")].find(one => one.value === shown);
    if (radio) { radio.checked = true; conewise.set({ shown }); }
    const cell = site === null ? -1 : names.find(site);
    if (cell >= 0) conewise.set({ site: cell });
    if (hash.get("view") === "graph") open("graph");
    recalling = false;
  }
  conewise.listen(remember);
  addEventListener("hashchange", recall);

  // -- what can be chosen ----------------------------------------------------------------------------
  document.getElementById("metric").addEventListener("change", event => conewise.set({ metric: Number(event.target.value) }));
  document.getElementById("range").addEventListener("change", event => conewise.set({ range: Number(event.target.value) }));
  for (const radio of document.querySelectorAll("[name=shown]")) {
    radio.addEventListener("change", () => conewise.set({ shown: radio.value }));
  }
  const copy = document.getElementById("copy");
  if (copy) copy.addEventListener("click", async () => {
    const command = document.getElementById("command");
    try {
      await navigator.clipboard.writeText(command.textContent);
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(command);
      copy.textContent = "Selected: press Ctrl+C";
    }
    setTimeout(() => { copy.textContent = "Copy"; }, 2500);
  });

  // -- what was saved, as a figure -------------------------------------------------------------------
  const shares = JSON.parse(document.getElementById("conewise-speeds").textContent);
  function speeds() {
    const style = name => getComputedStyle(root).getPropertyValue(name).trim();
    const labels = Object.keys(shares), found = Object.values(shares), ink = style("--soft");
    const axis = { color: ink, fixedrange: true, showgrid: false, zeroline: false };
    const bar = { type: "bar", orientation: "h", y: labels, hoverinfo: "none" };
    Plotly.react("speeds", [
      { ...bar, x: found.map(() => 1), marker: { color: style("--gap") } },
      { ...bar, x: found, width: 0.5, marker: { color: style("--link") }, textposition: "outside", cliponaxis: false,
        text: found.map(share => `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`), textfont: { color: style("--ink") } },
    ], {
      height: 60 + 38 * labels.length, barmode: "overlay", showlegend: false, margin: { l: 110, r: 24, t: 30, b: 12 },
      title: { text: "of what full re-runs take", font: { size: 12 }, x: 0, xref: "paper" },
      xaxis: { ...axis, range: [0, Math.max(1, ...found) * 1.02], visible: false }, yaxis: { ...axis, autorange: "reversed" },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 12, family: style("--sans") },
    }, { displayModeBar: false, responsive: true, staticPlot: true });
  }

  function start() {
    conewise.maps.start();
    conewise.table.start();
    conewise.spread.draw();
    conewise.inside.draw();
    speeds();
    recall();
    // Something to look at: the site with the largest effect.
    recalling = true;
    if (state.site < 0) conewise.set({ site: conewise.numbers.ranked(state.metric)[0] });
    recalling = false;
    root.dataset.ready = "true";
  }
  // The cone's script begins then too, and stands before this one.
  if (document.readyState === "loading") addEventListener("DOMContentLoaded", start); else start();
})(window.conewise);
