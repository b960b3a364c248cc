// How a part of a sweep is laid out.
import assert from "node:assert/strict";
import test from "node:test";

import { Cells } from "../../src/conewise/javascript/sweep/cells.js";
import { layoutOf, longestOf, movedBy, rowsOf, ticksOf } from "../../src/conewise/javascript/sweep/layout.js";
import { part } from "./sent.js";

/** @import { SentPart } from "../../src/conewise/javascript/sent.js" */

/**
 * @param {Partial<SentPart>} given
 * @param {string[]} [tokens]
 */
function laidOut(given, tokens = []) {
  const cells = new Cells([part(given)]);
  return layoutOf(cells.parts[0], cells, tokens);
}

/**
 * @param {number} count
 */
const upTo = count => Array.from({ length: count }, (_, number) => number);

test("sites without an axis are bars with their names", () => {
  const { kind, rows, columns, labels, title } = laidOut({ count: 2, names: ["a", "b"] });
  assert.deepEqual([kind, rows, columns, labels, title], ["bars", 2, 1, ["a", "b"], "site"]);
  assert.deepEqual(laidOut({ count: 1, axes: ["site"], coordinates: [[0]], names: ["c"] }).labels, ["c"]);
});

test("a short axis is bars, a long one is wrapped", () => {
  const axis = (/** @type {number} */ count) =>
    laidOut({ count, axes: ["neuron"], coordinates: [upTo(count)] });
  assert.deepEqual([axis(120).kind, axis(120).rows, axis(120).labels[7]], ["bars", 120, "7"]);
  const { kind, rows, columns, labels, heads, across } = axis(121);
  assert.deepEqual([kind, rows, columns, labels], ["map", 3, 50, ["0", "50", "100"]]);
  assert.deepEqual([heads.length, heads[49], across], [50, "+49", "neuron, 50 in a row"]);
  assert.deepEqual(
    [2500, 2501, 10_001].map(count => axis(count).columns),
    [50, 100, 1000],
  );
});

test("of two axes the second goes across", () => {
  const layout = laidOut({
    count: 6,
    axes: ["layer", "head"],
    coordinates: [
      [4, 5],
      [0, 1, 2],
    ],
  });
  assert.deepEqual(layout, {
    kind: "map",
    rows: 2,
    columns: 3,
    title: "layer",
    labels: ["4", "5"],
    across: "head",
    heads: ["0", "1", "2"],
  });
});

test("of more axes the last goes across, and rows have letters", () => {
  const { labels, title } = laidOut({
    count: 8,
    axes: ["layer", "odd", "pos"],
    coordinates: [
      [4, 5],
      [7, 9],
      [0, 1],
    ],
  });
  assert.equal(title, "layer × odd");
  assert.deepEqual(labels, ["L4 odd 7", "L4 odd 9", "L5 odd 7", "L5 odd 9"]);
});

test("positions have their tokens, and a token that is not seen has a sign", () => {
  const { heads } = laidOut({ count: 4, axes: ["layer", "pos"], coordinates: [[0], [0, 1, 2, 9]] }, [
    " Mary",
    " ",
    "a\nb",
  ]);
  assert.deepEqual(heads, ["Mary 0", "␣ 1", "a⏎b 2", "9"]);
  assert.deepEqual(laidOut({ count: 1, axes: ["layer", "head"], coordinates: [[0], [0]] }, ["Mary"]).heads, [
    "0",
  ]);
});

test("an axis with labels has these, and the others have numbers", () => {
  const { labels, heads } = laidOut({
    count: 2,
    axes: ["pair", "pos"],
    coordinates: [[0, 1], [3]],
    labels: [["q", "k"], []],
  });
  assert.deepEqual([labels, heads], [["q", "k"], ["3"]]);
});

test("so many labels are written as there is room for, and long ones are cut", () => {
  assert.deepEqual(ticksOf(["a", "b", "c"], 3), { places: [0, 1, 2], texts: ["a", "b", "c"] });
  assert.deepEqual(ticksOf(upTo(25).map(String), 6).places, [0, 5, 10, 15, 20]);
  assert.equal(ticksOf(["x".repeat(50)], 1).texts[0].length, 34);
  assert.equal(longestOf(["x".repeat(50), "y"]), 34);
  assert.equal(longestOf([]), 0);
});

test("a map has its numbers row by row, and none where there are none", () => {
  const layout = laidOut({ count: 121, axes: ["neuron"], coordinates: [upTo(121)] });
  const numbers = upTo(121).map(number => (number === 51 ? Infinity : number));
  const rows = rowsOf(Float64Array.from(numbers), layout);
  assert.deepEqual(
    rows.map(row => row.length),
    [50, 50, 50],
  );
  assert.deepEqual([rows[1][0], rows[1][1], rows[2][20], rows[2][21]], [50, NaN, 120, NaN]);
});

test("keys move to neighbours, and stay where there is none", () => {
  const layout = laidOut({
    count: 6,
    axes: ["layer", "head"],
    coordinates: [
      [0, 1],
      [0, 1, 2],
    ],
  });
  const from = (/** @type {number | null} */ cell) => (/** @type {string} */ key) =>
    movedBy(key, cell, layout, 6);
  const arrows = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"];
  assert.deepEqual(arrows.map(from(1)), [0, 2, 1, 4]);
  assert.deepEqual(arrows.map(from(5)), [4, 5, 2, 5]);
  assert.deepEqual(arrows.map(from(null)), [0, 0, 0, 0]);
  assert.deepEqual(["Home", "End", "Tab"].map(from(3)), [0, 5, null]);
});
