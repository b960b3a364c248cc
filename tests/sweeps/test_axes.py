"""Selectors along every axis, knock-outs and pairs, each against plain hooks on the module."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.errors import ConewiseError, MissingSiteError, PatchError, SiteError, SweepError
from conewise.sweeps.planning.plan import SweepPlan
from tests.sweeps.captured import inputs, small
from tests.sweeps.tiny import HEADS, LAYERS, LENGTH, logits, prompts, tiny, value

BATCHED = 1e-4
"""How far batched kernels may lie from single ones; the metrics below are of order 1."""
METRIC = cw.logit_diff(answer=5, wrong=9)
BASE, OTHER = prompts(3, seed=2), prompts(3, seed=4)
BLOCKS = {"gpt2": "transformer.h.{}.attn", "llama": "model.layers.{}.self_attn"}


def difference(found: Tensor) -> Tensor:
    return (found[:, -1, 5] - found[:, -1, 9]).double()


def hooked(changes: Any, name: str = "gpt2") -> Tensor:
    return difference(logits(name, BASE, changes))


def swept(sites: Any, source: Any, name: str = "gpt2", **options: Any) -> Any:
    return tiny(name).sweep(sites, base={"input_ids": BASE}, source=source, metric=METRIC).run(**options)


def assert_alike(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=BATCHED)
    assert expected.std() > 0.01, "a sweep in which nothing matters shows nothing"


def knocked_out(name: str, layer: int, head: int | None, query: int, key: int) -> Tensor:
    """The metric where one query does not see one key: a hook on attention changes the mask it is given."""
    module = tiny(name).module

    def hide(_: Any, args: Any, given: dict[str, Any]) -> Any:
        mask = given["attention_mask"].expand(3, HEADS, LENGTH, LENGTH).clone()
        mask[:, slice(None) if head is None else head, query, key] = -torch.inf
        return args, {**given, "attention_mask": mask}

    with ExitStack() as stack, torch.no_grad():
        part = module.get_submodule(BLOCKS[name].format(layer))
        stack.callback(part.register_forward_pre_hook(hide, with_kwargs=True).remove)
        return difference(module(input_ids=BASE, use_cache=False).logits)


@pytest.mark.filterwarnings("ignore::conewise.errors.UnhookedWarning")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("evaluator", ["serial", "wavefront"])
def test_a_grid_of_knock_outs(name: str, evaluator: str) -> None:
    sites = cw.sites("attn_scores", layer=":", query_pos=-1, key_pos=":")
    result = swept(sites, cw.masked(), name, evaluator=evaluator)
    expected = [
        [knocked_out(name, layer, None, -1, key).mean() for key in range(LENGTH)] for layer in range(LAYERS)
    ]
    assert result.axes == ("layer", "key_pos")
    assert_alike(result.values, torch.tensor(expected))
    assert result.verify(n=3).ok


def test_knock_outs_of_single_heads_and_queries() -> None:
    sites = cw.sites("attn_scores", layer=1, head=[0, -1], query_pos=[2, -1], key_pos="0:2")
    result = swept(sites, cw.masked())
    assert result.axes == ("head", "query_pos", "key_pos")
    assert result.coordinates == {"head": [0, 3], "query_pos": [2, 6], "key_pos": [0, 1]}
    expected = [knocked_out("gpt2", 1, *point).mean() for point in itertools.product([0, 3], [2, 6], [0, 1])]
    assert_alike(result.values, torch.stack(expected).reshape(2, 2, 2))
    row = result.to_dataframe().iloc[-1]
    assert (row["head"], row["query_pos"], row["key_pos"]) == (3, 6, 1)


@pytest.mark.parametrize("evaluator", ["serial", "wavefront"])
@pytest.mark.parametrize(
    "sites",
    [
        cw.sites("attn_scores", layer=0, query_pos=":", key_pos=0),
        cw.sites("attn_scores", layer=0, query_pos=[3, 0], key_pos=0),
        [cw.site("attn_scores", layer=1, query_pos=-1)],
        [cw.site("attn_scores", layer=1, query_pos=2, key_pos=[0, 1, 2])],
        [[cw.site("attn_scores", layer=1, query_pos=1, key_pos=key) for key in (0, 1)]],
        [cw.cell(cw.site("attn_scores", layer=1, query_pos=0, key_pos=0), source=cw.masked())],
    ],
)
def test_a_query_has_to_see_some_key(sites: Any, evaluator: str) -> None:
    """Else the softmax would go over the keys that a mask hides, which lie in the future."""
    with pytest.raises(PatchError, match="hides all keys that a query sees"):
        swept(sites, cw.masked(), evaluator=evaluator)


def test_worlds_take_masks() -> None:
    run = tiny("gpt2").run(input_ids=BASE)
    with run.fork() as world:
        world.patch(cw.site("attn_scores", layer=1, query_pos=-1, key_pos=2), cw.masked())
        assert_close = torch.testing.assert_close
        assert_close(difference(world.logits), knocked_out("gpt2", 1, None, -1, 2), rtol=0, atol=1e-6)
        with pytest.raises(PatchError, match="hides all keys"):
            world.patch(cw.site("attn_scores", layer=1, query_pos=0), cw.masked())
        with pytest.raises(PatchError, match="hides scores from the softmax"):
            world.patch(("pattern", 1), cw.masked())


def test_fused_attention_says_how_to_load_the_model() -> None:
    model = small("gpt2", "sdpa")
    with pytest.raises(MissingSiteError, match="attn_implementation='eager'"):
        model.sweep(
            cw.sites("attn_scores", layer=":", query_pos=-1, key_pos=":"),
            base=inputs("gpt2"),
            source=cw.masked(),
            metric=METRIC,
        )


def zeroed(kind: str, layer: int, at: Any) -> Tensor:
    def change(whole: Tensor) -> Tensor:
        whole[at] = 0.0
        return whole

    return hooked({(kind, layer): change}).mean()


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        (":", range(32)), ("2:8", range(2, 8)), ("::9", range(0, 32, 9)), (slice(4, 7), range(4, 7)),
        (range(30, 3, -9), range(30, 3, -9)), ([5, -1], [5, 31]), (torch.tensor([3, 1]), [3, 1]),
        ("-2:", [30, 31]),
    ],
)  # fmt: skip
def test_features_are_selected_as_people_write_them(given: Any, numbers: Any) -> None:
    result = swept(cw.sites("resid_pre", layer=1, d=given), "zero")
    assert result.coordinates == {"d_model": list(numbers)}
    expected = [zeroed("resid_pre", 1, (..., number)) for number in numbers]
    assert_alike(result.values, torch.stack(expected))


def test_features_and_positions_are_a_heatmap() -> None:
    result = swept(cw.sites("resid_pre", layer=0, pos=[1, -1], d_model=[0, 7, 9]), "zero")
    expected = [zeroed("resid_pre", 0, (slice(None), pos, d)) for pos in (1, 6) for d in (0, 7, 9)]
    assert_alike(result.values, torch.stack(expected).reshape(2, 3))
    heat = result.plot().data[0]
    assert (list(heat.x), list(heat.y)) == (["0", "7", "9"], ["1", "6"])
    assert result.verify(n=6).ok


def test_features_of_heads_and_neurons() -> None:
    model = tiny("gpt2")
    result = swept(cw.sites("z", layer=[0, 2], head=1, d="1:4"), "zero")
    assert result.axes == ("layer", "d_head")
    expected = [zeroed("z", layer, (..., 8 + d)) for layer in (0, 2) for d in (1, 2, 3)]
    assert_alike(result.values, torch.stack(expected).reshape(2, 3))
    neurons = swept(cw.sites("post", layer=":", neuron="::20"), "zero")
    assert neurons.axes == ("layer", "neuron")
    assert list(neurons.to_dataframe()["neuron"].unique()) == list(range(0, 128, 20))
    found = torch.zeros(LAYERS, 7, dtype=torch.float64)
    for (row, layer), (column, neuron) in itertools.product(
        enumerate(range(LAYERS)), enumerate(range(0, 128, 20))
    ):
        part = model.module.get_submodule(f"transformer.h.{layer}.mlp.c_proj")

        def without(_: Any, args: Any, neuron: int = neuron) -> Any:
            return (args[0].index_fill(-1, torch.tensor([neuron]), 0.0),)

        handle = part.register_forward_pre_hook(without)
        found[row, column] = difference(logits("gpt2", BASE)).mean()
        handle.remove()
    assert_alike(neurons.values, found)


def test_prompts_are_an_axis_too() -> None:
    result = swept(cw.sites("mlp_out", layer=1, batch=":"), "zero")
    expected = torch.stack([hooked({("mlp_out", 1): _without_row(row)}) for row in range(3)])
    assert_alike(result.per_prompt[0], expected)


def _without_row(row: int) -> Any:
    def change(whole: Tensor) -> Tensor:
        whole[row] = 0.0
        return whole

    return change


# -- pairs ---------------------------------------------------------------------------------------


HEADS_OF_TWO = cw.sites("z", layer=[0, 2], head=":")


def without_heads(*heads: tuple[int, int]) -> Tensor:
    """The metric without heads, by layer and number."""

    def change(layer: int) -> Any:
        def zero(whole: Tensor) -> Tensor:
            shown = whole.view(3, LENGTH, HEADS, -1)
            for of, head in heads:
                if of == layer:
                    shown[:, :, head] = 0.0
            return whole

        return zero

    return hooked({("z", layer): change(layer) for layer in {layer for layer, _ in heads}}).mean()


@pytest.mark.parametrize("evaluator", ["serial", "wavefront"])
def test_every_pair_has_a_world(evaluator: str) -> None:
    result = swept(cw.pairs(HEADS_OF_TWO), "zero", evaluator=evaluator)
    heads = [(layer, head) for layer in (0, 2) for head in range(HEADS)]
    pairs = list(itertools.combinations(heads, 2))
    assert result.values.shape == (len(pairs),) == (28,)
    assert_alike(result.values, torch.stack([without_heads(*pair) for pair in pairs]))
    matrix = result.matrix()
    assert torch.equal(matrix.isnan(), torch.eye(8, dtype=torch.bool))
    assert torch.equal(matrix.nan_to_num(), matrix.T.nan_to_num())
    effect = without_heads(heads[2], heads[7]) - result.base[0]
    torch.testing.assert_close(matrix[7, 2], effect, rtol=0, atol=BATCHED)
    assert result.verify(n=8).ok
    with pytest.raises(SweepError, match="singles=True"):
        result.interactions()


def test_interactions_are_what_pairs_do_beyond_single_cells(tmp_path: Path) -> None:
    result = swept(cw.pairs(HEADS_OF_TWO, singles=True), "zero")
    heads = [(layer, head) for layer in (0, 2) for head in range(HEADS)]
    base = result.base[0]
    single = torch.stack([without_heads(head) - base for head in heads])
    assert_alike(result.matrix().diagonal(), single)
    expected = torch.zeros(8, 8, dtype=torch.float64)
    for one, other in itertools.combinations(range(8), 2):
        both = without_heads(heads[one], heads[other]) - base
        expected[one, other] = expected[other, one] = both - single[one] - single[other]
    assert_alike(result.interactions(), expected)
    result.save(tmp_path / "r")
    loaded: Any = cw.open(tmp_path / "r")
    assert torch.equal(loaded.interactions(), result.interactions())
    heat = result.plot().data[0]
    assert heat.z[3][5] == heat.z[5][3]
    assert list(heat.x) == list(result.spreads[0].ends)
    assert result.report(tmp_path / "page.html").exists()


def test_pairs_of_cells_with_their_own_sources() -> None:
    vector = torch.randn(32, generator=torch.Generator().manual_seed(1))
    cells = [
        cw.cell(("mlp_out", layer), source=source, label=label)
        for layer in (0, 1)
        for label, source in (("zero", "zero"), ("plus", cw.add(vector)))
        if (layer, label) != (1, "zero")
    ]
    with pytest.raises(SiteError, match="patch the same place"):
        swept(cw.pairs(cells), None)
    result = swept(cw.pairs(cells[1:]), None)
    changes = {("mlp_out", 0): lambda o: o + vector, ("mlp_out", 1): lambda o: o + vector}
    torch.testing.assert_close(result.per_prompt[0, 0], hooked(changes), rtol=0, atol=BATCHED)


def test_pairs_stand_beside_other_selectors_and_go_through_json() -> None:
    ids = {"input_ids": BASE}
    sites = cw.sites("mlp_out", layer=":") + cw.pairs(cw.sites("mlp_out", layer=":"))
    sweep = tiny("gpt2").sweep(sites, base=ids, source={"input_ids": OTHER}, metric=METRIC)
    result = sweep.run()
    clean = [value("gpt2", "mlp_out", layer, OTHER) for layer in range(LAYERS)]
    changes = {("mlp_out", layer): (lambda _, layer=layer: clean[layer].clone()) for layer in (0, 2)}
    torch.testing.assert_close(result[1][1], hooked(changes).mean(), rtol=0, atol=BATCHED)
    again = SweepPlan.from_json(sweep.plan().to_json())
    assert tiny("gpt2").planned(again).run().equals(result)
    assert len(result.plot().data) == 2


@pytest.mark.parametrize(
    ("sites", "error", "says"),
    [
        (lambda: cw.sites("attn_scores", layer=":", queries=1), SiteError, "no axis 'queries': a selector"),
        (
            lambda: cw.sites("attn_scores", layer=":", pos=1),
            SiteError,
            "no axis 'pos'; its axes are batch, head, q",
        ),
        (
            lambda: cw.sites("attn_scores", layer=":", key_pos=7),
            SiteError,
            "key_pos 7 is out of range; there are 7",
        ),
        (lambda: cw.sites("attn_scores", layer=":", key_pos=range(0)), SiteError, "chooses nothing"),
        (lambda: cw.sites("attn_scores", layer=":", d=0), SiteError, "no axis 'd'"),
        (lambda: cw.sites("z", layer=":", d=0, d_head=1), SiteError, "name an axis twice"),
        (lambda: cw.sites("mlp_out", layer=":", dim1=0), SiteError, "no axis 'dim1'"),
        (lambda: cw.sites("mlp_out", layer=":", d="1:1"), SiteError, "chooses nothing"),
        (lambda: cw.pairs(cw.sites("z", layer=0, head=1)), SiteError, "a pair has two"),
        (lambda: cw.pairs(cw.pairs(cw.sites("z", layer=0, head=":"))), SiteError, "pairs of pairs"),
        (lambda: cw.pairs(tiny("gpt2").edges()), SiteError, "pairs are of sites"),
        (lambda: cw.pairs([("mlp_out", 0), ("mlp_out", 0)]), SiteError, "patch the same place"),
        (lambda: cw.pairs([("resid_post", 0), ("resid_pre", 1)]), SiteError, "patch the same place"),
        (lambda: cw.pairs([]), SiteError, "no sites"),
        (lambda: [cw.site("z", layer=0, head=4)], ConewiseError, "no head 4"),
        (lambda: [("result", 0)], SweepError, "cannot be swept"),
        (lambda: cw.sites("result", layer=":"), SweepError, "cannot be swept"),
    ],
)
def test_bad_axes_are_refused_where_the_sweep_is_made(sites: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        tiny("gpt2").sweep(sites(), base={"input_ids": BASE}, source="zero", metric=METRIC)


def test_masks_are_for_scores_alone() -> None:
    for sites in (cw.sites("pattern", layer=":"), [cw.cell(("z", 0), source=cw.masked())]):
        with pytest.raises(PatchError, match="hides scores from the softmax"):
            tiny("gpt2").sweep(sites, base={"input_ids": BASE}, source=cw.masked(), metric=METRIC)


def test_masks_have_no_attribution() -> None:
    run = tiny("gpt2").run(input_ids=BASE)
    scores = cw.sites("attn_scores", layer=":", query_pos=-1, key_pos=":")
    with pytest.raises(SweepError, match="no gradient tells"):
        tiny("gpt2").attribute(scores, base=run, source=cw.masked(), metric=METRIC).run()


def test_a_matrix_is_of_pairs() -> None:
    with pytest.raises(SweepError, match="a matrix is of pairs"):
        swept(cw.sites("mlp_out", layer=":"), "zero").matrix()
