// The player of a wave: steps back and forth, by buttons, a slider, keys, or by itself.
import { element, inside } from "../page/elements.js";
import { whole } from "../page/words.js";
import { startChoices } from "./choices.js";
import { painter, reveal } from "./painter.js";
import { typical } from "./show.js";
import { PHASES, stepsOf } from "./steps.js";

/** @import { Show } from "./show.js" */
/** @import { Step } from "./steps.js" */

/** How far keys go. */
const KEYS = new Map([
  ["ArrowLeft", -1],
  ["ArrowRight", 1],
  ["Home", -Infinity],
  ["End", Infinity],
]);

/**
 * Milliseconds between two steps: all of them take a quarter of a minute, none too long or too short.
 * @param {number} steps
 */
export const pace = steps => Math.max(120, Math.min(900, 15_000 / steps));

class Player {
  /** @type {Step[]} */
  #steps = [];
  #at = 0;
  /** @type {number | null} */
  #timer = null;
  #root;
  #show;
  #paint;
  #select;
  /** @type {HTMLButtonElement[]} */
  #phases;

  /**
   * @param {HTMLElement} root
   * @param {Show} show
   */
  constructor(root, show) {
    this.#root = root;
    this.#show = show;
    this.#paint = painter(root, show.items);
    this.#phases = PHASES.map(phase => this.#phaseButton(phase));
    inside(root, ".cw-phases").append(...this.#phases.map(button => element("li", {}, button)));
    this.#select = startChoices(root, show, (scene, name) => {
      this.pick(scene, name);
      this.#go(1);
    });
    if (show.count) this.#startControls();
    else this.#rest();
  }

  /**
   * Begin a scene.
   * @param {number} scene
   * @param {string} [given] the name of the site, where it has several
   */
  pick(scene, given) {
    this.#stop();
    const found = this.#show.scene(scene);
    const name = given ?? found.name;
    this.#steps = stepsOf(this.#show, found, name);
    this.#by("site").textContent = name;
    this.#slider.max = String(this.#steps.length - 1);
    for (const button of this.#phases) {
      button.disabled = !this.#steps.some(step => step.phase === button.textContent);
    }
    this.#select(scene, given);
    this.#go(0);
  }

  // -- showing a step ----------------------------------------------------------------------------

  /**
   * @param {number} to the number of a step; what is beyond the ends is the nearest one
   */
  #go(to) {
    const last = this.#steps.length - 1;
    this.#at = Math.max(0, Math.min(last, to));
    const step = this.#steps[this.#at];
    this.#paint(step.states, item => (this.#show.isGraph ? "" : countText(step, item)));
    this.#tell(step);
    for (const name of ["first", "prev"]) this.#button(name).disabled = this.#at === 0;
    for (const name of ["next", "last"]) this.#button(name).disabled = this.#at === last;
    if (step.now.length) reveal(this.#root, step.now[0]);
    if (this.#at === last) this.#stop();
  }

  /**
   * @param {Step} step
   */
  #tell(step) {
    const { phase, text, ledger } = step;
    const count = this.#steps.length;
    this.#slider.value = String(this.#at);
    this.#slider.setAttribute("aria-valuetext", `step ${this.#at + 1} of ${count}: ${phase}`);
    this.#by("place").textContent = `${this.#at + 1} / ${count}`;
    inside(this.#root, ".wave-step").replaceChildren(element("strong", {}, phase), text);
    this.#root.dataset.phase = phase.toLowerCase();
    for (const [kind, number] of Object.entries(ledger)) this.#by(kind).textContent = whole(number);
    this.#by("kept").textContent = whole(this.#show.full - ledger.recomputed);
    for (const button of this.#phases) {
      if (button.textContent === phase) button.setAttribute("aria-current", "step");
      else button.removeAttribute("aria-current");
    }
  }

  // -- moving --------------------------------------------------------------------------------------

  /**
   * Go somewhere because a reader said so.
   * @param {number} to
   */
  #move(to) {
    this.#stop();
    this.#go(to);
  }

  #play() {
    if (this.#at === this.#steps.length - 1) this.#go(0);
    this.#setPlaying("❚❚ Pause", true);
    this.#timer = window.setInterval(() => this.#go(this.#at + 1), pace(this.#steps.length));
  }

  #stop() {
    if (this.#timer !== null) clearInterval(this.#timer);
    this.#timer = null;
    this.#setPlaying("▶ Play", false);
  }

  /**
   * @param {string} text
   * @param {boolean} isPlaying
   */
  #setPlaying(text, isPlaying) {
    this.#by("play").textContent = text;
    this.#by("play").setAttribute("aria-pressed", String(isPlaying));
  }

  // -- controls ------------------------------------------------------------------------------------

  /** There is no scene, and so nothing to play. */
  #rest() {
    for (const button of this.#root.querySelectorAll("button")) button.disabled = true;
    this.#slider.disabled = true;
  }

  #startControls() {
    this.#by("first").addEventListener("click", () => this.#move(0));
    this.#by("prev").addEventListener("click", () => this.#move(this.#at - 1));
    this.#by("next").addEventListener("click", () => this.#move(this.#at + 1));
    this.#by("last").addEventListener("click", () => this.#move(Infinity));
    this.#slider.addEventListener("input", () => this.#move(Number(this.#slider.value)));
    this.#by("play").addEventListener("click", () => (this.#timer === null ? this.#play() : this.#stop()));
    this.#root.addEventListener("keydown", event => {
      const step = KEYS.get(event.key);
      const isControl = event.target instanceof Element && event.target.matches("select, input");
      if (step === undefined || isControl || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      this.#move(this.#at + step);
    });
  }

  /**
   * @param {string} phase
   */
  #phaseButton(phase) {
    const button = element("button", { type: "button" }, phase);
    button.addEventListener("click", () => this.#move(this.#steps.findIndex(step => step.phase === phase)));
    return button;
  }

  /**
   * @param {string} name
   */
  #by(name) {
    return inside(this.#root, `#wave-${name}`);
  }

  /**
   * @param {string} name
   */
  #button(name) {
    return /** @type {HTMLButtonElement} */ (this.#by(name));
  }

  get #slider() {
    return /** @type {HTMLInputElement} */ (this.#by("slider"));
  }
}

/**
 * How many nodes of a part were recomputed, or else are invalid.
 * @param {Step} step
 * @param {number} item
 */
function countText({ states }, item) {
  const { done, lost } = states.get(item) ?? {};
  const count = done || lost;
  return count ? whole(count) : "";
}

/**
 * Returns what begins the scene of a site, by the site's name.
 * @param {HTMLElement} root
 * @param {Show} show
 */
export function startPlayer(root, show) {
  const player = new Player(root, show);
  if (show.count) player.pick(typical(show));
  return (/** @type {string} */ name) => {
    const scene = show.find(name);
    if (scene !== undefined) player.pick(scene, name);
  };
}
