// Numbers that were sent as base64 of their bytes, low byte first.

/**
 * @param {string} text
 */
function bytes(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text).buffer;
  const raw = atob(text);
  const found = new Uint8Array(raw.length);
  for (let at = 0; at < raw.length; at++) found[at] = raw.charCodeAt(at);
  return found.buffer;
}

/**
 * Numbers of 64 bits.
 * @param {string} text
 */
export const floats = text => new Float64Array(bytes(text));

/**
 * Whole numbers of 32 bits.
 * @param {string} text
 */
export const integers = text => new Int32Array(bytes(text));
