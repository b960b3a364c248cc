"""What the README says of TransformerLens and nnsight, asked of them, on a small GPT-2 with random weights.

Slow, and needs the extras `compare` and `peers`: `make test-peers` runs it.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import conewise as cw

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

peers = import_module("benchmarks.peers")  # by name: it imports the peers themselves
by_hand = import_module("benchmarks.by_hand")
make_model: Any = GPT2LMHeadModel

LAYERS, HEADS, LENGTH, VOCABULARY = 3, 2, 6, 64
SITES: list[tuple[str, int, int]] = [
    *(("z", layer, head) for layer in range(LAYERS) for head in range(HEADS)),
    *(("mlp", layer, 0) for layer in range(LAYERS)),
]
PLANNING = ("plan", "cost", "flops", "budget", "max_memory", "dry_run")
KEEPING = ("resume", "out", "store", "checkpoint", "save_to", "verify", "check")


@dataclass
class Rows:
    """How many rows of prompts went through each layer: one for each call and each row of its batch."""

    of_layer: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(LAYERS), 0))

    @contextmanager
    def counted(self, module: Any) -> Iterator[Rows]:
        """Count what goes through the layers of a module meanwhile."""

        def counter(layer: int) -> Callable[..., None]:
            def count(_: Any, given: tuple[Any, ...]) -> None:
                self.of_layer[layer] += given[0].shape[0]

            return count

        handles = [
            block.register_forward_pre_hook(counter(layer))
            for layer, block in enumerate(module.transformer.h)
        ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()


@pytest.fixture
def module() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=LAYERS, n_head=HEADS, n_embd=16, vocab_size=VOCABULARY, n_positions=LENGTH + 4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return make_model(config).eval()


@pytest.fixture
def case(module: Any) -> Any:
    source, base = torch.randint(0, VOCABULARY, (2, 1, LENGTH)).unbind(0)
    return peers.PeerCase(module, by_hand.Pair(base, source, 7, 9), SITES)


@pytest.mark.parametrize(("name", "version"), [("transformer-lens", "4.3"), ("nnsight", "0.8")])
def test_the_versions_are_those_that_the_readme_names(name: str, version: str) -> None:
    assert importlib.metadata.version(name).startswith(f"{version}.")


def test_a_sweep_here_has_what_is_looked_for_there() -> None:
    """Else the peers would lack words that nobody uses."""
    arguments = set(inspect.signature(cw.Sweep.run).parameters)
    assert arguments >= {"out", "resume", "max_memory"}
    assert hasattr(cw.Sweep, "plan")
    assert hasattr(cw.Result, "verify")


class TestTransformerLens:
    @pytest.fixture
    def peer(self, case: Any) -> Any:
        return peers.TransformerLens(case)

    def test_its_sweeps_run_the_whole_model_for_each_site(self, peer: Any, module: Any) -> None:
        with Rows().counted(module) as rows:
            peer.run()
        assert set(rows.of_layer.values()) == {len(SITES)}

    def test_an_edge_between_heads_is_a_whole_forward(self, peer: Any, module: Any) -> None:
        patching = import_module("transformer_lens.patching")

        with torch.no_grad():
            _, corrupted = peer.model.run_with_cache(peer.case.corrupted)
            with Rows().counted(module) as rows:
                patching.get_act_patch_direct_path(
                    peer.model,
                    peer.case.corrupted,
                    peer.cache,
                    corrupted,
                    lambda logits: peer.case.difference(logits)[0],
                    src_layer=0,
                    src_head=1,
                    verbose=False,
                )
        assert set(rows.of_layer.values()) == {(LAYERS - 1) * HEADS}

    def test_a_sweep_tells_no_cost_and_keeps_no_part_of_itself(self) -> None:
        patching = import_module("transformer_lens.patching")

        arguments = set(inspect.signature(patching.generic_activation_patch).parameters)
        assert arguments.isdisjoint(PLANNING)
        assert arguments.isdisjoint(KEEPING)
        assert {name for name in dir(patching.PatchingResult) if name in (*PLANNING, *KEEPING)} == set()

    def test_it_generates_with_a_cache_takes_gradients_and_reaches_other_machines(self, peer: Any) -> None:
        remote = import_module("transformer_lens.model_bridge.remote_bridge")

        written = peer.model.generate(
            peer.case.clean, max_new_tokens=2, use_past_kv_cache=True, do_sample=False, verbose=False
        )
        assert written.shape == (1, LENGTH + 2)
        found: list[Any] = []
        peer.model.add_hook("blocks.1.hook_mlp_out", lambda gradient, hook: found.append(gradient), dir="bwd")
        peer.model(peer.case.clean).sum().backward()
        assert len(found) == 1
        assert callable(remote.RemoteBridge.boot_vllm)


class TestNnsight:
    @pytest.fixture
    def peer(self, case: Any) -> Any:
        return peers.NNsight(case)

    def test_a_trace_runs_the_whole_model_for_each_site(self, peer: Any, module: Any) -> None:
        with Rows().counted(module) as rows:
            peer.one_by_one(SITES)
        assert set(rows.of_layer.values()) == {len(SITES)}

    def test_so_do_invokes_in_one_batch(self, peer: Any, module: Any) -> None:
        with Rows().counted(module) as rows:
            peer.invoked(len(SITES))
        assert set(rows.of_layer.values()) == {len(SITES)}

    def test_a_trace_tells_no_cost_and_keeps_no_part_of_itself(self) -> None:
        wrapped = import_module("nnsight").NNsight

        arguments = set(inspect.signature(wrapped.trace).parameters)
        assert arguments.isdisjoint(PLANNING)
        assert arguments.isdisjoint(KEEPING)
        offered = {name for name in dir(wrapped) if not name.startswith("_")}
        assert offered.isdisjoint((*PLANNING, *KEEPING))

    def test_it_generates_takes_gradients_and_runs_elsewhere(self, peer: Any) -> None:
        remote = import_module("nnsight.intervention.backends.remote")

        with peer.batching.generate(peer.case.clean, max_new_tokens=2, do_sample=False) as tracer:
            written = tracer.result.save()
        assert written.shape == (1, LENGTH + 2)
        with peer.model.trace(peer.case.clean):
            inner = peer.model.transformer.h[1].mlp.output
            with peer.model.output.logits.sum().backward():
                gradient = inner.grad.save()
        assert float(gradient.abs().max()) > 0
        assert inspect.isclass(remote.RemoteBackend)
