// The sweep of the page, what is shown of it, and who is told when that changes.
import { sentIn } from "../page/elements.js";
import { Cells } from "./cells.js";
import { Costs, Numbers } from "./numbers.js";

/** @import { SentSweep } from "../sent.js" */
/** @import { Shown } from "./numbers.js" */

/** @type {SentSweep} */
export const sweep = sentIn("conewise-data");
export const cells = new Cells(sweep.parts);
export const numbers = new Numbers(sweep);
export const costs = sweep.costs && new Costs(sweep.costs);

/**
 * `range` is how many of the numbers the colours reach, `site` a cell or −1.
 * @typedef {{ metric: number, shown: Shown, range: number, site: number }} State
 */

/** @type {State} */
export const state = { metric: 0, shown: "effect", range: 0.99, site: -1 };

/** @type {((changed: Set<string>) => void)[]} */
const listeners = [];

/**
 * Call `act` with the names of what has changed.
 * @param {(changed: Set<string>) => void} act
 */
export function listen(act) {
  listeners.push(act);
}

/**
 * @param {Partial<State>} change
 */
export function set(change) {
  const before = { ...state };
  Object.assign(state, change);
  const names = /** @type {(keyof State)[]} */ (Object.keys(change));
  const changed = new Set(names.filter(name => state[name] !== before[name]));
  if (changed.size) for (const act of listeners) act(changed);
}
