// Numbers and texts as people read them.
import assert from "node:assert/strict";
import test from "node:test";

import {
  counted,
  large,
  percent,
  plain,
  shareOf,
  short,
  shown,
  whole,
} from "../../src/conewise/javascript/page/words.js";

test("a number has four digits", () => {
  assert.equal(shown(0), "0");
  assert.equal(shown(-0), "0");
  assert.equal(shown(1.23456), "1.235");
  assert.equal(shown(-0.5), "−0.5");
  assert.equal(shown(123456), "123500");
});

test("a number that is very large or very small has a power of ten", () => {
  assert.equal(shown(0.000123456), "1.235e−4");
  assert.equal(shown(-1234567), "−1.235e6");
});

test("a number that is rounded to a million is written as one", () => {
  assert.equal(shown(999_999.9), "1.000e6");
  assert.equal(shown(0.00099999), "0.001");
});

test("what is no number is said so", () => {
  assert.equal(shown(null), "–");
  assert.equal(shown(undefined), "–");
  assert.equal(shown(NaN), "NaN");
  assert.equal(shown(Infinity, true), "+∞");
  assert.equal(shown(-Infinity), "−∞");
});

test("a signed number has its sign, and 0 has none", () => {
  assert.deepEqual(
    [1, -1, 0].map(one => shown(one, true)),
    ["+1", "−1", "0"],
  );
});

test("a large count has a letter for its thousands", () => {
  assert.deepEqual([0, 7, 999, 1000, 1234, 739_123_456].map(large), [
    "0",
    "7",
    "999",
    "1.00 k",
    "1.23 k",
    "739 M",
  ]);
});

test("a large count is rounded before its letter is chosen", () => {
  assert.equal(large(999_950), "1.00 M");
  assert.equal(large(9996), "10.0 k");
  assert.equal(large(999_999_999_999), "1.00 T");
});

test("every power of a thousand has its own letter, and what is beyond has the last", () => {
  const powers = [1e3, 1e6, 1e9, 1e12, 1e15, 1e18].map(large);
  assert.deepEqual(powers, ["1.00 k", "1.00 M", "1.00 G", "1.00 T", "1.00 P", "1.00 E"]);
  assert.equal(large(1.5e22), "15000 E");
});

test("a share is percent with a sign, finer where it is small", () => {
  assert.deepEqual([0.5, -0.25, 0.0123, 1].map(percent), ["+50.0 %", "−25.0 %", "+1.23 %", "+100.0 %"]);
  assert.equal(percent(NaN), "NaN");
  assert.equal(percent(-Infinity), "−∞");
});

test("a share of nothing is none", () => {
  assert.equal(shareOf(1, 4), "25 %");
  assert.equal(shareOf(1, 3, 1), "33.3 %");
  assert.equal(shareOf(0, 0), "–");
});

test("one is one, and others are many", () => {
  assert.equal(whole(1234567.4), "1,234,567");
  assert.deepEqual(
    [0, 1, 2000].map(one => counted(one, "edge", "edges")),
    ["0 edges", "1 edge", "2,000 edges"],
  );
});

test("text is no markup for plotly", () => {
  assert.equal(plain("a<b>&amp;"), "a&lt;b&gt;&amp;amp;");
});

test("a long text is cut to its length", () => {
  assert.equal(short("abcdef", 6), "abcdef");
  assert.equal(short("abcdefg", 6), "abcde…");
});
