"""`python -m benchmarks.second_process [--rounds 3]`: from `import torch` to a first sweep, once more.

The embedded model, or a random one of its shape where that is not installed, is loaded, run on a pair and
swept at one site: with no capture in the cache folder, then again. What that takes when warm (two runs and
the sweep) is subtracted. Seconds of the clock, and of the processor, which count on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CHILD = """
import json, sys, time
clocks = time.perf_counter, time.process_time
times = []
def note(): times.append([clock() for clock in clocks])
note()
import torch
note()
import conewise as cw
model = cw.load(sys.argv[1], device=sys.argv[2])
note()
def pair(seed):
    drawn = torch.randint(0, 40000, (1, 20), generator=torch.Generator().manual_seed(seed)).to(sys.argv[2])
    other = drawn.clone()
    other[0, 10] = 17
    return model.run(input_ids=drawn), model.run(input_ids=other)
def sweep(seed):
    base, source = pair(seed)
    site, metric = cw.site("resid_post", layer=20), cw.logit_diff(5, 6)
    return model.sweep(site, base=base, source=source, metric=metric).run(progress=False).values.tolist()
values = sweep(0)
note()
sweep(1), sweep(2)
note()
sweep(3)
note()
names = "import torch", "load", "first", "_", "warm"
spent = {name: [b - a for a, b in zip(*pair)] for name, pair in zip(names, zip(times, times[1:]))}
facts = {"values": values, "phases": model.phases, "transformers": "transformers" in sys.modules}
print(json.dumps({**spent, **facts}))
"""


def folder_of_a_model(where: Path) -> str:
    """The embedded model, or a folder with a random one of its shape."""
    from conewise.loading import DEFAULT, _embedded

    try:
        _embedded()
    except Exception:  # noqa: BLE001  # it is not installed
        import torch
        import transformers

        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        )
        make: Any = transformers.LlamaForCausalLM
        make(config).save_pretrained(where / "model")
        return str(where / "model")
    return DEFAULT


def main() -> None:
    """Print one line for each process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="")
    asked = parser.parse_args()
    import torch

    device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as temporary:
        where = Path(temporary)
        os.environ.setdefault("CONEWISE_CACHE", str(where / "cache"))
        environment = {"OMP_NUM_THREADS": "2", **os.environ}
        model, known = folder_of_a_model(where), None
        for number in range(1 + asked.rounds):
            command = [sys.executable, "-c", CHILD, model, device]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                print(done.stderr[-600:], flush=True)
                return
            found = json.loads(done.stdout.splitlines()[-1])
            known = found["values"] if known is None else known
            wall, work = (found["load"][i] + found["first"][i] - found["warm"][i] for i in (0, 1))
            parts = ", ".join(
                f"{name} {found[name][0]:.2f} s" for name in ("import torch", "load", "first", "warm")
            )
            which, phases = "again" if number else "first", json.dumps(found["phases"])
            print(f"{which}  {wall:.2f} s, processor {work:.2f} s ({parts})", flush=True)
            says = "imported" if found["transformers"] else "not imported"
            same = "equal" if found["values"] == known else "NOT equal"
            print(f"       transformers {says}, values {same}, {phases}", flush=True)


if __name__ == "__main__":
    main()
