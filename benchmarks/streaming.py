"""Sweeps over a model that is larger than the card: streamed weights, resident ones, hand-batched code.

    python -m benchmarks.streaming            # on a CUDA device: the 32B shape in 24 GiB
    python -m benchmarks.streaming --check    # streamed equals resident, bit for bit, on small models

Each line is printed as soon as it is known. One layer is built, and stands for all of them: each is moved
as if it were its own, so times are those of a whole model, and host memory is that of a layer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import conewise as cw
from conewise.program.streamed_modules import stream_memory, without_parameters
from conewise.program.streaming import reads_of

GIB = 1 << 30
SHAPES = {
    "32B": {"layers": 64, "heads": 40, "kv": 8, "width": 5120, "inner": 27648},
    "70B": {"layers": 80, "heads": 64, "kv": 8, "width": 8192, "inner": 28672},
    "small": {"layers": 6, "heads": 4, "kv": 2, "width": 64, "inner": 192},
}
VOCABULARY, LENGTH = 32_000, 20


def tell(**line: Any) -> None:
    """Print one line."""
    print(json.dumps(line), flush=True)


def config(shape: str, layers: int | None = None) -> Any:
    """The configuration of a Llama of this shape."""
    one = SHAPES[shape]
    return transformers.LlamaConfig(
        hidden_size=one["width"], intermediate_size=one["inner"], num_hidden_layers=layers or one["layers"],
        num_attention_heads=one["heads"], num_key_value_heads=one["kv"], vocab_size=VOCABULARY,
        max_position_embeddings=2048,
    )  # fmt: skip


def model_of(settings: Any, device: str, dtype: torch.dtype, *, aliased: bool) -> Any:
    """A module with random weights on a device; with `aliased` all layers have those of the first."""
    with without_parameters():
        module: Any = transformers.LlamaForCausalLM._from_config(settings, dtype=dtype)
    made: dict[str, torch.Tensor] = {}
    generator = torch.Generator(device).manual_seed(0)
    for path, part in module.named_modules():
        for name, weight in [(n, w) for n, w in part._parameters.items() if w is not None]:
            key = f"{path}.{name}"
            if aliased and ".layers." in key:
                key = key.split(".layers.", maxsplit=1)[0] + "." + key.split(".layers.")[1].partition(".")[2]
            if key not in made:
                one = torch.empty(weight.shape, dtype=dtype, device=device)
                made[key] = one.fill_(1) if weight.ndim < 2 else one.normal_(0, 0.02, generator=generator)
            part._parameters[name] = nn.Parameter(made[key], requires_grad=False)
        for name, buffer in list(part._buffers.items()):
            part._buffers[name] = None if buffer is None else buffer.to(device)
    return module.eval()


def to_host(module: Any) -> Any:
    """The same module on the CPU; weights that were shared are shared there too."""
    held: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for name, weight in [(n, w) for n, w in part._parameters.items() if w is not None]:
            if weight.data_ptr() not in held:
                held[weight.data_ptr()] = weight.detach().cpu()
            part._parameters[name] = nn.Parameter(held[weight.data_ptr()], requires_grad=False)
        for name, buffer in list(part._buffers.items()):
            part._buffers[name] = None if buffer is None else buffer.cpu()
    return module


def timed(run: Callable[[], Any], device: str) -> tuple[float, Any]:
    """The seconds that something takes, and what it returns."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    found = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, found


def swept(model: Any, pair: Any, budget: int | None, sites: Any) -> Any:
    """A sweep, ready to run."""
    base, source = pair
    sweep = model.sweep(
        sites, base={"input_ids": base}, source={"input_ids": source}, metric=cw.logit_diff(7, 9)
    )
    return sweep, sweep.plan(budget, "wavefront")


def prompts(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A pair of prompts that differ at their second token."""
    generator = torch.Generator().manual_seed(1)
    base = torch.randint(0, VOCABULARY, (1, LENGTH), generator=generator)
    source = base.clone()
    source[0, 1] += 1
    return base.to(device), source.to(device)


def check(device: str) -> None:
    """Streamed equals resident on small models with other weights in each layer."""
    for dtype in (torch.float32, torch.bfloat16):
        if device == "cpu" and dtype == torch.bfloat16:
            continue
        resident = model_of(config("small"), device, dtype, aliased=False)
        pair = prompts(device)
        example = {"input_ids": pair[0].repeat(2, 1), "logits_to_keep": 1}
        host = stream_memory(
            to_host(model_of(config("small"), device, dtype, aliased=False)), torch.device(device)
        )
        models = [cw.capture(one, **example) for one in (host, resident)]
        for evaluator in ("serial", "wavefront"):
            found = [
                one.sweep(
                    [cw.sites("z", layer=":", head=":"), cw.sites("mlp_out", layer=":")],
                    base={"input_ids": pair[0]}, source={"input_ids": pair[1]}, metric=cw.logit_diff(7, 9),
                ).run(evaluator=evaluator)
                for one in models
            ]  # fmt: skip
            tell(
                check=f"{dtype} {evaluator}", equal=torch.equal(found[0].values, found[1].values),
                moved=found[0].ledger.moved_bytes, planned=found[0].plan.moved_bytes,
            )  # fmt: skip
        tell(check=f"{dtype} capture", bitwise=models[0].fidelity.bitwise, says=str(models[0].fidelity))
        tell(check=f"{dtype} checked by hooks", says=str(found[0].verify(n=2)))


def table(shape: str, budget: int, device: str, layers: int | None, *, resident: bool, by_hand: bool) -> None:
    """The rows of one shape."""
    settings, dtype = config(shape, layers), torch.bfloat16
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total))
    pair = prompts(device)
    sites = [cw.sites("z", layer=":", head=":"), cw.sites("mlp_out", layer=":")]
    example = {"input_ids": pair[0].repeat(2, 1), "logits_to_keep": 1}
    seconds, module = timed(lambda: to_host(model_of(settings, device, dtype, aliased=True)), device)
    tell(row="built", seconds=seconds, layers=settings.num_hidden_layers)
    if device == "cuda":
        torch.cuda.empty_cache()
    streamed = stream_memory(module, torch.device(device))
    seconds, model = timed(lambda: cw.capture(streamed, **example), device)
    stream = reads_of(model.program).stream
    assert stream is not None
    tell(
        row="capture",
        seconds=seconds,
        phases=model.phases,
        ring_GiB=stream.ring.size / GIB,
        weights_GiB=stream.total / GIB,
    )
    seconds, _ = timed(lambda: streamed(input_ids=pair[0], use_cache=False, logits_to_keep=1), device)
    seconds, _ = timed(lambda: streamed(input_ids=pair[0], use_cache=False, logits_to_keep=1), device)
    tell(row="one forward", seconds=seconds, GB_per_second=stream.total / 1e9 / seconds)
    one_forward = seconds
    room = budget - stream.ring.size - 3 * GIB
    seconds, (sweep, plan) = timed(lambda: swept(model, pair, room, sites), device)
    tell(row="planned", seconds=seconds, plan=str(plan))
    times = []
    for _ in range(2):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds, result = timed(lambda: sweep.run(plan=plan), device)
        times.append(seconds)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        reserved = torch.cuda.max_memory_reserved() if device == "cuda" else 0
        tell(
            row="streamed", seconds=seconds, worlds=plan.worlds, phases=result.ledger.phases,
            moved=result.ledger.moved_bytes, planned=plan.moved_bytes, allocated_GiB=peak / GIB,
            reserved_GiB=reserved / GIB, peak_planned=plan.peak_bytes, peak_measured=result.ledger.peak_bytes,
        )  # fmt: skip
    if device == "cuda":
        tell(row="kernels of a streamed run", **kernels(lambda: sweep.run(plan=plan)))
    tell(row="a hooked forward per site, streamed, scaled", ratio=one_forward * plan.worlds / min(times))
    if by_hand:
        seconds = hand_batched(streamed, pair, plan.worlds, max(plan.chunks))
        tell(row="hand-batched with the same stream, scaled", seconds=seconds, ratio=seconds / min(times))
    if resident and device == "cuda":
        values = result.values
        del result
        torch.cuda.empty_cache()
        model = cw.capture(model_of(settings, device, dtype, aliased=True), **example)
        sweep, plan = swept(model, pair, room, sites)
        own = []
        for _ in range(3):
            seconds, found = timed(lambda: sweep.run(plan=plan), device)
            own.append(seconds)
            tell(row="resident", seconds=seconds, equal=torch.equal(found.values, values))
        tell(row="streamed against resident", ratio=min(times) / min(own), first=times[0] / own[0])


def kernels(run: Callable[[], Any]) -> dict[str, float]:
    """The seconds in which kernels were at work in a run, beside all that it took."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        wall, _ = timed(run, "cuda")
    rows = [one for one in profile.key_averages() if not one.key.startswith(("Memcpy", "Memset"))]
    busy = sum(one.self_device_time_total for one in rows) / 1e6
    return {"kernel_seconds": busy, "seconds": wall, "share": busy / wall}


@torch.no_grad()
def hand_batched(module: Any, pair: Any, worlds: int, chunk: int) -> float:
    """Seconds of the batched code that people write: each world is a row of a batch, from the first layer.

    Its weights stream too. One chunk of rows is timed, in which each layer patches its heads, and scaled.
    """
    base = pair[0]
    count = min(chunk, worlds)

    def hooked() -> Any:
        hooks = []
        heads = module.config.num_attention_heads
        for number, layer in enumerate(module.model.layers):

            def patch(_: Any, args: Any, number: int = number) -> Any:
                value = args[0]
                rows = range(number * heads % count, min(number * heads % count + heads, count))
                split = value.unflatten(-1, (heads, -1))
                for head, row in enumerate(rows):
                    split[row, :, head] = 0
                return (split.flatten(-2),)

            hooks.append(layer.self_attn.o_proj.register_forward_pre_hook(patch))
        try:
            return module(input_ids=base.expand(count, -1), use_cache=False, logits_to_keep=1).logits
        finally:
            for hook in hooks:
                hook.remove()

    timed(hooked, base.device.type)
    seconds, _ = timed(hooked, base.device.type)
    return seconds * worlds / count


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--shape", default="32B", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--budget", type=float, default=24.0, help="GiB")
    parser.add_argument("--no-resident", action="store_true")
    parser.add_argument("--no-hand", action="store_true")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if given.check:
        check(device)
        return
    with torch.no_grad():
        table(
            given.shape, int(given.budget * GIB), device, given.layers,
            resident=not given.no_resident, by_hand=not given.no_hand,
        )  # fmt: skip


if __name__ == "__main__":
    main()
