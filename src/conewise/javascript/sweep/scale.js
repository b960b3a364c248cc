// The scale of colours: which number has which, and how far they reach.

/** @typedef {[number, number, number]} Colour */

/**
 * @param {Colour} colour
 */
export const rgb = colour => `rgb(${colour})`;

/**
 * The colour at a place of the scale, from −1 to 1. What is no number has the colour of the middle.
 * @param {Colour[]} colours from the lowest to the highest
 * @param {number} place
 */
export function colourAt(colours, place) {
  const at = ((Math.max(-1, Math.min(1, place || 0)) + 1) / 2) * (colours.length - 1);
  const low = Math.min(Math.floor(at), colours.length - 2);
  const mixed = colours[low].map((one, channel) => one + (colours[low + 1][channel] - one) * (at - low));
  return `rgb(${mixed.map(Math.round)})`;
}

/**
 * How far the colours reach from the middle: to the largest of the finite numbers, or to that which a share of
 * them does not exceed.
 * @param {Float64Array} numbers
 * @param {number} middle
 * @param {number} share from 0 to 1
 */
export function reachOf(numbers, middle, share) {
  const sizes = numbers
    .filter(Number.isFinite)
    .map(number => Math.abs(number - middle))
    .sort();
  const last = sizes.length - 1;
  return sizes[Math.min(last, Math.floor(share * sizes.length))] || sizes[last] || 1;
}
