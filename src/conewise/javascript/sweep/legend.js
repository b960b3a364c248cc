// The legend of the maps: what is shown, from where to where the colours reach, and what has none.
import { byId, inside } from "../page/elements.js";
import { counted, percent, shown } from "../page/words.js";
import { rgb } from "./scale.js";
import { colours, middle, reach, shownNumbers } from "./shown_scale.js";
import { state } from "./state.js";

const HINTS = {
  effect:
    "How far the metric moves from its base when this site alone is patched. No effect is the colour in the middle.",
  share:
    "How much of the way from base to source patching this site alone goes: 0 % is the base, 100 % the source.",
  value: "The metric itself when this site alone is patched. The colour in the middle is the base.",
};

/**
 * A number of what is shown.
 * @param {number} number
 */
const formatted = number =>
  state.shown === "share" ? percent(number) : shown(number, state.shown === "effect");

export function drawLegend() {
  byId("maps-hint").textContent = HINTS[state.shown];
  drawEnds();
  const ramp = colours().map(rgb).join(", ");
  inside(document, "#scale i").style.background = `linear-gradient(to right, ${ramp})`;
  countOdd();
}

/** From where to where the colours reach, and whether numbers lie beyond. */
function drawEnds() {
  const far = reach();
  const centred = shownNumbers().map(number => number - middle());
  const low = formatted(middle() - far);
  const high = formatted(middle() + far);
  byId("scale-low").textContent = centred.some(number => number < -far) ? `≤ ${low}` : low;
  byId("scale-high").textContent = centred.some(number => number > far) ? `≥ ${high}` : high;
}

/** How many cells have no colour. */
function countOdd() {
  const odd = shownNumbers().filter(number => !Number.isFinite(number)).length;
  const cells = counted(odd, "cell has", "cells have");
  const note = byId("maps-note");
  note.hidden = odd === 0;
  note.textContent = `${cells} a value that is no finite number, and no colour.`;
}
