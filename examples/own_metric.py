"""Several metrics in one sweep, one of them a plain function of the module's outputs."""

import conewise as cw

loaded = cw.load("tiny")
tokenizer = loaded.tokenizer
texts = [
    "When Mary and John went to the store, John gave a drink to",
    "When Mary and John went to the store, Mary gave a drink to",
]
clean = tokenizer(texts, return_tensors="pt").input_ids
answers = tokenizer.encode(" Mary John", add_special_tokens=False)


def rank(outputs):
    """How many tokens the model holds more likely than the answer, for each prompt."""
    logits = outputs.logits[:, -1]
    own = logits.gather(1, clean.new_tensor(answers)[:, None])
    return (logits > own).sum(1).float()


model = cw.capture(loaded.module, input_ids=clean)
source = model.run(input_ids=clean)
result = model.sweep(
    cw.sites("z", layer=":", head=":"),
    base=source,
    source="zero",  # each head's output is taken away
    metric=[
        cw.logit_diff(answer=answers, wrong=answers[::-1]),  # one answer for each prompt
        cw.prob(answers),
        cw.kl_to(source),
        rank,
    ],
).run()

for metric in result.metrics:
    cell, effect, value = result.strongest(metric, top=1)[0]
    print(f"{metric:10} most changed by zeroing {cell.name}: {value:.4g} ({effect:+.4g})")
print(result.to_dataframe(per_prompt=True).groupby("metric").size().to_string())

assert result.per_prompt.shape == (4, 16, 2)  # metric, cell, prompt
