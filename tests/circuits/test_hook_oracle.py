"""The oracle by hooks is right: it agrees with itself, and with the components that the package finds."""

from __future__ import annotations

import functools

import pytest
import torch

from conewise.circuits.replaced_parts import edge_facts
from conewise.runs.values import reader
from tests.circuits.edge_models import inputs_of, model_of, module_of, run_of
from tests.circuits.hook_oracle import Forward, HookOracle

FAMILIES = ["gpt2", "llama", "gpt_neox", "gemma2"]


@functools.cache
def oracle_of(name: str) -> HookOracle:
    return HookOracle(module_of(name))


@functools.cache
def forward_of(name: str, seed: int) -> Forward:
    return oracle_of(name).forward(**inputs_of(name, seed))


@pytest.mark.parametrize("name", FAMILIES)
def test_all_edges_into_a_reader_are_the_source_s_stream(name: str) -> None:
    oracle, inputs, source = oracle_of(name), inputs_of(name, 0), forward_of(name, 1)
    for one in oracle.readers:
        edges = {f"{writer}->{one}": source.parts[writer] for writer in oracle.writers_of(one)}
        whole = oracle.world(inputs, {}, streams={one: source.streams[one]})
        parted = oracle.world(inputs, edges)
        torch.testing.assert_close(parted.logits, whole.logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(whole.logits, forward_of(name, 0).logits, atol=1e-3), one


@pytest.mark.parametrize("name", FAMILIES)
def test_a_part_of_the_base_itself_changes_nothing(name: str) -> None:
    oracle, inputs, base = oracle_of(name), inputs_of(name, 0), forward_of(name, 0)
    for edge in oracle.edges()[::7]:
        torch.testing.assert_close(oracle.edge(edge, base, inputs).logits, base.logits, rtol=0, atol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_components_and_parts_are_the_oracle_s(name: str) -> None:
    facts, oracle, seen = edge_facts(model_of(name)), oracle_of(name), forward_of(name, 0)
    components = facts.components
    assert [one.name for one in components.writers] == oracle.writers
    assert [one.name for one in components.readers] == oracle.readers
    assert {one.name: one.writers for one in components.readers} == oracle.before
    read = reader(run_of(name, 0))
    for writer, part in zip(components.writers, facts.parts.parts(read), strict=True):
        torch.testing.assert_close(part, seen.parts[writer.name], rtol=1e-5, atol=1e-5)
    for one in components.readers:
        torch.testing.assert_close(facts.parts.stream(read, one.entry), seen.streams[one.name])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reader_s_value_patched_by_a_run_is_the_world_of_the_edge(name: str) -> None:
    """Every third edge, through sites: what the reader makes of the changed stream, put into its place."""
    model, facts, oracle = model_of(name), edge_facts(model_of(name)), oracle_of(name)
    base, inputs, source = run_of(name, 0), inputs_of(name, 0), forward_of(name, 1)
    read, other = reader(base), reader(run_of(name, 1))
    parts, others = facts.parts.parts(read), facts.parts.parts(other)
    for edge in oracle.edges()[::3]:
        writer, end = facts.components.edge(edge)
        stream = facts.parts.stream(read, end.entry) + others[writer.number] - parts[writer.number]
        (value,) = facts.readers.values(end.entry, [end.slot], stream, read).values()
        with base.fork() as world:
            if end.axis is None:
                world.patch(end.node, value)
            else:
                activation = model.locate((end.site[0], end.layer or 0))
                own, new = read(end.node).clone(), value
                view = activation.view
                index = view.index({end.axis: end.head or 0})
                view.present(own)[index] = view.present(new)[index]
                world.patch(end.node, own)
            found = world.logits
        expected = oracle.edge(edge, source, inputs).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_position_is_patched_alone() -> None:
    oracle, inputs, source = oracle_of("gpt2"), inputs_of("gpt2", 0), forward_of("gpt2", 1)
    base = forward_of("gpt2", 0)
    changed = oracle.edge("input->m0", source, inputs, pos=3)
    assert torch.equal(changed.parts["m0"][:, :3], base.parts["m0"][:, :3])
    assert torch.equal(changed.parts["m0"][:, 4:], base.parts["m0"][:, 4:])
    assert not torch.allclose(changed.parts["m0"][:, 3], base.parts["m0"][:, 3], atol=1e-3)
