// Elements of a page: found, made, saved as files. Whatever comes from data is text in them, never markup.

/**
 * The element of this id, which is of this kind. The template and this script disagree where it is not.
 * @template {Element} [T=HTMLElement]
 * @param {string} id
 * @param {new () => T} [kind]
 * @returns {T}
 */
export function byId(id, kind) {
  const found = maybeById(id, kind);
  if (!found) throw new Error(`the page has no element #${id}`);
  return found;
}

/**
 * The element of this id, or null where this page has none.
 * @template {Element} [T=HTMLElement]
 * @param {string} id
 * @param {new () => T} [kind]
 * @returns {T | null}
 */
export function maybeById(id, kind) {
  const expected = kind ?? HTMLElement;
  const found = document.getElementById(id);
  if (found && !(found instanceof expected)) throw new Error(`#${id} is no ${expected.name}`);
  return /** @type {T | null} */ (found);
}

/**
 * The one element inside of another that a selector finds.
 * @template {Element} [T=HTMLElement]
 * @param {ParentNode} parent
 * @param {string} selector
 * @returns {T}
 */
export function inside(parent, selector) {
  const found = parent.querySelector(selector);
  if (!found) throw new Error(`the page has no element ${selector}`);
  return /** @type {T} */ (found);
}

/**
 * What the page sends in the element of this id.
 * @param {string} id
 */
export const sentIn = id => JSON.parse(byId(id, HTMLScriptElement).text);

/**
 * @template {Element} T
 * @param {T} made
 * @param {Record<string, string | number>} attributes
 * @param {(Node | string)[]} children
 */
function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}

/**
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, string | number>} [attributes]
 * @param {...(Node | string)} children
 */
export const element = (tag, attributes = {}, ...children) =>
  filled(document.createElement(tag), attributes, children);

/**
 * @template {keyof SVGElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, string | number>} [attributes]
 * @param {...(Node | string)} children
 */
export const svgElement = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/**
 * A variable of the page's style, such as "--ink".
 * @param {string} name
 */
export const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * A bar behind a number: how large it is beside the largest one.
 * @param {number} number
 * @param {number} largest
 */
export function bar(number, largest) {
  const made = element("i", { class: number < 0 ? "less" : "more", "aria-hidden": "true" });
  made.style.width = `${(Math.min(1, Math.abs(number) / largest) * 100).toFixed(1)}%`;
  return made;
}

/**
 * Save texts as one file.
 * @param {string[]} pieces
 * @param {string} name
 */
export function saveCsv(pieces, name) {
  const url = URL.createObjectURL(new Blob(pieces, { type: "text/csv" }));
  const link = element("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
