// Lines of CSV, as pandas reads them.

/**
 * A text as a field: one that a spreadsheet would take for a formula has an apostrophe before it.
 * @param {string} text
 */
export function quoted(text) {
  const plain = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(plain) ? `"${plain.replace(/"/g, '""')}"` : plain;
}

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
