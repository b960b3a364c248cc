// The table of a circuit's edges, the strongest first, a page at a time, filtered, and as CSV.
import { line } from "../page/csv.js";
import { bar, byId, element, inside, saveCsv } from "../page/elements.js";
import { matches, pageOf, wordsOf } from "../page/rows.js";
import { counted, shown } from "../page/words.js";
import { ranked, strongest } from "./edges.js";
import { circuit, isShown, listen, set, state } from "./state.js";

/** @import { SentEdge } from "../sent.js" */

const ROWS = 20;
const filter = byId("filter", HTMLInputElement);
const previous = byId("previous", HTMLButtonElement);
const next = byId("next", HTMLButtonElement);
const order = ranked(circuit.edges);
const numbers = new Map(circuit.edges.map((edge, at) => [edge, at]));
const largest = strongest(circuit.edges);
let page = 0;

function found() {
  const words = wordsOf(filter.value);
  return order.filter(edge => isShown(edge) && matches(edge.name, words));
}

function draw() {
  const edges = found();
  const shownPage = pageOf(edges.length, page, ROWS);
  page = shownPage.page;
  const rows = edges
    .slice(shownPage.from, shownPage.to)
    .map((edge, at) => row(edge, shownPage.from + at + 1));
  const empty = element("tr", {}, element("td", { colspan: 3, class: "empty" }, "No edge matches."));
  inside(document, "#edges tbody").replaceChildren(...(rows.length ? rows : [empty]));
  const count = counted(edges.length, "edge", "edges");
  byId("page").textContent = `${count} · page ${page + 1} of ${shownPage.pages}`;
  previous.disabled = page === 0;
  next.disabled = page === shownPage.pages - 1;
}

/**
 * @param {SentEdge} edge
 * @param {number} rank
 */
function row(edge, rank) {
  const at = numbers.get(edge) ?? -1;
  const isChosen = state.chosen?.kind === "edge" && state.chosen.at === at;
  const score = element("td", { class: "score effect" }, shown(edge.score, true));
  if (edge.score) score.append(bar(edge.score, largest));
  const made = element(
    "tr",
    { "data-edge": at, "aria-selected": String(isChosen) },
    element("td", { class: "rank" }, String(rank)),
    element("td", { class: "site" }, element("button", { type: "button" }, edge.name)),
    score,
  );
  made.addEventListener("click", () => set({ chosen: { kind: "edge", at } }));
  return made;
}

/**
 * @param {number} to
 */
function turn(to) {
  page = to;
  draw();
}

export function startTable() {
  filter.addEventListener("input", () => turn(0));
  previous.addEventListener("click", () => turn(page - 1));
  next.addEventListener("click", () => turn(page + 1));
  byId("csv").addEventListener("click", () => {
    saveCsv(["edge,score\n", ...found().map(edge => line([edge.name, edge.score]))], "edges.csv");
  });
  listen(draw);
}
