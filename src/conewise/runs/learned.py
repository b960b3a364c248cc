"""Interventions with parameters: rotations, subspaces, masks, vectors; for many places at once, or for one.

A `Learned` says how a value is changed, given parameters, and perhaps the source's value at the same place.
Its parameters are stacks, with a row for each place: `begin` makes them, `prepared` makes of them what
`changed` reads, once for all places. `Trained` are the parameters of one place, ready to patch with.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from conewise.anatomy.places import Place
from conewise.arguments import Positive, checked
from conewise.errors import ArgumentError, PatchError
from conewise.program.tensors import Tensor, recording
from conewise.runs.interventions import Intervention, changing, expect_fits
from conewise.runs.reading import Reading


@dataclass(frozen=True)
class HardConcrete:
    """The hard-concrete distribution of gates between 0 and 1 (Louizos et al., 2018).

    A gate has one parameter, the log-odds `log_alpha`. In training its value is random, and has a gradient:

        s = sigmoid((log u − log(1 − u) + log_alpha) / temperature)     u uniform in (0, 1)
        z = clamp(s · (high − low) + low, 0, 1)

    Because low < 0 and high > 1, z is exactly 0 or exactly 1 with positive probability, so that the expected
    number of gates that are not 0 (`expected_open`) can be a penalty. A trained gate is not random (`gate`).
    """

    temperature: float = 2 / 3
    low: float = -0.1
    high: float = 1.1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ArgumentError(f"a temperature is a number above 0, not {self.temperature}")
        if not (-math.inf < self.low < 0 and 1 < self.high < math.inf):
            raise ArgumentError(
                f"the interval is stretched to below 0 and above 1, not to {self.low} and {self.high}"
            )

    def sample(self, log_alpha: Tensor, generator: torch.Generator) -> Tensor:
        """Return one random gate for each of `log_alpha`, with a gradient to it.

        The numbers are drawn on the generator's device, in `log_alpha`'s dtype but float32 at least, and
        moved to `log_alpha`'s device: a generator on the CPU gives the same gates on every device.
        """
        dtype = torch.promote_types(log_alpha.dtype, torch.float32)
        tiny = torch.finfo(dtype).eps
        uniform = torch.rand(log_alpha.shape, generator=generator, dtype=dtype, device=generator.device)
        uniform = uniform.clamp(tiny, 1 - tiny).to(log_alpha.device)
        soft = torch.sigmoid((uniform.logit() + log_alpha) / self.temperature)
        return self._stretched(soft).to(log_alpha.dtype)

    def gate(self, log_alpha: Tensor) -> Tensor:
        """Return each gate once it is trained: the stretched sigmoid of `log_alpha`, not random."""
        return self._stretched(torch.sigmoid(log_alpha))

    def probability_open(self, log_alpha: Tensor) -> Tensor:
        """Return the probability that a sample of each gate is not 0."""
        return torch.sigmoid(log_alpha - self.temperature * math.log(-self.low / self.high))

    def expected_open(self, log_alpha: Tensor) -> Tensor:
        """Return how many gates are not 0 in expectation: the expected L0 norm of a sample."""
        return self.probability_open(log_alpha).sum()

    def log_alpha(self, gate: float) -> float:
        """Return the parameter with which the trained gate is `gate`, a number between 0 and 1."""
        if not 0 < gate < 1:
            raise ArgumentError(f"a gate to begin with lies between 0 and 1, not at {gate}")
        soft = (gate - self.low) / (self.high - self.low)
        return math.log(soft / (1 - soft))

    def _stretched(self, soft: Tensor) -> Tensor:
        return (soft * (self.high - self.low) + self.low).clamp(0, 1)


GATES = HardConcrete()

Stacks = Mapping[str, Tensor]
"""Parameters by name, each with a row for each place."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of training: the share of it that is done, and what draws random numbers.

    Without a generator nothing is random: so trained interventions are applied.
    """

    share: float = 1.0
    generator: torch.Generator | None = None


TRAINED = Moment()


@dataclass(frozen=True)
class Learned(ABC):
    """An intervention with learned parameters, initialised from `start`; see `Model.fit`."""

    name: str
    takes_source: bool = True
    start: Stacks = field(default_factory=lambda: MappingProxyType({}))

    def expect_width(self, width: int, where: object) -> None:
        """Raise PatchError for a place with so many features that it cannot be at."""
        for name, value in self.start.items():
            wide = value.shape[0]
            if wide != width:
                raise PatchError(
                    f"{self.name} begins with a {name} for {wide} features, and {where} has {width}."
                )

    @abstractmethod
    def begin(self, places: int, width: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return parameters for so many places with so many features, in float32 on the CPU."""

    def prepared(self, own: Stacks, moment: Moment) -> dict[str, Tensor]:
        """Return what `changed` reads of parameters."""
        del moment
        return dict(own)

    @abstractmethod
    def changed(self, ready: Stacks, present: Tensor, source: Tensor | None) -> Tensor:
        """Return [place, entry, feature]: what is put in for `present`; `ready` has a row for each place."""

    def penalty(self, own: Stacks) -> Tensor | None:
        """Return what is added to the loss of each place, [place]; None for nothing."""
        del own
        return None

    def _started(self, places: int, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return these parameters, with what was given to begin with in place of some."""
        found = {**made, **{name: value.float()[None] for name, value in self.start.items()}}
        return {name: value.expand(places, *value.shape[1:]).clone() for name, value in found.items()}


class Rotation(Learned):
    """Distributed alignment: along k learned orthonormal directions the value is the source's."""

    k: int

    def __init__(self, k: int, start: Tensor | None = None, name: str = "rotation") -> None:
        super().__init__(f"{name}(k={k})", start=_given({"directions": start}))
        object.__setattr__(self, "k", k)

    def expect_width(self, width: int, where: object) -> None:
        """Raise PatchError where there are fewer features than directions."""
        super().expect_width(width, where)
        if self.k > width:
            raise PatchError(f"{self.name} has {self.k} directions, and {where} has {width} features.")

    def begin(self, places: int, width: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Random directions [place, feature, k]."""
        drawn = torch.randn(places, width, self.k, generator=generator) / width**0.5
        return self._started(places, {"directions": drawn})

    def prepared(self, own: Stacks, moment: Moment) -> dict[str, Tensor]:
        """The directions, made orthonormal."""
        del moment
        return {"basis": orthonormal(own["directions"])}

    def changed(self, ready: Stacks, present: Tensor, source: Tensor | None) -> Tensor:
        """The value with the source's coordinates along the directions."""
        assert source is not None
        basis = ready["basis"]
        return present + (source - present) @ basis @ basis.mT


class Boundless(Learned):
    """Boundless alignment (Wu et al., 2023): a whole rotation, and a learned number of its directions."""

    penalised: float

    def __init__(self, penalty: float) -> None:
        super().__init__("boundless()")
        object.__setattr__(self, "penalised", penalty)

    def begin(self, places: int, width: int, generator: torch.Generator) -> dict[str, Tensor]:
        """A random rotation [place, feature, feature], and half of its directions."""
        drawn = torch.randn(places, width, width, generator=generator) / width**0.5
        return self._started(places, {"directions": drawn, "border": torch.full((places,), 0.5)})

    def prepared(self, own: Stacks, moment: Moment) -> dict[str, Tensor]:
        """The rotation, and how much of each direction comes from the source; sharper as training goes on."""
        basis = orthonormal(own["directions"])
        width = basis.shape[-1]
        numbers = torch.arange(width, device=basis.device, dtype=basis.dtype) + 0.5
        within = own["border"].clamp(0, 1)[:, None] * width - numbers
        if moment is TRAINED:
            return {"basis": basis, "mask": (within > 0).to(basis.dtype)}
        temperature = max(width / 16, 1.0) * (0.1 / max(width / 16, 1.0)) ** moment.share
        return {"basis": basis, "mask": torch.sigmoid(within / temperature)}

    def changed(self, ready: Stacks, present: Tensor, source: Tensor | None) -> Tensor:
        """The value with the source's coordinates along the directions before the border."""
        assert source is not None
        basis = ready["basis"]
        return present + ((source - present) @ basis * ready["mask"][:, None]) @ basis.mT

    def penalty(self, own: Stacks) -> Tensor:
        """The share of directions that are exchanged."""
        return self.penalised * own["border"].clamp(0, 1)


class LearnedMask(Learned):
    """A gate for each feature, between the base's value and the source's: hard concrete."""

    penalised: float
    gate: float

    def __init__(self, penalty: float, gate: float) -> None:
        super().__init__("learned_mask()")
        object.__setattr__(self, "penalised", penalty)
        object.__setattr__(self, "gate", gate)

    def begin(self, places: int, width: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Gates that stand where they were asked to begin."""
        del generator
        return self._started(places, {"log_alpha": torch.full((places, width), GATES.log_alpha(self.gate))})

    def prepared(self, own: Stacks, moment: Moment) -> dict[str, Tensor]:
        """The gates: random in training."""
        if moment.generator is None:
            return {"gate": GATES.gate(own["log_alpha"])}
        return {"gate": GATES.sample(own["log_alpha"], moment.generator)}

    def changed(self, ready: Stacks, present: Tensor, source: Tensor | None) -> Tensor:
        """The value, with the source's features as far as gates are open."""
        assert source is not None
        return present + ready["gate"][:, None] * (source - present)

    def penalty(self, own: Stacks) -> Tensor:
        """The expected share of gates that are open."""
        return self.penalised * GATES.probability_open(own["log_alpha"]).mean(-1)


class LowRank(Rotation):
    """A learned edit of rank k, without a source: along k directions the value is a linear function of it."""

    def __init__(self, k: int) -> None:
        super().__init__(k, name="low_rank")
        object.__setattr__(self, "takes_source", False)

    def begin(self, places: int, width: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Random directions; nothing is changed to begin with."""
        drawn = torch.randn(places, width, self.k, generator=generator) / width**0.5
        made = {"directions": drawn, "weight": orthonormal(drawn), "bias": torch.zeros(places, self.k)}
        return self._started(places, made)

    def prepared(self, own: Stacks, moment: Moment) -> dict[str, Tensor]:
        """The directions, made orthonormal."""
        del moment
        return {"basis": orthonormal(own["directions"]), "weight": own["weight"], "bias": own["bias"]}

    def changed(self, ready: Stacks, present: Tensor, source: Tensor | None) -> Tensor:
        """The value with other coordinates along the directions."""
        del source
        wanted = present @ ready["weight"] + ready["bias"][:, None]
        return present + (wanted - present @ ready["basis"]) @ ready["basis"].mT


class Added(Learned):
    """A learned vector that is added: steering."""

    def __init__(self, vector: Tensor) -> None:
        super().__init__("add", takes_source=False, start=_given({"vector": vector}))

    def begin(self, places: int, width: int, generator: torch.Generator) -> dict[str, Tensor]:
        """The vector that was given."""
        del width, generator
        return self._started(places, {})

    def changed(self, ready: Stacks, present: Tensor, source: Tensor | None) -> Tensor:
        """The value and the vector."""
        del source
        return present + ready["vector"][:, None]


KINDS: Mapping[str, type[Learned]] = {
    one.__name__: one for one in (Rotation, Boundless, LearnedMask, LowRank, Added)
}
"""The kinds by the names that files have for them."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained intervention for one place: `world.patch(place, trained(run))`, or as a sweep's source.

    `parameters` are those of this place only; `accuracy` is that of the fit.
    """

    kind: Learned
    parameters: Stacks
    place: str = ""
    accuracy: float | None = None

    def __call__(self, run: Reading | None = None) -> Intervention:
        """The intervention, which takes what it exchanges from `run`; one that takes nothing needs none."""
        if (run is None) == self.kind.takes_source:
            raise PatchError(
                f"{self.kind.name} takes what it exchanges from a run: give it one, `trained(run)`."
                if run is None
                else f"{self.kind.name} takes nothing from a run: call it without one."
            )
        return as_patch(self.kind, self.parameters, run)

    @property
    def basis(self) -> Tensor:
        """The orthonormal directions [feature, k]. Raises PatchError if the intervention has none."""
        ready = self.kind.prepared({name: one[None] for name, one in self.parameters.items()}, TRAINED)
        if "basis" not in ready:
            raise PatchError(f"{self.kind.name} has no directions; its parameters are in `parameters`.")
        return ready["basis"][0]

    def __repr__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        how = "" if self.accuracy is None else f", accuracy {self.accuracy:.3g}"
        return f"Trained {self.kind.name}{where}{how}"


def as_patch(kind: Learned, own: Stacks, run: Reading | None) -> Intervention:
    """The intervention of a place, with these parameters; gradients go to those that require one."""
    with recording():
        rows = {name: value[None] for name, value in own.items()}

    def part(place: Place, base: Reading) -> Any:
        source = None if run is None else run.read(place)
        kind.expect_width(base.read(place).shape[-1], place)

        def change(present: Tensor) -> Tensor:
            ready = kind.prepared({name: one.to(present.device) for name, one in rows.items()}, TRAINED)
            return mixed(kind, ready, present[None], None if source is None else source[None])[0]

        return change

    runs = () if run is None else (run,)
    described = (type(kind).__name__, kind.name, *(one.detach() for one in own.values()), *runs)
    return Intervention(kind.name, part, described, is_function=True, runs=runs)


def mixed(kind: Learned, ready: Stacks, present: Tensor, source: Tensor | None) -> Tensor:
    """[place, ..., feature]: what is put in for `present`, computed in the precision of the parameters."""
    shape, width = present.shape, present.shape[-1]
    dtype = torch.promote_types(present.dtype, torch.float32)
    flat = present.reshape(shape[0], -1, width).to(dtype)
    other = None if source is None else source.reshape(shape[0], -1, width).to(dtype)
    rows = {name: value.to(dtype) for name, value in ready.items()}
    return kind.changed(rows, flat, other).reshape(shape).to(present.dtype)


def orthonormal(directions: Tensor) -> Tensor:
    """Orthonormal columns that span the same, [..., feature, k], with a gradient.

    A few columns are made so by the Cholesky factor of their products, which many places at once do as one.
    """
    width, k = directions.shape[-2:]
    if 4 * k > width:
        whole: Tensor = torch.linalg.qr(directions).Q
        return whole
    factor = torch.linalg.cholesky(directions.mT @ directions)
    found: Tensor = torch.linalg.solve_triangular(factor, directions.mT, upper=False).mT
    return found


TOLERANCE = 1e-4
"""The products of orthonormal directions may be off by this much."""


def _directions(given: Tensor, what: str) -> Tensor:
    """One direction, or several as rows, as columns. Raises PatchError for what are none."""
    if not given.is_floating_point() or given.ndim not in {1, 2}:
        raise PatchError(
            f"{what} are a vector, or several as the rows of a matrix of floating-point numbers."
        )
    rows = (given[None] if given.ndim == 1 else given).detach().to(torch.float32)
    if not bool(torch.isfinite(rows).all()) or len(rows) > rows.shape[-1]:
        raise PatchError(f"{what} have shape {tuple(given.shape)}: give finite rows, no more than features.")
    return rows.mT


def _expect_orthonormal(columns: Tensor, what: str) -> Tensor:
    off = columns.mT @ columns - torch.eye(columns.shape[-1], device=columns.device)
    if float(off.abs().max()) > TOLERANCE:
        raise PatchError(
            f"{what} are not orthonormal: their products are off by {float(off.abs().max()):.2g}. "
            "Make them so, `torch.linalg.qr(V.T).Q.T`."
        )
    return columns


def _given(start: Mapping[str, Tensor | None]) -> Stacks:
    return MappingProxyType({name: value for name, value in start.items() if value is not None})


@checked
def rotation(k: Positive, *, start: Tensor | None = None) -> Learned:
    """Exchange the source's coordinates along `k` learned orthonormal directions (DAS): see `Model.fit`.

    `start` gives the initial directions as orthonormal rows [k, feature]; by default they are random.
    """
    if start is not None:
        start = _expect_orthonormal(_directions(start, "the rows of `start`"), "the rows of `start`")
        if start.shape[1] != k:
            raise PatchError(f"`start` has {start.shape[1]} directions, and k is {k}.")
    return Rotation(k, start)


@checked
def boundless(*, penalty: float = 0.1) -> Learned:
    """Exchange coordinates along a learned number of directions of a learned rotation (Wu et al., 2023).

    The loss includes `penalty` times the share of directions that are exchanged.
    """
    return Boundless(penalty)


@checked
def learned_mask(*, penalty: float = 0.1, start: float = 0.5) -> Learned:
    """Exchange features by learned gates, most of which end at 0 or 1 (hard concrete, Louizos et al., 2018).

    The loss includes `penalty` times the expected share of open gates; gates are initialised at `start`.
    """
    _ = GATES.log_alpha(start)
    return LearnedMask(penalty, start)


@checked
def low_rank(k: Positive) -> Learned:
    """Make the coordinates along `k` learned directions a learned linear function of the value (LoReFT).

    It uses no source: the base is trained to predict the label of the example.
    """
    return LowRank(k)


@checked
def subspace(directions: Tensor, run: Reading) -> Intervention:
    """Replace the coordinates along these directions by those of `run`.

    The directions are a vector or orthonormal rows [k, feature].
    """
    columns = _expect_orthonormal(_directions(directions, "the directions"), "the directions")
    return as_patch(Rotation(columns.shape[1], name="subspace"), {"directions": columns}, run)


@checked
def project_out(directions: Tensor) -> Intervention:
    """Remove the component along a vector, or in the span of several (rows): directional ablation."""
    columns = _directions(directions, "the directions")
    basis, factor = torch.linalg.qr(columns)
    if float(factor.diagonal().abs().min()) <= TOLERANCE * float(columns.norm(dim=0).max()):
        raise PatchError("the directions to project out are zero, or depend on each other: give others.")

    def change(present: Tensor) -> Tensor:
        if present.shape[-1] != len(basis):
            raise PatchError(
                f"the directions to project out have {len(basis)} features, and the place has "
                f"{present.shape[-1]}."
            )
        own = basis.to(present.device, torch.promote_types(present.dtype, torch.float32))
        wide = present.to(own.dtype)
        left: Tensor = wide - wide @ own @ own.mT
        return left.to(present.dtype)

    return changing("project_out", change, ("project_out", columns))


@checked
def multiply(factor: float | Tensor) -> Intervention:
    """Multiply the site by a number, or by a tensor of the site's last axes."""
    if isinstance(factor, Tensor):
        with recording():
            factor = factor.clone() if factor.requires_grad else factor.detach().clone()

    def change(present: Tensor) -> Tensor:
        if not isinstance(factor, Tensor):
            return present * factor
        expect_fits(factor, present, "the place", "factor")
        return present * factor.to(present.device, present.dtype)

    described = factor.detach() if isinstance(factor, Tensor) else factor
    return changing("multiply", change, ("multiply", described))


def as_learned(given: Learned | Intervention) -> Learned:
    """Return what is learned: an intervention that adds a vector begins with that. Raises PatchError else."""
    if isinstance(given, Learned):
        return given
    if given.shift is not None and given.shift.ndim == 1:
        return Added((given.scale * given.shift).float())
    raise PatchError(
        f"{given.name} has nothing to learn: give `cw.rotation(k)`, `cw.boundless()`, `cw.learned_mask()`, "
        "`cw.low_rank(k)`, or `cw.add(vector)` with the vector to begin with."
    )
