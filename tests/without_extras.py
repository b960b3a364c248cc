"""A sweep with what conewise itself comes with, and what is said where a package of an extra is missing.

Run as a script, because what is imported stays: it hides packages, uses them for the first time, and prints
what it was told as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

TORCHS = {"filelock", "jinja2", "markupsafe"}
"""What torch brings, and needs to capture a module."""

HIDDEN = {
    *("accelerate", "cloudpickle", "gguf", "huggingface_hub", "pandas", "plotly", "pyarrow", "ray"),
    *("tokenizers", "transformers", "typer"),
}
"""What is not found; the script adds names and takes them out."""


class Hiding(PathFinder):
    """Finds what lies on the path, but for hidden packages: as if they were not installed."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a module lies; None where it is hidden."""
        return None if fullname.partition(".")[0] in HIDDEN else super().find_spec(fullname, path, target)


def main(saved: Path) -> None:
    """Use everything once, with the result that was saved in a folder."""
    sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding

    import conewise as cw  # noqa: PLC0415
    from conewise.errors import MissingPackageError  # noqa: PLC0415

    said: dict[str, Any] = {}

    def first_use(name: str, use: Callable[[], object]) -> None:
        try:
            use()
        except MissingPackageError as error:
            said[name] = [error.package, error.extra, str(error)]

    from tests.plain_stack import captured, sweep_of  # noqa: PLC0415  # torch alone

    model = captured()
    sweep = sweep_of(model)
    result = sweep.run(out=saved.parent / "stored")
    said["swept"] = (
        result.verify(n=3).ok and sweep.run(out=saved.parent / "stored", resume=True).ledger.resumed
    )
    circuit = cw.Circuit
    said["printed"] = [str(result), str(model), str(sweep.plan()), circuit.__name__]

    HIDDEN.update(TORCHS)
    for name in [one for one in sys.modules if one.partition(".")[0] in TORCHS]:
        del sys.modules[name]
    first_use("load a name", lambda: cw.load("gpt2"))
    first_use("load the tiny model", lambda: cw.load("tiny"))
    first_use("a table", result.to_dataframe)
    first_use("a table of sites", model.sites.to_dataframe)
    first_use("save", lambda: result.save(saved.parent / "again"))
    first_use("open a result", lambda: cw.open(saved))
    first_use("a figure", result.plot)
    first_use("an image", lambda: result.save_image(saved.parent / "image.png"))
    first_use("a page", lambda: result.report(saved.parent / "page.html"))
    first_use("a notebook", result._repr_html_)
    first_use("processes", lambda: sweep.run(workers=cw.Processes(workers=1)))
    first_use("Ray", lambda: sweep.run(workers=cw.Ray(workers=1)))
    HIDDEN.remove("pandas")
    first_use("save, with pandas", lambda: result.save(saved.parent / "again"))
    sys.stdout.write(json.dumps(said))
    sys.stdout.flush()

    from conewise.cli.entry import main as command  # noqa: PLC0415

    command(["demo", "--tiny"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
