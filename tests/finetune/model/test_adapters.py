from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.models import multimodal_cases
from transformers import AutoModelForCausalLM, MambaConfig, Qwen3MoeConfig

from roundpipe.errors import ConfigError
from roundpipe.finetune.model.adapters import ParameterCounts, add_adapter, count_parameters
from roundpipe.finetune.model.source import ModelSource

FOLDER = ModelSource(given="./base", location="base")


def test_every_linear_layer_but_the_head_gets_an_adapter(tiny: ModuleType, config_of: Any) -> None:
    wrapped = add_adapter(tiny.tiny_model(), config_of(), FOLDER, seed=1)
    adapted = {n.split(".")[-4] for n, p in wrapped.named_parameters() if "lora_A" in n}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(("lora_" in n) == p.requires_grad for n, p in wrapped.named_parameters())


def test_the_start_depends_on_the_seed_and_disturbs_no_random_state(
    tiny: ModuleType, config_of: Any
) -> None:
    def start(seed: int) -> dict[str, torch.Tensor]:
        wrapped = add_adapter(tiny.tiny_model(), config_of(), FOLDER, seed=seed)
        return {n: p for n, p in wrapped.named_parameters() if "lora_A" in n}

    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = start(1), start(1), start(2)
    name = next(iter(first))
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    tiny.tiny_model()  # seeds by itself, like add_adapter must not
    torch.set_rng_state(state)
    model = tiny.tiny_model()
    before = torch.get_rng_state()
    add_adapter(model, config_of(), FOLDER, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_adapter_has_the_dtype_of_its_base(tiny: ModuleType, config_of: Any) -> None:
    wrapped = add_adapter(tiny.tiny_model().bfloat16(), config_of(), FOLDER, seed=1)
    assert {p.dtype for p in wrapped.parameters()} == {torch.bfloat16}


def test_the_settings_reach_peft(tiny: ModuleType, config_of: Any) -> None:
    config = config_of(
        lora_r=2,
        lora_dropout=0.1,
        use_rslora=True,
        use_dora=True,
        target_modules=["q_proj"],
        peft={"bias": "none", "init_lora_weights": "gaussian"},
    )
    lora = add_adapter(tiny.tiny_model(), config, FOLDER, seed=1).peft_config["default"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (2, 4, 0.1)
    assert (lora.use_rslora, lora.use_dora, lora.init_lora_weights) == (True, True, "gaussian")
    assert set(lora.target_modules) == {"q_proj"}


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (ModelSource("./base", "base"), ("./base", None)),
        (ModelSource("own/er@v1", "x", revision="v1", hub_id="own/er"), ("own/er", "v1")),
        (ModelSource("package:p/m.gguf", "/x/p", gguf_file="m.gguf"), ("package:p/m.gguf", None)),
    ],
)
def test_the_base_is_named_as_the_user_named_it(
    tiny: ModuleType,
    config_of: Any,
    source: ModelSource,
    named: tuple[str, str | None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    lora = add_adapter(tiny.tiny_model(), config_of(), source, seed=1).peft_config["default"]
    assert (lora.base_model_name_or_path, lora.revision) == named


def test_a_module_that_does_not_exist_is_told_with_those_that_do(
    tiny: ModuleType, config_of: Any
) -> None:
    config = config_of(target_modules=["q_porj"])
    with pytest.raises(ConfigError, match=r"like that: q_porj\nhint: target_modules=q_proj$"):
        add_adapter(tiny.tiny_model(), config, FOLDER, seed=1)


def test_an_unknown_field_of_peft_is_an_error(tiny: ModuleType, config_of: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)peft: .*loraplus.*hint: .*LoraConfig"):
        add_adapter(tiny.tiny_model(), config_of(peft={"loraplus": 1}), FOLDER, seed=1)


def test_a_tied_weight_counts_once(tiny: ModuleType) -> None:
    tied, untied = (count_parameters(tiny.tiny_model(tied=tied)) for tied in (True, False))
    assert untied.total - tied.total == 260 * 32
    assert tied.trained == tied.total


def test_counts_read_like_a_person_says_them() -> None:
    assert str(ParameterCounts(4_884_480, 139_399_488)) == "4.88 M of 139 M trained"
    assert str(ParameterCounts(950, 7_241_732_096)) == "950 of 7.24 B trained"


class Mixture(torch.nn.Module):
    """A block whose experts and router are linear modules, as models with own code have them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(8, 8)
        self.gate = torch.nn.Linear(8, 4)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(4)])
        self.shared_experts = torch.nn.ModuleDict({"gate_proj": torch.nn.Linear(8, 8)})
        self.shared_expert_gate = torch.nn.Linear(8, 1)


def adapted_in(model: Any) -> set[str]:
    names = [n for n, _ in model.named_parameters() if "lora_A" in n]
    return {n.removeprefix("base_model.model.").partition(".lora_A")[0] for n in names}


def test_on_a_mixture_all_linear_leaves_routers_and_routed_experts_alone(
    tiny: ModuleType, config_of: Any
) -> None:
    model = tiny.tiny_model()
    model.model.layers[0].mlp = Mixture()
    adapted = adapted_in(add_adapter(model, config_of(), FOLDER, seed=1))
    inside = {name.removeprefix("model.layers.0.mlp.") for name in adapted if ".0.mlp." in name}
    assert inside == {"q_proj", "shared_experts.gate_proj"}


@pytest.mark.parametrize("targets", [None, ["experts.gate_up_proj"]])
def test_on_stacked_experts_all_linear_means_attention_and_target_parameters_what_they_name(
    config_of: Any, targets: list[str] | None
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    few = {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 32}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **heads, **few))
    wrapped = add_adapter(model, config_of(target_parameters=targets), FOLDER, seed=1)
    attention = {f"self_attn.{letter}_proj" for letter in "qkvo"}
    experts = {"mlp.experts"} if targets else set()
    assert adapted_in(wrapped) == {f"model.layers.0.{name}" for name in attention | experts}


def test_what_is_excluded_by_the_user_and_modules_that_are_named_stay(
    tiny: ModuleType, config_of: Any
) -> None:
    for changes, expected in (
        ({"peft": {"exclude_modules": ["gate"]}}, {"experts.3", "shared_expert_gate"}),
        ({"target_modules": ["gate", "experts.1"]}, {"gate", "experts.1"}),
    ):
        model = tiny.tiny_model()
        model.model.layers[0].mlp = Mixture()
        adapted = adapted_in(add_adapter(model, config_of(**changes), FOLDER, seed=1))
        assert {f"model.layers.0.mlp.{name}" for name in expected} <= adapted


def test_all_linear_leaves_out_what_fused_kernels_read_past_an_adapter(config_of: Any) -> None:
    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "vocab_size": 32}
    model = AutoModelForCausalLM.from_config(MambaConfig(**sizes))
    adapted = adapted_in(add_adapter(model, config_of(), FOLDER, seed=1))
    assert {name.rpartition(".")[2] for name in adapted} == {"in_proj", "x_proj", "dt_proj"}


def test_some_layers_alone_need_modules_by_name(tiny: ModuleType, config_of: Any) -> None:
    config = config_of(peft={"layers_to_transform": [1]})
    with pytest.raises(ConfigError, match=r"layers_to_transform.*\nhint: target_modules=q_proj"):
        add_adapter(tiny.tiny_model(), config, FOLDER, seed=1)


def test_a_dense_model_excludes_nothing(tiny: ModuleType, config_of: Any) -> None:
    wrapped = add_adapter(tiny.tiny_model(), config_of(), FOLDER, seed=1)
    assert wrapped.peft_config["default"].exclude_modules is None


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "fc1"]])
@pytest.mark.parametrize("excluded", [None, ".*o_proj"])
def test_adapters_are_on_what_text_reaches_alone(
    config_of: Any, targets: Any, excluded: str | None
) -> None:
    model = multimodal_cases.model("gemma3")
    more = {"peft": {"exclude_modules": excluded}} if excluded else {}
    config = config_of(target_modules=targets, **more)
    wrapped = add_adapter(model, config, FOLDER, seed=1)
    adapted = {n for n, _ in wrapped.named_parameters() if ".lora_A." in n}
    assert adapted
    assert all(".language_model.layers." in name for name in adapted)
    assert any("o_proj" in name for name in adapted) == (
        targets == "all-linear" and excluded is None
    )
