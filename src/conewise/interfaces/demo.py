"""`make demo`: one wave on a small graph, then a real language model swept, and a page to look at."""

from __future__ import annotations

import time
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape as markup
from rich.table import Table

from conewise.engine.world import World
from conewise.frontends import ops
from conewise.graph.graph import Graph
from conewise.interfaces.drawing import cone_picture

OUT = Path("demo-report")
CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
ANSWER, WRONG = " Mary", " John"


def small_network() -> Graph:
    """Two blocks of a residual network, each with two heads side by side and an MLP."""
    draw = np.random.default_rng(0)

    def matrix() -> np.ndarray:
        return draw.normal(size=(8, 8)) / 3

    graph = Graph()
    stream = graph.source("tokens", draw.normal(size=(5, 8)))
    for block in (0, 1):
        heads = []
        for head in (0, 1):
            graph.source(f"W{block}.{head}", matrix(), param=True)
            heads.append(graph.node(f"head{block}.{head}", ops.matmul, [stream, f"W{block}.{head}"]))
        both = graph.node(f"heads{block}", ops.add, heads)
        middle = graph.node(f"mid{block}", ops.add, [stream, both])
        graph.source(f"M{block}", matrix(), param=True)
        hidden = graph.node(f"mlp{block}", ops.matmul, [middle, f"M{block}"])
        active = graph.node(f"relu{block}", ops.relu, [hidden])
        stream = graph.node(f"out{block}", ops.add, [middle, active])
    graph.node("score", ops.sum, [stream])
    return graph


def wave(console: Console, graph: Graph) -> None:
    """What a patch recomputes, in numbers."""
    base = World(graph)
    score = float(base.demand("score"))
    table = Table(title=f"Patch one site of a small graph, demand the score (baseline {score:.4f})")
    table.add_column("site set to zero")
    for column in ("score", "recomputed", "a full run computes"):
        table.add_column(column, justify="right")
    for site in ("head0.0", "relu0", "head1.1", "relu1"):
        with base.fork() as world:
            world.patch(site, np.zeros_like(base[site]))
            changed = float(world.demand("score"))
            recomputed = len(world.ledger.recomputed)
            table.add_row(site, f"{changed:.4f}", str(recomputed), str(len(graph.computed)))
    console.print(table)


def language_model(console: Console) -> Any:
    """Indirect object identification in SmolLM2: every head and every MLP, one world each."""
    from conewise.frontends.torch.calls import Call
    from conewise.frontends.torch.load import load
    from conewise.frontends.torch.metrics import logit_diff
    from conewise.frontends.torch.sampling import module_leaves
    from conewise.workloads.model import capture
    from conewise.workloads.selectors import sites

    console.print(
        "\nLoading SmolLM2-135M (the first time its weights are converted, about half a minute) ..."
    )
    loaded = load("smollm2-135m", progress=lambda line: console.print(f"  {line}", highlight=False))
    words = loaded.tokenizer
    assert words is not None
    clean, corrupted = (words(text, return_tensors="pt").input_ids for text in (CLEAN, CORRUPTED))
    answer, wrong = (words(name).input_ids[0] for name in (ANSWER, WRONG))
    model = capture(loaded.module, input_ids=clean, logits_to_keep=1)
    base, source = model.run(input_ids=corrupted), model.run(input_ids=clean)
    sweep = model.sweep(
        sites("z", layer=":", head=":") + sites("mlp_out", layer=":"),
        base=base,
        source=source,
        metric=logit_diff(answer, wrong),
    )
    console.print(f"\n[bold]{CORRUPTED} ...[/bold]\nwith the values of John's giving put in, site by site:")
    console.print(str(sweep.plan()), highlight=False)
    result = sweep.run(progress=True)
    call = Call((), {"input_ids": corrupted, "use_cache": False, "logits_to_keep": 1})
    forwards = 12
    start = time.perf_counter()
    for _ in range(forwards):
        module_leaves(loaded.module, call)
    full = (time.perf_counter() - start) / forwards * len(result.cells)
    done = result.ledger.compute_seconds
    console.print(
        f"\n{len(result.cells)} worlds in {done:.1f} s; a full forward for each would take about "
        f"{full:.0f} s ({forwards} were timed): {full / done:.1f}x",
        highlight=False,
    )
    console.print(str(result.verify(n=12)), highlight=False)
    frame = result.to_dataframe()
    strongest = frame.reindex(frame["effect"].abs().sort_values(ascending=False).index).head(12)
    measured = f"logit({ANSWER.strip()}) - logit({WRONG.strip()})"
    table = Table(title=f"Strongest sites: {measured}, base {float(result.base[0]):.2f}")
    table.add_column("site")
    for column in ("value", "effect", "of the way to the source"):
        table.add_column(column, justify="right")
    for row in strongest.itertuples():
        table.add_row(markup(row.site), f"{row.value:.3f}", f"{row.effect:+.3f}", f"{row.normalised:+.1%}")
    console.print(table)
    return result


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Conewise: a language model taken apart</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
        color: light-dark(#1a1a1a, #e8e8e8); background: light-dark(#ffffff, #16181c); }}
figure {{ margin: 1.5rem 0; overflow: auto hidden; background: #ffffff; border-radius: 8px; }}
.cone svg {{ min-width: 50rem; width: 100%; height: auto; }}
pre, code {{ background: light-dark(#f3f3f3, #24272e); border-radius: 6px; }}
pre {{ padding: .8rem; overflow-x: auto; }}
</style></head><body>
<h1>A language model taken apart</h1>
<p>SmolLM2-135M reads <code>{corrupted}</code>. In each of {worlds} worlds one head or one MLP has the value
that it has on <code>{clean}</code>; the colour is how far the logit difference between <code>{answer}</code>
and <code>{wrong}</code> moves (base {base:.2f}, source {source:.2f}).</p>
<figure>{heatmap}</figure>
<h2>What it cost</h2>
<pre>{plan}</pre>
<p>Measured: {evaluations:,} node evaluations, as planned. {check}</p>
<h2>Why it is cheap</h2>
<p>A change recomputes its cone, and nothing else:</p>
<figure class="cone">{cone}</figure>
<p>The paper's figures, predicted, measured and compared: <code>conewise reproduce all --out DIR</code>.</p>
</body></html>
"""


def main() -> None:
    """Show a wave, sweep a language model, write the page."""
    console = Console()
    graph = small_network()
    wave(console, graph)
    result = language_model(console)
    OUT.mkdir(exist_ok=True)
    cone = cone_picture(graph, "head1.1")
    page = PAGE.format(
        clean=escape(CLEAN),
        corrupted=escape(CORRUPTED),
        answer=escape(ANSWER.strip()),
        wrong=escape(WRONG.strip()),
        worlds=len(result.cells),
        base=float(result.base[0]),
        source=float(result.source[0]),
        heatmap=result.plot().to_html(full_html=False, include_plotlyjs=True),
        plan=escape(str(result.plan)),
        evaluations=result.ledger.node_evaluations,
        check=escape(str(result.verify(n=8))),
        cone=cone,
    )
    (OUT / "index.html").write_text(page, encoding="utf-8")
    console.print(f"\nOpen {OUT / 'index.html'}", highlight=False)


if __name__ == "__main__":
    main()
