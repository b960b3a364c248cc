"""The table of sites: printed, searched, as a DataFrame, as HTML."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.anatomy.sites import WHERE
from conewise.errors import MissingSiteError
from tests.anatomy.made import InTurns
from tests.sweeps.captured import small


def test_it_prints_one_line_for_each_kind() -> None:
    text = str(small("llama").sites)
    lines = text.splitlines()
    assert lines[0].split() == ["kind", "layers", "heads", "axes", "cone", "where", "it", "lies"]
    kinds = [line.split()[0] for line in lines[2:-1] if not line.startswith("not there: ")]
    assert kinds == list(small("llama").sites.kinds)
    keys = next(line for line in lines if line.startswith("k "))
    assert "0-2" in keys
    assert "[batch, pos, kv_head=2, d_head=16]" in keys
    assert WHERE["k"] in keys
    assert "`model.sites.to_dataframe()` lists all" in lines[-1]
    assert text == repr(small("llama").sites)


def test_two_stacks_are_told_apart() -> None:
    text = str(small("t5").sites)
    assert "encoder.z " in text
    assert "decoder.z " in text
    assert "decoder.cross_z " in text


def test_a_model_without_attention_says_so() -> None:
    text = str(small("skips").sites)
    assert text.startswith(
        "No attention was found in its graph: this model's sites are its modules and operations."
    )


def test_attentions_that_share_a_module_are_no_layers() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            one = nn.functional.scaled_dot_product_attention(x, x, x)
            return nn.functional.scaled_dot_product_attention(one, x, x)

    model = cw.capture(nn.Sequential(Two(), Two()), torch.randn(2, 3, 5, 4))
    assert str(model.sites).startswith("4 attentions were found, several in one module, so no path says")
    with pytest.raises(
        MissingSiteError, match="kinds are none: 4 attentions were found, several in one module"
    ):
        model.locate(cw.site("z", layer=0))


def test_it_says_what_is_not_there_and_why() -> None:
    """One line for the layers that have the same reason, whatever they are numbered."""
    text = str(small("llama").sites)
    fused = "not there: attn_scores, pattern (layer 0-2): attention is computed by the fused operation"
    assert sum(line.startswith(fused) for line in text.splitlines()) == 1
    parallel = small("gptj", "eager").sites
    line = "not there: resid_mid (layer 0-2): attention and MLP are computed in parallel here, so no value"
    assert line in str(parallel)
    assert line in parallel._repr_html_()
    model = cw.capture(InTurns().eval(), ids=torch.zeros(1, 9, dtype=torch.long))
    text = str(model.sites)
    assert "resid_mid (layer 0, 2): nothing is added behind attention" in text
    assert next(line for line in text.splitlines() if line.startswith("z ")).split()[1:3] == ["0,", "2"]


def test_layers_without_attention_are_not_counted_among_those_with_it() -> None:
    model = cw.capture(InTurns().eval(), ids=torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(
        MissingSiteError, match=r"no kinds in layer 1: the layers with attention are 0 and 2\."
    ):
        model.locate(cw.site("z", layer=1))
    with pytest.raises(MissingSiteError, match="layer 0 has no 'mlp_out': nothing but attention is added"):
        model.locate(cw.site("mlp_out", layer=0))
    with pytest.raises(
        MissingSiteError, match="no site 'mlp_out' in layer 0: nothing but attention is added"
    ):
        model.locate("mlp_out")


def test_the_dataframe_has_a_row_for_each_site() -> None:
    model = small("llama")
    frame = model.sites.to_dataframe()
    assert list(frame.columns) == ["name", "kind", "layer", "head", "pos", "shape", "cone", "node"]
    assert len(frame) == len(model.sites) == len(set(frame["name"]))
    row = frame.set_index("name").loc["blocks.1.attn.hook_k"]
    assert (row["kind"], row["layer"], row["head"], bool(row["pos"])) == ("k", 1, 2, True)
    assert row["shape"] == "[batch, pos, kv_head=2, d_head=16]"
    assert row["cone"] == len(model.graph.cone(row["node"]))
    module = frame.set_index("name").loc["model.layers.1.mlp"]
    assert module["kind"] == "module"
    assert not module["pos"]


@pytest.mark.filterwarnings("ignore::conewise.errors.NoEffectWarning")  # positions are the same in all runs
def test_every_listed_site_of_one_tensor_can_be_read_and_patched() -> None:
    model = small("llama")
    torch.manual_seed(3)
    given = {"input_ids": torch.randint(0, 211, (2, 6))}
    run, source = model.run(**given), model.run(input_ids=given["input_ids"].flip(1))
    several = 0
    for site in model.sites:
        shape = model.sites.shape_of(site)
        if shape == "several values":
            several += 1
            continue
        assert run[site.name].ndim == shape.count(",") + 1 if shape != "[]" else True, site.name
        with run.fork() as world:
            world.patch(site.name, source)
            assert torch.equal(world[site.name], source[site.name])
    assert several < 10


def test_a_module_may_have_any_name_and_html_stays_html() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("<b>", nn.Linear(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.get_submodule("<b>")(x)
            return out

    model = cw.capture(Odd(), torch.zeros(3, 2))
    html = model.sites._repr_html_()
    assert "<b>" not in html
    assert f"<strong>{len(model.sites)} sites</strong>" in html
    assert "No attention was found" in html
    assert model.run(torch.zeros(3, 2))["<b>"].shape == (3, 2)
