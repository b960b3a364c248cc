// The cone of a site on the model's layers: painted, in numbers, in words, and part by part.
import { element, inside } from "../page/elements.js";
import { counted, large, shareOf, whole } from "../page/words.js";
import { startChoices } from "./choices.js";
import { painter, reveal } from "./painter.js";
import { total, typical } from "./show.js";

/** @import { Scene, Show } from "./show.js" */
/** @import { States } from "./steps.js" */

/**
 * What becomes of each item that a cone reaches or reads.
 * @param {Scene} scene
 */
export function statesOf({ recomputed, reused, at }) {
  /** @type {States} */
  const states = new Map();
  for (const [item, count] of recomputed) states.set(item, { ...states.get(item), done: count });
  for (const [item] of reused) states.set(item, { ...states.get(item), reused: true });
  for (const item of at) states.set(item, { ...states.get(item), site: true });
  return states;
}

/**
 * How much a part is of the whole, finer where it is little.
 * @param {number} part
 * @param {number} all
 */
export const fineShare = (part, all) => shareOf(part, all, part > 0 && part / all < 0.1 ? 1 : 0);

/**
 * @param {number} flops
 */
export const flopsText = flops => (flops < 1000 ? `${flops} FLOP` : `${large(flops)}FLOP`);

/**
 * The texts of a cone, by the names that the page has for their places.
 * @param {Show} show
 * @param {Scene} scene
 * @param {string} name
 * @returns {Record<string, string>}
 */
export function textsOf(show, scene, name) {
  const done = total(scene.recomputed);
  const reused = total(scene.reused);
  const kept = show.full - done;
  const where = scene.at.map(item => show.items[item].label).join(" and ");
  return {
    name,
    recomputed: whole(done),
    kept: whole(kept),
    reused: whole(reused),
    share: ` of ${whole(show.full)} nodes, ${fineShare(done, show.full)}`,
    "kept-share": ` ${fineShare(kept, show.full)}`,
    flops: flopsText(scene.cost),
    "flops-share": ` ${fineShare(scene.cost, show.fullCost)} of a run`,
    words:
      `${name} lies in ${where}. A change there recomputes ${counted(done, "node", "nodes")} of ` +
      `${whole(show.full)}; the others keep their values, and ${whole(reused)} of them ` +
      `${reused === 1 ? "is read as it is" : "are read as they are"}.`,
  };
}

/**
 * The parts that a cone reaches or reads, as rows of a table.
 * @param {Show} show
 * @param {Scene} scene
 * @param {States} states
 */
function rows(show, scene, states) {
  const reused = new Map(scene.reused);
  const reached = show.items.map((item, at) => ({ ...item, at })).filter(({ at }) => states.has(at));
  return reached.map(({ label, nodes, at }) => {
    const { site, done = 0 } = states.get(at) ?? {};
    return element(
      "tr",
      {},
      element("th", { scope: "row" }, label + (site ? " (the site)" : "")),
      element("td", {}, `${whole(done)} of ${whole(nodes)}`),
      element("td", {}, whole(reused.get(at) ?? 0)),
    );
  });
}

/**
 * Returns what shows another site's cone, by the site's name.
 * @param {HTMLElement} root
 * @param {Show} show
 */
export function startCone(root, show) {
  const paint = painter(root, show.items);
  /** @param {string} name */
  const place = name => inside(root, `[data-cone="${name}"]`);
  const select = startChoices(root, show, pick);

  /**
   * @param {number} at
   * @param {string} [given] the name of the site, where it has several
   */
  function pick(at, given) {
    const scene = show.scene(at);
    const states = statesOf(scene);
    const counts = new Map(scene.recomputed);
    paint(states, item => (counts.has(item) ? whole(counts.get(item) ?? 0) : ""));
    for (const [name, text] of Object.entries(textsOf(show, scene, given ?? scene.name))) {
      place(name).textContent = text;
    }
    place("flops").closest("div")?.toggleAttribute("hidden", !show.fullCost);
    place("rows").replaceChildren(...rows(show, scene, states));
    say("");
    select(at, given);
    reveal(root, scene.at[0]);
  }

  /**
   * Say why there is no cone to see; nothing where there is one.
   * @param {string} text
   */
  function say(text) {
    inside(root, ".cw-details").hidden = text !== "";
    place("none").hidden = text === "";
    place("none").textContent = text;
  }

  if (show.count) pick(typical(show));
  return (/** @type {string} */ name) => {
    const at = show.find(name);
    if (at !== undefined) {
      pick(at, name);
    } else {
      paint(new Map(), () => "");
      say(`The cone of ${name} is not part of this page.`);
    }
  };
}
