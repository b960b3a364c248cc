"""The Hugging Face hub: whether it can be reached at all, asked once; and one file of a model there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conewise.capturing.foreign import brief
from conewise.extras import needs

with needs("hf"):
    from huggingface_hub import constants, get_session, hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

# What its client raises where no connection comes about. By name, for it has changed the library it uses.
_NOT_REACHED = {"ConnectError", "ConnectTimeout", "ProxyError"}


def why_not_reached() -> str | None:
    """Why the hub cannot be reached from here; None where it can.

    It is asked once, with the client and the patience that downloads have: those ask again and again for
    each file, which is right on a bad line and takes half a minute without any. A hub that is slow, or that
    refuses, is reached.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # noqa: BLE001 - whatever else goes wrong, downloads find out and say so
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & _NOT_REACHED:
            return f"no connection to {constants.ENDPOINT}: {error}"
    return None


def file_of(name: str, file: str, revision: str | None, *, local_only: bool) -> Path | None:
    """A file of a model of the hub, among earlier downloads or downloaded now; None where it has none."""
    how: dict[str, Any] = {"revision": revision, "local_files_only": local_only}
    try:
        return Path(hf_hub_download(name, file, **how))
    except LocalEntryNotFoundError:
        if local_only:
            return None
        raise
    except EntryNotFoundError:
        return None


def answer(error: BaseException) -> str:
    """What the hub said, in a few words."""
    match error:
        case GatedRepoError():  # it is a RepositoryNotFoundError too
            return "there, access has to be asked for on the model's page; then log in with `hf auth login`"
        case RepositoryNotFoundError():
            return "there is no such model there, or a private one, for which to log in with `hf auth login`"
        case RevisionNotFoundError():
            return "the model there has no such revision"
    return brief(error)
