"""What is pruned to zero, removed: smaller, the same up to the order of sums, and itself bit for bit."""

from __future__ import annotations

import io
import random
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import conewise as cw
from conewise.errors import SiteError, SurgeryError
from conewise.model import Model
from tests.surgery.networks import HEADS, INNER, NETWORKS, WIDTH
from tests.surgery.oracle import Act, operated, outputs, with_columns
from tests.surgery.sequences import metric, plain

APART = 1e-13
"""Of the largest output, in double precision."""
D_HEAD = WIDTH // HEADS


def size(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


def logits(module: nn.Module, given: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        found: Tensor = module(**given).logits
    return found


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in {"resnet", "tiny"}])
def test_removed_columns_are_those_that_hooks_put_to_zero(name: str) -> None:
    network, draw = NETWORKS[name], random.Random(name)
    surgery, acts = cw.Surgery(), []
    for layer in range(network.layers):
        heads = draw.sample(range(HEADS), draw.randint(1, 3))
        neurons = draw.sample(range(INNER), 7)
        surgery = surgery.prune(cw.site("z", layer=layer, head=heads, stack=network.stack))
        surgery = surgery.prune(cw.site("post", layer=layer, neuron=neurons, stack=network.stack))
        columns = [head * D_HEAD + one for head in heads for one in range(D_HEAD)]
        acts += [Act("in", network.z.format(layer), with_columns(columns))]
        acts += [Act("in", network.neurons.format(layer), with_columns(neurons))]
    made, given = surgery.compact().apply(plain(name)), network.example(9)
    expected = outputs(operated(network.make(), acts), given)
    assert (made.run(**given).logits - expected).abs().max() <= APART * expected.abs().max()
    module = made.to_module()
    assert torch.equal(logits(module, given), made.run(**given).logits)
    assert size(module) < size(surgery.apply(plain(name)).to_module())


def test_the_rows_and_columns_of_a_head_and_of_neurons_go_in_all_projections() -> None:
    surgery = cw.Surgery().prune(cw.site("z", layer=0, head=1)).prune(cw.site("post", layer=1, neuron=[0, 3]))
    before, after = (one.apply(plain("tiny")).to_module() for one in (surgery, surgery.compact()))
    assert size(before) - size(after) == 4 * D_HEAD * WIDTH + 3 * 2 * WIDTH
    shapes = {name: tuple(one.shape) for name, one in after.state_dict().items()}
    attention, mlp = "model.layers.0.self_attn", "model.layers.1.mlp"
    rows = WIDTH - D_HEAD
    for part in ("q", "k", "v"):
        assert shapes[f"{attention}.{part}_proj.weight"] == (rows, WIDTH)
    assert shapes[f"{attention}.o_proj.weight"] == (WIDTH, rows)
    assert shapes[f"{mlp}.gate_proj.weight"] == shapes[f"{mlp}.up_proj.weight"] == (INNER - 2, WIDTH)
    assert shapes[f"{mlp}.down_proj.weight"] == (WIDTH, INNER - 2)


@pytest.mark.parametrize(("heads", "rows"), [([1], 2 * D_HEAD), ([0, 1], D_HEAD), ([0, 2], 2 * D_HEAD)])
def test_keys_and_values_that_heads_share_stay_until_all_of_these_are_pruned(
    heads: list[int], rows: int
) -> None:
    made = cw.Surgery().prune(cw.site("z", layer=0, head=heads)).compact().apply(plain("llama"))
    held = made.to_module().state_dict()
    for part in ("k", "v"):
        assert held[f"model.layers.0.self_attn.{part}_proj.weight"].shape == (rows, WIDTH)
    assert held["model.layers.0.self_attn.q_proj.weight"].shape == ((HEADS - len(heads)) * D_HEAD, WIDTH)


def test_channels_in_front_of_a_convolution_go_with_their_norm() -> None:
    place = cw.site("resnet.encoder.stages.0.layers.0.layer.0.activation", dim1=[1, 4])
    surgery, given = cw.Surgery().prune(place), NETWORKS["resnet"].example(3)
    before, after = (one.apply(plain("resnet")) for one in (surgery, surgery.compact()))
    old, new = before.run(**given).logits, after.run(**given).logits
    assert (old - new).abs().max() <= APART * old.abs().max()
    assert size(before.to_module()) - size(after.to_module()) == 2 * (8 * 9 + 2 + 8 * 9)


@cache
def shared() -> Model:
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        hidden_size=16,
        embedding_size=16,
        num_attention_heads=4,
        intermediate_size=24,
        num_hidden_layers=2,
        vocab_size=61,
        max_position_embeddings=32,
    )
    module: nn.Module = transformers.AlbertModel(config)
    return cw.capture(module.eval().double(), input_ids=torch.ones(2, 6).long())


def test_what_layers_share_is_refused_by_name_unless_all_of_them_are_pruned_alike() -> None:
    one = cw.Surgery().prune(cw.site("z", layer=0, head=1))
    with pytest.raises(SurgeryError, match=r"attention.query.weight.*shared.*query#1/linear needs"):
        one.compact().apply(shared())
    both = one.prune(cw.site("z", layer=1, head=1))
    ids = torch.arange(12).view(2, 6)
    old, new = (made.apply(shared()).run(input_ids=ids) for made in (both, both.compact()))
    name = old.model.program.outputs[0].name
    assert torch.allclose(old[name], new[name], rtol=0, atol=1e-13)
    sizes = [size(made.apply(shared()).to_module()) for made in (both, both.compact())]
    assert sizes[0] - sizes[1] == 4 * 4 * 16 + 3 * 4


def test_nothing_to_remove_is_said() -> None:
    for surgery in (cw.Surgery(), cw.Surgery().prune(cw.site("z", layer=0, head=1), value=0.5)):
        with pytest.raises(SurgeryError, match="no row or column of a weight serves pruned entries alone"):
            surgery.compact().apply(plain("tiny"))


def test_a_compact_model_is_swept_by_its_own_numbers_of_heads() -> None:
    network = NETWORKS["llama"]
    made = cw.Surgery().prune(cw.site("z", layer=1, head=[0, 1])).compact().apply(plain("llama"))
    base, source = (made.run(**network.example(seed)) for seed in (1, 2))
    with pytest.raises(SiteError, match="layer 0 has 4 along head, and layer 1 has 2"):
        made.sweep(cw.sites("z", layer=":", head=":"), base=base, source=source, metric=metric).run()
    each: list[Any] = [cw.sites("z", layer=layer, head=":") for layer in range(2)]
    result = made.sweep(each, base=base, source=source, metric=metric).run()
    assert result.per_prompt[0].shape == (4 + 2, 2)
    assert result.ledger.node_evaluations == result.plan.node_evaluations
    path, seen = network.z.format(1), list[Tensor]()
    theirs = operated(network.make(), [Act("in", path, with_columns(range(2 * D_HEAD)))])

    def see(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    def put(x: Tensor) -> Tensor:
        return torch.cat([x[..., :-D_HEAD], seen[0][..., -D_HEAD:]], dim=-1)

    outputs(operated(theirs, [Act("in", path, see)]), network.example(2))
    with torch.no_grad():
        expected = metric(operated(theirs, [Act("in", path, put)])(**network.example(1)))
    assert torch.allclose(result.per_prompt[0, 5], expected, rtol=0, atol=1e-12)


def test_a_compact_module_is_stored_trained_and_exported() -> None:
    surgery = cw.Surgery().prune(cw.site("z", layer=0, head=2)).compact()
    made, given = surgery.apply(plain("llama")), NETWORKS["llama"].example(4)
    module, file = made.to_module(), io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(logits(again, given), made.run(**given).logits)
    again(**given).logits.sum().backward()
    assert all(one.grad is not None for one in again.parameters())
    exported = torch.export.export(module, (), NETWORKS["llama"].example(5)).module()
    assert torch.equal(
        exported(**NETWORKS["llama"].example(6)).logits, made.run(**NETWORKS["llama"].example(6)).logits
    )
