"""MODEL as people name it, loaded and captured."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from conewise.cli.options.load_options import LoadOptions
from conewise.cli.terminal.output import Status

if TYPE_CHECKING:
    from conewise.model import Model
    from conewise.models.loaded import Loaded
    from conewise.runs.captured import Captured

EXAMPLE = tuple(range(8))
"""The tokens that a model is captured with where no prompt is at hand; any do, their number may vary."""


@dataclass(frozen=True)
class ModelName:
    """A model as it is named on the command line."""

    name: str
    how: LoadOptions = field(default_factory=LoadOptions)

    def load(self, status: Status) -> Loaded:
        """The module and its tokenizer."""
        with status.doing(f"loading {self.name}"), status.warnings_as_notes(), _stdout_kept_free():
            from conewise.models.load import load

            return load(
                self.name,
                revision=self.how.revision,
                dtype=self.how.dtype,
                device=self.how.device,
                attn_implementation=self.how.attention,
                trust_remote_code=self.how.trust_remote_code,
                progress=status if self._may_take_long() else None,
            )

    def _may_take_long(self) -> bool:
        return self.name != "tiny"

    def capture(self, status: Status) -> tuple[Loaded, Model]:
        """The module, and the model that it is captured as, without a prompt."""
        loaded = self.load(status)
        return loaded, captured(loaded, [EXAMPLE], status)


@contextmanager
def _stdout_kept_free() -> Iterator[None]:
    """What libraries print in the block goes to stderr: some of them print to stdout themselves."""
    try:
        kept = os.dup(1)
    except OSError:  # it is closed
        yield
        return
    try:
        with suppress(OSError):
            os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def model_json(loaded: Loaded, model: Captured) -> dict[str, str]:
    """A model as JSON tells of it."""
    from conewise.sweeps.planning.model_facts import facts_of
    from conewise.sweeps.storage.model_digest import model_digest

    facts = facts_of(model)
    return {
        "name": loaded.name,
        "source": loaded.source,
        "fingerprint": model_digest(model).weights,
        "device": str(facts.device),
        "dtype": str(facts.dtype).removeprefix("torch."),
    }


def captured(
    loaded: Loaded, rows: Sequence[Sequence[int]], status: Status, *, reads_last: bool = False
) -> Model:
    """The module as a graph, captured with these tokens.

    With `reads_last` it computes the logits of the last position alone, where it can.
    """
    with status.doing(f"capturing {loaded.name} as a graph"), status.warnings_as_notes():
        from conewise.asking.ask import captured_with

        return captured_with(loaded, rows, reads_last=reads_last)
