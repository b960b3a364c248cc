// The chosen site: its numbers, its prompts, its cost and its cone.
"use strict";
(function (conewise) {
  const { data, names, numbers, words, state, element } = conewise;
  const panel = document.getElementById("site"), list = document.getElementById("site-numbers");
  const plot = document.getElementById("site-prompts");
  const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function fact(name, text, note) {
    const value = element("dd", {}, text);
    if (note) value.append(element("small", {}, note));
    return element("div", {}, element("dt", {}, name), value);
  }
  function show() {
    const cell = state.site, metric = state.metric;
    document.getElementById("site-details").hidden = cell < 0;
    document.getElementById("site-hint").hidden = cell >= 0;
    if (cell < 0) return;
    document.getElementById("site-name").textContent = names.nameOf(cell);
    const facts = [
      fact("effect", words.shown(numbers.effect(metric, cell), true)),
      fact("value", words.shown(numbers.value(metric, cell)), `base ${words.shown(data.base[metric])}`),
    ];
    if (data.source) facts.push(fact("of the way", words.percent(numbers.share(metric, cell)), `source ${words.shown(data.source[metric])}`));
    facts.push(fact("rank", `${numbers.ranks(metric)[cell].toLocaleString("en")}`, `of ${data.count.toLocaleString("en")}`));
    const cost = numbers.cost(cell);
    if (cost) {
      const of = (part, whole) => whole ? `${(part / whole * 100).toFixed(0)} %` : "–";
      facts.push(fact("recomputed", `${cost.evaluations.toLocaleString("en")}`,
        `of ${cost.full[0].toLocaleString("en")} nodes, ${of(cost.evaluations, cost.full[0])}`));
      if (cost.full[1]) facts.push(fact("FLOPs", words.large(cost.flops), `${of(cost.flops, cost.full[1])} of a full run`));
    }
    list.replaceChildren(...facts);
    byPrompt(cell, metric);
    if (conewise.showCone) conewise.showCone(names.nameOf(cell));
  }

  // The effect on each prompt, beside the mean.
  function byPrompt(cell, metric) {
    if (!plot) return;
    if (!data.perPrompt) {
      plot.textContent = "The values of single prompts are too many for this page; the saved run has them.";
      plot.className = "note";
      return;
    }
    const start = (metric * data.count + cell) * data.prompts;
    const values = data.perPrompt.subarray(start, start + data.prompts);
    const base = data.basePerPrompt ? data.basePerPrompt.subarray(metric * data.prompts, (metric + 1) * data.prompts) : null;
    const effects = Array.from(values, (value, prompt) => value - (base ? base[prompt] : data.base[metric]));
    const texts = effects.map((effect, prompt) => words.plain(
      `${data.given.unit} ${prompt + 1}: effect ${words.shown(effect, true)}, value ${words.shown(values[prompt])}`));
    const ink = style("--soft"), line = style("--line");
    Plotly.react(plot, [{
      type: "bar", x: effects.map((_, prompt) => prompt + 1), y: effects, text: texts, textposition: "none", hoverinfo: "text",
      marker: { color: effects.map(effect => style(effect < 0 ? "--less" : "--more")) },
    }], {
      height: 150, margin: { l: 44, r: 6, t: 26, b: 30 }, title: { text: `effect on each ${data.given.unit}`, font: { size: 12 }, x: 0, xref: "paper", y: 0.97 },
      xaxis: { color: ink, fixedrange: true, nticks: Math.min(12, effects.length), tickformat: "d", showgrid: false },
      yaxis: { color: ink, fixedrange: true, nticks: 4, gridcolor: line, zerolinecolor: ink },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 11, family: style("--sans") },
    }, { displayModeBar: false, responsive: true });
  }
  conewise.listen(changed => { if (changed.includes("site") || changed.includes("metric")) show(); });
  conewise.choose = function (cell, fromTable) {
    conewise.set({ site: cell });
    // On a narrow page the panel is not beside the table: go there.
    if (fromTable && matchMedia("(max-width: 1100px)").matches) panel.scrollIntoView({ block: "start" });
  };
  conewise.site = { show };
})(window.conewise);
