"""A sweep: which heads and MLPs of a small language model tell it who is given the drink.

The model is one that comes with the package, trained on this task; nothing is downloaded.
"""

import conewise as cw

loaded = cw.load("tiny")
tokenizer = loaded.tokenizer
clean = tokenizer("When Mary and John went to the store, John gave a drink to", return_tensors="pt")
corrupted = tokenizer("When Mary and John went to the store, Mary gave a drink to", return_tensors="pt")
mary, john = tokenizer.encode(" Mary John", add_special_tokens=False)

model = cw.capture(loaded.module, input_ids=clean.input_ids)
sweep = model.sweep(
    cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":"),
    base=model.run(input_ids=corrupted.input_ids),  # the run that is changed
    source=model.run(input_ids=clean.input_ids),  # where the values come from
    metric=cw.logit_diff(answer=mary, wrong=john),
)

print(sweep.plan())  # what it will cost; nothing has been computed
result = sweep.run()
print()
print(result)  # the largest effects
print()
print(result.verify(n=20))  # every cell again, by hooks on the module itself

assert result.verify(n=20).ok
assert result.ledger.node_evaluations == result.plan.node_evaluations

figure = result.plot()  # figure.show() opens it in a browser, figure.write_html(path) keeps it
