"""The split chain equals the model: output, loss and every gradient, with no per-model code."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from roundpipe.errors import ModelError
from roundpipe.models import recording
from roundpipe.models.causal_lm import causal_lm_spec
from roundpipe.models.choose import spec_for
from roundpipe.models.loss import count_trained_tokens
from roundpipe.models.spec import Inputs

KINDS = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4},  # scaled, tied embedding; two kinds of mask; soft caps
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "mixtral": {"num_local_experts": 4},
    "mamba": {"state_size": 4},  # no attention at all
    "falcon": {"head_dim": None, "num_kv_heads": 4},
}


# peft asks for an attribute by its old name
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


def loss_of(output):
    return output.loss


def make(tiny, kind):
    settings = {**KINDS.get(kind, {})}
    if kind == "xlnet":
        from transformers import XLNetConfig, XLNetLMHeadModel

        torch.manual_seed(0)
        sizes = {"d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48, "vocab_size": 96}
        return XLNetLMHeadModel(XLNetConfig(**sizes, dropout=0.25, use_mems_eval=False)).eval()
    if kind == "falcon":
        from transformers import FalconConfig, FalconForCausalLM

        torch.manual_seed(0)
        config = FalconConfig(
            hidden_size=32, num_hidden_layers=4, num_attention_heads=4, vocab_size=96
        )
        return FalconForCausalLM(config).eval()
    return tiny.make(kind.split()[0], **settings)


def check_equal(model, microbatches, chain_of, plain, *, tied=()):
    spec = causal_lm_spec(model)
    losses, grads = plain(model, microbatches, loss_of)
    chain = chain_of(spec)
    ours = [chain.forward_backward(inputs, loss_of) for inputs in microbatches]
    assert all(map(torch.equal, losses, ours))
    assert chain.grads.keys() == grads.keys()
    for name, gradient in grads.items():
        if name in tied:  # its two uses add up in another order
            torch.testing.assert_close(chain.grads[name], gradient, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(chain.grads[name], gradient), name
    return spec


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_equal_the_plain_model_over_three_lengths(kind, tiny, chain_of, plain):
    model = make(tiny, kind)
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    name = next(name for name, p in model.named_parameters() if p is embedding)
    check_equal(model, tiny.inputs(), chain_of, plain, tied=[name] if tied else ())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_logits_equal_without_labels_and_without_a_mask(kind, tiny, chain_of):
    model = make(tiny, kind)
    chain = chain_of(causal_lm_spec(model))
    for inputs in tiny.inputs((7, 11)):
        ids = {"input_ids": inputs.kwargs["input_ids"]}
        output = chain.forward(Inputs((), ids))
        with torch.no_grad():
            assert torch.equal(output.logits, model(**ids).logits)
        assert output.loss is None
        assert type(output) is type(model(**ids))


def test_a_positional_input_is_passed_on(tiny, chain_of):
    model = tiny.make("llama")
    ids = tiny.inputs()[0].kwargs["input_ids"]
    with torch.no_grad():
        want = model(ids).logits
    assert torch.equal(chain_of(causal_lm_spec(model)).forward(Inputs((ids,))).logits, want)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_inputs_embeds_positions_and_logits_to_keep_go_to_the_models_own_forward(
    kind, tiny, chain_of
):
    model = make(tiny, kind)
    chain = chain_of(causal_lm_spec(model))
    given = dict(tiny.inputs((9,))[0].kwargs)
    positions = (given["attention_mask"].cumsum(-1) - 1).clamp(min=0) * 2
    with torch.no_grad():
        embedded = model.get_input_embeddings()(given["input_ids"])
    for more in (
        {"input_ids": None, "inputs_embeds": embedded},
        {"position_ids": positions},
        {"labels": None, "logits_to_keep": 2},
        {"labels": None, "logits_to_keep": torch.tensor([1, 4])},
        {"shift_labels": given["labels"].roll(-1, 1)},
    ):
        kwargs = {**given, **more}
        ours = chain.forward(Inputs((), kwargs))
        with torch.no_grad():
            plain = model(**kwargs, use_cache=False)
        assert torch.equal(ours.logits, plain.logits), more.keys()
        assert ours.loss is plain.loss is None or torch.equal(ours.loss, plain.loss)


def test_in_bfloat16_and_in_training_mode_too(tiny, chain_of, plain):
    model = tiny.make("llama").to(torch.bfloat16).train()
    check_equal(model, tiny.inputs((9,)), chain_of, plain)


def test_an_argument_that_drops_out_in_training_is_the_same_for_all_blocks(
    tiny, chain_of, plain, monkeypatch
):
    """XLNet drops out some of its positions once and hands the rest to every block."""

    def every_third_less(x, p=0.5, training=True, inplace=False):
        kept = torch.arange(x.numel()).view(x.shape) % 3 > 0
        return x * kept if training and p else x

    monkeypatch.setattr(nn.functional, "dropout", every_third_less)
    model = make(tiny, "xlnet")
    tied = ["transformer.word_embedding.weight"]
    check_equal(model.train(), tiny.inputs((9,)), chain_of, plain, tied=tied)


def test_each_tensor_belongs_to_the_layers_that_read_it(tiny):
    spec = causal_lm_spec(tiny.make("llama", tie_word_embeddings=True))
    assert [layer.name for layer in spec.layers] == [
        "prefix",
        *(f"model.layers.{index}" for index in range(4)),
        "suffix",
    ]
    parameters = [
        {name for name, t in layer.tensors.items() if isinstance(t, nn.Parameter)}
        for layer in spec.layers
    ]
    assert parameters[0] == {"model.embed_tokens.weight"}
    assert parameters[-1] == {"model.norm.weight", "model.embed_tokens.weight"}
    assert all(name.startswith("model.layers.1.") for name in parameters[2])
    assert set().union(*parameters) == {name for name, _ in spec.module.named_parameters()}


def test_a_parameter_that_nobody_reads_is_in_no_layer_and_gets_no_gradient(tiny, chain_of, plain):
    model = tiny.make("llama")
    model.model.unused = nn.Linear(3, 3)
    spec = check_equal(model, tiny.inputs((9,)), chain_of, plain)
    assert not any("unused" in name for layer in spec.layers for name in layer.tensors)


def test_the_number_of_items_in_the_batch_reaches_the_loss(tiny, chain_of):
    model = tiny.make("qwen3")
    spec = causal_lm_spec(model)
    assert spec.takes_num_items
    assert spec.computes_loss
    microbatches = tiny.inputs()
    total = sum(count_trained_tokens(inputs.kwargs["labels"]) for inputs in microbatches)
    chain = chain_of(spec)
    for count in (total, torch.tensor(total)):
        for inputs in microbatches:
            kwargs = {**inputs.kwargs, "num_items_in_batch": count}
            with torch.no_grad():
                want = model(**kwargs, use_cache=False).loss
            assert torch.equal(chain.forward(Inputs((), kwargs)).loss, want)


def lora(model, **settings):
    from peft import LoraConfig, get_peft_model

    wanted = {"r": 4, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [2]}
    wrapped = get_peft_model(model, LoraConfig(**{**wanted, **settings}))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:  # zero at first: half of the gradients would be zero
            parameter.data.normal_(generator=generator)
    return wrapped.eval()


def test_lora_on_one_layer_of_four_equals_the_plain_model(tiny, chain_of, plain):
    model = lora(tiny.make("llama"))
    spec = check_equal(model, tiny.inputs(), chain_of, plain)
    trainable = [sum(t.requires_grad for t in layer.tensors.values()) for layer in spec.layers]
    assert trainable == [0, 0, 0, 4, 0, 0]
    assert spec.layers[3].name == "base_model.model.model.layers.2"


def test_lora_on_embedding_and_head_equals_the_plain_model(tiny, chain_of, plain):
    model = lora(
        tiny.make("llama"),
        target_modules=["embed_tokens", "lm_head", "up_proj"],
        layers_to_transform=None,
    )
    check_equal(model, tiny.inputs((9, 6)), chain_of, plain)


@pytest.mark.parametrize("prompted", [False, True])
def test_whether_the_first_label_of_a_sequence_is_trained_is_found_out(prompted, tiny):
    """Where tokens of a prompt stand before it, it is; a mean over tokens must count it then."""
    from peft import PromptTuningConfig, get_peft_model

    model = tiny.make("llama")
    if prompted:
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = get_peft_model(model, config).eval()
    spec = causal_lm_spec(model)
    assert spec.shifts_labels is not prompted
    assert spec.takes_num_items


def test_dropout_runs_in_the_shells_and_eval_reaches_them(tiny, chain_of):
    model = tiny.make("gpt2", **KINDS["gpt2"], resid_pdrop=0.5, embd_pdrop=0.5).train()
    chain = chain_of(causal_lm_spec(model))
    inputs = tiny.inputs((9,))[0]
    first, second = chain.forward(inputs).logits, chain.forward(inputs).logits
    assert not torch.equal(first, second)
    model.eval()
    chain.sync_mode()
    with torch.no_grad():
        assert torch.equal(chain.forward(inputs).logits, model(**inputs.kwargs).logits)


def test_the_context_draws_no_random_numbers(tiny):
    model = tiny.make("gpt2", **KINDS["gpt2"], embd_pdrop=0.5).train()
    context = causal_lm_spec(model).make_context(torch.device("cpu"))
    state = torch.random.get_rng_state()
    context(tiny.inputs()[0], range(6))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_context_rebuilds_only_what_it_is_asked_for(tiny):
    context = causal_lm_spec(tiny.make("llama")).make_context(torch.device("cpu"))
    inputs = tiny.inputs()[0]
    assert list(context(inputs, range(2, 4))) == [2, 3]
    assert context(inputs, range(1)) == {}
    assert context(inputs, range(5, 6)) == {}
    assert list(context(inputs, range(6))) == [1, 2, 3, 4]


def test_wrapping_leaves_model_flags_hooks_and_random_state_alone(tiny):
    model = tiny.make("llama").train()
    model.model.norm.eval()
    flags = [module.training for module in model.modules()]
    state = torch.random.get_rng_state()
    causal_lm_spec(model)
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_two_threads_run_shells_of_the_same_layers_and_agree_with_the_model(tiny, chain_of):
    model = tiny.make("llama")
    spec = causal_lm_spec(model)
    microbatches = tiny.inputs((9, 13))
    with torch.no_grad():
        want = [model(**inputs.kwargs).logits for inputs in microbatches]

    def run(which):
        chain = chain_of(spec)
        return sum(
            not torch.equal(chain.forward(microbatches[which]).logits, want[which])
            for _ in range(20)
        )

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, (0, 1))) == [0, 0]


def test_in_a_large_model_only_blocks_of_each_kind_run_when_it_is_wrapped(
    tiny, chain_of, plain, monkeypatch
):
    monkeypatch.setattr(recording, "_RUN_ALL_BELOW", 0)
    model = tiny.make("gemma2", num_hidden_layers=6, sliding_window=4)
    assert recording.record(model).checked == {0, 1, 5}
    name = "model.embed_tokens.weight"
    check_equal(model, tiny.inputs((9,)), chain_of, plain, tied=[name])


def test_gradient_checkpointing_of_the_model_is_off_in_the_shells(tiny, chain_of, plain):
    model = tiny.make("llama").train()
    # its name in transformers 5.24 and before
    turn_on = getattr(model, "activation_checkpointing_enable", None)
    (turn_on or model.gradient_checkpointing_enable)()
    spec = check_equal(model, tiny.inputs((9,)), chain_of, plain)
    shell = spec.layers[1].make_shell(torch.device("cpu"))
    assert not any(getattr(m, "gradient_checkpointing", False) for m in shell.module.modules())
    assert model.model.layers[0].gradient_checkpointing


def test_spec_for_chooses_by_what_the_module_is(tiny):
    model = tiny.make("llama")
    assert spec_for(model).layers[0].name == "prefix"
    assert len(spec_for(lora(model)).layers) == 6
    assert [layer.name for layer in spec_for(nn.Sequential(model)).layers] == ["0"]


def test_a_change_after_wrapping_is_told(tiny):
    model = tiny.make("llama")
    spec = causal_lm_spec(model)
    model.train()
    assert spec.changed_since_wrapping() is None
    model.model.layers[1].register_forward_hook(lambda *_: None)
    assert spec.changed_since_wrapping() == "forward hook added to model.layers.1"


def test_outputs_that_a_model_gathers_between_its_blocks_are_refused(tiny, chain_of):
    model = make(tiny, "mamba")
    inputs = tiny.inputs((9,))[0]
    chain = chain_of(causal_lm_spec(model))
    with pytest.raises(ModelError, match="output_hidden_states is not supported for a model that"):
        chain.forward(Inputs((), {**inputs.kwargs, "output_hidden_states": True}))
    model.config.output_hidden_states = True
    with pytest.raises(ModelError, match="output_hidden_states is not supported for a model that"):
        causal_lm_spec(model)


def test_an_argument_that_transformers_would_write_into_the_shared_config_is_refused(
    tiny, chain_of
):
    chain = chain_of(causal_lm_spec(tiny.make("llama")))
    inputs = tiny.inputs((9,))[0]
    with pytest.raises(ModelError, match="is_causal as an argument is not supported"):
        chain.forward(Inputs((), {**inputs.kwargs, "is_causal": False}))
