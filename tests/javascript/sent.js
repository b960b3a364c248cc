// What a page sends, as small as tests need it.

/** @import { SentPart, SentSweep } from "../../src/conewise/javascript/sent.js" */

/**
 * @param {Float64Array | Int32Array} numbers
 */
export const base64 = numbers => Buffer.from(numbers.buffer).toString("base64");

/**
 * A part of a sweep that is nothing but what is given.
 * @param {Partial<SentPart>} given
 * @returns {SentPart}
 */
export const part = given => ({
  name: "part",
  axes: [],
  coordinates: [],
  labels: null,
  start: 0,
  count: 0,
  pieces: null,
  names: null,
  kind: null,
  kinds: null,
  at: {},
  ...given,
});

/**
 * A sweep over these parts, one prompt, one metric, all zero.
 * @param {SentPart[]} parts
 * @param {Partial<SentSweep>} [given]
 * @returns {SentSweep}
 */
export function sweepOf(parts, given = {}) {
  const count = parts.reduce((sum, one) => sum + one.count, 0);
  return {
    parts,
    metrics: ["metric"],
    prompts: 1,
    unit: "prompt",
    tokens: [],
    costs: null,
    table: base64(new Float64Array(count)),
    base: base64(new Float64Array(1)),
    source: null,
    perPrompt: null,
    basePerPrompt: null,
    sourcePerPrompt: null,
    colours: { light: [[0, 0, 0]], dark: [[0, 0, 0]] },
    ...given,
  };
}
