"""The published code of EAP-IG and of the benchmark, run beside ours where it is there.

`CONEWISE_PEERS` names a folder with clones of `hannamw/EAP-IG` and `hannamw/MIB-circuit-track`, and
TransformerLens is to be installed. Run as a program, it prints the figures of `benchmarks/README.md`:

    CONEWISE_PEERS=~/peers python -m tests.circuits.published
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import conewise as cw
from tests.circuits.small_models import small

FOLDERS = ("EAP-IG/src", "MIB-circuit-track")
ANSWER, WRONG, STEPS = 3, 5, 5


def is_there() -> bool:
    """True if the published code can be run."""
    home = os.environ.get("CONEWISE_PEERS")
    has_lens = importlib.util.find_spec("transformer_lens") is not None
    return home is not None and has_lens and all((Path(home) / one).is_dir() for one in FOLDERS)


@contextlib.contextmanager
def _on_the_cpu() -> Iterator[None]:
    """Their code names the device "cuda" where it makes score tables."""
    made = torch.zeros

    def zeros(*sizes: Any, device: Any = None, **how: Any) -> torch.Tensor:
        return made(*sizes, device="cpu" if device == "cuda" else device, **how)

    torch.zeros = zeros
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        torch.zeros = made


def _their(name: str) -> Any:
    for one in FOLDERS:
        path = str(Path(os.environ["CONEWISE_PEERS"]) / one)
        if path not in sys.path:
            sys.path.insert(0, path)
    return importlib.import_module(name)


def _metric(
    logits: torch.Tensor, _: Any, lengths: torch.Tensor, __: Any, *, mean: bool = True, loss: bool = False
) -> torch.Tensor:
    last = logits[torch.arange(len(logits)), lengths - 1]
    found = last[:, ANSWER] - last[:, WRONG]
    found = found.mean() if mean else found
    return -found if loss else found


@dataclass(frozen=True)
class Compared:
    """The largest difference of each quantity between theirs and ours, in float64.

    For information-flow routes the model has no position embeddings: their input is that of the tokens alone,
    and ours has the positions in it.
    """

    edges: int
    apart: Mapping[str, float]
    areas: Mapping[str, tuple[float, float]]


def compared(module: Any, ids: torch.Tensor, other: torch.Tensor) -> Compared:
    """Compare scores of every edge, f of the same circuits and the areas on one GPT-2."""
    module = copy.deepcopy(module)
    torch.nn.init.zeros_(module.transformer.wpe.weight)
    hooked = _hooked(module)
    model = cw.capture(module, input_ids=ids)
    base, source = model.run(input_ids=ids), model.run(input_ids=other)
    metric = cw.logit_diff(answer=ANSWER, wrong=WRONG)
    asked: dict[str, Any] = {"base": base, "source": source, "metric": metric}
    graphs, attribute = _their("eap.graph"), _their("eap.attribute")
    loader = [([*ids], [*other], [0] * len(ids))]
    with _reading_tokens():
        theirs = {}
        for name, method, steps in (
            ("EAP", "EAP", None),
            ("EAP-IG", "EAP-IG-inputs", STEPS),
            ("IFR", "information-flow-routes", None),
            ("exact", "exact", None),
        ):
            graph = graphs.Graph.from_model(hooked)
            graph.scores = graph.scores.double()  # they are kept in float32
            with _on_the_cpu():
                if method == "exact":
                    attribute.attribute(
                        hooked, graph, loader, partial(_metric, mean=False), method, quiet=True
                    )
                else:
                    # Their scores are sums over prompts of a metric that is a sum: of a mean they are that
                    # of the batch, so a loss that is a sum is given.
                    loss = lambda *given: _metric(*given, mean=False).sum()  # noqa: E731
                    attribute.attribute(hooked, graph, loader, loss, method, ig_steps=steps, quiet=True)
            theirs[name] = graph
    edges = model.edges()
    sweep = model.sweep(edges, **asked).run()
    attributed = {
        "EAP": model.attribute(edges, method="eap", **asked).run(),
        "EAP-IG": model.attribute(edges, method="eap-ig", steps=STEPS, steps_from="source", **asked).run(),
        "IFR": model.attribute(edges, method="ifr", **asked).run(),
        "exact": sweep,
    }
    apart = {}
    for name, result in attributed.items():
        own = dict(zip(edges.names, (result.table[0] - result.base[0]).tolist(), strict=True))
        sign = -1.0 if name == "IFR" else 1.0
        found = {edge: float(one.score) for edge, one in theirs[name].edges.items()}
        assert own.keys() == found.keys()
        apart[name] = max(abs(sign * found[edge] - own[edge]) for edge in own)
    areas = {}
    for select in ("signed", "absolute"):
        curve = sweep.curve(base=base, source=source, select=select)
        graph = theirs["exact"]
        graph.scores[:] = -graph.scores  # positive where an edge helps
        benchmark = _their("MIB_circuit_track.evaluation")
        benchmark.evaluate_graph = _without_path
        with _on_the_cpu(), _reading_tokens():
            counts, under, from_one, _, faithful = benchmark.evaluate_area_under_curve(
                hooked, graph, loader, partial(_metric, mean=False), quiet=True, absolute=select == "absolute"
            )
        graph.scores[:] = -graph.scores
        assert list(curve.selections[select].edges) == [int(one) for one in counts]
        apart[f"f, {select}"] = float(np.abs(curve.faithfulness() - np.array(faithful)).max())
        apart[f"areas, {select}"] = max(abs(curve.cpr - under), abs(curve.cmd - from_one))
        areas[select] = curve.cpr, curve.cmd
    return Compared(len(edges), apart, areas)


def _without_path(*given: Any, optimal_ablation_path: Any = None, **how: Any) -> Any:
    """Their `evaluate_graph`, which in the newest version takes no path of an optimal ablation."""
    del optimal_ablation_path
    return _their("eap.evaluate").evaluate_graph(*given, **how)


def _hooked(module: Any) -> Any:
    """A GPT-2 as TransformerLens has it, without folding, in float64."""
    lens = importlib.import_module("transformer_lens")
    config = module.config
    sizes = {
        "n_layers": config.num_hidden_layers,
        "d_model": config.hidden_size,
        "n_heads": config.num_attention_heads,
        "d_head": config.hidden_size // config.num_attention_heads,
        "n_ctx": 32,
        "d_vocab": config.vocab_size,
        "dtype": torch.float64,
        "device": "cpu",
    }
    hooked = lens.HookedTransformer(
        lens.HookedTransformerConfig(
            **sizes,
            d_mlp=4 * config.hidden_size,
            act_fn="gelu_new",
            normalization_type="LN",
            eps=config.layer_norm_epsilon,
            use_attn_result=True,
            use_split_qkv_input=True,
            use_hook_mlp_in=True,
        )
    )
    convert = importlib.import_module("transformer_lens.pretrained.weight_conversions.gpt2")
    state = convert.convert_gpt2_weights(module, hooked.cfg)
    hooked.load_state_dict(state, strict=False)
    return hooked.double()


@contextlib.contextmanager
def _reading_tokens() -> Iterator[None]:
    """Their code tokenises texts; here prompts are tokens."""

    def tokens(model: Any, given: Any, max_length: Any = None) -> tuple[Any, ...]:
        del model, max_length
        ids = torch.stack(list(given))
        lengths = torch.full((len(ids),), ids.shape[1])
        return ids, torch.ones_like(ids), lengths, ids.shape[1]

    modules = [_their(f"eap.{name}") for name in ("utils", "attribute", "evaluate")]
    kept = [one.tokenize_plus for one in modules]
    for one in modules:
        one.tokenize_plus = tokens
    try:
        yield
    finally:
        for one, own in zip(modules, kept, strict=True):
            one.tokenize_plus = own


def main() -> None:
    """Write the figures."""
    lines: list[str] = []
    for layers, heads in ((2, 2), (3, 4)):
        given = small("gpt2", layers=layers, heads=heads)
        found = compared(given.plain.module, given.ids, given.other)
        lines.append(f"GPT-2 of {layers} layers, {heads} heads, float64: {found.edges} edges")
        for name, apart in found.apart.items():
            lines.append(f"  {name:18} differs by {apart:.1e} at most")
        for select, (cpr, cmd) in found.areas.items():
            lines.append(f"  {select}: CPR {cpr:.6f}, CMD {cmd:.6f}")
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
