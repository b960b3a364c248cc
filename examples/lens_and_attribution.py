"""What the stream says after each layer, and which heads write the answer into it."""

import conewise as cw

model = cw.capture(cw.load("tiny"))
run = model.run("When Mary and John went to the store, John gave a drink to")
mary, john = model.tokenizer.encode(" Mary John", add_special_tokens=False)

lens = run.lens(tokens=[mary, john])
for row, layer in enumerate(lens.rows):
    token = lens.text(int(lens.top[row, 0, -1, 0]))
    print(f"{layer:>5}: {token:8} P(Mary) = {lens.probs[row, 0, -1, 0]:.3f}")
found = run.logit_attribution(cw.logit_diff(answer=mary, wrong=john))
for name, value in found.strongest(4):
    print(f"{name:>6} {value:+.2f}")

assert abs(float(found.tensor.sum() - found.numbers.sum())) < 1e-3  # the parts add up to the metric

table = lens.plot()  # the likeliest token after every layer, at every position; table.show() opens it
shares = found.plot()  # what each part of the model adds to the difference
looks = run.attention(1).plot()  # where the heads of layer 1 look
