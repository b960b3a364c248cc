"""First-order effects of patches at sites: attribution patching, and integrated gradients."""

from __future__ import annotations

import torch

from conewise.attributing.differences import CellSums, Differences, PatchedSites, site_of
from conewise.attributing.work import Work
from conewise.errors import GradientError
from conewise.program.tensors import Tensor
from conewise.structure.relevance import Relevance


def atp(work: Work, sites: PatchedSites) -> Tensor:
    """Attribution patching: [metric, cell, prompt], (source − base) · gradient in the base.

    One forward pass over what lies behind the sites, one backward pass for each metric.
    """
    return _one_pass(work, sites, None)


def relp(work: Work, sites: PatchedSites) -> Tensor:
    """Relevance patching (Jafari et al. 2025): as `atp`, with relevance in the place of gradients.

    See `structure.relevance` for the rules. Queries and keys have none: attention's pattern is a constant.
    """
    return _one_pass(work, sites, work.relevance())


def _one_pass(work: Work, sites: PatchedSites, relevance: Relevance | None) -> Tensor:
    differences = Differences(work, sites)
    sums, nodes = CellSums(differences, work.prompts), differences.nodes
    values = work.record(nodes, relevance=relevance)
    rows = []
    for number, metric in enumerate(work.metrics):
        measured = work.measure(metric, values)
        is_last = number == len(work.metrics) - 1
        found = work.gradients(measured, [values[node] for node in nodes], is_last=is_last)
        rows.append(work.by_prompt(measured, sums.effects(dict(zip(nodes, found, strict=True)))))
    return torch.stack(rows)


def integrated(work: Work, sites: PatchedSites, steps: int) -> Tensor:
    """Integrated gradients: [metric, cell, prompt], (source − base) · the mean gradient along a line.

    For each site of a layer, its whole value goes from the base's to the source's, base + k/steps · (source −
    base) for k = 0, ..., steps − 1, while all that does not lie behind it is the base's; the gradient by a
    cell's part is taken there. Parts of one site (the heads of a layer) thus go together, as in the
    literature: for a patch of a part alone that is not the line of its own world. With one step it is `atp`.
    """
    differences = Differences(work, sites)
    for cell in differences.cells:
        if len({site_of(place) for place in cell.places}) > 1:
            raise GradientError(
                f"{cell.name} patches several sites together, and integrated gradients are along the line of "
                "one site's value. Take method='atp', or cells of one site each."
            )
    sums = CellSums(differences, work.prompts)
    effects = torch.zeros(len(work.metrics), len(sites.cells), max(work.prompts, 1), dtype=torch.float64)
    numbers: dict[object, list[int]] = {}
    for number, cell in enumerate(differences.cells):
        numbers.setdefault(site_of(cell.places[0]), []).append(number)
    for site, own in numbers.items():
        node, change = differences.in_node(site)  # type: ignore[arg-type]
        (base,) = work.base.demand([node])
        some = [differences.cells[number] for number in own]
        for step in range(steps):
            values = work.record([node], given={node: base + (step / steps) * change})
            for row, metric in enumerate(work.metrics):
                measured = work.measure(metric, values)
                is_last = row == len(work.metrics) - 1
                (found,) = work.gradients(measured, [values[node]], is_last=is_last)
                part = work.by_prompt(measured, sums.effects({node: found}, some))
                effects[row, own] += part / steps
    return effects
