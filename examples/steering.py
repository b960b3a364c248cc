"""Five tokens, written while a vector is added to the residual stream; and the same by a plain hook."""

import torch

import conewise as cw

loaded = cw.load("tiny")
prompt = "When Mary and John went to the store, John gave a drink to"
tokens = loaded.tokenizer(prompt, return_tensors="pt").input_ids
model = cw.capture(loaded.module, input_ids=tokens)

other = loaded.tokenizer(prompt.replace("John gave", "Mary gave"), return_tensors="pt").input_ids
vector = (model.run(input_ids=other)["resid_post", 2] - model.run(input_ids=tokens)["resid_post", 2])[0, -1]

for scale in (0.0, 1.0, 3.0):
    written = model.generate(
        prompt, 5, patches=[(("resid_post", 2), cw.add(vector, scale))], tokenizer=loaded.tokenizer
    )
    print(f"{scale}: {written}")


def hook(_, __, value):
    return value + 3.0 * vector


handle = loaded.module.get_submodule("model.layers.2").register_forward_hook(hook)
by_hand = loaded.module.generate(
    tokens, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(tokens)
)
handle.remove()
assert torch.equal(written.ids, by_hand)
