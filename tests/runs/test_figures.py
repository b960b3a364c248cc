"""Pictures as images: kaleido is asked for by name, and a wrong ending is refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
import torch

from conewise.errors import DecompositionError
from conewise.runs import figures
from conewise.runs.figures import heatmap, save_image
from conewise.templates import escaped


def test_kaleido_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    with pytest.raises(DecompositionError, match=r"kaleido, which is not installed: `pip install kaleido`"):
        save_image(go.Figure(), tmp_path / "one.png")
    assert not list(tmp_path.iterdir())


def test_a_browser_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def drawn(self: go.Figure, format: str) -> Any:  # noqa: A002
        raise RuntimeError("no Chrome here")

    monkeypatch.setattr(figures, "find_spec", lambda name: object())
    monkeypatch.setattr(go.Figure, "to_image", drawn)
    with pytest.raises(DecompositionError, match=r"no Chrome here.*Chromium"):
        save_image(go.Figure(), tmp_path / "one.svg")
    assert not list(tmp_path.iterdir())


def test_images_are_written_by_their_endings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def drawn(self: go.Figure, format: str) -> bytes:  # noqa: A002
        asked.append(format)
        return b"image"

    monkeypatch.setattr(figures, "find_spec", lambda name: object())
    monkeypatch.setattr(go.Figure, "to_image", drawn)
    for name in ("one.png", "two.SVG", "deeper/three.jpg"):
        assert save_image(go.Figure(), tmp_path / name).read_bytes() == b"image"
    assert asked == ["png", "svg", "jpeg"]
    with pytest.raises(DecompositionError, match=r"'one\.gif' is no image.*\.png, \.svg"):
        save_image(go.Figure(), tmp_path / "one.gif")


def test_tokens_are_no_tags_and_equal_tokens_are_apart() -> None:
    figure = heatmap(torch.ones(1, 3), rows=["a"], columns=["<b>", "x", "x"], title="t", measure="m")
    assert list(figure.layout.xaxis.ticktext) == ["&lt;b&gt;", "x", "x"]
    assert list(figure.layout.xaxis.tickvals) == [0, 1, 2]
    assert figure.data[0].customdata[0][0] == ["a", "&lt;b&gt;"]
    assert escaped("a&<") == "a&amp;&lt;"
