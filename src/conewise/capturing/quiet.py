"""Silence for calls into transformers: progress is ours to show, and failures are raised."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import Any

from conewise.extras import needs

with needs("hf"):
    import transformers.utils

# It is not typed.
_LIBRARY: Any = transformers.utils.logging
_HUB = logging.getLogger("huggingface_hub")


@contextmanager
def quiet(*, bars: bool = False) -> Iterator[None]:
    """No log lines and nothing else on stderr inside the block; progress bars only with `bars`."""
    before = (_LIBRARY.get_verbosity(), _HUB.level, _LIBRARY.is_progress_bar_enabled())
    with ExitStack() as stack:
        try:
            _LIBRARY.set_verbosity_error()
            _HUB.setLevel(logging.ERROR)
            if not bars:
                _LIBRARY.disable_progress_bar()
                # The reader of GGUF files draws a bar that no setting turns off.
                stack.enter_context(redirect_stderr(io.StringIO()))
            yield
        finally:
            try:
                _put_back(*before)
            except BaseException:  # interrupted: once more, for the user's own logs would be gone
                _put_back(*before)
                raise


def _put_back(verbosity: int, level: int, has_bars: bool) -> None:
    _LIBRARY.set_verbosity(verbosity)
    _HUB.setLevel(level)
    if has_bars:
        _LIBRARY.enable_progress_bar()
