// A circuit as data: what is shown of it, and where it is drawn.
import assert from "node:assert/strict";
import test from "node:test";

import { curveScale, FRAME } from "../../src/conewise/javascript/circuit/curve_scale.js";
import {
  isAbout,
  isIn,
  nearestStop,
  OWN,
  ranked,
  stopOf,
  strongest,
} from "../../src/conewise/javascript/circuit/edges.js";
import { geometry, layersOf, ROW, thickness } from "../../src/conewise/javascript/circuit/geometry.js";

/** @import { SentCircuit, SentEdge } from "../../src/conewise/javascript/sent.js" */

/**
 * @param {Partial<SentEdge>} given
 * @returns {SentEdge}
 */
const edge = given => ({
  name: "embed->m0",
  from: 0,
  to: 1,
  slot: "",
  curve: [
    [0, 0],
    [0, 0.4],
    [0, 0.6],
    [0, 1],
  ],
  score: 1,
  level: -1,
  own: false,
  ...given,
});

/** @type {SentCircuit} */
const circuit = {
  columns: 4,
  rows: 3,
  boxes: [
    ["embed", "input", null, 1.5, 0],
    ["a0.h1", "head", 0, 1, 1],
    ["m0", "mlp", 0, 3, 2],
  ],
  links: [],
  edges: [
    edge({ name: "weak", score: -0.5, level: 0.5, own: false }),
    edge({ name: "strong", score: -2, level: 2, own: true, from: 1, to: 2 }),
    edge({ name: "unscored", score: null, level: -1, own: true, from: 0, to: 2 }),
  ],
  points: [
    [2, 1, 0.4],
    [0.5, 2, null],
  ],
  own: { edges: 2, faithfulness: 0.7 },
};

const namesIn = (/** @type {number} */ stop) =>
  circuit.edges.filter(one => isIn(one, stopOf(circuit, stop))).map(one => one.name);

test("the circuit itself has its own edges, scored or not", () => {
  assert.deepEqual(stopOf(circuit, OWN), { threshold: null, edges: 2, faithfulness: 0.7 });
  assert.deepEqual(namesIn(OWN), ["strong", "unscored"]);
});

test("the circuit of a threshold has the edges that reach it", () => {
  assert.deepEqual(stopOf(circuit, 1), { threshold: 0.5, edges: 2, faithfulness: null });
  assert.deepEqual(namesIn(0), ["strong"]);
  assert.deepEqual(namesIn(1), ["weak", "strong"]);
});

test("edges are ranked by the size of their scores, and those without come last", () => {
  assert.deepEqual(
    ranked(circuit.edges).map(one => one.name),
    ["strong", "weak", "unscored"],
  );
  assert.equal(circuit.edges[0].name, "weak", "the edges themselves stay as they were");
  assert.equal(strongest(circuit.edges), 2);
  assert.equal(strongest([]), 0);
});

test("an edge is about itself, and about both of its boxes", () => {
  const strong = circuit.edges[1];
  assert.ok(isAbout(strong, 1, { kind: "edge", at: 1 }));
  assert.ok(!isAbout(strong, 1, { kind: "edge", at: 2 }));
  const boxes = [0, 1, 2].filter(at => isAbout(strong, 1, { kind: "box", at }));
  assert.deepEqual(boxes, [1, 2]);
});

test("the slider begins at the circuit of the nearest size", () => {
  assert.equal(nearestStop(circuit), 1);
  assert.equal(nearestStop({ ...circuit, own: { edges: 0, faithfulness: null } }), 0);
});

test("columns are as wide as there is room for, within limits", () => {
  const widths = [0, 300, 10_000].map(room => geometry(circuit, room).width);
  assert.deepEqual(widths, [62 + 4 * 50 + 12, 62 + 4 * 56.5 + 12, 62 + 4 * 66 + 12]);
});

test("boxes stand in their columns and rows, all of them inside", () => {
  const { boxes, width, height } = geometry(circuit, 0);
  assert.deepEqual(
    boxes.map(box => [box.x, box.y]),
    [
      [162, 26],
      [137, 76],
      [237, 126],
    ],
  );
  for (const box of boxes) assert.ok(box.x < width && box.y < height);
});

test("an edge leaves below a box and arrives above another", () => {
  assert.equal(geometry(circuit, 0).path(circuit.edges[0]), "M 87.0 36.0 C 87.0 56.0, 87.0 46.0, 87.0 66.0");
});

test("layers are in order, from their highest box to their lowest; the input is in none", () => {
  const { boxes } = geometry(circuit, 0);
  assert.deepEqual(layersOf(boxes), [{ layer: 0, top: 26 + ROW, bottom: 26 + 2 * ROW }]);
  const later = { name: "", kind: "", x: 0, y: 5, layer: 10 };
  assert.deepEqual(
    layersOf([later, { ...later, layer: 9 }]).map(one => one.layer),
    [9, 10],
  );
});

test("lines are as thick as they are strong", () => {
  assert.equal(thickness(null, 2), 1.3);
  assert.equal(thickness(-2, 2), 5);
  assert.equal(thickness(0, 0), 0.8);
});

test("the curve reaches from end to end, few edges first", () => {
  const { x, y, ends } = curveScale([
    { edges: 1, faithfulness: 0 },
    { edges: 100, faithfulness: 1 },
  ]);
  assert.deepEqual(ends, [1, 100]);
  assert.equal(x(1), FRAME.left);
  assert.ok(Math.abs(x(10) - (x(1) + x(100)) / 2) < 1e-9);
  assert.equal(x(100), FRAME.width - FRAME.right);
  assert.deepEqual([y(1), y(0)], [FRAME.top, FRAME.height - FRAME.bottom]);
});

test("the curve has room for less than nothing and for more than all", () => {
  const { y } = curveScale([
    { edges: 5, faithfulness: -1 },
    { edges: 5, faithfulness: 3 },
  ]);
  assert.deepEqual([y(3), y(-1)], [FRAME.top, FRAME.height - FRAME.bottom]);
});

test("a circuit of no edges, or a curve of one point, has a place", () => {
  const middle = FRAME.left + (FRAME.width - FRAME.left - FRAME.right) / 2;
  assert.equal(curveScale([{ edges: 0, faithfulness: 0.5 }]).x(0), middle);
});
