"""A shell's experts and the adapters on them: peft's numbers, no sum as large as the stack."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe.models import experts as experts_module
from roundpipe.models import grouped
from roundpipe.models.causal_lm import causal_lm_spec
from roundpipe.models.experts import is_stacked, run_grouped, tell_slow_experts
from roundpipe.models.sequential import sequential_spec
from roundpipe.models.shell import TensorNames, TreeCopy, find_homes
from roundpipe.models.spec import Inputs
from roundpipe.store.packed import PackedTensor, pack

# peft asks for an attribute by its old name
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

CPU = torch.device("cpu")
HIDDEN, INNER, TOKENS, TOP_K = 32, 16, 40, 2
SIZES = {
    "hidden_size": HIDDEN,
    "moe_hidden_size": HIDDEN,
    "moe_intermediate_size": INNER,
    "intermediate_size": INNER,
    "moe_latent_size": None,
    "hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "post_norm_eps": 1e-6,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
KINDS = {  # what transformers' decorator tells apart
    "qwen3_moe.Qwen3MoeExperts": "gate_up_proj",
    "gpt_oss.GptOssExperts": "gate_up_proj",  # transposed, biases, gates between ups
    "nemotron_h.NemotronHExperts": "up_proj",  # no gate
    "muse_spark.MuseSparkExperts": "gate_up_proj",  # a norm at the end
}
QWEN = next(iter(KINDS))


class Settings:
    def __init__(self, implementation, experts, **sizes):
        self._experts_implementation = implementation
        self.num_experts = self.num_local_experts = self.n_routed_experts = experts
        self.__dict__.update({**SIZES, **sizes})


class Layer(nn.Module):
    """Nothing but experts."""

    def __init__(self, kind, implementation="grouped_mm", experts=8, **sizes):
        super().__init__()
        package, name = kind.split(".")
        module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
        self.experts = getattr(module, name)(Settings(implementation, experts, **sizes))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / HIDDEN**0.5

    def forward(self, *args):
        return self.experts(*args)


def adapted(layer, kind=QWEN, *, targets=None, others=(), **settings):
    """The layer with adapters by peft, none of them zero."""
    names = [f"experts.{name}" for name in targets or (KINDS[kind], "down_proj")]
    config = LoraConfig(target_modules=[], target_parameters=names, **{"r": 4, **settings})
    model = get_peft_model(layer, config)
    for name in others:
        model.add_adapter(name, config)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) / 10
    return model


def as_shell(model):
    """The layer as a shell has it, bound to the model's own tensors."""
    names = TensorNames(model)
    homes = find_homes(model, names)
    tree = TreeCopy(model, names, CPU, homes=homes)
    for name, leaf in tree.parameters.items():
        leaf.data = names.tensors[name].data
    return tree.module


def given(tokens=TOKENS, experts=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    weights, index = torch.rand(tokens, experts, generator=generator).topk(TOP_K, dim=-1)
    return hidden.requires_grad_(), index, weights.to(dtype).requires_grad_()


def results(module, arguments=None):
    """Output, and gradients of hidden states, routing weights and all that is trained, by name."""
    hidden, index, weights = arguments or given()
    module.zero_grad()
    out = module(hidden, index, weights)
    pull = torch.sin(torch.arange(out.numel(), dtype=torch.float32)).view_as(out).to(out.dtype)
    out.backward(pull)
    trained = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    return {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad, **trained}


def assert_same(ours, wanted, *, within=1e-5):
    assert ours.keys() == wanted.keys()
    for name, right in wanted.items():
        if right is None:
            assert ours[name] is None, name
            continue
        assert ours[name] is not None, name
        torch.testing.assert_close(
            ours[name].float(), right.float(), rtol=0, atol=within * right.abs().max().item()
        )


class Seen(TorchDispatchMode):
    """How many operations ran, and the elements of the largest tensor that one made."""

    def __init__(self):
        super().__init__()
        self.count, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        self.count += 1
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in before:
                self.largest = max(self.largest, each.numel())
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_stacks_equal_peft(kind):
    model = adapted(Layer(kind), kind)
    assert_same(results(as_shell(model)), results(model))


@pytest.mark.parametrize("target", ["gate_up_proj", "down_proj"])
def test_an_adapter_on_one_of_two_stacks_equals_peft(target):
    model = adapted(Layer(QWEN), targets=[target])
    assert_same(results(as_shell(model)), results(model))


@pytest.mark.parametrize(
    "settings",
    [{"r": 3, "lora_alpha": 5}, {"use_rslora": True}, {"r": 1}],
    ids=str,
)
def test_rank_and_scaling_are_those_of_peft(settings):
    model = adapted(Layer(QWEN), **settings)
    assert_same(results(as_shell(model)), results(model))


@pytest.mark.parametrize("active", [["default"], ["b"], ["default", "b"], ["b", "c", "default"]])
def test_of_several_adapters_those_that_are_active_count(active):
    model = adapted(Layer(QWEN), others=["b", "c"])
    model.base_model.set_adapter(active)
    assert_same(results(as_shell(model)), results(model))


def test_adapters_that_are_off_change_nothing():
    model = adapted(Layer(QWEN))
    on = results(model)
    with model.disable_adapter():
        ours, wanted = results(as_shell(model)), results(model)
    assert_same(ours, wanted)
    assert not torch.equal(on["out"], wanted["out"])


def test_merged_adapters_count_once():
    model = adapted(Layer(QWEN))
    apart = results(model)["out"]
    model.merge_adapter()
    ours = results(as_shell(model))
    assert_same(ours, results(model))
    torch.testing.assert_close(ours["out"], apart, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_adapters_run_grouped_whatever_the_config_says_of_experts(implementation):
    model = adapted(Layer(QWEN, implementation))
    assert_same(results(as_shell(model)), results(model))
    counts = []
    for each in (model, adapted(Layer(QWEN))):
        shell = as_shell(each)
        with Seen() as seen:
            results(shell)
        counts.append(seen.count)
    assert counts[0] == counts[1]


def test_in_bfloat16_adapters_round_no_more_than_peft_does():
    model = adapted(Layer(QWEN))
    exact = results(model)
    model = model.to(torch.bfloat16)
    ours, theirs = (results(m, given(dtype=torch.bfloat16)) for m in (as_shell(model), model))
    for name, right in exact.items():
        if right is not None and "lora_A" not in name:
            error = [(each[name].float() - right).norm().item() for each in (ours, theirs)]
            assert error[0] <= 1.2 * error[1], name


def test_fp32_adapters_on_a_bf16_base_work_as_in_peft():
    model = adapted(Layer(QWEN).to(torch.bfloat16))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    arguments = [given(dtype=torch.bfloat16) for _ in range(2)]
    ours, theirs = results(as_shell(model), arguments[0]), results(model, arguments[1])
    assert_same(ours, theirs, within=0.03)
    assert ours["base_model.model.experts.lora_A.default.weight"].dtype == torch.float32


def test_nothing_as_large_as_a_stack_is_made():
    model = adapted(Layer(QWEN, experts=64), r=2)
    stack = 64 * HIDDEN * INNER
    largest = []
    for module in (as_shell(model), model):
        with Seen() as seen:
            results(module, given(experts=64))
        largest.append(seen.largest)
    assert largest[0] < stack / 2
    assert largest[1] >= 2 * stack  # peft's way


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_operations_do_not_grow_with_the_number_of_experts(has_adapter, trained):
    counts = []
    for number in (8, 128):
        layer = Layer(QWEN, experts=number)
        model = adapted(layer) if has_adapter else layer
        for parameter in layer.experts.parameters():
            parameter.requires_grad_(trained or (parameter.requires_grad and has_adapter))
        with Seen() as seen:
            results(as_shell(model), given(experts=number))
        counts.append(seen.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trained", [False, True])
def test_without_adapters_experts_run_the_way_of_transformers_to_the_bit(kind, trained):
    layer = Layer(kind).requires_grad_(trained)
    ours, wanted = results(as_shell(layer)), results(layer)
    assert all(torch.equal(ours[name], right) for name, right in wanted.items())


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_experts_equal_those_run_one_by_one(kind):
    layers = [Layer(kind, way) for way in ("grouped_mm", "eager")]
    assert_same(*map(results, layers), within=2e-6)


@pytest.fixture
def _small_pieces(monkeypatch):
    """Seven tokens in a piece."""
    monkeypatch.setattr(grouped, "PIECE_BYTES", 7 * TOP_K * HIDDEN * 4)


@pytest.mark.usefixtures("_small_pieces")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_adapter", [False, True])
def test_many_tokens_in_pieces_give_the_same(kind, has_adapter):
    layer = Layer(kind).requires_grad_(False)
    model = adapted(layer, kind) if has_adapter else layer
    assert_same(results(as_shell(model)), results(model))


@pytest.mark.usefixtures("_small_pieces")
@pytest.mark.parametrize(("frozen", "implementation"), [(False, "grouped_mm"), (True, "eager")])
def test_only_frozen_experts_in_grouped_products_run_in_pieces(frozen, implementation):
    layer = Layer(QWEN, implementation).requires_grad_(not frozen)
    ours, wanted = results(as_shell(layer)), results(layer)
    assert all(torch.equal(ours[name], right) for name, right in wanted.items())


@pytest.mark.usefixtures("_small_pieces")
@pytest.mark.parametrize("kind", list(KINDS)[:2])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_packed_stacks_are_unpacked_again_for_backward(kind, has_adapter):
    layer = Layer(kind).requires_grad_(False)
    model = adapted(layer, kind) if has_adapter else layer
    (spec,) = sequential_spec(model).layers
    values = dict(spec.tensors)
    for name, tensor in spec.tensors.items():
        if tensor.dim() == 3:
            how, parts = pack(name, tensor)
            model.get_parameter(name).data = how.unpack(parts)
            values[name] = PackedTensor(how, parts)
    shell = spec.make_shell(CPU)
    shell.bind(values)
    hidden, index, weights = given()
    out = shell(None, Inputs((hidden, index, weights)), None)
    held = [p for p in shell.module.parameters() if p.dim() == 3]
    assert all(p.untyped_storage().nbytes() == 4 for p in held)
    pull = torch.sin(torch.arange(out.numel(), dtype=torch.float32)).view_as(out)
    out.backward(pull)
    trained = {n: p.grad for n, p in shell.module.named_parameters() if p.requires_grad}
    ours = {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad, **trained}
    assert_same(ours, results(model))


def test_the_users_module_stays_as_it_is_and_so_do_names():
    model = adapted(Layer(QWEN))
    shell = as_shell(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert [n for n, _ in shell.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_hooks_on_experts_and_on_wrappers_still_run():
    model = adapted(Layer(QWEN))
    seen = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
    outputs = []
    for module in (model, as_shell(model)):
        seen.clear()
        results(module)
        outputs.append([name for name in seen if name.endswith(("experts", "base_layer"))])
    assert outputs[0] == outputs[1] != []


@pytest.mark.parametrize(
    "sizes",
    [{"hidden_size": 30}, {"moe_intermediate_size": 6}],
    ids=["hidden size", "intermediate size"],
)
def test_stacks_that_grouped_products_do_not_take_run_as_in_peft(sizes):
    model = adapted(Layer(QWEN, "eager", **sizes))
    hidden, index, weights = given()
    hidden = hidden.detach()[:, : sizes.get("hidden_size", HIDDEN)].requires_grad_()
    ours, theirs = (
        results(m, (hidden.detach().clone().requires_grad_(), index, weights))
        for m in (as_shell(model), model)
    )
    ours["weights"] = theirs["weights"]  # one tensor for both: added up
    assert all(torch.equal(ours[name], right) for name, right in theirs.items())


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, HIDDEN))

    def forward(self, hidden):
        return hidden @ self.weight.T


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router()

    def forward(self, hidden):
        return self.router(hidden)


def test_adapters_on_other_parameters_run_as_in_peft():
    config = LoraConfig(target_modules=[], target_parameters=["router.weight"], r=4)
    model = get_peft_model(Routed(), config)
    hidden = torch.randn(5, HIDDEN)
    assert torch.equal(as_shell(model)(hidden), model(hidden))


def test_sums_of_adapters_are_made_anew_while_another_worker_makes_its_own():
    """torch keeps such sums for all threads until none is inside."""
    config = LoraConfig(target_modules=[], target_parameters=["router.weight"], r=4)
    model = get_peft_model(Routed(), config)
    shell, hidden = as_shell(model), torch.randn(5, HIDDEN)
    with nn.utils.parametrize.cached():  # as the other worker's thread has it
        with torch.no_grad():
            shell(hidden)
        for _ in range(2):  # a graph of its own each
            shell(hidden).sum().backward()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.fill_(0.1)
        ours = shell(hidden)
    assert torch.equal(ours, model(hidden))
    assert all(p.grad is not None for n, p in shell.named_parameters() if "lora" in n)


def test_what_is_no_experts_is_left_alone():
    layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    before = copy.deepcopy(layer)
    run_grouped(layer.modules())
    assert [vars(m).keys() for m in layer.modules()] == [vars(m).keys() for m in before.modules()]
    assert not any(is_stacked(module) for module in layer.modules())


def warnings_of(caplog, root):
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger=experts_module.__name__):
        tell_slow_experts(root)
    return [record.getMessage() for record in caplog.records]


def test_experts_that_run_one_by_one_are_told_once(caplog):
    layers = nn.ModuleList([Layer(QWEN, "eager"), Layer(QWEN, "eager")])
    (message,) = warnings_of(caplog, layers)
    assert "eager" in message
    assert "hint:" in message
    assert warnings_of(caplog, Layer(QWEN)) == []


def test_experts_that_are_modules_are_told_once(caplog):
    root = nn.Module()
    root.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    (message,) = warnings_of(caplog, root)
    assert message.endswith("experts")


def test_adapters_that_run_as_in_peft_are_told(caplog):
    config = LoraConfig(target_modules=[], target_parameters=["router.weight"], r=4)
    (message,) = warnings_of(caplog, get_peft_model(Routed(), config))
    assert message.endswith("as in peft: base_model.model.router")
    assert warnings_of(caplog, adapted(Layer(QWEN))) == []


MOE = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("kind", MOE)
@pytest.mark.parametrize("pieces", [False, True])
def test_a_whole_model_with_adapters_on_experts_equals_peft(
    kind, pieces, tiny, chain_of, plain, monkeypatch
):
    model = tiny.make(kind, **MOE[kind], num_hidden_layers=2)
    for parameter in model.parameters():
        with contextlib.suppress(ValueError):  # gpt-oss leaves some of its weights as they were
            nn.init.normal_(parameter, std=0.1)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=names)
    wrapped = get_peft_model(model, config)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    if pieces:
        monkeypatch.setattr(grouped, "PIECE_BYTES", 5 * 2 * 32 * 4)
    inputs = tiny.inputs((9, 6))
    losses, gradients = plain(wrapped, inputs, lambda output: output.loss)
    chain = chain_of(causal_lm_spec(wrapped))
    ours = [chain.forward_backward(each, lambda output: output.loss) for each in inputs]
    torch.testing.assert_close(ours, losses, rtol=1e-5, atol=1e-6)
    assert_same(chain.grads, gradients)


@pytest.mark.parametrize("kind", MOE)
def test_a_whole_model_in_pieces_gives_the_same_logits(kind, tiny, chain_of, monkeypatch):
    model = tiny.make(kind, **MOE[kind], num_hidden_layers=2).requires_grad_(False)
    ids = {"input_ids": tiny.inputs()[1].kwargs["input_ids"]}
    with torch.no_grad():
        wanted = model(**ids).logits
    monkeypatch.setattr(grouped, "PIECE_BYTES", 5 * 2 * 32 * 4)
    ours = chain_of(causal_lm_spec(model)).forward(Inputs((), ids)).logits
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)
