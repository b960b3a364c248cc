"""What identifies a model in a store: digests of its architecture, its weights, its constants.

They are computed when something is stored or saved, never on the way to a number: hashing the weights of a
large model takes longer than sweeping it.
"""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass

from conewise.identity.digests import fingerprint, inputs_digest, program_digest
from conewise.program.weights import Sums
from conewise.runs.captured import Captured


@dataclass(frozen=True, slots=True)
class ModelDigest:
    """`weights`: a digest of architecture and weights. `constants`: of what is no part of these.

    `program`: of what is computed, whatever the weights are.
    """

    weights: str
    constants: str
    program: str


_KNOWN: weakref.WeakKeyDictionary[Captured, tuple[Sums, ModelDigest]] = weakref.WeakKeyDictionary()


def model_digest(model: Captured, weights: Sums | None = None) -> ModelDigest:
    """The digests of a model, as it was when its weights had these sums over their bits; None: as it is.

    Of weights that were written to since, no digest can be made any more: then the sums themselves are given.
    """
    known, found = _KNOWN.get(model, (None, None))
    if found is not None and weights is not None and known == weights:
        return found
    now = model.weights.whole_contents().whole
    if weights is not None and weights != now:
        sums = hashlib.sha256(repr(weights).encode()).hexdigest()
        return ModelDigest(f"bits {sums}", f"bits {sums}", program_digest(model.program))
    if found is None or known != now:
        saved = model.module.state_dict()
        rest = {
            source.name: source.value
            for source in model.program.sources
            if saved.keys().isdisjoint((source.name, *source.aliases))
        }
        constants = inputs_digest(rest) if rest else ""
        found = ModelDigest(fingerprint(model.module), constants, program_digest(model.program))
        _KNOWN[model] = now, found
    return found
