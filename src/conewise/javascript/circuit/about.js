// What is in sight or chosen, in words.
import { byId, element } from "../page/elements.js";
import { counted, shown, whole } from "../page/words.js";
import { OWN, ranked } from "./edges.js";
import { around, circuit, listen, state, stop } from "./state.js";

/** @import { SentEdge } from "../sent.js" */

const MOST = 12; // edges that are listed of a box

/**
 * @param {string} name
 * @param {Record<string, string>} facts
 * @param {Node[]} [lists]
 */
function tell(name, facts, lists = []) {
  byId("about-name").textContent = name;
  const made = Object.entries(facts).map(([term, text]) =>
    element("div", {}, element("dt", {}, term), element("dd", {}, text)),
  );
  byId("about").replaceChildren(...made);
  byId("about-edges").replaceChildren(...lists);
}

/**
 * The strongest of some edges, as a table.
 * @param {string} title
 * @param {SentEdge[]} edges
 */
function listed(title, edges) {
  if (!edges.length) return [];
  const rows = ranked(edges)
    .slice(0, MOST)
    .map(edge => element("tr", {}, element("td", {}, edge.name), element("td", {}, shown(edge.score, true))));
  const left = edges.length - rows.length;
  const more = left > 0 ? [element("p", { class: "hint" }, `and ${left} more`)] : [];
  return [element("h4", {}, title), element("table", {}, element("tbody", {}, ...rows)), ...more];
}

/**
 * How many edges a box reads, and how many read it.
 * @param {number} at
 */
export function boxFacts(at) {
  const { inward, outward } = around(at);
  return {
    reads: counted(inward.length, "edge", "edges"),
    "is read by": counted(outward.length, "edge", "edges"),
  };
}

function aboutCircuit() {
  const { edges, faithfulness } = stop();
  const name = state.stop === OWN ? "The whole circuit" : "The circuit of this threshold";
  /** @type {Record<string, string>} */
  const facts = { edges: whole(edges) };
  if (faithfulness !== null) facts.faithfulness = shown(faithfulness);
  tell(name, facts);
}

/**
 * @param {SentEdge} edge
 */
function aboutEdge({ name, score, level }) {
  /** @type {Record<string, string>} */
  const facts = { score: shown(score, true) };
  if (level >= 0) facts["in circuits up to"] = shown(level);
  tell(name, facts);
}

/**
 * @param {number} at
 */
function aboutBox(at) {
  const { inward, outward } = around(at);
  const lists = [...listed("reads", inward), ...listed("is read by", outward)];
  tell(circuit.boxes[at][0], boxFacts(at), lists);
}

function describe() {
  const { chosen } = state;
  if (!chosen) aboutCircuit();
  else if (chosen.kind === "edge") aboutEdge(circuit.edges[chosen.at]);
  else aboutBox(chosen.at);
}

export function startAbout() {
  listen(describe);
}
