// Inside of the base run: where the strongest heads look, and the lens, on the prompt that is chosen.
import { element, maybeById, sentIn, style } from "../page/elements.js";
import { plain, shown } from "../page/words.js";
import { fixedAxis, look, TOLD } from "./figures.js";

/** @import { SentInside, SentPattern } from "../sent.js" */

const FEW = 24; // tokens whose labels have room

/** @type {SentInside | null} */
const sent = document.getElementById("conewise-inside") ? sentIn("conewise-inside") : null;
const figures = maybeById("inside-figures"); // none where no head is shown
const chosen = maybeById("inside-prompt", HTMLSelectElement); // none where there is one prompt

export function drawInside() {
  if (!sent) return;
  const prompt = chosen ? Number(chosen.value) : 0;
  for (const table of document.querySelectorAll(".lens")) {
    if (table instanceof HTMLElement) table.hidden = Number(table.dataset.prompt) !== prompt;
  }
  if (!figures) return;
  const labels = sent.tokens[prompt].map(plain);
  const heads = sent.patterns.filter(pattern => pattern.prompt === prompt).map(headFigure);
  figures.replaceChildren(...heads.map(head => head.figure));
  // A figure finds its width in the page.
  for (const { pattern, plot } of heads) drawHead(plot, pattern, labels);
}

/**
 * @param {SentPattern} pattern
 */
function headFigure(pattern) {
  const plot = element("div", { class: "plot" });
  const effect = element("small", {}, `effect ${shown(pattern.effect, true)}`);
  const caption = element("figcaption", {}, `layer ${pattern.layer}, head ${pattern.head}`, effect);
  return { pattern, plot, figure: element("figure", {}, caption, plot) };
}

/**
 * @param {HTMLElement} plot
 * @param {SentPattern} pattern
 * @param {string[]} labels of the tokens
 */
function drawHead(plot, { weights }, labels) {
  const isFew = labels.length <= FEW;
  const texts = weights.map((row, query) =>
    row.map((weight, key) => `${labels[query]} reads ${labels[key]}<br>${weight.toFixed(3)}`),
  );
  const gap = isFew ? 1 : 0;
  const map = {
    type: "heatmap",
    z: weights,
    zmin: 0,
    zmax: 1,
    text: texts,
    ...TOLD,
    showscale: false,
    colorscale: [
      [0, style("--card")],
      [1, style("--more")],
    ],
    xgap: gap,
    ygap: gap,
  };
  const ticks = {
    tickvals: labels.map((_, place) => place),
    ticktext: labels,
    ticks: "",
    showticklabels: isFew,
    ...fixedAxis(),
    showgrid: false,
    zeroline: false,
  };
  const layout = {
    ...look(11, "--mono"),
    width: Math.min(340, document.documentElement.clientWidth - 34),
    height: 320,
    margin: { l: 74, r: 6, t: 6, b: 74 },
    xaxis: { ...ticks, tickangle: -60 },
    yaxis: { ...ticks, autorange: "reversed" },
  };
  Plotly.react(plot, [map], layout, { displayModeBar: false });
}

export function startInside() {
  drawInside();
  chosen?.addEventListener("change", drawInside);
}
