// The maps: one figure for each part of the sweep, on one scale of colours whose middle is no effect.
"use strict";
(function (conewise) {
  const { data, names, numbers, words, state, element } = conewise;
  const BARS = 120;  // more sites than this in a row are wrapped into a map
  const area = document.getElementById("figures"), tip = document.getElementById("tip");
  const maps = [];

  const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colours = () => data.given.colours[conewise.isDark() ? "dark" : "light"];
  // The colour at a place of the scale, from −1 to 1.
  function colour(place) {
    const list = colours(), at = (Math.max(-1, Math.min(1, place || 0)) + 1) / 2 * (list.length - 1);
    const low = Math.min(Math.floor(at), list.length - 2), part = at - low;
    const mixed = list[low].map((one, channel) => Math.round(one + (list[low + 1][channel] - one) * part));
    return `rgb(${mixed})`;
  }
  // The middle of the colours: the base for values, and 0 for what is told from there.
  const middle = () => state.shown === "value" ? data.base[state.metric] : 0;

  // How far the colours reach from the middle: all of the finite numbers, or most of them.
  const reaches = new Map();
  function reach() {
    const key = `${state.metric} ${state.shown} ${state.range}`;
    if (!reaches.has(key)) {
      const centre = middle(), all = numbers.numbers(state.metric, state.shown);
      const sizes = all.filter(Number.isFinite).map(number => Math.abs(number - centre)).sort();
      const place = Math.min(sizes.length - 1, Math.floor(state.range * sizes.length));
      reaches.set(key, sizes[place] || sizes[sizes.length - 1] || 1);
    }
    return reaches.get(key);
  }

  // -- how a part is laid out ------------------------------------------------------------------
  const LETTERS = {
    layer: "L", head: "H", kv_head: "K", pos: "P", query_pos: "Q", key_pos: "K", neuron: "N", latent: "F",
  };
  function layout(part) {
    const axes = part.axes, last = axes.length - 1;
    if (axes.length === 0 || (axes.length === 1 && part.count <= BARS)) {
      const labels = axes[0] && axes[0] !== "site"
        ? part.coordinates[0].map((_, place) => written(part, 0, place))
        : Array.from({ length: part.count }, (_, own) => names.nameOf(part.start + own));
      return { kind: "bars", rows: part.count, columns: 1, labels, title: axes[0] || "site" };
    }
    if (axes.length === 1) {
      const columns = part.count <= 2500 ? 50 : part.count <= 1e4 ? 100 : 1000;
      const rows = Math.ceil(part.count / columns), own = part.coordinates[0];
      return {
        kind: "map", rows, columns, title: axes[0], across: `${axes[0]}, ${columns} in a row`,
        labels: Array.from({ length: rows }, (_, row) => String(own[row * columns])),
        heads: Array.from({ length: columns }, (_, column) => `+${column}`),
      };
    }
    const columns = part.shape[last], rows = part.count / columns;
    const labels = Array.from({ length: rows }, (_, row) => {
      const point = axes.slice(0, last).map((_, axis) =>
        Math.floor(row * columns / part.strides[axis]) % part.shape[axis]);
      return axes.length === 2 ? written(part, 0, point[0]) : point.map((place, axis) =>
        `${LETTERS[axes[axis]] || axes[axis] + " "}${named(part, axis, place) ?? part.coordinates[axis][place]}`).join(" ");
    });
    const heads = part.coordinates[last].map((_, place) => written(part, last, place));
    return { kind: "map", rows, columns, labels, heads, title: axes.slice(0, last).join(" × "), across: axes[last] };
  }
  // What stands at a place of an axis: a label where the axis has some, else a number.
  const named = (part, axis, place) => part.labels && part.labels[axis][place];
  const written = (part, axis, place) =>
    named(part, axis, place) ?? label(part.axes[axis], part.coordinates[axis][place]);
  // A number along an axis; a position with its token, where all prompts are of one length.
  function label(axis, number) {
    const token = /^(query_|key_)?pos$/.test(axis) ? data.given.tokens[number] : null;
    return token ? `${token.replace(/\n/g, "⏎").trim() || "␣"} ${number}` : String(number);
  }
  // Some of many labels, so that they do not run into each other.
  function ticks(labels, room) {
    const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 1e4, 1e5].find(s => labels.length / s <= room) || 1e6;
    const shown = labels.map((_, place) => place).filter(place => place % step === 0);
    return { tickvals: shown, ticktext: shown.map(place => words.plain(short(labels[place]))) };
  }
  const short = text => text.length > 34 ? `${text.slice(0, 33)}…` : text;

  // -- drawing -----------------------------------------------------------------------------------
  const rowHeight = rows => rows <= 16 ? 24 : rows <= 40 ? 16 : rows <= 90 ? 10 : Math.max(1, 640 / rows);
  function make(part) {
    const plan = layout(part), plot = element("div", {
      class: "plot", tabindex: "0", role: "application",
      "aria-label": `${part.name}: ${part.count} sites; arrow keys move, Enter chooses`,
    });
    const scroll = element("div", { class: "scroll" }, plot);
    const caption = element("figcaption", {}, part.name, element("small", {}, part.axes.join(" × ")));
    const figure = element("figure", { class: plan.kind }, caption, scroll);
    const longest = Math.max(...plan.labels.slice(0, 2000).map(text => Math.min(34, text.length)));
    const left = Math.min(230, 34 + longest * 6.6), wordy = plan.heads && plan.heads.some(head => head.length > 5);
    const bottom = wordy ? 92 : 44, height = Math.round(plan.rows * rowHeight(plan.rows)) + bottom + 12;
    // At least a pixel for each column: what is thinner would not be drawn at all.
    if (plan.kind === "map" && plan.columns > 300) plot.style.minWidth = `${plan.columns + left + 16}px`;
    figure.style.flexGrow = plan.kind === "bars" ? 8 : Math.max(8, Math.min(plan.columns, 60));
    figure.style.flexBasis = plan.kind === "bars" ? "220px" : `${Math.min(860, Math.max(260, left + plan.columns * 16))}px`;
    area.append(figure);
    const map = { part, plan, plot, left, bottom, height, wordy, cursor: 0 };
    maps.push(map);
  }
  // Drawn when all figures are there, so that each finds the width that it keeps.
  function drawn(map) {
    const { plot } = map;
    Plotly.newPlot(plot, traces(map), arranged(map), { displayModeBar: false, responsive: true, doubleClick: "reset" });
    plot.on("plotly_hover", event => tell(map, pointed(map, event.points[0]), event.event));
    plot.on("plotly_unhover", hideTip);
    plot.on("plotly_click", event => choose(map, pointed(map, event.points[0])));
    plot.addEventListener("keydown", event => key(map, event));
    plot.addEventListener("blur", hideTip);
  }
  function traces({ part, plan }) {
    const all = numbers.numbers(state.metric, state.shown).subarray(part.start, part.start + part.count);
    const far = reach(), centre = middle();
    if (plan.kind === "bars") {
      return [{
        type: "bar", orientation: "h", x: Array.from(all, number => number - centre), base: centre,
        y: plan.labels.map((_, place) => place), hoverinfo: "none",
        marker: { color: Array.from(all, number => colour((number - centre) / far)), line: { color: style("--soft"), width: 0.7 } },
      }];
    }
    const z = [];
    for (let row = 0; row < plan.rows; row++) {
      const line = new Float64Array(plan.columns).fill(NaN);
      line.set(all.subarray(row * plan.columns, Math.min(all.length, (row + 1) * plan.columns)));
      for (let column = 0; column < line.length; column++) if (!Number.isFinite(line[column])) line[column] = NaN;
      z.push(line);
    }
    const gap = plan.rows <= 90 && plan.columns <= 60 ? 1 : 0;
    return [{
      type: "heatmap", z, hoverinfo: "none", showscale: false, xgap: gap, ygap: gap,
      zmin: centre - far, zmax: centre + far,
      colorscale: colours().map((one, place, all) => [place / (all.length - 1), `rgb(${one})`]),
    }];
  }
  function arranged(map) {
    const { plan, left, bottom, height } = map, ink = style("--soft"), line = style("--line");
    const axis = { color: ink, linecolor: line, zeroline: false, showgrid: false, ticks: "", fixedrange: false };
    const room = Math.max(4, Math.floor((height - bottom) / 15));
    const y = { ...axis, ...ticks(plan.labels, room), range: [plan.rows - 0.5, -0.5], title: { text: words.plain(plan.title), standoff: 6 } };
    const x = plan.kind === "bars"
      ? { ...axis, showgrid: true, gridcolor: line, zeroline: true, zerolinecolor: line, nticks: 4,
        title: { text: words.plain(heading()), standoff: 8 }, tickformat: state.shown === "share" ? ".0%" : "" }
      : { ...axis, ...ticks(plan.heads, map.wordy ? 60 : 24), range: [-0.5, plan.columns - 0.5],
        title: { text: words.plain(plan.across), standoff: 8 }, tickangle: map.wordy ? -50 : 0 };
    return {
      height, margin: { l: left, r: 12, t: 8, b: bottom }, xaxis: x, yaxis: y, shapes: mark(map),
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: plan.kind === "map" ? style("--gap") : "rgba(0,0,0,0)",
      font: { color: ink, size: 11.5, family: style("--sans") }, dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      hoverlabel: { namelength: 0 }, uirevision: "kept", bargap: 0.25,
    };
  }
  const heading = () => ({ effect: "effect", share: "share of the way", value: "value" })[state.shown];

  // A frame around the chosen site, and around the one under the keys.
  function mark(map) {
    const found = [];
    // Light around dark, so that it is seen on any colour.
    const frames = [[state.site, style("--page"), 4.5, "solid"], [state.site, style("--ink"), 2, "solid"], [map.keyed, style("--link"), 2, "dot"]];
    for (const [cell, colour, width, dash] of frames) {
      if (cell === undefined || cell < map.part.start || cell >= map.part.start + map.part.count) continue;
      const own = cell - map.part.start, row = Math.floor(own / map.plan.columns), column = own % map.plan.columns;
      const across = map.plan.kind === "bars" ? { xref: "paper", x0: 0, x1: 1 } : { x0: column - 0.5, x1: column + 0.5 };
      found.push({ type: "rect", ...across, y0: row - 0.5, y1: row + 0.5, line: { color: colour, width, dash } });
    }
    return found;
  }
  function pointed(map, point) {
    const row = Math.round(point.y), column = map.plan.kind === "bars" ? 0 : Math.round(point.x);
    const own = row * map.plan.columns + column;
    return own < map.part.count ? map.part.start + own : -1;
  }
  function choose(map, cell) {
    if (cell < 0) return;
    map.keyed = cell;
    conewise.set({ site: cell });
  }

  // -- what is told of the cell under the pointer or the keys --------------------------------------
  function tell(map, cell, where) {
    if (cell < 0) return hideTip();
    const rows = [["value", words.shown(numbers.value(state.metric, cell))],
      ["effect", words.shown(numbers.effect(state.metric, cell), true)]];
    if (data.source) rows.push(["of the way", words.percent(numbers.share(state.metric, cell))]);
    tip.replaceChildren(element("b", {}, names.nameOf(cell)),
      ...rows.map(([name, text]) => element("span", {}, element("i", {}, name), text)));
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = where.clientX + 16 + width > innerWidth ? where.clientX - 16 - width : where.clientX + 16;
    const top = where.clientY + 16 + height > innerHeight ? where.clientY - 16 - height : where.clientY + 16;
    tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
  }
  function hideTip() { tip.hidden = true; }
  function key(map, event) {
    const { rows, columns } = map.plan, step = {
      ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -Infinity, End: Infinity,
    }[event.key];
    if (event.key === "Enter" || event.key === " ") {
      choose(map, map.keyed === undefined ? map.part.start : map.keyed);
    } else if (event.key === "Escape") {
      hideTip();
    } else if (step !== undefined) {
      const own = map.keyed === undefined ? 0 : map.keyed - map.part.start;
      let next = map.keyed === undefined ? 0 : own + step;
      if (Math.abs(step) === Infinity) next = step < 0 ? 0 : map.part.count - 1;
      if (next < 0 || next >= map.part.count) next = own;
      map.keyed = map.part.start + next;
      Plotly.relayout(map.plot, { shapes: mark(map) });
      const box = map.plot.getBoundingClientRect(), inner = map.height - map.bottom - 8;
      const row = Math.floor(next / columns), column = next % columns;
      const wide = box.width - map.left - 12;
      tell(map, map.keyed, {
        clientX: box.left + map.left + (columns > 1 ? (column + 0.5) / columns : 0.5) * wide,
        clientY: box.top + 8 + (row + 0.5) / rows * inner,
      });
    } else return;
    event.preventDefault();
  }

  // -- keeping true --------------------------------------------------------------------------------
  function legend() {
    const far = reach(), centre = middle();
    const beyond = side => numbers.numbers(state.metric, state.shown).some(n => side * (n - centre) > far);
    const ends = [["scale-low", -1, "≤ "], ["scale-high", 1, "≥ "]];
    for (const [id, side, sign] of ends) {
      document.getElementById(id).textContent = (beyond(side) ? sign : "") + words.formatted(state.shown, centre + side * far);
    }
    document.querySelector("#scale i").style.background = `linear-gradient(to right, ${colours().map(one => `rgb(${one})`).join(", ")})`;
    const hints = {
      effect: "How far the metric moves from its base when this site alone is patched. No effect is the colour in the middle.",
      share: "How much of the way from base to source patching this site alone goes: 0 % is the base, 100 % the source.",
      value: "The metric itself when this site alone is patched. The colour in the middle is the base.",
    };
    document.getElementById("maps-hint").textContent = hints[state.shown];
    const odd = numbers.numbers(state.metric, state.shown).reduce((sum, n) => sum + !Number.isFinite(n), 0);
    const note = document.getElementById("maps-note");
    note.hidden = odd === 0;
    note.textContent = `${odd.toLocaleString("en")} ${odd === 1 ? "cell has" : "cells have"} a value that is no finite number; they have no colour.`;
  }
  function redraw() {
    legend();
    for (const map of maps) Plotly.react(map.plot, traces(map), arranged(map));
  }
  conewise.listen(changed => {
    if (changed.some(key => key !== "site")) redraw();
    else for (const map of maps) Plotly.relayout(map.plot, { shapes: mark(map) });
  });
  conewise.maps = { start() { legend(); data.parts.forEach(make); maps.forEach(drawn); }, redraw };
})(window.conewise);
