// The chosen site: its numbers, its prompts, its cost and its cone.
import { byId, element, maybeById, style } from "../page/elements.js";
import { large, percent, plain, shareOf, shown, whole } from "../page/words.js";
import { fixedAxis, heading, look, QUIET, sign, TOLD } from "./figures.js";
import { cells, costs, listen, numbers, set, state, sweep } from "./state.js";

const plot = maybeById("site-prompts"); // none where there is one prompt

/**
 * @param {string} name
 * @param {string} text
 * @param {string} [note]
 */
function fact(name, text, note) {
  const value = element("dd", {}, text, ...(note ? [element("small", {}, note)] : []));
  return element("div", {}, element("dt", {}, name), value);
}

/**
 * @param {number} cell
 */
function facts(cell) {
  const { metric } = state;
  const found = [
    fact("effect", shown(numbers.effect(metric, cell), true)),
    fact("value", shown(numbers.value(metric, cell)), `base ${shown(numbers.base[metric])}`),
  ];
  if (numbers.source) {
    const source = `source ${shown(numbers.source[metric])}`;
    found.push(fact("of the way", percent(numbers.share(metric, cell)), source));
  }
  found.push(fact("rank", whole(numbers.ranks(metric)[cell]), `of ${whole(cells.count)}`));
  return [...found, ...costFacts(cell)];
}

/**
 * @param {number} cell
 */
function costFacts(cell) {
  if (!costs) return [];
  const { evaluations, flops } = costs.of(cell);
  const { fullEvaluations, fullFlops } = costs;
  const nodes = `of ${whole(fullEvaluations)} nodes, ${shareOf(evaluations, fullEvaluations)}`;
  const found = [fact("recomputed", whole(evaluations), nodes)];
  if (fullFlops) found.push(fact("FLOPs", large(flops), `${shareOf(flops, fullFlops)} of a full run`));
  return found;
}

/**
 * The effect on each prompt, beside the mean.
 * @param {HTMLElement} place
 * @param {number} cell
 */
function drawPrompts(place, cell) {
  if (!numbers.hasPrompts) {
    place.textContent = "The values of single prompts are too many for this page; the saved run has them.";
    place.className = "note";
    return;
  }
  const { unit } = sweep;
  const prompts = numbers.byPrompt(state.metric, cell);
  const texts = prompts.map(
    ({ effect, value }, prompt) =>
      `${unit} ${prompt + 1}: effect ${shown(effect, true)}, value ${shown(value)}`,
  );
  const bars = {
    type: "bar",
    text: texts.map(plain),
    textposition: "none",
    ...TOLD,
    x: prompts.map((_, prompt) => prompt + 1),
    y: prompts.map(one => one.effect),
    marker: { color: prompts.map(one => sign(one.effect)) },
  };
  const nticks = Math.min(12, prompts.length);
  const lines = { gridcolor: style("--line"), zerolinecolor: style("--soft") };
  const layout = {
    ...look(11),
    height: 150,
    margin: { l: 44, r: 6, t: 26, b: 30 },
    title: { ...heading(`effect on each ${unit}`), y: 0.97 },
    xaxis: { ...fixedAxis(), nticks, tickformat: "d", showgrid: false },
    yaxis: { ...fixedAxis(), nticks: 4, ...lines },
  };
  Plotly.react(place, [bars], layout, QUIET);
}

export function showSite() {
  const cell = state.site;
  byId("site-details").hidden = cell < 0;
  byId("site-hint").hidden = cell >= 0;
  if (cell < 0) return;
  byId("site-name").textContent = cells.nameOf(cell);
  byId("site-numbers").replaceChildren(...facts(cell));
  if (plot) drawPrompts(plot, cell);
  window.conewise?.showCone(cells.nameOf(cell));
}

/**
 * Choose a cell from elsewhere. On a narrow page the panel is not beside the table: go there.
 * @param {number} cell
 */
export function choose(cell) {
  set({ site: cell });
  if (matchMedia("(max-width: 1100px)").matches) byId("site").scrollIntoView({ block: "start" });
}

export function startSite() {
  listen(changed => {
    if (changed.has("site") || changed.has("metric")) showSite();
  });
}
