// The two axes of the faithfulness curve: edges in logarithms across, faithfulness up.

/** @typedef {{ edges: number, faithfulness: number }} Measured */

export const FRAME = { width: 340, height: 190, left: 38, right: 10, top: 10, bottom: 34 };

/**
 * The places of what was measured, in pixels, and the numbers of edges at both ends.
 * @param {Measured[]} measured one at least
 */
export function curveScale(measured) {
  const logs = measured.map(one => log(one.edges));
  const from = Math.min(...logs);
  const to = Math.max(...logs);
  const low = Math.min(0, ...measured.map(one => one.faithfulness));
  const high = Math.max(1, ...measured.map(one => one.faithfulness));
  const wide = FRAME.width - FRAME.left - FRAME.right;
  const tall = FRAME.height - FRAME.top - FRAME.bottom;
  return {
    /** @param {number} edges */
    x: edges => FRAME.left + (to > from ? (log(edges) - from) / (to - from) : 0.5) * wide,
    /** @param {number} faithfulness */
    y: faithfulness => FRAME.top + ((high - faithfulness) / (high - low)) * tall,
    ends: [Math.round(Math.exp(from)), Math.round(Math.exp(to))],
  };
}

/**
 * The logarithm of a count; none counts as one.
 * @param {number} count
 */
const log = count => Math.log(Math.max(1, count));
