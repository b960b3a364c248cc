// The numbers of a sweep: what each cell does to each metric, and what it costs.
import { floats } from "./bytes.js";
import { lastUpTo, sorted } from "./order.js";

/** @import { SentCosts, SentSweep } from "../sent.js" */

/**
 * What is shown of a cell: the metric itself, how far it is from the base, or how much of the way to the source.
 * @typedef {"value" | "effect" | "share"} Shown
 */

/**
 * @param {string | null} text
 */
const maybeFloats = text => (text === null ? null : floats(text));

/** As `Result.to_dataframe()` computes them, in the same order of the same 64-bit operations. */
export class Numbers {
  #table;
  #perPrompt;
  #basePerPrompt;
  #prompts;
  /** @type {Map<string, Float64Array>} */
  #kept = new Map();
  /** @type {Map<number, { order: Uint32Array, ranks: Uint32Array }>} */
  #ranked = new Map();

  /**
   * @param {SentSweep} sent
   */
  constructor(sent) {
    this.#table = floats(sent.table);
    this.#perPrompt = maybeFloats(sent.perPrompt);
    this.#basePerPrompt = maybeFloats(sent.basePerPrompt);
    this.#prompts = sent.prompts;
    this.base = floats(sent.base);
    this.source = maybeFloats(sent.source);
    this.count = this.#table.length / sent.metrics.length;
  }

  /** Whether the numbers of single prompts were sent. */
  get hasPrompts() {
    return this.#perPrompt !== null;
  }

  /**
   * @param {number} metric
   * @param {number} cell
   */
  value(metric, cell) {
    return this.#table[metric * this.count + cell];
  }

  /**
   * @param {number} metric
   * @param {number} cell
   */
  effect(metric, cell) {
    return this.value(metric, cell) - this.base[metric];
  }

  /**
   * @param {number} metric
   * @param {number} cell
   */
  share(metric, cell) {
    const span = this.source === null ? NaN : this.source[metric] - this.base[metric];
    return span === 0 ? NaN : this.effect(metric, cell) / span;
  }

  /**
   * What is shown of every cell.
   * @param {number} metric
   * @param {Shown} which
   */
  all(metric, which) {
    const key = `${metric} ${which}`;
    let found = this.#kept.get(key);
    if (!found) {
      found = new Float64Array(this.count);
      for (let cell = 0; cell < this.count; cell++) found[cell] = this[which](metric, cell);
      this.#kept.set(key, found);
    }
    return found;
  }

  /**
   * The cells by the size of their effect, the largest first.
   * @param {number} metric
   */
  ranked(metric) {
    return this.#ranking(metric).order;
  }

  /**
   * The place of every cell among them, from 1.
   * @param {number} metric
   */
  ranks(metric) {
    return this.#ranking(metric).ranks;
  }

  /**
   * @param {number} metric
   */
  #ranking(metric) {
    let found = this.#ranked.get(metric);
    if (!found) {
      const order = sorted(this.all(metric, "effect").map(Math.abs), true);
      const ranks = new Uint32Array(this.count);
      for (let place = 0; place < this.count; place++) ranks[order[place]] = place + 1;
      found = { order, ranks };
      this.#ranked.set(metric, found);
    }
    return found;
  }

  /**
   * The largest size of an effect that is a finite number; 1 where all effects are 0.
   * @param {number} metric
   */
  largest(metric) {
    for (const cell of this.ranked(metric)) {
      const size = Math.abs(this.effect(metric, cell));
      if (Number.isFinite(size)) return size || 1;
    }
    return 1;
  }

  /**
   * The value and the effect of a cell on every prompt; none where these were not sent.
   * @param {number} metric
   * @param {number} cell
   */
  byPrompt(metric, cell) {
    const start = (metric * this.count + cell) * this.#prompts;
    const values = this.#perPrompt?.subarray(start, start + this.#prompts) ?? [];
    return Array.from(values, (value, prompt) => ({
      value,
      effect: value - (this.#basePerPrompt?.[metric * this.#prompts + prompt] ?? this.base[metric]),
    }));
  }
}

/** The nodes and FLOPs that the worlds of cells compute. */
export class Costs {
  #sent;
  /** @type {number[]} */
  #starts = [];

  /**
   * @param {SentCosts} sent
   */
  constructor(sent) {
    this.#sent = sent;
    this.fullEvaluations = sent.full[0];
    this.fullFlops = sent.full[1];
    let start = 0;
    for (const [, count] of sent.runs) {
      this.#starts.push(start);
      start += count;
    }
  }

  /**
   * @param {number} cell
   */
  of(cell) {
    const run = lastUpTo(this.#starts.length, at => this.#starts[at], cell);
    const [cone] = this.#sent.runs[run];
    return { evaluations: this.#sent.evaluations[cone], flops: this.#sent.flops[cone] };
  }
}
