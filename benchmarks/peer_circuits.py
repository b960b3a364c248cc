"""A circuit, and a curve of ten sizes, beside EAP-IG, the benchmark's code, auto-circuit and pyvene.

Each evaluates the same circuits of one GPT-2 of random weights with the same prompts, in turns with ours, and
the answers are compared. Peers that are not installed are left out:

    CONEWISE_PEERS=~/peers python -m benchmarks.peer_circuits

The folder has clones of `hannamw/EAP-IG` and `hannamw/MIB-circuit-track`; TransformerLens 3, auto-circuit and
pyvene are to be installed. auto-circuit names things of TransformerLens 1, which are put in place.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import conewise as cw
from tests.circuits import published
from tests.circuits.published import ANSWER, WRONG

Answer = Any
Work = Callable[[], Answer]
SHARE = 0.2


class Setting:
    """A GPT-2 of random weights, prompts, a score for every edge, and the circuit of the largest ones."""

    def __init__(self, layers: int, heads: int, width: int, prompts: int, length: int) -> None:
        torch.manual_seed(0)
        sizes = {
            "n_layer": layers,
            "n_head": heads,
            "n_embd": width,
            "vocab_size": 5000,
            "n_positions": 32,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        # The embedding is not shared, and the prompts are different: circuits do something.
        self.module = GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=False)).eval()
        with torch.no_grad():
            for one in self.module.parameters():
                one.add_(torch.randn_like(one) * 0.03)
        self.clean, self.corrupted = torch.randint(0, 5000, (2, prompts, length))
        self.model = cw.capture(self.module, input_ids=self.clean)
        self.edges = self.model.edges().names
        rng = np.random.default_rng(0)
        self.scores = dict(
            zip(self.edges, rng.permutation(np.linspace(0.1, 1.0, len(self.edges))), strict=True)
        )
        self.scored = cw.Circuit.from_scores(
            self.model, self.scores, top=int(SHARE * len(self.edges)), connected=False, helps=1.0
        )
        self.circuit = self.scored.prune()
        self.question: dict[str, Any] = {
            "base": {"input_ids": self.clean},
            "source": {"input_ids": self.corrupted},
            "metric": cw.logit_diff(answer=ANSWER, wrong=WRONG),
        }

    def one(self) -> Answer:
        """Our metric of the circuit, by prompt."""
        return self.circuit.evaluate(**self.question, only="faithfulness").per_prompt["circuit"]

    def heads(self) -> Answer:
        """Our metric of the circuit without the odd heads, by prompt."""
        gone = {f"a{layer}.h{head}" for layer, head in self.odd_heads}
        kept = [edge for edge in self.edges if edge.partition("->")[0] not in gone]
        circuit = cw.Circuit.made(self.model, kept)
        return circuit.evaluate(**self.question, only="faithfulness").per_prompt["circuit"]

    @property
    def odd_heads(self) -> list[tuple[int, int]]:
        """(layer, head) of every second head."""
        config = self.module.config
        return [(layer, head) for layer in range(config.n_layer) for head in range(1, config.n_head, 2)]

    def curve(self) -> Answer:
        """Our f at ten sizes."""
        return self.scored.faithfulness_curve(**self.question, select="absolute").faithfulness()


def _hooked(given: Setting) -> Any:
    """The same weights in TransformerLens, in float32."""
    hooked = published._hooked(given.module).float()
    hooked.cfg.dtype = torch.float32
    return hooked


def theirs(given: Setting) -> Mapping[str, Work]:
    """EAP-IG's evaluation of a circuit, and the benchmark's curve."""
    hooked = _hooked(given)
    graphs, evaluation = published._their("eap.graph"), published._their("eap.evaluate")
    benchmark = published._their("MIB_circuit_track.evaluation")
    benchmark.evaluate_graph = published._without_path
    graph = graphs.Graph.from_model(hooked)
    for name, edge in graph.edges.items():
        edge.score = given.scores[name]
    loader = [([*given.clean], [*given.corrupted], [0] * len(given.clean))]
    metric = partial(published._metric, mean=False)

    def one() -> Answer:
        graph.apply_topn(int(SHARE * len(graph.edges)), True)
        with published._on_the_cpu(), published._reading_tokens():
            return evaluation.evaluate_graph(hooked, graph, loader, metric, quiet=True).tolist()

    def curve() -> Answer:
        with published._on_the_cpu(), published._reading_tokens():
            return np.array(
                benchmark.evaluate_area_under_curve(hooked, graph, loader, metric, quiet=True, absolute=True)[
                    -1
                ]
            )

    return {"one": one, "curve": curve}


def auto_circuit(given: Setting) -> Mapping[str, Work]:
    """auto-circuit's run of one circuit, and of the ten sizes, with parts of the corrupted prompts."""
    import transformer_lens

    if not hasattr(transformer_lens, "HookedTransformerKeyValueCache"):
        old = types.ModuleType("transformer_lens.past_key_value_caching")
        cache = type("HookedTransformerKeyValueCache", (), {})
        old.HookedTransformerKeyValueCache = cache  # type: ignore[attr-defined]
        transformer_lens.HookedTransformerKeyValueCache = cache
        sys.modules[old.__name__] = old
    from auto_circuit.data import PromptPairBatch
    from auto_circuit.prune import run_circuits
    from auto_circuit.types import AblationType, PatchType
    from auto_circuit.utils.graph_utils import patchable_model

    hooked = _hooked(given)
    for one in hooked.parameters():
        one.requires_grad_(False)
    patched = patchable_model(
        hooked, factorized=True, slice_output="last_seq", separate_qkv=True, kv_caches=(None,), device="cpu"
    )
    scores = patched.circuit_prune_scores(
        edge_dict={one: given.scores[_own_name(one.name)] for one in patched.edges}
    )
    none: Any = torch.zeros(len(given.clean), 1, dtype=torch.long)
    batch = PromptPairBatch(0, 0, given.clean, given.corrupted, none, none)
    how = {"patch_type": PatchType.TREE_PATCH, "ablation_type": AblationType.RESAMPLE}

    def logits(counts: list[int]) -> list[torch.Tensor]:
        found = run_circuits(patched, [batch], counts, scores, **how)
        return [found[count][0] for count in counts]

    def difference(value: torch.Tensor) -> torch.Tensor:
        return value[..., ANSWER] - value[..., WRONG]

    def one() -> Answer:
        return difference(logits([int(SHARE * len(given.edges))])[0]).tolist()

    def curve() -> Answer:
        counts = [int(share * len(given.edges)) for share in cw.circuits.curve.SHARES]
        none, *found = (float(difference(one).mean()) for one in logits([0, *counts]))
        return np.array([(one - none) / (found[-1] - none) for one in found])

    return {"one": one, "curve": curve}


def _own_name(edge: str) -> str:
    """Our name of an edge "A0.1->A1.0.Q"."""
    writer, reader = edge.split("->")

    def named(one: str) -> str:
        kind, _, rest = one.partition(" ") if " " in one else (one[0], "", one[1:])
        if kind == "Resid":
            return {"Start": "input", "End": "logits"}[rest]
        if kind == "MLP":
            return f"m{rest}"
        layer, head, *slot = rest.split(".")
        return f"a{layer}.h{head}" + "".join(f"<{one.lower()}>" for one in slot)

    return f"{named(writer)}->{named(reader)}"


def pyvene(given: Setting) -> Mapping[str, Work]:
    """Pyvene's interchange of every second head: it has components, and no edges between them."""
    import pyvene as pv

    gone, rows = given.odd_heads, len(given.clean)
    parts = [
        {"layer": layer, "component": "head_attention_value_output", "unit": "h", "max_number_of_units": 1}
        for layer, _ in gone
    ]
    config = pv.IntervenableConfig(parts, intervention_types=pv.VanillaIntervention)
    patched = pv.IntervenableModel(config, model=given.module)
    places = [[[head]] * rows for _, head in gone]

    def heads() -> Answer:
        with torch.no_grad():
            _, found = patched(
                {"input_ids": given.clean},
                [{"input_ids": given.corrupted}] * len(gone),
                {"sources->base": (places, places)},
            )
        last = found.logits[:, -1]
        return (last[:, ANSWER] - last[:, WRONG]).tolist()

    return {"heads": heads}


def interleaved(works: Mapping[str, Work], rounds: int) -> Mapping[str, list[float]]:
    """Seconds of each work in each round, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - started)
    return taken


def main() -> None:
    """Compare and time."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("layers", 6),
        ("heads", 8),
        ("width", 256),
        ("prompts", 16),
        ("length", 12),
        ("rounds", 7),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args())
    rounds = options.pop("rounds")
    given = Setting(**options)
    say(
        f"GPT-2 {options}: {len(given.edges):,} edges, {len(given.circuit):,} in the circuit; {rounds} rounds"
    )
    makers = {"EAP-IG / benchmark": theirs, "auto-circuit": auto_circuit, "pyvene": pyvene}
    for what, ours in (("one", given.one), ("curve", given.curve), ("heads", given.heads)):
        works: dict[str, Work] = {"ours": ours}
        for name, make in makers.items():
            try:
                found = make(given)
            except ImportError as error:
                say(f"  {name} is left out: {error}")
            else:
                works |= {name: found[what]} if what in found else {}
        if len(works) == 1:
            continue
        expected = np.asarray(ours())
        for name, work in list(works.items())[1:]:
            apart = np.abs(np.asarray(work()) - expected).max()
            largest = np.abs(expected).max()
            say(f"  {what}: {name} differs from ours by {apart:.1e} at most, of {largest:.3g}")
        taken = interleaved(works, rounds)
        for name, seconds in taken.items():
            ratios = [one / own for one, own in zip(seconds, taken["ours"], strict=True)]
            say(
                f"  {what}: {name:20} median {statistics.median(seconds):.4f} s, best {min(seconds):.4f} s; "
                f"over ours {statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})"
            )


def say(line: str) -> None:
    """Print at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
