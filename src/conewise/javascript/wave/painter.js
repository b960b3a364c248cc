// The drawing of a graph, painted: how much of each item is invalid or recomputed, and which wires carry a change.
import { inside } from "../page/elements.js";

/** @import { Item } from "./show.js" */
/** @import { ItemState, States } from "./steps.js" */

/**
 * How an item is painted: shares of its width, and classes that are on or off.
 * @param {ItemState} state
 * @param {Item} item
 */
export function paintOf(state, item) {
  const all = item.nodes || 1;
  const done = Math.min(1, (state.done ?? 0) / all);
  const lost = Math.min(1, (state.lost ?? 0) / all);
  return {
    done,
    lost,
    classes: {
      "is-site": Boolean(state.site),
      "is-lost": lost > 0,
      "is-wanted": Boolean(state.wanted),
      "is-done": done > 0,
      "is-full": done > 0.5,
      "is-reused": Boolean(state.reused),
      "is-now": Boolean(state.now),
    },
  };
}

/**
 * A function that paints states into a drawing; `text` is what stands in a box.
 * @param {HTMLElement} root
 * @param {Item[]} items
 * @returns {(states: States, text: (item: number) => string) => void}
 */
export function painter(root, items) {
  /** @type {NodeListOf<SVGElement>} */
  const groups = root.querySelectorAll(".cw-item[data-item]");
  /** @type {NodeListOf<SVGElement>} */
  const wires = root.querySelectorAll(".cw-wire");
  const boxes = Array.from(groups, group => ({
    group,
    width: Number(group.dataset.width),
    isSum: group.classList.contains("cw-sum"),
    lost: inside(group, ".cw-lost"),
    done: inside(group, ".cw-done"),
    count: inside(group, ".cw-count"),
  }));
  return (states, text) => {
    boxes.forEach((box, at) => {
      const { done, lost, classes } = paintOf(states.get(at) ?? {}, items[at]);
      box.done.setAttribute("width", String(box.width * done));
      box.lost.setAttribute("width", String(box.width * lost));
      if (!box.isSum) box.count.textContent = text(at);
      for (const [name, on] of Object.entries(classes)) box.group.classList.toggle(name, on);
    });
    for (const wire of wires) {
      const from = states.get(Number(wire.dataset.from));
      const to = states.get(Number(wire.dataset.to));
      wire.classList.toggle("is-hot", Boolean((from?.done || from?.site) && to?.done));
    }
  };
}

/**
 * Scroll the stage, and only the stage, so that an item is seen in it.
 * @param {HTMLElement} root
 * @param {number} item
 */
export function reveal(root, item) {
  const stage = inside(root, ".cw-stage");
  const group = root.querySelector(`.cw-item[data-item="${item}"]`);
  if (!group || !stage.clientHeight) return;
  const seen = stage.getBoundingClientRect();
  const box = group.getBoundingClientRect();
  if (box.top < seen.top + 30 || box.bottom > seen.bottom - 30) {
    stage.scrollTop += box.top - seen.top - seen.height / 3;
  }
  if (box.left < seen.left + 10 || box.right > seen.right - 10) {
    stage.scrollLeft += box.left - seen.left - seen.width / 3;
  }
}
