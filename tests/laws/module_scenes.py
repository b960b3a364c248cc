"""Random networks swept, and set against plain hooks on the network itself.

`python -m tests.laws.module_scenes 0 10000` tries the networks of these seeds; `--device cuda` on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import conewise as cw
from conewise.errors import MetricError, MissingSiteError, SweepError
from conewise.model import Model
from tests.laws.modules import (
    EACH,
    Choices,
    Network,
    hooked,
    inputs_of,
    length_of,
    network,
    scores,
    tapped,
    without_fast_path,
)

TAPS = {
    "resid_pre": "resid.{}",
    "attn_out": "blocks.{}.attn_out",
    "mlp_out": "blocks.{}.mlp_out",
    "post": "blocks.{}.mlp.post",
    "z": "blocks.{}.attention.z",
}

PATHS = {
    "resid_pre": "blocks.{}.input",
    "attn_out": "blocks.{}.attention",
    "mlp_out": "blocks.{}.mlp",
    "post": "blocks.{}.mlp.down.input",
    "z": "blocks.{}.attention.o.input",
}
"""The same values under the paths of modules, which every model has."""

WAVEFRONT = 64
"""How many machine epsilons of the largest score a wavefront may be off; half precision gets 8."""


@dataclass(frozen=True)
class Scene:
    """A network, its capture, two inputs, and cells: a place, and the same change by hooks."""

    choices: Choices
    network: Network
    model: Model
    cells: tuple[tuple[cw.Place, str, int, int | None], ...]
    device: str

    @classmethod
    def of(cls, seed: int, device: str = "cpu") -> Scene:
        """The scene of a seed."""
        choices = Choices.draw(seed)
        built = network(choices).to(device)
        example = {name: value.to(device) for name, value in inputs_of(choices, 0).items()}
        # A network this small repeats nothing: torch's cache of what it traced takes longer than tracing.
        with without_fast_path(), torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
            model = cw.capture(built, **example)
        return cls(choices, built, model, tuple(_cells(choices, model)), device)

    def inputs(self, seed: int) -> dict[str, Tensor]:
        """Inputs, where the network is."""
        return {name: value.to(self.device) for name, value in inputs_of(self.choices, seed).items()}

    def by_hooks(self, answer: int) -> Tensor:
        """[cell, prompt] in float64."""
        base, source = self.inputs(1), self.inputs(2)
        rows = []
        for _, path, pos, head in self.cells:
            given = tapped(self.network, source, path)

            def change(
                value: Tensor, given: Tensor = given, pos: int = pos, head: int | None = head
            ) -> Tensor:
                index = self.index(pos, head)
                value[index] = given[index]
                return value

            outputs = hooked(self.network, base, {path: change})
            rows.append(scores(self.choices, outputs)[:, answer].double().cpu())
        return torch.stack(rows)

    def index(self, pos: int, head: int | None) -> tuple[int | slice, ...]:
        features = slice(None) if head is None else slice(head * EACH, (head + 1) * EACH)
        if self.choices.inside == "sequence first":
            return pos, slice(None), features
        return slice(None), pos, features

    def swept(self, evaluator: str, metric: object) -> Tensor:
        base, source = (self.model.run(**self.inputs(seed)) for seed in (1, 2))
        places = [place for place, *_ in self.cells]
        sweep = self.model.sweep(places, base=base, source=source, metric=metric)
        return sweep.run(evaluator=evaluator).per_prompt[0]

    def swept_inputs(self, metric: object) -> tuple[Tensor, Tensor]:
        """The same from inputs, after another pair: as one batch, and as the last of a list of two.

        What the first pair left with the model is found by the second: plan, executor, the baselines' pass.
        """
        places = [place for place, *_ in self.cells]
        other, base, source = (self.inputs(seed) for seed in (3, 1, 2))
        several = self.model.sweep(places, base=[other, base], source=[base, source], metric=metric).run()
        alone = self.model.sweep(places, base=base, source=source, metric=metric).run()
        prompts = alone.per_prompt.shape[-1]
        return alone.per_prompt[0], several.per_prompt[0][:, -prompts:]


def _cells(choices: Choices, model: Model) -> Iterator[tuple[cw.Place, str, int, int | None]]:
    """Every tap at two positions: by the site's name where it has one, and else by the module's path."""
    for (kind, tap), layer in ((item, layer) for item in TAPS.items() for layer in range(choices.layers)):
        if kind == "z" and choices.packing == "multihead" and choices.inside != "flat":
            continue
        path = tap.format(layer)
        for pos in (length_of(choices) - 1, 1):
            head = layer if kind == "z" else None
            part: dict[str, Any] = {"pos": pos} | ({} if head is None else {"head": head})
            try:
                place = cw.site(kind, layer=layer, **part)
                axes = model.locate(place).view.axes
                assert "pos" in axes
            except MissingSiteError:
                own = PATHS[kind].format(layer)
                axes = model.locate(own).view.axes
                part = {axes[0 if choices.inside == "sequence first" else 1]: pos}
                place = cw.site(own, **part)
                head = None
            yield place, path, pos, head


def own_scores(choices: Choices, answer: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
    def metric(outputs: Mapping[str, Tensor]) -> Tensor:
        return scores(choices, outputs)[:, answer]

    return metric


def outcome(seed: int, device: str = "cpu") -> str:
    """What became of the network of a seed: "serial", "wavefront", or what refused to give a number.

    Raises AssertionError where a number is wrong.
    """
    scene = Scene.of(seed, device)
    answer = 1
    expected = scene.by_hooks(answer)
    assert torch.equal(scene.swept("serial", own_scores(scene.choices, answer)), expected), scene.choices
    allowed = 8 if scene.choices.dtype.itemsize == 2 else WAVEFRONT
    tolerance = allowed * torch.finfo(scene.choices.dtype).eps * max(1.0, float(expected.abs().max()))
    own = own_scores(scene.choices, answer)
    for auto in (scene.swept("auto", own), *scene.swept_inputs(own)):
        torch.testing.assert_close(
            auto, expected, rtol=0, atol=tolerance, msg=lambda m: f"{scene.choices}\n{m}"
        )
    try:
        serial = scene.swept("serial", cw.logit(answer))
    except MetricError:
        return "no metric"
    assert torch.equal(serial, expected), scene.choices
    wave = scene.swept("auto", cw.logit(answer))
    torch.testing.assert_close(wave, expected, rtol=0, atol=tolerance, msg=lambda m: f"{scene.choices}\n{m}")
    try:
        scene.swept("wavefront", cw.logit(answer))
    except SweepError:
        return "serial"
    return "wavefront"


def main(arguments: Sequence[str]) -> None:
    """What became of the networks of these seeds; those that were wrong, or raised, one by one."""
    device = arguments[arguments.index("--device") + 1] if "--device" in arguments else "cpu"
    found: Counter[str] = Counter()
    for seed in range(*map(int, [a for a in arguments if a.isdigit()])):
        try:
            found[outcome(seed, device)] += 1
        except AssertionError as error:
            found["WRONG"] += 1
            print(seed, "WRONG", str(error)[:600], flush=True)  # noqa: T201
        except Exception as error:  # noqa: BLE001  # what else may happen is what is asked
            found[type(error).__name__] += 1
            print(seed, Choices.draw(seed), repr(error)[:600], flush=True)  # noqa: T201
    print(dict(found))  # noqa: T201


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
