// How the effects of the strongest sites spread over the prompts: a dot for each, the mean and its interval.
"use strict";
(function (conewise) {
  const { data, names, numbers, words, state } = conewise;
  const plot = document.getElementById("spread-figure"), MOST = 12;
  const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // The effects of a cell on every prompt.
  function effects(metric, cell) {
    const start = (metric * data.count + cell) * data.prompts, base = data.basePerPrompt;
    return Array.from({ length: data.prompts }, (_, prompt) =>
      data.perPrompt[start + prompt] - (base ? base[metric * data.prompts + prompt] : data.base[metric]));
  }
  // Half of the interval in which the mean lies with 95 %, by its standard error.
  function half(found, mean) {
    const variance = found.reduce((sum, one) => sum + (one - mean) ** 2, 0) / (found.length - 1);
    return 1.96 * Math.sqrt(variance / found.length);
  }
  function draw() {
    if (!plot || !data.perPrompt) return;
    const metric = state.metric, cells = Array.from(numbers.ranked(metric).slice(0, MOST));
    const labels = cells.map(cell => words.plain(names.nameOf(cell)));
    const dots = { x: [], y: [], text: [] }, means = { x: [], y: [], text: [], error: [] };
    cells.forEach((cell, row) => {
      const found = effects(metric, cell).filter(Number.isFinite);
      if (!found.length) return;
      const mean = found.reduce((sum, one) => sum + one, 0) / found.length;
      const side = found.length > 1 ? half(found, mean) : 0;
      found.forEach((one, prompt) => {
        dots.x.push(one);
        dots.y.push(row);
        dots.text.push(`${labels[row]}<br>${data.given.unit} ${prompt + 1}: ${words.shown(one, true)}`);
      });
      means.x.push(mean);
      means.y.push(row);
      means.error.push(side);
      means.text.push(`${labels[row]}<br>mean ${words.shown(mean, true)} ± ${words.shown(side)}`);
    });
    const ink = style("--soft"), narrow = matchMedia("(max-width: 640px)").matches;
    // On a narrow page the numbers alone: resid_pre[1, 14].
    const shorter = text => narrow ? text.replace(/[a-z_]+=/g, "") : text;
    Plotly.react(plot, [
      { type: "scatter", mode: "markers", x: dots.x, y: dots.y, text: dots.text, hoverinfo: "text",
        marker: { size: 7, opacity: 0.45, color: dots.x.map(one => style(one < 0 ? "--less" : "--more")) } },
      { type: "scatter", mode: "markers", x: means.x, y: means.y, text: means.text, hoverinfo: "text",
        error_x: { type: "data", array: means.error, color: style("--ink"), thickness: 1.5, width: 5 },
        marker: { size: 9, symbol: "line-ns", color: style("--ink"), line: { width: 2, color: style("--ink") } } },
    ], {
      height: 70 + 26 * cells.length, margin: { l: narrow ? 120 : 210, r: 12, t: 8, b: 44 }, showlegend: false,
      xaxis: { title: { text: words.plain(`effect on ${data.metrics[metric]}`), font: { size: 12 } }, color: ink,
        gridcolor: style("--line"), zerolinecolor: ink, fixedrange: true, nticks: 6 },
      yaxis: { tickvals: cells.map((_, row) => row), ticktext: labels.map(shorter), color: ink, fixedrange: true,
        range: [cells.length - 0.4, -0.6], showgrid: false, zeroline: false },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
      font: { color: ink, size: 12, family: style("--sans") },
    }, { displayModeBar: false, responsive: true });
  }
  conewise.listen(changed => { if (changed.includes("metric")) draw(); });
  conewise.spread = { draw };
})(window.conewise);
