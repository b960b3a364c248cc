"""The map of modules is what the modules say of themselves."""

from __future__ import annotations

from tests.docs.modules import PAGE, page


def test_the_map_lists_every_module_as_it_is() -> None:
    assert PAGE.read_text("utf-8") == page(), "write it anew: python -m tests.docs.modules"
