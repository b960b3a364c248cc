// The cells of a sweep: their names, kinds and coordinates, from the rules that were sent.
import { integers } from "./bytes.js";
import { lastUpTo } from "./order.js";

/** @import { SentPart } from "../sent.js" */

const MISSING = -(2 ** 31); // a coordinate that a cell does not have

/** The coordinates that a table shows, in its order. */
const COORDINATES = ["layer", "head", "pos", "neuron"];

/**
 * A part, with the size of each axis, and how many cells lie between two neighbours along it.
 * @typedef {SentPart & { shape: number[], strides: number[] }} Part
 */

/**
 * @param {SentPart} part
 * @returns {Part}
 */
export function withShape(part) {
  const shape = part.coordinates.map(along => along.length);
  const strides = shape.map((_, axis) => shape.slice(axis + 1).reduce((product, size) => product * size, 1));
  return { ...part, shape, strides };
}

/**
 * The place of a cell along an axis.
 * @param {Part} part
 * @param {number} axis
 * @param {number} own the number of the cell in its part
 */
export const placeAlong = (part, axis, own) => Math.floor(own / part.strides[axis]) % part.shape[axis];

/**
 * @param {Part} part
 * @param {number} axis
 * @param {number} own
 */
const numberAlong = (part, axis, own) => part.coordinates[axis][placeAlong(part, axis, own)];

/** Cells by their number, over all parts of a sweep. */
export class Cells {
  /** @type {Map<Part, Map<string, Int32Array>>} */
  #listed = new Map();

  /**
   * @param {SentPart[]} parts
   */
  constructor(parts) {
    this.parts = parts.map(withShape);
    this.count = parts.reduce((sum, part) => sum + part.count, 0);
    /** The coordinates that some cell has. */
    this.coordinates = COORDINATES.filter(name => parts.some(part => name in part.at));
    this.kinds = [...new Set(parts.flatMap(part => part.kinds ?? [part.kind ?? ""]))].sort();
    for (const part of this.parts) this.#listed.set(part, listed(part));
  }

  /**
   * @param {number} cell
   */
  partOf(cell) {
    const { parts } = this;
    return parts[lastUpTo(parts.length, at => parts[at].start, cell)];
  }

  /**
   * @param {number} cell
   */
  nameOf(cell) {
    const part = this.partOf(cell);
    const own = cell - part.start;
    if (part.names) return part.names[own];
    let name = "";
    for (const piece of part.pieces ?? []) {
      name += typeof piece === "string" ? piece : numberAlong(part, piece, own);
    }
    return name;
  }

  /**
   * @param {number} cell
   */
  kindOf(cell) {
    const part = this.partOf(cell);
    return part.kinds ? part.kinds[cell - part.start] : (part.kind ?? "");
  }

  /**
   * A coordinate of a cell, or null where it has none.
   * @param {number} cell
   * @param {string} name
   */
  at(cell, name) {
    const part = this.partOf(cell);
    const column = part.at[name];
    const own = cell - part.start;
    if (!column) return null;
    if ("fixed" in column) return column.fixed;
    if ("axis" in column) return numberAlong(part, column.axis, own);
    const number = this.#listed.get(part)?.get(name)?.[own] ?? MISSING;
    return number === MISSING ? null : number;
  }

  /**
   * The first cell of that name, or -1.
   * @param {string} name
   */
  find(name) {
    for (let cell = 0; cell < this.count; cell++) if (this.nameOf(cell) === name) return cell;
    return -1;
  }
}

/**
 * The coordinates of a part that are listed cell by cell.
 * @param {Part} part
 */
function listed(part) {
  /** @type {Map<string, Int32Array>} */
  const found = new Map();
  for (const [name, column] of Object.entries(part.at)) {
    if ("list" in column) found.set(name, integers(column.list));
  }
  return found;
}
