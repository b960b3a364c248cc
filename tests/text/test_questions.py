"""Questions on the tiny model: prompts of several lengths, each with answers of its own, as one sweep."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import conewise as cw
from conewise.errors import BudgetError, PromptError, SiteError, SweepError
from conewise.loading import load
from conewise.model import Model
from conewise.models.tiny import PROMPTS
from conewise.sweeps.result import Result
from conewise.text.ask import chosen_edges
from conewise.text.prompts import Pair, TokenizedPrompts, read_pairs, tokenize
from conewise.text.questions import Question, default_direction
from tests.sweeps.test_sweep_memory import allocated

assert_alike = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-4)
"""Equal but for rounding: a batch of prompts is computed by other kernels than one prompt alone."""

SITES = cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":")


def pairs() -> list[Pair]:
    """Five pairs of two lengths, mixed; one has two answers, one has two wrong answers."""
    found = read_pairs(PROMPTS)[:5]
    shorter = [
        Pair(pair.clean.split(", ")[1], pair.corrupted.split(", ")[1], pair.answers, pair.wrong_answers)
        for pair in found
    ]
    mixed = [found[0], shorter[1], found[2], shorter[3], shorter[4]]
    more, less = found[3].answers[0], found[4].wrong_answers[0]
    mixed[1] = Pair(mixed[1].clean, mixed[1].corrupted, (*mixed[1].answers, more), mixed[1].wrong_answers)
    mixed[2] = Pair(mixed[2].clean, mixed[2].corrupted, mixed[2].answers, (*mixed[2].wrong_answers, less))
    return mixed


@cache
def tiny() -> tuple[Model, Any]:
    loaded = load("tiny")
    return cw.capture(loaded.module, input_ids=torch.zeros(2, 9, dtype=torch.long)), loaded.tokenizer


def ask(given: list[Pair], **how: Any) -> TokenizedPrompts:
    return tokenize(given, tiny()[1], **how)


def question(given: list[Pair], **how: Any) -> Question:
    return Question(tiny()[0], ask(given), SITES, **how)


@cache
def whole() -> Result:
    return question(pairs()).run(evaluator="serial")


def rows(result: Result) -> torch.Tensor:
    """The metrics of the base for each prompt."""
    assert result.base_per_prompt is not None
    return result.base_per_prompt


def test_the_fixture_has_two_lengths_that_are_mixed() -> None:
    assert [len(group) for group in ask(pairs()).groups] == [3, 2]
    assert ask(pairs()).groups == ((1, 3, 4), (0, 2))


def test_each_prompt_of_several_lengths_has_the_numbers_that_it_has_alone() -> None:
    """Its own answers are read: any mix-up of rows or of answers shows here."""
    for number, pair in enumerate(pairs()):
        alone = question([pair]).run(evaluator="serial")
        assert_alike(whole().per_prompt[..., number], alone.per_prompt[..., 0])
        assert_alike(rows(whole())[:, number], rows(alone)[:, 0])
    torch.testing.assert_close(whole().table, whole().per_prompt.mean(-1))


def test_every_prompt_weighs_the_same_whatever_its_group() -> None:
    by_group = [
        question([pairs()[n] for n in group]).run(evaluator="serial") for group in ((1, 3, 4), (0, 2))
    ]
    weighed = (3 * by_group[0].table + 2 * by_group[1].table) / 5
    assert_alike(whole().table, weighed)


def test_the_answers_are_read_off_the_module_itself() -> None:
    """Two answers count by their mean, computed here from plain forwards."""
    model, tokenizer = tiny()
    base = []
    for pair in pairs():
        with torch.no_grad():
            logits = model.module(torch.tensor([tokenizer(pair.corrupted)["input_ids"]])).logits[0, -1]
        right, wrong = (
            [tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in texts]
            for texts in (pair.answers, pair.wrong_answers)
        )
        base.append(float(logits[right].mean() - logits[wrong].mean()))
    assert rows(whole())[0].tolist() == pytest.approx(base, rel=1e-4)


def test_the_counts_are_sums_and_are_those_of_the_plan() -> None:
    asking = question(pairs())
    plan = asking.plan()
    parts = [asking.sweep(group).plan() for group in range(2)]
    assert plan.node_evaluations == sum(part.node_evaluations for part in parts)
    assert plan.flops == sum(part.flops for part in parts)
    assert plan.full_flops == sum(part.full_flops for part in parts)
    assert plan.peak_bytes == max(part.peak_bytes for part in parts)
    assert (plan.worlds, plan.batches) == (len(asking.cells), 2)
    result = asking.run()
    assert result.ledger.node_evaluations == plan.node_evaluations
    assert result.ledger.launches == plan.launches


def test_wavefront_and_serial_agree_and_random_cells_stand_up_to_hooks() -> None:
    result = question(pairs()).run(evaluator="wavefront", verify=4)
    torch.testing.assert_close(result.table, whole().table, rtol=1e-4, atol=1e-4)
    assert result.verification is not None
    assert result.verification.ok
    assert result.verification.cells == 4
    serial = question(pairs()).run(evaluator="serial", verify=4)
    assert serial.verification is not None
    assert serial.verification.largest_deviation == 0


@pytest.mark.parametrize(
    ("direction", "base", "source"), [("denoise", "corrupted", "clean"), ("noise", "clean", "corrupted")]
)
def test_a_direction_says_which_run_is_changed(direction: str, base: str, source: str) -> None:
    asking = question(pairs()[:1], direction=direction)
    assert (asking.base, asking.source) == (base, source)
    result = asking.run()
    ends = {name: question(pairs()[:1], direction=name).run().base for name in ("denoise", "noise")}
    assert result.source is not None
    assert torch.equal(result.base, ends[direction])
    assert torch.equal(result.source, ends["noise" if direction == "denoise" else "denoise"])


def test_ablations_change_the_clean_run_unless_it_is_said_otherwise() -> None:
    assert [default_direction(patch) for patch in ("source", "zero", "mean", "noise")] == [
        "denoise",
        "noise",
        "noise",
        "noise",
    ]


def test_the_mean_is_that_of_all_groups() -> None:
    """A mean of each group's own prompts would be another one."""
    model, _ = tiny()
    asking = question(pairs(), direction="noise", patch="mean")
    site, batches = cw.site("mlp_out", layer=1), ask(pairs()).inputs("clean")
    overall = torch.cat([model.run(**batch)[site].flatten(0, 1) for batch in batches]).mean(0)
    for group, batch in enumerate(batches):
        base = model.run(**batch)
        part = asking.sweep(group).batch(0).intervention.part(site, base)
        assert isinstance(part, torch.Tensor)
        torch.testing.assert_close(part, overall.expand_as(part), rtol=1e-4, atol=1e-5)
    assert asking.run().source is None


@pytest.mark.parametrize("patch", ["zero", "noise"])
def test_every_patch_gives_what_a_world_gives(patch: str) -> None:
    asking = question(pairs()[:1], direction="noise", patch=patch, scale=0.5, seed=3)
    result = asking.run(evaluator="serial")
    model, _ = tiny()
    base = model.run(**asking.prompts.inputs_of(0, "clean"))
    put: Any = "zero" if patch == "zero" else cw.noise(0.5, seed=3)
    by_hand = model.sweep(SITES, base=base, source=put, metric=asking.prompts.metric(0)).run(
        evaluator="serial"
    )
    assert torch.equal(result.table, by_hand.table)


def test_kl_is_to_the_clean_run() -> None:
    noised = question(pairs(), metric="kl", direction="noise").run()
    assert noised.base.abs().max() < 1e-6
    denoised = question(pairs(), metric="kl").run()
    assert denoised.source is not None
    assert denoised.source.abs().max() < 1e-6
    assert denoised.base.min() > 0.1


@pytest.mark.parametrize(("method", "steps"), [("atp", None), ("ig", 2), ("relp", None)])
def test_prompts_of_several_lengths_are_attributed_to_as_they_are_alone(
    method: str, steps: int | None, tmp_path: Path
) -> None:
    asked = question(pairs())
    found = asked.attribute(method, steps=steps).run(out=tmp_path / "run")
    for number, pair in enumerate(pairs()):
        alone = question([pair]).attribute(method, steps=steps).run()
        assert_alike(found.per_prompt[..., number : number + 1], alone.per_prompt)
        assert_alike(rows(found)[:, number : number + 1], rows(alone))
    plans = asked.attribute(method, steps=steps).plan()
    assert sum(plan.node_evaluations for plan in plans) == found.plan.node_evaluations
    again = question(pairs()).attribute(method, steps=steps).run(out=tmp_path / "run", resume=True)
    assert again.ledger.resumed == 2 * len(found.cells)
    assert torch.equal(again.per_prompt, found.per_prompt)
    least = 2 * max(plan.peak_bytes for plan in plans) // 3
    apart = question(pairs()).attribute(method, steps=steps).run(max_memory=least)
    assert_alike(apart.per_prompt, found.per_prompt)


def test_positions_of_prompts_of_several_lengths_are_refused() -> None:
    sites = cw.sites("z", layer=":", pos=":")
    with pytest.raises(PromptError, match=r"the prompts have \d+ and \d+ tokens"):
        Question(tiny()[0], ask(pairs()), sites)
    assert len(Question(tiny()[0], ask(pairs()[:1]), sites).cells) > 4


def test_a_word_that_is_no_direction_or_patch_is_refused() -> None:
    with pytest.raises(SweepError, match="no direction 'sideways'"):
        question(pairs(), direction="sideways")
    with pytest.raises(SweepError, match="no patch 'ones'"):
        question(pairs(), patch="ones")


def test_a_run_that_was_cut_off_in_the_second_group_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    def cut(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    asking = question(pairs())
    with pytest.raises(KeyboardInterrupt):
        asking.run(evaluator="serial", out=tmp_path, progress=cut)
    told: list[tuple[int, int]] = []
    result = asking.run(
        evaluator="serial", out=tmp_path, resume=True, progress=lambda *done: told.append(done)
    )
    assert result.ledger.resumed > len(asking.cells)
    assert result.equals(whole())
    assert result.ledger.node_evaluations == whole().ledger.node_evaluations
    assert told[-1] == (2 * len(asking.cells), 2 * len(asking.cells))


def test_the_story_tells_what_was_asked(tmp_path: Path) -> None:
    asking = question(pairs(), seed=4)
    story = asking.story("tiny", "conewise sweep tiny", forwards=2)
    assert [pair.clean for pair in story.prompts] == [pair.clean for pair in pairs()]
    assert (story.base, story.source, story.patch, story.seed) == ("corrupted", "clean", "source", 4)
    assert (story.forwards_timed, story.command) == (2, "conewise sweep tiny")
    assert story.forward_seconds is not None
    assert story.forward_seconds > 0
    assert asking.folded().node_evaluations * 2 == whole().plan.node_evaluations
    whole().save(tmp_path)
    assert cw.open(tmp_path).equals(whole())


def test_equal_questions_are_described_alike_and_others_are_not() -> None:
    asking = question(pairs()).described()
    assert asking == question(pairs()).described()
    for other in (
        question(pairs()[::-1]),
        question(pairs(), direction="noise"),
        question(pairs(), patch="zero"),
        question(pairs(), metric="prob"),
    ):
        assert other.described() != asking
    assert (
        question(pairs(), patch="noise", scale=1.0).described()
        != question(pairs(), patch="noise", scale=2.0).described()
    )


def test_many_prompts_are_read_and_planned_in_batches_that_are_counted() -> None:
    """A hundred thousand prompts are no one batch, and whoever waits for them sees how far they are."""
    read: list[tuple[int, int]] = []
    planned: list[tuple[int, int]] = []
    many = read_pairs(PROMPTS)[:3] * 200
    found = ask(many, progress=lambda done, total: read.append((done, total)))
    assert [len(group) for group in found.groups] == [256, 256, 88]
    assert read == [(number + 1, 600) for number in range(600)]
    plan = Question(tiny()[0], found, cw.sites("mlp_out", layer=":")).plan(
        progress=lambda done, total: planned.append((done, total))
    )
    assert planned == [(256, 600), (512, 600), (600, 600)]
    assert plan.batches == 3


# -- positions that are counted from the end ---------------------------------------------------------


def patched_logits(pair: Pair, layer: int, pos: int) -> torch.Tensor:
    """The logits at the last position where a layer reads the clean stream at one position, by hooks."""
    model, tokenizer = tiny()
    tokens = [torch.tensor([tokenizer(text)["input_ids"]]) for text in (pair.clean, pair.corrupted)]
    block, seen = model.module.model.layers[layer], []

    def keep(_: Any, given: tuple[torch.Tensor]) -> None:
        seen.append(given[0].clone())

    def put(_: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        changed = given[0].clone()
        changed[:, pos] = seen[0][:, pos]
        return (changed,)

    with torch.no_grad():
        for hook, ids in zip((keep, put), tokens, strict=True):
            handle = block.register_forward_pre_hook(hook)
            logits: torch.Tensor = model.module(ids).logits[0, -1]
            handle.remove()
    return logits


def test_positions_counted_from_the_end_mean_the_same_in_prompts_of_several_lengths() -> None:
    given = pairs()
    asking = Question(tiny()[0], ask(given), cw.sites("resid_pre", layer=":2", pos="-2:"), metric=cw.logit(5))
    result = asking.run(verify=2)
    assert result.coordinates == {"layer": [0, 1], "pos": [-2, -1]}
    assert [cell.name for cell in result.cells][:2] == [
        "resid_pre[layer=0, pos=-2]",
        "resid_pre[layer=0, pos=-1]",
    ]
    assert result.verification is not None
    assert result.verification.ok
    for number, pair in enumerate(given):
        expected = [float(patched_logits(pair, layer, pos)[5]) for layer in (0, 1) for pos in (-2, -1)]
        assert result.per_prompt[0, :, number].tolist() == pytest.approx(expected, abs=1e-4)
    sets = asking.faithfulness(top=1).sets
    assert all(place.part["pos"] in {-2, -1} for places in sets for place in places)


def test_edges_at_positions_counted_from_the_end_are_those_of_each_length() -> None:
    model, given = tiny()[0], pairs()
    edges = chosen_edges("a0.*->m1", "-2:", model, ask(given).lengths)
    assert edges.names[:2] == ("a0.h0->m1@-2", "a0.h0->m1@-1")
    found = Question(model, ask(given), edges).run()
    for number, pair in enumerate(given):
        one = ask([pair])
        at = [one.lengths[0] - 2, one.lengths[0] - 1]
        alone = Question(model, one, model.edges(pos=at).select(writer="a0.*", reader="m1")).run()
        assert_alike(found.per_prompt[..., number], alone.per_prompt[..., 0])
    with pytest.raises(SiteError, match="Count from the end"):
        chosen_edges("a0.*->m1", "3", model, ask(given).lengths)


@pytest.mark.parametrize("pos", [0, ":", "3:", [-1, 2]])
def test_positions_counted_from_the_front_are_refused_in_prompts_of_several_lengths(pos: Any) -> None:
    with pytest.raises(
        PromptError, match=r"have .* tokens, so that a position .* Count positions from the end"
    ):
        Question(tiny()[0], ask(pairs()), cw.sites("resid_pre", layer=":", pos=pos))


# -- memory ------------------------------------------------------------------------------------------


def asked_of(prompts: int, **how: Any) -> Question:
    """A question about so many prompts of one length, eight in a group."""
    given = read_pairs(PROMPTS)[:8] * (prompts // 8)
    return Question(tiny()[0], ask(given, batch_size=8), cw.sites("mlp_out", layer=":"), **how)


@pytest.mark.parametrize(
    ("how", "job"),
    [
        ({}, lambda asking: asking.run(progress=False)),
        ({}, lambda asking: asking.run(evaluator="serial", progress=False)),
        ({"metric": "kl"}, lambda asking: asking.run(verify=1, progress=False)),
        ({"patch": "mean"}, lambda asking: asking.run(progress=False)),
        ({}, lambda asking: asking.attribute("atp").run(progress=False)),
        ({"metric": "kl"}, lambda asking: asking.plan()),
    ],
    ids=["run", "serial", "kl, verified", "mean", "attribution", "plan"],
)
def test_one_group_of_prompts_is_held_at_a_time(how: dict[str, Any], job: Callable[[Question], Any]) -> None:
    """Four times the prompts take no more, but for the numbers of each prompt and its tokens."""
    job(asked_of(16, **how))
    few, many = (allocated(partial(job, asked_of(count, **how))) for count in (16, 64))
    assert many - few < 48 * 1024


@pytest.mark.parametrize("job", ["run", "attribute", "plan"])
def test_a_small_budget_is_refused_with_the_least_that_would_do_for_all_lengths(job: str) -> None:
    jobs: dict[str, Callable[[Question, int], Any]] = {
        "run": lambda asking, budget: asking.run(max_memory=budget),
        "attribute": lambda asking, budget: asking.attribute("atp").run(max_memory=budget),
        "plan": lambda asking, budget: asking.plan(max_memory=budget),
    }
    with pytest.raises(BudgetError) as told:
        jobs[job](question(pairs()), 1000)
    jobs[job](question(pairs()), told.value.least)
    with pytest.raises(BudgetError):
        jobs[job](question(pairs()), told.value.least - 1)


def test_a_plan_of_several_groups_is_not_run_as_the_first_of_them() -> None:
    with pytest.raises(SweepError, match="of several batches together, has no steps"):
        question(pairs()).plan().run()
