// What the address of a page remembers: the view, the site, the metric and what is shown of it.

/**
 * @typedef {object} Remembered
 * @property {string} view
 * @property {string | null} site its name
 * @property {string | null} metric its name; null for the first
 * @property {string} shown
 */

const USUAL = { view: "results", shown: "effect" };

/**
 * The part of the address after `#`; what is as usual is left out.
 * @param {Remembered} what
 */
export function fragmentOf({ view, site, metric, shown }) {
  const fields = new URLSearchParams();
  if (view !== USUAL.view) fields.set("view", view);
  if (site !== null) fields.set("site", site);
  if (metric !== null) fields.set("metric", metric);
  if (shown !== USUAL.shown) fields.set("shown", shown);
  return `#${fields}`;
}

/**
 * What `fragmentOf` wrote. Null where an address names none of it, as a link to a heading of the page does.
 * @param {string} fragment
 * @returns {Remembered | null}
 */
export function rememberedIn(fragment) {
  const fields = new URLSearchParams(fragment.slice(1));
  if (!["view", "site", "metric", "shown"].some(name => fields.get(name))) return null;
  return {
    view: fields.get("view") ?? USUAL.view,
    site: fields.get("site"),
    metric: fields.get("metric"),
    shown: fields.get("shown") ?? USUAL.shown,
  };
}
