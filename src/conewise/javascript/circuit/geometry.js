// Where the boxes, edges and layers of the picture lie, in pixels.

/** @import { SentCircuit, SentEdge } from "../sent.js" */

/**
 * @typedef {object} Box
 * @property {string} name
 * @property {string} kind
 * @property {number | null} layer
 * @property {number} x of the middle
 * @property {number} y of the middle
 */

export const BOX = { width: 46, height: 20 };
export const ROW = 50;
const LEFT = 62;
const TOP = 26;
const RIGHT = 12;
const BOTTOM = 30;
const CELL = { least: 50, most: 66 };

/**
 * How the picture is laid out on a stage of this width; its columns are as wide as there is room for.
 * @param {SentCircuit} circuit
 * @param {number} room width of the stage
 */
export function geometry(circuit, room) {
  const cell = Math.max(CELL.least, Math.min(CELL.most, (room - LEFT - RIGHT) / circuit.columns));
  /** @param {number} column */
  const across = column => LEFT + (column + 0.5) * cell;
  /** @param {number} row */
  const down = row => TOP + row * ROW;
  /** @type {Box[]} */
  const boxes = circuit.boxes.map(([name, kind, layer, x, y]) => ({
    name,
    kind,
    layer,
    x: across(x),
    y: down(y),
  }));

  /**
   * The curve of an edge, from the bottom of one box to the top of another, as SVG writes it.
   * @param {SentEdge} edge
   */
  function path(edge) {
    const half = BOX.height / 2;
    const [start, leave, arrive, stop] = edge.curve.map(([x, y], at) =>
      [across(x), down(y) + (at < 2 ? half : -half)].map(number => number.toFixed(1)).join(" "),
    );
    return `M ${start} C ${leave}, ${arrive}, ${stop}`;
  }

  return {
    width: LEFT + circuit.columns * cell + RIGHT,
    height: TOP + Math.max(0, circuit.rows - 1) * ROW + BOTTOM,
    boxes,
    path,
  };
}

/**
 * The layers in their order, each with the heights of its highest and its lowest box.
 * @param {Box[]} boxes
 * @returns {{ layer: number, top: number, bottom: number }[]}
 */
export function layersOf(boxes) {
  const found = new Map();
  for (const { layer, y } of boxes) {
    if (layer === null) continue;
    const known = found.get(layer) ?? { layer, top: y, bottom: y };
    found.set(layer, { layer, top: Math.min(known.top, y), bottom: Math.max(known.bottom, y) });
  }
  return [...found.values()].sort((one, other) => one.layer - other.layer);
}

/**
 * How thick the line of an edge is, beside the strongest one.
 * @param {number | null} score
 * @param {number} largest
 */
export function thickness(score, largest) {
  if (score === null) return 1.3;
  return 0.8 + 4.2 * (largest ? Math.abs(score) / largest : 0);
}
