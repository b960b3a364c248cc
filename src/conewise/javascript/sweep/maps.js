// The maps: one figure for each part of the sweep, on one scale of colours whose middle is no effect.
import { byId, element } from "../page/elements.js";
import { hideTip, showTip } from "../page/tip.js";
import { counted, percent, shown } from "../page/words.js";
import { QUIET } from "./figures.js";
import { layoutOf, movedBy } from "./layout.js";
import { drawLegend } from "./legend.js";
import { arranged, frames, RIGHT, sizesOf, TOP, traces } from "./map_figure.js";
import { cells, listen, numbers, set, state, sweep } from "./state.js";

/** @import { Part } from "./cells.js" */
/** @import { PartMap } from "./map_figure.js" */

/** @type {PartMap[]} */
const maps = [];

// -- making ------------------------------------------------------------------------------------------

/**
 * The figure of a part, not drawn yet.
 * @param {Part} part
 * @returns {PartMap}
 */
function made(part) {
  const layout = layoutOf(part, cells, sweep.tokens);
  const plot = element("div", {
    class: "plot",
    tabindex: 0,
    role: "application",
    "aria-label": `${part.name}: ${counted(part.count, "site", "sites")}; arrow keys move, Enter chooses`,
  });
  const sizes = sizesOf(layout);
  const caption = element("figcaption", {}, part.name, element("small", {}, part.axes.join(" × ")));
  const figure = element(
    "figure",
    { class: layout.kind },
    caption,
    element("div", { class: "scroll" }, plot),
  );
  const isBars = layout.kind === "bars";
  // At least a pixel for each column: what is thinner would not be drawn at all.
  if (layout.columns > 300) plot.style.minWidth = `${layout.columns + sizes.left + 16}px`;
  const basis = isBars ? 220 : Math.min(860, Math.max(260, sizes.left + layout.columns * 16));
  figure.style.flexGrow = String(isBars ? 8 : Math.max(8, Math.min(layout.columns, 60)));
  figure.style.flexBasis = `${basis}px`;
  byId("figures").append(figure);
  return { part, layout, plot, keyed: null, ...sizes };
}

/**
 * Draw a map, and listen to it; called when all figures are there, so that each finds the width that it keeps.
 * @param {PartMap} map
 */
function draw(map) {
  Plotly.newPlot(map.plot, traces(map), arranged(map), { ...QUIET, doubleClick: "reset" });
  map.plot.addEventListener("keydown", event => press(map, event));
  map.plot.addEventListener("blur", hideTip);
  const plotted = /** @type {Plotly.Plotted} */ (map.plot);
  plotted.on("plotly_hover", ({ points, event }) => tell(cellAt(map, points[0]), event));
  plotted.on("plotly_unhover", hideTip);
  plotted.on("plotly_click", ({ points }) => choose(map, cellAt(map, points[0])));
}

// -- pointing and choosing -----------------------------------------------------------------------------

/**
 * The cell at a point of a map, or −1.
 * @param {PartMap} map
 * @param {Plotly.Point} point
 */
function cellAt({ part, layout }, point) {
  const column = layout.kind === "bars" ? 0 : Math.round(point.x);
  const own = Math.round(point.y) * layout.columns + column;
  return own < part.count ? part.start + own : -1;
}

/**
 * @param {PartMap} map
 * @param {number} cell
 */
function choose(map, cell) {
  if (cell < 0) return;
  map.keyed = cell;
  set({ site: cell });
}

/**
 * @param {number} cell
 * @param {{ clientX: number, clientY: number }} where
 */
function tell(cell, where) {
  if (cell < 0) {
    hideTip();
    return;
  }
  /** @type {Record<string, string>} */
  const facts = {
    value: shown(numbers.value(state.metric, cell)),
    effect: shown(numbers.effect(state.metric, cell), true),
  };
  if (numbers.source) facts["of the way"] = percent(numbers.share(state.metric, cell));
  showTip(cells.nameOf(cell), facts, where);
}

/**
 * The middle of a cell, in the window.
 * @param {PartMap} map
 * @param {number} own the number of the cell in its part
 */
function centre({ layout, plot, left, bottom, height }, own) {
  const { rows, columns } = layout;
  const box = plot.getBoundingClientRect();
  const across = ((own % columns) + 0.5) / columns;
  const down = (Math.floor(own / columns) + 0.5) / rows;
  return {
    clientX: box.left + left + across * (box.width - left - RIGHT),
    clientY: box.top + TOP + down * (height - bottom - TOP),
  };
}

/**
 * @param {PartMap} map
 * @param {KeyboardEvent} event
 */
function press(map, event) {
  const { start, count } = map.part;
  const next = movedBy(event.key, map.keyed === null ? null : map.keyed - start, map.layout, count);
  if (next !== null) {
    map.keyed = start + next;
    Plotly.relayout(map.plot, { shapes: frames(map) });
    tell(map.keyed, centre(map, next));
  } else if (event.key === "Enter" || event.key === " ") {
    choose(map, map.keyed ?? start);
  } else if (event.key === "Escape") {
    hideTip();
  } else {
    return;
  }
  event.preventDefault();
}

// -- keeping true --------------------------------------------------------------------------------------

export function redrawMaps() {
  drawLegend();
  for (const map of maps) Plotly.react(map.plot, traces(map), arranged(map));
}

export function startMaps() {
  drawLegend();
  maps.push(...cells.parts.map(made));
  maps.forEach(draw);
  listen(changed => {
    if (["metric", "shown", "range"].some(name => changed.has(name))) redrawMaps();
    else for (const map of maps) Plotly.relayout(map.plot, { shapes: frames(map) });
  });
}
