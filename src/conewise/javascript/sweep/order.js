// The order of many numbers.

const DIGITS = 4; // of a number's 64 bits
const BASE = 1 << 16;

/**
 * The places of the keys, in the order of the keys. Equal ones stay as they stand, and those that are no
 * numbers come last either way.
 *
 * By digits of 16 bits: a comparison for each pair takes a second for a million.
 * @param {ArrayLike<number>} keys
 * @param {boolean} descending
 */
export function sorted(keys, descending) {
  const size = keys.length;
  const bits = sortableBits(keys, descending);
  let from = Uint32Array.from({ length: size }, (_, at) => at);
  let to = new Uint32Array(size);
  for (let digit = 0; digit < DIGITS; digit++) {
    const word = digit >> 1;
    const shift = (digit & 1) * 16;
    /** @param {number} at */
    const digitOf = at => (bits[2 * at + word] >>> shift) & (BASE - 1);
    const starts = new Uint32Array(BASE + 1);
    for (let at = 0; at < size; at++) starts[digitOf(at) + 1]++;
    for (let value = 0; value < BASE; value++) starts[value + 1] += starts[value];
    for (let at = 0; at < size; at++) to[starts[digitOf(from[at])]++] = from[at];
    [from, to] = [to, from];
  }
  return from;
}

/**
 * The bits of each key, low word first, turned so that they are ordered as whole numbers as the keys are.
 * @param {ArrayLike<number>} keys
 * @param {boolean} descending
 */
function sortableBits(keys, descending) {
  const copy = new Float64Array(keys.length);
  const bits = new Uint32Array(copy.buffer);
  const turn = descending ? -1 : 0;
  for (let at = 0; at < keys.length; at++) {
    copy[at] = keys[at] + 0; // −0 is 0
    // As whole numbers, the bits of positive numbers are ordered, and those of negative ones the other way.
    const negative = bits[2 * at + 1] >> 31;
    bits[2 * at] ^= negative ^ turn;
    bits[2 * at + 1] ^= (negative | 0x80000000) ^ turn;
    if (Number.isNaN(keys[at])) bits[2 * at] = bits[2 * at + 1] = 0xffffffff;
  }
  return bits;
}

/**
 * The last of some rising numbers that is at most this one, by its place.
 * @param {number} count of the numbers
 * @param {(at: number) => number} number the one at a place; the first is at most `wanted`
 * @param {number} wanted
 */
export function lastUpTo(count, number, wanted) {
  let low = 0;
  let high = count - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (number(middle) <= wanted) low = middle;
    else high = middle - 1;
  }
  return low;
}
