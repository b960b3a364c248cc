// One map: what Plotly draws of a part of the sweep, in the colours that all maps share.
import { style } from "../page/elements.js";
import { plain } from "../page/words.js";
import { look } from "./figures.js";
import { longestOf, rowsOf, ticksOf } from "./layout.js";
import { colourAt, rgb } from "./scale.js";
import { colours, middle, reach, shownNumbers } from "./shown_scale.js";
import { state } from "./state.js";

/** @import { Part } from "./cells.js" */
/** @import { Layout } from "./layout.js" */

/**
 * `keyed` is the cell under the keys, `wordy` says that columns have words below them.
 * @typedef {object} PartMap
 * @property {Part} part
 * @property {Layout} layout
 * @property {HTMLElement} plot
 * @property {number | null} keyed
 * @property {boolean} wordy
 * @property {number} left
 * @property {number} bottom
 * @property {number} height
 */

export const TOP = 8;
export const RIGHT = 12;
const HEADINGS = { effect: "effect", share: "share of the way", value: "value" };

// -- its size ----------------------------------------------------------------------------------------

/**
 * @param {number} rows
 */
function rowHeight(rows) {
  if (rows <= 16) return 24;
  if (rows <= 40) return 16;
  return rows <= 90 ? 10 : Math.max(1, 640 / rows);
}

/**
 * The margins and the height that a layout needs.
 * @param {Layout} layout
 */
export function sizesOf(layout) {
  const wordy = layout.heads.some(head => head.length > 5);
  const bottom = wordy ? 92 : 44;
  return {
    wordy,
    left: Math.min(230, 34 + longestOf(layout.labels) * 6.6),
    bottom,
    height: Math.round(layout.rows * rowHeight(layout.rows)) + bottom + TOP + 4,
  };
}

// -- what is drawn -----------------------------------------------------------------------------------

/**
 * @param {PartMap} map
 */
export function traces({ part, layout }) {
  const own = shownNumbers().subarray(part.start, part.start + part.count);
  return [layout.kind === "bars" ? barTrace(own, layout) : mapTrace(own, layout)];
}

/**
 * @param {Float64Array} own the numbers of the part
 * @param {Layout} layout
 */
function barTrace(own, { labels }) {
  const centre = middle();
  const far = reach();
  return {
    type: "bar",
    orientation: "h",
    hoverinfo: "none",
    base: centre,
    x: Array.from(own, number => number - centre),
    y: labels.map((_, place) => place),
    marker: {
      color: Array.from(own, number => colourAt(colours(), (number - centre) / far)),
      line: { color: style("--soft"), width: 0.7 },
    },
  };
}

/**
 * @param {Float64Array} own the numbers of the part
 * @param {Layout} layout
 */
function mapTrace(own, layout) {
  const gap = layout.rows <= 90 && layout.columns <= 60 ? 1 : 0;
  return {
    type: "heatmap",
    hoverinfo: "none",
    showscale: false,
    xgap: gap,
    ygap: gap,
    z: rowsOf(own, layout),
    zmin: middle() - reach(),
    zmax: middle() + reach(),
    colorscale: colours().map((one, place, all) => [place / (all.length - 1), rgb(one)]),
  };
}

/**
 * @param {PartMap} map
 */
export function arranged(map) {
  const { layout, left, bottom, height } = map;
  const looks = look(11.5);
  return {
    ...looks,
    height,
    margin: { l: left, r: RIGHT, t: TOP, b: bottom },
    bargap: 0.25,
    xaxis: layout.kind === "bars" ? barAxis() : mapAxis(map),
    yaxis: rowAxis(map),
    shapes: frames(map),
    hoverlabel: { namelength: 0 },
    uirevision: "kept",
    plot_bgcolor: layout.kind === "map" ? style("--gap") : looks.plot_bgcolor,
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
  };
}

const axis = () => ({
  color: style("--soft"),
  linecolor: style("--line"),
  ticks: "",
  fixedrange: false,
  zeroline: false,
  showgrid: false,
});

/**
 * @param {string[]} labels
 * @param {number} room
 */
function ticks(labels, room) {
  const { places, texts } = ticksOf(labels, room);
  return { tickvals: places, ticktext: texts.map(plain) };
}

/**
 * @param {PartMap} map
 */
const rowAxis = ({ layout, height, bottom }) => ({
  ...axis(),
  ...ticks(layout.labels, Math.max(4, Math.floor((height - bottom) / 15))),
  range: [layout.rows - 0.5, -0.5],
  title: { text: plain(layout.title), standoff: 6 },
});

/**
 * @param {PartMap} map
 */
const mapAxis = ({ layout, wordy }) => ({
  ...axis(),
  ...ticks(layout.heads, wordy ? 60 : 24),
  range: [-0.5, layout.columns - 0.5],
  title: { text: plain(layout.across), standoff: 8 },
  tickangle: wordy ? -50 : 0,
});

const barAxis = () => ({
  ...axis(),
  showgrid: true,
  gridcolor: style("--line"),
  zeroline: true,
  zerolinecolor: style("--line"),
  title: { text: HEADINGS[state.shown], standoff: 8 },
  nticks: 4,
  tickformat: state.shown === "share" ? ".0%" : "",
});

/**
 * Frames around the chosen site, light around dark, so that it is seen on any colour, and around the one under
 * the keys.
 * @param {PartMap} map
 */
export function frames(map) {
  return [
    ...frame(map, state.site, { color: style("--page"), width: 4.5, dash: "solid" }),
    ...frame(map, state.site, { color: style("--ink"), width: 2, dash: "solid" }),
    ...frame(map, map.keyed ?? -1, { color: style("--link"), width: 2, dash: "dot" }),
  ];
}

/**
 * A frame around a cell, where the map has it.
 * @param {PartMap} map
 * @param {number} cell
 * @param {Record<string, string | number>} line
 */
function frame({ part, layout }, cell, line) {
  const own = cell - part.start;
  if (own < 0 || own >= part.count) return [];
  const row = Math.floor(own / layout.columns);
  const column = own % layout.columns;
  const across =
    layout.kind === "bars" ? { xref: "paper", x0: 0, x1: 1 } : { x0: column - 0.5, x1: column + 0.5 };
  return [{ type: "rect", ...across, y0: row - 0.5, y1: row + 0.5, line }];
}
