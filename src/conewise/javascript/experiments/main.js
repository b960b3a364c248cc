// Every figure of the page of experiments, in the colours of the page.
import { sentIn, style } from "../page/elements.js";

/** @type {Record<string, { data: Plotly.Values[], layout: Plotly.Values }>} */
const figures = sentIn("conewise-figures");

/** @type {NodeListOf<HTMLElement>} */
const plots = document.querySelectorAll(".plotly-graph-div");

/** Plotly draws text in a colour of its own: let it follow the page's. */
function follow() {
  for (const plot of plots) Plotly.relayout(plot, { "font.color": style("--ink") });
}

async function start() {
  const drawn = Array.from(plots, plot => {
    const { data, layout } = figures[plot.dataset.figure ?? ""];
    return Plotly.newPlot(plot, data, layout, { displayModeBar: false, responsive: true });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", follow);
  await Promise.all(drawn);
  follow();
  document.documentElement.dataset.ready = "true";
}

start();
