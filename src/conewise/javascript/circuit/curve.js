// The curve: how faithful the circuits of all thresholds are, and this one.
import { maybeById, svgElement } from "../page/elements.js";
import { counted, shown, whole } from "../page/words.js";
import { curveScale, FRAME } from "./curve_scale.js";
import { circuit, listen, state } from "./state.js";
import { moveTo } from "./threshold.js";

/** @import { Measured } from "./curve_scale.js" */

/** @typedef {ReturnType<typeof curveScale>} Scale */

const area = maybeById("curve"); // none where nothing was measured
const RIGHT = FRAME.width - FRAME.right;

/**
 * Both axes: lines at 0 and 1, the numbers of edges at the ends.
 * @param {Scale} scale
 */
function axes({ y, ends }) {
  const lines = [0, 1].flatMap(value => [
    svgElement("line", { class: "axis", x1: FRAME.left, x2: RIGHT, y1: y(value), y2: y(value) }),
    svgElement("text", { x: FRAME.left - 8, y: y(value) + 4, "text-anchor": "end" }, String(value)),
  ]);
  const below = FRAME.height - 16;
  const middle = { x: (FRAME.left + RIGHT) / 2, y: FRAME.height - 4, "text-anchor": "middle" };
  return [
    ...lines,
    svgElement("text", { x: FRAME.left, y: below }, whole(ends[0])),
    svgElement("text", { x: RIGHT, y: below, "text-anchor": "end" }, whole(ends[1])),
    svgElement("text", middle, "edges, in logarithms"),
  ];
}

/**
 * A point of the curve, which can be chosen.
 * @param {Measured & { at: number }} one
 * @param {Scale} scale
 */
function dot({ edges, faithfulness, at }, { x, y }) {
  const made = svgElement(
    "circle",
    {
      class: `dot${at === state.stop ? " now" : ""}`,
      "data-stop": at,
      cx: x(edges),
      cy: y(faithfulness),
      r: 4.2,
    },
    svgElement("title", {}, `${counted(edges, "edge", "edges")}: ${shown(faithfulness)}`),
  );
  made.addEventListener("click", () => moveTo(at));
  return made;
}

/**
 * The circuit itself.
 * @param {Measured} own
 * @param {Scale} scale
 */
function diamond({ edges, faithfulness }, { x, y }) {
  const d = `M ${x(edges)} ${y(faithfulness) - 6} l 6 6 l -6 6 l -6 -6 z`;
  return svgElement(
    "path",
    { class: "this", d },
    svgElement("title", {}, `this circuit: ${shown(faithfulness)}`),
  );
}

/** The points of the curve that were measured, with their numbers. */
function measuredPoints() {
  return circuit.points.flatMap(([, edges, faithfulness], at) =>
    faithfulness === null ? [] : [{ edges, faithfulness, at }],
  );
}

/** @returns {Measured[]} */
function measuredOwn() {
  const { edges, faithfulness } = circuit.own;
  return faithfulness === null ? [] : [{ edges, faithfulness }];
}

function draw() {
  const points = measuredPoints();
  const own = measuredOwn();
  const scale = curveScale([...points, ...own]);
  const way = points.map(one => `${scale.x(one.edges).toFixed(1)},${scale.y(one.faithfulness).toFixed(1)}`);
  const named = { role: "img", "aria-label": "Faithfulness by the number of edges" };
  const made = svgElement("svg", { viewBox: `0 0 ${FRAME.width} ${FRAME.height}`, ...named });
  made.append(
    ...axes(scale),
    svgElement("polyline", { class: "way", points: way.join(" ") }),
    ...points.map(one => dot(one, scale)),
    ...own.map(one => diamond(one, scale)),
  );
  area?.replaceChildren(made);
}

export function startCurve() {
  if (area) listen(draw);
}
