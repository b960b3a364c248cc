// How a part of a sweep is laid out as a figure: bars, or a map of rows and columns, and what stands beside them.
import { short } from "../page/words.js";
import { placeAlong } from "./cells.js";

/** @import { Cells, Part } from "./cells.js" */

/**
 * `labels` are those of the rows, `heads` those of the columns; `title` and `across` name both axes.
 * @typedef {object} Layout
 * @property {"bars" | "map"} kind
 * @property {number} rows
 * @property {number} columns
 * @property {string} title
 * @property {string[]} labels
 * @property {string} across
 * @property {string[]} heads
 */

const MOST_BARS = 120; // more sites than this in a row are wrapped into a map
const LONGEST = 34; // letters of a label

/** @type {Record<string, string>} */
const LETTERS = {
  layer: "L",
  head: "H",
  kv_head: "K",
  neuron: "N",
  latent: "F",
  pos: "P",
  query_pos: "Q",
  key_pos: "K",
};

/**
 * @param {Part} part
 * @param {Cells} cells
 * @param {string[]} tokens at each position, none where prompts have different lengths
 * @returns {Layout}
 */
export function layoutOf(part, cells, tokens) {
  if (part.axes.length > 1) return grid(part, tokens);
  return part.axes.length === 0 || part.count <= MOST_BARS ? bars(part, cells, tokens) : wrapped(part);
}

/**
 * A bar for each cell.
 * @param {Part} part
 * @param {Cells} cells
 * @param {string[]} tokens
 * @returns {Layout}
 */
function bars(part, cells, tokens) {
  const [axis = "site"] = part.axes;
  const labels =
    axis === "site"
      ? Array.from({ length: part.count }, (_, own) => cells.nameOf(part.start + own))
      : labelsAlong(part, 0, tokens);
  return { kind: "bars", rows: part.count, columns: 1, title: axis, labels, across: "", heads: [] };
}

/**
 * One long axis, as lines of a text are.
 * @param {Part} part
 * @returns {Layout}
 */
function wrapped(part) {
  const columns = part.count <= 2500 ? 50 : part.count <= 10_000 ? 100 : 1000;
  const rows = Math.ceil(part.count / columns);
  const [axis] = part.axes;
  return {
    kind: "map",
    rows,
    columns,
    title: axis,
    labels: Array.from({ length: rows }, (_, row) => String(part.coordinates[0][row * columns])),
    across: `${axis}, ${columns} in a row`,
    heads: Array.from({ length: columns }, (_, column) => `+${column}`),
  };
}

/**
 * The last axis across, all others down.
 * @param {Part} part
 * @param {string[]} tokens
 * @returns {Layout}
 */
function grid(part, tokens) {
  const last = part.axes.length - 1;
  const columns = part.shape[last];
  const rows = part.count / columns;
  const down = part.axes.slice(0, last);
  const labels =
    last === 1
      ? labelsAlong(part, 0, tokens)
      : Array.from({ length: rows }, (_, row) => shortLabel(part, down, row * columns));
  return {
    kind: "map",
    rows,
    columns,
    title: down.join(" × "),
    labels,
    across: part.axes[last],
    heads: labelsAlong(part, last, tokens),
  };
}

/**
 * Several axes in few letters: L3 H7.
 * @param {Part} part
 * @param {string[]} axes the first of the part's
 * @param {number} own the number of a cell in its part
 */
function shortLabel(part, axes, own) {
  const pieces = axes.map((name, axis) => {
    const place = placeAlong(part, axis, own);
    return `${LETTERS[name] ?? `${name} `}${part.labels?.[axis][place] ?? part.coordinates[axis][place]}`;
  });
  return pieces.join(" ");
}

/**
 * What stands along an axis: labels where it has some, else numbers; positions with their tokens.
 * @param {Part} part
 * @param {number} axis
 * @param {string[]} tokens
 */
function labelsAlong(part, axis, tokens) {
  const isPosition = /^(query_|key_)?pos$/.test(part.axes[axis]);
  return part.coordinates[axis].map((number, place) => {
    const token = isPosition ? tokens[number] : undefined;
    const numbered = token ? `${token.replace(/\n/g, "⏎").trim() || "␣"} ${number}` : String(number);
    return part.labels?.[axis][place] ?? numbered;
  });
}

const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 10_000, 100_000];

/**
 * Some of many labels, so that they do not run into each other: their places, and their texts.
 * @param {string[]} labels
 * @param {number} room how many there is room for
 */
export function ticksOf(labels, room) {
  const step = STEPS.find(size => labels.length / size <= room) ?? 1_000_000;
  const places = labels.map((_, place) => place).filter(place => place % step === 0);
  return { places, texts: places.map(place => short(labels[place], LONGEST)) };
}

/**
 * How many letters the longest label of a row has, as it is written.
 * @param {string[]} labels
 */
export const longestOf = labels =>
  labels.slice(0, 2000).reduce((most, label) => Math.max(most, Math.min(LONGEST, label.length)), 0);

/**
 * The numbers of a map, row by row. What is no finite number has no colour, and nor has what is beyond the last cell.
 * @param {Float64Array} numbers of the part
 * @param {Layout} layout
 */
export function rowsOf(numbers, { rows, columns }) {
  return Array.from({ length: rows }, (_, row) => {
    const line = new Float64Array(columns).fill(NaN);
    line.set(numbers.subarray(row * columns, (row + 1) * columns));
    return line.map(number => (Number.isFinite(number) ? number : NaN));
  });
}

/**
 * Where a key leads from a cell of a figure; null where the key does not move. Cells are numbered in their part.
 * @param {string} key
 * @param {number | null} from null where no key was pressed yet
 * @param {Layout} layout
 * @param {number} count of cells
 */
export function movedBy(key, from, { columns }, count) {
  if (key === "Home") return 0;
  if (key === "End") return count - 1;
  const steps = new Map([
    ["ArrowLeft", -1],
    ["ArrowRight", 1],
    ["ArrowUp", -columns],
    ["ArrowDown", columns],
  ]);
  const step = steps.get(key);
  if (step === undefined) return null;
  if (from === null) return 0;
  const next = from + step;
  return next < 0 || next >= count ? from : next;
}
