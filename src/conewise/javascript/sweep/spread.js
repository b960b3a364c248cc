// How the effects of the strongest sites spread over the prompts: a dot for each, the mean and its interval.
import { maybeById, style } from "../page/elements.js";
import { plain, shown } from "../page/words.js";
import { fixedAxis, look, QUIET, sign, TOLD } from "./figures.js";
import { cells, listen, numbers, state, sweep } from "./state.js";
import { spreadOf } from "./statistics.js";

const MOST = 12; // sites
const plot = maybeById("spread-figure"); // none where there is one prompt

/** The strongest sites that have a finite effect on some prompt, with their labels and rows. */
function strongest() {
  return Array.from(numbers.ranked(state.metric).slice(0, MOST), (cell, row) => ({
    row,
    label: plain(cells.nameOf(cell)),
    spread: spreadOf(numbers.byPrompt(state.metric, cell).map(one => one.effect)),
  }));
}

/** @typedef {ReturnType<typeof strongest>} Sites */

/**
 * @param {Sites} sites
 */
function dots(sites) {
  const points = sites.flatMap(({ row, label, spread }) =>
    (spread?.points ?? []).map(({ effect, prompt }) => ({
      row,
      effect,
      text: `${label}<br>${sweep.unit} ${prompt + 1}: ${shown(effect, true)}`,
    })),
  );
  return {
    type: "scatter",
    mode: "markers",
    ...TOLD,
    x: points.map(one => one.effect),
    y: points.map(one => one.row),
    text: points.map(one => one.text),
    marker: { size: 7, opacity: 0.45, color: points.map(one => sign(one.effect)) },
  };
}

/**
 * @param {Sites} sites
 */
function means(sites) {
  const ink = style("--ink");
  const found = sites.flatMap(({ row, label, spread }) => (spread ? [{ row, label, ...spread }] : []));
  return {
    type: "scatter",
    mode: "markers",
    ...TOLD,
    x: found.map(one => one.mean),
    y: found.map(one => one.row),
    text: found.map(one => `${one.label}<br>mean ${shown(one.mean, true)} ± ${shown(one.half)}`),
    error_x: { type: "data", array: found.map(one => one.half), color: ink, thickness: 1.5, width: 5 },
    marker: { size: 9, symbol: "line-ns", color: ink, line: { width: 2, color: ink } },
  };
}

export function drawSpread() {
  if (!plot || !numbers.hasPrompts) return;
  const sites = strongest();
  const narrow = matchMedia("(max-width: 640px)").matches;
  // On a narrow page the numbers alone: resid_pre[1, 14].
  const labels = sites.map(({ label }) => (narrow ? label.replace(/[a-z_]+=/g, "") : label));
  const title = { text: plain(`effect on ${sweep.metrics[state.metric]}`), font: { size: 12 } };
  const layout = {
    ...look(12),
    height: 70 + 26 * sites.length,
    margin: { l: narrow ? 120 : 210, r: 12, t: 8, b: 44 },
    showlegend: false,
    hovermode: "closest",
    xaxis: { ...fixedAxis(), title, gridcolor: style("--line"), zerolinecolor: style("--soft"), nticks: 6 },
    yaxis: {
      ...fixedAxis(),
      showgrid: false,
      zeroline: false,
      tickvals: sites.map(one => one.row),
      ticktext: labels,
      range: [sites.length - 0.4, -0.6],
    },
  };
  Plotly.react(plot, [dots(sites), means(sites)], layout, QUIET);
}

export function startSpread() {
  drawSpread();
  listen(changed => {
    if (changed.has("metric")) drawSpread();
  });
}
