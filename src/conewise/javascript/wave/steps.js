// The steps of a wave: what happens in a scene, one thing after another, in words and as the states of items.
import { counted, whole } from "../page/words.js";
import { total } from "./show.js";

/** @import { Pair, Scene, Show } from "./show.js" */

export const PHASES = ["Baseline", "Patch", "Invalidate", "Demand", "Recompute", "Read", "Drop"];

/**
 * What became of an item so far; `lost` and `done` count its nodes.
 * @typedef {object} ItemState
 * @property {boolean} [site]
 * @property {number} [lost]
 * @property {boolean} [wanted]
 * @property {number} [done]
 * @property {boolean} [reused]
 * @property {boolean} [now] whether this step is about it
 */

/** @typedef {Map<number, ItemState>} States */

/** @typedef {{ invalidated: number, recomputed: number, reused: number }} Ledger */

/** @typedef {{ phase: string, text: string, now: readonly number[], ledger: Ledger, states: States }} Step */

/**
 * @param {Show} show
 * @param {Scene} scene
 * @param {string} name of the site that is patched
 */
export function stepsOf(show, scene, name) {
  const wave = new Wave(show, scene, name);
  wave.baseline();
  wave.patch();
  wave.invalidate();
  wave.demand();
  wave.recompute();
  wave.read();
  wave.drop();
  return wave.steps;
}

/** A wave that is under way: each method is a phase of it, and adds steps. */
class Wave {
  /** @type {Step[]} */
  steps = [];
  /** @type {States} */
  #states = new Map();
  /** @type {Ledger} */
  #ledger = { invalidated: 0, recomputed: 0, reused: 0 };
  #show;
  #scene;
  #name;

  /**
   * @param {Show} show
   * @param {Scene} scene
   * @param {string} name
   */
  constructor(show, scene, name) {
    this.#show = show;
    this.#scene = scene;
    this.#name = name;
  }

  baseline() {
    const targets = this.#show.targets || "the demand";
    this.#step(
      "Baseline",
      `Every value of ${targets} and of all that it needs has been computed once, and is kept.`,
    );
  }

  patch() {
    const { at } = this.#scene;
    for (const item of at) this.#state(item).site = true;
    const text =
      `${this.#name} gets another value${this.#value(at[0])} in a fork: a world that shares all other values with ` +
      "the baseline. Nothing is computed yet.";
    this.#step("Patch", text, at);
  }

  invalidate() {
    for (const { group, pairs } of this.#groups(this.#scene.invalidated)) {
      for (const [item, count] of pairs) {
        const state = this.#state(item);
        state.lost = (state.lost ?? 0) + count;
      }
      const count = total(pairs);
      this.#ledger.invalidated += count;
      const text = this.#show.isGraph
        ? `${group} depends on the change: its value is valid no longer.`
        : `${capital(group)}: ${counted(count, "value depends", "values depend")} on the change and ` +
          `${count === 1 ? "is" : "are"} valid no longer.`;
      this.#step("Invalidate", text, itemsOf(pairs));
    }
  }

  demand() {
    const targets = this.#show.targets || "what is asked for";
    for (const { group, pairs } of this.#groups([...this.#scene.planned].reverse())) {
      for (const [item] of pairs) this.#state(item).wanted = true;
      const text = `The demand walks back from ${targets} through what is invalid: ${group} has to be computed.`;
      this.#step("Demand", text, itemsOf(pairs));
    }
    const { reused } = this.#scene;
    if (!reused.length) return;
    for (const [item] of reused) this.#state(item).reused = true;
    const count = total(reused);
    this.#ledger.reused += count;
    const text =
      `It stops where values are valid: ${counted(count, "value is", "values are")} read as ` +
      `${count === 1 ? "it is" : "they are"}. All else was not even looked at.`;
    this.#step("Demand", text, itemsOf(reused));
  }

  recompute() {
    for (const { group, pairs } of this.#groups(this.#scene.recomputed)) {
      for (const [item, count] of pairs) {
        const state = this.#state(item);
        state.done = (state.done ?? 0) + count;
        state.lost = Math.max(0, (state.lost ?? 0) - count);
        state.wanted = false;
      }
      const count = total(pairs);
      this.#ledger.recomputed += count;
      const text = this.#show.isGraph
        ? `${group}${this.#value(pairs[0][0])} is computed: all that it reads is valid by now.`
        : `${capital(group)}: ${counted(count, "node is", "nodes are")} computed, inputs first, each once.`;
      this.#step("Recompute", text, itemsOf(pairs));
    }
  }

  read() {
    const { items, targetItems, targets, full } = this.#show;
    const values = targetItems.map(item => `${items[item].label}${this.#value(item)}`).join(", ");
    const text =
      `${values || targets || "the result"} is read. ${whole(this.#ledger.recomputed)} of ${whole(full)} nodes were ` +
      "computed; a full run computes all of them.";
    this.#step("Read", text, targetItems);
  }

  drop() {
    this.#states.clear();
    const again = counted(this.#scene.restored, "node had", "nodes had");
    this.#step(
      "Drop",
      `The fork is dropped, and its values with it. The baseline never changed: ${again} to be computed to have it back.`,
    );
  }

  /**
   * @param {number} item
   */
  #state(item) {
    const state = this.#states.get(item) ?? {};
    this.#states.set(item, state);
    return state;
  }

  /**
   * @param {string} phase
   * @param {string} text
   * @param {readonly number[]} [now] what it is about
   */
  #step(phase, text, now = []) {
    const states = new Map(
      [...this.#states].map(([item, state]) => [item, { ...state, now: now.includes(item) }]),
    );
    this.steps.push({ phase, text, now, ledger: { ...this.#ledger }, states });
  }

  /**
   * The value of an item in words, where it is known: before, and after where that is another.
   * @param {number} item
   */
  #value(item) {
    const before = this.#show.before[item];
    const after = this.#scene.after[item];
    if (before === undefined) return "";
    return after === undefined || after === before ? ` (${before})` : ` (${before} → ${after})`;
  }

  /**
   * Neighbours of one group together: a layer's parts are told in one step, a small graph's nodes one by one.
   * @param {Pair[]} pairs
   */
  #groups(pairs) {
    /** @type {{ group: string, pairs: Pair[] }[]} */
    const found = [];
    for (const pair of pairs) {
      const { group } = this.#show.items[pair[0]];
      const last = found.at(-1);
      if (last?.group === group) last.pairs.push(pair);
      else found.push({ group, pairs: [pair] });
    }
    return found;
  }
}

/**
 * @param {Pair[]} pairs
 */
const itemsOf = pairs => pairs.map(([item]) => item);

/**
 * @param {string} text
 */
const capital = text => text.charAt(0).toUpperCase() + text.slice(1);
