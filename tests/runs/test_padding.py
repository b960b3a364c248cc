"""Padded batches: every job gives what each prompt gives alone, by hooks on the module, or says why not."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.errors import CircuitError, EdgeError, InputMismatchError, MetricError, PatchError, SweepError

VOCABULARY = 50
ANSWER, WRONG = 3, 5
PATHS = {
    "llama": "model.layers.{}.mlp",
    "gpt2": "transformer.h.{}.attn.c_proj",
    "bert": "bert.encoder.layer.{}.intermediate.dense",
}


@cache
def module_of(name: str) -> Any:
    import transformers  # noqa: PLC0415

    hf: Any = transformers

    torch.manual_seed(0)
    size: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    size |= {"num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 32}
    module: Any
    if name == "llama":
        module = hf.LlamaForCausalLM(hf.LlamaConfig(**size, num_key_value_heads=2))
    elif name == "bert":
        module = hf.BertForMaskedLM(hf.BertConfig(**size))
    else:
        module = hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32)
        )
    for weight in module.parameters():
        weight.data.mul_(6 if weight.ndim > 1 else 1)
    return module.eval().requires_grad_(False)


@cache
def model_of(name: str) -> cw.Model:
    return cw.capture(module_of(name), **padded([[1, 2, 3, 4, 5], [3, 4]], "right"))


def padded(prompts: list[list[int]], side: str, length: int = 0) -> dict[str, Tensor]:
    """Inputs with a mask, and with positions that count tokens, which GPT-2 and BERT need on the left."""
    length = max(length, *map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), length, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        first = 0 if side == "right" else length - len(prompt)
        ids[row, first : first + len(prompt)] = torch.tensor(prompt)
        mask[row, first : first + len(prompt)] = 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def alone(
    name: str, prompt: list[int], path: str = "", change: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The logits [position, token] of one prompt without padding, with a module's output changed."""
    module = module_of(name)
    handle = None
    if change is not None:
        handle = module.get_submodule(path).register_forward_hook(lambda _, __, out: change(out))
    try:
        logits: Tensor = module(input_ids=torch.tensor([prompt])).logits[0]
        return logits
    finally:
        if handle is not None:
            handle.remove()


def values_of(name: str, prompt: list[int], path: str) -> Tensor:
    seen: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        seen.append(value)
        return value

    alone(name, prompt, path, keep)
    return seen[0][0]


def put_in(value: Tensor, _: Tensor) -> Tensor:
    return value[None]


def difference(logits: Tensor) -> float:
    return float(logits[ANSWER] - logits[WRONG])


def base_of(result: cw.Result, metric: int = 0) -> Tensor:
    """The metric of the base, [prompt]."""
    assert result.base_per_prompt is not None
    return result.base_per_prompt[metric]


def drawn(rng: random.Random, lengths: list[int]) -> list[list[int]]:
    return [[rng.randrange(1, VOCABULARY) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_gives_what_each_prompt_gives_alone(name: str, side: str) -> None:
    rng, model = random.Random(f"{name}{side}"), model_of(name)
    path, lengths = PATHS[name].format(1), [5, 3]
    prompts, others = drawn(rng, lengths), drawn(rng, lengths)
    given, source = padded(prompts, side, 6), padded(others, side, 6)
    own, theirs = ([values_of(name, one, path) for one in rows] for rows in (prompts, others))
    whole = torch.cat(own).mean(0)
    put: dict[str, tuple[Any, list[Tensor]]] = {
        "run": (source, theirs),
        "zero": ("zero", [torch.zeros_like(one) for one in own]),
        "mean": ("mean", [whole.expand_as(one) for one in own]),
        "dataset": (cw.mean(model, [source]), [torch.cat(theirs).mean(0).expand_as(one) for one in own]),
    }
    metric = cw.logit_diff(ANSWER, WRONG, pos=-1 if name == "bert" else None)
    plain = [difference(alone(name, one)[-1]) for one in prompts]
    for kind, (new_source, new) in put.items():
        expected = [
            difference(alone(name, one, path, partial(put_in, value))[-1])
            for one, value in zip(prompts, new, strict=True)
        ]
        for evaluator in ("auto", "serial"):
            sweep = model.sweep([cw.site(path)], base=given, source=new_source, metric=metric)
            result = sweep.run(evaluator=evaluator, verify=1)
            assert base_of(result).tolist() == pytest.approx(plain, abs=1e-3), kind
            assert result.per_prompt[0, 0].tolist() == pytest.approx(expected, abs=1e-3), kind


@pytest.mark.parametrize("side", ["left", "right"])
def test_every_metric_reads_the_position_of_each_prompt(side: str) -> None:
    rng, model, lengths = random.Random(1), model_of("llama"), [5, 2, 3]
    prompts = drawn(rng, lengths)
    run, length = model.run(**padded(prompts, side)), max(lengths)
    first = [0 if side == "right" else length - one for one in lengths]
    logits = [alone("llama", one) for one in prompts]
    reference = model.run(**padded(drawn(rng, lengths), side))
    for pos, at in ((None, [4, 1, 2]), (-2, [3, 0, 1]), ([2 + first[0], first[1], first[2]], [2, 0, 0])):
        rows = torch.stack([own[one] for own, one in zip(logits, at, strict=True)]).double()
        mine = rows.log_softmax(-1)
        wanted = {
            "logit": rows[:, ANSWER],
            "prob": mine.exp()[:, ANSWER],
            "logit_diff": rows[:, ANSWER] - rows[:, WRONG],
        }
        theirs = reference.logits[torch.arange(3), torch.tensor(at) + torch.tensor(first)].double()
        wanted["kl"] = (theirs.softmax(-1) * (theirs.log_softmax(-1) - mine)).sum(-1)
        metrics = [
            cw.logit(ANSWER, pos=pos),
            cw.prob(ANSWER, pos=pos),
            cw.logit_diff(ANSWER, WRONG, pos=pos),
            cw.kl_to(reference, pos=pos),
        ]
        found = model.sweep(cw.sites("mlp_out", layer=":"), base=run, source="zero", metric=metrics).run()
        for number, metric in enumerate(metrics):
            numbers = base_of(found, number)
            torch.testing.assert_close(numbers, wanted[metric.name], atol=1e-4, rtol=1e-4)


def test_a_metric_in_front_of_the_first_change_is_that_of_the_base() -> None:
    """The pass computes the last positions alone, and the metric reads one in front of them."""
    model, prompts = model_of("llama"), drawn(random.Random(2), [6, 6])
    given = padded(prompts, "right")
    metrics = [cw.logit(ANSWER, pos=2, name="early"), cw.logit(ANSWER, name="last")]
    for metric in (metrics, metrics[:1]):
        asked: dict[str, Any] = {"base": given, "source": "zero", "metric": metric}
        for at in (1, 4):
            stacked = model.sweep(cw.sites("mlp_out", layer=":", pos=at), **asked).run()
            serial = model.sweep(cw.sites("mlp_out", layer=":", pos=at), **asked).run(evaluator="serial")
            torch.testing.assert_close(stacked.per_prompt, serial.per_prompt, atol=1e-4, rtol=1e-4)
            assert bool((stacked.per_prompt[0] == base_of(stacked)).all()) == (at == 4)


def test_cross_entropy_leaves_padding_out() -> None:
    model, prompts = model_of("llama"), drawn(random.Random(3), [5, 3])
    given = padded(prompts, "left")
    targets = torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0))
    result = model.sweep(
        [cw.site("mlp_out", layer=0)], base=given, source="zero", metric=cw.cross_entropy(targets)
    ).run()
    wanted = [
        float(torch.nn.functional.cross_entropy(alone("llama", one), row[-len(one) :]))
        for one, row in zip(prompts, targets, strict=True)
    ]
    assert base_of(result).tolist() == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_and_attribution_read_the_last_token(side: str) -> None:
    model, path = model_of("llama"), PATHS["llama"].format(0)
    prompts = drawn(random.Random(4), [5, 3])
    given, metric = padded(prompts, side), cw.logit_diff(ANSWER, WRONG)
    found = model.run(**given).gradients(metric, [cw.site(path)])[cw.site(path)]
    effects = model.attribute([cw.site(path)], base=given, source="zero", metric=metric).run()
    for row, prompt in enumerate(prompts):
        kept: list[Tensor] = []

        def leaf(value: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(value.detach().requires_grad_())
            return kept[0]

        with torch.enable_grad():
            last = alone("llama", prompt, path, leaf)[-1]
            (wanted,) = torch.autograd.grad(last[ANSWER] - last[WRONG], kept)
        shown = given["attention_mask"][row].bool()
        torch.testing.assert_close(found[row, shown], wanted[0], atol=1e-3, rtol=1e-3)
        effect = float(effects.per_prompt[0, 0, row] - base_of(effects)[row])
        assert effect == pytest.approx(-float((wanted * kept[0].detach()).sum()), abs=1e-3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_edges_circuits_searches_and_parts_of_logits_are_those_of_the_prompt_alone(side: str) -> None:
    model, rng = model_of("llama"), random.Random(5)
    (prompt, other), first = drawn(rng, [4, 4]), 0 if side == "right" else 2
    given, plain = (
        (padded([p], side, n), padded([o], side, n)) for p, o, n in [(prompt, other, 6), (prompt, other, 4)]
    )
    metric = cw.logit_diff(ANSWER, WRONG)
    edges = model.edges()[::7]
    for source in ("run", "zero", "mean"):
        tables = [
            model.sweep(edges, base=base, source=run if source == "run" else source, metric=metric)
            .run()
            .table
            for base, run in (given, plain)
        ]
        torch.testing.assert_close(*tables, atol=1e-3, rtol=1e-3)
    for ablation in ("resample", "zero", "mean"):
        asked: dict[str, Any] = {"metric": metric}
        pairs = [
            (base, cw.mean(model, [run]) if ablation == "mean" else "zero" if ablation == "zero" else run)
            for base, run in (given, plain)
        ]
        circuits = [
            model.find_circuit(base=base, source=run, threshold=0.3, **asked).run() for base, run in pairs
        ]
        evaluated = [circuits[1].evaluate(base=base, source=run, **asked) for base, run in pairs]
        assert circuits[0].edges == circuits[1].edges
        assert evaluated[0].faithfulness == pytest.approx(evaluated[1].faithfulness, abs=1e-3)
    parts = [model.run(**base).logit_attribution(metric).tensor for base, _ in (given, plain)]
    torch.testing.assert_close(*parts, atol=1e-3, rtol=1e-3)
    traces = [
        model.causal_trace(base, subject=[1 + at], n=2, noise=1.0).run().result
        for base, at in ((given[0], first), (plain[0], 0))
    ]
    torch.testing.assert_close(traces[0].values[:, first : first + 4], traces[1].values, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_trace_of_a_padded_prompt_is_that_of_the_prompt_alone(side: str) -> None:
    prompt = [7, 9, 11, 13, 15]
    first = 0 if side == "right" else 2
    asked: dict[str, Any] = {"metric": cw.prob(ANSWER), "noise": 2.0, "n": 3}
    own = {"input_ids": torch.tensor([prompt])}
    expected = cw.capture(module_of("llama"), **own).causal_trace(own, subject=[1], **asked).run()
    found = (
        model_of("llama")
        .causal_trace(
            padded([prompt], side, len(prompt) + 2),
            subject=[first + 1],
            pos=range(first, first + len(prompt)),
            **asked,
        )
        .run()
    )
    assert expected.values.std() > 1e-4
    assert found.clean == pytest.approx(float(alone("llama", prompt)[-1].softmax(-1)[ANSWER]), abs=1e-5)
    torch.testing.assert_close(found.values, expected.values, rtol=0, atol=1e-5)
    with pytest.raises(SweepError, match="padding"):
        model_of("llama").causal_trace(
            padded([prompt], side, 7), subject=[6 if side == "right" else 0], **asked
        ).run()


def test_a_model_without_causal_attention_needs_a_position() -> None:
    model, prompts = model_of("bert"), drawn(random.Random(6), [4, 3])
    run = model.run(**padded(prompts, "right"))
    asked: dict[str, Any] = {"base": run, "source": "zero"}
    with pytest.raises(MetricError, match=r"attention is not causal in BertForMaskedLM.*`pos="):
        model.sweep([cw.site(PATHS["bert"].format(0))], **asked, metric=cw.logit_diff(3, 5)).run()
    for ask in (cw.kl_to, lambda run: run.gradients(cw.prob(3), [cw.site(PATHS["bert"].format(0))])):
        with pytest.raises(MetricError, match="attention is not causal"):
            ask(run)
    at = model.sweep(
        [cw.site(PATHS["bert"].format(0))], **asked, metric=cw.logit_diff(3, 5, pos=[1, 2])
    ).run()
    wanted = [difference(alone("bert", one)[pos]) for one, pos in zip(prompts, (1, 2), strict=True)]
    assert base_of(at).tolist() == pytest.approx(wanted, abs=1e-4)


def test_positions_that_are_padding_or_not_there_are_refused() -> None:
    model = model_of("llama")
    run = model.run(**padded(drawn(random.Random(7), [5, 3]), "right"))
    for pos, words in (
        (3, "position 3 of prompt 1, which is padding"),
        (-4, "is not there"),
        (9, "is not there"),
    ):
        with pytest.raises(MetricError, match=words):
            cw.kl_to(run, pos=pos)
    with pytest.raises(MetricError, match="made for 3 prompts"):
        cw.kl_to(run, pos=[0, 1, 2])
    nonsense: list[Any] = [1.5, "x", [], True]
    for wrong in nonsense:
        with pytest.raises(MetricError, match="pos is a position"):
            cw.logit(3, pos=wrong)
    last = cw.capture(module_of("llama"), **padded([[1, 2, 3], [4, 5]], "right"), logits_to_keep=1)
    with pytest.raises(MetricError, match="without `logits_to_keep`"):
        cw.kl_to(last.run(**padded([[1, 2, 3], [4, 5]], "right"), logits_to_keep=1))
    on_left = last.run(**padded([[1, 2, 3], [4, 5]], "left"), logits_to_keep=1)
    result = last.sweep([cw.site("mlp_out", layer=0)], base=on_left, source="zero", metric=cw.logit(3)).run()
    wanted = [float(alone("llama", one)[-1, 3]) for one in ([1, 2, 3], [4, 5])]
    assert base_of(result).tolist() == pytest.approx(wanted, abs=1e-4)


def test_padding_is_not_put_in_place_of_tokens() -> None:
    model, rng = model_of("llama"), random.Random(8)
    base, source = padded(drawn(rng, [5, 3]), "left"), padded(drawn(rng, [3, 5]), "left")
    asked: dict[str, Any] = {"base": base, "metric": cw.logit_diff(3, 5)}
    for put in (source, cw.resample(model.run(**base))):
        with pytest.raises(PatchError, match="padding would stand for a token"):
            model.sweep([cw.site("mlp_out", layer=0)], **asked, source=put).run()
        model.sweep([cw.site("mlp_out", layer=0, pos=-1)], **asked, source=put).run()
    with pytest.raises(CircuitError, match="the source has padding where the base has tokens"):
        model.find_circuit(**asked, source=source, threshold=0.1).run()
    per_position = cw.mean(model, [padded(drawn(rng, [3, 3]), "left", 5)], per_position=True)
    with pytest.raises(
        PatchError, match="the base has a token where all prompts of the dataset have padding"
    ):
        model.sweep([cw.site("mlp_out", layer=0)], **asked, source=per_position).run()
    on_right = {**asked, "base": padded(drawn(rng, [5, 3]), "right")}
    with pytest.raises(SweepError, match="counted from the end of the batch, where prompt 1 has padding"):
        model.sweep(cw.sites("mlp_out", layer=":", pos=-1), **on_right, source="zero")


def test_what_is_written_does_not_go_on_from_padding() -> None:
    model = model_of("gpt2")
    given = {
        name: one for name, one in padded([[1, 2, 3], [4, 5]], "right").items() if name != "position_ids"
    }
    with pytest.raises(InputMismatchError, match="padded on the right"):
        model.generate(given, 2)
    on_left = {
        name: one for name, one in padded([[1, 2, 3], [4, 5]], "left").items() if name != "position_ids"
    }
    with pytest.raises(PatchError, match="a position is another token in each"):
        model.generate(on_left, 2, patches=[(cw.site("mlp_out", layer=0, pos=1), "zero")])


def test_a_plan_with_positions_is_the_same_after_json() -> None:
    model = model_of("llama")
    base = model.run(**padded(drawn(random.Random(9), [5, 3]), "right"))
    sweep = model.sweep(
        cw.sites("mlp_out", layer=":"), base=base, source="zero", metric=cw.logit(3, pos=[1, 2])
    )
    again = cw.SweepPlan.from_json(sweep.plan().to_json())
    torch.testing.assert_close(sweep.run(plan=again).per_prompt, sweep.run().per_prompt)


@pytest.mark.slow
@pytest.mark.parametrize("sides", [("left", "right"), ("right", "left"), ("right", "right")])
@pytest.mark.parametrize(
    "path", ["encoder.block.0.layer.1.DenseReluDense", "decoder.block.1.layer.0.SelfAttention.o"]
)
def test_encoder_and_decoder_are_padded_each_by_its_own_mask(path: str, sides: tuple[str, str]) -> None:
    import transformers  # noqa: PLC0415

    hf: Any = transformers
    torch.manual_seed(0)
    size: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = hf.T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0, **size)
    module = hf.T5ForConditionalGeneration(config).eval().requires_grad_(False)
    rng = random.Random(10)
    read, written = drawn(rng, [5, 3]), drawn(rng, [2, 4])
    encoder, decoder = padded(read, sides[0], 6), padded(written, sides[1], 5)
    given = {
        "input_ids": encoder["input_ids"],
        "attention_mask": encoder["attention_mask"],
        "decoder_input_ids": decoder["input_ids"],
        "decoder_attention_mask": decoder["attention_mask"],
    }
    model, rows = cw.capture(module, **given), list(zip(read, written, strict=True))

    def last(pair: tuple[list[int], list[int]], hook: Callable[..., Any]) -> Tensor:
        with module.get_submodule(path).register_forward_hook(hook):
            ids, own = (torch.tensor([one]) for one in pair)
            logits: Tensor = module(input_ids=ids, decoder_input_ids=own).logits[0, -1]
            return logits

    seen: list[Tensor] = []
    plain = [difference(last(row, lambda _, __, out: seen.append(out[0]))) for row in rows]
    mean = torch.cat(seen).mean(0)
    wanted = [difference(last(row, lambda _, __, out: mean.expand_as(out))) for row in rows]
    metric = cw.logit_diff(ANSWER, WRONG)
    result = model.sweep([cw.site(path)], base=given, source="mean", metric=metric).run(verify=1)
    assert base_of(result).tolist() == pytest.approx(plain, abs=1e-3)
    assert result.per_prompt[0, 0].tolist() == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_nan_that_eager_attention_makes_of_padding_is_named_and_sdpa_makes_none(attention: str) -> None:
    import transformers  # noqa: PLC0415

    hf: Any = transformers
    base, source = (padded([[1, 2, 3, 4, first], [3, first]], "left") for first in (5, 6))
    asked: dict[str, Any] = {"base": base, "source": source, "metric": cw.logit_diff(ANSWER, WRONG)}
    module = hf.LlamaForCausalLM(
        hf.LlamaConfig(**module_of("llama").config.to_dict(), attn_implementation=attention)
    )
    module.load_state_dict(module_of("llama").state_dict())
    model = cw.capture(module.double().eval(), **base)
    means = {**asked, "source": cw.mean(model, [base])}
    jobs: list[Callable[[], object]] = [
        lambda: model.sweep(cw.sites("z", layer=":"), **asked).run(),
        lambda: model.sweep(model.edges(), **asked).run(),
        lambda: model.find_circuit(**asked, threshold=1.0).run(),
        lambda: model.attribute(model.edges(), **asked, method="eap").run(),
        lambda: model.sweep(cw.sites("resid_post", layer=":"), **means).run(),
    ]
    for job in jobs:
        if attention == "sdpa":
            job()
            continue
        with pytest.raises(
            (PatchError, MetricError, EdgeError), match=r'NaN.*float64.*attn_implementation="sdpa"'
        ):
            job()
