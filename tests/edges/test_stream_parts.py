"""Parts and constant add up to the stream wherever it is read, whatever the architecture."""

from __future__ import annotations

import pytest
import torch

from conewise.edges.edge_facts import EdgeFacts, edge_facts
from conewise.runs.reader import reader
from tests.edges.small_models import model_of, run_of


def facts(name: str, stack: str = "") -> EdgeFacts:
    return edge_facts(model_of(name), stack)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "gemma2", "bert"])
def test_parts_and_constant_add_up_to_the_stream(name: str) -> None:
    parts = facts(name).parts
    assert parts.check(run_of(name, 0)) < 1e-5
    assert parts.is_carried_unchanged == (name != "bert")


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "gemma2", "bert"])
def test_readers_of_several_streams_are_what_each_run_has(name: str) -> None:
    own, base, source = facts(name), reader(run_of(name, 0)), reader(run_of(name, 1))
    for entry, slots in own.readers.slots.items():
        streams = [own.parts.stream(read, entry) for read in (source, base, source)]
        found = own.readers.values(entry, slots, torch.cat(streams), base)
        for slot, node in slots.items():
            expected = torch.cat([source(node), base(node), source(node)])
            torch.testing.assert_close(found[slot], expected, rtol=1e-5, atol=1e-5)
