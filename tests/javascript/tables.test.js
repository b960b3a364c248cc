// Tables: which rows there are, on which page, and as CSV.
import assert from "node:assert/strict";
import test from "node:test";

import { line } from "../../src/conewise/javascript/page/csv.js";
import { matches, pageOf, wordsOf } from "../../src/conewise/javascript/page/rows.js";
import { placed } from "../../src/conewise/javascript/page/tip.js";

test("a filter is words in any order, whatever their letters", () => {
  const words = wordsOf("  Head=1 LAYER=9 ");
  assert.deepEqual(words, ["head=1", "layer=9"]);
  assert.ok(matches("z[layer=9, head=1]", words));
  assert.ok(!matches("z[layer=8, head=1]", words));
  assert.ok(matches("anything", wordsOf("")));
});

test("a page is the nearest one that there is", () => {
  assert.deepEqual(pageOf(60, 1, 25), { page: 1, pages: 3, from: 25, to: 50 });
  assert.deepEqual(pageOf(60, Infinity, 25), { page: 2, pages: 3, from: 50, to: 60 });
  assert.deepEqual(pageOf(60, -1, 25), { page: 0, pages: 3, from: 0, to: 25 });
});

test("whole pages have no empty one after them, and no rows have one page", () => {
  assert.equal(pageOf(50, 0, 25).pages, 2);
  assert.deepEqual(pageOf(0, 3, 25), { page: 0, pages: 1, from: 0, to: 0 });
});

test("a line of CSV is quoted where it has to be", () => {
  assert.equal(line(["z[layer=1, head=2]", "plain", 'a "b"']), '"z[layer=1, head=2]",plain,"a ""b"""\n');
  assert.equal(line(["two\nlines"]), '"two\nlines"\n');
});

test("a text that a spreadsheet would compute has an apostrophe before it, and a number has none", () => {
  assert.equal(line(["=1+2", "+a", "-b", "@c", "\td", "a=b"]), "'=1+2,'+a,'-b,'@c,'\td,a=b\n");
  assert.equal(line(['=HYPERLINK("x","y")', -1.5]), `"'=HYPERLINK(""x"",""y"")",-1.5\n`);
});

test("numbers are written in full, as pandas reads them", () => {
  assert.equal(
    line([0.1 + 0.2, NaN, Infinity, -Infinity, null, 1e21]),
    "0.30000000000000004,NaN,inf,-inf,,1e+21\n",
  );
});

test("words beside the pointer stay in the window", () => {
  assert.equal(placed(100, 50, 1000), 116);
  assert.equal(placed(980, 50, 1000), 914);
  assert.equal(placed(20, 100, 90), 4);
});
