"""A stored run goes on exactly where it was cut off, and is never mixed with another."""

from __future__ import annotations

import json
import os
import re
import resource
import sqlite3
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import conewise as cw
from conewise.errors import ArgumentError, FormatError, IdentityError, MetricError, SweepError
from conewise.jobs import store
from conewise.jobs.store import FILE, FORMAT, MANIFEST
from conewise.model import Model
from conewise.sweeps.sweep import Sweep
from tests.sweeps.small import model, prompts, sweep_over
from tests.sweeps.storage.killed import BUDGET, slow_sweep
from tests.sweeps.storage.resealed import body_of, reseal

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def captured() -> Model:
    return model()


@pytest.fixture
def sweep(captured: Model) -> Sweep:
    return sweep_over(captured)


class Stop(BaseException):
    """Cuts a run off, as Ctrl-C does."""


def cut_off(after: int, how: type[BaseException] = Stop) -> Any:
    """A progress that ends the run when so many cells are done."""

    def tell(done: int, total: int) -> None:
        if done >= after:
            raise how

    return tell


def rows(folder: Path, query: str = "SELECT batch, piece FROM chunks ORDER BY batch, piece") -> list[Any]:
    connection = sqlite3.connect(folder / FILE)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def change(folder: Path, *statements: str) -> None:
    connection = sqlite3.connect(folder / FILE)
    try:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    finally:
        connection.close()


# -- going on ------------------------------------------------------------------------------------


def test_killed_at_random_moments_a_run_goes_on_to_the_same_result(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.sweeps.storage.killed", str(tmp_path / "out"), "10", "kill"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    killed = json.loads(subprocess.check_output(command, cwd=ROOT, env=environment, text=True))
    assert len(killed) == 10
    assert sum(killed) >= 5, "the run is too fast for this test"

    sweep = slow_sweep()
    resumed = sweep.run(out=tmp_path / "out", resume=True, max_memory=BUDGET)
    whole = sweep.run(max_memory=BUDGET)

    assert resumed.ledger.resumed > 0
    assert resumed.equals(whole)
    assert torch.equal(resumed.per_prompt, whole.per_prompt)
    assert resumed.plan.chunks == whole.plan.chunks
    assert len(whole.plan.chunks) > 5
    assert resumed.ledger.node_evaluations == whole.ledger.node_evaluations == whole.plan.node_evaluations


@pytest.mark.parametrize(
    ("evaluator", "budget"), [("serial", None), ("wavefront", "30KiB"), ("auto", "30KiB")]
)
def test_a_run_goes_on_after_any_chunk(
    captured: Model, tmp_path: Path, evaluator: str, budget: str | None
) -> None:
    sweep = sweep_over(captured, cw.sites("z", layer=":", head=":", pos=":"))
    whole = sweep.run(evaluator=evaluator, max_memory=budget)
    pieces = []
    for after in (1, 9, 17, 24):
        with pytest.raises(Stop):
            sweep.run(
                evaluator=evaluator, max_memory=budget, out=tmp_path, resume=True, progress=cut_off(after)
            )
        pieces.append(len(rows(tmp_path)))
    assert pieces == sorted(pieces)
    assert pieces[0] < pieces[-1]
    resumed = sweep.run(out=tmp_path, resume=True)
    assert resumed.equals(whole)
    assert resumed.ledger.launches == whole.ledger.launches
    assert resumed.ledger.resumed == 24


def test_a_finished_run_is_read_back_without_computing(sweep: Sweep, tmp_path: Path) -> None:
    whole = sweep.run(out=tmp_path)
    again = sweep.run(out=tmp_path, resume=True)
    assert again.equals(whole)
    assert again.ledger.compute_seconds == 0
    assert again.ledger.resumed == len(sweep.cells)


def test_resume_starts_where_nothing_is_stored(sweep: Sweep, tmp_path: Path) -> None:
    result = sweep.run(out=tmp_path / "new" / "folder", resume=True)
    assert result.ledger.resumed == 0
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} >= {FILE, MANIFEST}


def test_the_stored_chunks_are_kept_when_the_budget_is_larger(captured: Model, tmp_path: Path) -> None:
    sweep = sweep_over(captured, cw.sites("z", layer=":", head=":", pos=":"))
    with pytest.raises(Stop):
        sweep.run(out=tmp_path, max_memory="30KiB", progress=cut_off(2))
    resumed = sweep.run(out=tmp_path, resume=True, max_memory="1GiB")
    assert len(resumed.plan.chunks) > 5
    assert resumed.equals(sweep.run(max_memory="30KiB"))


def test_stored_chunks_that_do_not_fit_the_budget_are_refused(captured: Model, tmp_path: Path) -> None:
    sweep = sweep_over(captured, cw.sites("z", layer=":", head=":", pos=":"))
    sweep.run(out=tmp_path)
    with pytest.raises(
        SweepError, match=r"chunks that take .* more than the budget .*max_memory=\d+ or more"
    ):
        sweep.run(out=tmp_path, resume=True, max_memory="30KiB")


def test_another_evaluator_is_refused(sweep: Sweep, tmp_path: Path) -> None:
    sweep.run(out=tmp_path, evaluator="serial")
    with pytest.raises(
        SweepError, match="begun with evaluator='serial', so it cannot go on with 'wavefront'"
    ):
        sweep.run(out=tmp_path, resume=True, evaluator="wavefront")
    assert sweep.run(out=tmp_path, resume=True).plan.evaluator == "serial"


# -- what is refused -----------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_not_overwritten(sweep: Sweep, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        sweep.run(out=tmp_path, evaluator="serial", progress=cut_off(1))
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(
        SweepError, match=r"holds a run already, with 6 of 6 cells done.*resume=True, or give another folder"
    ):
        sweep.run(out=tmp_path)
    assert (tmp_path / FILE).read_bytes() == before


def test_resume_without_a_folder_is_refused(sweep: Sweep) -> None:
    with pytest.raises(SweepError, match="resume=True without `out`"):
        sweep.run(resume=True)


OTHERS: dict[str, tuple[Callable[[Model], Sweep], str]] = {
    "model": (
        lambda _: sweep_over(model(seed=1)),
        r"weights: [0-9a-f]{12}\.\.\. → [0-9a-f]{12}\.\.\.",
    ),
    "base": (
        lambda captured: sweep_over(captured, base=captured.run(input_ids=prompts(5, 2))),
        r"batches\[0\]\.base: \w+\.\.\. → \w+\.\.\.",
    ),
    "source": (
        lambda captured: sweep_over(captured, source=captured.run(input_ids=prompts(5, 2))),
        r"batches\[0\]\.source: \w+\.\.\. → \w+\.\.\.",
    ),
    "patch": (
        lambda captured: sweep_over(captured, source="zero"),
        r"batches\[0\]\.patch\[0\]: source → zero",
    ),
    "sites": (
        lambda captured: sweep_over(captured, cw.sites("z", layer=":", head=":")),
        r"sites: 6 of them → 4, from number 4 on: mlp_out\[layer=0\] → nothing",
    ),
    "metric": (
        lambda captured: sweep_over(captured, metric=cw.logit_diff(answer=7, wrong=8)),
        r"metrics\[0\]\[3\]: \[9\] → \[8\]",
    ),
    "batches": (
        lambda captured: sweep_over(captured, base=[captured.run(input_ids=prompts(1, 2))] * 2),
        r"batches: 1 of them → 2",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_changed_sweep_is_refused_with_what_differs(
    captured: Model, sweep: Sweep, tmp_path: Path, what: str
) -> None:
    sweep.run(out=tmp_path)
    before = (tmp_path / FILE).read_bytes()
    make, message = OTHERS[what]
    with pytest.raises(SweepError, match="cannot go on as this sweep") as caught:
        make(captured).run(out=tmp_path, resume=True)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "order of worlds" not in str(caught.value)
    assert (tmp_path / FILE).read_bytes() == before


def test_changed_functions_are_refused(captured: Model, tmp_path: Path) -> None:
    def metric_with(token: int) -> Any:
        return lambda outputs: outputs.logits[:, -1, token]

    sweep_over(captured, metric=metric_with(3), source=lambda value: value * 2).run(out=tmp_path)
    sweep_over(captured, metric=metric_with(3), source=lambda value: value * 2).run(out=tmp_path, resume=True)
    with pytest.raises(SweepError, match=r"metrics\[0\]"):
        sweep_over(captured, metric=metric_with(4), source=lambda value: value * 2).run(
            out=tmp_path, resume=True
        )
    with pytest.raises(SweepError, match=r"batches\[0\]\.patch"):
        sweep_over(captured, metric=metric_with(3), source=lambda value: value * 3).run(
            out=tmp_path, resume=True
        )


GLOBAL = [0.1]


def shifted(value: torch.Tensor) -> torch.Tensor:
    return value + GLOBAL[0]


def test_a_function_whose_data_changed_is_refused_with_what_changed(
    captured: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "GLOBAL", [0.1])
    heads = cw.sites("z", layer=":", head=":", pos=":")
    with pytest.raises(Stop):
        sweep_over(captured, heads, source=shifted).run(out=tmp_path, max_memory="30KiB", progress=cut_off(2))
    GLOBAL[0] = 2.0
    with pytest.raises(SweepError, match=r"batches\[0\]\.patch\[1\]\.GLOBAL: \[0\.1\] → \[2\.0\]"):
        sweep_over(captured, heads, source=shifted).run(out=tmp_path, resume=True)
    GLOBAL[0] = 0.1
    resumed = sweep_over(captured, heads, source=shifted).run(out=tmp_path, resume=True)
    assert resumed.ledger.resumed > 0
    assert resumed.equals(sweep_over(captured, heads, source=shifted).run(max_memory="30KiB"))


def unidentified() -> Callable[[torch.Tensor], torch.Tensor]:
    numbers = iter([1.0] * 1000)
    return lambda value: value * next(numbers)


def test_what_cannot_be_identified_is_refused_before_anything_is_computed(
    captured: Model, tmp_path: Path
) -> None:
    calls: list[int] = []
    kept = unidentified()

    def reading(value: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return kept(value)

    sweep = sweep_over(captured, source=reading)
    with pytest.raises(IdentityError, match="the intervention 'reading' cannot be stored") as caught:
        sweep.run(out=tmp_path / "store")
    assert "kept → numbers: a list_iterator, which is used up as it is read" in str(caught.value)
    assert "cw.intervention(function, key=...)" in str(caught.value)
    assert calls == []
    assert not (tmp_path / "store").exists()
    assert sweep.run().equals(sweep_over(captured, source=lambda value: value).run())


def test_a_metric_and_a_patch_of_the_base_that_cannot_be_identified_are_refused(
    captured: Model, tmp_path: Path
) -> None:
    kept = unidentified()

    def read(outputs: Any) -> torch.Tensor:
        return kept(outputs.logits[:, -1, 7])

    with pytest.raises(IdentityError, match=r"the metric 'read' .*cw\.metric\(function, key=\.\.\.\)"):
        sweep_over(captured, metric=read).run(out=tmp_path)
    base = captured.run(input_ids=prompts(1, 2)).fork()
    base.patch(("z", 0), kept)
    with pytest.raises(IdentityError, match=r"the patch at z\[layer=0\] .*cw\.intervention"):
        sweep_over(captured, base=base).run(out=tmp_path)
    assert sweep_over(captured, base=base, metric=read).run().table.isfinite().all()
    assert list(tmp_path.iterdir()) == []


def test_a_key_names_what_cannot_be_identified(captured: Model, tmp_path: Path) -> None:
    def sweep(key: str, metric_key: str = "m", base_key: str = "b") -> Sweep:
        base = captured.run(input_ids=prompts(1, 2)).fork()
        base.patch(("z", 0), cw.intervention(unidentified(), key=base_key))
        kept = unidentified()
        return sweep_over(
            captured,
            base=base,
            source=cw.intervention(unidentified(), key=key),
            metric=cw.metric(lambda outputs: kept(outputs.logits[:, -1, 7]), key=metric_key, name="seven"),
        )

    whole = sweep("times one").run(out=tmp_path)
    assert whole.metrics == ("seven",)
    assert sweep("times one").run(out=tmp_path, resume=True).equals(whole)
    for other, line in (
        (sweep("times two"), r"batches\[0\]\.patch\[1\]: key 'times one' → key 'times two'"),
        (sweep("times one", metric_key="n"), r"metrics\[0\]\[1\]: key 'm' → key 'n'"),
        (sweep("times one", base_key="c"), r"batches\[0\]\.base: .*"),
    ):
        with pytest.raises(SweepError, match=line):
            other.run(out=tmp_path, resume=True)


@pytest.mark.parametrize("key", ["", "  ", 3, None])
def test_a_key_says_something(key: Any) -> None:
    said = "a key is a text that names a function" if isinstance(key, str) else "`key` is .* expected a text"
    with pytest.raises(cw.ConewiseError, match=said):
        cw.intervention(torch.abs, key=key)
    if key is not None:  # a metric has one where a run is to be resumed
        with pytest.raises(cw.ConewiseError, match=said):
            cw.metric(torch.abs, key=key)


def test_a_key_is_that_of_a_function() -> None:
    named: Any
    for named in (cw.intervention, cw.metric):
        with pytest.raises(ArgumentError, match="`function` is int 3; expected a function"):
            named(3, key="three")


def test_runs_that_are_put_in_are_told_by_all_that_they_are(captured: Model, tmp_path: Path) -> None:
    """Their patches too, not just their inputs."""
    run = captured.run(input_ids=prompts(3, 2))
    patched = run.fork()
    patched.patch(("z", 0), "zero")
    sweep_over(captured, source=cw.resample(run)).run(out=tmp_path)
    with pytest.raises(SweepError, match=r"batches\[0\]\.patch\[2\]: Run .* → RunWorld"):
        sweep_over(captured, source=cw.resample(patched)).run(out=tmp_path, resume=True)


def test_another_program_with_the_same_weights_is_refused(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.lin, self.scale, self.shift = nn.Linear(4, 4), scale, torch.ones(4)
            nn.init.eye_(self.lin.weight)
            nn.init.zeros_(self.lin.bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = torch.relu(self.lin(x)) * self.scale + self.shift
            return out

    def sweep(module: Scaled) -> Sweep:
        captured = cw.capture(module, torch.zeros(2, 4))
        # A metric that is the same in both.
        return sweep_over(
            captured, [cw.site("lin")], base=captured.run(torch.zeros(2, 4)), source="zero", metric=zero
        )

    def zero(outputs: torch.Tensor) -> torch.Tensor:
        return outputs[:, 0] * 0

    sweep(Scaled(2.0)).run(out=tmp_path)
    sweep(Scaled(2.0)).run(out=tmp_path, resume=True)
    with pytest.raises(SweepError, match=r"program: \w+\.\.\. → \w+\.\.\."):
        sweep(Scaled(3.0)).run(out=tmp_path, resume=True)
    shifted = Scaled(2.0)
    shifted.shift = torch.zeros(4)
    with pytest.raises(SweepError, match=r"constants: \w+\.\.\. → \w+\.\.\."):
        sweep(shifted).run(out=tmp_path, resume=True)


def test_another_number_of_threads_is_refused(sweep: Sweep, tmp_path: Path) -> None:
    sweep.run(out=tmp_path)
    torch.set_num_threads(2)
    try:
        with pytest.raises(SweepError, match=r"machine\.threads: 1 → 2"):
            sweep.run(out=tmp_path, resume=True)
    finally:
        torch.set_num_threads(1)


def test_a_baseline_that_computes_something_else_is_refused(
    captured: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = {"scale": [1.0]}

    class Data:
        __slots__ = ()

        def __call__(self, value: torch.Tensor) -> torch.Tensor:
            return value * len(hidden["scale"])

    def scaled(outputs: Any, data: Data = Data()) -> torch.Tensor:  # noqa: B008
        return data(outputs.logits[:, -1, 3])

    sweep_over(captured, metric=scaled).run(out=tmp_path)
    hidden["scale"].append(2.0)
    changed = sweep_over(captured, metric=scaled)
    stored = json.loads((tmp_path / MANIFEST).read_text())["sweep"]
    monkeypatch.setattr("conewise.sweeps.sweep.provenance", lambda *_, **__: stored)
    with pytest.raises(SweepError, match=r"the base run of batch 0 has the metrics .* now, and had"):
        changed.run(out=tmp_path, resume=True)


def test_a_second_run_in_the_same_folder_is_refused(sweep: Sweep, tmp_path: Path) -> None:
    message = ""

    def meanwhile(done: int, total: int) -> None:
        nonlocal message
        with pytest.raises(SweepError) as caught:
            sweep.run(out=tmp_path, resume=True)
        message = str(caught.value)

    whole = sweep.run(out=tmp_path, progress=meanwhile)
    assert message.startswith(f"another run is using the store in {tmp_path}. Wait until it has ended")
    assert sweep.run(out=tmp_path, resume=True).equals(whole)


def test_a_second_process_in_the_same_folder_is_refused(sweep: Sweep, tmp_path: Path) -> None:
    script = (
        "import sqlite3, sys\n"
        f"connection = sqlite3.connect({str(tmp_path / FILE)!r}, timeout=0)\n"
        "try:\n    connection.execute('BEGIN IMMEDIATE')\n"
        "except sqlite3.OperationalError as error:\n    print(error)\n"
    )
    said = []
    sweep.run(
        out=tmp_path,
        progress=lambda done, total: said.append(
            subprocess.check_output([sys.executable, "-c", script], text=True)
        ),
    )
    assert said == ["database is locked\n"]


# -- interruptions -------------------------------------------------------------------------------


def test_ctrl_c_leaves_a_store_that_goes_on_and_says_how(captured: Model, tmp_path: Path) -> None:
    sweep = sweep_over(captured, cw.sites("z", layer=":", head=":", pos=":"))
    with pytest.raises(KeyboardInterrupt) as caught:
        sweep.run(out=tmp_path, evaluator="serial", progress=cut_off(16, KeyboardInterrupt))
    (note,) = caught.value.__notes__
    assert note == (
        f"16 of 24 cells are stored in {tmp_path}; the same run with resume=True goes on from there."
    )
    assert sweep.run(out=tmp_path, resume=True).equals(sweep.run(evaluator="serial"))


def test_a_metric_that_fails_midway_leaves_what_was_done(captured: Model, tmp_path: Path) -> None:
    calls = []

    def fails(outputs: Any) -> Any:
        calls.append(1)
        return outputs.logits[:, -1, 3] if len(calls) < 20 else "nonsense"

    sweep = sweep_over(captured, cw.sites("z", layer=":", head=":", pos=":"), metric=fails)
    with pytest.raises((MetricError, TypeError, ValueError)) as caught:
        sweep.run(out=tmp_path, evaluator="serial")
    assert "16 of 24 cells are stored" in caught.value.__notes__[0]


def test_a_full_disk_keeps_what_was_stored(captured: Model, tmp_path: Path) -> None:
    """Files may not grow past a limit, which SQLite meets as it meets a full disk."""
    sweep = sweep_over(captured, cw.sites("z", layer=":", head=":", pos=":"))
    whole = sweep.run(evaluator="serial")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(done: int, total: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))

    try:
        with pytest.raises(
            SweepError,
            match=r"nothing more can be stored in .*Make room on that disk, then go on. 16 of 24 cells",
        ):
            sweep.run(out=tmp_path, evaluator="serial", progress=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert rows(tmp_path) == [(0, 0)]
    resumed = sweep.run(out=tmp_path, resume=True)
    assert resumed.ledger.resumed == 16
    assert resumed.equals(whole)


def test_a_disk_that_is_full_from_the_start_can_be_used_later(sweep: Sweep, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(SweepError, match=r"nothing more can be stored in .*0 of 6 cells"):
            sweep.run(out=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sweep.run(out=tmp_path).equals(sweep.run())


def test_a_manifest_that_cannot_be_written_is_written_by_the_next_run(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(store, "write_whole", full)
        with pytest.raises(SweepError, match=r"job\.json cannot be written: No space left on device\."):
            sweep.run(out=tmp_path)
    assert not (tmp_path / MANIFEST).exists()
    sweep.run(out=tmp_path, resume=True)
    assert json.loads((tmp_path / MANIFEST).read_text())["cells"] == 6


# -- stores that are not sound -------------------------------------------------------------------


def test_something_else_under_the_stores_name_is_left_as_it_is(sweep: Sweep, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"some text of yours, which is no database\n" * 100)
    before = (tmp_path / FILE).read_bytes()
    for resume in (True, False):
        with pytest.raises(SweepError, match="is not a sweep's store, or its first page is damaged"):
            sweep.run(out=tmp_path, resume=resume)
    assert (tmp_path / FILE).read_bytes() == before


def test_another_programs_database_is_left_as_it_is(sweep: Sweep, tmp_path: Path) -> None:
    change(tmp_path, "CREATE TABLE yours (thing TEXT)")
    before = (tmp_path / FILE).read_bytes()
    for resume in (True, False):
        with pytest.raises(SweepError, match="is not a sweep's store"):
            sweep.run(out=tmp_path, resume=resume)
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize(("version", "word"), [(FORMAT.version + 1, "newer"), (FORMAT.oldest - 1, "older")])
def test_a_store_of_another_format_is_refused(sweep: Sweep, tmp_path: Path, version: int, word: str) -> None:
    sweep.run(out=tmp_path)
    change(tmp_path, f"PRAGMA user_version = {version}")
    expected = f"'conewise store' of format {version}, and conewise .* reads format 2. .* {word} conewise"
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(FormatError, match=expected):
        sweep.run(out=tmp_path, resume=True)
    assert (tmp_path / FILE).read_bytes() == before


def test_releases_of_one_series_go_on_with_each_others_stores(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conewise.jobs.digests.__version__", "0.1.0")
    result = sweep.run(out=tmp_path)
    monkeypatch.setattr("conewise.jobs.digests.__version__", "0.1.17")
    assert sweep.run(out=tmp_path, resume=True).equals(result)
    for other in ("0.2.0", "0.1.1.dev3"):
        monkeypatch.setattr("conewise.jobs.digests.__version__", other)
        with pytest.raises(SweepError, match=rf"machine\.conewise: 0\.1 → {other.removesuffix('.0')}\n"):
            sweep.run(out=tmp_path, resume=True)


def test_a_folder_that_is_a_file_is_refused(sweep: Sweep, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SweepError, match="cannot be a folder for a sweep's store: File exists"):
        sweep.run(out=tmp_path / "file")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_store_that_is_no_file_is_refused(
    sweep: Sweep, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / FILE)
    with pytest.raises(SweepError, match="is not a sweep's store"):
        sweep.run(out=tmp_path)


@pytest.mark.parametrize("table", ["chunks", "plans"])
@pytest.mark.parametrize("answer", [7, 8])
def test_what_was_stored_by_another_run_is_refused(
    captured: Model, tmp_path: Path, table: str, answer: int
) -> None:
    """Even where it asked the same: a store holds the numbers of one run."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    sweep_over(captured, metric=cw.logit_diff(answer=answer, wrong=9)).run(out=other)
    sweep = sweep_over(captured)
    sweep.run(out=mine)
    change(mine, f"ATTACH '{other / FILE}' AS other", f"REPLACE INTO {table} SELECT * FROM other.{table}")
    with pytest.raises(SweepError, match=r"batch 0 .* it is damaged, or from another run"):
        sweep.run(out=mine, resume=True)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "UPDATE chunks SET numbers = zeroblob(length(numbers))",
            "chunk 0 of batch 0 does not have the checksum",
        ),
        ("UPDATE chunks SET piece = 7", "chunk 7 of batch 0 does not have the checksum"),
        ("UPDATE plans SET body = '{}'", "the plan of batch 0 does not have the checksum"),
        ("UPDATE manifest SET body = '{}'", "its manifest does not have the checksum"),
        ("DELETE FROM manifest", "its manifest does not have the checksum"),
        ("DROP TABLE chunks", "no such table: chunks"),
    ],
)
def test_changed_rows_are_found(sweep: Sweep, tmp_path: Path, statement: str, message: str) -> None:
    sweep.run(out=tmp_path)
    change(tmp_path, statement)
    with pytest.raises(SweepError, match="is damaged: ") as caught:
        sweep.run(out=tmp_path, resume=True)
    assert message in str(caught.value)
    assert "Put a sound copy in its place, or start again in another folder." in str(caught.value)


def test_a_cut_file_is_found_wherever_it_is_cut(sweep: Sweep, tmp_path: Path) -> None:
    sweep.run(out=tmp_path)
    whole = (tmp_path / FILE).read_bytes()
    for length in (0, 1, 50, 100, 1000, 4096, 8192, len(whole) - 1):
        (tmp_path / FILE).write_bytes(whole[:length])
        with pytest.raises(SweepError, match=r"is damaged|is not a sweep's store"):
            sweep.run(out=tmp_path, resume=True)
        assert (tmp_path / FILE).read_bytes() == whole[:length]
    (tmp_path / FILE).unlink()
    with pytest.raises(SweepError, match=r"it is missing or empty, and job\.json beside it tells of a run"):
        sweep.run(out=tmp_path, resume=True)


def test_flipped_bytes_are_found_or_do_not_matter(sweep: Sweep, tmp_path: Path) -> None:
    """No flip may change a number; those in space that nothing uses may go unseen."""
    whole = sweep.run(out=tmp_path)
    sound = (tmp_path / FILE).read_bytes()
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(0, len(sound), (50,), generator=generator).tolist()
    places += range(0, 100, 10)  # the header
    used = [place for place in range(len(sound)) if sound[place]]
    places += [used[pick] for pick in torch.randint(0, len(used), (40,), generator=generator).tolist()]
    found = 0
    for place in places:
        flipped = bytearray(sound)
        flipped[place] ^= 0x55
        (tmp_path / FILE).write_bytes(flipped)
        try:
            assert sweep.run(out=tmp_path, resume=True).equals(whole), place
        except SweepError:
            found += 1
    assert found > 30


def test_the_manifest_tells_what_was_run(sweep: Sweep, tmp_path: Path) -> None:
    sweep.run(out=tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert manifest["format"] == FORMAT.version
    assert manifest["sweep"] == json.loads(json.dumps(sweep.provenance()))
    assert manifest["machine"]["threads"] == 1
    ((plan,),) = rows(tmp_path, "SELECT body FROM plans")
    assert json.loads(plan)["chunks"] == [6]
    assert json.loads(plan)["evaluator"] == "wavefront"


def changed(folder: Path, table: str, column: str, change: Callable[[Any], Any]) -> None:
    """Change what a store holds, with checksums that fit."""
    body = json.loads(body_of(folder / FILE, table, column))
    reseal(folder / FILE, table, column, json.dumps(change(body)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: [], "its manifest is a list, where an object is expected"),
        (lambda body: {key: body[key] for key in body if key != "cells"}, "its manifest has no cells"),
        (lambda body: {**body, "sweep": 3}, "its manifest.sweep is a whole number, where an object"),
        (lambda body: {**body, "cells": "all"}, "its manifest.cells is a text, where a whole number"),
    ],
)
def test_a_manifest_of_another_form_is_damage(
    sweep: Sweep, tmp_path: Path, change: Callable[[Any], Any], said: str
) -> None:
    sweep.run(out=tmp_path)
    changed(tmp_path, "manifest", "body", change)
    with pytest.raises(SweepError, match=rf"is damaged: .*{said}"):
        sweep.run(out=tmp_path, resume=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: {**body, "chunks": [1]}, "the plan of batch 0 is not one of 6 worlds"),
        (lambda body: {**body, "chunks": [7, -1]}, "the plan of batch 0 is not one of 6 worlds"),
        (lambda body: {**body, "chunks": 6}, "plan.chunks is a whole number, where a list"),
        (lambda body: {**body, "evaluator": "magic"}, "the plan of batch 0 is not one of 6 worlds"),
        (lambda body: {**body, "base": ["x"]}, "the plan of batch 0 cannot be read"),
        (lambda body: {}, "the plan has no evaluator"),
    ],
)
def test_a_plan_of_another_form_is_damage(
    sweep: Sweep, tmp_path: Path, change: Callable[[Any], Any], said: str
) -> None:
    sweep.run(out=tmp_path)
    changed(tmp_path, "plans", "body", change)
    with pytest.raises(SweepError, match=rf"is damaged: .*{said}"):
        sweep.run(out=tmp_path, resume=True)


@pytest.mark.parametrize(
    "shape", [[], [12], [12, 1, 1], [6, 2], [2, 6, 1], [6, 2, 1], ["6", 1, 2], [6, 1, -2]]
)
def test_a_chunk_of_another_shape_is_damage(sweep: Sweep, tmp_path: Path, shape: list[Any]) -> None:
    sweep.run(out=tmp_path)
    changed(tmp_path, "chunks", "shape", lambda _: shape)
    with pytest.raises(SweepError, match="is damaged: "):
        sweep.run(out=tmp_path, resume=True)


@pytest.mark.parametrize(
    ("table", "row"),
    [("manifest", "'', ''"), ("plans", "number, '', ''"), ("chunks", "number, 0, '', '', ''")],
)
def test_a_store_of_countless_rows_is_refused_before_they_are_read(
    sweep: Sweep, tmp_path: Path, table: str, row: str
) -> None:
    sweep.run(out=tmp_path)
    count = 200_000
    change(
        tmp_path,
        "WITH RECURSIVE counted(number) AS "
        f"(SELECT 1000 UNION ALL SELECT number + 1 FROM counted LIMIT {count}) "
        f"INSERT INTO {table} SELECT {row} FROM counted",
    )
    tracemalloc.start()
    try:
        with pytest.raises(SweepError, match="does not have the checksum"):
            sweep.run(out=tmp_path, resume=True)
        assert tracemalloc.get_traced_memory()[1] < 50 * count
    finally:
        tracemalloc.stop()


def test_a_store_that_is_a_link_to_nowhere_is_not_followed(sweep: Sweep, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE).symlink_to(elsewhere)
    with pytest.raises(SweepError, match=r"is a link that leads nowhere, and it is not followed: remove it"):
        sweep.run(out=tmp_path / "run")
    assert not elsewhere.exists()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [FILE]
