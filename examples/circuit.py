"""From every connection of a small language model to a circuit: the few that say who is given the drink."""

import conewise as cw

loaded = cw.load("tiny")
texts = [f"When Mary and John went to the store, {giver} gave a drink to" for giver in ("John", "Mary")]
clean, corrupted = loaded.tokenizer(texts, return_tensors="pt").input_ids.split(1)
mary, john = loaded.tokenizer.encode(" Mary John", add_special_tokens=False)

model = cw.capture(loaded.module, input_ids=clean)
pair = {
    "base": model.run(input_ids=clean),
    "source": model.run(input_ids=corrupted),
    "metric": cw.logit_diff(answer=mary, wrong=john),
}
edges = model.sweep(model.edges(), **pair).run()  # each patched in a world of its own
for cell, effect, _ in edges.strongest(top=5):
    print(f"{cell.name:16} {effect:+.2f}")

circuit = edges.circuit(top=20)
found = circuit.evaluate(**pair)  # all other edges are patched at once
print(f"{len(circuit.edges)} of {len(edges.cells)} edges: {found.faithfulness:.2f} of the model's answer")
figure = circuit.plot()  # figure.show() opens it in a browser; circuit.report(path) writes a page

assert found.faithfulness > 0.5
