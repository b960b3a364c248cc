"""Five tokens, written while a vector is added to the residual stream; and the same by a plain hook."""

import torch

import conewise as cw

loaded = cw.load("tiny")
prompt = "When Mary and John went to the store, John gave a drink to"
model = cw.capture(loaded)
run, other = model.run(prompt), model.run(prompt.replace("John gave", "Mary gave"))
vector = (other["resid_post", 2] - run["resid_post", 2])[0, -1]

for scale in (0.0, 1.0, 3.0):
    written = model.generate(prompt, 5, patches=[(("resid_post", 2), cw.add(vector, scale))])
    print(f"{scale}: {written}")


def hook(_, __, value):
    return value + 3.0 * vector


tokens = run.inputs["input_ids"]
handle = loaded.module.get_submodule("model.layers.2").register_forward_hook(hook)
by_hand = loaded.module.generate(
    tokens, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(tokens)
)
handle.remove()
assert torch.equal(written.ids, by_hand)
