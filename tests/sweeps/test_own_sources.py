"""Cells with sources of their own, each against plain hooks on the module, one world at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.errors import ArgumentError, ConewiseError, PatchError, SiteError, SweepError
from conewise.report.page import packed
from conewise.sweeps.planning.plan import SweepPlan
from tests.sweeps.tiny import HEADS, LAYERS, LENGTH, logits, prompts, tiny, value

BATCHED = 1e-4
"""How far batched kernels may lie from single ones; the metrics below are of order 1."""
EVALUATORS = pytest.mark.parametrize("evaluator", ["serial", "wavefront"])
METRIC = cw.logit_diff(answer=5, wrong=9)
BASE, OTHER = prompts(3, seed=2), prompts(3, seed=4)
VECTOR = torch.randn(32, generator=torch.Generator().manual_seed(8))
COEFFICIENTS = (-2.0, -1.0, 0.5, 1.0, 4.0)
STEERED = cw.site("resid_post", layer=1)


def difference(found: Tensor) -> Tensor:
    return (found[:, -1, 5] - found[:, -1, 9]).double()


def hooked(changes: Any, name: str = "gpt2", ids: Tensor = BASE) -> Tensor:
    """The metric, prompt by prompt, where hooks change what stands at kinds and layers."""
    return difference(logits(name, ids, changes))


def swept(sites: Any, evaluator: str = "auto", name: str = "gpt2", **options: Any) -> Any:
    model = tiny(name)
    source = options.pop("source", None)
    base = options.pop("base", {"input_ids": BASE})
    return model.sweep(sites, base=base, source=source, metric=METRIC).run(evaluator=evaluator, **options)


def assert_alike(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=BATCHED)
    assert expected.std() > 0.01, "a sweep in which nothing matters shows nothing"


def steered(coefficient: float) -> Any:
    return lambda whole: whole + coefficient * VECTOR


@EVALUATORS
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_coefficients_of_a_vector_are_one_axis(evaluator: str, name: str) -> None:
    sources = {f"{c:g}×": cw.add(VECTOR, c) for c in COEFFICIENTS}
    result = swept(cw.cells(STEERED, sources=sources, axis="coefficient"), evaluator, name)
    expected = [hooked({("resid_post", 1): steered(c)}, name) for c in COEFFICIENTS]
    assert_alike(result.per_prompt[0], torch.stack(expected))
    assert result.axes == ("coefficient",)
    assert result.coordinates == {"coefficient": ["-2×", "-1×", "0.5×", "1×", "4×"]}
    assert result.values.shape == (5,)
    assert len(result.plan.chunks) == (1 if evaluator == "wavefront" else 5)


@EVALUATORS
def test_a_selector_with_sources_has_both_axes(evaluator: str) -> None:
    sources = {"minus": cw.add(VECTOR, -1.0), "plus": cw.add(VECTOR)}
    result = swept(cw.cells(cw.sites("mlp_out", layer=":"), sources=sources), evaluator)
    expected = [
        [hooked({("mlp_out", layer): steered(c)}).mean() for c in (-1.0, 1.0)] for layer in range(LAYERS)
    ]
    assert result.axes == ("layer", "label")
    assert_alike(result.values, torch.tensor(expected))


def listed() -> tuple[list[Any], list[Any]]:
    """Cells with sources of every sort, and what hooks do in each."""
    generator = torch.Generator().manual_seed(3)
    whole, row, other = (torch.randn(s, generator=generator) for s in ((3, LENGTH, 32), (32,), (3, 32)))
    at = torch.randn(2, 32, generator=generator)
    clean = value("gpt2", "z", 2, OTHER)

    def last(old: Tensor) -> Tensor:
        old[:, -1] = other
        return old

    def of_head(head: int, make: Any) -> Any:
        def change(old: Tensor) -> Tensor:
            shown = old.view(3, LENGTH, HEADS, -1)
            shown[:, :, head] = make(shown[:, :, head].clone())
            return old

        return change

    def doubled(part: Tensor) -> Tensor:
        return part * 2

    theirs = clean.view(3, LENGTH, HEADS, -1)
    run = tiny("gpt2").run(input_ids=OTHER)
    cells = [
        (cw.cell(("mlp_out", 0), source=whole), {("mlp_out", 0): lambda _: whole.clone()}),
        (cw.cell(("mlp_out", 0), source=row, label="row"), {("mlp_out", 0): row.expand_as}),
        (cw.cell(cw.site("mlp_out", layer=0, pos=-1), source=other), {("mlp_out", 0): last}),
        (
            cw.cell(cw.site("mlp_out", layer=2, pos=[1, 4]), source=at),
            {("mlp_out", 2): lambda o: o.index_copy(1, torch.tensor([1, 4]), at.expand(3, 2, 32))},
        ),
        (cw.cell(cw.site("z", layer=1, head=2), source=0.0), {("z", 1): of_head(2, torch.zeros_like)}),
        (cw.cell(cw.site("z", layer=1, head=3), source="zero"), {("z", 1): of_head(3, torch.zeros_like)}),
        (cw.cell(cw.site("z", layer=1, head=1), source=doubled), {("z", 1): of_head(1, doubled)}),
        (
            cw.cell(cw.site("z", layer=2, head=1), source=run),
            {("z", 2): of_head(1, lambda _: theirs[:, :, 1])},
        ),
        (cw.cell(STEERED, source=cw.add(row, 3.0)), {("resid_post", 1): lambda o: o + 3.0 * row}),
        (
            [cw.cell(("mlp_out", 0), source=row, label="r"), cw.cell(STEERED, source=cw.add(VECTOR))],
            {("mlp_out", 0): row.expand_as, ("resid_post", 1): steered(1.0)},
        ),
        (
            cw.cell([("mlp_out", 0), ("mlp_out", 1)], source="zero"),
            {("mlp_out", 0): torch.zeros_like, ("mlp_out", 1): torch.zeros_like},
        ),
    ]
    return [one for one, _ in cells], [changes for _, changes in cells]


@EVALUATORS
def test_cells_of_every_sort_are_what_hooks_make_of_them(evaluator: str) -> None:
    cells, changes = listed()
    result = swept(cells, evaluator)
    expected = torch.stack([hooked(one) for one in changes])
    assert_alike(result.per_prompt[0], expected)
    assert result.axes == ("label",)
    assert result.verify(n=len(cells)).ok


@EVALUATORS
def test_single_numbers_of_a_value(evaluator: str) -> None:
    """A part of no axes at all."""
    at = cw.site("mlp_out", layer=0, batch=1, pos=-2, d_model=3)
    cells = cw.cells(at, sources={"one": 1.0, "two": torch.tensor(2.0), "plus": cw.add(torch.tensor(3.0))})

    def changed(number: float, *, is_added: bool = False) -> Any:
        def change(whole: Tensor) -> Tensor:
            whole[1, -2, 3] = number + (whole[1, -2, 3] if is_added else 0.0)
            return whole

        return {("mlp_out", 0): change}

    expected = [hooked(changed(1.0)), hooked(changed(2.0)), hooked(changed(3.0, is_added=True))]
    torch.testing.assert_close(
        swept(cells, evaluator).per_prompt[0], torch.stack(expected), rtol=0, atol=BATCHED
    )


def test_serial_is_the_module_bit_for_bit() -> None:
    cells, changes = listed()
    expected = torch.stack([hooked(one) for one in changes])
    assert torch.equal(swept(cells, "serial").per_prompt[0], expected)


@EVALUATORS
@pytest.mark.parametrize("memory", [None, 64_000])
def test_own_sources_stand_beside_the_sweeps(evaluator: str, memory: int | None) -> None:
    """A place alone has the sweep's source. Positions that runs share need not be those that others share."""
    memory = None if evaluator == "serial" else memory
    ids = BASE.clone()
    ids[:, 4:] = OTHER[:, 4:]
    clean = value("gpt2", "mlp_out", 1, ids)
    cells = [
        ("mlp_out", 1),
        cw.cell(("mlp_out", 1), source=cw.add(VECTOR)),
        cw.cell(("mlp_out", 1), source="zero"),
        [("mlp_out", 1), cw.cell(("mlp_out", 2), source="zero")],
    ]
    result = swept(cells, evaluator, source={"input_ids": ids}, max_memory=memory)
    expected = [
        hooked({("mlp_out", 1): lambda _: clean.clone()}),
        hooked({("mlp_out", 1): steered(1.0)}),
        hooked({("mlp_out", 1): torch.zeros_like}),
        hooked({("mlp_out", 1): lambda _: clean.clone(), ("mlp_out", 2): torch.zeros_like}),
    ]
    assert_alike(result.per_prompt[0], torch.stack(expected))
    if memory is not None:
        assert len(result.plan.chunks) > 1
        assert result.ledger.peak_bytes is None or result.plan.peak_bytes <= memory


def test_another_sweep_of_the_same_plan_has_its_own_values() -> None:
    """Plans and executors are kept by what is asked, without values."""
    for seed in (1, 2):
        vector = torch.randn(32, generator=torch.Generator().manual_seed(seed))
        result = swept(cw.cells(STEERED, sources={"a": cw.add(vector), "b": vector}))
        expected = [
            hooked({("resid_post", 1): lambda o, v=vector: o + v}),
            hooked({("resid_post", 1): lambda o, v=vector: v.expand_as(o)}),
        ]
        assert_alike(result.per_prompt[0], torch.stack(expected))


def test_a_plan_goes_through_json_with_its_values() -> None:
    cells = [one for one in listed()[0] if "doubled" not in repr(one)]
    cells = [c for c in cells if not callable(getattr(c, "source", None))]
    model = tiny("gpt2")
    sweep = model.sweep(cells, base={"input_ids": BASE}, metric=METRIC)
    again = SweepPlan.from_json(sweep.plan().to_json())
    assert model.planned(again).run(plan=again).equals(sweep.run())


def test_a_plan_says_which_source_it_does_not_hold() -> None:
    model = tiny("gpt2")
    cells = [cw.cell(STEERED, source=lambda part: part * 2, label="twice")]
    plan = model.sweep(cells, base={"input_ids": BASE}, metric=METRIC).plan()
    with pytest.raises(SweepError, match="does not hold its cells' own sources"):
        model.planned(SweepPlan.from_json(plan.to_json()))


def test_a_store_of_other_values_is_refused(tmp_path: Path) -> None:
    def sweep(scale: float, vector: Tensor = VECTOR) -> Any:
        cells = cw.cells(STEERED, sources={"a": cw.add(vector, scale), "b": vector * scale})
        return tiny("gpt2").sweep(cells, base={"input_ids": BASE}, metric=METRIC)

    first = sweep(1.0).run(out=tmp_path)
    assert sweep(1.0).run(out=tmp_path, resume=True).ledger.resumed == 2
    assert sweep(1.0).run(out=tmp_path, resume=True).equals(first)
    with pytest.raises(SweepError, match="sources"):
        sweep(2.0).run(out=tmp_path, resume=True)
    with pytest.raises(SweepError, match="sources"):
        sweep(1.0, VECTOR + 1).run(out=tmp_path, resume=True)


def test_what_a_source_was_made_of_may_change_afterwards() -> None:
    vector, put = VECTOR.clone(), VECTOR.clone()
    steering = cw.add(vector, 1.0)
    sweep = tiny("gpt2").sweep(
        cw.cells(STEERED, sources={"a": steering, "b": put}), base={"input_ids": BASE}, metric=METRIC
    )
    first = sweep.run()
    vector.zero_()
    put.zero_()
    assert sweep.run().equals(first)


def test_a_result_is_saved_with_its_labels(tmp_path: Path) -> None:
    sources = {"minus": cw.add(VECTOR, -1.0), "plus": cw.add(VECTOR)}
    result = swept(cw.cells(cw.sites("mlp_out", layer=":"), sources=sources, axis="sign"))
    result.save(tmp_path / "r")
    loaded: Any = cw.open(tmp_path / "r")
    assert loaded.equals(result)
    assert loaded.coordinates == {"layer": [0, 1, 2], "sign": ["minus", "plus"]}
    frame = result.to_dataframe()
    assert list(frame["sign"]) == ["minus", "plus"] * LAYERS
    assert list(frame["layer"]) == [0, 0, 1, 1, 2, 2]
    assert list(result.plot().data[0].x) == ["minus", "plus"]
    assert packed(result, None)["parts"][0]["labels"] == [[], ["minus", "plus"]]
    assert result.report(tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("cells", "error", "says"),
    [
        (
            lambda: cw.cell(STEERED, source=torch.zeros(31)),
            PatchError,
            r"shape \(31,\), and the place has \(3, 7",
        ),
        (
            lambda: cw.cell(STEERED, source=cw.add(torch.zeros(31))),
            PatchError,
            r"vector to add .* shape \(31,\)",
        ),
        (lambda: cw.cell(STEERED, source=torch.zeros(2, 7, 32)), PatchError, r"shape \(2, 7, 32\)"),
        (lambda: cw.cell(STEERED, source=torch.zeros(32).double()), PatchError, "Convert it first"),
        (lambda: cw.cell(STEERED, source=torch.zeros(32, device="meta")), PatchError, "has no numbers"),
        (lambda: cw.cell(STEERED, source=torch.full((32,), torch.nan)), PatchError, "NaN"),
        (lambda: cw.cell(STEERED, source=float("nan")), PatchError, "NaN"),
        (lambda: cw.cell(STEERED, source=None), SweepError, "without a source"),
        (lambda: cw.cell(STEERED, source=object()), PatchError, "give a tensor, a number, a run"),
        (lambda: cw.cell(STEERED, source=[1.0] * 32), PatchError, "cannot have list .*as its source"),
        (lambda: cw.cell(STEERED, source="none"), PatchError, "cannot patch with 'none'"),
        (lambda: cw.cell(("nowhere", 1), source=0.0), ConewiseError, "nowhere"),
        (lambda: cw.cell(cw.site("z", layer=1, head=9), source=0.0), ConewiseError, "no head 9"),
        (lambda: cw.cell([], source=0.0), SiteError, "no places"),
        (
            lambda: cw.cell(cw.sites("z", layer=1), source=0.0),  # type: ignore[arg-type]
            SiteError,
            "Use `cw.cells`",
        ),
        (lambda: cw.cell("a0.h1->m2", source=0.0), SweepError, "is an edge"),
        (lambda: cw.cell(STEERED, source=0.0, label=3), ArgumentError, "`label` is int 3; expected a text"),  # type: ignore[arg-type]
        (lambda: cw.cells(STEERED, sources={}), SweepError, "at least one"),
        (lambda: cw.cells(STEERED, sources=[0.0]), ArgumentError, "`sources` is list .* expected a mapping"),  # type: ignore[arg-type]
        (lambda: cw.cells(STEERED, sources={1: 0.0, "1": 1.0}), SweepError, "2 sources have the label '1'"),
        (lambda: cw.cells(STEERED, sources={"a": None}), SweepError, "None"),
        (lambda: cw.cells(STEERED, sources={"a": 0.0}, axis="layer"), SweepError, "axis='layer'"),
        (lambda: cw.cells(STEERED, sources={"a": 0.0}, axis="source"), SweepError, "axis='source'"),
        (
            lambda: [cw.cell(STEERED, source=0.0), cw.cell(STEERED, source=0.0)],
            SweepError,
            "2 cells are called",
        ),
        (lambda: [cw.cell(STEERED, source=0.0), ("mlp_out", 0)], SweepError, "no source for mlp_out"),
        (
            lambda: cw.cell(STEERED, source=cw.add(VECTOR, torch.inf)),
            ArgumentError,
            "`scale` is float inf; expected a finite number",
        ),
        (
            lambda: cw.cell(STEERED, source=cw.add([1.0])),  # type: ignore[call-overload]
            ArgumentError,
            "`vector` is list .* expected a Tensor",
        ),
        (lambda: cw.cell(STEERED, source=tiny("llama").run(input_ids=BASE)), PatchError, "another model"),
        (
            lambda: cw.cell(STEERED, source=tiny("gpt2").run(input_ids=BASE[:1])),
            SweepError,
            "differ in shape",
        ),
        (lambda: [["a0.h1->m2", cw.cell(STEERED, source=0.0)]], ConewiseError, "with an edge"),
    ],
)
def test_bad_sources_are_refused_before_anything_runs(cells: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        tiny("gpt2").sweep(cells(), base={"input_ids": BASE}, metric=METRIC)


def test_a_value_has_to_fit_every_batch() -> None:
    bases = [{"input_ids": BASE}, {"input_ids": BASE[:2]}]
    fits = cw.cells(STEERED, sources={"row": VECTOR, "all": VECTOR.expand(LENGTH, 32)})
    result = tiny("gpt2").sweep(fits, base=bases, metric=METRIC).run()
    expected = hooked({("resid_post", 1): VECTOR.expand_as}, ids=torch.cat([BASE, BASE[:2]]))
    torch.testing.assert_close(result.per_prompt[0, 0], expected, rtol=0, atol=BATCHED)
    with pytest.raises(PatchError, match=r"batch 1: .* \(3, 7, 32\), and the place has \(2, 7, 32\)"):
        tiny("gpt2").sweep(cw.cell(STEERED, source=torch.zeros(3, LENGTH, 32)), base=bases, metric=METRIC)


def test_interventions_patch_worlds() -> None:
    run = tiny("gpt2").run(input_ids=BASE)
    rolled = run["resid_post", 1].roll(_rolled(run), 0)
    for given, change in (
        (cw.add(VECTOR, 2.0), steered(2.0)),
        (cw.resample(run), lambda _: rolled),
    ):
        with run.fork() as world:
            world.patch(STEERED, given)
            assert torch.equal(difference(world.logits), hooked({("resid_post", 1): change}))


def _rolled(run: Any) -> int:
    """By how many rows `cw.resample` exchanges prompts."""
    put: Any = cw.resample(run).part(STEERED, run)
    first = run["resid_post", 1]
    return next(rows for rows in range(3) if torch.equal(first.roll(rows, 0), put))


def test_gradients_and_attribution_say_that_they_take_no_own_sources() -> None:
    model = tiny("gpt2")
    run = model.run(input_ids=BASE)
    with pytest.raises(SiteError, match="sweeps alone"):
        run.gradients(METRIC, [cw.cell(STEERED, source=0.0)])
    with pytest.raises(SweepError, match="attribution is by one source"):
        model.attribute([cw.cell(STEERED, source=0.0)], base=run, source=run, metric=METRIC).run()


@EVALUATORS
def test_scales_of_a_vector_are_an_axis_of_a_sweep(evaluator: str) -> None:
    scales = [-2, 0.5, 4.0]
    sites = cw.sites("mlp_out", layer=":") + cw.sites("resid_post", layer=1)
    result = swept(sites, evaluator, source=cw.add(VECTOR, scale=scales))
    where = [("mlp_out", layer) for layer in range(LAYERS)] + [("resid_post", 1)]
    expected = [hooked({place: steered(scale)}) for place in where for scale in scales]
    assert_alike(result.per_prompt[0], torch.stack(expected))
    one = swept(cw.sites("mlp_out", layer=":"), evaluator, source=cw.add(VECTOR, scale=scales))
    assert one.axes == ("layer", "scale")
    assert one.coordinates["scale"] == ["-2", "0.5", "4"]
    assert torch.equal(
        one.values,
        swept(
            [("mlp_out", n) for n in range(LAYERS)], evaluator, source=cw.add(VECTOR, scale=scales)
        ).values.view(LAYERS, 3),
    )


def test_scales_are_refused_where_one_source_is_meant() -> None:
    with pytest.raises(PatchError, match="at least one scale, and each once"):
        cw.add(VECTOR, scale=[1.0, 1.0])
    with pytest.raises(PatchError, match="at least one scale"):
        cw.add(VECTOR, scale=[])
    with pytest.raises(SweepError, match="Give the sweep one source"):
        swept([cw.cell(STEERED, source=0.0)], source=cw.add(VECTOR, scale=[1.0, 2.0]))


@EVALUATORS
def test_each_place_of_a_selector_has_the_source_that_a_function_gives(evaluator: str) -> None:
    vectors = torch.randn(LAYERS, HEADS, 32 // HEADS, generator=torch.Generator().manual_seed(5))

    def direction(place: Any) -> Any:
        return cw.add(vectors[place.layer, place.part["head"]], 3.0)

    def hook(layer: int, head: int) -> Any:
        def change(old: Tensor) -> Tensor:
            shown = old.view(*old.shape[:2], HEADS, -1)
            shown[:, :, head] += 3.0 * vectors[layer, head]
            return old

        return change

    sites = cw.cells(cw.sites("z", layer=":", head=":"), source_at=direction)
    result = swept(sites, evaluator)
    assert result.axes == ("layer", "head")
    expected = [hooked({("z", n): hook(n, head)}) for n in range(LAYERS) for head in range(HEADS)]
    assert_alike(result.per_prompt[0], torch.stack(expected))
    again = tiny("gpt2").planned(SweepPlan.from_json(result.plan.to_json())).run(evaluator=evaluator)
    assert torch.equal(again.values, result.values)


def test_a_function_of_a_place_needs_a_selector_and_gives_a_source() -> None:
    with pytest.raises(SweepError, match="for each place of a selector"):
        cw.cells(STEERED, source_at=lambda place: 0.0)
    with pytest.raises(SweepError, match="one"):
        cw.cells(STEERED)
    with pytest.raises(SweepError, match="gave None for"):
        swept(cw.cells(cw.sites("z", layer=":"), source_at=lambda place: None))
