// Cones on a model's layers, and waves of patches step by step. Names of elements: report/wave.py.
import { sentIn } from "../page/elements.js";
import { startCone } from "./cone.js";
import { startPlayer } from "./player.js";
import { showOf } from "./show.js";

/** @import { Show } from "./show.js" */

/** @type {Map<string, Show>} */
const shows = new Map();

/**
 * What each section does to show a site.
 * @type {Map<HTMLElement, (name: string) => void>}
 */
const started = new Map();

/**
 * The show of a section, made once for all that have the same.
 * @param {HTMLElement} root
 */
function showIn(root) {
  const id = root.dataset.source ?? "";
  const show = shows.get(id) ?? showOf(sentIn(id));
  shows.set(id, show);
  return show;
}

/** Begin the sections that have not begun. */
function start() {
  /** @type {NodeListOf<HTMLElement>} */
  const sections = document.querySelectorAll(".cw-cone, .cw-wave");
  for (const root of sections) {
    if (started.has(root)) continue;
    const begin = root.classList.contains("cw-cone") ? startCone : startPlayer;
    started.set(root, begin(root, showIn(root)));
  }
}

// Every section brings this script; one copy works for all.
if (!window.conewise) {
  window.conewise = {
    showCone(name) {
      for (const show of started.values()) show(name);
    },
  };
  start(); // what stands before this script, so that a page's own scripts find it working
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
}
