// How the effects of a site spread over prompts.

/**
 * The mean of the finite effects, half of the interval in which it lies with 95 %, by Student's t, and each
 * effect with the number of its prompt. Null where no effect is a finite number.
 * @param {number[]} effects one for each prompt
 */
export function spreadOf(effects) {
  const points = effects
    .map((effect, prompt) => ({ effect, prompt }))
    .filter(({ effect }) => Number.isFinite(effect));
  if (!points.length) return null;
  const freedom = points.length - 1;
  const mean = points.reduce((sum, { effect }) => sum + effect, 0) / points.length;
  const squares = points.reduce((sum, { effect }) => sum + (effect - mean) ** 2, 0);
  const half = freedom ? studentQuantile(0.95, freedom) * Math.sqrt(squares / freedom / points.length) : 0;
  return { points, mean, half };
}

/**
 * The t within which a share `level` of Student's distribution lies, on both sides of 0.
 * @param {number} level
 * @param {number} freedom
 */
export function studentQuantile(level, freedom) {
  let [low, high] = [0, 1e7];
  for (let step = 0; step < 90; step++) {
    const middle = (low + high) / 2;
    if (studentShare(middle, freedom) < level) low = middle;
    else high = middle;
  }
  return (low + high) / 2;
}

/**
 * The share of Student's distribution within −t and t: a finite sum, for whole degrees of freedom.
 * @param {number} t
 * @param {number} freedom
 */
function studentShare(t, freedom) {
  const angle = Math.atan(t / Math.sqrt(freedom));
  const [cosine, sine] = [Math.cos(angle), Math.sin(angle)];
  if (freedom === 1) return (2 * angle) / Math.PI;
  const isOdd = freedom % 2 === 1;
  let term = isOdd ? cosine : 1;
  let total = term;
  for (let number = isOdd ? 3 : 2; number < freedom - 1; number += 2) {
    term *= (cosine ** 2 * (number - 1)) / number;
    total += term;
  }
  return isOdd ? (2 / Math.PI) * (angle + sine * total) : sine * total;
}
