"""What a sweep puts in and reads, as plain values by which a change of it is seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from conewise.errors import Argument, IdentityError
from conewise.identity.values import identified
from conewise.runs.metrics import Metric

if TYPE_CHECKING:
    from conewise.runs.edit import Edit
    from conewise.runs.interventions.interventions import Intervention

Identity = str | dict[str, str]


class Identifying:
    """Identities of the parts of a sweep. One that cannot be known says so, or with `strict` is refused."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict

    def patch(self, put: Intervention) -> list[Identity]:
        """What a sweep puts into a site."""
        name = f"the intervention {put.name!r}"
        return self._parts(put.described or (put.name, put.part), name, "cw.intervention(function, key=...)")

    def metric(self, metric: Metric) -> list[Identity]:
        """What it reads."""
        described = metric.described or (metric.compute, metric.output, metric.last)
        at = () if metric.pos is None or not metric.described else ("pos", metric.pos)
        return self._parts(
            (metric.name, *described, *at), f"the metric {metric.name!r}", "cw.metric(function, key=...)"
        )

    def edit(self, edit: Edit) -> str:
        """What a function that is patched in a base makes of a value."""
        found = self._part(edit.part, f"the patch at {edit.place}", "cw.intervention(function, key=...)")
        return (
            found if isinstance(found, str) else ", ".join(f"{name}: {text}" for name, text in found.items())
        )

    def _parts(self, parts: Iterable[Any], name: str, remedy: str) -> list[Identity]:
        return [part if isinstance(part, str) else self._part(part, name, remedy) for part in parts]

    def _part(self, part: object, name: str, remedy: str) -> Identity:
        try:
            return identified(part)
        except IdentityError as error:
            if not self._strict:
                return f"not identified: {error}"
            raise IdentityError(
                error.where,
                error.what,
                f"{name} cannot be stored and resumed: it depends on something of which a change would go "
                f"unseen ({error}). Give it a name of your own, `{remedy}`, and another one whenever it "
                "means something else; or run without ",
                Argument("out"),
                ".",
            ) from None
