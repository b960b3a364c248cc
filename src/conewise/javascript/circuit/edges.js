// A circuit's edges as data: which are shown, in which order, and how strong the strongest is.

/** @import { SentCircuit, SentEdge } from "../sent.js" */

/**
 * What is pointed at or chosen: the number of an edge, or of a box.
 * @typedef {{ kind: "edge" | "box", at: number }} Chosen
 */

/**
 * The circuit of a point of the curve, or the circuit itself.
 * @typedef {{ threshold: number | null, edges: number, faithfulness: number | null }} Stop
 */

/** The stop that is the circuit itself, and no point of its curve. */
export const OWN = -1;

/**
 * @param {SentCircuit} circuit
 * @param {number} stop the number of a point of the curve, or OWN
 * @returns {Stop}
 */
export function stopOf(circuit, stop) {
  if (stop === OWN) return { threshold: null, ...circuit.own };
  const [threshold, edges, faithfulness] = circuit.points[stop];
  return { threshold, edges, faithfulness };
}

/**
 * Whether an edge is in the circuit of a stop.
 * @param {SentEdge} edge
 * @param {Stop} stop
 */
export const isIn = (edge, stop) => (stop.threshold === null ? edge.own : edge.level >= stop.threshold);

/**
 * Whether an edge is what is chosen, or begins or ends there.
 * @param {SentEdge} edge
 * @param {number} at the number of the edge
 * @param {Chosen} chosen
 */
export const isAbout = (edge, at, chosen) =>
  chosen.kind === "edge" ? at === chosen.at : edge.from === chosen.at || edge.to === chosen.at;

/**
 * The size of an edge's score; an edge without one has none.
 * @param {SentEdge} edge
 */
export const strength = edge => Math.abs(edge.score ?? 0);

/**
 * The largest size of a score, 0 where there is none.
 * @param {SentEdge[]} edges
 */
export const strongest = edges => edges.reduce((most, edge) => Math.max(most, strength(edge)), 0);

/**
 * The strongest first; equal ones stay as they stand.
 * @param {SentEdge[]} edges
 */
export const ranked = edges => [...edges].sort((one, other) => strength(other) - strength(one));

/**
 * The point of the curve whose size is nearest to the circuit's own.
 * @param {SentCircuit} circuit
 */
export function nearestStop(circuit) {
  const gaps = circuit.points.map(([, edges]) => Math.abs(Math.log((edges + 1) / (circuit.own.edges + 1))));
  return gaps.indexOf(Math.min(...gaps));
}
