// The numbers and names of a sweep, read from the page: every other script asks here.
"use strict";
window.conewise = window.conewise || {};
(function (conewise) {
  const given = JSON.parse(document.getElementById("conewise-data").textContent);

  function bytes(text) {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text).buffer;
    const raw = atob(text), found = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
    return found.buffer;
  }
  const floats = text => text === null ? null : new Float64Array(bytes(text));

  const table = floats(given.table), base = floats(given.base), source = floats(given.source);
  const perPrompt = floats(given.perPrompt), basePerPrompt = floats(given.basePerPrompt);
  const sourcePerPrompt = floats(given.sourcePerPrompt);
  const parts = given.parts, metrics = given.metrics, prompts = given.prompts;
  const count = table.length / metrics.length;

  for (const part of parts) {
    part.shape = part.coordinates.map(along => along.length);
    part.strides = part.shape.map((_, axis) => part.shape.slice(axis + 1).reduce((a, b) => a * b, 1));
    for (const column of Object.values(part.at)) {
      if (column.list) column.numbers = new Int32Array(bytes(column.list));
    }
  }

  function partOf(cell) {
    let low = 0, high = parts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (parts[middle].start <= cell) low = middle; else high = middle - 1;
    }
    return parts[low];
  }
  const along = (part, axis, own) =>
    part.coordinates[axis][Math.floor(own / part.strides[axis]) % part.shape[axis]];

  function nameOf(cell) {
    const part = partOf(cell), own = cell - part.start;
    if (part.names) return part.names[own];
    let name = "";
    for (const piece of part.pieces) name += typeof piece === "string" ? piece : along(part, piece, own);
    return name;
  }
  function kindOf(cell) {
    const part = partOf(cell);
    return part.kinds ? part.kinds[cell - part.start] : part.kind;
  }
  const MISSING = -(2 ** 31);
  // A coordinate of a cell, or null where it has none.
  function at(cell, name) {
    const part = partOf(cell), column = part.at[name], own = cell - part.start;
    if (!column) return null;
    if ("fixed" in column) return column.fixed;
    if ("axis" in column) return along(part, column.axis, own);
    return column.numbers[own] === MISSING ? null : column.numbers[own];
  }
  // The first cell of that name, or -1.
  function find(name) {
    for (let cell = 0; cell < count; cell++) if (nameOf(cell) === name) return cell;
    return -1;
  }

  // The nodes and FLOPs that a cell's world computes, or null where they are not known.
  const costs = given.costs, starts = [];
  if (costs) costs.runs.reduce((start, [, many]) => (starts.push(start), start + many), 0);
  function cost(cell) {
    if (!costs) return null;
    let low = 0, high = starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (starts[middle] <= cell) low = middle; else high = middle - 1;
    }
    const cone = costs.runs[low][0];
    return { evaluations: costs.evaluations[cone], flops: costs.flops[cone], full: costs.full };
  }

  // As `Result.to_dataframe()` computes them, in the same order of the same 64-bit operations.
  const value = (metric, cell) => table[metric * count + cell];
  const effect = (metric, cell) => table[metric * count + cell] - base[metric];
  function share(metric, cell) {
    const span = source === null ? NaN : source[metric] - base[metric];
    return span === 0 ? NaN : effect(metric, cell) / span;
  }
  const kept = new Map();
  // One of "value", "effect", "share" of every cell.
  function numbers(metric, which) {
    const key = `${metric} ${which}`;
    if (!kept.has(key)) {
      const found = new Float64Array(count), compute = { value, effect, share }[which];
      for (let cell = 0; cell < count; cell++) found[cell] = compute(metric, cell);
      kept.set(key, found);
    }
    return kept.get(key);
  }
  // The numbers of the keys, in the order of the keys; equal ones stay as they stand, and those that are no
  // numbers come last either way. By digits of 16 bits: a comparison for each pair takes a second for a million.
  function sorted(keys, descending) {
    const size = keys.length, copy = new Float64Array(size), bits = new Uint32Array(copy.buffer);
    const turn = descending ? -1 : 0;
    let from = new Uint32Array(size), to = new Uint32Array(size);
    for (let i = 0; i < size; i++) {
      from[i] = i;
      copy[i] = keys[i] + 0;  // −0 is 0
      // As whole numbers, the bits of positive numbers are ordered, and those of negative ones the other way.
      const negative = bits[2 * i + 1] >> 31;
      bits[2 * i] ^= negative ^ turn;
      bits[2 * i + 1] ^= (negative | 0x80000000) ^ turn;
      if (keys[i] !== keys[i]) bits[2 * i] = bits[2 * i + 1] = 0xffffffff;
    }
    for (let digit = 0; digit < 4; digit++) {
      const word = digit >> 1, shift = (digit & 1) * 16, starts = new Uint32Array(65537);
      for (let i = 0; i < size; i++) starts[((bits[2 * i + word] >>> shift) & 0xffff) + 1]++;
      for (let i = 0; i < 65536; i++) starts[i + 1] += starts[i];
      for (let i = 0; i < size; i++) to[starts[(bits[2 * from[i] + word] >>> shift) & 0xffff]++] = from[i];
      [from, to] = [to, from];
    }
    return from;
  }
  // The place of every cell when they are ordered by the size of their effect, from 1.
  function ranks(metric) {
    const key = `${metric} rank`;
    if (!kept.has(key)) {
      const sizes = numbers(metric, "effect").map(Math.abs);
      const order = sorted(sizes, true);
      const found = new Uint32Array(count);
      for (let place = 0; place < count; place++) found[order[place]] = place + 1;
      kept.set(key, found);
      kept.set(`${metric} order`, order);
    }
    return kept.get(key);
  }
  function ranked(metric) {
    ranks(metric);
    return kept.get(`${metric} order`);
  }

  // -- numbers as people read them -------------------------------------------------------------
  function shown(number, signed) {
    if (number === null || number === undefined) return "–";
    if (Number.isNaN(number)) return "NaN";
    const sign = number < 0 ? "−" : signed && number > 0 ? "+" : "";
    const size = Math.abs(number);
    if (size === Infinity) return `${sign}∞`;
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
      return sign + size.toExponential(3).replace("e+", "e").replace("e-", "e−");
    }
    return sign + Number(size.toPrecision(4)).toString();
  }
  // A count with a letter for its thousands: 739 M.
  function large(number) {
    const letters = ["", "k", "M", "G", "T", "P", "E"];
    const place = number < 1000 ? 0 : Math.min(6, Math.floor(Math.log10(number) / 3));
    return place ? `${(number / 1000 ** place).toPrecision(3)} ${letters[place]}` : String(number);
  }
  const percent = number => Number.isFinite(number)
    ? `${number < 0 ? "−" : "+"}${Math.abs(number * 100).toFixed(Math.abs(number) < 0.1 ? 2 : 1)} %`
    : shown(number);
  const formatted = (which, number) => which === "share" ? percent(number) : shown(number, which === "effect");
  // Text for Plotly, which reads some HTML in what it draws.
  const plain = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const listeners = [];
  const state = { metric: 0, shown: "effect", range: 0.99, site: -1 };
  // Change what is shown, and tell all that show it; `what` has the keys that changed.
  function set(what) {
    const changed = Object.keys(what).filter(key => state[key] !== what[key]);
    if (!changed.length) return;
    Object.assign(state, what);
    for (const listener of listeners) listener(changed);
  }

  Object.assign(conewise, {
    data: { given, parts, metrics, prompts, count, base, source, perPrompt, basePerPrompt, sourcePerPrompt },
    names: { nameOf, kindOf, at, partOf, find, columns: ["layer", "head", "pos", "neuron"].filter(
      name => parts.some(part => name in part.at)) },
    numbers: { value, effect, share, numbers, sorted, ranks, ranked, cost, hasCosts: costs !== null },
    words: { shown, large, percent, formatted, plain },
    state, set, listen: listener => listeners.push(listener),
    element(tag, attributes, ...inside) {
      const made = document.createElement(tag);
      for (const [name, text] of Object.entries(attributes || {})) made.setAttribute(name, text);
      made.append(...inside);
      return made;
    },
  });
})(window.conewise);
