// Cones and waves as data: what is shown of them, step by step.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

import { scenesAt } from "../../src/conewise/javascript/wave/choices.js";
import { fineShare, flopsText, statesOf, textsOf } from "../../src/conewise/javascript/wave/cone.js";
import { paintOf } from "../../src/conewise/javascript/wave/painter.js";
import { pace } from "../../src/conewise/javascript/wave/player.js";
import { showOf, total, typical, withoutPart } from "../../src/conewise/javascript/wave/show.js";
import { PHASES, stepsOf } from "../../src/conewise/javascript/wave/steps.js";

/** @import { SentFolded, SentWaves } from "../../src/conewise/javascript/sent.js" */

/** @type {SentFolded} */
const FOLDED = {
  kind: "conewise folded",
  format: 1,
  model: "m",
  edges: [],
  runs: [
    [0, 1],
    [1, 2],
  ],
  parts: [
    ["inputs", "in", "inputs", "the inputs", 0, 0, null, ""],
    ["0", "attn", "attn", "attention", 10, 100, 0, ""],
    ["0", "mlp", "mlp", "the MLP", 4, 40, 0, ""],
    ["1", "mlp", "mlp", "the MLP", 4, 40, 1, ""],
    ["outputs", "out", "logits", "the outputs", 2, 2000, null, ""],
  ],
  cones: [
    {
      names: ["z[layer=0]"],
      sites: ["a"],
      at: [1],
      from: 2,
      but: [[1, 3, 30]],
      lost: [[1, 1]],
      reused: [[1, 2]],
    },
    { names: ["mlp_out[layer=1]", "late"], sites: ["b"], at: [3], from: 4, but: [], lost: [], reused: [] },
  ],
  demanded: ["logits"],
  full_evaluations: 20,
  full_flops: 2180,
};

/** @type {SentWaves} */
const WAVES = {
  kind: "conewise waves",
  nodes: [
    ["x", true],
    ["h", false],
    ["y", false],
  ],
  targets: [2],
  full: 2,
  before: { 0: "1", 1: "2", 2: "3" },
  waves: [
    {
      site: 0,
      after: { 0: "5", 1: "6", 2: "3" },
      restored: 0,
      invalidated: [1, 2],
      planned: [1, 2],
      recomputed: [1, 2],
      reused: [],
    },
    { site: 1, after: { 1: "9" }, restored: 1, invalidated: [2], planned: [2], recomputed: [2], reused: [0] },
  ],
};

const folded = showOf(FOLDED);
const graph = showOf(WAVES);

// -- shows -------------------------------------------------------------------------------------------

test("a name without its part is what Python makes of it", () => {
  const names = JSON.parse(readFileSync(new URL("names_without_part.json", import.meta.url), "utf8"));
  for (const [name, bare] of names) assert.equal(withoutPart(name), bare);
});

test("a cone in short is whole parts from one on, but for those listed", () => {
  const { recomputed, invalidated, reused, cost, at } = folded.scene(0);
  assert.deepEqual(recomputed, [
    [1, 3],
    [2, 4],
    [3, 4],
    [4, 2],
  ]);
  assert.deepEqual(invalidated, [
    [1, 4],
    [2, 4],
    [3, 4],
    [4, 2],
  ]);
  assert.deepEqual([reused, cost, at], [[[1, 2]], 2110, [1]]);
});

test("a cone is found by any of its names, and by that of a part of a value", () => {
  const found = ["late", "mlp_out[layer=1]", "mlp_out[layer=1, pos=3]", "z[layer=0, head=2]", "nowhere"];
  assert.deepEqual(found.map(folded.find), [1, 1, 1, 0, undefined]);
  assert.deepEqual([...folded.names.keys()], ["z[layer=0]", "mlp_out[layer=1]", "late"]);
});

test("parts of a layer are named by it, and those of none by themselves", () => {
  assert.deepEqual(
    folded.items.map(item => item.label),
    ["inputs", "layer 0, attention", "layer 0, the MLP", "layer 1, the MLP", "logits"],
  );
  assert.deepEqual(
    folded.items.map(item => item.group),
    ["inputs", "layer 0", "layer 0", "layer 1", "outputs"],
  );
});

test("nodes of a graph count one each, sources none", () => {
  assert.deepEqual(
    graph.items.map(item => item.nodes),
    [0, 1, 1],
  );
  assert.deepEqual(graph.scene(1).recomputed, [[2, 1]]);
  assert.deepEqual([graph.find("h"), graph.find("y"), graph.targets], [1, undefined, "y"]);
});

test("the first scene is the one nearest to half of the graph", () => {
  assert.equal(total(folded.scene(0).recomputed), 13);
  assert.equal(typical(folded), 0);
  assert.equal(typical(graph), 1);
});

test("a box that holds several sites has their scenes in turn", () => {
  assert.deepEqual(
    [...scenesAt([[0], [1, 0], [0]])],
    [
      [0, [0, 1, 2]],
      [1, [1]],
    ],
  );
});

// -- steps -------------------------------------------------------------------------------------------

test("a wave goes through its phases in order, and counts what it does", () => {
  const steps = stepsOf(folded, folded.scene(0), "z[layer=0, head=2]");
  const phases = steps.map(step => step.phase);
  assert.deepEqual([...new Set(phases)], PHASES);
  assert.deepEqual(
    phases,
    [...phases].sort((one, other) => PHASES.indexOf(one) - PHASES.indexOf(other)),
  );
  assert.deepEqual(steps[0].ledger, { invalidated: 0, recomputed: 0, reused: 0 });
  assert.deepEqual(steps.at(-1)?.ledger, { invalidated: 14, recomputed: 13, reused: 2 });
  assert.ok(steps[1].text.startsWith("z[layer=0, head=2] gets another value in a fork"));
});

test("parts of one layer are told in one step", () => {
  const steps = stepsOf(folded, folded.scene(0), "z");
  const texts = steps.filter(step => step.phase === "Recompute").map(step => step.text);
  assert.deepEqual(texts, [
    "Layer 0: 7 nodes are computed, inputs first, each once.",
    "Layer 1: 4 nodes are computed, inputs first, each once.",
    "Outputs: 2 nodes are computed, inputs first, each once.",
  ]);
});

test("a demand walks back from what is asked for", () => {
  const steps = stepsOf(folded, folded.scene(0), "z").filter(step => step.phase === "Demand");
  assert.deepEqual(
    steps.map(step => step.now),
    [[4], [3], [2, 1], [1]],
  );
  assert.match(steps[3].text, /2 values are read as they are\./);
});

test("a step keeps the states of its moment", () => {
  const steps = stepsOf(folded, folded.scene(0), "z");
  const first = steps.find(step => step.phase === "Invalidate");
  assert.deepEqual(first?.states.get(1), { site: true, lost: 4, now: true });
  const read = steps.find(step => step.phase === "Read");
  assert.deepEqual(read?.states.get(1), {
    site: true,
    lost: 1,
    wanted: false,
    reused: true,
    done: 3,
    now: false,
  });
  assert.equal(steps.at(-1)?.states.size, 0, "the fork is dropped");
});

test("values are told where they are known, and as a change where they change", () => {
  const texts = stepsOf(graph, graph.scene(0), "x").map(step => step.text);
  assert.match(texts[1], /^x gets another value \(1 → 5\) in a fork/);
  assert.ok(texts.includes("h (2 → 6) is computed: all that it reads is valid by now."));
  assert.ok(texts.includes("y (3) is read. 2 of 2 nodes were computed; a full run computes all of them."));
});

test("one is told as one", () => {
  const texts = stepsOf(graph, graph.scene(1), "h")
    .map(step => step.text)
    .join("\n");
  assert.match(texts, /1 value is read as it is\./);
  assert.match(texts, /1 node had to be computed to have it back\.$/);
});

// -- painting ----------------------------------------------------------------------------------------

test("a box is filled as far as its nodes are done, and never further", () => {
  const [item] = folded.items.slice(1);
  assert.deepEqual([paintOf({ done: 3 }, item).done, paintOf({ done: 30 }, item).done], [0.3, 1]);
  const on = (/** @type {Record<string, boolean>} */ classes) =>
    Object.keys(classes).filter(name => classes[name]);
  assert.deepEqual(on(paintOf({ done: 6, lost: 1, now: true }, item).classes), [
    "is-lost",
    "is-done",
    "is-full",
    "is-now",
  ]);
  assert.deepEqual(on(paintOf({}, item).classes), []);
  assert.equal(paintOf({ lost: 1 }, folded.items[0]).lost, 1, "a source has no nodes, and can be lost");
});

test("a cone paints what it recomputes, what it reads, and its site", () => {
  const states = statesOf(folded.scene(0));
  assert.deepEqual(states.get(1), { done: 3, reused: true, site: true });
  assert.deepEqual([...states.keys()], [1, 2, 3, 4]);
});

// -- words -------------------------------------------------------------------------------------------

test("a cone is told in words", () => {
  const texts = textsOf(folded, folded.scene(0), "z[layer=0, head=2]");
  assert.equal(
    texts.words,
    "z[layer=0, head=2] lies in layer 0, attention. A change there recomputes 13 nodes of 20; the others keep their " +
      "values, and 2 of them are read as they are.",
  );
  assert.deepEqual(
    [texts.recomputed, texts.share, texts.kept, texts["kept-share"], texts.flops, texts["flops-share"]],
    ["13", " of 20 nodes, 65 %", "7", " 35 %", "2.11 kFLOP", " 97 % of a run"],
  );
});

test("little is told finer, and nothing is nothing", () => {
  assert.deepEqual(
    [fineShare(1, 20), fineShare(0, 20), fineShare(1, 2), fineShare(1, 0)],
    ["5.0 %", "0 %", "50 %", "–"],
  );
  assert.deepEqual([0, 999, 1000, 999_999].map(flopsText), [
    "0 FLOP",
    "999 FLOP",
    "1.00 kFLOP",
    "1.00 MFLOP",
  ]);
});

test("a short wave is not played too slowly, a long one not too fast", () => {
  assert.deepEqual([1, 30, 1000].map(pace), [900, 500, 120]);
});
