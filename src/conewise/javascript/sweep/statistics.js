// How the effects of a site spread over prompts.

/**
 * The mean of the finite effects, half of the interval in which it lies with 95 %, by its standard error, and
 * each effect with the number of its prompt. Null where no effect is a finite number.
 * @param {number[]} effects one for each prompt
 */
export function spreadOf(effects) {
  const points = effects
    .map((effect, prompt) => ({ effect, prompt }))
    .filter(({ effect }) => Number.isFinite(effect));
  if (!points.length) return null;
  const mean = points.reduce((sum, { effect }) => sum + effect, 0) / points.length;
  const squares = points.reduce((sum, { effect }) => sum + (effect - mean) ** 2, 0);
  const variance = points.length > 1 ? squares / (points.length - 1) : 0;
  return { points, mean, half: 1.96 * Math.sqrt(variance / points.length) };
}
