// The cone of a site on the model's layers, and the wave of a patch step by step. Element names: wave.py.
// Whatever comes from data is text (textContent, setAttribute), never markup.
(function () {
  const conewise = (window.conewise = window.conewise || {});
  if (conewise.waves) return; // both sections bring this script; one copy works for all
  conewise.waves = true;

  const number = value => Math.round(value).toLocaleString("en-US");
  const many = (count, one, more) => `${number(count)} ${count === 1 ? one : more}`;
  const title = text => text.charAt(0).toUpperCase() + text.slice(1);
  const sum = list => list.reduce((total, value) => total + value, 0);
  const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part && part / whole < 0.1 ? 1 : 0)}%` : "–");
  const flops = value => {
    const units = ["", "k", "M", "G", "T", "P"];
    const at = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log10(value || 1) / 3)));
    return `${(value / 1000 ** at).toPrecision(3)} ${units[at]}FLOP`;
  };
  const make = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // The same as `without_part` of drawing/folded.py.
  const withoutPart = name => name.split(" + ").map(place => {
    const at = place.indexOf("[");
    if (at < 0) return place;
    const kept = place.slice(at + 1).replace(/\]$/, "").split(", ").filter(item => /^(layer|stack)=/.test(item));
    return place.slice(0, at) + (kept.length ? `[${kept.join(", ")}]` : "");
  }).join(" + ");

  // -- what is shown ---------------------------------------------------------------------------
  // A show has items (parts or nodes), scenes by number and by name. A scene tells, as [item, count] in the
  // order in which it happened, what was invalidated, planned, recomputed and reused.

  function ofFolded(data) {
    const items = data.parts.map(([row, role, label, meaning, nodes, cost, layer]) => ({
      label: layer === null ? label : `layer ${row}, ${meaning}`, group: layer === null ? row : `layer ${row}`, nodes, cost,
    }));
    const pairs = counts => counts.map((count, item) => [item, count]).filter(([, count]) => count);
    const scene = at => {
      const cone = data.cones[at];
      const done = items.map((item, i) => (i >= cone.from ? item.nodes : 0));
      const costs = items.map((item, i) => (i >= cone.from ? item.cost : 0));
      for (const [item, count, cost] of cone.but) { done[item] = count; costs[item] = cost; }
      const lost = done.slice();
      for (const [item, count] of cone.lost) lost[item] += count;
      return {
        name: cone.names[0], at: cone.at, invalidated: pairs(lost), planned: pairs(done), recomputed: pairs(done),
        reused: cone.reused, cost: sum(costs), after: {}, restored: 0,
      };
    };
    const names = new Map();
    data.cones.forEach((cone, at) => cone.names.forEach(name => names.set(name, at)));
    return {
      items, scene, names, count: data.cones.length, full: data.full_evaluations, fullCost: data.full_flops,
      unit: "layer", what: "nodes", targets: data.demanded.join(", "), sites: data.cones.map(cone => cone.at),
      before: {}, find: name => (names.has(name) ? names.get(name) : names.get(withoutPart(name))),
    };
  }

  function ofGraph(data) {
    const items = data.nodes.map(([label, isSource]) => ({ label, group: label, nodes: isSource ? 0 : 1, cost: 0 }));
    const ones = list => list.map(item => [item, 1]);
    const scene = at => {
      const wave = data.waves[at];
      return {
        name: items[wave.site].label, at: [wave.site], invalidated: ones(wave.invalidated), planned: ones(wave.planned),
        recomputed: ones(wave.recomputed), reused: ones(wave.reused), cost: 0, after: wave.after, restored: wave.restored,
      };
    };
    const names = new Map(data.waves.map((wave, at) => [items[wave.site].label, at]));
    return {
      items, scene, names, count: data.waves.length, full: data.full, fullCost: 0, unit: "node", what: "nodes",
      targets: data.targets.map(at => items[at].label).join(", "), targetItems: data.targets,
      sites: data.waves.map(wave => [wave.site]), before: data.before, find: name => names.get(name),
    };
  }

  // The scene to begin with: the one nearest to half of the graph, which shows best what is kept and what is not.
  function typical(show) {
    let best = 0, least = Infinity;
    for (let at = 0; at < show.count; at += 1) {
      const far = Math.abs(sum(show.scene(at).recomputed.map(pair => pair[1])) - show.full / 2);
      if (far < least) [best, least] = [at, far];
    }
    return best;
  }

  const shows = new Map();
  function showOf(id) {
    if (!shows.has(id)) {
      const data = JSON.parse(document.getElementById(id).textContent);
      shows.set(id, data.kind === "conewise waves" ? ofGraph(data) : ofFolded(data));
    }
    return shows.get(id);
  }

  // -- painting: one state for each item: {site, lost, wanted, done, reused, now, text} -------------

  function painter(root, items) {
    const groups = [...root.querySelectorAll(".cw-item[data-item]")];
    const wires = [...root.querySelectorAll(".cw-wire")];
    const parts = groups.map(group => ({
      group, width: Number(group.dataset.width), lost: group.querySelector(".cw-lost"),
      isSum: group.classList.contains("cw-sum"), done: group.querySelector(".cw-done"), count: group.querySelector(".cw-count"),
    }));
    return states => {
      parts.forEach((part, at) => {
        const state = states[at] || {}, whole = items[at].nodes || 1;
        const done = Math.min(1, (state.done || 0) / whole), lost = Math.min(1, (state.lost || 0) / whole);
        part.done.setAttribute("width", part.width * done);
        part.lost.setAttribute("width", part.width * lost);
        if (!part.isSum) part.count.textContent = state.text || "";
        const flags = {
          "is-site": state.site, "is-lost": lost > 0, "is-wanted": state.wanted, "is-done": done > 0,
          "is-full": done > 0.5, "is-reused": state.reused, "is-now": state.now,
        };
        for (const [name, on] of Object.entries(flags)) part.group.classList.toggle(name, Boolean(on));
      });
      for (const wire of wires) {
        const from = states[wire.dataset.from] || {}, to = states[wire.dataset.to] || {};
        wire.classList.toggle("is-hot", Boolean((from.done || from.site) && to.done));
      }
    };
  }

  // Scroll the stage, and only the stage, so that an item is seen in it.
  function reveal(root, item) {
    const stage = root.querySelector(".cw-stage"), group = root.querySelector(`.cw-item[data-item="${Number(item)}"]`);
    if (!group || !stage.clientHeight) return;
    const seen = stage.getBoundingClientRect(), box = group.getBoundingClientRect();
    if (box.top < seen.top + 30 || box.bottom > seen.bottom - 30) stage.scrollTop += box.top - seen.top - seen.height / 3;
    if (box.left < seen.left + 10 || box.right > seen.right - 10) stage.scrollLeft += box.left - seen.left - seen.width / 3;
  }

  function choices(root, show, pick) {
    const select = root.querySelector("select");
    for (const [name, at] of show.names) {
      const option = make("option", "", name);
      option.value = at;
      select.append(option);
    }
    select.closest(".cw-pick").hidden = show.names.size < 2;
    select.addEventListener("change", () => pick(Number(select.value), select.selectedOptions[0].textContent));
    const at = new Map();
    show.sites.forEach((items, scene) => items.forEach(item => at.set(item, [...(at.get(item) || []), scene])));
    let shown = -1;
    for (const [item, scenes] of at) {
      const group = root.querySelector(`.cw-item[data-item="${item}"]`);
      group.classList.add("can-patch");
      group.setAttribute("tabindex", "0");
      group.setAttribute("role", "button");
      group.setAttribute("aria-label", `patch ${show.items[item].label}`);
      // A part may hold several sites: each click goes on to the next.
      const next = () => pick(scenes[(scenes.indexOf(shown) + 1) % scenes.length]);
      group.addEventListener("click", next);
      group.addEventListener("keydown", event => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); next(); }
      });
    }
    root.querySelector("svg").setAttribute("role", at.size ? "group" : "img");
    return (scene, name) => {
      shown = scene;
      const wanted = [...select.options].find(option => option.textContent === name) || [...select.options].find(option => Number(option.value) === scene);
      if (wanted) wanted.selected = true;
    };
  }

  // -- the cone ----------------------------------------------------------------------------------

  function startCone(root) {
    const show = showOf(root.dataset.source), paint = painter(root, show.items);
    const part = name => root.querySelector(`[data-cone="${name}"]`);
    const pick = (at, name) => {
      const scene = show.scene(at), states = {};
      const state = item => (states[item] = states[item] || {});
      scene.recomputed.forEach(([item, count]) => { state(item).done = count; state(item).text = number(count); });
      scene.reused.forEach(([item]) => { state(item).reused = true; });
      scene.at.forEach(item => { state(item).site = true; });
      paint(states);
      const done = sum(scene.recomputed.map(pair => pair[1])), reused = sum(scene.reused.map(pair => pair[1]));
      part("name").textContent = name || scene.name;
      part("recomputed").textContent = number(done);
      part("share").textContent = ` of ${number(show.full)} nodes, ${share(done, show.full)}`;
      part("kept").textContent = number(show.full - done);
      part("kept-share").textContent = ` ${share(show.full - done, show.full)}`;
      part("reused").textContent = number(reused);
      part("flops").parentNode.hidden = !show.fullCost;
      part("flops").textContent = flops(scene.cost);
      part("flops-share").textContent = ` ${share(scene.cost, show.fullCost)} of a run`;
      const where = scene.at.map(item => show.items[item].label).join(" and ");
      part("words").textContent =
        `${name || scene.name} lies in ${where}. A change there recomputes ${many(done, "node", "nodes")} of ` +
        `${number(show.full)}; the others keep their values, and ${number(reused)} of them ${reused === 1 ? "is read as it is" : "are read as they are"}.`;
      const rows = show.items.map((item, at) => [item, states[at]]).filter(([, state]) => state && (state.done || state.reused || state.site));
      const reusedIn = new Map(scene.reused);
      part("rows").replaceChildren(...rows.map(([item, state]) => {
        const row = make("tr");
        const head = make("th", "", item.label + (state.site ? " (the site)" : ""));
        head.scope = "row";
        row.append(head, make("td", "", `${number(state.done || 0)} of ${number(item.nodes)}`), make("td", "", number(reusedIn.get(show.items.indexOf(item)) || 0)));
        return row;
      }));
      root.querySelector(".cw-details").hidden = false;
      part("none").hidden = true;
      select(at, name);
      reveal(root, scene.at[0]);
    };
    const select = choices(root, show, pick);
    root.conewiseShow = name => {
      const at = show.find(name);
      if (at !== undefined) return pick(at, name);
      paint({});
      root.querySelector(".cw-details").hidden = true;
      part("none").hidden = false;
      part("none").textContent = `The cone of ${name} is not part of this page.`;
    };
    if (show.count) pick(typical(show));
  }

  // -- the wave ----------------------------------------------------------------------------------

  const PHASES = ["Baseline", "Patch", "Invalidate", "Demand", "Recompute", "Read", "Drop"];

  // Runs of one group: a layer's parts are told together, a small graph's nodes one by one.
  function runs(pairs, items) {
    const found = [];
    for (const pair of pairs) {
      const last = found[found.length - 1], group = items[pair[0]].group;
      if (last && last.group === group) last.pairs.push(pair);
      else found.push({ group, pairs: [pair] });
    }
    return found;
  }

  function stepsOf(show, scene, name) {
    const { items } = show, steps = [], states = {}, ledger = { invalidated: 0, recomputed: 0, reused: 0 };
    const state = item => (states[item] = states[item] || {});
    const step = (phase, text, now = []) => steps.push({
      phase, text, now, ledger: { ...ledger },
      states: Object.fromEntries(Object.entries(states).map(([item, one]) => [item, { ...one, now: now.includes(Number(item)) }])),
    });
    const value = item => {
      const before = show.before[item], after = scene.after[item];
      if (before === undefined) return "";
      return after === undefined || after === before ? ` (${before})` : ` (${before} → ${after})`;
    };
    const isNode = show.unit === "node";
    step("Baseline", `Every value of ${show.targets || "the demand"} and of all that it needs has been computed once, and is kept.`);
    scene.at.forEach(item => { state(item).site = true; });
    step("Patch", `${name} gets another value${value(scene.at[0])} in a fork: a world that shares all other values with the baseline. Nothing is computed yet.`, scene.at);
    for (const run of runs(scene.invalidated, items)) {
      run.pairs.forEach(([item, count]) => { state(item).lost = (state(item).lost || 0) + count; ledger.invalidated += count; });
      const count = sum(run.pairs.map(pair => pair[1]));
      step("Invalidate", isNode
        ? `${run.group} depends on the change: its value is valid no longer.`
        : `${title(run.group)}: ${many(count, "value depends", "values depend")} on the change and ${count === 1 ? "is" : "are"} valid no longer.`, run.pairs.map(pair => pair[0]));
    }
    for (const run of runs([...scene.planned].reverse(), items)) {
      run.pairs.forEach(([item]) => { state(item).wanted = true; });
      step("Demand", `The demand walks back from ${show.targets || "what is asked for"} through what is invalid: ${run.group} has to be computed.`, run.pairs.map(pair => pair[0]));
    }
    scene.reused.forEach(([item, count]) => { state(item).reused = true; ledger.reused += count; });
    if (scene.reused.length) step("Demand", `It stops where values are valid: ${many(ledger.reused, "value is", "values are")} read as ${ledger.reused === 1 ? "it is" : "they are"}. All else was not even looked at.`, scene.reused.map(pair => pair[0]));
    for (const run of runs(scene.recomputed, items)) {
      run.pairs.forEach(([item, count]) => {
        const one = state(item);
        one.done = (one.done || 0) + count; one.lost = Math.max(0, (one.lost || 0) - count); one.wanted = false;
        ledger.recomputed += count;
      });
      step("Recompute", isNode
        ? `${run.group}${value(run.pairs[0][0])} is computed: all that it reads is valid by now.`
        : `${title(run.group)}: ${many(sum(run.pairs.map(pair => pair[1])), "node is", "nodes are")} computed, inputs first, each once.`, run.pairs.map(pair => pair[0]));
    }
    const read = (show.targetItems || []).map(item => `${items[item].label}${value(item)}`).join(", ") || show.targets || "the result";
    step("Read", `${read} is read. ${number(ledger.recomputed)} of ${number(show.full)} nodes were computed; a full run computes all of them.`, show.targetItems || []);
    Object.keys(states).forEach(item => delete states[item]);
    step("Drop", `The fork is dropped, and its values with it. The baseline never changed: ${many(scene.restored, "node had", "nodes had")} to be computed to have it back.`);
    return steps;
  }

  function startWave(root) {
    const show = showOf(root.dataset.source), paint = painter(root, show.items);
    const by = name => root.querySelector(`#wave-${name}`);
    const slider = by("slider"), play = by("play"), text = root.querySelector(".wave-step");
    let steps = [], at = 0, timer = null;

    const stop = () => { clearInterval(timer); timer = null; play.textContent = "▶ Play"; play.setAttribute("aria-pressed", "false"); };
    const go = to => {
      at = Math.max(0, Math.min(steps.length - 1, to));
      const step = steps[at], states = {};
      for (const [item, one] of Object.entries(step.states)) {
        states[item] = { ...one, text: one.done ? number(one.done) : one.lost ? number(one.lost) : "" };
        if (show.unit === "node") states[item].text = "";
      }
      paint(states);
      slider.value = at;
      slider.setAttribute("aria-valuetext", `step ${at + 1} of ${steps.length}: ${step.phase}`);
      by("place").textContent = `${at + 1} / ${steps.length}`;
      text.replaceChildren(make("strong", "", step.phase), document.createTextNode(step.text));
      root.dataset.phase = step.phase.toLowerCase();
      for (const kind of ["invalidated", "recomputed", "reused"]) by(kind).textContent = number(step.ledger[kind]);
      by("kept").textContent = number(show.full - step.ledger.recomputed);
      root.querySelectorAll(".cw-phases button").forEach(button => {
        if (button.textContent === step.phase) button.setAttribute("aria-current", "step");
        else button.removeAttribute("aria-current");
      });
      by("first").disabled = by("prev").disabled = at === 0;
      by("next").disabled = by("last").disabled = at === steps.length - 1;
      if (step.now.length) reveal(root, step.now[0]);
      if (at === steps.length - 1) stop();
    };
    const pick = (scene, name) => {
      stop();
      const found = show.scene(scene);
      steps = stepsOf(show, found, name || found.name);
      by("site").textContent = name || found.name;
      slider.max = steps.length - 1;
      root.querySelectorAll(".cw-phases button").forEach(button => { button.disabled = !steps.some(step => step.phase === button.textContent); });
      select(scene, name);
      go(0);
    };
    for (const phase of PHASES) {
      const button = make("button", "", phase);
      button.type = "button";
      button.addEventListener("click", () => { stop(); go(steps.findIndex(step => step.phase === phase)); });
      const line = make("li");
      line.append(button);
      root.querySelector(".cw-phases").append(line);
    }
    const select = choices(root, show, (scene, name) => { pick(scene, name); go(1); });
    const moves = { first: () => 0, prev: () => at - 1, next: () => at + 1, last: () => steps.length - 1 };
    for (const [name, to] of Object.entries(moves)) by(name).addEventListener("click", () => { stop(); go(to()); });
    slider.addEventListener("input", () => { stop(); go(Number(slider.value)); });
    play.addEventListener("click", () => {
      if (timer) return stop();
      if (at === steps.length - 1) go(0);
      play.textContent = "❚❚ Pause";
      play.setAttribute("aria-pressed", "true");
      timer = setInterval(() => go(at + 1), Math.max(120, Math.min(900, 15000 / steps.length)));
    });
    root.addEventListener("keydown", event => {
      const keys = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
      if (!(event.key in keys) || event.target.matches("select, input") || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      stop();
      go(at + keys[event.key]);
    });
    root.conewiseShow = name => { const scene = show.find(name); if (scene !== undefined) pick(scene, name); };
    if (show.count) pick(typical(show));
  }

  conewise.showCone = name => document.querySelectorAll(".cw-cone, .cw-wave").forEach(root => root.conewiseShow && root.conewiseShow(name));
  const start = () => {
    document.querySelectorAll(".cw-cone").forEach(root => root.conewiseShow || startCone(root));
    document.querySelectorAll(".cw-wave").forEach(root => root.conewiseShow || startWave(root));
  };
  start(); // what stands before this script, so that a page's own scripts find it working
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
})();
