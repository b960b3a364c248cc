// Lines of CSV, as pandas reads them.

/**
 * @param {string} text
 */
export const quoted = text => (/[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text);

/**
 * A number in full; nothing where there is none.
 * @param {number | null} number
 */
export function written(number) {
  if (number === null) return "";
  if (number === Infinity) return "inf";
  return number === -Infinity ? "-inf" : String(number);
}

/**
 * A line of fields: texts are quoted where they have to be, numbers written in full.
 * @param {(string | number | null)[]} fields
 */
export const line = fields =>
  `${fields.map(field => (typeof field === "string" ? quoted(field) : written(field))).join(",")}\n`;
