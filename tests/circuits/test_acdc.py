"""ACDC against the published algorithm, one edge at a time over plain PyTorch; speculative against serial."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import conewise as cw
from conewise.circuits.acdc import Search, _Kept, search_plan
from conewise.circuits.circuit import Circuit
from conewise.circuits.circuit_data import Decision
from conewise.circuits.replaced_parts import edge_facts
from conewise.errors import ArgumentError, CircuitError, MetricError, SweepError
from conewise.jobs.store import FILE, MANIFEST, recorder
from conewise.model import Model
from conewise.paper import theory
from conewise.paper.theory.grafts import GraftAt
from conewise.runs.run import Run
from tests.circuits.removed_oracle import KINDS, published_acdc
from tests.circuits.small_models import Small, small
from tests.jobs.search_cases import Here, stored_decisions

METRIC = cw.logit_diff(answer=3, wrong=5)
AT_LAST = cw.logit_diff(answer=3, wrong=5, pos=-1)
"""The same for models without causal attention, where the position has to be said."""


def logit_diff(logits: torch.Tensor) -> float:
    return float((logits[:, -1, 3] - logits[:, -1, 5]).mean())


def kl_from(given: Small) -> Callable[[torch.Tensor], float]:
    reference = given.plain.forward(given.ids)[0][:, -1].log_softmax(-1)

    def kl(logits: torch.Tensor) -> float:
        ours = logits[:, -1].log_softmax(-1)
        return float((reference.exp() * (reference - ours)).sum(-1).mean())

    return kl


def log_of(circuit: Circuit) -> list[tuple[str, bool]]:
    return [(one.edge, one.kept) for one in circuit.log]


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "logit difference") for name in KINDS), ("gpt2", "kl"), ("llama", "kl")]
)
def test_the_published_algorithm_decides_the_same_in_the_same_order(name: str, kind: str) -> None:
    given = small(name)
    base, source = given.base, given.source
    metric, plain = (cw.kl_to(base), kl_from(given)) if kind == "kl" else (METRIC, logit_diff)
    logits, ablated = given.plain.forward(given.other)
    threshold = 0.02 * abs(plain(logits) - plain(given.plain.forward(given.ids)[0]))
    expected = published_acdc(
        given.plain, given.ids, ablated, plain, threshold, absolute=kind == "logit difference"
    )
    found = given.model.find_circuit(base=base, source=source, metric=metric, threshold=threshold).run()
    assert log_of(found) == [(f"{writer}->{reader}", kept) for writer, reader, kept in expected]
    assert 0 < len(found.edges) < len(expected)
    alone = given.model.find_circuit(
        base=base, source=source, metric=metric, threshold=threshold, speculative=False
    ).run()
    assert log_of(alone) == log_of(found)
    assert alone.edges == found.edges
    changes = [one.change for one in alone.log]
    assert [one.change for one in found.log] == pytest.approx(changes, rel=1e-4, abs=1e-6)


def test_speculative_and_one_at_a_time_are_equal_for_many_thresholds_and_prompts() -> None:
    given = small("gpt2")
    sizes = set()
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        base, source = (
            given.model.run(input_ids=ids) for ids in torch.randint(0, 200, (2, 2, 6), generator=generator)
        )
        for threshold in (1e-6, 0.003, 0.02, 0.1, 0.5, 4.0):
            for carried in (source, "zero") if threshold == 0.02 else (source,):
                asked: dict[str, Any] = {
                    "base": base,
                    "source": carried,
                    "metric": METRIC,
                    "threshold": threshold,
                }
                together, alone = (
                    Search(given.model, **asked),
                    Search(given.model, **asked, speculative=False),
                )
                found = together.run()
                assert log_of(found) == log_of(alone.run())
                assert alone.spent.in_vain == 0
                assert together.spent.stacks <= alone.spent.stacks
                sizes.add(len(found.edges))
    assert len(sizes) > 6


def bert_runs() -> tuple[Model, Run, Run]:
    ids, other = torch.randint(0, 200, (2, 2, 5), generator=torch.Generator().manual_seed(0))
    model = cw.capture(_bert(), input_ids=ids)
    return model, model.run(input_ids=ids), model.run(input_ids=other)


def test_a_model_that_norms_its_sums_is_searched_node_by_node() -> None:
    model, base, source = bert_runs()
    assert not edge_facts(model).parts.is_carried_unchanged
    asked: dict[str, Any] = {"base": base, "source": source, "metric": AT_LAST, "threshold": 0.05}
    found, alone = model.find_circuit(**asked).run(), model.find_circuit(**asked, speculative=False).run()
    assert log_of(found) == log_of(alone)
    assert 0 < len(found.edges) < len(found.log)


class _OfTwo(torch.nn.Module):
    """Takes two prompts and no other number, so its batch is fixed."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input_ids: torch.Tensor) -> Any:
        if input_ids.shape[0] != 2:
            raise ValueError
        return self.module(input_ids, use_cache=False)


def test_a_model_of_a_fixed_batch_is_searched_one_world_at_a_time() -> None:
    given = small("gpt2")
    model = cw.capture(_OfTwo(given.model.module), input_ids=given.ids)
    runs: dict[str, Any] = {
        "base": model.run(input_ids=given.ids),
        "source": model.run(input_ids=given.other),
    }
    search = Search(model, **runs, metric=METRIC, threshold=0.1)
    found = search.run()
    assert search.spent.stacks == search.spent.worlds
    other = given.model.find_circuit(base=given.base, source=given.source, metric=METRIC, threshold=0.1).run()
    assert log_of(found) == log_of(other)
    own = found.evaluate(**runs, metric=METRIC)
    wanted = other.evaluate(base=given.base, source=given.source, metric=METRIC)
    assert own.per_prompt["circuit"] == pytest.approx(wanted.per_prompt["circuit"])
    assert own.minimality == pytest.approx(wanted.minimality)


def _bert() -> torch.nn.Module:
    from transformers import BertConfig, BertForMaskedLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=211
    )
    module: torch.nn.Module = BertForMaskedLM(config).double().eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return module


def test_heads_are_visited_as_published_either_way() -> None:
    given = small("gpt2")
    asked: dict[str, Any] = {"base": given.base, "source": given.source, "metric": METRIC, "threshold": 0.1}
    logits = [one.edge for one in given.model.find_circuit(**asked).run().log][:7]
    assert logits == [f"{w}->logits" for w in ("m1", "a1.h1", "a1.h0", "m0", "a0.h1", "a0.h0", "input")]
    logits = [one.edge for one in given.model.find_circuit(**asked, heads="ascending").run().log][:7]
    assert logits == [f"{w}->logits" for w in ("m1", "a1.h0", "a1.h1", "m0", "a0.h0", "a0.h1", "input")]


def test_edges_into_what_nothing_reads_are_removed_unseen() -> None:
    given = small("gpt2")
    asked: dict[str, Any] = {"base": given.base, "source": given.source, "metric": METRIC, "threshold": 1e9}
    search = Search(given.model, **asked)
    found = search.run()
    assert found.edges == ()
    writers = len(edge_facts(given.model).components.writers)
    # The logits are read; nothing else is, once they lost all.
    assert [one.change for one in found.log[writers:]] == [0.0] * (len(found.log) - writers)
    assert search.spent.worlds < 2 * writers + 2


def test_what_counts_as_harm() -> None:
    given = small("gpt2")
    base, source = given.base, given.source
    asked: dict[str, Any] = {"base": base, "source": source, "threshold": 0.05}
    down = given.model.find_circuit(**asked, metric=METRIC, harm="decrease").run()
    up = given.model.find_circuit(**asked, metric=cw.logit_diff(answer=5, wrong=3), harm="increase").run()
    assert log_of(down) == log_of(up)
    assert log_of(down) != log_of(given.model.find_circuit(**asked, metric=METRIC).run())
    kl = Search(given.model, **asked, metric=cw.kl_to(base))
    assert (kl.harm, Search(given.model, **asked, metric=METRIC).harm) == ("increase", "either")


# -- keeping and going on --------------------------------------------------------------------------


class _StoppedError(Exception):
    pass


@pytest.mark.parametrize("after", [1, 20, 40])
def test_a_search_that_was_cut_off_goes_on_to_the_same_circuit(tmp_path: Path, after: int) -> None:
    given = small("gpt2")
    asked: dict[str, Any] = {"base": given.base, "source": given.source, "metric": METRIC, "threshold": 0.1}
    whole = given.model.find_circuit(**asked).run()
    path = tmp_path / "search"

    def stop(done: int, total: int) -> None:
        assert total == len(whole.log)
        if done >= after:
            raise _StoppedError

    with pytest.raises(_StoppedError) as stopped:
        given.model.find_circuit(**asked).run(out=path, progress=stop)
    assert "resume=True" in str(stopped.value.__notes__)
    kept = stored_decisions(path)
    assert after <= kept < len(whole.log)
    search = Search(given.model, **asked)
    again = search.run(out=path, resume=True)
    assert log_of(again) == log_of(whole)
    assert again.edges == whole.edges
    finished = Search(given.model, **asked)
    assert log_of(finished.run(out=path, resume=True)) == log_of(whole)
    assert finished.spent.worlds == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_search_that_was_cut_off_anywhere_goes_on_to_the_same_scores_bit_for_bit(
    tmp_path: Path, workers: int
) -> None:
    given = small("gpt2")
    asked: dict[str, Any] = {"base": given.base, "source": given.source, "metric": METRIC, "threshold": 0.1}

    def scores(search: Search, **options: Any) -> list[tuple[str, bool, str]]:
        executor = Here(workers) if workers else None
        log = search.run(workers=executor, **options).log
        return [(one.edge, one.kept, one.change.hex()) for one in log]

    whole = scores(Search(given.model, **asked))
    for count in range(0, len(whole), 5):
        search, path = Search(given.model, **asked), tmp_path / str(count)
        decisions = [Decision(edge, kept, float.fromhex(change)) for edge, kept, change in whole[:count]]
        with recorder(search._request(), path, resume=True) as record:
            _Kept(record, search.asked.graph).write(decisions)
        assert scores(search, out=path, resume=True) == whole


def test_a_search_of_other_versions_or_threads_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, path = small("gpt2"), tmp_path / "search"
    asked: dict[str, Any] = {"base": given.base, "source": given.source, "metric": METRIC, "threshold": 0.5}
    given.model.find_circuit(**asked).run(out=path)
    monkeypatch.setattr("conewise.jobs.digests.numerics", lambda _: {"threads": 64})
    monkeypatch.setattr("conewise.circuits.acdc.versions", lambda: {"torch": "9.9"})
    with pytest.raises(CircuitError, match=r"(?s)versions\.torch: .* → 9\.9\n.*machine\.threads: .* → 64\n"):
        given.model.find_circuit(**asked).run(out=path, resume=True)


def test_a_file_of_another_search_is_refused_and_stays(tmp_path: Path) -> None:
    given = small("gpt2")
    asked: dict[str, Any] = {"base": given.base, "source": given.source, "metric": METRIC}
    path = tmp_path / "search"
    given.model.find_circuit(**asked, threshold=0.5).run(out=path)
    before = (path / FILE).read_bytes()
    for options, words in (
        ({"threshold": 0.5}, "resume=True"),
        ({"threshold": 0.4, "resume": True}, r"cannot go on as this search.*\n  threshold: 0\.5 → 0\.4\n"),
        ({"threshold": 0.5, "harm": "increase", "resume": True}, "\n  harm: either → increase\n"),
    ):
        resume = bool(options.pop("resume", False))
        with pytest.raises(CircuitError, match=words):
            given.model.find_circuit(**asked, **options).run(out=path, resume=resume)
    assert (path / FILE).read_bytes() == before
    (path / FILE).write_text("[1]" * 500)
    with pytest.raises(CircuitError, match="is not a search's store, or its first page is damaged"):
        given.model.find_circuit(**asked, threshold=0.5).run(out=path, resume=True)
    with pytest.raises(CircuitError, match="say in which folder"):
        given.model.find_circuit(**asked, threshold=0.5).run(resume=True)


def test_a_second_search_in_a_folder_is_refused_while_the_first_is_under_way(tmp_path: Path) -> None:
    """In this process; that others are refused too is tested with the stores of sweeps."""
    given, path, link = small("gpt2"), tmp_path / "search", tmp_path / "link"
    asked: dict[str, Any] = {"base": given.base, "source": given.source, "metric": METRIC}
    first, second = Search(given.model, **asked, threshold=0.5), Search(given.model, **asked, threshold=0.4)

    def meanwhile(*_: int) -> None:
        if link.is_symlink():
            return
        link.symlink_to(path)
        for out in (path, link):
            with pytest.raises(CircuitError, match=r"another run is using the store in .* another folder"):
                second.run(out=out, resume=True)

    whole = first.run(out=path, progress=meanwhile)
    assert link.is_symlink()
    assert sorted(one.name for one in path.iterdir()) == ["circuit.json", MANIFEST, FILE]
    assert Circuit.load(path / "circuit.json").edges == whole.edges
    assert first.run(out=path, resume=True).log == whole.log
    with pytest.raises(CircuitError, match="cannot go on as this search"):
        second.run(out=path, resume=True)


# -- what is asked for -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threshold": 0.0}, "above 0"),
        ({"threshold": float("nan")}, "`threshold` is float nan; expected a finite number"),
        ({"source": cw.noise(1.0)}, "'mean-template' or"),
        ({"source": None}, "there is no `source`"),
        ({"harm": "worse"}, "'increase', 'decrease', 'either'"),
        ({"heads": "random"}, "'descending', 'ascending'"),
        ({"speculative": "no"}, "`speculative` is str 'no'; expected True or False"),
        ({"metric": [METRIC]}, "one metric"),
        ({"base": 3}, "base.* is a run, or the inputs of one"),
    ],
)
def test_what_cannot_be_searched_says_why(options: dict[str, Any], words: str) -> None:
    given = small("gpt2")
    asked: dict[str, Any] = {"base": given.base, "source": given.source, "metric": METRIC, "threshold": 0.1}
    with pytest.raises((CircuitError, ArgumentError), match=words):
        given.model.find_circuit(**asked | options).run()


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_token_outside_of_the_vocabulary_is_refused(name: str) -> None:
    model, base, _ = bert_runs() if name == "bert" else (small(name).model, small(name).base, None)
    metric = cw.logit(10**6, pos=-1)
    with pytest.raises(MetricError, match=r"token 1000000.* is not in the vocabulary of"):
        model.find_circuit(base=base, source="zero", metric=metric, threshold=0.1).run()


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_budget_that_no_world_fits_into_is_refused_and_says_the_least(name: str) -> None:
    given = small("gpt2")
    model, base, source = bert_runs() if name == "bert" else (given.model, given.base, given.source)
    asked: dict[str, Any] = {"base": base, "source": source, "metric": AT_LAST, "threshold": 0.1}
    with pytest.raises(SweepError, match=r"one world alone takes .* The least that would do is") as refused:
        model.find_circuit(**asked).run(max_memory=10)
    least = int(re.findall(r"max_memory=(\d+)", str(refused.value))[0])
    assert model.find_circuit(**asked).run(max_memory=least).edges == model.find_circuit(**asked).run().edges


def test_runs_of_other_shapes_models_and_with_patches_are_refused() -> None:
    given, other = small("gpt2"), small("llama")
    base, source = given.base, given.source
    asked: dict[str, Any] = {"metric": METRIC, "threshold": 0.1}
    with pytest.raises(CircuitError, match="differ in shape"):
        given.model.find_circuit(base=base, source=given.model.run(input_ids=given.ids[:, :4]), **asked).run()
    with pytest.raises(CircuitError, match="of another model"):
        given.model.find_circuit(base=base, source=other.source, **asked).run()
    with base.fork() as world:
        world.patch(("z", 0), source)
        with pytest.raises(CircuitError, match="something is patched in the base"):
            given.model.find_circuit(base=world, source=source, **asked).run()


def test_base_and_source_may_be_inputs() -> None:
    given = small("gpt2")
    inputs: dict[str, Any] = {"base": {"input_ids": given.ids}, "source": {"input_ids": given.other}}
    runs: dict[str, Any] = {"base": given.base, "source": given.source}
    found = [
        given.model.find_circuit(**one, metric=METRIC, threshold=0.1).run().edges for one in (inputs, runs)
    ]
    assert found[0] == found[1]


# -- what it costs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_the_plan_is_what_the_theory_of_interleaved_grafts_says(name: str) -> None:
    """One correction for each reader that lost edges, grafted behind its node, the last reader first."""
    given = small(name)
    model, readers = given.model, edge_facts(given.model).components.readers
    plan = search_plan(model, METRIC)
    grafts = [GraftAt(one.node, 1) for one in reversed(readers)]
    costs = theory.interleaved_cost(model.graph, grafts, demand=[model.program.outputs[0].name]).costs
    expected = sum(int(cost) * one.writers for cost, one in zip(costs, reversed(readers), strict=True))
    assert plan.node_evaluations == expected
    assert plan.edges == plan.worlds == len(given.plain.edges())
    assert str(plan).startswith(f"ACDC over {plan.edges:,} edges")


def test_a_search_takes_no_more_than_its_plan_but_for_guesses_and_ties() -> None:
    given = small("gpt2")
    asked: dict[str, Any] = {"base": given.base, "source": given.source, "metric": METRIC, "threshold": 0.1}
    search = Search(given.model, **asked, speculative=False)
    search.run()
    plan = search_plan(given.model, METRIC)
    assert search.spent.worlds <= plan.worlds
    assert search.node_evaluations <= plan.node_evaluations
