"""512 latents of a sparse autoencoder, each patched in a world of its own, and compared with a plain hook."""

import torch

import conewise as cw

loaded = cw.load("tiny")
tokens = loaded.tokenizer(
    [
        "When Mary and John went to the store, Mary gave a drink to",
        "When Mary and John went to the store, John gave a drink to",
    ],
    return_tensors="pt",
).input_ids
mary, john = loaded.tokenizer.encode(" Mary John", add_special_tokens=False)
plain = cw.capture(loaded.module, input_ids=tokens[:1])

# Any two functions are a dictionary. These are random; `cw.dictionary(folder)` reads a trained one.
torch.manual_seed(0)
width = plain.run(input_ids=tokens[:1])["resid_post", 1].shape[-1]
into, out = torch.randn(width, 512) / width**0.5, torch.randn(512, width) / 512**0.5
model = plain.splice(("resid_post", 1), encode=lambda x: torch.relu(x @ into), decode=lambda z: z @ out)
print(model.splices["sae"])

base, source = model.run(input_ids=tokens[:1]), model.run(input_ids=tokens[1:])
sites = cw.sites("sae.latents", latent=":")
metric = cw.logit_diff(answer=mary, wrong=john)
result = model.sweep(sites, base=base, source=source, metric=metric).run()
for cell, effect, value in result.strongest(top=3):
    print(f"{cell.name}: {value:.4g} ({effect:+.3g})")
print(result.verify(16))

# The same by hand, for the strongest latent: the error term is of the latents as they were encoded.
latent = result.strongest(top=1)[0][0].at["latent"]
other = source["sae.latents"]


def hook(_, __, value):
    latents = torch.relu(value @ into)
    error = value - latents @ out
    latents[..., latent] = other[..., latent]
    return latents @ out + error


handle = loaded.module.get_submodule("model.layers.1").register_forward_hook(hook)
with torch.no_grad():
    logits = loaded.module(input_ids=tokens[:1]).logits[0, -1]
handle.remove()
assert abs(float(logits[mary] - logits[john]) - float(result.values[latent])) < 1e-4

assert torch.equal(base.logits, plain.run(input_ids=tokens[:1]).logits)  # spliced in, nothing changed

figure = result.plot()  # figure.show() opens it in a browser
