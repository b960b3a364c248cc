"""What a plan says of memory is what a run takes: of torch's allocator, and of the process."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

import conewise as cw
from conewise.errors import BudgetError, SweepError
from conewise.model import Model
from conewise.sweeps.execution.executors import RUNNERS, PassRunner
from conewise.sweeps.execution.growth import SMALL, process_meter
from conewise.sweeps.execution.reading import SweepLedger
from conewise.sweeps.result import Result
from conewise.sweeps.sweep import Sweep
from tests.sweeps import small
from tests.sweeps.small import prompts, sweep_over

small_model = cache(small.model)
ROOT = Path(__file__).parents[2]
LENGTH, VOCABULARY, LAYERS, WIDTH = 32, 300, 2, 64
WITHIN = 0.03
"""How far a run may go beyond what was predicted, of torch's allocator; typically it is one in a thousand."""


# -- torch's allocator -----------------------------------------------------------------------------


def allocated(action: Callable[[], object]) -> int:
    """The most that `action` held at once of what torch's allocator gave it on the CPU.

    The profiler sees what operations take for themselves too. Only what was given out meanwhile counts.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        action()
    assert recorded.profiler is not None
    results: Any = recorded.profiler.kineto_results
    todo, events = list(results.experimental_event_tree()), []
    while todo:
        event = todo.pop()
        todo.extend(event.children)
        if event.typed[0] == _EventType.Allocation:
            events.append((event.start_time_ns, event.typed[1].ptr, event.typed[1].alloc_size))
    held: dict[int, int] = {}
    live = peak = 0
    for _, place, size in sorted(events):
        if size > 0:
            held[place] = size
            live += size
            peak = max(peak, live)
        else:
            live -= held.pop(place, 0)
    assert peak, "the profiler recorded no allocation"
    return peak


def test_allocations_are_seen_inside_of_operations() -> None:
    """Attention without a fused kernel: scores before and after the softmax."""
    query = torch.zeros(8, 64, 16)
    scores, values = 8 * 64 * 64 * 4, 8 * 64 * 16 * 4
    with torch.no_grad():
        taken = allocated(lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query))
    assert 2 * scores + values <= taken <= 2 * scores + 5 * values


hugging_face: Any = transformers


@cache
def gpt2() -> Model:
    config = hugging_face.GPT2Config(
        n_layer=LAYERS,
        n_head=8,
        n_embd=WIDTH,
        n_positions=LENGTH,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    return cw.capture(hugging_face.GPT2LMHeadModel(config).eval(), input_ids=ids(2))


@cache
def llama() -> Model:
    """In bfloat16, of which it converts much to float32; with a mask, which is of booleans."""
    config = hugging_face.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    module = hugging_face.LlamaForCausalLM(config).eval().to(torch.bfloat16)
    return cw.capture(module, input_ids=ids(2), attention_mask=mask(2))


def ids(batch: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def mask(batch: int) -> Tensor:
    seen = torch.ones(batch, LENGTH, dtype=torch.long)
    seen[0, : LENGTH // 4] = 0
    return seen


MODELS: dict[str, Callable[[], Model]] = {"gpt2": gpt2, "llama": llama}
WHOLE = sum(
    (cw.sites(kind, layer=":") for kind in ("attn_out", "resid_mid", "mlp_out")),
    cw.sites("resid_pre", layer=":"),
)
SITES: dict[str, Any] = {
    "heads": cw.sites("z", layer=":", head=":"),
    "positions": cw.sites("resid_pre", layer=":", pos=":"),
    "whole values": WHOLE,
    "lists of heads": [cw.site("z", layer=n, head=[h, h + 2, 7]) for n in range(LAYERS) for h in range(5)],
    "steered": cw.cells(
        cw.sites("resid_mid", layer=":"),
        sources={str(scale): cw.add(torch.linspace(-1, 1, WIDTH), scale) for scale in range(6)},
    ),
    "own values": cw.cells(
        cw.sites("mlp_out", layer=":"),
        sources={str(number): torch.full((16, LENGTH, WIDTH), number / 7) for number in range(6)},
    ),
}
METRICS: dict[str, Callable[[int], Any]] = {
    "difference": lambda batch: cw.logit_diff(1, 2),
    "probability": lambda batch: cw.prob(1),
    "cross entropy": lambda batch: cw.cross_entropy(ids(batch, 5)),
}
CASES = [
    ("gpt2", "whole values", "probability", "zero", "wavefront"),
    ("gpt2", "whole values", "difference", "noise", "wavefront"),
    ("gpt2", "lists of heads", "difference", "run", "wavefront"),
    ("gpt2", "heads", "cross entropy", "run", "wavefront"),
    ("llama", "positions", "difference", "run", "wavefront"),
    ("llama", "whole values", "difference", "function", "wavefront"),
    ("llama", "steered", "difference", "own", "wavefront"),
    ("gpt2", "own values", "difference", "own", "wavefront"),
    ("llama", "heads", "probability", "run", "serial"),
    ("llama", "whole values", "probability", "zero", "serial"),
]


def sweep_of(name: str, sites: str, metric: str, source: str, batch: int = 16) -> Sweep:
    captured: Model = MODELS[name]()
    masked = {} if name == "gpt2" else {"attention_mask": mask(batch)}
    sources: dict[str, Callable[[], Any]] = {
        "run": lambda: captured.run(input_ids=ids(batch, 2), **masked),
        "noise": lambda: cw.noise(0.5),
        "own": lambda: None,
        "function": lambda: lambda part: part * 2,
    }
    put = sources.get(source, lambda: source)()
    base = captured.run(input_ids=ids(batch, 1), **masked)
    swept: Sweep = captured.sweep(SITES[sites], base=base, source=put, metric=METRICS[metric](batch))
    return swept


@pytest.mark.parametrize(("name", "sites", "metric", "source", "evaluator"), CASES)
def test_the_predicted_peak_is_what_torch_allocates(
    name: str, sites: str, metric: str, source: str, evaluator: str
) -> None:
    sweep = sweep_of(name, sites, metric, source)
    sweep.run(evaluator=evaluator)
    predicted = sweep.plan(evaluator=evaluator).peak_bytes
    found = allocated(lambda: sweep.run(evaluator=evaluator))
    assert found <= (1 + WITHIN) * predicted
    assert predicted <= 1.1 * found


def test_a_serial_run_holds_to_its_budget_or_is_refused() -> None:
    sweep = sweep_over(small_model())
    least = sweep.plan(evaluator="serial").peak_bytes
    assert sweep.plan(evaluator="serial", max_memory=least).peak_bytes == least
    with pytest.raises(SweepError, match=rf"one world alone takes .* The least .* max_memory={least}"):
        sweep.run(evaluator="serial", max_memory=least - 1)


def test_one_batch_is_held_at_a_time_and_so_it_is_when_cells_are_checked() -> None:
    def swept(batches: int) -> Result:
        base, source = ([{"input_ids": ids(2, at + n)} for n in range(batches)] for at in (1, 90))
        sites = cw.sites("mlp_out", layer=":")
        return gpt2().sweep(sites, base=base, source=source, metric=cw.logit_diff(1, 2)).run(verify=1)

    swept(2)
    few, many = (allocated(partial(swept, count)) for count in (2, 8))
    assert many - few < 6 * ids(2).numel() * VOCABULARY  # far less than their logits


def budgeted(job: str, budget: int) -> object:
    """A job over runs that are there already, within a budget."""
    model = gpt2()
    given: dict[str, Any] = {"base": BASE(), "source": SOURCE(), "metric": cw.logit_diff(1, 2)}
    edges = model.edges(pos=[3, 30]).select(reader="m1")
    if job == "edges":
        return model.sweep(edges, **given).run(max_memory=budget)
    if job == "attribution":
        return model.attribute(model.edges(), **given, method="eap").run(max_memory=budget)
    if job == "search":
        return model.find_circuit(**given, threshold=1.0).run(max_memory=budget)
    if job == "evaluation":
        circuit = cw.Circuit.from_scores(model, dict.fromkeys(model.edges(), 1.0), top=20)
        return circuit.evaluate(**given, max_memory=budget)
    traced: dict[str, Any] = {"subject": [1], "metric": cw.prob(1), "n": 3, "pos": "30:"}
    return model.causal_trace(BASE(), **traced).run(max_memory=budget)


BASE = cache(lambda: gpt2().run(input_ids=ids(2, 1)))
SOURCE = cache(lambda: gpt2().run(input_ids=ids(2, 2)))


@pytest.mark.parametrize("job", ["edges", "attribution", "search", "evaluation", "trace"])
def test_a_small_budget_is_refused_with_the_least_that_would_do_and_that_is_held(job: str) -> None:
    with pytest.raises(
        BudgetError, match=r"more than the budget of 50.0 KiB\. The least .* max_memory="
    ) as told:
        budgeted(job, 50 * 1024)
    least = told.value.least
    with pytest.raises(BudgetError):
        budgeted(job, least - 1)
    budgeted(job, least)
    assert allocated(lambda: budgeted(job, least)) <= (1 + WITHIN) * least


def test_batches_of_several_lengths_are_refused_with_the_least_that_would_do_for_all() -> None:
    base = [{"input_ids": ids(count, count)} for count in (1, 4, 2)]
    sweep = gpt2().sweep(cw.sites("mlp_out", layer=":"), base=base, source="zero", metric=cw.prob(1))
    with pytest.raises(BudgetError) as told:
        sweep.run(max_memory=1000)
    assert len(sweep.run(max_memory=told.value.least).per_prompt[0, 0]) == 7
    with pytest.raises(BudgetError):
        sweep.run(max_memory=told.value.least - 1)


def test_a_plan_of_many_passes_keeps_a_few_of_them_ready() -> None:
    model = gpt2()
    sweep = model.sweep(
        cw.sites("z", layer=0, head=":", pos="16:"), base=BASE(), source=SOURCE(), metric=cw.logit_diff(1, 2)
    )
    with pytest.raises(BudgetError) as told:
        sweep.plan(max_memory=1)
    assert len(sweep.plan(told.value.least).chunks) == 128
    before = sum(isinstance(one, PassRunner) for one in gc.get_objects())
    sweep.run(max_memory=told.value.least)
    after = sum(isinstance(one, PassRunner) for one in gc.get_objects())
    assert after - before <= RUNNERS


# -- the process -----------------------------------------------------------------------------------


GROWING = """
import json, sys, torch, transformers
import conewise as cw
from tests.sweeps.test_sweep_memory import grown

config = transformers.GPT2Config(
    n_layer=3, n_head=8, n_embd=256, n_positions=128, vocab_size=200, bos_token_id=0, eos_token_id=0
)
one, other = torch.randint(0, 200, (2, 4, 128)).unbind(0)
model = cw.capture(transformers.GPT2LMHeadModel(config).eval(), input_ids=one)
base, source = model.run(input_ids=one), model.run(input_ids=other)
heads = cw.sites("z", layer=":", head=":")
sweep = model.sweep(heads, base=base, source=source, metric=cw.logit_diff(1, 2))
told = [grown(lambda: sweep.run(max_memory=budget)) for budget in map(int, sys.argv[1:])]
sys.stdout.write(json.dumps(told))
"""


def grown(run: Callable[[], Result]) -> dict[str, Any]:
    """What a run planned, what it measured, and what the process grew by; resets the process's record."""
    with process_meter() as meter:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        held = meter.held()
        result = run()
        return {
            "budget": result.plan.max_memory,
            "planned": result.plan.peak_bytes,
            "measured": result.ledger.peak_bytes,
            "grown": meter.record() - held,
            "chunks": len(result.plan.chunks),
        }


def _is_kept() -> bool:
    with process_meter() as meter:
        return meter.give_back is not None and os.access("/proc/self/clear_refs", os.W_OK)


@pytest.mark.skipif(not _is_kept(), reason="the process is kept to the plan where glibc gives memory back")
def test_the_process_grows_by_what_was_planned_and_keeps_its_budget() -> None:
    """In another process: this one has holes from other tests."""
    command = [sys.executable, "-c", GROWING, "100000000", "60000000", "100000000"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    told = json.loads(subprocess.check_output(command, cwd=ROOT, env=environment, text=True))
    assert [one["chunks"] for one in told] == [1, 2, 1]
    for one in told:
        assert one["planned"] <= one["budget"]
        assert one["grown"] <= one["budget"]
        assert one["grown"] <= 1.1 * one["planned"] + SMALL
        assert 0.7 * one["grown"] - SMALL <= one["measured"] <= one["grown"] + SMALL


# -- told --------------------------------------------------------------------------------------------


def test_a_result_says_what_was_planned_and_what_was_measured(tmp_path: Path) -> None:
    result = sweep_over(small_model()).run()
    assert result.ledger.peak_bytes is not None
    assert result.ledger.peak_bytes >= 0
    told = replace(result, ledger=replace(result.ledger, peak_bytes=3 << 20))
    planned = f"{result.plan.peak_bytes / 1024:.1f} KiB"
    assert f", peak memory 3.0 MiB (planned {planned})" in repr(told)
    loaded: Any = cw.open(told.save(tmp_path / "saved"))
    assert loaded.ledger == told.ledger
    assert loaded.ledger.peak_bytes == 3 << 20


def test_a_result_saved_without_a_measured_peak_is_loaded(tmp_path: Path) -> None:
    folder = sweep_over(small_model()).run().save(tmp_path / "saved")
    manifest = folder / "manifest.json"
    told = json.loads(manifest.read_text(encoding="utf-8"))
    for name in ("peak_bytes", "reserved_bytes"):
        del told["measured"][name]
    manifest.write_text(json.dumps(told), encoding="utf-8")
    loaded: Any = cw.open(folder)
    assert loaded.ledger.peak_bytes is None
    assert "peak memory" not in repr(loaded)


def test_the_most_of_several_batches_is_kept_and_a_resumed_run_measures_nothing(tmp_path: Path) -> None:
    ledger = SweepLedger()
    for peak, reserved in ((None, None), (5, 2), (3, None), (None, 7)):
        ledger.note_memory(peak, reserved)
    assert (ledger.peak_bytes, ledger.reserved_bytes) == (5, 7)
    sweep = sweep_over(small_model(), base=[{"input_ids": prompts(n, 2)} for n in (1, 3)], source="zero")
    assert sweep.run(out=tmp_path).ledger.peak_bytes is not None
    assert sweep.run(out=tmp_path, resume=True).ledger.peak_bytes is None
