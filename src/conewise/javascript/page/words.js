// Numbers and texts as people read them.

/**
 * Four digits, and a power of ten where the number is very large or very small.
 * @param {number | null | undefined} number
 * @param {boolean} [signed] whether a number above 0 has its sign
 */
export function shown(number, signed = false) {
  if (number === null || number === undefined) return "–";
  if (Number.isNaN(number)) return "NaN";
  const sign = number < 0 ? "−" : signed && number > 0 ? "+" : "";
  const size = Math.abs(number);
  if (size === Infinity) return `${sign}∞`;
  const rounded = Number(size.toPrecision(4));
  if (rounded !== 0 && (rounded < 1e-3 || rounded >= 1e6)) {
    return sign + size.toExponential(3).replace("e+", "e").replace("e-", "e−");
  }
  return sign + rounded.toString();
}

const LETTERS = ["", "k", "M", "G", "T", "P", "E"];

/**
 * A count in three digits, and a letter for its thousands: 739 M. Whole below a thousand.
 * @param {number} number
 */
export function large(number) {
  if (number < 1000) return String(number);
  // 999 950 rounds to 1.00 M, and not to a thousand k.
  const rounded = Number(number.toPrecision(3));
  const place = Math.min(LETTERS.length - 1, Math.floor(Math.log10(rounded) / 3));
  return `${fixed(rounded / 1000 ** place)} ${LETTERS[place]}`;
}

/**
 * Three digits where a number has no more before its point; never a power of ten.
 * @param {number} number
 */
function fixed(number) {
  const digits = number < 1 ? 1 : Math.floor(Math.log10(number)) + 1;
  return number.toFixed(Math.max(0, 3 - digits));
}

/**
 * A share as percent, with its sign.
 * @param {number} number
 */
export function percent(number) {
  if (!Number.isFinite(number)) return shown(number);
  const digits = Math.abs(number) < 0.1 ? 2 : 1;
  return `${number < 0 ? "−" : "+"}${Math.abs(number * 100).toFixed(digits)} %`;
}

/**
 * How much a part is of the whole: "12 %", "–" of nothing.
 * @param {number} part
 * @param {number} all
 * @param {number} [digits] behind the point
 */
export function shareOf(part, all, digits = 0) {
  return all ? `${((part / all) * 100).toFixed(digits)} %` : "–";
}

/**
 * A whole number with commas: 1,024.
 * @param {number} number
 */
export const whole = number => Math.round(number).toLocaleString("en-US");

/**
 * So many of something: "1 edge", "2 edges".
 * @param {number} number
 * @param {string} one
 * @param {string} many
 */
export const counted = (number, one, many) => `${whole(number)} ${number === 1 ? one : many}`;

/**
 * Text for Plotly, which reads some HTML in what it draws.
 * @param {string} text
 */
export const plain = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

/**
 * A text that is no longer than `most`, cut at its end.
 * @param {string} text
 * @param {number} most
 */
export const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
