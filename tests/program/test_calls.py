"""What a run gives is bound to the captured call: the short way and the long one find the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from conewise.errors import InputMismatchError
from conewise.program import calls
from conewise.program.calls import Signature, normal_call

IDS, MASK = torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3)


def plain(ids: Any, mask: Any = None, scale: float = 1.0, *, cache: bool = True) -> None:
    """A forward whose tensors are all that has to be given."""


def with_scale(ids: Any, scale: float) -> None:
    """A forward of which a number has to be given too."""


def nested(batch: Any) -> None:
    """A forward with its tensors in a mapping."""


def signature(forward: Callable[..., None], **example: Any) -> Signature:
    return Signature(inspect.signature(forward), normal_call(inspect.signature(forward), (), example))


def test_tensors_by_name_are_bound_as_the_long_way_binds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    own = signature(plain, ids=IDS, mask=MASK, cache=False)
    ids, mask = IDS + 1, MASK * 2
    expected = own.bind((ids,), {"mask": mask, "cache": False})

    def unneeded(*_: Any) -> Any:
        raise AssertionError("the long way")

    monkeypatch.setattr(calls, "normal_call", unneeded)
    for given in ({"ids": ids, "mask": mask}, {"mask": mask, "ids": ids}):
        found = own.bind((), given)
        assert list(found) == list(expected) == ["ids", "mask"]
        assert found["ids"] is ids
        assert found["mask"] is mask


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"ids": IDS.float(), "mask": MASK}, "was captured"),
        ({"ids": 3, "mask": MASK}, "a tensor was captured there"),
        ({"ids": IDS}, "lacks 'mask'"),
        ({"ids": IDS, "mask": MASK, "labels": IDS}, "do not fit forward"),
        ({"ids": IDS, "mask": MASK, "cache": True}, "captured with False"),
    ],
    ids=["dtype", "number", "missing", "unknown", "constant"],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputMismatchError, match=reason):
        signature(plain, ids=IDS, mask=MASK, cache=False).bind((), given)


def test_a_number_that_has_to_be_given_is_not_left_out() -> None:
    own = signature(with_scale, ids=IDS, scale=2.0)
    assert list(own.bind((), {"ids": IDS, "scale": 2.0})) == ["ids"]
    with pytest.raises(InputMismatchError, match="scale"):
        own.bind((), {"ids": IDS})


def test_nested_tensors_have_names_of_their_own() -> None:
    own = signature(nested, batch={"ids": IDS, "mask": MASK})
    found: dict[str, Tensor] = own.bind((), {"batch": {"ids": IDS, "mask": MASK}})
    assert list(found) == ["batch.ids", "batch.mask"]
