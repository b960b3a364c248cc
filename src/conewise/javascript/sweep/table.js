// The ranked table: every cell, a page at a time, sorted and filtered, and as CSV.
import { bar, byId, element, inside, saveCsv } from "../page/elements.js";
import { matches, pageOf, wordsOf } from "../page/rows.js";
import { whole } from "../page/words.js";
import { CSV_HEADS, columnsOf, csvOf } from "./columns.js";
import { sorted } from "./order.js";
import { choose } from "./site.js";
import { cells, costs, listen, numbers, state, sweep } from "./state.js";

/** @import { Column } from "./columns.js" */

const ROWS = 25;
const filter = byId("filter", HTMLInputElement);
const kind = byId("kind", HTMLSelectElement);
const columns = columnsOf(cells, numbers, costs);

/** By which column the rows are sorted, and which way. */
const sort = { column: columns[0], descending: false };

const heads = columns.map(headOf);

/** All cells. @type {Uint32Array} */
let order = new Uint32Array();
/** Those that are not filtered away. @type {Uint32Array} */
let rows = order;
let page = 0;

// -- which rows, in which order ----------------------------------------------------------------------

function reorder() {
  const { column, descending } = sort;
  if (column.name === "rank" && !descending) {
    order = numbers.ranked(state.metric);
  } else {
    const keys = new Float64Array(cells.count);
    for (let cell = 0; cell < cells.count; cell++) keys[cell] = column.key(cell, state.metric);
    order = sorted(keys, descending);
  }
  refilter();
}

function refilter() {
  const words = wordsOf(filter.value);
  const wanted = kind.value;
  const isAll = !words.length && !wanted;
  rows = isAll
    ? order
    : order.filter(
        cell =>
          (!wanted || cells.kindOf(cell) === wanted) && (!words.length || matches(cells.nameOf(cell), words)),
      );
  turn(0);
}

/**
 * @param {number} to
 */
function turn(to) {
  page = to;
  draw();
}

/**
 * Show the page that a cell is on, where it is not filtered away.
 * @param {number} cell
 */
function reveal(cell) {
  const place = rows.indexOf(cell);
  turn(place < 0 ? page : Math.floor(place / ROWS));
}

// -- drawing -----------------------------------------------------------------------------------------

function draw() {
  const shownPage = pageOf(rows.length, page, ROWS);
  page = shownPage.page;
  const largest = numbers.largest(state.metric);
  const lines = Array.from(rows.subarray(shownPage.from, shownPage.to), cell => row(cell, largest));
  const empty = element("td", { colspan: columns.length, class: "empty" }, "No site matches.");
  inside(document, "#ranked tbody").replaceChildren(...(lines.length ? lines : [element("tr", {}, empty)]));
  const { pages } = shownPage;
  byId("page").textContent =
    `${whole(rows.length)} of ${whole(cells.count)} sites · page ${whole(page + 1)} of ${whole(pages)}`;
  for (const id of ["first", "previous"]) byId(id, HTMLButtonElement).disabled = page === 0;
  for (const id of ["next", "last"]) byId(id, HTMLButtonElement).disabled = page === pages - 1;
  const way = sort.descending ? "descending" : "ascending";
  for (const head of heads)
    head.setAttribute("aria-sort", head.dataset.column === sort.column.name ? way : "none");
}

/**
 * @param {number} cell
 * @param {number} largest size of an effect
 */
function row(cell, largest) {
  const made = element("tr", { "data-cell": cell, "aria-selected": String(cell === state.site) });
  made.append(...columns.map(column => field(column, cell, largest)));
  made.addEventListener("click", () => choose(cell));
  return made;
}

/**
 * @param {Column} column
 * @param {number} cell
 * @param {number} largest size of an effect
 */
function field(column, cell, largest) {
  const text = column.text(cell, state.metric);
  if (column.name === "site") {
    return element("td", { class: "site" }, element("button", { type: "button" }, text));
  }
  const made = element("td", { class: column.name }, text);
  const effect = numbers.effect(state.metric, cell);
  if (column.name === "effect" && Math.abs(effect) > 0) made.append(bar(effect, largest));
  return made;
}

/**
 * The head of a column, which sorts by it; once more turns the order.
 * @param {Column} column
 */
function headOf(column) {
  const title = column.hint ?? `sort by ${column.title}`;
  const button = element("button", { type: "button", title }, column.title);
  button.addEventListener("click", () => {
    sort.descending = sort.column === column ? !sort.descending : Boolean(column.descends);
    sort.column = column;
    reorder();
  });
  const named = { class: column.name, "data-column": column.name };
  return element("th", { scope: "col", ...named, "aria-sort": "none" }, button);
}

// -- keeping true ------------------------------------------------------------------------------------

/**
 * A function that calls `act` when it was not called for so many milliseconds.
 * @param {() => void} act
 * @param {number} wait
 */
function later(act, wait) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = window.setTimeout(act, wait);
  };
}

function listenToReader() {
  filter.addEventListener("input", later(refilter, cells.count > 20_000 ? 250 : 60));
  kind.addEventListener("change", refilter);
  byId("first").addEventListener("click", () => turn(0));
  byId("previous").addEventListener("click", () => turn(page - 1));
  byId("next").addEventListener("click", () => turn(page + 1));
  byId("last").addEventListener("click", () => turn(Infinity));
  /**
   * @param {number} metric
   * @param {Iterable<number>} which
   */
  const csv = (metric, which) => csvOf(cells, numbers, metric, sweep.metrics[metric], which);
  byId("csv-shown").addEventListener("click", () =>
    saveCsv([CSV_HEADS, csv(state.metric, rows)], "sites.csv"),
  );
  byId("csv-all").addEventListener("click", () => {
    const all = Uint32Array.from({ length: cells.count }, (_, cell) => cell);
    saveCsv([CSV_HEADS, ...sweep.metrics.map((_, metric) => csv(metric, all))], "all-sites.csv");
  });
}

export function startTable() {
  inside(document, "#ranked thead tr").append(...heads);
  kind.append(...cells.kinds.map(one => element("option", { value: one }, one)));
  kind.closest("label")?.toggleAttribute("hidden", cells.kinds.length < 2);
  listenToReader();
  listen(changed => {
    if (changed.has("metric")) reorder();
    else if (changed.has("site")) reveal(state.site);
  });
  reorder();
}
