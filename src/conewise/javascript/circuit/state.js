// What the page shows of its circuit, and who is told when that changes.
import { sentIn } from "../page/elements.js";
import { isIn, OWN, stopOf } from "./edges.js";

/** @import { SentCircuit, SentEdge } from "../sent.js" */
/** @import { Chosen } from "./edges.js" */

/** @type {SentCircuit} */
export const circuit = sentIn("conewise-circuit");

/**
 * `stop` is the number of a point of the curve, or OWN.
 * @type {{ stop: number, chosen: Chosen | null }}
 */
export const state = { stop: OWN, chosen: null };

/** @type {(() => void)[]} */
const listeners = [];

/**
 * Call `act` whenever something else is shown.
 * @param {() => void} act
 */
export function listen(act) {
  listeners.push(act);
}

/**
 * @param {Partial<typeof state>} change
 */
export function set(change) {
  Object.assign(state, change);
  for (const act of listeners) act();
}

/** The circuit that is shown: its own, or that of a threshold. */
export const stop = () => stopOf(circuit, state.stop);

/**
 * @param {SentEdge} edge
 */
export const isShown = edge => isIn(edge, stop());

/**
 * The edges that are shown and read by a box, and those that read it.
 * @param {number} box
 */
export function around(box) {
  const seen = circuit.edges.filter(isShown);
  return { inward: seen.filter(edge => edge.to === box), outward: seen.filter(edge => edge.from === box) };
}
