"""Texts that many worlds write together, against each of them alone by plain hooks and `generate`."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.errors import ArgumentError, BudgetError, InputMismatchError, SweepError
from conewise.generation.result import WrittenTexts
from tests.generation.alone import DEPTH, FAMILIES, HEADS, WIDTH, captured, padded, prompts, written_alone
from tests.program.small_llama import small_llama, small_tokenizer

N, LENGTHS = 9, (5, 7, 5)
SCALES = (-6.0, 2.0, 6.0)


def vector(width: int = WIDTH) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(5))


def tokens_of(texts: WrittenTexts, world: int, prompt: int) -> list[int]:
    return [token for token in texts.ids[world, prompt].tolist() if token >= 0]


def assert_verified(texts: WrittenTexts) -> None:
    assert texts.verification is not None
    assert texts.verification.ok


def hooks_of_cells(name: str) -> list[list[tuple[str, str, Any]]]:
    """The cells of `sweep_of`, as hooks: nothing, the stream by layer and scale, then heads."""
    layers, projection = FAMILIES[name][3:]
    head, size = vector(WIDTH // HEADS), WIDTH // HEADS

    def stream(scale: float) -> Any:
        return lambda value: value + scale * vector()

    def heads(value: Tensor) -> Tensor:
        new = value.clone()
        new[..., size : 2 * size] += 3 * head
        return new

    found = [[(f"{layers}.{layer}", "output", stream(scale))] for layer in range(DEPTH) for scale in SCALES]
    found += [[(f"{layers}.{layer}.{projection}", "input", heads)] for layer in range(DEPTH)]
    return [[], *found]


def sweep_of(name: str, how: Any) -> Any:
    sites = [
        cw.cells(cw.sites("resid_post", layer=":"), sources=cw.add(vector(), scale=list(SCALES))),
        cw.cells(
            cw.sites("z", layer=":", head=1), source_at=lambda _: cw.add(vector(WIDTH // HEADS), scale=3.0)
        ),
    ]
    return captured(name).sweep(sites, base=padded(prompts(LENGTHS)), generate=how)


def assert_as_alone(
    name: str, texts: WrittenTexts, seed: int, options: dict[str, Any], some: int = 9
) -> None:
    """Compare a sample of the texts with plain hooks; the unpatched one is always among them."""
    hooks, rows = hooks_of_cells(name), prompts(LENGTHS)
    generator = torch.Generator().manual_seed(sum(map(ord, f"{name}{options}")))
    picked = torch.randperm(len(hooks) * len(rows), generator=generator)[:some].tolist()
    for world, number in {(0, 0), *(divmod(one, len(rows)) for one in picked)}:
        alone = written_alone(captured(name).module, rows[number], N, hooks[world], seed, **options)
        assert tokens_of(texts, world, number) == alone


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.8, "top_k": 40}])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_world_writes_what_it_writes_alone(name: str, options: dict[str, Any]) -> None:
    texts = sweep_of(name, cw.writing(N, seed=3, **options)).run()
    assert_as_alone(name, texts, 3, options)


class Again:
    """Stands for a recorded step: computes it again, over the same tensors."""

    def __init__(self, action: Any) -> None:
        self.replay = action
        action()


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "top_k": 40}, {"eos_token_id": [40, 41, 42, 43]}]
)
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Qwen 3", "GPT-NeoX", "Mixtral"])
def test_recorded_steps_write_the_same(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conewise.generation.sweep.can_be_recorded", lambda _: True)
    monkeypatch.setattr("conewise.generation.sweep.recorder", lambda _: Again)
    model = cw.capture(captured(name).module, input_ids=torch.tensor([[1, 5, 6, 7], [1, 4, 3, 9]]))
    how: dict[str, Any] = {
        "base": padded(prompts(LENGTHS)),
        "source": cw.add(vector(), scale=list(SCALES)),
        "generate": cw.writing(N, seed=3, **options),
    }
    job = model.sweep(cw.sites("resid_post", layer=":"), **how)
    texts = job.run(verify=6)
    assert_verified(texts)
    rows = job.written(range(len(job.cells))).layer_rows[1:]
    assert len({*rows}) == 1 < len(job.cells) <= rows[0] // DEPTH  # each has its own row: this was recorded
    assert torch.equal(texts.ids, captured(name).sweep(cw.sites("resid_post", layer=":"), **how).run().ids)


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"eos_token_id": [40, 41, 42, 43]}]
)
def test_processors_and_ends_see_each_text_without_its_padding(options: dict[str, Any]) -> None:
    texts = sweep_of("Llama", cw.writing(N, **options)).run()
    assert_as_alone("Llama", texts, 0, options)


@cache
def base() -> Tensor:
    return prompts([6])[0][None]


def test_the_prompts_rows_are_as_planned_and_later_ones_between_the_bounds() -> None:
    job = sweep_of("Llama", N)
    plan, texts = job.plan(), job.run()
    (found,) = [job.written(range(len(job.cells)))]
    # Two rows are computed for one cell in a layer: its own and the unpatched one, which all share.
    width, first = max(LENGTHS), [layer + 1 for layer in range(DEPTH) for _ in SCALES] + [*range(DEPTH)]
    rows = [1 + sum(level >= one for one in first) for level in range(DEPTH)]
    assert plan.prompt_rows == sum(rows) * len(LENGTHS) * width == found.layer_rows[0]
    assert plan.least_rows <= sum(found.layer_rows[1:]) <= plan.most_rows
    assert texts.ledger.node_evaluations == sum(found.layer_rows)
    assert texts.ledger.launches == len(found.layer_rows) <= plan.passes == N


def test_worlds_that_write_the_same_share_every_row() -> None:
    """Patches of nothing: no text differs, so that each pass computes as few rows as there can be."""
    model = captured("Llama")
    job = model.sweep(cw.sites("resid_post", layer=":"), base=base(), source=lambda value: value, generate=N)
    plan, texts = job.plan(), job.run()
    assert texts.ledger.node_evaluations == plan.prompt_rows + plan.least_rows
    assert bool((texts.divergence == -1).all())


def test_what_does_not_fit_is_cut_and_writes_the_same() -> None:
    job = sweep_of("GPT-2", N)
    whole, plan = job.run(), job.plan()
    small = plan.peak_bytes // 3
    assert len(job.plan(max_memory=small).chunks) > 1
    assert job.plan(max_memory=small).peak_bytes <= small
    assert torch.equal(job.run(max_memory=small).ids, whole.ids)
    with pytest.raises(BudgetError, match="two texts"):
        job.plan(max_memory=1000)


def test_a_run_that_was_cut_off_goes_on_and_writes_no_text_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = sweep_of("GPT-2", N)
    memory, whole = job.plan().peak_bytes // 3, job.run()
    written, calls = type(job).written, []

    def stopping(self: Any, cells: Any) -> Any:
        calls.append(tuple(cells))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return written(self, cells)

    monkeypatch.setattr(type(job), "written", stopping)
    with pytest.raises(KeyboardInterrupt):
        job.run(out=tmp_path / "run", max_memory=memory)
    found = job.run(out=tmp_path / "run", max_memory=memory, resume=True)
    assert torch.equal(found.ids, whole.ids)
    assert len({cell for chunk in calls for cell in chunk}) == len(job.cells)
    assert calls.count(calls[0]) == calls.count(calls[1]) == 1
    other = sweep_of("GPT-2", N + 1)
    with pytest.raises(SweepError):
        other.run(out=tmp_path / "run", max_memory=memory, resume=True)


@pytest.mark.parametrize(
    ("how", "patched"),
    [
        (cw.writing(N, pos="new"), range(1, N)),
        (cw.writing(N, when=lambda step: step == 2), [2]),
        (cw.writing(N, when=lambda step: step < 3), range(3)),
    ],
)
def test_steering_acts_in_the_steps_that_are_meant(how: Any, patched: Any) -> None:
    model, seen = captured("Llama"), -1

    def change(value: Tensor) -> Tensor:
        nonlocal seen
        seen += 1
        return value + 6 * vector() if seen in patched else value

    job = model.sweep(
        cw.sites("resid_post", layer=1), base=base(), source=cw.add(vector(), 6.0), generate=how
    )
    texts = job.run(verify=2)
    alone = written_alone(model.module, base()[0], N, [("model.layers.1", "output", change)], 0)
    assert tokens_of(texts, 1, 0) == alone
    assert_verified(texts)


def test_positions_from_the_end_are_those_of_each_prompt() -> None:
    model = captured("Llama")
    rows = prompts(LENGTHS)

    def change(length: int) -> Any:
        def act(value: Tensor) -> Tensor:
            new = value.clone()
            if value.shape[1] == length:
                new[:, -2] = 0
            return new

        return act

    texts = model.sweep(
        cw.sites("resid_post", layer=0, pos=-2), base=padded(rows), source="zero", generate=N
    ).run(verify=4)
    for number, row in enumerate(rows):
        hooks = [("model.layers.0", "output", change(len(row)))]
        assert tokens_of(texts, 1, number) == written_alone(model.module, row, N, hooks, 0)
    assert_verified(texts)


def test_several_patches_in_one_world_and_features_of_a_dictionary() -> None:
    model = captured("Llama")
    together = [["resid_post[layer=0]", "mlp_out[layer=2]"]]
    job = model.sweep(together, base=base(), source=lambda value: value * -3, generate=N)
    assert_verified(job.run(verify=2))
    into = torch.randn(WIDTH, 12, generator=torch.Generator().manual_seed(1))
    made = model.splice(
        ("resid_post", 1), encode=lambda x: torch.relu(x @ into), decode=lambda z: z @ into.T / 12
    )
    job = made.sweep(
        cw.sites("sae.latents", latent=[1, 4, 7]), base=base(), source=lambda value: value + 20, generate=N
    )
    found = job.run(verify=3)
    assert_verified(found)
    assert int((found.divergence >= 0).sum()) > 0


def test_pruned_models_write_as_what_they_were_made_of() -> None:
    operated = cw.Surgery().prune(cw.site("mlp_out", layer=1)).apply(captured("Llama"))
    job = operated.sweep(
        cw.sites("resid_post", layer=":"), base=base(), source=cw.add(vector(), 3.0), generate=N
    )
    texts = job.run(verify=3)
    assert_verified(texts)
    hooks = [("model.layers.1.mlp", "output", torch.zeros_like)]
    assert tokens_of(texts, 0, 0) == written_alone(captured("Llama").module, base()[0], N, hooks, 0)


def test_texts_have_the_sweeps_axes_a_table_and_a_page(tmp_path: Path) -> None:
    model = cw.capture(small_llama(), tokenizer=small_tokenizer())
    width = model.module.config.hidden_size
    job = model.sweep(
        cw.sites("resid_post", layer=":"),
        base=["the cat", "a dog 7"],
        source=cw.add(vector(width), scale=[-9, 9]),
        generate=5,
        metric=[lambda texts: [len(text) for text in texts]],
    )
    texts = job.run()
    depth = model.module.config.num_hidden_layers
    assert texts.axes == ("layer", "scale")
    assert texts.texts.shape == texts.divergence.shape == (depth, 2, 2)
    assert texts.tokens.shape == texts.log_probs.shape == (depth, 2, 2, 5)
    table = texts.to_dataframe()
    assert len(table) == (depth * 2 + 1) * 2
    assert list(table.loc[0:1, "site"]) == ["unpatched", "unpatched"]
    assert set(table["scale"].dropna()) == {"-9", "9"}
    assert "differ from what the unpatched model writes" in texts._repr_html_()
    study = texts.study(lambda found: [len(text) for text in found], most_perplexity=1e9)
    assert study.effect.shape == study.lost.shape == (depth, 2)
    assert study.best == int(study.effect.argmax())
    page = study.report(tmp_path / "study.html").read_text()
    assert texts.cells[study.best] in page.replace("&larr;", "←")
    saved = cw.open(texts.save(tmp_path / "texts"))
    assert isinstance(saved, WrittenTexts)
    assert saved.equals(texts)
    assert torch.equal(saved.divergence, texts.divergence)
    with pytest.raises(SweepError, match="hold no model"):
        saved.perplexity()
    with pytest.raises(SweepError, match="already"):
        texts.save(tmp_path / "texts")


def test_perplexity_is_that_of_the_unpatched_module() -> None:
    texts = sweep_of("GPT-2", N).run()
    found = texts.perplexity().reshape(-1, len(LENGTHS))
    module: Any = captured("GPT-2").module
    for world, number in ((0, 0), (4, 1), (11, 2)):
        row, own = prompts(LENGTHS)[number], tokens_of(texts, world + 1, number)
        with torch.no_grad():
            logits = module(input_ids=torch.cat([row, torch.tensor(own)])[None]).logits[0]
        said = torch.log_softmax(logits[len(row) - 1 : -1], -1)[range(len(own)), own]
        assert float(found[world, number]) == pytest.approx(float(said.mean().neg().exp()), rel=1e-4)


def test_log_probabilities_are_those_of_the_world_that_wrote() -> None:
    texts = sweep_of("Llama", N).run()
    for world in (0, 2, 8):
        own = tokens_of(texts, world, 1)
        row = prompts(LENGTHS)[1]
        ids = torch.cat([row, torch.tensor(own[:-1], dtype=torch.long)])[None]
        with captured("Llama").run(input_ids=ids).fork() as fork:
            if world:
                layer, scale = divmod(world - 1, len(SCALES))
                fork.patch(("resid_post", layer), cw.add(vector(), SCALES[scale]))
            said = torch.log_softmax(fork.outputs.logits[0, len(row) - 1 :], -1)
        expected = said[range(len(own)), own].double()
        assert torch.allclose(texts.said[world, 1, : len(own)], expected, atol=1e-4)


def test_repeated_ngrams_are_counted() -> None:
    texts = sweep_of("Llama", N).run()
    own = tokens_of(texts, 1, 0)
    pairs = list(pairwise(own))
    assert float(texts.repetition(2).reshape(-1, 3)[0, 0]) == pytest.approx(1 - len(set(pairs)) / len(pairs))


def test_messages_become_a_prompt_by_the_chat_template() -> None:
    tokenizer = small_tokenizer()
    model = cw.capture(small_llama(), tokenizer=tokenizer)
    given: dict[str, Any] = {"source": "zero", "generate": 3}
    messages = [{"role": "user", "content": "the cat"}]
    with pytest.raises(InputMismatchError, match="chat template"):
        model.sweep(cw.sites("mlp_out", layer=0), base=messages, **given)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} sat{% endfor %}"
    by_chat = model.sweep(cw.sites("mlp_out", layer=0), base=messages, **given).run()
    by_hand = model.sweep(cw.sites("mlp_out", layer=0), base="the cat sat", **given).run()
    assert torch.equal(by_chat.ids, by_hand.ids)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"generate": 0}, InputMismatchError, "1 or more"),
        ({"generate": 3, "precision": "tf32"}, ArgumentError, "precision"),
        ({"generate": 3, "metric": cw.logit(3)}, InputMismatchError, "function of texts"),
        ({"generate": 3, "base": "the cat"}, InputMismatchError, "tokenizer"),
        ({"generate": 3, "source": None}, SweepError, "no source"),
        ({"metric": None}, SweepError, "generate=20"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], error: type[Exception], said: str) -> None:
    asked = {"base": base(), "source": "zero", **given}
    with pytest.raises(error, match=said):
        captured("Llama").sweep(cw.sites("mlp_out", layer=0), **asked).run()


@pytest.mark.parametrize("option", ["num_beams", "num_return_sequences", "max_new_tokens"])
def test_options_of_several_texts_are_refused(option: str) -> None:
    with pytest.raises(InputMismatchError):
        cw.writing(3, **{option: 2})  # type: ignore[arg-type]


def test_a_patch_of_some_steps_means_the_same_without_a_cache() -> None:
    model = captured("Llama")
    given: dict[str, Any] = {"pos": "all", "when": lambda step: step in (0, 3)}
    patches = [(("resid_post", 1), cw.add(vector(), 6.0))]
    with_cache, without = (
        model.generate(base(), N, patches, use_cache=cache, **given).new for cache in (True, False)
    )
    assert torch.equal(with_cache, without)
    assert not torch.equal(with_cache, model.generate(base(), N, patches).new)
