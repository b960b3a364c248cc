// The layered picture of a circuit, the slider of its threshold, and the curve of its faithfulness.
"use strict";
window.conewise = window.conewise || {};
(function (conewise) {
  const data = JSON.parse(document.getElementById("conewise-circuit").textContent);
  const { boxes, edges, points } = data, stage = document.getElementById("stage"), tip = document.getElementById("tip");
  const ROW = 50, LEFT = 62, TOP = 26, BOX = { width: 46, height: 20 };
  const CELL = Math.max(50, Math.min(66, (stage.clientWidth - LEFT - 12) / data.columns));  // as wide as there is room for
  const box = boxes.map(([name, kind, layer, x, y]) => ({ name, kind, layer, x: LEFT + (x + 0.5) * CELL, y: TOP + y * ROW }));
  const largest = Math.max(0, ...edges.map(edge => Math.abs(edge.score || 0)));

  // -- what is shown ---------------------------------------------------------------------------------
  // `stop` is the number of a point of the curve, or −1 for the circuit itself; `chosen` a box or an edge.
  const state = { stop: -1, chosen: null }, listeners = [];
  const isShown = edge => state.stop < 0 ? edge.own : edge.level >= points[state.stop][0];
  function set(what) {
    Object.assign(state, what);
    for (const listener of listeners) listener();
  }

  // -- numbers and elements --------------------------------------------------------------------------
  function shown(number, signed) {
    if (number === null || number === undefined) return "–";
    const size = Math.abs(number), sign = number < 0 ? "−" : signed && number > 0 ? "+" : "";
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return sign + size.toExponential(2).replace("e+", "e").replace("e-", "e−");
    return sign + Number(size.toPrecision(4)).toString();
  }
  const counted = (number, one, many) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
  function element(tag, attributes, ...inside) {
    const made = document.createElement(tag);
    for (const [name, text] of Object.entries(attributes || {})) made.setAttribute(name, text);
    made.append(...inside);
    return made;
  }
  function drawn(tag, attributes, ...inside) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, text] of Object.entries(attributes || {})) made.setAttribute(name, text);
    made.append(...inside);
    return made;
  }

  // -- the picture -----------------------------------------------------------------------------------
  const width = LEFT + data.columns * CELL + 12, height = TOP + Math.max(0, data.rows - 1) * ROW + 30;
  const svg = drawn("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "The layered picture of the circuit" });
  const sign = edge => edge.score === null || edge.score === 0 ? "plain" : edge.score < 0 ? "less" : "more";
  const place = ([x, y], down) => `${(LEFT + (x + 0.5) * CELL).toFixed(1)} ${(TOP + y * ROW + down).toFixed(1)}`;
  function way(edge) {
    const half = BOX.height / 2, [a, b, c, d] = edge.curve;
    return `M ${place(a, half)} C ${place(b, half)}, ${place(c, -half)}, ${place(d, -half)}`;
  }
  function layers() {
    const first = new Map();
    for (const one of box) if (one.layer !== null) {
      const [low, high] = first.get(one.layer) || [one.y, one.y];
      first.set(one.layer, [Math.min(low, one.y), Math.max(high, one.y)]);
    }
    return [...first.entries()].sort((a, b) => a[0] - b[0]);
  }
  layers().forEach(([layer, [low, high]], at) => {
    if (at % 2 === 0) svg.append(drawn("rect", { class: "stripe", x: 0, y: low - ROW / 2, width, height: high - low + ROW }));
    svg.append(drawn("text", { class: "row", x: 6, y: low }, `layer ${layer}`));
  });
  for (const [from, to] of data.links) {
    svg.append(drawn("path", { class: "link", "data-from": from, "data-to": to, d: `M ${box[from].x} ${box[from].y + 10} L ${box[to].x} ${box[to].y - 10}` }));
  }
  const lines = edges.map(edge => {
    const size = edge.score === null ? 1.3 : 0.8 + 4.2 * (largest ? Math.abs(edge.score) / largest : 0);
    return drawn("path", { class: `edge ${sign(edge)}`, d: way(edge), "stroke-width": size.toFixed(2) });
  });
  const hits = edges.map((edge, at) => drawn("path", { class: "hit", d: way(edge), "data-edge": at }));
  svg.append(...lines, ...hits);
  const marks = box.map((one, at) => {
    const mark = drawn("g", { class: `box ${one.kind}`, "data-box": at, tabindex: 0, role: "button", "aria-label": one.name },
      drawn("rect", { x: one.x - BOX.width / 2, y: one.y - BOX.height / 2, width: BOX.width, height: BOX.height, rx: one.kind === "head" ? 10 : 3 }),
      drawn("text", { x: one.x, y: one.y }, one.name));
    svg.append(mark);
    return mark;
  });
  stage.append(svg);

  // The edges of what is pointed at or chosen; null where that is everything.
  function edgesOf(what) {
    if (!what) return null;
    if (what.kind === "edge") return edges.map((_, at) => at === what.at);
    return edges.map(edge => edge.from === what.at || edge.to === what.at);
  }
  let pointed = null;
  function paint() {
    const near = edgesOf(pointed || state.chosen), seen = new Set();
    edges.forEach((edge, at) => {
      const away = !isShown(edge);
      lines[at].classList.toggle("away", away);
      hits[at].classList.toggle("away", away);
      lines[at].classList.toggle("far", near !== null && !near[at]);
      lines[at].classList.toggle("near", near !== null && near[at]);
      if (!away) { seen.add(edge.from); seen.add(edge.to); }
    });
    const about = new Set();
    if (near) edges.forEach((edge, at) => { if (near[at] && isShown(edge)) { about.add(edge.from); about.add(edge.to); } });
    marks.forEach((mark, at) => {
      mark.classList.toggle("away", !seen.has(at));
      mark.classList.toggle("near", about.has(at));
      mark.classList.toggle("far", near !== null && !about.has(at));
      mark.classList.toggle("chosen", state.chosen !== null && state.chosen.kind === "box" && state.chosen.at === at);
    });
    for (const link of svg.querySelectorAll(".link")) {
      link.classList.toggle("away", !seen.has(Number(link.dataset.from)) || !seen.has(Number(link.dataset.to)));
    }
  }

  // -- pointing and choosing -------------------------------------------------------------------------
  function told(what) {
    const line = (name, text) => element("span", {}, element("i", {}, name), text);
    if (what.kind === "edge") {
      const edge = edges[what.at];
      return [element("b", {}, edge.name), line("score", shown(edge.score, true)),
        ...(edge.level >= 0 ? [line("up to", shown(edge.level))] : [])];
    }
    const inward = edges.filter(edge => edge.to === what.at && isShown(edge)).length;
    const outward = edges.filter(edge => edge.from === what.at && isShown(edge)).length;
    return [element("b", {}, box[what.at].name), line("reads", counted(inward, "edge", "edges")), line("is read by", counted(outward, "edge", "edges"))];
  }
  function target(event) {
    const found = event.target.closest("[data-edge], [data-box]");
    if (!found) return null;
    return found.dataset.edge === undefined ? { kind: "box", at: Number(found.dataset.box) } : { kind: "edge", at: Number(found.dataset.edge) };
  }
  function point(what, x, y) {
    const same = what === null ? pointed === null : pointed !== null && pointed.kind === what.kind && pointed.at === what.at;
    if (!same) { pointed = what; paint(); }
    tip.hidden = what === null;
    if (what === null) return;
    if (!same) tip.replaceChildren(...told(what));
    const { width: wide, height: high } = tip.getBoundingClientRect();
    const left = x + 16 + wide > innerWidth ? x - wide - 12 : x + 16, top = y + 18 + high > innerHeight ? y - high - 12 : y + 18;
    tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
  }
  svg.addEventListener("pointermove", event => point(target(event), event.clientX, event.clientY));
  svg.addEventListener("pointerleave", () => point(null));
  svg.addEventListener("focusin", event => {
    const found = target(event), at = event.target.getBoundingClientRect();
    if (found && event.target.matches(":focus-visible")) point(found, at.right, at.bottom);
  });
  svg.addEventListener("focusout", () => point(null));
  const choose = what => set({ chosen: what });
  svg.addEventListener("click", event => choose(target(event)));
  svg.addEventListener("keydown", event => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(target(event)); }
  });
  addEventListener("keydown", event => { if (event.key === "Escape") { point(null); choose(null); } });

  // -- what is in sight, in words --------------------------------------------------------------------
  const about = document.getElementById("about"), aboutName = document.getElementById("about-name"), aboutEdges = document.getElementById("about-edges");
  const fact = (name, text) => element("div", {}, element("dt", {}, name), element("dd", {}, text));
  function listed(title, found) {
    if (!found.length) return [];
    const rows = found.slice().sort((a, b) => Math.abs(b.score || 0) - Math.abs(a.score || 0)).slice(0, 12);
    const more = found.length - rows.length;
    return [element("h4", {}, title), element("table", {}, element("tbody", {}, ...rows.map(edge =>
      element("tr", {}, element("td", {}, edge.name), element("td", {}, shown(edge.score, true)))))),
      ...(more > 0 ? [element("p", { class: "hint" }, `and ${more} more`)] : [])];
  }
  function describe() {
    const seen = edges.filter(isShown), what = state.chosen;
    if (!what) {
      const own = state.stop < 0;
      aboutName.textContent = own ? "The whole circuit" : "The circuit of this threshold";
      const [, count, faithful] = own ? [null, data.own.edges, data.own.faithfulness] : points[state.stop];
      about.replaceChildren(fact("edges", count.toLocaleString("en")), ...(faithful === null ? [] : [fact("faithfulness", shown(faithful))]));
      aboutEdges.replaceChildren();
    } else if (what.kind === "edge") {
      const edge = edges[what.at];
      aboutName.textContent = edge.name;
      about.replaceChildren(fact("score", shown(edge.score, true)), ...(edge.level >= 0 ? [fact("in circuits up to", shown(edge.level))] : []));
      aboutEdges.replaceChildren();
    } else {
      const inward = seen.filter(edge => edge.to === what.at), outward = seen.filter(edge => edge.from === what.at);
      aboutName.textContent = box[what.at].name;
      about.replaceChildren(fact("reads", counted(inward.length, "edge", "edges")), fact("is read by", counted(outward.length, "edge", "edges")));
      aboutEdges.replaceChildren(...listed("reads", inward), ...listed("is read by", outward));
    }
  }

  // -- the slider ------------------------------------------------------------------------------------
  const slider = document.getElementById("threshold"), own = document.getElementById("own"), said = document.getElementById("chosen");
  if (slider) {
    slider.max = points.length - 1;
    slider.disabled = false;
    slider.value = String(nearest());
    slider.addEventListener("input", () => set({ stop: Number(slider.value) }));
    own.addEventListener("click", () => { slider.value = String(nearest()); set({ stop: -1 }); });
  }
  // The point of the curve whose size is nearest to the circuit's own.
  function nearest() {
    const gaps = points.map(([, count]) => Math.abs(Math.log((count + 1) / (data.own.edges + 1))));
    return gaps.indexOf(Math.min(...gaps));
  }
  function say() {
    if (!slider) return;
    own.setAttribute("aria-pressed", String(state.stop < 0));
    const [threshold, count, faithful] = state.stop < 0 ? [null, data.own.edges, data.own.faithfulness] : points[state.stop];
    const words = [counted(count, "edge", "edges")];
    if (threshold !== null) words.unshift(`|score| ≥ ${shown(threshold)}`);
    if (faithful !== null) words.push(`faithfulness ${shown(faithful)}`);
    said.textContent = words.join(" · ");
    slider.setAttribute("aria-valuetext", said.textContent);
  }

  // -- the curve -------------------------------------------------------------------------------------
  const area = document.getElementById("curve");
  function plot() {
    if (!area) return;
    const known = points.map(([threshold, count, faithful], at) => ({ threshold, count, faithful, at })).filter(one => one.faithful !== null);
    const W = 340, H = 190, L = 38, R = 10, T = 10, B = 34;
    const counts = known.map(one => one.count).concat(data.own.faithfulness === null ? [] : [data.own.edges]).map(count => Math.max(1, count));
    const heights = known.map(one => one.faithful).concat(data.own.faithfulness === null ? [] : [data.own.faithfulness]);
    const low = Math.min(0, ...heights), high = Math.max(1, ...heights), from = Math.log(Math.min(...counts)), to = Math.log(Math.max(...counts));
    const x = count => L + (to > from ? (Math.log(Math.max(1, count)) - from) / (to - from) : 0.5) * (W - L - R);
    const y = value => T + (high - value) / (high - low) * (H - T - B);
    const made = drawn("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "Faithfulness by the number of edges" });
    for (const value of [0, 1]) {
      made.append(drawn("line", { class: "axis", x1: L, x2: W - R, y1: y(value), y2: y(value) }), drawn("text", { x: L - 8, y: y(value) + 4, "text-anchor": "end" }, String(value)));
    }
    const ends = [Math.exp(from), Math.exp(to)].map(Math.round);
    made.append(drawn("text", { x: L, y: H - 16 }, ends[0].toLocaleString("en")), drawn("text", { x: W - R, y: H - 16, "text-anchor": "end" }, ends[1].toLocaleString("en")),
      drawn("text", { x: (L + W - R) / 2, y: H - 4, "text-anchor": "middle" }, "edges, in logarithms"));
    made.append(drawn("polyline", { class: "way", points: known.map(one => `${x(one.count).toFixed(1)},${y(one.faithful).toFixed(1)}`).join(" ") }));
    for (const one of known) {
      const dot = drawn("circle", { class: `dot${one.at === state.stop ? " now" : ""}`, cx: x(one.count), cy: y(one.faithful), r: 4.2, "data-stop": one.at },
        drawn("title", {}, `${counted(one.count, "edge", "edges")}: ${shown(one.faithful)}`));
      dot.addEventListener("click", () => { slider.value = String(one.at); set({ stop: one.at }); });
      made.append(dot);
    }
    if (data.own.faithfulness !== null) {
      const at = [x(data.own.edges), y(data.own.faithfulness)];
      made.append(drawn("path", { class: "this", d: `M ${at[0]} ${at[1] - 6} l 6 6 l -6 6 l -6 -6 z` }, drawn("title", {}, `this circuit: ${shown(data.own.faithfulness)}`)));
    }
    area.replaceChildren(made);
  }

  listeners.push(paint, describe, say, plot);
  Object.assign(conewise, { circuit: { data, edges, state, isShown, choose, listen: listener => listeners.push(listener), shown, element, largest } });
  set({});
})(window.conewise);
