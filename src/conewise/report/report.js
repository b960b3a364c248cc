// Plotly draws text in a colour of its own: let it follow the page's.
(function () {
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  function follow() {
    var ink = getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
    document.querySelectorAll(".plotly-graph-div").forEach(function (plot) { Plotly.relayout(plot, {"font.color": ink}); });
  }
  dark.addEventListener("change", follow);
  window.addEventListener("load", follow);
})();
