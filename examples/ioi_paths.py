"""Path patching, as in the paper on indirect object identification (Wang et al., 2022): from the logits back.

A small language model says who is given the drink. Which heads reach the logits, other than through later
heads? Whom do these heads' queries, keys and values depend on? Nothing is downloaded.
"""

import conewise as cw

loaded = cw.load("tiny")
tokenizer = loaded.tokenizer
clean = tokenizer("When Mary and John went to the store, John gave a drink to", return_tensors="pt")
corrupted = tokenizer("When Mary and John went to the store, Mary gave a drink to", return_tensors="pt")
mary, john = tokenizer.encode(" Mary John", add_special_tokens=False)

model = cw.capture(loaded.module, input_ids=clean.input_ids)
pair = {
    "base": model.run(input_ids=clean.input_ids),  # the run that is changed
    "source": model.run(input_ids=corrupted.input_ids),  # where a sender's value comes from
    "metric": cw.logit_diff(answer=mary, wrong=john),
}


def strongest(title: str, result: cw.Result, count: int) -> list[str]:
    """Print what the paths that matter most do, and return their senders."""
    print(f"{title}: the difference is {float(result.base[0]):.2f}, and with a path patched")
    senders = []
    for cell, effect, value in result.strongest(top=count):
        senders.append(cell.places[0].edge.partition("->")[0])
        print(f"    {value:6.2f}  ({effect:+6.2f})  from {senders[-1]}")
    return senders


# As in the paper: between a head and the logits, other heads are frozen and MLPs are live.
to_logits = model.paths("a*.h*", "logits", freeze="attention", **pair).run()
movers = sorted(strongest("to the logits", to_logits, 5)[:4])
print()

# One step back: into the queries of these heads, all patched together; then their keys, their values.
found = {}
for slot, name in (("q", "queries"), ("k", "keys"), ("v", "values")):
    receivers = [[f"{mover}<{slot}>" for mover in movers]]
    result = model.paths(["input", "a0.h*", "m0"], receivers, freeze="attention", **pair).run()
    found[slot] = strongest(f"to the {name} of {', '.join(movers)}", result, 2)[0]
print()

# The name movers look for whom a head of layer 0 tells them. What does that head go by?
teller = found["q"]
for slot in ("q", "k", "v"):
    strongest(f"to {teller}<{slot}>", model.paths("input", f"{teller}<{slot}>", **pair).run(), 1)

assert movers == ["a1.h0", "a1.h1", "a1.h2", "a1.h3"]
assert teller == "a0.h2"
