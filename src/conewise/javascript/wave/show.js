// A show: what a player can show of a graph. Made of a model folded by layer, or of the waves of a small graph.

/** @import { SentFolded, SentWaves } from "../sent.js" */

/**
 * A part of a model, or a node; items of one group are told together.
 * @typedef {object} Item
 * @property {string} label
 * @property {string} group
 * @property {number} nodes that it has to compute
 * @property {number} cost in FLOPs
 */

/**
 * An item, and how many of its nodes.
 * @typedef {[number, number]} Pair
 */

/**
 * One patch, one demand: what happens to which items, in the order in which it does.
 *
 * `at` are the items that are patched, `after` values in words, `restored` what the baseline has to compute again.
 * @typedef {object} Scene
 * @property {string} name
 * @property {readonly number[]} at
 * @property {Pair[]} invalidated
 * @property {Pair[]} planned
 * @property {Pair[]} recomputed
 * @property {Pair[]} reused
 * @property {number} cost in FLOPs
 * @property {Record<number, string>} after
 * @property {number} restored
 */

/**
 * Scenes by their number, and by the names of sites. `full` is how many nodes a full run computes.
 * @typedef {object} Show
 * @property {boolean} isGraph whether its items are nodes, and not parts of a model
 * @property {Item[]} items
 * @property {number} count of the scenes
 * @property {(scene: number) => Scene} scene
 * @property {Map<string, number>} names
 * @property {(name: string) => number | undefined} find the scene of a site, whatever part of its value is meant
 * @property {number[][]} sites the items that each scene patches
 * @property {string} targets what is demanded, in words
 * @property {number[]} targetItems
 * @property {Record<number, string>} before values in words
 * @property {number} full
 * @property {number} fullCost in FLOPs
 */

/**
 * @param {SentFolded | SentWaves} sent
 * @returns {Show}
 */
export const showOf = sent => (sent.kind === "conewise waves" ? ofGraph(sent) : ofFolded(sent));

/**
 * The name of a place, or of several, without the part of the value: the same as `without_part` of report/folded.py.
 * @param {string} name
 */
export const withoutPart = name => name.split(" + ").map(placeOf).join(" + ");

/**
 * @param {string} name
 */
function placeOf(name) {
  const [site, ...rest] = name.split("[");
  if (!rest.length) return name;
  const items = rest.join("[").replace(/\]$/, "").split(", ");
  const kept = items.filter(item => /^(layer|stack)=/.test(item));
  return kept.length ? `${site}[${kept.join(", ")}]` : site;
}

/**
 * @param {SentFolded} sent
 * @returns {Show}
 */
function ofFolded(sent) {
  const items = sent.parts.map(([row, , label, meaning, nodes, cost, layer]) => ({
    label: layer === null ? label : `layer ${row}, ${meaning}`,
    group: layer === null ? row : `layer ${row}`,
    nodes,
    cost,
  }));
  const names = new Map(sent.cones.flatMap((cone, at) => cone.names.map(name => [name, at])));
  return {
    isGraph: false,
    items,
    names,
    count: sent.cones.length,
    scene: at => coneScene(items, sent.cones[at]),
    find: name => names.get(name) ?? names.get(withoutPart(name)),
    sites: sent.cones.map(cone => cone.at),
    targets: sent.demanded.join(", "),
    targetItems: [],
    before: {},
    full: sent.full_evaluations,
    fullCost: sent.full_flops,
  };
}

/**
 * @param {Item[]} items
 * @param {SentFolded["cones"][number]} cone
 * @returns {Scene}
 */
function coneScene(items, cone) {
  const done = items.map((item, at) => (at >= cone.from ? item.nodes : 0));
  const costs = items.map((item, at) => (at >= cone.from ? item.cost : 0));
  for (const [item, count, cost] of cone.but) {
    done[item] = count;
    costs[item] = cost;
  }
  const lost = [...done];
  for (const [item, count] of cone.lost) lost[item] += count;
  return {
    name: cone.names[0],
    at: cone.at,
    after: {},
    restored: 0,
    invalidated: pairs(lost),
    planned: pairs(done),
    recomputed: pairs(done),
    reused: cone.reused,
    cost: costs.reduce((sum, cost) => sum + cost, 0),
  };
}

/**
 * The items that have a count.
 * @param {number[]} counts
 * @returns {Pair[]}
 */
const pairs = counts => counts.flatMap((count, item) => (count ? [[item, count]] : []));

/**
 * @param {SentWaves} sent
 * @returns {Show}
 */
function ofGraph(sent) {
  const items = sent.nodes.map(([label, isSource]) => ({
    label,
    group: label,
    nodes: isSource ? 0 : 1,
    cost: 0,
  }));
  const names = new Map(sent.waves.map((wave, at) => [items[wave.site].label, at]));
  return {
    isGraph: true,
    items,
    names,
    count: sent.waves.length,
    scene: at => waveScene(items, sent.waves[at]),
    find: name => names.get(name),
    sites: sent.waves.map(wave => [wave.site]),
    targets: sent.targets.map(item => items[item].label).join(", "),
    targetItems: sent.targets,
    before: sent.before,
    full: sent.full,
    fullCost: 0,
  };
}

/**
 * @param {Item[]} items
 * @param {SentWaves["waves"][number]} wave
 * @returns {Scene}
 */
function waveScene(items, wave) {
  return {
    name: items[wave.site].label,
    at: [wave.site],
    after: wave.after,
    restored: wave.restored,
    invalidated: ones(wave.invalidated),
    planned: ones(wave.planned),
    recomputed: ones(wave.recomputed),
    reused: ones(wave.reused),
    cost: 0,
  };
}

/**
 * @param {number[]} nodes
 * @returns {Pair[]}
 */
const ones = nodes => nodes.map(item => [item, 1]);

/**
 * How many nodes pairs have together.
 * @param {Pair[]} counted
 */
export const total = counted => counted.reduce((sum, [, count]) => sum + count, 0);

/**
 * The scene to begin with: the one nearest to half of the graph, which shows best what is kept and what is not.
 * @param {Show} show
 */
export function typical(show) {
  let best = 0;
  let least = Infinity;
  for (let at = 0; at < show.count; at++) {
    const far = Math.abs(total(show.scene(at).recomputed) - show.full / 2);
    if (far < least) [best, least] = [at, far];
  }
  return best;
}
