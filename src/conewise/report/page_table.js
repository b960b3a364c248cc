// The ranked table: every cell, a page at a time, sorted and filtered, and as CSV.
"use strict";
(function (conewise) {
  const { data, names, numbers, words, state, element } = conewise;
  const ROWS = 25;
  const body = document.querySelector("#ranked tbody"), head = document.querySelector("#ranked thead tr");
  const filter = document.getElementById("filter"), kind = document.getElementById("kind");
  let order = null, rows = null, page = 0;
  const sort = { column: "rank", descending: false };

  const columns = [
    { name: "rank", title: "#", hint: "by the size of the effect", key: cell => numbers.ranks(state.metric)[cell], text: cell => numbers.ranks(state.metric)[cell].toLocaleString("en") },
    { name: "site", title: "site", key: cell => cell },
    { name: "kind", title: "kind", key: cell => kinds.indexOf(names.kindOf(cell)), text: names.kindOf },
    ...names.columns.map(name => ({
      name, title: name, key: cell => { const n = names.at(cell, name); return n === null ? NaN : n; },
      text: cell => { const n = names.at(cell, name); return n === null ? "" : String(n); },
    })),
    { name: "value", title: "value", key: cell => numbers.value(state.metric, cell), text: cell => words.shown(numbers.value(state.metric, cell)) },
    { name: "effect", title: "effect", descends: true, key: cell => numbers.effect(state.metric, cell), text: cell => words.shown(numbers.effect(state.metric, cell), true) },
  ];
  if (data.source) {
    columns.push({ name: "share", title: "of the way", descends: true, key: cell => numbers.share(state.metric, cell), text: cell => words.percent(numbers.share(state.metric, cell)) });
  }
  if (numbers.hasCosts) {
    columns.push({ name: "cost", title: "recomputed", hint: "nodes that are recomputed when this site is patched", key: cell => numbers.cost(cell).evaluations, text: cell => numbers.cost(cell).evaluations.toLocaleString("en") });
  }
  const kinds = [...new Set(data.parts.flatMap(part => part.kinds || [part.kind]))].sort();

  // -- which rows, in which order ------------------------------------------------------------------
  function reorder() {
    const column = columns.find(one => one.name === sort.column);
    if (column.name === "rank" && !sort.descending) {
      order = numbers.ranked(state.metric);
    } else {
      const keys = new Float64Array(data.count);
      for (let cell = 0; cell < data.count; cell++) keys[cell] = column.key(cell);
      order = numbers.sorted(keys, sort.descending);
    }
    refilter();
  }
  function refilter() {
    const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean), of = kind.value;
    rows = !wanted.length && !of ? order : order.filter(cell => {
      if (of && names.kindOf(cell) !== of) return false;
      if (!wanted.length) return true;
      const name = names.nameOf(cell).toLowerCase();
      return wanted.every(word => name.includes(word));
    });
    page = 0;
    draw();
  }

  // -- drawing -------------------------------------------------------------------------------------
  function draw() {
    const pages = Math.max(1, Math.ceil(rows.length / ROWS));
    page = Math.max(0, Math.min(page, pages - 1));
    const largest = Math.abs(numbers.effect(state.metric, numbers.ranked(state.metric)[0])) || 1;
    body.replaceChildren(...Array.from(rows.subarray(page * ROWS, (page + 1) * ROWS), cell => row(cell, largest)));
    if (!rows.length) body.append(element("tr", {}, element("td", { colspan: columns.length, class: "empty" }, "No site matches.")));
    document.getElementById("page").textContent =
      `${rows.length.toLocaleString("en")} of ${data.count.toLocaleString("en")} sites · page ${(page + 1).toLocaleString("en")} of ${pages.toLocaleString("en")}`;
    for (const [id, off] of [["first", page === 0], ["previous", page === 0], ["next", page === pages - 1], ["last", page === pages - 1]]) {
      document.getElementById(id).disabled = off;
    }
    for (const th of head.children) {
      const own = th.dataset.column === sort.column;
      th.setAttribute("aria-sort", own ? (sort.descending ? "descending" : "ascending") : "none");
    }
  }
  function row(cell, largest) {
    const line = element("tr", { "data-cell": cell, "aria-selected": String(cell === state.site) });
    for (const column of columns) {
      if (column.name === "site") {
        line.append(element("td", { class: "site" }, element("button", { type: "button" }, names.nameOf(cell))));
        continue;
      }
      const td = element("td", { class: column.name }, column.text(cell));
      if (column.name === "effect") {
        const size = Math.min(1, Math.abs(numbers.effect(state.metric, cell)) / largest);
        if (size > 0) {
          const bar = element("i", { class: numbers.effect(state.metric, cell) < 0 ? "less" : "more", "aria-hidden": "true" });
          bar.style.width = `${(size * 100).toFixed(1)}%`;
          td.append(bar);
        }
      }
      line.append(td);
    }
    line.addEventListener("click", () => conewise.choose(cell, true));
    return line;
  }
  // Show the page that a cell is on, where it is not filtered away.
  function reveal(cell) {
    const place = rows.indexOf(cell);
    if (place >= 0 && Math.floor(place / ROWS) !== page) page = Math.floor(place / ROWS);
    draw();
  }

  // -- as CSV --------------------------------------------------------------------------------------
  const quoted = text => /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  function written(number) {
    if (number === null) return "";
    return Number.isNaN(number) ? "NaN" : number === Infinity ? "inf" : number === -Infinity ? "-inf" : String(number);
  }
  // The columns of `Result.to_dataframe()`.
  function lines(metric, cells) {
    const found = [], base = written(data.base[metric]), source = data.source ? written(data.source[metric]) : "";
    const name = quoted(data.metrics[metric]);
    for (const cell of cells) {
      const share = data.source ? numbers.share(metric, cell) : null;
      found.push([quoted(names.nameOf(cell)), quoted(names.kindOf(cell)), written(names.at(cell, "layer")), written(names.at(cell, "head")),
        written(names.at(cell, "pos")), name, written(numbers.value(metric, cell)), base, source,
        written(numbers.effect(metric, cell)), written(share)].join(","));
    }
    return found.join("\n") + (found.length ? "\n" : "");
  }
  function download(pieces, name) {
    const url = URL.createObjectURL(new Blob(["site,kind,layer,head,pos,metric,value,base,source,effect,normalised\n", ...pieces], { type: "text/csv" }));
    const link = element("a", { href: url, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  }
  document.getElementById("csv-shown").addEventListener("click", () => download([lines(state.metric, rows)], "sites.csv"));
  document.getElementById("csv-all").addEventListener("click", () => {
    const all = Uint32Array.from({ length: data.count }, (_, cell) => cell);
    download(data.metrics.map((_, metric) => lines(metric, all)), "all-sites.csv");
  });

  // -- keeping true --------------------------------------------------------------------------------
  function later(act, wait) {
    let timer = 0;
    return () => { clearTimeout(timer); timer = setTimeout(act, wait); };
  }
  filter.addEventListener("input", later(refilter, data.count > 20000 ? 250 : 60));
  kind.addEventListener("change", refilter);
  const turn = to => { page = to(page); draw(); };
  document.getElementById("first").addEventListener("click", () => turn(() => 0));
  document.getElementById("previous").addEventListener("click", () => turn(now => now - 1));
  document.getElementById("next").addEventListener("click", () => turn(now => now + 1));
  document.getElementById("last").addEventListener("click", () => turn(() => Infinity));
  conewise.listen(changed => {
    if (changed.includes("metric")) reorder();
    else if (changed.includes("site")) reveal(state.site);
  });
  conewise.table = {
    start() {
      for (const column of columns) {
        const button = element("button", { type: "button", title: column.hint || `sort by ${column.title}` }, column.title);
        button.addEventListener("click", () => {
          sort.descending = sort.column === column.name ? !sort.descending : Boolean(column.descends);
          sort.column = column.name;
          reorder();
        });
        head.append(element("th", { scope: "col", class: column.name, "data-column": column.name, "aria-sort": "none" }, button));
      }
      for (const one of kinds) kind.append(element("option", { value: one }, one));
      kind.parentElement.hidden = kinds.length < 2;
      reorder();
    },
  };
})(window.conewise);
