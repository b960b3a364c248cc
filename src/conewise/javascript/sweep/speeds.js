// What was saved: the sweep's costs as shares of full re-runs.
import { sentIn, style } from "../page/elements.js";
import { shareOf } from "../page/words.js";
import { fixedAxis, heading, look, QUIET } from "./figures.js";

/** @type {Record<string, number>} */
const sent = sentIn("conewise-speeds");

export function drawSpeeds() {
  const labels = Object.keys(sent);
  const shares = Object.values(sent);
  const axis = { ...fixedAxis(), showgrid: false, zeroline: false };
  const bar = { type: "bar", orientation: "h", y: labels, hoverinfo: "none" };
  const all = { ...bar, x: shares.map(() => 1), marker: { color: style("--gap") } };
  const taken = {
    ...bar,
    x: shares,
    width: 0.5,
    marker: { color: style("--link") },
    text: shares.map(share => shareOf(share, 1, share < 0.1 ? 1 : 0)),
    textposition: "outside",
    cliponaxis: false,
    textfont: { color: style("--ink") },
  };
  const layout = {
    ...look(12),
    height: 60 + 38 * labels.length,
    margin: { l: 110, r: 24, t: 30, b: 12 },
    barmode: "overlay",
    showlegend: false,
    title: heading("of what full re-runs take"),
    xaxis: { ...axis, range: [0, Math.max(1, ...shares) * 1.02], visible: false },
    yaxis: { ...axis, autorange: "reversed" },
  };
  Plotly.react("speeds", [all, taken], layout, { ...QUIET, staticPlot: true });
}
