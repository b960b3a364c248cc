"""Components: who writes into the stream, who reads it, and what is in the way where that is not known."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from conewise.anatomy.components import Components
from conewise.anatomy.sites import SiteTable
from conewise.circuits.stream_parts import StreamParts
from conewise.errors import EdgeError
from conewise.program.export import export
from conewise.program.records import Program
from tests.anatomy.made import (
    EncoderDecoder,
    Lists,
    Plain,
    Shared,
    stacked,
)
from tests.anatomy.test_names import FORMS, ids


def table_of(module: nn.Module, **inputs: Tensor) -> tuple[SiteTable, Program]:
    program = export(module, (), inputs or ids()).program
    return SiteTable(program), program


def made(module: nn.Module, stack: str = "", **inputs: Tensor) -> Components:
    table, program = table_of(module, **inputs)
    return Components(program, table.model_layers, stack)


@functools.cache
def tables(name: str) -> tuple[SiteTable, Program]:
    """The sites of a model of two layers of one form."""
    flow, parts, _, _ = FORMS[name]
    return table_of(stacked(flow, **parts))


def form(name: str) -> Components:
    table, program = tables(name)
    return Components(program, table.model_layers)


def edges_of(components: Components) -> dict[str, list[str]]:
    """The writers of each reader."""
    return {
        one.name: [writer.name for writer in components.writers[: one.writers]] for one in components.readers
    }


def test_the_edges_of_gpt2_small_are_32491() -> None:
    config = transformers.GPT2Config(n_embd=24, vocab_size=31, n_positions=9)
    module: Any = transformers.GPT2LMHeadModel  # untyped
    components = made(module(config).eval(), input_ids=ids()["ids"])
    assert (len(components.writers), components.edges) == (157, 32_491)
    names = [one.name for one in components.writers]
    assert [*names[:3], *names[12:15], names[-1]] == [
        "input",
        "a0.h0",
        "a0.h1",
        "a0.h11",
        "m0",
        "a1.h0",
        "m11",
    ]
    names = [one.name for one in components.readers]
    assert [names[0], names[12], names[24], *names[36:38], *names[-2:]] == [
        *("a0.h0<q>", "a0.h0<k>", "a0.h0<v>", "m0", "a1.h0<q>", "m11", "logits")
    ]
    assert [one.number for one in components.writers] == list(range(157))


def test_a_layer_s_mlp_reads_its_heads_and_the_next_layer_reads_both() -> None:
    read = edges_of(form("pre_norm"))
    assert read["a0.h0<q>"] == read["a0.h1<v>"] == ["input"]
    assert read["m0"] == ["input", "a0.h0", "a0.h1"]
    assert read["a1.h1<k>"] == ["input", "a0.h0", "a0.h1", "m0"]
    assert read["logits"] == ["input", "a0.h0", "a0.h1", "m0", "a1.h0", "a1.h1", "m1"]


@pytest.mark.parametrize("name", ["parallel", "parallel_branches_first", "parallel_with_a_sum_kept"])
def test_in_a_parallel_layer_the_mlp_does_not_read_the_heads(name: str) -> None:
    read = edges_of(form(name))
    assert read["m1"] == read["a1.h0<q>"] == ["input", "a0.h0", "a0.h1", "m0"]


def test_heads_read_an_mlp_that_comes_first() -> None:
    components = form("mlp_first")
    read = edges_of(components)
    assert read["m0"] == ["input"]
    assert read["a0.h0<q>"] == ["input", "m0"]
    assert [one.name for one in components.readers][:2] == ["m0", "a0.h0<q>"]


def test_a_model_may_have_no_mlp() -> None:
    read = edges_of(form("attention_only"))
    assert read["logits"] == ["input", "a0.h0", "a0.h1", "a1.h0", "a1.h1"]


def test_keys_and_values_of_groups_are_read_by_group() -> None:
    config: Any = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=31,
    )
    module: Any = transformers.LlamaForCausalLM  # untyped
    components = made(module(config).eval(), input_ids=ids()["ids"])
    names = [one.name for one in components.readers]
    assert names[3:9] == ["a0.h3<q>", "a0.kv0<k>", "a0.kv1<k>", "a0.kv0<v>", "a0.kv1<v>", "m0"]
    reader = components.reader("a0.kv1<v>")
    assert (reader.axis, reader.head, reader.site) == ("kv_head", 1, ("v", 0, ""))


def test_what_readers_of_normed_sums_read_is_the_normed_value() -> None:
    components = form("post_norm")
    entries = [one.rpartition("/")[2] for one in components.entries]
    assert entries == ["add", "layer_norm", "layer_norm", "layer_norm", "layer_norm"]


def test_the_last_norm_is_the_unembedding_s_and_not_the_stream_s() -> None:
    reader = form("pre_norm").reader("logits")
    assert (reader.entry, reader.node) == ("layers.1/add_1", "norm/layer_norm")


def test_a_model_without_unembedding_has_an_output() -> None:
    class Headless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = stacked(*FORMS["pre_norm"][:1], **FORMS["pre_norm"][1])

        def forward(self, ids: Any) -> Any:
            x = self.inner.words(ids)
            for layer in self.inner.layers:
                x = layer(x)
            return x

    reader = made(Headless().eval()).readers[-1]
    assert (reader.name, reader.slot, reader.entry) == ("output", "logits", reader.node)


@pytest.mark.parametrize("module", [Lists, lambda: Shared(as_module=True), lambda: Shared(as_module=False)])
def test_layers_need_no_module_of_their_own(module: Any) -> None:
    assert edges_of(made(module().eval()))["m2"][-3:] == ["m1", "a2.h0", "a2.h1"]


def test_an_encoder_has_edges_and_says_which_stack_a_decoder_reads() -> None:
    table, program = table_of(EncoderDecoder().eval(), ids=ids()["ids"], targets=ids()["ids"])
    with pytest.raises(EdgeError, match=r"has the stacks 'encoder', 'decoder': say which one with `stack`"):
        Components(program, table.model_layers)
    with pytest.raises(EdgeError, match=r"layer 0 reads another stack by cross-attention"):
        Components(program, table.model_layers, "decoder")
    readers = [one.name for one in Components(program, table.model_layers, "encoder").readers]
    assert readers[-1] == "m1", "its logits are behind another stack"


def test_an_unknown_name_has_its_neighbours() -> None:
    components = form("pre_norm")
    with pytest.raises(
        EdgeError, match=r"no writer 'a0.h7' among the 7 of this model. Nearest: a0.h1, a0.h0"
    ):
        components.writer("a0.h7")
    with pytest.raises(EdgeError, match=r"no reader 'a1.h0<x>' .* Nearest: a1.h0<v>"):
        components.reader("a1.h0<x>")
    with pytest.raises(EdgeError, match=r"'m0' names no edge: .* 'a0.h1->a3.h2<q>'"):
        components.edge("m0")
    with pytest.raises(EdgeError, match=r"m0 reads the stream before m1 .* up to a0.h1"):
        components.edge("m1->m0")
    assert [one.name for one in components.edge("a0.h1->m1")] == ["a0.h1", "m1"]


def test_a_model_without_attention_says_so() -> None:
    with pytest.raises(EdgeError, match="no layers with attention"):
        made(Plain().eval())


NO_PARTS = {
    "macaron": r"'layers\.0\.first/gelu' \(gelu, layer 0\).*2 MLPs are added",
    "beside_a_convolution": r"'layers\.0\.other\.conv/conv1d' \(conv1d, layer 0\)",
    "scan_for_mlp": r"'layers\.0\.other/silu'.*No MLP was found there.*may mix positions",
    "one_projection": r"'layers\.0/relu' \(relu, layer 0\)",
}
NO_COMPONENTS = {
    "fused_output": r"layer 0 has no 'attn_out': .* joins attention with",
    "gated_attention": r"attention of layer 0 depends on the stream by more than queries, keys and values",
    "without_a_stream": r"layer 0 has no 'resid_pre': no sum adds",
}


@pytest.mark.parametrize("name", NO_COMPONENTS)
def test_what_is_in_the_way_of_components_is_named(name: str) -> None:
    with pytest.raises(EdgeError, match=NO_COMPONENTS[name]):
        form(name)


@pytest.mark.parametrize("name", NO_PARTS)
def test_what_is_in_the_way_of_parts_is_named(name: str) -> None:
    with pytest.raises(EdgeError, match=NO_PARTS[name]):
        StreamParts(tables(name)[0], form(name))


def test_a_stream_on_several_devices_is_in_the_way() -> None:
    _, program = tables("pre_norm")
    elsewhere = [
        replace(one, device=torch.device("meta")) if one.name.startswith("layers.1") else one
        for one in program.records
    ]
    spread = replace(program, records=tuple(elsewhere))
    table = SiteTable(spread)
    with pytest.raises(EdgeError, match=r"several devices \(cpu, meta\).*Load the model on one"):
        StreamParts(table, Components(spread, table.model_layers))


def test_layers_without_attention_are_in_the_way() -> None:
    class Hybrid(nn.Module):
        def __init__(self, *, before: bool) -> None:
            super().__init__()
            self.inner, self.plain = stacked(*FORMS["pre_norm"][:1], **FORMS["pre_norm"][1]), Plain()
            self.before = before

        def forward(self, ids: Any) -> Any:
            x = self.inner.words(ids)
            halves = (self.plain.layers, self.inner.layers)
            for layers in halves if self.before else halves[::-1]:
                for layer in layers:
                    x = layer(x)
            return self.inner.head(x)

    with pytest.raises(EdgeError, match="adds to the stream behind the last layer with attention"):
        made(Hybrid(before=False).eval())
    assert made(Hybrid(before=True).eval()).writers[0].node.startswith("plain.layers.1")
