// The two views of the page, what its address remembers, and what can be chosen.
import { byId, maybeById } from "../page/elements.js";
import { fragmentOf, rememberedIn } from "./address.js";
import { cells, listen, numbers, set, state, sweep } from "./state.js";

/** @import { Shown } from "./numbers.js" */

const VIEWS = ["results", "graph"];
const metric = byId("metric", HTMLSelectElement);
const range = byId("range", HTMLSelectElement);

// -- the two views -----------------------------------------------------------------------------------

/**
 * @param {string} view
 */
const tabOf = view => byId(`tab-${view}`, HTMLButtonElement);

const currentView = () =>
  VIEWS.find(view => tabOf(view).getAttribute("aria-selected") === "true") ?? VIEWS[0];

/**
 * @param {string} wanted
 */
function openView(wanted) {
  for (const view of VIEWS) {
    const isOpen = view === wanted;
    tabOf(view).setAttribute("aria-selected", String(isOpen));
    tabOf(view).tabIndex = isOpen ? 0 : -1;
    byId(`view-${view}`).hidden = !isOpen;
  }
  dispatchEvent(new Event("resize")); // figures that were hidden find their width
  remember();
}

function startTabs() {
  VIEWS.forEach((view, at) => {
    tabOf(view).addEventListener("click", () => openView(view));
    tabOf(view).addEventListener("keydown", event => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step === undefined) return;
      const next = VIEWS[(at + step + VIEWS.length) % VIEWS.length];
      tabOf(next).focus();
      openView(next);
    });
  });
}

// -- the address -------------------------------------------------------------------------------------

let isRecalling = false;

/**
 * Do something that the address does not take note of.
 * @param {() => void} act
 */
function unnoted(act) {
  isRecalling = true;
  act();
  isRecalling = false;
}

function remember() {
  if (isRecalling) return;
  const fragment = fragmentOf({
    view: currentView(),
    site: state.site < 0 ? null : cells.nameOf(state.site),
    metric: state.metric ? sweep.metrics[state.metric] : null,
    shown: state.shown,
  });
  history.replaceState(null, "", fragment);
}

/** Show what the address says; what is not there to be shown is left as it is. */
function recall() {
  const wanted = rememberedIn(location.hash);
  if (!wanted) return;
  const number = wanted.metric === null ? 0 : sweep.metrics.indexOf(wanted.metric);
  if (number >= 0) chooseMetric(number);
  chooseShown(wanted.shown);
  const cell = wanted.site === null ? -1 : cells.find(wanted.site);
  if (cell >= 0) set({ site: cell });
  if (VIEWS.includes(wanted.view) && wanted.view !== currentView()) openView(wanted.view);
}

// -- what can be chosen ------------------------------------------------------------------------------

/**
 * @param {number} number
 */
function chooseMetric(number) {
  metric.value = String(number);
  set({ metric: number });
}

/** @returns {NodeListOf<HTMLInputElement>} */
const radios = () => document.querySelectorAll("[name=shown]");

/**
 * @param {string} which
 */
function chooseShown(which) {
  for (const radio of radios()) {
    if (radio.value !== which) continue;
    radio.checked = true;
    set({ shown: /** @type {Shown} */ (which) });
  }
}

function startControls() {
  metric.addEventListener("change", () => set({ metric: Number(metric.value) }));
  range.addEventListener("change", () => set({ range: Number(range.value) }));
  for (const radio of radios()) radio.addEventListener("change", () => chooseShown(radio.value));
  const copy = maybeById("copy"); // none where no command is known
  copy?.addEventListener("click", () => copyCommand(copy));
}

/**
 * @param {HTMLElement} button
 */
async function copyCommand(button) {
  const command = byId("command");
  try {
    await navigator.clipboard.writeText(command.textContent ?? "");
    button.textContent = "Copied";
  } catch {
    getSelection()?.selectAllChildren(command);
    button.textContent = "Selected: press Ctrl+C";
  }
  setTimeout(() => {
    button.textContent = "Copy";
  }, 2500);
}

/** Show what the address says, else something to look at: the site with the largest effect. */
export function startViews() {
  startTabs();
  startControls();
  listen(remember);
  addEventListener("hashchange", () => unnoted(recall));
  unnoted(() => {
    recall();
    if (state.site < 0) set({ site: numbers.ranked(state.metric)[0] });
  });
}
