"""Effects by gradients beside exact ones, head by head: how far the estimate is off."""

import conewise as cw

loaded = cw.load("tiny")
texts = [f"When Mary and John went to the store, {giver} gave a drink to" for giver in ("John", "Mary")]
clean, corrupted = loaded.tokenizer(texts, return_tensors="pt").input_ids.split(1)
mary, john = loaded.tokenizer.encode(" Mary John", add_special_tokens=False)

model = cw.capture(loaded.module, input_ids=clean)
pair = {
    "base": model.run(input_ids=corrupted),
    "source": model.run(input_ids=clean),
    "metric": cw.logit_diff(answer=mary, wrong=john),
}
heads = cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":")
exact = model.sweep(heads, **pair).run()
estimated = model.attribute(heads, method="atp", **pair).run()

both = cw.compare(estimated, exact)
print(both)
figure = both.plot()  # figure.show() opens it in a browser

assert exact.verify(n=4).ok  # the exact ones again, by hooks on the module itself
