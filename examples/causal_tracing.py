"""Causal tracing: noise on one word's embedding, and one clean state at a time put back."""

import conewise as cw

loaded = cw.load("tiny")
tokenizer = loaded.tokenizer
prompt = tokenizer("When Mary and John went to the store, John gave a drink to", return_tensors="pt")
words = tokenizer.convert_ids_to_tokens(prompt.input_ids[0])
mary, john = tokenizer.encode(" Mary John", add_special_tokens=False)
second_john = len(words) - 1 - words[::-1].index("John")

model = cw.capture(loaded)  # with its tokenizer: figures show words
trace = model.causal_trace(
    prompt.input_ids,
    subject=[second_john],
    metric=cw.logit_diff(answer=mary, wrong=john),
    kind="resid_pre",
    noise=1.0,
    n=16,
).run()
print(trace)

shares = (trace.values - trace.corrupted) / (trace.clean - trace.corrupted)
print("restored share of the difference, by word and layer:")
print(f"{'':8}" + "".join(f"  layer {layer}" for layer in trace.layers))
for position in trace.positions:
    if shares[:, position].abs().max() > 0.1:
        row = "".join(f"{float(share):9.2f}" for share in shares[:, position])
        print(f"{words[position]:8}{row}")

assert trace.verify(n=8).ok

figure = trace.plot()  # figure.show() opens it in a browser
