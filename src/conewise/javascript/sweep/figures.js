// What all figures of the page have in common.
import { style } from "../page/elements.js";

const NONE = "rgba(0,0,0,0)";

/** A figure without Plotly's buttons, as wide as its place. */
export const QUIET = { displayModeBar: false, responsive: true };

/** Hovering shows what `text` has, and nothing else. */
export const TOLD = { hoverinfo: "text" };

/**
 * The ground and the letters of a figure.
 * @param {number} size of letters
 * @param {string} [family]
 */
export const look = (size, family = "--sans") => ({
  paper_bgcolor: NONE,
  plot_bgcolor: NONE,
  font: { color: style("--soft"), size, family: style(family) },
});

/** An axis that cannot be moved. */
export const fixedAxis = () => ({ color: style("--soft"), fixedrange: true });

/**
 * A heading at the left, in small letters.
 * @param {string} text
 */
export const heading = text => ({ text, font: { size: 12 }, x: 0, xref: "paper" });

/**
 * The colour of an effect.
 * @param {number} effect
 */
export const sign = effect => style(effect < 0 ? "--less" : "--more");
