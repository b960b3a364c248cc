// The slider of the threshold, and the button back to the circuit itself.
import { byId, maybeById } from "../page/elements.js";
import { counted, shown } from "../page/words.js";
import { nearestStop, OWN } from "./edges.js";
import { circuit, listen, set, state, stop } from "./state.js";

const slider = maybeById("threshold", HTMLInputElement); // none where edges have no scores

/**
 * Show the circuit of a point of the curve.
 * @param {number} at
 */
export function moveTo(at) {
  if (slider) slider.value = String(at);
  set({ stop: at });
}

function words() {
  const { threshold, edges, faithfulness } = stop();
  const found = [counted(edges, "edge", "edges")];
  if (threshold !== null) found.unshift(`|score| ≥ ${shown(threshold)}`);
  if (faithfulness !== null) found.push(`faithfulness ${shown(faithfulness)}`);
  return found.join(" · ");
}

export function startThreshold() {
  if (!slider) return;
  slider.max = String(circuit.points.length - 1);
  slider.disabled = false;
  slider.value = String(nearestStop(circuit));
  slider.addEventListener("input", () => set({ stop: Number(slider.value) }));
  const own = byId("own");
  own.addEventListener("click", () => {
    slider.value = String(nearestStop(circuit));
    set({ stop: OWN });
  });
  listen(() => {
    own.setAttribute("aria-pressed", String(state.stop === OWN));
    byId("chosen").textContent = words();
    slider.setAttribute("aria-valuetext", words());
  });
}
