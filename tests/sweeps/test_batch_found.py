"""Which dimension is the batch, and which axis is a head, for modules whose inputs lie in unusual ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import conewise as cw
from conewise.errors import MetricError

VOCABULARY, WIDTH, HEADS = 13, 12, 3
EACH = WIDTH // HEADS


def tokens(*shape: int, seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def patched(module: nn.Module, path: str, base: dict[str, Tensor], source: dict[str, Tensor]) -> Tensor:
    """The module's output for `base`, with a submodule's output as it is for `source`: by hooks alone."""
    part, kept = module.get_submodule(path), list[Tensor]()
    with torch.no_grad():
        with part.register_forward_hook(lambda _, __, out: kept.append(out)):
            module(**source)
        with part.register_forward_hook(lambda _, __, ___: kept[0]):
            return module(**base)  # type: ignore[no-any-return]


def agree(
    module: nn.Module,
    make: Callable[[int], dict[str, Tensor]],
    path: str,
    read: Callable[[Tensor], Tensor],
    **capture: Any,
) -> None:
    """A sweep's logits of token 4 are those that hooks give, prompt by prompt; `read` takes them."""
    model = cw.capture(module, **make(0), **capture)
    base, source = model.run(**make(1)), model.run(**make(2))
    sweep = model.sweep([path], base=base, source=source, metric=cw.logit(4, pos=-1))
    expected = read(patched(module, path, make(1), make(2))).double()
    assert torch.equal(sweep.run(evaluator="serial").per_prompt[0, 0], expected)
    torch.testing.assert_close(sweep.run().per_prompt[0, 0], expected, rtol=0, atol=1e-5)


class Attention(nn.Module):
    """Attention of [..., pos, d_model] to a memory, or to itself."""

    def __init__(self, *, is_causal: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.is_causal = is_causal

    def forward(self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        seen = x if memory is None else memory
        q, k, v = (
            part.unflatten(-1, (HEADS, EACH)).transpose(-2, -3)
            for part in (self.q(x), self.k(seen), self.v(seen))
        )
        z = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=self.is_causal)
        return self.o(z.transpose(-2, -3).flatten(-2))  # type: ignore[no-any-return]


class Masked(nn.Module):
    """A mask [pos, pos] comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(VOCABULARY, WIDTH), Attention()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, mask: Tensor, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        return self.head(h + self.attention(h, mask))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("batch", "length"), [(3, 5), (4, 4), (1, 5)])
def test_the_batch_is_not_the_leading_size_of_a_mask(batch: int, length: int) -> None:
    def make(seed: int) -> dict[str, Tensor]:
        return {"mask": torch.ones(length, length).tril().bool(), "ids": tokens(batch, length, seed=seed)}

    agree(Masked(), make, "embed", lambda out: out[:, -1, 4])


def test_a_mask_as_long_as_the_batch_does_not_tie_positions_to_prompts() -> None:
    mask = torch.ones(4, 4).tril().bool()
    model = cw.capture(Masked(), mask=mask, ids=tokens(4, 4, seed=0))
    assert model.run(mask=mask[:3, :3], ids=tokens(2, 3, seed=1)).outputs.shape == (2, 3, VOCABULARY)


class Remembering(nn.Module):
    """A memory [entry, feature] that all prompts share comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(VOCABULARY, WIDTH), Attention()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, memory: Tensor, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        shared = memory.expand(h.shape[0], *memory.shape)
        return self.head(h + self.attention(h, memory=shared))  # type: ignore[no-any-return]


def test_the_batch_is_not_the_leading_size_of_a_memory() -> None:
    def make(seed: int) -> dict[str, Tensor]:
        return {"memory": numbers(4, WIDTH, seed=seed), "ids": tokens(3, 5, seed=seed)}

    agree(Remembering(), make, "embed", lambda out: out[:, -1, 4])


class Unbatched(nn.Module):
    """One prompt [pos, feature], causal."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(7, WIDTH), Attention(is_causal=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(h + self.attention(h[None])[0])  # type: ignore[no-any-return]


class UnbatchedRecurrent(nn.Module):
    """One prompt [pos, feature] through a recurrent layer."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(7, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(self.first(x))[0])  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.parametrize(
    "module", [Unbatched(), UnbatchedRecurrent(batch_first=True), UnbatchedRecurrent(batch_first=False)]
)
def test_one_prompt_of_features_without_a_batch_is_one_prompt(module: nn.Module) -> None:
    agree(module, lambda seed: {"x": numbers(5, 7, seed=seed)}, "first", lambda out: out[-1:, 4])


class RightToLeft(nn.Module):
    """Each entry along dimension 0 sees the later ones."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.head = first, nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).flip(0).cumsum(0).flip(0))  # type: ignore[no-any-return]


def test_what_is_computed_from_right_to_left_is_no_batch() -> None:
    embed = RightToLeft(nn.Embedding(VOCABULARY, WIDTH))
    agree(embed, lambda seed: {"x": tokens(5, seed=seed)}, "first", lambda out: out[-1:, 4])
    model = cw.capture(RightToLeft(nn.Linear(7, WIDTH)), numbers(5, 3, 7, seed=0))
    assert "batch_dim=1" in model.program.dimensions.doubt


class Codes(nn.Module):
    """Several tokens for each position, [pos, batch, codebook], given to sequence-first attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(VOCABULARY, WIDTH), nn.MultiheadAttention(WIDTH, HEADS)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, codes: Tensor) -> Tensor:
        h = self.embed(codes).sum(2)
        return self.head(h + self.attention(h, h, h, need_weights=False)[0])  # type: ignore[no-any-return]


def test_a_leading_size_that_attention_mixes_is_no_batch_though_nothing_else_varies() -> None:
    def make(seed: int) -> dict[str, Tensor]:
        return {"codes": tokens(5, 3, 4, seed=seed)}

    module = Codes()
    with pytest.raises(MetricError, match=r"not known which is the batch.*batch_dim=0.*batch_dim=1"):
        agree(module, make, "embed", lambda out: out[-1, :, 4])
    agree(module, make, "embed", lambda out: out[-1, :, 4], batch_dim=1)


class SequenceFirst(nn.Module):
    """Tokens [pos, batch] under a name that elsewhere is batch-first, with places told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(20, WIDTH)
        self.attention, self.head = Attention(is_causal=True), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        h = self.embed(input_ids) + self.places(torch.arange(input_ids.shape[0]))[:, None]
        return self.head(h + self.attention(h.transpose(0, 1)).transpose(0, 1))  # type: ignore[no-any-return]


def test_what_the_computation_shows_counts_more_than_a_name() -> None:
    agree(
        SequenceFirst(),
        lambda seed: {"input_ids": tokens(5, 3, seed=seed)},
        "embed",
        lambda out: out[-1, :, 4],
    )


class FixedBatch(nn.Module):
    """A batch of three, attention over positions, and attention over what each position unfolds to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.over, self.within = Attention(), Attention()
        self.register_buffer("rows", torch.randn(3, 1, WIDTH))
        self.parts = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids) + self.rows
        h = h + self.over(h)
        within = self.within(h.flatten(0, 1)[:, None] + self.parts).mean(1)
        return self.head(h + within.view(h.shape))  # type: ignore[no-any-return]


def test_positions_that_another_attention_leaves_apart_are_no_batch() -> None:
    agree(FixedBatch(), lambda seed: {"ids": tokens(3, 5, seed=seed)}, "embed", lambda out: out[:, -1, 4])


# -- heads -----------------------------------------------------------------------------------------


class HeadsFirst(nn.Module):
    """Heads in a dimension of their own, in front of the batch: [head, batch, pos, d_head]."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.how, self.z = how, nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        q, k, v = (part(h).view(*h.shape[:2], HEADS, EACH) for part in (self.q, self.k, self.v))
        if self.how == "einsum":
            pattern = torch.einsum("binh,bjnh->nbij", q, k).softmax(-1)
            z = torch.einsum("nbij,bjnh->nbih", pattern, v)
        else:
            q, k, v = (part.permute(2, 0, 1, 3) for part in (q, k, v))
            z = functional.scaled_dot_product_attention(q, k, v)
        z = self.z(z)
        return self.head(h + self.o(z.permute(1, 2, 0, 3).flatten(2)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["fused", "einsum"])
def test_heads_in_a_dimension_in_front_of_the_batch_are_heads(how: str) -> None:
    module = HeadsFirst(how)
    model = cw.capture(module, ids=tokens(2, 5, seed=0))
    ids, kept = tokens(2, 5, seed=1), list[Tensor]()
    with torch.no_grad(), module.z.register_forward_hook(lambda _, __, out: kept.append(out)):
        module(ids)
    run = model.run(ids=ids)
    assert model.locate(("z", 0)).view.axes == ("batch", "pos", "head", "d_head")
    assert torch.equal(run["z", 0], kept[0].permute(1, 2, 0, 3))


class Lines(nn.Module):
    """Attention along the lines of an image [batch, line, place, d_model], one head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(7, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        z = functional.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h))
        return self.head((h + self.o(z)).mean((1, 2)))  # type: ignore[no-any-return]


def test_the_lines_of_an_image_are_no_heads() -> None:
    model = cw.capture(Lines(), x=numbers(2, 4, 5, 7, seed=0))
    assert model.locate(("z", 0)).view.axes == ("batch", "fold", "pos", "head", "d_head")
    assert model.run(x=numbers(2, 4, 5, 7, seed=0))["z", 0].shape[:4] == (2, 4, 5, 1)


class Latents(nn.Module):
    """Learned queries attend to the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(7, WIDTH), Attention()
        self.latents, self.head = nn.Parameter(torch.randn(4, WIDTH)), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(x.shape[0], *self.latents.shape)
        return self.head(self.attention(latents, memory=self.first(x)).mean(1))  # type: ignore[no-any-return]


def test_queries_that_no_input_determines() -> None:
    agree(Latents(), lambda seed: {"x": numbers(3, 6, 7, seed=seed)}, "first", lambda out: out[:, 4])


class Patches(nn.Module):
    """The patches of each channel of [batch, channel, time], heads folded into one dimension with both."""

    rows: Tensor | None

    def __init__(self, *, has_rows: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, WIDTH), nn.Linear(5 * WIDTH, VOCABULARY)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("rows", torch.randn(2, 1, WIDTH) if has_rows else None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.reshape(-1, 5, 4))
        h = h if self.rows is None else h + self.rows
        q, k, v = (
            part(h).view(-1, 5, HEADS, EACH).transpose(1, 2).reshape(-1, 5, EACH)
            for part in (self.q, self.k, self.v)
        )
        z = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        h = h + self.o(z.view(-1, HEADS, 5, EACH).transpose(1, 2).reshape(h.shape))
        return self.head(h.reshape(x.shape[0], 5 * WIDTH))  # type: ignore[no-any-return]


def test_a_single_channel_that_cannot_be_two_leaves_the_batch_as_it_is() -> None:
    model = cw.capture(Patches(has_rows=False), x=numbers(2, 1, 20, seed=0))
    assert not model.batch_is_fixed
    assert model.locate(("z", 0)).view.axes == ("batch", "pos", "head", "d_head")


def test_what_a_batch_of_fixed_size_shares_a_dimension_with_is_not_taken_for_prompts() -> None:
    model = cw.capture(Patches(has_rows=True), x=numbers(2, 1, 20, seed=0))
    assert model.batch_is_fixed
    assert "z" not in model.sites.kinds
