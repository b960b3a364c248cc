// What can be patched: the sites of a list, and the boxes of the drawing.
import { element, inside } from "../page/elements.js";

/** @import { Show } from "./show.js" */

/**
 * The scenes that patch each item.
 * @param {number[][]} sites the items that each scene patches
 * @returns {Map<number, number[]>}
 */
export function scenesAt(sites) {
  const found = new Map();
  sites.forEach((items, scene) => {
    for (const item of items) found.set(item, [...(found.get(item) ?? []), scene]);
  });
  return found;
}

/**
 * Let a reader pick scenes, by name or by a click on a box. Returns what is to be called when one is shown.
 * @param {HTMLElement} root
 * @param {Show} show
 * @param {(scene: number, name?: string) => void} pick
 * @returns {(scene: number, name?: string) => void}
 */
export function startChoices(root, show, pick) {
  const select = startSelect(root, show, pick);
  const scenes = scenesAt(show.sites);
  let shown = -1;
  for (const [item, own] of scenes) {
    // A part may hold several sites: each click goes on to the next.
    startBox(root, item, show.items[item].label, () => pick(own[(own.indexOf(shown) + 1) % own.length]));
  }
  inside(root, "svg").setAttribute("role", scenes.size ? "group" : "img");
  return (scene, name) => {
    shown = scene;
    const options = [...select.options];
    const wanted = options.find(one => one.text === name) ?? options.find(one => Number(one.value) === scene);
    if (wanted) wanted.selected = true;
  };
}

/**
 * @param {HTMLElement} root
 * @param {Show} show
 * @param {(scene: number, name?: string) => void} pick
 */
function startSelect(root, show, pick) {
  /** @type {HTMLSelectElement} */
  const select = inside(root, "select");
  select.append(...[...show.names].map(([name, scene]) => element("option", { value: scene }, name)));
  const label = select.closest("label");
  if (label) label.hidden = show.names.size < 2;
  select.addEventListener("change", () =>
    pick(Number(select.value), select.selectedOptions[0].textContent ?? undefined),
  );
  return select;
}

/**
 * Make a button of a box.
 * @param {HTMLElement} root
 * @param {number} item
 * @param {string} label
 * @param {() => void} act
 */
function startBox(root, item, label, act) {
  /** @type {SVGElement} */
  const group = inside(root, `.cw-item[data-item="${item}"]`);
  group.classList.add("can-patch");
  group.setAttribute("tabindex", "0");
  group.setAttribute("role", "button");
  group.setAttribute("aria-label", `patch ${label}`);
  group.addEventListener("click", act);
  group.addEventListener("keydown", event => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    act();
  });
}
