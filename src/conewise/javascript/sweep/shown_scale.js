// The scale of colours of what is shown: its colours, its middle, and how far it reaches.
import { isDark } from "../page/theme.js";
import { reachOf } from "./scale.js";
import { numbers, state, sweep } from "./state.js";

export const colours = () => sweep.colours[isDark() ? "dark" : "light"];

/** The middle of the colours: the base for values, and 0 for what is told from there. */
export const middle = () => (state.shown === "value" ? numbers.base[state.metric] : 0);

/** @type {Map<string, number>} */
const reaches = new Map();

/** How far the colours reach from the middle. */
export function reach() {
  const key = `${state.metric} ${state.shown} ${state.range}`;
  const found = reaches.get(key) ?? reachOf(shownNumbers(), middle(), state.range);
  reaches.set(key, found);
  return found;
}

/** What is shown of every cell. */
export const shownNumbers = () => numbers.all(state.metric, state.shown);
