"""Causal tracing against a plain implementation of it with hooks on the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.circuits.tracing import Trace, noisy
from conewise.errors import MissingSiteError, SiteError, SweepError
from conewise.runs.inputs import find_embedding
from tests.sweeps.tiny import LAYERS, LENGTH, Change, logits, prompts, tiny, value

SUBJECT, SAMPLES, ANSWER = (1, 2), 3, 5
BATCHED = 1e-5
"""How far a batched kernel may lie from the same one on a single row, relative to the largest value."""


def plain_trace(name: str, ids: Tensor, kind: str, window: int, noise: float, seed: int = 0) -> Tensor:
    """[sample, layer, pos] of the answer's probability: one full forward for each."""
    clean = {layer: value(name, kind, layer, ids) for layer in range(LAYERS)}
    rows = torch.zeros(SAMPLES, LAYERS, LENGTH, dtype=torch.float64)
    for sample in range(SAMPLES):

        def corrupt(embeddings: Tensor, sample: int = sample) -> Tensor:
            embeddings[:, SUBJECT] = noisy(embeddings[:, SUBJECT], noise, seed, [sample])
            return embeddings

        for layer in range(LAYERS):
            for pos in range(LENGTH):
                near = range(max(0, layer - window // 2), min(LAYERS, layer - (-window // 2)))
                changes: dict[tuple[str, int], Change] = {("embed", 0): corrupt}
                for one in near:

                    def restore(state: Tensor, one: int = one, pos: int = pos) -> Tensor:
                        state[:, pos] = clean[one][:, pos]
                        return state

                    changes[kind, one] = restore
                found = logits(name, ids, changes)[:, -1].softmax(-1)[:, ANSWER]
                rows[sample, layer, pos] = found.double().mean()
    return rows


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(("kind", "window"), [("resid_post", 1), ("mlp_out", 3), ("attn_out", 2)])
def test_a_trace_is_what_hooks_find(name: str, kind: str, window: int) -> None:
    ids = prompts(1)
    job = tiny(name).causal_trace(
        ids, subject=SUBJECT, metric=cw.prob(ANSWER), kind=kind, window=window, noise=0.8, n=SAMPLES
    )
    trace = job.run()
    plain = plain_trace(name, ids, kind, window, 0.8)
    assert trace.values.shape == (LAYERS, LENGTH)
    assert trace.values.std() > 1e-3, "a trace in which nothing matters shows nothing"
    torch.testing.assert_close(trace.per_sample, plain, rtol=0, atol=BATCHED)
    torch.testing.assert_close(trace.values, plain.mean(0), rtol=0, atol=BATCHED)
    assert trace.clean == pytest.approx(float(logits(name, ids)[0, -1].softmax(-1)[ANSWER]), abs=BATCHED)
    assert trace.ledger.node_evaluations == trace.plan.node_evaluations


def traced(**options: Any) -> Trace:
    settings: dict[str, Any] = {"subject": SUBJECT, "metric": cw.prob(ANSWER), "noise": 0.8} | options
    settings.setdefault("n", SAMPLES)
    how = {name: settings.pop(name) for name in ("evaluator", "max_memory") if name in settings}
    return tiny("gpt2").causal_trace(settings.pop("inputs", prompts(1)), **settings).run(**how)


def test_serial_and_wavefront_agree_and_count_alike() -> None:
    serial, wave = traced(window=2, evaluator="serial"), traced(window=2, evaluator="wavefront")
    torch.testing.assert_close(serial.per_sample, wave.per_sample, rtol=0, atol=BATCHED)
    assert serial.ledger.node_evaluations == wave.ledger.node_evaluations == serial.plan.node_evaluations


def test_only_what_lies_below_a_restored_state_is_computed() -> None:
    trace = traced(evaluator="serial", layer=-1, pos=-1)
    (last,) = {cw.site("resid_post", layer=LAYERS - 1)}
    graph = tiny("gpt2").graph
    cone = graph.table.cone([graph.number(tiny("gpt2").locate(last).node)])
    assert trace.values.shape == (1, 1)
    assert trace.ledger.node_evaluations <= len(cone)


@pytest.mark.parametrize("together", [1, 2])
def test_how_many_samples_go_together_changes_nothing(together: int) -> None:
    torch.testing.assert_close(
        traced(together=together).per_sample, traced().per_sample, rtol=0, atol=BATCHED
    )


def test_the_same_seed_gives_the_same_noise_and_more_samples_keep_the_first_ones() -> None:
    assert torch.equal(traced().values, traced().values)
    assert not torch.equal(traced(seed=1).values, traced().values)
    torch.testing.assert_close(traced(n=5).per_sample[:3], traced().per_sample, rtol=0, atol=BATCHED)


def test_several_prompts_are_averaged_and_each_has_its_own_answer() -> None:
    ids = prompts(2)
    both = traced(inputs=ids, metric=cw.prob([4, 9]))
    alone = [plain_trace_of(ids[row : row + 1], token, row) for row, token in enumerate([4, 9])]
    torch.testing.assert_close(both.values, sum(alone) / 2, rtol=0, atol=BATCHED)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("metric", [cw.logit_diff([4, 9], [9, 4]), cw.logit([4, 9])])
def test_metrics_that_read_a_few_tokens_have_an_answer_for_each_prompt_of_each_sample(
    metric: cw.Metric, samples: int
) -> None:
    def whole(outputs: object) -> Tensor:
        last: Tensor = outputs.logits[:, -1]  # type: ignore[attr-defined]
        own = last.gather(1, torch.tensor([[4], [9]]))[:, 0]
        return own if metric.name == "logit" else own - last.gather(1, torch.tensor([[9], [4]]))[:, 0]

    ids = prompts(2)
    few, plain = (traced(inputs=ids, n=samples, metric=one) for one in (metric, whole))
    torch.testing.assert_close(few.per_sample, plain.per_sample, rtol=0, atol=1e-4)


def plain_trace_of(ids: Tensor, token: int, row: int) -> Tensor:
    """[layer, pos] of one prompt of two, with the noise that it gets among them."""
    name = "gpt2"
    total = torch.zeros(LAYERS, LENGTH, dtype=torch.float64)
    for sample in range(SAMPLES):

        def corrupt(embeddings: Tensor, sample: int = sample) -> Tensor:
            pair = embeddings[:, SUBJECT].repeat(2, 1, 1)
            embeddings[:, SUBJECT] = noisy(pair, 0.8, 0, [sample])[row : row + 1]
            return embeddings

        for layer in range(LAYERS):
            clean = value(name, "resid_post", layer, ids)
            for pos in range(LENGTH):

                def restore(state: Tensor, clean: Tensor = clean, pos: int = pos) -> Tensor:
                    state[:, pos] = clean[:, pos]
                    return state

                found = logits(name, ids, {("embed", 0): corrupt, ("resid_post", layer): restore})
                total[layer, pos] += found[0, -1].softmax(-1)[token].double() / SAMPLES
    return total


def test_any_function_of_the_outputs_is_asked_about_each_sample() -> None:
    def answer(outputs: object) -> Tensor:
        found: Tensor = outputs.logits  # type: ignore[attr-defined]
        assert found.shape[0] == 1
        return found[0, -1].softmax(-1)[ANSWER]

    torch.testing.assert_close(traced(metric=answer).per_sample, traced().per_sample, rtol=0, atol=BATCHED)


def test_the_divergence_from_the_clean_run_can_be_traced() -> None:
    clean = tiny("gpt2").run(input_ids=prompts(1))
    trace = traced(inputs=clean, metric=cw.kl_to(clean))
    assert trace.clean == pytest.approx(0, abs=1e-6)
    assert trace.corrupted > 0.01


def test_restoring_the_last_state_at_the_last_position_restores_the_answer() -> None:
    trace = traced()
    assert trace.values[-1, -1].item() == pytest.approx(trace.clean, abs=BATCHED)
    assert trace.values[0, 0].item() == pytest.approx(trace.corrupted, abs=BATCHED)
    assert trace.effect[0, 0].item() == pytest.approx(0, abs=BATCHED)


def test_automatic_noise_is_three_deviations_of_the_embeddings() -> None:
    table = tiny("gpt2").module.transformer.wte.weight
    assert traced(noise="auto").noise == pytest.approx(3 * float(table.detach().std()))


@pytest.mark.parametrize(("name", "node"), [("gpt2", "transformer.wte"), ("llama", "model.embed_tokens")])
def test_the_embedding_is_found_from_the_graph(name: str, node: str) -> None:
    found = find_embedding(tiny(name).program)
    assert found.node == tiny(name).locate(node).node
    assert found.input == "input_ids"


def test_a_trace_has_a_tidy_table() -> None:
    frame = traced(window=3).to_dataframe()
    assert len(frame) == LAYERS * LENGTH
    assert list(frame["layer"][:2]) == [0, 0]
    assert list(frame["pos"][:2]) == [0, 1]
    assert frame["source"].nunique() == frame["base"].nunique() == 1


def test_a_trace_can_be_verified_drawn_and_kept(tmp_path: Path) -> None:
    trace = traced(window=2, together=2)
    check = trace.verify(n=5)
    assert check.ok, check
    assert trace.plot() is not None
    page = trace.report(tmp_path / "trace.html")
    assert "states of the residual stream" in page.read_text(encoding="utf-8")
    trace.result.save(tmp_path / "trace")
    kept: Any = cw.open(tmp_path / "trace")
    assert torch.equal(kept.values, trace.values)
    assert kept.spreads[0].axes == ("layer", "pos")


def test_some_layers_and_positions_can_be_chosen() -> None:
    part, whole = traced(layer=[0, 2], pos="2:5"), traced()
    assert part.layers == (0, 2)
    assert part.positions == (2, 3, 4)
    torch.testing.assert_close(part.values, whole.values[[0, 2], 2:5], rtol=0, atol=BATCHED)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"subject": 40}, SiteError, "the subject: pos 40 is out of range; there are 7"),
        ({"subject": []}, SiteError, "chooses nothing"),
        ({"noise": "much"}, SweepError, "noise is 'much'; it is 'auto' or a standard deviation above 0"),
        ({"noise": -1.0}, SweepError, "above 0"),
        ({"n": 0}, SweepError, "n is 0; it is 1 or more"),
        ({"window": 0}, SweepError, "window is 0"),
        ({"kind": "resid_past"}, MissingSiteError, "Nearest: resid_post"),
        ({"kind": "pattern"}, SweepError, "pattern has no positions to restore"),
    ],
)
def test_what_cannot_be_traced_is_told(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        traced(**options)


def test_a_model_without_tokens_has_no_embedding_to_corrupt() -> None:
    model = cw.capture(torch.nn.Linear(4, 2), torch.randn(3, 4))
    with pytest.raises(MissingSiteError, match="no embedding of tokens in Linear"):
        model.causal_trace(torch.randn(3, 4), subject=0, metric=cw.prob(0)).run()
