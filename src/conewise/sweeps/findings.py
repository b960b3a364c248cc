"""What a result found, how sure that is, and what it cost: sentences for notebooks, pages and terminals."""

from __future__ import annotations

from conewise.anatomy.places import Place, SourcedPlace
from conewise.anatomy.selectors import Cell
from conewise.sweeps.statistics import statistics_of
from conewise.sweeps.storage.result_data import ResultData

TOLD, FEW, ALL = 3, 0.1, 0.95
"""So many sites are told of, which move the metric by this share at least; from which share on it is all."""

SPOKEN = {
    "z": "head",
    "head_out": "head",
    "mlp_out": "MLP",
    "attn_out": "attention",
    "resid_pre": "the residual stream before layer",
    "resid_mid": "the residual stream between attention and MLP of layer",
    "resid_post": "the residual stream after layer",
}


def spoken(cell: Cell) -> str:
    """A cell as people say it: head 23.3, MLP 0, the residual stream after layer 4 at position 9."""
    return " + ".join(_spoken(place) for place in cell.places)


def _spoken(place: Place) -> str:
    part = dict(place.part)
    kind, layer = SPOKEN.get(place.name), place.layer
    if kind is None or layer is None or place.stack:
        return str(place)
    head = part.pop("head", None)
    at = part.pop("pos", None)
    if part or (kind == "head") != isinstance(head, int) or not isinstance(at, int | None):
        return str(place)
    number = f"{layer}.{head}" if head is not None else f"{layer}"
    label = f" ({place.label})" if isinstance(place, SourcedPlace) else ""
    return f"{kind} {number}" + ("" if at is None else f" at position {at}") + label


def strongest(result: ResultData, metric: int, count: int) -> list[tuple[float, Cell]]:
    """The cells with the largest finite effects on a metric, either way, and these effects."""
    effects = result.table[metric] - result.base[metric]
    sizes = effects.abs().where(effects.isfinite(), -1.0)
    order = sizes.topk(min(count, len(sizes))).indices.tolist()
    cells = result.cells
    return [(float(effects[at]), cells[at]) for at in order if sizes[at] >= 0]


def finding(result: ResultData, metric: int = 0) -> str:
    """The finding in a sentence: the sites that move a metric most, and how far each of them does."""
    name, base = result.metrics[metric], float(result.base[metric])
    known = strongest(result, metric, TOLD)
    about = "By estimate, " if result.method else ""
    if not known or known[0][0] == 0:
        what = "no site changes" if known else "nothing is known of"
        return _sentence(f"{about}{what} {name} (base {base:.4g})")
    told, span = _told(result, metric), _span(result, metric)
    if not span:
        moved = [f"{spoken(cell)} by {effect:+.3g}" for effect, cell in told]
        moves = "move" if len(moved) > 1 else "moves"
        return _sentence(f"{about}{_listed(moved)} {moves} {name} most (base {base:.4g})")
    verb = _verb(result)
    ends = f" of the difference in {name} (base {base:.4g}, source {base + span:.4g})"
    moved = [_moved(cell, effect / span, verb, "" if at else ends) for at, (effect, cell) in enumerate(told)]
    return _sentence(about + "; ".join(moved))


def _span(result: ResultData, metric: int) -> float:
    """The distance from the base to the source; 0 where there is no source."""
    return 0.0 if result.source is None else float(result.source[metric] - result.base[metric])


def _told(result: ResultData, metric: int) -> list[tuple[float, Cell]]:
    """The effects that a finding names, the largest first; those of any change of the words come last."""
    known, span = strongest(result, metric, TOLD), _span(result, metric)
    told = [one for one in known if abs(one[0]) >= FEW * abs(known[0][0])]
    return sorted(told, key=lambda one: bool(span) and _is_word_itself(one[1], one[0] / span))


def _verb(result: ResultData) -> str:
    """Clean values restore what the corrupted run lost; corrupted ones remove what the clean run has."""
    story = result.story
    if story is None:
        return "accounts for"
    return "removes" if story.base == "clean" else "restores"


def _moved(cell: Cell, share: float, verb: str, of: str) -> str:
    """Describe how far a site moves the metric; `of` is said of the first one alone."""
    name = spoken(cell)
    alone = " alone" if of and len(cell.places) == 1 else ""
    if share < 0:
        return f"{name} has the opposite effect, {-share:.0%}{of}"
    if not ALL <= share <= 2 - ALL:
        return f"{name}{alone} {verb} {share:.0%}{of}"
    why = ", as any change of the words would" if _is_word_itself(cell, share) else ""
    return f"{name}{alone} {verb} all{of or ' of it'}{why}"


def _is_word_itself(cell: Cell, share: float) -> bool:
    """True where patching a site is much the same as changing the prompt."""
    place = cell.places[0]
    is_early = len(cell.places) == 1 and place.layer == 0 and not place.part and place.name in SPOKEN
    return is_early and share >= ALL


def _sentence(words: str) -> str:
    first = words.split(" ", 1)[0]
    is_word = first.isalpha()  # and no name of a site, which is written as it is
    return f"{words[:1].upper() if is_word else words[:1]}{words[1:]}."


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def certainty(result: ResultData, metric: int = 0) -> str:
    """The certainty of a finding: its number of prompts, its interval, and whether it was verified."""
    prompts = result.per_prompt.shape[-1]
    unit = "prompt" if result.story is None else result.story.unit
    said = [f"{prompts:,} {unit}s" if prompts > 1 else f"one {unit}, so nothing is known about others"]
    if prompts > 1 and result.base_per_prompt is not None:
        for _, cell in _told(result, metric)[:1]:
            at = result.cells.index(cell)
            effects = result.per_prompt[metric, at] - result.base_per_prompt[metric]
            found = statistics_of(effects.double()[None], resamples=1)
            low, high = float(found.low[0]), float(found.high[0])
            said.append(f"{found.level:.0%} interval of {spoken(cell)} {low:+.3g} to {high:+.3g}")
    if result.method:
        said.append(f"approximate ({result.method}), `check()` computes some of them exactly")
    elif result.verification is None:
        said.append("not verified yet, `verify()` runs random sites again with hooks on the module")
    elif result.verification.ok:
        said.append(f"{result.verification.cells:,} random sites were run again, and agree")
    else:
        said.append(f"verification {result.verification}")
    if result.missing:
        said.append(f"{sum(len(one.cells) for one in result.missing):,} sites could not be computed")
    return _sentence("; ".join(said))


def cost(result: ResultData) -> str:
    """The cost of a result, in a sentence."""
    plan, ledger = result.plan, result.ledger
    saved = f", {plan.ratio:.2f} times fewer than full re-runs" if plan.full_evaluations else ""
    return _sentence(
        f"{len(result.cells):,} worlds, {ledger.node_evaluations:,} node evaluations{saved}; "
        f"{ledger.seconds:.3g} s ({plan.evaluator})"
    )
