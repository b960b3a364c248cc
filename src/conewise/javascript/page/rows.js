// The rows of a table: which match a filter, and which are on a page.

/**
 * What somebody typed, as words in small letters.
 * @param {string} text
 */
export const wordsOf = text => text.toLowerCase().split(/\s+/).filter(Boolean);

/**
 * Whether a name has all of these words in it, in any order.
 * @param {string} name
 * @param {string[]} words in small letters
 */
export function matches(name, words) {
  const small = name.toLowerCase();
  return words.every(word => small.includes(word));
}

/**
 * The page that is nearest to the wanted one, and where its rows begin and end.
 * @param {number} count of rows
 * @param {number} wanted number of a page, from 0; it may be Infinity
 * @param {number} size rows of a page
 */
export function pageOf(count, wanted, size) {
  const pages = Math.max(1, Math.ceil(count / size));
  const page = Math.max(0, Math.min(wanted, pages - 1));
  return { page, pages, from: page * size, to: Math.min(count, (page + 1) * size) };
}
