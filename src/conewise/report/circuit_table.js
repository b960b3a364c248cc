// The table of a circuit's edges, the strongest first, a page at a time, filtered, and as CSV.
"use strict";
(function (conewise) {
  const { edges, state, isShown, choose, listen, shown, element, largest } = conewise.circuit;
  const ROWS = 20;
  const body = document.querySelector("#edges tbody"), filter = document.getElementById("filter");
  const order = edges.map((_, at) => at).sort((a, b) => Math.abs(edges[b].score || 0) - Math.abs(edges[a].score || 0));
  let page = 0;

  function found() {
    const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    return order.filter(at => isShown(edges[at]) && wanted.every(word => edges[at].name.toLowerCase().includes(word)));
  }
  function draw() {
    const rows = found(), pages = Math.max(1, Math.ceil(rows.length / ROWS));
    page = Math.max(0, Math.min(page, pages - 1));
    body.replaceChildren(...rows.slice(page * ROWS, (page + 1) * ROWS).map((at, number) => row(at, page * ROWS + number + 1)));
    if (!rows.length) body.append(element("tr", {}, element("td", { colspan: 3, class: "empty" }, "No edge matches.")));
    document.getElementById("page").textContent = `${rows.length.toLocaleString("en")} edges · page ${page + 1} of ${pages}`;
    document.getElementById("previous").disabled = page === 0;
    document.getElementById("next").disabled = page === pages - 1;
  }
  function row(at, number) {
    const edge = edges[at], is = state.chosen !== null && state.chosen.kind === "edge" && state.chosen.at === at;
    const score = element("td", { class: "score effect" }, shown(edge.score, true));
    if (edge.score) {
      const bar = element("i", { class: edge.score < 0 ? "less" : "more", "aria-hidden": "true" });
      bar.style.width = `${(Math.abs(edge.score) / largest * 100).toFixed(1)}%`;
      score.append(bar);
    }
    const line = element("tr", { "data-edge": at, "aria-selected": String(is) },
      element("td", { class: "rank" }, String(number)), element("td", { class: "site" }, element("button", { type: "button" }, edge.name)), score);
    line.addEventListener("click", () => choose({ kind: "edge", at }));
    return line;
  }
  filter.addEventListener("input", () => { page = 0; draw(); });
  document.getElementById("previous").addEventListener("click", () => { page--; draw(); });
  document.getElementById("next").addEventListener("click", () => { page++; draw(); });
  document.getElementById("csv").addEventListener("click", () => {
    const lines = found().map(at => `${edges[at].name},${edges[at].score === null ? "" : edges[at].score}\n`);
    const url = URL.createObjectURL(new Blob(["edge,score\n", ...lines], { type: "text/csv" }));
    const link = element("a", { href: url, download: "edges.csv" });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  });
  listen(draw);
  draw();
  document.documentElement.dataset.ready = "true";
})(window.conewise);
