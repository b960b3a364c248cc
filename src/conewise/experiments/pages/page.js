// Draws every figure from the page's data. Plotly draws text in a colour of its own: let it follow the page's.
(function () {
  var figures = JSON.parse(document.getElementById("conewise-figures").textContent);
  var plots = document.querySelectorAll(".plotly-graph-div");
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  function follow() {
    var ink = getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
    plots.forEach(function (plot) { Plotly.relayout(plot, {"font.color": ink}); });
  }
  var drawn = Array.prototype.map.call(plots, function (plot) {
    var figure = figures[plot.dataset.figure];
    return Plotly.newPlot(plot, figure.data, figure.layout, {displayModeBar: false, responsive: true});
  });
  dark.addEventListener("change", follow);
  Promise.all(drawn).then(function () {
    follow();
    document.documentElement.dataset.ready = "true";
  });
})();
