"""Names, axes and errors of sites; `result`, which is computed; modules by path."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from conewise.anatomy.sites import WHERE, SiteTable
from conewise.errors import MissingSiteError
from conewise.program.export import Exported, export
from conewise.program.walk import Interpreter, compile_rule
from tests.program.marks import marks
from tests.program.zoo import ZOO


def captured(name: str, attention: str) -> tuple[nn.Module, Exported, SiteTable]:
    module = ZOO[name].make(attention)
    exported = export(module, (), ZOO[name].example(1, 12))
    return module, exported, SiteTable(exported.program)


def test_the_transformer_lens_spelling_names_the_same_site() -> None:
    _, _, table = captured("gpt2", "eager")
    assert table.find("z", 2) is table.find("blocks.2.attn.hook_z")
    assert table.find("z", -1) is table.find("z", 2)
    assert table.find("mlp_out", 0) is table.find("blocks.0.hook_mlp_out")
    assert table.find("post", 1) is table.find("blocks.1.mlp.hook_post")
    assert set(table.kinds) <= set(WHERE)


def test_keys_and_values_have_their_own_head_count_under_grouped_queries() -> None:
    _, _, table = captured("llama", "sdpa")
    queries, keys = table.find("q", 0).view, table.find("k", 0).view
    assert queries is not None
    assert keys is not None
    assert queries.axes == ("batch", "pos", "head", "d_head")
    assert keys.axes == ("batch", "pos", "kv_head", "d_head")
    assert (queries.lengths["head"], keys.lengths["kv_head"]) == (4, 2)
    with pytest.raises(
        MissingSiteError, match="no axis 'head' here: this site's axes are batch, pos, kv_head"
    ):
        keys.index({"head": 3})


@pytest.mark.parametrize("name", ["pattern", "attn_scores"])
def test_what_fused_attention_never_holds_is_an_error_that_names_eager(name: str) -> None:
    _, _, table = captured("gpt2", "sdpa")
    with pytest.raises(MissingSiteError, match="attn_implementation='eager'"):
        table.find(name, 0)
    with pytest.raises(MissingSiteError, match="attn_implementation='eager'"):
        table.find(f"blocks.0.attn.hook_{name}")


def test_a_parallel_block_says_why_it_has_no_resid_mid() -> None:
    _, _, table = captured("gptj", "eager")
    with pytest.raises(MissingSiteError, match="in parallel"):
        table.find("resid_mid", 1)


def test_an_unknown_name_gives_the_nearest_ones() -> None:
    _, _, table = captured("gpt2", "sdpa")
    with pytest.raises(MissingSiteError, match=r"Nearest: .*blocks\.0\.attn\.hook_z"):
        table.find("blocks.0.attn.hookz")
    with pytest.raises(MissingSiteError, match="this model's layers are 0 to 2"):
        table.find("z", 7)


def test_two_stacks_must_be_told_apart() -> None:
    _, _, table = captured("t5", "eager")
    with pytest.raises(MissingSiteError, match="stacks 'encoder', 'decoder'"):
        table.find("z", 0)
    assert table.find("cross_z", 0, "decoder") is table.find("decoder.blocks.0.cross_attn.hook_z")


def test_a_module_called_three_times_has_three_sites() -> None:
    _, _, table = captured("albert", "eager")
    path = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    nodes = [table.find(f"{path}{call}").node for call in ("#0", "#1", "#2")]
    assert table.calls(path) == tuple(f"{path}#{call}" for call in range(3))
    assert len(set(nodes)) == 3
    assert table.layers("z") == (0, 1, 2)


class Einsum(nn.Module):
    """Attention as `einsum` writes it, with keys that are not transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.fused(x).unflatten(2, (3, 2, 4)).unbind(2)
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        z = torch.einsum("bhqk,bkhd->bqhd", weights, v)
        added: torch.Tensor = x + self.out(z.flatten(2))
        return added


def test_attention_by_einsum_has_its_axes_right() -> None:
    module, x = Einsum(), torch.randn(2, 5, 8)
    exported = export(module, (x,))
    table = SiteTable(exported.program)
    values = Interpreter(exported.program).values({"x": x})
    expected = module.fused(x).unflatten(2, (3, 2, 4)).unbind(2)
    for kind, value in zip("qkv", expected, strict=True):
        site = table.find(kind, 0)
        assert site.view is not None
        assert torch.equal(site.view.present(values[site.node]), value)
    z = table.find("z", 0)
    assert z.view is not None
    assert z.view.present(values[z.node]).shape == (2, 5, 2, 4)


@pytest.mark.parametrize("name", ["gpt2", "llama", "falcon", "t5"])
def test_results_add_up_to_the_attention_without_its_bias(name: str) -> None:
    module, exported, table = captured(name, "sdpa")
    stack = "decoder" if name == "t5" else ""
    site, out = table.find("result", 1, stack), table.find("attn_out", 1, stack)
    assert site.result is not None
    assert site.view is not None
    values = Interpreter(exported.program).values(ZOO[name].example(2, 9))
    shares = site.result.read(values[site.node], values[site.result.weight], site.view)
    total = shares.sum(2)
    if name == "gpt2":
        total = total + module.get_parameter("transformer.h.1.attn.c_proj.bias")
    torch.testing.assert_close(total, values[out.node], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "falcon"])
def test_a_replaced_result_equals_the_z_that_makes_it(name: str) -> None:
    """Zero for a head's result is zero for its z."""
    _, exported, table = captured(name, "sdpa")
    interpreter = Interpreter(exported.program)
    given = ZOO[name].example(2, 9)
    values = interpreter.values(given)
    site = table.find("result", 1)
    assert site.result is not None
    assert site.view is not None
    projection = site.result.projection

    def without(result: torch.Tensor) -> torch.Tensor:
        return result * (torch.arange(4) != 2)[:, None]

    rule = site.result.changed(compile_rule(projection), without, 4, (2, 9))
    fresh = rule(*(values[i] for i in projection.inputs))
    by_result = interpreter.values(given, {projection.name: fresh})
    zeroed = site.view.replace(values[site.node], {"head": 2}, torch.zeros(2, 9, 16))
    by_z = interpreter.values(given, {site.node: zeroed})
    one, other = (tree_leaves(interpreter.output(v))[0] for v in (by_result, by_z))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in ZOO])
def test_a_module_path_is_what_the_module_returns(name: str) -> None:
    case = ZOO[name]
    module, exported, table = captured(name, case.attention[0])
    seen: dict[str, list[torch.Tensor]] = {}

    def keep(path: str, out: object) -> None:
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        seen.setdefault(path, []).append(tensors[0].clone())  # it may be written to later

    handles = [
        part.register_forward_hook(lambda _, args, out, path=path: keep(path, out))
        for path, part in module.named_modules()
        if path
    ]
    given = case.example(2, 12)
    constants = {"use_cache": False} if "use_cache" in exported.signature.example.kwargs else {}
    with torch.no_grad():
        module(**given, **constants)
    for handle in handles:
        handle.remove()
    values = Interpreter(exported.program).values(exported.signature.bind((), given))
    names = {site.name for site in table}
    checked = 0
    for path, outs in seen.items():
        for call, expected in enumerate(outs):
            site = path if len(outs) == 1 else f"{path}#{call}"
            if site in names:
                assert torch.equal(values[table.find(site).node], expected), site
                checked += 1
    total = sum(map(len, seen.values()))
    # Left over: modules with several outputs of which none is shaped like the input (rotary
    # embeddings, a router); their sites are numbered.
    assert checked >= 0.9 * total


class Recurrent(nn.Module):
    """Operations that `torch.export` makes by itself stand around a GRU and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm = nn.GRU(4, 6, batch_first=True), nn.LSTM(6, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lstm(self.gru(x)[0])[0]
        return out


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")  # torch's, of any recurrent module
def test_every_module_that_a_site_is_named_after_is_a_module() -> None:
    module = Recurrent().eval()
    program = export(module, (torch.randn(2, 5, 4),)).program
    paths = {path for path, _ in module.named_modules()}
    assert {port.call.path for port in program.ports} == {"gru", "lstm"}
    assert {call.path for record in program.records for call in record.modules} <= paths
    assert [site.name for site in SiteTable(program) if "hook" in site.name] == []
