"""Feature circuits: what features of dictionaries do to each other on a prompt, each effect computed exactly.

One world for each upstream node takes it away and reads all downstream features: N worlds make a table N × M.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from conewise.anatomy.padding import hides_some
from conewise.anatomy.placements import Outputs
from conewise.anatomy.places import Place, Spliced, as_place
from conewise.arguments import checked
from conewise.circuits.evaluation import Evaluation
from conewise.errors import DictionaryError, GradientError, MissingSiteError, NoEffectWarning, describe
from conewise.extras import needs
from conewise.files import write_whole
from conewise.jobs.digests import inputs_digest
from conewise.jobs.runnable import How, Runnable
from conewise.program.tensors import Tensor
from conewise.runs.captured import Captured
from conewise.runs.inputs import is_text, text_input, text_inputs
from conewise.runs.metric_words import as_metric
from conewise.runs.metrics import Metric, Vector
from conewise.runs.reading import Reading, RunWorld
from conewise.runs.run import baseline
from conewise.sweeps.execution.reading import MetricReader
from conewise.sweeps.planning.plan import SweepPlan
from conewise.sweeps.planning.planner import facts_of
from conewise.sweeps.result import Result
from conewise.sweeps.sweep import Sweep
from conewise.text.tokens import token_texts
from conewise.threads import Turn, one_thread

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

PARTS = ("attention", "norms", "mlps", "features")
"""What can be frozen: attention patterns, scales of norms, outputs of MLPs, and all other features."""


@dataclass(frozen=True, slots=True)
class FeatureNode:
    """A node of a feature circuit: a feature at a position, an error term, or a token's embedding.

    `activation` is the feature's value in the run; for other nodes, the norm of theirs.
    """

    kind: str
    dictionary: str
    pos: int
    feature: int | None = None
    activation: float = 0.0
    label: str = ""

    @property
    def place(self) -> Place:
        """The place that is patched to remove the node."""
        if self.kind == "embedding":
            return Place("resid_pre", 0, part={"pos": self.pos})
        if self.kind == "error":
            return Place(f"{self.dictionary}.error", part={"pos": self.pos})
        return Place(f"{self.dictionary}.latents", part={"pos": self.pos, "latent": self.feature or 0})

    @property
    def name(self) -> str:
        """The short name of the node: dictionary, number of the feature, position."""
        what = {"error": f"{self.dictionary} error", "embedding": "embedding"}.get(
            self.kind, f"{self.dictionary} {self.feature}"
        )
        return f"{what} @{self.pos}"

    def __str__(self) -> str:
        return f"{self.name} ({self.label})" if self.label else self.name


@dataclass(frozen=True, eq=False, repr=False)
class FeatureGraph:
    """Effects between features on a prompt: `effects[i, j]` is the contribution of node i to feature j.

    It is the feature's value minus its value when the node is removed. `nodes` are the upstream nodes,
    `targets` the features that are read; a node has no effect on itself. `on_metric[i]` is the same for the
    metric, and `total[i]` with nothing frozen. With parts of the model `frozen`, effects are direct and
    linear: those of attribution by gradients through the frozen model. `metric` is that of the run itself.
    """

    nodes: tuple[FeatureNode, ...]
    targets: tuple[FeatureNode, ...]
    effects: Tensor
    on_metric: Tensor
    total: Tensor
    metric: float
    frozen: tuple[str, ...]
    tokens: tuple[str, ...]
    result: Result = field(repr=False)
    model: Any = field(repr=False)
    run: Any = field(repr=False)
    asked: Metric = field(repr=False)

    @property
    def indirect(self) -> Tensor:
        """The contribution of each node to the metric through other features: `total` minus direct."""
        return self.total - self.on_metric

    def influence(self) -> Tensor:
        """The share of each node in the metric, along all paths: [node], at most 1.

        Effects on a feature are normalised to shares of their total absolute size; those on the metric too.
        """
        at = {node: number for number, node in enumerate(self.nodes)}
        count = len(self.nodes)
        shares = torch.zeros(count, count, dtype=torch.float64)
        sizes = self.effects.abs()
        sizes = sizes / sizes.sum(0).clamp_min(1e-30)
        for column, target in enumerate(self.targets):
            if target in at:
                shares[:, at[target]] = sizes[:, column]
        whole = self.on_metric.abs() / self.on_metric.abs().sum().clamp_min(1e-30)
        found, step = whole.clone(), whole
        for _ in range(count):
            step = shares @ step
            found = found + step
            if float(step.abs().max()) < 1e-12:
                break
        return found

    @checked
    def prune(self, *, top: int | None = None, threshold: float | None = None) -> FeatureGraph:
        """Return the graph with its most influential nodes.

        They are the `top` nodes, or those with at least `threshold` of the largest influence.
        """
        if (top is None) == (threshold is None):
            raise DictionaryError(
                "give how many nodes stay, `top=20`, or from which share on, `threshold=0.1`."
            )
        influence = self.influence()
        order = influence.argsort(descending=True, stable=True).tolist()
        most = float(influence.max()) if len(order) else 0.0
        kept = (
            order[:top]
            if threshold is None
            else [n for n in order if float(influence[n]) >= threshold * most]
        )
        return self._of(sorted(kept))

    def _of(self, kept: Sequence[int]) -> FeatureGraph:
        stay = {self.nodes[number] for number in kept}
        columns = [
            number for number, node in enumerate(self.targets) if node in stay or node not in self.nodes
        ]
        rows = torch.tensor(list(kept), dtype=torch.long)
        return replace(
            self,
            nodes=tuple(self.nodes[number] for number in kept),
            targets=tuple(self.targets[number] for number in columns),
            effects=self.effects[rows][:, torch.tensor(columns, dtype=torch.long)],
            on_metric=self.on_metric[rows],
            total=self.total[rows],
        )

    def edges(self, top: int | None = None) -> list[tuple[FeatureNode, FeatureNode | str, float]]:
        """Every nonzero effect, the largest first: node, feature or the metric's name, effect."""
        found: list[tuple[FeatureNode, FeatureNode | str, float]] = []
        for row, node in enumerate(self.nodes):
            for column, target in enumerate(self.targets):
                if self.effects[row, column] != 0:
                    found.append((node, target, float(self.effects[row, column])))
            if self.on_metric[row] != 0:
                found.append((node, self.asked.name, float(self.on_metric[row])))
        found.sort(key=lambda edge: -abs(edge[2]))
        return found[:top]

    def to_dataframe(self) -> pd.DataFrame:
        """Return a row for each nonzero effect: source, target, effect, kinds, positions and features."""
        with needs("tables"):
            import pandas as pd  # noqa: PLC0415

        rows = []
        for node, target, effect in self.edges():
            own = {"source": node.name, "kind": node.kind, "dictionary": node.dictionary, "pos": node.pos}
            to = target.name if isinstance(target, FeatureNode) else target
            rows.append({**own, "target": to, "effect": effect})
        return pd.DataFrame(rows, columns=["source", "kind", "dictionary", "pos", "target", "effect"])

    # -- is it what the model does? ------------------------------------------------------------

    @one_thread
    def evaluate(self, *, ablation: str = "zero", errors: bool = True) -> Evaluation:
        """Evaluate the faithfulness of these features: all others, at all positions, are ablated together.

        `ablation` is "zero", or "mean": a feature's mean over positions. Errors are not changed or, with
        errors=False, are ablated to zero. See `Evaluation`; here, features are removed instead of edges.
        """
        if ablation not in {"zero", "mean"}:
            raise DictionaryError(f"ablation is 'zero' or 'mean', not {ablation!r}.")
        names = tuple(self.model.splices)
        kept: dict[str, Tensor] = {}
        for name in names:
            latents = self.run.read(Place(f"{name}.latents"))
            kept[name] = torch.zeros(latents.shape[-2:], dtype=torch.bool, device=latents.device)
        for node in {*self.nodes, *(one for one in self.targets if one in self.nodes)}:
            if node.kind == "feature":
                kept[node.dictionary][node.pos, node.feature] = True
        counts = {name: int((self.run.read(Place(f"{name}.latents")) != 0).sum()) for name in names}

        def measured(keep: Callable[[Tensor], Tensor]) -> float:
            with self.run.fork() as world, warnings.catch_warnings():
                warnings.simplefilter("ignore", NoEffectWarning)
                for name in names:
                    mask, present = keep(kept[name]), self.run.read(Place(f"{name}.latents"))
                    instead = present.mean(-2, keepdim=True) if ablation == "mean" else torch.zeros(())
                    world.patch(Place(f"{name}.latents"), partial(_where, mask, instead.to(present)))
                    if not errors:
                        world.patch(Place(f"{name}.error"), "zero")
                return float(self._metric_of(world))

        rows = {
            "full": [float(self._metric_of(self.run))],
            "ablated": [measured(torch.zeros_like)],
            "circuit": [measured(lambda own: own)],
            "complement": [measured(lambda own: ~own)],
        }
        size, count = sum(int(one.sum()) for one in kept.values()), sum(counts.values())
        return Evaluation.of(self.asked.name, ablation, size, count, rows, unit="features")

    def _metric_of(self, run: Reading) -> Tensor:
        return MetricReader(facts_of(self.model), (self.asked,)).of_run(run)[0].mean()

    @property
    def _turn(self) -> Turn:
        turn: Turn = self.model._turn
        return turn

    # -- as a picture, as files ----------------------------------------------------------------

    def plot(self, edges: int = 100) -> Figure:
        """Draw features by layer and token, and effects as lines: blue raises, red lowers."""
        from conewise.runs.figures import feature_figure  # noqa: PLC0415  # needs plotly

        levels = {name: level + 1 for level, name in enumerate(self.model.splices)}
        placed = list(dict.fromkeys((*self.nodes, *self.targets)))
        drawn = [(node.pos, levels.get(node.dictionary, 0), node.kind, str(node)) for node in placed]
        at = {node: number for number, node in enumerate(placed)}
        top = len(self.tokens) - 1, len(levels) + 1, "metric", f"{self.asked.name}: {self.metric:.4g}"
        lines = [
            (at[node], at[target] if isinstance(target, FeatureNode) else len(drawn), effect)
            for node, target, effect in self.edges(edges)
        ]
        rows = ["embeddings", *levels, self.asked.name]
        return feature_figure([*drawn, top], lines, list(self.tokens), rows)

    def save_image(self, path: str | Path, edges: int = 100) -> Path:
        """Save the figure as PNG, SVG, PDF, JPEG or WebP, by the ending of `path`; needs kaleido."""
        from conewise.runs.figures import save_image  # noqa: PLC0415  # needs plotly

        return save_image(self.plot(edges), path)

    def to_circuit_tracer(self, path: str | Path, *, slug: str = "conewise", scan: str = "custom") -> Path:
        """Write the graph as JSON in the format of circuit-tracer, which its viewers open."""
        layers = {name: _layer(spliced, at) for at, (name, spliced) in enumerate(self.model.splices.items())}
        ids = self.run.inputs[text_input(self.model.program)][0].tolist()
        last, above = len(ids) - 1, str(max(layers.values(), default=0) + 2)
        influence = dict(zip(self.nodes, self.influence().tolist(), strict=True))

        def written(node: FeatureNode) -> dict[str, Any]:
            layer = str(layers.get(node.dictionary, 0))
            known: dict[str, Any] = {
                "ctx_idx": node.pos,
                "clerp": node.label,
                "influence": influence.get(node),
                "activation": node.activation,
            }
            if node.kind == "embedding":
                name = f"E_{ids[node.pos]}_{node.pos}"
                return _viewed(name, name, node.pos, "E", "embedding", **known)
            if node.kind == "error":
                names = f"{layer}_-1_{node.pos}", f"{layer}_-1-{node.pos}"
                return _viewed(*names, -1, layer, "mlp reconstruction error", **known)
            own = node.feature or 0
            both = int(layer) + own
            number, names = both * (both + 1) // 2 + own, (f"{layer}_{own}_{node.pos}", f"{layer}_{own}-0")
            return _viewed(*names, number, layer, "cross layer transcoder", **known)

        nodes = {node: written(node) for node in dict.fromkeys((*self.nodes, *self.targets))}
        names, said = (f"{above}_0_{last}", f"L_0-{last}"), f"{self.asked.name} {self.metric:.4g}"
        metric = _viewed(*names, 0, above, "logit", ctx_idx=last, clerp=said, is_target_logit=True)
        links = [
            {
                "source": nodes[node]["node_id"],
                "target": nodes[target]["node_id"] if isinstance(target, FeatureNode) else metric["node_id"],
                "weight": effect,
            }
            for node, target, effect in self.edges()
        ]
        whole = {
            "metadata": {
                "slug": slug,
                "scan": scan,
                "transcoder_list": list(layers),
                "prompt_tokens": list(self.tokens),
                "prompt": "".join(self.tokens),
                "node_threshold": None,
                "schema_version": 1,
            },
            "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""},
            "nodes": [*nodes.values(), metric],
            "links": links,
        }
        write_whole(Path(path), json.dumps(whole, indent=1, allow_nan=False).encode())
        return Path(path)

    def __repr__(self) -> str:
        frozen = f", {', '.join(self.frozen)} frozen" if self.frozen else ""
        return (
            f"FeatureGraph of {len(self.nodes):,} nodes × {len(self.targets):,} features on "
            f"{len(self.tokens)} tokens ({self.asked.name} {self.metric:.4g}{frozen})"
        )

    def __str__(self) -> str:
        lines = [repr(self)]
        for node, target, effect in self.edges(8):
            lines.append(f"  {effect:+.4g}  {node} → {target}")
        return "\n".join(lines)


def _viewed(name: str, js: str, feature: int, layer: str, kind: str, **more: Any) -> dict[str, Any]:
    """A node as circuit-tracer's viewers read it."""
    return {
        "node_id": name,
        "feature": feature,
        "layer": layer,
        "feature_type": kind,
        "jsNodeId": js,
        "token_prob": 0.0,
        "is_target_logit": False,
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "influence": None,
        "activation": None,
        **more,
    }


def _where(mask: Tensor, instead: Tensor, latents: Tensor) -> Tensor:
    return torch.where(mask, latents, instead)


def _layer(spliced: Spliced, at: int) -> int:
    """The layer of a dictionary; where its place does not say one, its number among the others."""
    place = spliced.place
    digits = [int(part) for part in place.name.split(".") if part.isdigit()]
    return place.layer if place.layer is not None else digits[0] if digits else at


# ------------------------------------------------------------------------------------------
# The job: which nodes there are, what is frozen, what is read.


@checked
@one_thread
class FeatureSearch(Runnable[FeatureGraph]):
    """Effects of nodes on features, and on a metric: see `Model.feature_graph`."""

    def __init__(
        self,
        model: Captured,
        base: Any,
        *,
        metric: Any,
        features: Any,
        targets: Any,
        top: int | None,
        frozen: bool | Sequence[str],
        labels: Mapping[Any, str] | None,
        **beside: bool,
    ) -> None:
        self.model = model
        if not model.splices:
            raise DictionaryError(
                f"there is no dictionary in {model.name}: `model.splice(place, dictionary)` returns a model "
                "that has one."
            )
        self.run_of_base = run = _run(model, base)
        if Outputs(model.program).prompts(run.inputs) != 1 or hides_some(model.program, run.inputs):
            raise DictionaryError("a feature graph is of one prompt, without padding: give one at a time.")
        self.frozen = _frozen(frozen)
        self.metric = as_metric(metric, model)
        self.labels = labels or {}
        own = self._chosen(features, top)
        self.targets = own if targets is None else self._chosen(targets, top)
        self.nodes = (*self._beside(own, **beside), *own)
        if not own or not self.targets:
            raise DictionaryError("no feature is active here, so there is nothing to read an effect of.")
        self.sweep = self._sweep(self._frozen_run(run), (*self._reads(), self.metric))
        self.live = self._sweep(run, (self.metric,)) if self.frozen else None

    @property
    def _turn(self) -> Turn:
        return self.model._turn

    def _sweep(self, base: Reading, metrics: Sequence[Metric]) -> Sweep:
        cells = [node.place for node in self.nodes]
        return Sweep(self.model, cells, base=base, source="zero", metric=list(metrics))

    # -- nodes ---------------------------------------------------------------------------------

    def _chosen(self, given: Any, top: int | None) -> tuple[FeatureNode, ...]:
        """The features that are meant, in the order of dictionaries: by default those that matter most."""
        if given is None:
            given = tuple(self.model.splices)
        if isinstance(given, str | Place):
            given = [given]
        found: list[FeatureNode] = []
        for one in given:
            if isinstance(one, FeatureNode):
                found.append(one)
            elif isinstance(one, str) and one in self.model.splices:
                found += self._active(one, top)
            else:
                found.append(self._feature(one))
        order = {name: at for at, name in enumerate(self.model.splices)}
        return tuple(sorted(dict.fromkeys(found), key=lambda node: (order[node.dictionary], node.pos)))

    def _active(self, name: str, top: int | None) -> list[FeatureNode]:
        """The features that are active, those first that matter most to the metric by their gradients."""
        place = Place(f"{name}.latents")
        latents = self.run_of_base.read(place)[0]
        active, width = latents.flatten().nonzero()[:, 0], latents.shape[-1]
        weight = latents
        if top is not None and top < len(active):
            with suppress(GradientError):  # a metric without gradients: then the strongest
                weight = latents * self.run_of_base.gradients(self.metric, [place])[place][0]
        order = weight.flatten()[active].abs().argsort(descending=True, stable=True)[:top]
        return [self._node(name, at // width, at % width) for at in active[order].tolist()]

    def _node(self, name: str, pos: int, feature: int) -> FeatureNode:
        value = float(self.run_of_base.read(Place(f"{name}.latents"))[0, pos, feature])
        label = self.labels.get((name, feature), self.labels.get(feature, ""))
        return FeatureNode("feature", name, pos, feature, value, label)

    def _feature(self, given: Any) -> FeatureNode:
        place = as_place(given)
        name, _, what = place.name.rpartition(".")
        pos, feature = place.part.get("pos"), place.part.get("latent")
        if (
            name not in self.model.splices
            or what != "latents"
            or not isinstance(pos, int)
            or not isinstance(feature, int)
        ):
            known = ", ".join(self.model.splices)
            raise DictionaryError(
                "a feature is one latent at one position, `cw.site('sae.latents', latent=7, pos=3)`, or, by "
                f"the name of a dictionary ({known}), those that matter most; {describe(given)} is neither."
            )
        length, width = self.run_of_base.read(Place(f"{name}.latents")).shape[1:]
        if not -length <= pos < length or not 0 <= feature < width:
            raise DictionaryError(
                f"{place} is not there: {name} has {width:,} features at {length} positions."
            )
        return self._node(name, pos % length, feature)

    def _beside(self, own: Sequence[FeatureNode], *, errors: bool, embeddings: bool) -> Iterable[FeatureNode]:
        names = dict.fromkeys(node.dictionary for node in own)
        length = self.run_of_base.read(Place(f"{next(iter(names), '')}.latents")).shape[1] if names else 0
        found = []
        for kind, name in [("embedding", "")] * embeddings + [("error", name) for name in names] * errors:
            for pos in range(length):
                node = FeatureNode(kind, name, pos)
                found.append(replace(node, activation=float(self.run_of_base.read(node.place).norm())))
        return found

    # -- what is frozen, and what is read ------------------------------------------------------

    def _frozen_run(self, run: Reading) -> Reading:
        """The run, with what is frozen patched with its own values."""
        if not self.frozen:
            return run
        table, world = self.model.site_table, RunWorld(run)
        layers = [(one.number, one.stack) for one in table.model_layers]
        spliced = {self.model.locate(Place(f"{name}.output")).node for name in self.model.splices}
        places: list[Place] = []
        for layer, stack in layers:
            if "attention" in self.frozen:
                places += [Place(kind, layer, stack) for kind in ("q", "k")]
            if "norms" in self.frozen:
                places += [Place(kind, layer, stack) for kind in ("ln1_scale", "ln2_scale")]
            if "mlps" in self.frozen:
                place = Place("mlp_out", layer, stack)
                places += [] if self.model.locate(place).node in spliced else [place]
        if "norms" in self.frozen and not self.metric.reads:
            places.append(Place("ln_final_scale"))
        for name, own in self.model.splices.items():
            if "mlps" in self.frozen and own.reads != own.place:
                places.append(Place(f"{name}.input"))
            if "features" in self.frozen:
                places += [Place(f"{name}.latents"), Place(f"{name}.error")]
        for place in places:
            try:
                world.patch(place, run)
            except MissingSiteError as error:
                raise DictionaryError(
                    f"{place} cannot be frozen: {error} Freeze less: `frozen=` takes some of "
                    f"{', '.join(map(repr, PARTS))}."
                ) from error
        return world

    def _reads(self) -> list[Metric]:
        """A metric for each dictionary: its features among the targets, each at its position."""
        names = dict.fromkeys(node.dictionary for node in self.targets)
        read = self._linear if "features" in self.frozen else self._latents
        return [read(name, [node for node in self.targets if node.dictionary == name]) for name in names]

    def _latents(self, name: str, own: Sequence[FeatureNode]) -> Metric:
        """The features themselves."""
        rows, columns = sorted({node.pos for node in own}), sorted({node.feature or 0 for node in own})
        index = [rows.index(node.pos) for node in own], [columns.index(node.feature or 0) for node in own]
        place = Place(f"{name}.latents", part={"pos": tuple(rows), "latent": tuple(columns)})

        def compute(value: Tensor) -> Tensor:
            return value[..., index[0], index[1]]

        return self._metric(name, place, compute, own, "latents")

    def _linear(self, name: str, own: Sequence[FeatureNode]) -> Metric:
        """What each feature reads, along its gradient in the run: for active ones the encoder's direction."""
        spliced = self.model.splices[name]
        site = Place(f"{name}.input") if spliced.reads == spliced.place else spliced.reads
        read = self.run_of_base.read(site)
        rows = sorted({node.pos for node in own})
        at = [rows.index(node.pos) for node in own]
        with torch.enable_grad():
            given = read[0, [node.pos for node in own]].detach().clone()[None].requires_grad_()
            encode = self.model.module.get_submodule(name).encode
            found = encode(given)[0, range(len(own)), [node.feature for node in own]]
            (directions,) = torch.autograd.grad(found.sum(), given)
        activations = torch.tensor([node.activation for node in own]).to(found)
        if not torch.allclose(found.detach(), activations, rtol=1e-3, atol=1e-4):
            raise DictionaryError(
                f"the features of {name} at one position depend on others too, so they have no direction "
                "there. Leave 'features' out of `frozen`."
            )

        def compute(value: Tensor) -> Tensor:
            return (value[..., at, :] * directions[0].to(value.device)).sum(-1)

        place = replace(site, part={"pos": tuple(rows)})
        return self._metric(name, place, compute, own, inputs_digest({"": directions})[:16])

    def _metric(
        self,
        name: str,
        place: Place,
        compute: Callable[[Tensor], Tensor],
        own: Sequence[FeatureNode],
        how: str,
    ) -> Metric:
        names = tuple(range(len(own)))
        made = Metric(
            f"features of {name}",
            compute,
            described=("features", name, how, repr([(node.pos, node.feature) for node in own])),
            copies=1,
            reads=(place,),
            vector=lambda _: Vector(f"features of {name}", ("feature",), (names,)),
        )
        return as_metric(made, self.model)

    # -- the job -------------------------------------------------------------------------------

    def plan(self, max_memory: int | str | None = None) -> SweepPlan:
        """Return the plan of the sweep that computes the table; nothing is computed."""
        return self.sweep.plan(max_memory)

    def _run(self, how: How, *, verify: int = 0) -> FeatureGraph:
        folder = None if how.out is None else Path(how.out)

        def swept(sweep: Sweep, name: str, **more: Any) -> Result:
            out = None if folder is None else folder / name
            result: Result = sweep._run(replace(how, out=out), **more)
            return result

        found = swept(self.sweep, "effects", verify=verify)
        live = None if self.live is None else swept(self.live, "total")
        effects = _added(found)
        model, run = self.model, self.run_of_base
        on_metric = effects[-1]
        names = dict.fromkeys(node.dictionary for node in self.targets)
        order = [at for name in names for at, node in enumerate(self.targets) if node.dictionary == name]
        by_target = torch.empty(len(self.targets), len(self.nodes), dtype=torch.float64)
        by_target[order] = effects[:-1]
        at = {node: number for number, node in enumerate(self.nodes)}
        for number, node in enumerate(self.targets):
            if node in at:
                by_target[number, at[node]] = 0.0
        ids = run.inputs[text_input(model.program)][0]
        has_texts = model.tokenizer is not None
        tokens = token_texts(model.tokenizer, ids.tolist()) if has_texts else map(str, ids.tolist())
        return FeatureGraph(
            self.nodes,
            self.targets,
            by_target.T.contiguous(),
            on_metric,
            on_metric if live is None else _added(live)[-1],
            float(found.base[-1]),
            self.frozen,
            tuple(tokens),
            found,
            model,
            run,
            self.metric,
        )

    def __repr__(self) -> str:
        size = f"{len(self.nodes):,} nodes × {len(self.targets):,} features"
        return f"FeatureSearch of {size} of {self.model.name}"


def _added(result: Result) -> Tensor:
    """What nodes add, [number, node]: what is read in the run, less what it is without the node."""
    return result.base[:, None] - result.table


def _run(model: Captured, base: Any) -> Reading:
    if isinstance(base, Reading):
        model.expect_own("the base is a run", base.model)
        return base
    inputs = text_inputs(model, base) if is_text(base) else base
    if not isinstance(inputs, Mapping):
        raise DictionaryError(f"the base is a run, inputs by name or a text, not {describe(base)}.")
    return baseline(model, (), inputs, "all")


def _frozen(given: bool | Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, bool):
        return PARTS if given else ()
    listed = (given,) if isinstance(given, str) else tuple(given)
    if unknown := [one for one in listed if one not in PARTS]:
        raise DictionaryError(f"frozen={unknown[0]!r} is none of {', '.join(map(repr, PARTS))}.")
    return tuple(part for part in PARTS if part in listed)


def feature_graph(
    model: Captured,
    base: Any,
    *,
    metric: Any,
    features: Any = None,
    targets: Any = None,
    top: int | None = 50,
    frozen: bool | Sequence[str] = False,
    errors: bool = False,
    embeddings: bool = False,
    labels: Mapping[Any, str] | None = None,
) -> FeatureSearch:
    """Compute the exact effects of features on features, and on a metric, for one prompt.

    `features` are the upstream features, `targets` those that are read, by default the same. They are places
    such as `cw.site("sae.latents", latent=7, pos=3)`, or names of dictionaries. From each dictionary, the
    `top` features with the largest activation × gradient on the metric are taken (None: all active features).
    With `errors` and `embeddings`, these are nodes too. Each node is set to zero in a world of its own, in
    which all targets and the metric are read.

    With nothing `frozen`, effects are those in the unmodified model, along all paths. `frozen` names parts
    that keep their values from the run: "attention" (patterns), "norms" (scales), "mlps" and "features" (all
    others, and the error terms); True freezes all. Effects are then direct effects in a linear model. They
    equal attribution by gradients in that model, with features changed along their encoder directions.
    """
    return FeatureSearch(
        model,
        base,
        metric=metric,
        features=features,
        targets=targets,
        top=top,
        frozen=frozen,
        errors=errors,
        embeddings=embeddings,
        labels=labels,
    )
