// The layered picture of a circuit: drawn once, painted as something is pointed at, chosen or left out.
import { byId, svgElement } from "../page/elements.js";
import { hideTip, moveTip, showTip } from "../page/tip.js";
import { shown } from "../page/words.js";
import { boxFacts } from "./about.js";
import { isAbout, strongest } from "./edges.js";
import { BOX, geometry, layersOf, ROW, thickness } from "./geometry.js";
import { circuit, isShown, listen, set, state } from "./state.js";

/** @import { SentEdge } from "../sent.js" */
/** @import { Chosen } from "./edges.js" */
/** @import { Box } from "./geometry.js" */

const { edges } = circuit;
const { boxes, height, path, width } = geometry(circuit, byId("stage").clientWidth);
const largest = strongest(edges);

/** @type {Chosen | null} */
let pointed = null;

// -- drawing ---------------------------------------------------------------------------------------

const svg = svgElement("svg", {
  width,
  height,
  viewBox: `0 0 ${width} ${height}`,
  role: "group",
  "aria-label": "The layered picture of the circuit",
});
const links = circuit.links.map(([from, to]) => ({ from, to, line: drawLink(boxes[from], boxes[to]) }));
const lines = edges.map(drawEdge);
const hits = edges.map((edge, at) => svgElement("path", { class: "hit", d: path(edge), "data-edge": at }));
const marks = boxes.map(drawBox);

function stripes() {
  return layersOf(boxes).flatMap(({ layer, top, bottom }, at) => {
    const label = svgElement("text", { class: "row", x: 6, y: top }, `layer ${layer}`);
    const stripe = { class: "stripe", x: 0, y: top - ROW / 2, width, height: bottom - top + ROW };
    return at % 2 === 0 ? [svgElement("rect", stripe), label] : [label];
  });
}

/**
 * @param {Box} from
 * @param {Box} to
 */
function drawLink(from, to) {
  const half = BOX.height / 2;
  return svgElement("path", { class: "link", d: `M ${from.x} ${from.y + half} L ${to.x} ${to.y - half}` });
}

/**
 * @param {SentEdge} edge
 */
function drawEdge(edge) {
  const sign = !edge.score ? "plain" : edge.score < 0 ? "less" : "more";
  const size = thickness(edge.score, largest).toFixed(2);
  return svgElement("path", { class: `edge ${sign}`, d: path(edge), "stroke-width": size });
}

/**
 * @param {Box} box
 * @param {number} at
 */
function drawBox(box, at) {
  const frame = svgElement("rect", {
    x: box.x - BOX.width / 2,
    y: box.y - BOX.height / 2,
    width: BOX.width,
    height: BOX.height,
    rx: box.kind === "head" ? 10 : 3,
  });
  const named = { tabindex: 0, role: "button", "aria-label": box.name };
  const text = svgElement("text", { x: box.x, y: box.y }, box.name);
  return svgElement("g", { class: `box ${box.kind}`, "data-box": at, ...named }, frame, text);
}

// -- painting --------------------------------------------------------------------------------------

function paint() {
  const about = pointed ?? state.chosen;
  const seen = new Set();
  const near = new Set();
  edges.forEach((edge, at) => {
    const isSeen = isShown(edge);
    const isNear = about !== null && isAbout(edge, at, about);
    if (isSeen) seen.add(edge.from).add(edge.to);
    if (isSeen && isNear) near.add(edge.from).add(edge.to);
    hits[at].classList.toggle("away", !isSeen);
    toggle(lines[at], { away: !isSeen, near: isNear, far: about !== null && !isNear });
  });
  marks.forEach((mark, at) => {
    const chosen = state.chosen?.kind === "box" && state.chosen.at === at;
    toggle(mark, { away: !seen.has(at), near: near.has(at), far: about !== null && !near.has(at), chosen });
  });
  for (const { from, to, line } of links) toggle(line, { away: !seen.has(from) || !seen.has(to) });
}

/**
 * @param {Element} element
 * @param {Record<string, boolean>} classes
 */
function toggle(element, classes) {
  for (const [name, on] of Object.entries(classes)) element.classList.toggle(name, on);
}

// -- pointing and choosing -------------------------------------------------------------------------

/**
 * What an event is about: an edge, a box, or neither.
 * @param {Event} event
 * @returns {Chosen | null}
 */
function target(event) {
  const found = /** @type {Element} */ (event.target).closest("[data-edge], [data-box]");
  if (!(found instanceof SVGElement)) return null;
  const { edge, box } = found.dataset;
  return edge === undefined ? { kind: "box", at: Number(box) } : { kind: "edge", at: Number(edge) };
}

/**
 * @param {Chosen} what
 * @param {{ clientX: number, clientY: number }} where
 */
function tell(what, where) {
  if (what.kind === "box") {
    showTip(boxes[what.at].name, boxFacts(what.at), where);
  } else {
    const { name, score, level } = edges[what.at];
    /** @type {Record<string, string>} */
    const facts = { score: shown(score, true) };
    if (level >= 0) facts["up to"] = shown(level);
    showTip(name, facts, where);
  }
}

/**
 * @param {Chosen | null} what
 * @param {{ clientX: number, clientY: number }} where
 */
function point(what, where) {
  const isSame = what?.kind === pointed?.kind && what?.at === pointed?.at;
  if (isSame) {
    if (what) moveTip(where);
    return;
  }
  pointed = what;
  paint();
  if (what) tell(what, where);
  else hideTip();
}

const NOWHERE = { clientX: 0, clientY: 0 };

function listenToReader() {
  svg.addEventListener("pointermove", event => point(target(event), event));
  svg.addEventListener("pointerleave", () => point(null, NOWHERE));
  svg.addEventListener("focusin", event => {
    const focused = /** @type {Element} */ (event.target);
    const { right, bottom } = focused.getBoundingClientRect();
    if (focused.matches(":focus-visible")) point(target(event), { clientX: right, clientY: bottom });
  });
  svg.addEventListener("focusout", () => point(null, NOWHERE));
  svg.addEventListener("click", event => set({ chosen: target(event) }));
  svg.addEventListener("keydown", event => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    set({ chosen: target(event) });
  });
  addEventListener("keydown", event => {
    if (event.key !== "Escape") return;
    point(null, NOWHERE);
    set({ chosen: null });
  });
}

export function startPicture() {
  svg.append(...stripes(), ...links.map(one => one.line), ...lines, ...hits, ...marks);
  byId("stage").append(svg);
  listenToReader();
  listen(paint);
}
