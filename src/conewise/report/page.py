"""A sweep as a page: one file that opens from disk and fetches nothing.

The words (what was asked, what it cost, how it was checked, where it comes from) are those of `telling`. The
maps and the table are drawn in the browser, by the scripts, from the numbers that `packing` sends.
"""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from plotly.offline import get_plotlyjs

from conewise.drawing import wave
from conewise.drawing.document import asset, document
from conewise.drawing.wave import cone_section, wave_section
from conewise.errors import SweepError
from conewise.files import write_whole
from conewise.prompts.story import Story
from conewise.report.packing import packed
from conewise.report.telling import accounting, checked, origin, question, speeds
from conewise.sweeps.result import Result

if TYPE_CHECKING:
    from conewise.drawing.folding import Folded

STATES = ("state of the residual stream", "states of the residual stream")
KINDS = {
    "z": ("attention head", "attention heads"),
    "mlp_out": ("MLP", "MLPs"),
    "attn_out": ("attention output", "attention outputs"),
    "resid_pre": STATES,
    "resid_mid": STATES,
    "resid_post": STATES,
    "sites": ("site", "sites"),
}
"""What a part of a sweep is called in a title: one, and many."""

SCRIPTS = ("page_data.js", "page_maps.js", "page_table.js", "page_site.js", "page.js")


NO_GRAPH = '<p class="note">The model of this sweep was not folded, so there is no graph to show.</p>'


def write_page(
    path: str | Path, result: Result, story: Story | None = None, folded: Folded | None = None
) -> Path:
    """Write the page of a sweep to a file, whole or not at all; returns its path."""
    path = Path(path)
    text = sweep_page(result, story, folded)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        raise SweepError(f"the page cannot be written to {path}: {error.strerror or error}.") from None
    return path


def sweep_page(
    result: Result,
    story: Story | None = None,
    folded: Folded | None = None,
    *,
    made_at: datetime | None = None,
) -> str:
    """The page of a sweep as HTML, plotly.js included.

    Without a story the page says what the result itself knows; without a folded graph it has no cones and no
    second view.
    """
    title = heading(result, story)
    styles, scripts = (
        [asset("theme.css"), asset("page.css", __package__)],
        [asset(name, __package__) for name in SCRIPTS],
    )
    data: dict[str, object] = {
        "conewise-data": packed(result, story, folded),
        "conewise-speeds": speeds(result, story),
    }
    cone, waves = "", NO_GRAPH
    if folded is not None:
        cone = cone_section(folded, assets=False)
        waves = wave_section(folded, assets=False)
        styles.append(wave.style())
        scripts.insert(0, wave.script())
        data |= wave.data(folded)
    body = f"""
<a class="skip" href="#maps">Skip to the maps</a>
<header class="top">
<div class="bar"><span class="mark">conewise</span>
<nav role="tablist" aria-label="Views">
<button role="tab" id="tab-results" aria-controls="view-results" aria-selected="true">Sites</button>
<button role="tab" id="tab-graph" aria-controls="view-graph" aria-selected="false" tabindex="-1">Graph
</button>
</nav>
<button id="theme" type="button" title="Light, dark, or as the system has it">Theme:
<span>auto</span></button>
</div>
<h1>{escape(title)}</h1>
{_summary(result, story)}
</header>
<main id="view-results" role="tabpanel" aria-labelledby="tab-results">
{question(result, story)}
<div class="columns">
<div class="wide">
{_maps(result)}
{_table()}
</div>
{_selected(result, cone)}
</div>
{accounting(result, story)}
{checked(result)}
{origin(result, story, made_at or datetime.now(UTC))}
</main>
<main id="view-graph" role="tabpanel" aria-labelledby="tab-graph" hidden>
<section aria-labelledby="graph-title"><h2 id="graph-title">The wave of a patch</h2>
<p class="lead">A patch makes its cone invalid; a demand recomputes what it needs of that, once, and reads the
rest as it was.</p>
{waves}</section></main>
<div id="tip" role="status" aria-live="polite" hidden></div>
<noscript><p class="noscript">The maps and the table are drawn by this page's own script, and scripts are off.
</p></noscript>"""
    return document(title, body, styles=styles, early=[get_plotlyjs()], scripts=scripts, data=data)


def heading(result: Result, story: Story | None) -> str:
    """The title of a page: the story's own, or what was patched in which model."""
    if story is not None and story.title:
        return story.title
    model = story.model if story is not None else str(result.provenance.get("model", "a model"))
    counted: dict[str, int] = {}
    for part in result.spreads:
        counted[part.name] = counted.get(part.name, 0) + len(part.cells)
    told = [f"{count:,} {KINDS.get(name, (name, name))[count != 1]}" for name, count in counted.items()]
    each = "" if len(result.cells) == 1 else " one at a time"
    return (
        f"{' and '.join(told) if len(told) < 3 else f'{len(result.cells):,} sites'} of {model} patched{each}"
    )


def _summary(result: Result, story: Story | None) -> str:
    count, unit = len(result.cells), "prompt" if story is None else story.unit
    prompts = result.per_prompt.shape[-1]
    facts = [
        (f"{count:,}", "site" if count == 1 else "sites"),
        (f"{prompts:,}", unit if prompts == 1 else f"{unit}s"),
        (f"{result.plan.ratio:.2f}×", "fewer node evaluations than full re-runs"),
        (f"{result.ledger.seconds:.3g} s", "to compute"),
    ]
    shown = "".join(f"<div><dd>{escape(fact)}</dd><dt>{escape(name)}</dt></div>" for fact, name in facts)
    return f'<dl class="facts">{shown}</dl>'


def _maps(result: Result) -> str:
    options = "".join(
        f'<option value="{number}">{escape(name)}</option>' for number, name in enumerate(result.metrics)
    )
    hidden = "" if len(result.metrics) > 1 else " hidden"
    can_normalise = result.source is not None
    share = (
        '<label><input type="radio" name="shown" value="share"><span>Share of the way</span></label>'
        if can_normalise
        else ""
    )
    return f"""
<section id="maps" aria-labelledby="maps-title">
<h2 id="maps-title">What each site does</h2>
<div class="controls">
<label{hidden}>Metric <select id="metric">{options}</select></label>
<fieldset class="segments"><legend>Shown</legend>
<label><input type="radio" name="shown" value="effect" checked><span>Effect</span></label>
{share}
<label><input type="radio" name="shown" value="value"><span>Value</span></label>
</fieldset>
<label>Colours <select id="range"><option value="1">up to the largest</option>
<option value="0.99" selected>up to the 99th percentile</option>
<option value="0.95">up to the 95th percentile</option>
</select></label>
</div>
<p class="hint" id="maps-hint"></p>
<div class="figures" id="figures"></div>
<div class="scale" id="scale"><span id="scale-low"></span><i></i><span id="scale-high"></span></div>
<p class="note" id="maps-note" hidden></p>
</section>"""


def _table() -> str:
    return """
<section id="sites" aria-labelledby="sites-title">
<h2 id="sites-title">Ranked</h2>
<div class="controls">
<label class="grow">Filter
<input id="filter" type="search" placeholder="layer=9 head=" autocomplete="off" spellcheck="false"></label>
<label>Kind <select id="kind"><option value="">all</option></select></label>
<span class="buttons"><button type="button" id="csv-shown">CSV of these</button>
<button type="button" id="csv-all">CSV of all</button></span>
</div>
<div class="table" tabindex="0" role="region" aria-labelledby="sites-title">
<table id="ranked"><thead><tr></tr></thead><tbody></tbody></table></div>
<div class="pager"><button type="button" id="first" aria-label="First page">«</button>
<button type="button" id="previous" aria-label="Previous page">‹</button>
<span id="page" role="status" aria-live="polite"></span>
<button type="button" id="next" aria-label="Next page">›</button>
<button type="button" id="last" aria-label="Last page">»</button></div>
</section>"""


def _selected(result: Result, cone: str) -> str:
    prompts = "" if result.per_prompt.shape[-1] < 2 else '<div id="site-prompts"></div>'
    return f"""
<aside id="site" aria-labelledby="site-title">
<h2 id="site-title">A site</h2>
<p class="hint" id="site-hint">Choose a cell of a map, or a row of the table.</p>
<div id="site-told" hidden>
<h3 id="site-name"></h3>
<dl class="numbers" id="site-numbers"></dl>
{prompts}
{cone}
</div>
</aside>"""
