// The columns of the ranked table: what each is sorted by, and what it says. The same cells as CSV.
import { line } from "../page/csv.js";
import { percent, shown, whole } from "../page/words.js";

/** @import { Cells } from "./cells.js" */
/** @import { Costs, Numbers } from "./numbers.js" */

/**
 * `descends` where the largest should come first.
 * @typedef {object} Column
 * @property {string} name
 * @property {string} title
 * @property {string} [hint]
 * @property {boolean} [descends]
 * @property {(cell: number, metric: number) => number} key NaN comes last
 * @property {(cell: number, metric: number) => string} text
 */

/**
 * The columns that a sweep has.
 * @param {Cells} cells
 * @param {Numbers} numbers
 * @param {Costs | null} costs
 * @returns {Column[]}
 */
export function columnsOf(cells, numbers, costs) {
  return [
    {
      name: "rank",
      title: "#",
      hint: "by the size of the effect",
      key: (cell, metric) => numbers.ranks(metric)[cell],
      text: (cell, metric) => whole(numbers.ranks(metric)[cell]),
    },
    { name: "site", title: "site", key: cell => cell, text: cell => cells.nameOf(cell) },
    {
      name: "kind",
      title: "kind",
      key: cell => cells.kinds.indexOf(cells.kindOf(cell)),
      text: cell => cells.kindOf(cell),
    },
    ...cells.coordinates.map(name => ({
      name,
      title: name,
      key: (/** @type {number} */ cell) => cells.at(cell, name) ?? NaN,
      text: (/** @type {number} */ cell) => String(cells.at(cell, name) ?? ""),
    })),
    {
      name: "value",
      title: "value",
      key: (cell, metric) => numbers.value(metric, cell),
      text: (cell, metric) => shown(numbers.value(metric, cell)),
    },
    {
      name: "effect",
      title: "effect",
      descends: true,
      key: (cell, metric) => numbers.effect(metric, cell),
      text: (cell, metric) => shown(numbers.effect(metric, cell), true),
    },
    ...(numbers.source ? [shareColumn(numbers)] : []),
    ...(costs ? [costColumn(costs)] : []),
  ];
}

/**
 * @param {Numbers} numbers
 * @returns {Column}
 */
const shareColumn = numbers => ({
  name: "share",
  title: "of the way",
  descends: true,
  key: (cell, metric) => numbers.share(metric, cell),
  text: (cell, metric) => percent(numbers.share(metric, cell)),
});

/**
 * @param {Costs} costs
 * @returns {Column}
 */
const costColumn = costs => ({
  name: "cost",
  title: "recomputed",
  hint: "nodes that are recomputed when this site is patched",
  key: cell => costs.of(cell).evaluations,
  text: cell => whole(costs.of(cell).evaluations),
});

/** The columns of `Result.to_dataframe()`. */
export const CSV_HEADS = "site,kind,layer,head,pos,metric,value,base,source,effect,normalised\n";

/**
 * Cells as CSV, without the heads.
 * @param {Cells} cells
 * @param {Numbers} numbers
 * @param {number} metric
 * @param {string} name of the metric
 * @param {Iterable<number>} which
 */
export function csvOf(cells, numbers, metric, name, which) {
  const base = numbers.base[metric];
  const source = numbers.source ? numbers.source[metric] : null;
  const lines = [];
  for (const cell of which) {
    lines.push(
      line([
        cells.nameOf(cell),
        cells.kindOf(cell),
        ...["layer", "head", "pos"].map(axis => cells.at(cell, axis)),
        name,
        numbers.value(metric, cell),
        base,
        source,
        numbers.effect(metric, cell),
        source === null ? null : numbers.share(metric, cell),
      ]),
    );
  }
  return lines.join("");
}
