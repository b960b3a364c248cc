// Inside of the base run: where the strongest heads look, on the prompt that is chosen.
"use strict";
(function (conewise) {
  const held = document.getElementById("conewise-inside"), { words, element } = conewise;
  const inside = held ? JSON.parse(held.textContent) : null;
  const figures = document.getElementById("inside-figures"), chosen = document.getElementById("inside-prompt");
  const tables = [...document.querySelectorAll(".lens")];
  const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function draw() {
    if (!inside) return;
    const prompt = chosen ? Number(chosen.value) : 0;
    for (const table of tables) table.hidden = Number(table.dataset.prompt) !== prompt;
    if (figures) heads(prompt);
  }
  function heads(prompt) {
    const labels = inside.tokens[prompt].map(words.plain), places = labels.map((_, place) => place);
    const ink = style("--soft"), tick = { tickvals: places, ticktext: labels, color: ink, fixedrange: true, showgrid: false, zeroline: false, ticks: "" };
    const own = inside.patterns.filter(pattern => pattern.prompt === prompt);
    figures.replaceChildren(...own.map(pattern => {
      const name = `layer ${pattern.layer}, head ${pattern.head}`, plot = element("div", { class: "plot" });
      const effect = element("small", {}, `effect ${words.shown(pattern.effect, true)}`);
      return element("figure", {}, element("figcaption", {}, name, effect), plot);
    }));
    own.forEach((pattern, number) => {
      const texts = pattern.weights.map((row, query) => row.map((weight, key) =>
        `${labels[query]} reads ${labels[key]}<br>${weight.toFixed(3)}`));
      const few = labels.length <= 24;
      Plotly.react(figures.children[number].querySelector(".plot"), [{
        type: "heatmap", z: pattern.weights, text: texts, hoverinfo: "text", zmin: 0, zmax: 1, showscale: false,
        colorscale: [[0, style("--card")], [1, style("--more")]], xgap: few ? 1 : 0, ygap: few ? 1 : 0,
      }], {
        width: Math.min(340, document.documentElement.clientWidth - 34), height: 320, margin: { l: 74, r: 6, t: 6, b: 74 },
        xaxis: { ...tick, showticklabels: few, tickangle: -60 }, yaxis: { ...tick, showticklabels: few, autorange: "reversed" },
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 11, family: style("--mono") },
      }, { displayModeBar: false });
    });
  }
  if (chosen) chosen.addEventListener("change", draw);
  conewise.inside = { draw };
})(window.conewise);
