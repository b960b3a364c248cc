"""Modules of JavaScript joined into one script."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from conewise.paper.experiments import page as experiments_page
from conewise.report import circuit as circuit_page
from conewise.report import page as sweep_page
from conewise.report import wave
from conewise.report.document import script
from conewise.templates import asset

PAGES = (circuit_page.SCRIPT, sweep_page.SCRIPT, experiments_page.SCRIPT, wave.SCRIPT)
FOLDER = Path(__file__).parents[1] / "src" / "conewise" / "javascript"

MODULES = {
    "a/main.js": 'import { one, two as deux } from "./b.js";\nimport {\n  three,\n} from "../c.js";\n'
    "globalThis.found = [one, deux(), three];\n",
    "a/b.js": '// B.\nimport { three } from "../c.js";\n\n/** @type {number} */\nexport const one = 1;\n'
    "/**\n * Two.\n */\nexport function two() {\n  return three - one;\n}\n",
    "c.js": "const hidden = 3;\nexport const three = hidden;\n",
}


def joined(modules: Mapping[str, str], first: str = "a/main.js") -> str:
    return script(first, read=modules.__getitem__)


def test_each_module_is_there_once_after_what_it_imports() -> None:
    text = joined(MODULES)
    places = [text.index(f'modules["{path}"] =') for path in ("c.js", "a/b.js", "a/main.js")]
    assert places == sorted(places)
    assert text.count("const hidden") == 1
    assert "\nimport" not in text
    assert "\nexport" not in text


def test_types_and_comments_are_left_out_and_nothing_else() -> None:
    source = (
        'const url = "https://a"; // kept\n  // gone\n/**\n * Two.\n */\nexport const b = 2;\n'
        'f(\n  /** @type {X} */ (a),\n  b,\n);\n/** Three. */\nconst c = /** @type {"a"} */ (d);\n'
    )
    body = joined({"a.js": source}, "a.js").partition("(() => {\nconst url")[2].partition("\nreturn")[0]
    assert body == ' = "https://a"; // kept\nconst b = 2;\nf(\n  (a),\n  b,\n);\nconst c = (d);'


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not there")
def test_the_script_does_what_its_modules_do_and_leaves_no_names() -> None:
    shown = "console.log(JSON.stringify([found, typeof modules, typeof hidden, typeof one]));"
    ran = subprocess.run(["node", "-e", joined(MODULES) + shown], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [[1, 2, 3], "undefined", "undefined", "undefined"]


def test_modules_that_import_each_other_are_refused() -> None:
    modules = {"a.js": 'import { b } from "./b.js";\n', "b.js": 'import { a } from "./a.js";\n'}
    with pytest.raises(ValueError, match=r"import each other: a\.js → b\.js → a\.js"):
        joined(modules, "a.js")


@pytest.mark.parametrize(
    "line",
    [
        'import * as all from "./b.js";',
        'import "./b.js";',
        "export default 1;",
        "export let count = 0;",
        "export { one };",
        'export * from "./b.js";',
    ],
)
def test_what_cannot_be_joined_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"a\.js has a line that cannot be joined: (import|export)"):
        joined({"a.js": f"const one = 1;\n{line}\n", "b.js": ""}, "a.js")


@pytest.mark.parametrize("text", ["</script>", "</SCRIPT", "<!--"])
def test_what_would_end_the_element_of_a_script_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="would end the element"):
        joined({"a.js": f'const text = "{text}";\n'}, "a.js")


def test_every_module_is_in_a_page() -> None:
    pages = "".join(map(script, PAGES))
    names = [f"javascript/{path.relative_to(FOLDER).as_posix()}" for path in sorted(FOLDER.rglob("*.js"))]
    assert [name for name in names if f'modules["{name}"] =' not in pages] == []
    assert [name for name in names if not asset(name).startswith("// ")] == [], "begin with what it is"
