"""A long run that is cut off, and goes on where it was; the result is the same in every bit."""

import tempfile
from pathlib import Path

import conewise as cw

loaded = cw.load("tiny")
tokenizer = loaded.tokenizer
clean = tokenizer("When Mary and John went to the store, John gave a drink to", return_tensors="pt").input_ids
corrupted = tokenizer(
    "When Mary and John went to the store, Mary gave a drink to", return_tensors="pt"
).input_ids
mary, john = tokenizer.encode(" Mary John", add_special_tokens=False)

model = cw.capture(loaded.module, input_ids=clean)
sweep = model.sweep(
    cw.sites("z", layer=":", head=":", pos=":"),
    base=model.run(input_ids=corrupted),
    source=model.run(input_ids=clean),
    metric=cw.logit_diff(answer=mary, wrong=john),
)


class PowerCutError(Exception):
    pass


def cut_off(done: int, cells: int) -> None:
    print(f"  {done} of {cells} cells", flush=True)
    if done > cells / 2:
        raise PowerCutError


with tempfile.TemporaryDirectory() as folder:
    store = Path(folder) / "run"
    try:
        sweep.run(out=store, max_memory="1MB", progress=cut_off)
    except PowerCutError:
        print("cut off; the finished chunks are in the store")
    result = sweep.run(out=store, max_memory="1MB", resume=True)
    print(f"resumed: {result.ledger.resumed} of {len(result.cells)} cells were there already")

assert 0 < result.ledger.resumed < len(result.cells)
assert result.equals(sweep.run(max_memory="1MB"))
