"""Names are certain: every named site holds what a hook on the known part sees, and others are not there.

What is expected is written by hand, module by module; nothing of it is read off the graph.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from conewise.anatomy.sites import SiteTable
from conewise.errors import MissingSiteError
from conewise.program.export import export
from tests.anatomy import made
from tests.anatomy.made import (
    LENGTH,
    WIDTH,
    WORDS,
    Convolved,
    Experts,
    Gated,
    Heads,
    Mlp,
    OverPositions,
    Recurrent,
    Scale,
    Scan,
    Shifted,
    ThreeProjections,
    norm,
    stacked,
)
from tests.anatomy.named import KINDS, Expected, because, check, mlp, neurons, without

PARALLEL = "computed in parallel"


def ids(batch: int = 2, length: int = LENGTH) -> dict[str, Any]:
    torch.manual_seed(1)
    return {"ids": torch.randint(0, WORDS, (batch, length))}


STREAM = {"resid_pre": "in:", "resid_post": "out:"}
NEURONS = {"pre": "out:mlp.up", "post": "in:mlp.down"}
USUAL = {**STREAM, "attn_out": "out:attn", "resid_mid": "in:ln2", "mlp_out": "out:mlp", **NEURONS}
NO_MLP = {"mlp_out": "", "pre": "", "post": ""}
LAYER = {"ln1": norm, "attn": Heads, "ln2": norm, "mlp": Mlp}


POST = {
    **without(USUAL, "resid_mid", "resid_post"),
    "resid_mid": "in:ln1",
    "resid_post": "in:ln2",
}
PARALLEL_THERE = without(USUAL, "resid_mid")

FORMS: dict[str, tuple[Any, dict[str, Any], dict[str, str], dict[str, str]]] = {
    "pre_norm": (made.pre_norm, LAYER, USUAL, {}),
    "eager": (made.pre_norm, {**LAYER, "attn": lambda: Heads(fused=False)}, USUAL, {}),
    "post_norm": (made.post_norm, LAYER, POST, {}),
    "sandwich": (
        made.sandwich,
        {**LAYER, "after1": norm, "after2": norm},
        {**USUAL, "attn_out": "out:after1", "mlp_out": "out:after2"},
        {},
    ),
    "parallel": (made.parallel, LAYER, PARALLEL_THERE, {"resid_mid": PARALLEL}),
    "parallel_branches_first": (
        made.parallel_branches_first,
        LAYER,
        PARALLEL_THERE,
        {"resid_mid": PARALLEL},
    ),
    "parallel_with_a_sum_kept": (
        made.parallel_with_a_sum_kept,
        {**LAYER, "keep": Scale},
        {**USUAL, "resid_mid": "in:keep"},
        {},
    ),
    "macaron": (
        made.macaron,
        {
            "first": Mlp,
            "second": Mlp,
            "attn": Heads,
            "conv": Convolved,
            **dict.fromkeys(("ln1", "ln2", "ln3", "ln4", "ln5"), norm),
        },
        {"resid_pre": "in:", "attn_out": "out:attn", "resid_post": "in:ln5"},
        {
            "resid_mid": r"'layers\.\d/add' is summed before attention is added",
            **mlp(r"2 MLPs are added to the stream in this layer, 'layers\.\d/mul' and 'layers\.\d/mul_1'"),
        },
    ),
    "macaron_without_convolution": (
        made.macaron_without_convolution,
        {"first": Mlp, "second": Mlp, "attn": Heads, **dict.fromkeys(("ln1", "ln2", "ln4"), norm)},
        {**STREAM, "attn_out": "out:attn"},
        {"resid_mid": "is summed before attention is added", **mlp("2 MLPs")},
    ),
    "mlp_first": (
        made.mlp_first,
        LAYER,
        without(USUAL, "resid_mid"),
        {"resid_mid": "is summed before attention is added"},
    ),
    "attention_only": (
        made.attention_only,
        {"ln1": norm, "attn": Heads},
        {**STREAM, "attn_out": "out:attn"},
        {"resid_mid": "nothing is added behind attention", **mlp("nothing but attention is added")},
    ),
    "gated": (
        made.pre_norm,
        {**LAYER, "mlp": Gated},
        {**USUAL, "pre": "out:mlp.gate", "pre_linear": "out:mlp.up"},
        {},
    ),
    "relu_squared": (made.pre_norm, {**LAYER, "mlp": lambda: Mlp(act=lambda x: x.relu() ** 2)}, USUAL, {}),
    "three_projections": (
        made.pre_norm,
        {**LAYER, "mlp": ThreeProjections},
        without(USUAL, "pre", "post"),
        neurons("not one pair of projections"),
    ),
    "experts": (
        made.pre_norm,
        {**LAYER, "mlp": Experts},
        without(USUAL, "pre", "post"),
        neurons("mixture of experts"),
    ),
    "beside_a_scan": (
        made.beside,
        {**LAYER, "other": Scan},
        without(USUAL, "resid_mid"),
        {"resid_mid": r"'layers\.\d\.other\.down/linear' is added together with attention"},
    ),
    "beside_a_convolution": (
        made.beside,
        {**LAYER, "other": Convolved},
        without(USUAL, "resid_mid"),
        {"resid_mid": "is added together with attention"},
    ),
    "scan_for_mlp": (
        made.in_place_of_the_mlp,
        {"ln1": norm, "attn": Heads, "ln2": norm, "other": Scan},
        without(USUAL, "mlp_out", "pre", "post"),
        mlp(r"passes through 'layers\.\d\.other/cumsum', which may mix positions"),
    ),
    "convolution_for_mlp": (
        made.in_place_of_the_mlp,
        {"ln1": norm, "attn": Heads, "ln2": norm, "other": Convolved},
        without(USUAL, "mlp_out", "pre", "post"),
        mlp(r"passes through 'layers\.\d\.other\.conv/conv1d', which may mix positions"),
    ),
    "recurrence_for_mlp": (
        made.in_place_of_the_mlp,
        {"ln1": norm, "attn": Heads, "ln2": norm, "other": Recurrent},
        without(USUAL, "mlp_out", "pre", "post"),
        mlp(r"passes through 'layers\.\d\.other\.rnn/gru', which may mix positions"),
    ),
    "token_shift_for_mlp": (
        made.in_place_of_the_mlp,
        {"ln1": norm, "attn": Heads, "ln2": norm, "other": Shifted},
        without(USUAL, "mlp_out", "pre", "post"),
        mlp(r"passes through 'layers\.\d\.other/pad', which may mix positions"),
    ),
    "mixer_for_mlp": (
        made.in_place_of_the_mlp,
        {"ln1": norm, "attn": Heads, "ln2": norm, "other": OverPositions},
        without(USUAL, "mlp_out", "pre", "post"),
        mlp(r"passes through 'layers\.\d\.other\.mlp\.up/linear', which may mix positions"),
    ),
    "convolution_between": (
        made.between,
        {**LAYER, "ln3": norm, "other": Convolved},
        {**USUAL, "resid_mid": "in:ln3"},
        {},
    ),
    "two_side_by_side": (
        made.two_side_by_side,
        {"ln1": norm, "attn": Heads, "ln2": norm, "first": Mlp, "second": Mlp},
        without(USUAL, "mlp_out", "pre", "post"),
        mlp("2 MLPs"),
    ),
    "scaled_stream": (
        made.scaled_stream,
        LAYER,
        without(POST, "resid_mid"),
        {"resid_mid": "which is not resid_pre itself"},
    ),
    "scaled_branches": (
        made.scaled_branches,
        {**LAYER, "scale1": Scale, "scale2": Scale},
        {**USUAL, "attn_out": "out:scale1", "mlp_out": "out:scale2"},
        {},
    ),
    "normed_stream": (
        made.normed_stream,
        LAYER,
        without(USUAL, "resid_mid"),
        {"resid_mid": "which is not resid_pre itself"},
    ),
    "fused_output": (
        made.fused_output,
        {
            "ln1": norm,
            "attn": Heads,
            "up": lambda: nn.Linear(WIDTH, 24),
            "out": lambda: nn.Linear(WIDTH + 24, WIDTH),
        },
        STREAM,
        {
            **because(r"'layers\.\d/cat' joins attention with", "attn_out", "resid_mid"),
            **mlp("nothing but attention"),
        },
    ),
    "attention_then_mlp_in_one_branch": (
        made.attention_then_mlp_in_one_branch,
        LAYER,
        STREAM,
        {**because("holds more than attention", "attn_out", "resid_mid"), **mlp("nothing but attention")},
    ),
    "gated_attention": (
        made.gated_attention,
        {**LAYER, "gate": lambda: nn.Linear(WIDTH, WIDTH)},
        {**USUAL, "attn_out": "out:attn.o"},
        {},
    ),
    "adapted": (
        made.adapted,
        {**LAYER, "low": lambda: nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH))},
        {**USUAL, "attn_out": "out:attn.o + out:low"},
        {},
    ),
    "without_a_stream": (
        made.without_a_stream,
        LAYER,
        {},
        because("no sum adds the attention's result to a stream", *KINDS),
    ),
    "one_projection": (
        made.one_projection,
        {"ln1": norm, "attn": Heads, "ln2": norm, "lin": lambda: nn.Linear(WIDTH, WIDTH)},
        without(USUAL, "mlp_out", "pre", "post"),
        mlp("is not two projections with a nonlinearity between"),
    ),
}


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")  # torch's, of any recurrent module
@pytest.mark.parametrize("name", FORMS)
def test_a_layer_of_every_form_has_the_names_that_are_certain(name: str) -> None:
    flow, parts, there, missing = FORMS[name]
    count = 2 if name in {"pre_norm", "post_norm", "parallel", "macaron"} else 1
    layers = [Expected(f"layers.{layer}", there, missing, layer) for layer in range(count)]
    check(stacked(flow, count, **parts), ids(), layers)


def test_one_layer_in_no_list_has_its_names_and_the_embedding_is_no_mlp() -> None:
    given = {**ids(), "positions": torch.arange(LENGTH).repeat(2, 1)}
    there = {
        "resid_pre": "out:words + out:places",
        "attn_out": "out:attn",
        "resid_mid": "in:ln2",
        "mlp_out": "out:mlp",
        "resid_post": "in:ln3",
        **NEURONS,
    }
    check(made.OneLayer().eval(), given, [Expected("", there)])
    missing = {"resid_mid": "nothing is added behind", **mlp("nothing but attention is added")}
    alone = {"resid_pre": "in:ln1", "attn_out": "out:attn", "resid_post": "in:ln3"}
    check(made.OneLayer(with_mlp=False).eval(), given, [Expected("", alone, missing)])


@pytest.mark.parametrize("wrapped", [False, True])
def test_layers_in_nested_lists_are_numbered_by_the_outer_one(wrapped: bool) -> None:
    inner = ".inner" if wrapped else ""
    there = {
        "resid_pre": f"in:0{inner}.0",
        "attn_out": f"out:0{inner}",
        "resid_mid": f"in:1{inner}.0",
        "mlp_out": f"out:1{inner}",
        "resid_post": f"in:1{inner}.0 + out:1{inner}",
        "pre": f"out:1{inner}.1.up",
        "post": f"in:1{inner}.1.down",
    }
    layers = [Expected(f"pairs.{layer}", there, layer=layer) for layer in range(3)]
    table = check(made.Nested(wrapped=wrapped).eval(), ids(), layers)
    assert table.layers("z") == (0, 1, 2)


def test_a_single_pair_in_nested_lists_claims_no_more_than_it_can() -> None:
    """Two numbers, and nothing that tells which is the layer's: the MLP behind may be another layer."""
    there = {"resid_pre": "in:0.inner.0", "attn_out": "out:0.inner"}
    reason = r"what is added behind 'pairs\.0\.0' may be of the same layer, or not"
    missing = because(reason, "resid_mid", "resid_post", "mlp_out", "pre", "post")
    check(made.Nested(1, wrapped=True).eval(), ids(), [Expected("pairs.0", there, missing)])


def test_attentions_in_one_list_and_mlps_in_another_are_paired_by_number() -> None:
    layers = [
        Expected(
            "",
            {
                "resid_pre": f"in:attentions.{i}",
                "attn_out": f"out:attentions.{i}",
                "resid_mid": f"in:norms.{2 * i}",
                "mlp_out": f"out:mlps.{i}",
                "resid_post": f"in:norms.{2 * i + 1}",
                "pre": f"out:mlps.{i}.up",
                "post": f"in:mlps.{i}.down",
            },
            layer=i,
        )
        for i in range(3)
    ]
    check(made.Lists().eval(), ids(), layers)


def test_an_mlp_that_is_a_layer_by_itself_is_no_other_layers() -> None:
    there = {**STREAM, "attn_out": "out:inner"}
    missing = {"resid_mid": "nothing is added behind", **mlp("nothing but attention is added")}
    layers = [Expected(f"net.{i}", there, missing, i) for i in (0, 2)]
    table = check(made.InTurns().eval(), ids(), layers)
    assert table.layers("z") == (0, 2)


@pytest.mark.parametrize("as_module", [True, False])
def test_shared_layers_are_told_apart_by_their_calls(as_module: bool) -> None:
    there = without(USUAL, "resid_pre", "resid_post")
    there |= {"resid_pre": "in:ln1", "resid_post": "in:ln2 + out:mlp"}
    layers = [Expected("layer", there, layer=call, call=call) for call in range(3)]
    check(made.Shared(as_module=as_module).eval(), ids(), layers)


CROSS = {
    **STREAM,
    **NEURONS,
    "attn_out": "out:attn",
    "resid_mid": "in:ln2",
    "cross_attn_out": "out:cross",
    "resid_mid_cross": "in:ln3",
    "mlp_out": "out:mlp",
}


def test_an_encoder_and_a_decoder_are_two_stacks() -> None:
    given = {**ids(), "targets": torch.randint(0, WORDS, (2, 5))}
    layers = [Expected(f"encoder.{i}", USUAL, layer=i, stack="encoder") for i in range(2)]
    layers += [Expected(f"decoder.{i}", CROSS, layer=i, stack="decoder") for i in range(2)]
    check(made.EncoderDecoder().eval(), given, layers)


def test_a_decoder_in_no_list_has_its_cross_attention() -> None:
    given = {**ids(), "targets": torch.randint(0, WORDS, (2, 5))}
    layers = [Expected("encoder", USUAL), Expected("decoder", CROSS, layer=1)]
    check(made.EncoderDecoder(single=True).eval(), given, layers)


def test_no_attention_no_kinds() -> None:
    exported = export(made.Plain().eval(), (), ids())
    table = SiteTable(exported.program)
    assert table.kinds == ()
    with pytest.raises(MissingSiteError, match="no attention was found"):
        table.find("mlp_out", 0)


def test_layers_without_modules_have_the_names_that_need_none() -> None:
    x = torch.randn(2, LENGTH, WIDTH)
    table = SiteTable(export(made.Bare().eval(), (x,)).program)
    assert table.layers("z") == table.layers("attn_out") == (0, 1)
    for kind in ("mlp_out", "resid_post", "pre"):
        with pytest.raises(
            MissingSiteError, match=r"nothing says whether '.*' is of this layer or of the next"
        ):
            table.find(kind, 0)
