// A sweep as data: its cells, its numbers, their order and their colours.
import assert from "node:assert/strict";
import test from "node:test";

import { fragmentOf, rememberedIn } from "../../src/conewise/javascript/sweep/address.js";
import { Cells } from "../../src/conewise/javascript/sweep/cells.js";
import { CSV_HEADS, columnsOf, csvOf } from "../../src/conewise/javascript/sweep/columns.js";
import { Costs, Numbers } from "../../src/conewise/javascript/sweep/numbers.js";
import { lastUpTo, sorted } from "../../src/conewise/javascript/sweep/order.js";
import { colourAt, reachOf } from "../../src/conewise/javascript/sweep/scale.js";
import { spreadOf, studentQuantile } from "../../src/conewise/javascript/sweep/statistics.js";
import { base64, part, sweepOf } from "./sent.js";

// -- order -------------------------------------------------------------------------------------------

const KEYS = [3, -1, NaN, 0, -0, Infinity, -Infinity, 1e-300, -1e300, 3];

test("numbers are ordered as comparisons order them; equal ones stay, and what is no number comes last", () => {
  assert.deepEqual([...sorted(KEYS, false)], [6, 8, 1, 3, 4, 7, 0, 9, 5, 2]);
  assert.deepEqual([...sorted(KEYS, true)], [5, 0, 9, 7, 3, 4, 1, 8, 6, 2]);
  assert.deepEqual([...sorted([], true)], []);
});

test("many numbers are ordered as few are", () => {
  const keys = Array.from({ length: 5000 }, (_, at) => Math.sin(at * at) * 10 ** ((at % 7) - 3));
  const places = keys.map((_, at) => at);
  assert.deepEqual(
    [...sorted(keys, false)],
    [...places].sort((one, other) => keys[one] - keys[other]),
  );
  assert.deepEqual(
    [...sorted(keys, true)],
    [...places].sort((one, other) => keys[other] - keys[one]),
  );
});

test("the last number up to another is found, at either end too", () => {
  const starts = [0, 4, 9];
  const found = [0, 3, 4, 8, 9, 100].map(wanted => lastUpTo(3, at => starts[at], wanted));
  assert.deepEqual(found, [0, 0, 1, 1, 2, 2]);
});

// -- cells -------------------------------------------------------------------------------------------

const HEADS = part({
  name: "z",
  axes: ["layer", "head"],
  coordinates: [
    [1, 3],
    [0, 2, 5],
  ],
  count: 6,
  kind: "z",
  pieces: ["z[layer=", 0, ", head=", 1, "]"],
  at: { layer: { axis: 0 }, head: { axis: 1 } },
});
const LISTED = part({
  name: "sites",
  axes: ["site"],
  coordinates: [[0, 1, 2]],
  start: 6,
  count: 3,
  names: ["logits", "mlp_out[layer=4]", "z[layer=0]"],
  kinds: ["logits", "mlp_out", "z"],
  at: { layer: { list: base64(new Int32Array([-(2 ** 31), 4, 0])) }, pos: { fixed: 7 } },
});
const cells = new Cells([HEADS, LISTED]);

test("cells have the names that the rule of their part gives, or those listed", () => {
  const names = Array.from({ length: cells.count }, (_, cell) => cells.nameOf(cell));
  const heads = [1, 3].flatMap(layer => [0, 2, 5].map(head => `z[layer=${layer}, head=${head}]`));
  assert.deepEqual(names, [...heads, "logits", "mlp_out[layer=4]", "z[layer=0]"]);
  for (const [cell, name] of names.entries()) assert.equal(cells.find(name), cell);
  assert.equal(cells.find("nowhere"), -1);
});

test("cells have the coordinates of their part: along an axis, listed, or the same for all", () => {
  const at = (/** @type {string} */ name) => Array.from({ length: 9 }, (_, cell) => cells.at(cell, name));
  assert.deepEqual(at("layer"), [1, 1, 1, 3, 3, 3, null, 4, 0]);
  assert.deepEqual(at("head"), [0, 2, 5, 0, 2, 5, null, null, null]);
  assert.deepEqual(at("pos").slice(5), [null, 7, 7, 7]);
  assert.deepEqual(cells.coordinates, ["layer", "head", "pos"]);
});

test("kinds are one for a part, or one for each cell", () => {
  assert.deepEqual(Array.from({ length: 9 }, (_, cell) => cells.kindOf(cell)).slice(5), [
    "z",
    "logits",
    "mlp_out",
    "z",
  ]);
  assert.deepEqual(cells.kinds, ["logits", "mlp_out", "z"]);
});

// -- numbers -----------------------------------------------------------------------------------------

const SENT = sweepOf([HEADS, LISTED], {
  metrics: ["first", "second"],
  table: base64(new Float64Array([1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0, 0, NaN, 0, 0, Infinity, -2])),
  base: base64(new Float64Array([4, 0])),
  source: base64(new Float64Array([9, 0])),
});
const numbers = new Numbers(SENT);

test("effects are values less the base, and shares are of the way to the source", () => {
  assert.equal(numbers.value(0, 8), 9);
  assert.equal(numbers.effect(0, 0), -3);
  assert.deepEqual([...numbers.all(0, "share")].slice(3, 5), [0, 0.2]);
  assert.ok(Number.isNaN(numbers.share(1, 0)), "base and source are the same");
  assert.ok(Number.isNaN(new Numbers({ ...SENT, source: null }).share(0, 0)), "there is no source");
});

test("ranks are by the size of the effect, and what is no number comes last", () => {
  assert.deepEqual([...numbers.ranked(0)], [8, 7, 0, 6, 1, 5, 2, 4, 3]);
  assert.deepEqual([...numbers.ranks(0)], [3, 5, 7, 9, 8, 6, 4, 2, 1]);
  assert.deepEqual([...numbers.ranked(1)].slice(0, 2), [7, 8]);
  assert.equal(numbers.ranked(1)[8], 4);
});

test("bars are beside the largest finite effect", () => {
  assert.equal(numbers.largest(0), 5);
  assert.equal(numbers.largest(1), 2, "not beside an infinite one, which would leave none");
});

test("effects on prompts are from each prompt's own base, where that is known", () => {
  const prompts = {
    ...SENT,
    metrics: ["only"],
    prompts: 2,
    parts: [],
    table: base64(new Float64Array([1, 2])),
  };
  const perPrompt = base64(new Float64Array([10, 20, 30, 40]));
  const own = new Numbers({ ...prompts, perPrompt, basePerPrompt: base64(new Float64Array([1, 5])) });
  assert.deepEqual(own.byPrompt(0, 1), [
    { value: 30, effect: 29 },
    { value: 40, effect: 35 },
  ]);
  assert.deepEqual(
    new Numbers({ ...prompts, perPrompt }).byPrompt(0, 0).map(one => one.effect),
    [6, 16],
  );
  assert.ok(own.hasPrompts && !numbers.hasPrompts);
  assert.deepEqual(numbers.byPrompt(0, 0), []);
});

const costs = new Costs({
  runs: [
    [1, 2],
    [0, 1],
    [1, 6],
  ],
  evaluations: [5, 7],
  flops: [50, 70],
  full: [10, 100],
});

test("a cell costs what its cone does", () => {
  const evaluations = Array.from({ length: 9 }, (_, cell) => costs.of(cell).evaluations);
  assert.deepEqual(evaluations, [7, 7, 5, 7, 7, 7, 7, 7, 7]);
  assert.deepEqual([costs.of(2).flops, costs.fullEvaluations, costs.fullFlops], [50, 10, 100]);
});

// -- colours -----------------------------------------------------------------------------------------

/** @type {[number, number, number][]} */
const COLOURS = [
  [255, 0, 0],
  [255, 255, 255],
  [0, 0, 255],
];

test("the middle of the scale is no effect, its ends are as far as the colours go", () => {
  const found = [-2, -1, 0, 0.5, 1, Infinity].map(place => colourAt(COLOURS, place));
  const [red, white, blue] = COLOURS.map(one => `rgb(${one})`);
  assert.deepEqual(found, [red, red, white, "rgb(128,128,255)", blue, blue]);
  assert.equal(colourAt(COLOURS, NaN), white);
});

test("colours reach to the largest finite number, or to a share of them", () => {
  const many = Float64Array.from({ length: 100 }, (_, at) => (at === 3 ? NaN : at === 4 ? Infinity : -at));
  assert.equal(reachOf(many, 0, 1), 99);
  assert.equal(reachOf(many, 0, 0.95), 95);
  assert.equal(reachOf(many, -50, 1), 50);
});

test("where most numbers are nothing, colours reach to the largest; where all are, to one", () => {
  assert.equal(reachOf(new Float64Array([0, 0, 0, 0, 7]), 0, 0.5), 7);
  assert.equal(reachOf(new Float64Array([0, 0]), 0, 0.5), 1);
  assert.equal(reachOf(new Float64Array([NaN]), 0, 0.5), 1);
});

// -- over prompts ------------------------------------------------------------------------------------

test("a spread is the mean, and as many standard errors to either side as Student's t says", () => {
  const found = spreadOf([1, 2, 3, 4]);
  assert.equal(found?.mean, 2.5);
  assert.ok(Math.abs((found?.half ?? 0) - 3.182446305 * Math.sqrt(5 / 3 / 4)) < 1e-8);
  for (const [freedom, expected] of [
    [1, 12.7062],
    [2, 4.3027],
    [7, 2.3646],
    [30, 2.0423],
    [199, 1.972],
  ]) {
    assert.ok(Math.abs(studentQuantile(0.95, freedom) - expected) < 1e-4);
  }
  assert.equal(spreadOf([3])?.half, 0);
});

test("a prompt keeps its number where one before it has no finite effect", () => {
  assert.deepEqual(spreadOf([NaN, 5, Infinity, 7])?.points, [
    { effect: 5, prompt: 1 },
    { effect: 7, prompt: 3 },
  ]);
  assert.equal(spreadOf([NaN]), null);
});

// -- the table ---------------------------------------------------------------------------------------

test("the table has a column for what there is", () => {
  const all = columnsOf(cells, numbers, costs).map(column => column.name);
  assert.deepEqual(all, ["rank", "site", "kind", "layer", "head", "pos", "value", "effect", "share", "cost"]);
  const fewer = columnsOf(new Cells([]), new Numbers({ ...SENT, source: null }), null);
  assert.deepEqual(
    fewer.map(column => column.name),
    ["rank", "site", "kind", "value", "effect"],
  );
});

test("a column says in words what it is sorted by", () => {
  const texts = Object.fromEntries(
    columnsOf(cells, numbers, costs).map(one => [one.name, [one.key(7, 0), one.text(7, 0)]]),
  );
  assert.deepEqual(texts, {
    rank: [2, "2"],
    site: [7, "mlp_out[layer=4]"],
    kind: [1, "mlp_out"],
    layer: [4, "4"],
    head: [NaN, ""],
    pos: [7, "7"],
    value: [8, "8"],
    effect: [4, "+4"],
    share: [0.8, "+80.0 %"],
    cost: [7, "7"],
  });
});

test("cells are written as CSV", () => {
  assert.equal(CSV_HEADS.trim().split(",").length, 11);
  assert.equal(
    csvOf(cells, numbers, 0, "logit, diff", [0, 6]),
    '"z[layer=1, head=0]",z,1,0,,"logit, diff",1,4,9,-3,-0.6\nlogits,logits,,,7,"logit, diff",7,4,9,3,0.6\n',
  );
  assert.match(csvOf(cells, new Numbers({ ...SENT, source: null }), 0, "m", [6]), /,m,7,4,,3,\n$/);
});

// -- the address -------------------------------------------------------------------------------------

test("an address has what is not as usual, and it comes back", () => {
  const usual = { view: "results", site: null, metric: null, shown: "effect" };
  assert.equal(fragmentOf(usual), "#");
  const other = { view: "graph", site: "z[layer=1, head=0]", metric: "a & b=c", shown: "share" };
  assert.deepEqual(rememberedIn(fragmentOf(other)), other);
});

test("what an address leaves out is as usual", () => {
  assert.deepEqual(rememberedIn("#site=logits"), {
    view: "results",
    site: "logits",
    metric: null,
    shown: "effect",
  });
});

test("an address of a heading, or of nothing, says nothing", () => {
  for (const fragment of ["", "#", "#maps", "#maps=1"]) assert.equal(rememberedIn(fragment), null);
});
