import json
from pathlib import Path

import pytest

from conewise.cli.folders import FOLDED, INSIDE, read_inside, read_run, write_run
from conewise.errors import SweepError
from conewise.report.inside import inside_of
from conewise.report.story import STORY
from tests.report.swept import swept


def test_a_run_comes_back_with_its_story_and_its_cones(tmp_path: Path) -> None:
    result, story, folded = swept()
    assert result.sweep is not None
    inside = inside_of(result.sweep.batch(0).base, result, story)
    assert write_run(tmp_path / "run", result, story, folded, inside) == tmp_path / "run"
    again, told, cones = read_run(tmp_path / "run")
    assert again.equals(result)
    assert again.verification == result.verification
    assert told == story
    assert cones == folded
    assert read_inside(tmp_path / "run") == inside is not None


def test_a_run_may_have_a_result_alone(tmp_path: Path) -> None:
    result, _, _ = swept()
    write_run(tmp_path, result)
    again, story, folded = read_run(tmp_path)
    assert again.equals(result)
    assert story is None
    assert folded is None
    assert read_inside(tmp_path) is None


def test_a_run_is_not_written_over_another(tmp_path: Path) -> None:
    result, story, folded = swept()
    write_run(tmp_path, result, story, folded)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SweepError, match=r"holds story\.json already; it was left as it is"):
        write_run(tmp_path, result)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", [STORY, FOLDED])
def test_a_damaged_file_of_a_run_is_named(tmp_path: Path, name: str) -> None:
    result, story, folded = swept()
    write_run(tmp_path, result, story, folded)
    (tmp_path / name).write_text("{", encoding="utf-8")
    with pytest.raises(SweepError, match=rf"is damaged: {name} cannot be understood"):
        read_run(tmp_path)


def test_a_damaged_inside_is_named(tmp_path: Path) -> None:
    told = {"kind": "conewise inside", "format": 1, "tokens": [["a"]], "numbers": []}
    (tmp_path / INSIDE).write_text(json.dumps(told), encoding="utf-8")
    with pytest.raises(SweepError, match=r"is damaged: inside\.json cannot be understood .*0 numbers"):
        read_inside(tmp_path)


def test_a_folder_without_a_result_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="no saved result"):
        read_run(tmp_path)
