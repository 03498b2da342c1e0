"""Generation gives the plain model's tokens, whatever it is asked and whatever fits."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.engine.generating_cases import (
    MODELS,
    NEW,
    block_bytes,
    made,
    prompts,
    train,
    uploaded,
    within,
)
from torch import nn

from roundpipe import RoundPipe
from roundpipe.engine import generation
from roundpipe.errors import ConfigError, ModelError
from roundpipe.models.loading.pack_model import pack_model
from roundpipe.optim import AdamW

# What transformers says of tiny models, and of settings that a test gives on purpose.
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "Qwen3"])
def test_tokens_are_the_plain_models_whether_weights_stay_or_are_streamed(name):
    model = made(name)
    plain = copy.deepcopy(model).eval()
    given = prompts()
    expected = plain.generate(**given, **NEW, do_sample=False)
    assert expected.shape == (3, 15)
    with RoundPipe(model.train(), devices="cpu") as pipe:
        resident = pipe.generate(**given, **NEW, do_sample=False)
        once = uploaded(pipe)
        streamed = within(pipe, 0, **given, **NEW, do_sample=False)
    assert torch.equal(resident, expected)
    assert torch.equal(streamed, expected)
    assert once < uploaded(pipe) - once


def with_more(every, *chosen):
    """All as parameters, those that are not ``chosen`` for `make accept`."""
    marks = {True: [], False: [pytest.mark.accept]}
    return [pytest.param(name, marks=marks[name in chosen]) for name in every]


WAYS = {
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.95},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "without a cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "looked up in the prompt": {"prompt_lookup_num_tokens": 2},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


@pytest.fixture
def llama():
    """A wrapped model, and a plain one of the same weights."""
    model = made("Llama")
    plain = copy.deepcopy(model).eval()
    with RoundPipe(model.train(), devices="cpu*3") as pipe:
        yield pipe, plain


@pytest.mark.parametrize("way", with_more(WAYS, "sampled", "beams", "static cache"))
def test_every_way_of_decoding_gives_the_plain_models_tokens(llama, way):
    pipe, plain = llama
    given = prompts(rows=1 if "looked" in way else 3)
    results = []
    for call in (plain.generate, pipe.generate, lambda **k: within(pipe, 0, **k)):
        torch.manual_seed(5)
        results.append(call(**given, **{"do_sample": False, **NEW, **WAYS[way]}))
        results.append(torch.rand(1))  # the random state goes on alike
    for plains, ours in (results[2:4], results[4:6]):
        assert torch.equal(plains, results[0])
        assert torch.equal(ours, results[1])


def test_scores_and_hidden_states_come_with_the_tokens(llama):
    pipe, plain = llama
    asked = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_hidden_states": True,
        "do_sample": False,
        **NEW,
    }
    expected = plain.generate(**prompts(), **asked)
    found = within(pipe, 0, **prompts(), **asked)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(map(torch.equal, found.scores, expected.scores))
    states = zip(found.hidden_states, expected.hidden_states, strict=True)
    assert all(all(map(torch.equal, ours, theirs)) for ours, theirs in states)
    assert type(found) is type(expected)


def test_a_cache_goes_on_where_it_ended(llama):
    from transformers import DynamicCache

    pipe, plain = llama
    ids = prompts(rows=1)["input_ids"]
    results = []
    for call in (plain.generate, pipe.generate):
        cache = DynamicCache()
        first = call(ids, cache=cache, do_sample=False, **NEW)
        results.append(call(first, cache=cache, do_sample=False, **NEW))
        assert cache.get_seq_length() == 22
    assert torch.equal(*results)


def test_streamers_and_criteria_are_asked_as_always(llama):
    pipe, _ = llama

    class Streamer:
        tokens, ended = [], False

        def put(self, value):
            self.tokens.extend(value.flatten().tolist())

        def end(self):
            self.ended = True

    streamer = Streamer()

    def enough(ids, _scores, **_):
        return torch.full((ids.shape[0],), ids.shape[1] >= 10)

    ids = prompts(rows=1)["input_ids"]
    found = pipe.generate(ids, streamer=streamer, stopping_criteria=[enough], max_new_tokens=9)
    assert found.shape == (1, 10)
    assert streamer.tokens == found[0].tolist()
    assert streamer.ended


def test_in_inference_mode_it_generates_and_goes_on_training(llama):
    pipe, plain = llama
    with torch.inference_mode():
        found = within(pipe, 0, **prompts(), do_sample=False, **NEW)
    assert torch.equal(found, plain.generate(**prompts(), do_sample=False, **NEW))
    found = within(pipe, 0, **prompts(), do_sample=False, **NEW)
    assert torch.equal(found, plain.generate(**prompts(), do_sample=False, **NEW))


@pytest.mark.parametrize("staleness", [0, 1])
def test_generating_between_steps_uses_the_newest_weights_and_changes_no_step(staleness):
    results = []
    for generates in (False, True):
        model = made("Qwen3", num_hidden_layers=3).to(torch.bfloat16)
        plain = copy.deepcopy(model).eval()
        with RoundPipe(model.train(), devices="cpu*2") as pipe:
            optimizer = AdamW(pipe.optim_parameters(), lr=1e-2)
            losses = []
            for number in range(2):
                losses.append(train(pipe, number))
                if generates:  # gradients wait on the host meanwhile
                    pipe.generate(**prompts(), max_new_tokens=1)
                pipe.step(optimizer, is_async=bool(staleness))
                if generates:
                    given = {**prompts(), "max_new_tokens": 4, "do_sample": False}
                    ours = [pipe.generate(**given)]
                    ours.append(within(pipe, 0, newest=staleness == 1, **given))
                    plain.load_state_dict(pipe.state_dict())
                    expected = plain.generate(**given)
                    assert torch.equal(ours[0], expected)
                    assert torch.equal(ours[1], expected)
                    assert model.training
            results.append((torch.stack(losses), pipe.state_dict()))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[0][1][name], value) for name, value in results[1][1].items())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.parametrize("packed", [False, True])
def test_adapters_generate_over_whole_and_packed_weights(packed):
    from peft import LoraConfig, get_peft_model

    model = made("Llama", hidden_size=64, head_dim=16).to(torch.bfloat16)
    bases = pack_model(model) if packed else None
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    plain = None if packed else copy.deepcopy(adapted).eval()
    with RoundPipe(adapted.train(), devices="cpu", bases=bases) as pipe:
        if plain is None:
            whole = made("Llama", hidden_size=64, head_dim=16).to(torch.bfloat16)
            plain = get_peft_model(whole, config, autocast_adapter_dtype=False).eval()
            plain.load_state_dict(pipe.state_dict())
        expected = plain.generate(**prompts(), do_sample=False, **NEW)
        outside = sum(pipe._layers[at].slot_layout.num_bytes for at in (0, -1))
        work = generation.work_bytes(plain, (), {**prompts(), **NEW})
        for room in (None, outside + work + block_bytes(pipe), 0):
            found = within(pipe, room, **prompts(), do_sample=False, **NEW)
            assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])  # Qwen3's head is its embedding
def test_the_base_generates_without_adapters_and_what_they_have_trained_whole(name):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4,
        target_modules=["q_proj"],
        modules_to_save=["lm_head", "embed_tokens"],
        init_lora_weights=False,
    )
    base = made(name)
    adapted = get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    asked = {**prompts(), "do_sample": False, **NEW}
    expected, other = base.eval().generate(**asked), adapted.eval().generate(**asked)
    assert not torch.equal(expected, other)
    for limit in (None, 120_000):  # that all weights stay in, and that some are streamed through
        with RoundPipe(adapted, devices="cpu", device_memory_limit=limit) as pipe:
            assert torch.equal(pipe.generate(**asked, use_adapter=False), expected)
            assert torch.equal(pipe.generate(**asked), other)
    with RoundPipe(base, devices="cpu") as pipe, pytest.raises(ConfigError, match="no adapter"):
        pipe.generate(**asked, use_adapter=False)


def test_what_cannot_generate_is_refused_with_the_way_out():
    with (
        RoundPipe(nn.Sequential(nn.Linear(4, 4)), devices="cpu") as pipe,
        pytest.raises(ModelError, match=r"Sequential does not generate text[\s\S]*hint: wrap"),
    ):
        pipe.generate(torch.zeros(1, 4))


def test_a_call_does_not_go_on_from_a_cache(llama):
    from transformers import DynamicCache

    pipe, _ = llama
    ids = prompts()["input_ids"]
    asked = r"a call does not go on from a cache: past_key_values is given\nhint: generate\("
    with pytest.raises(ConfigError, match=asked):
        pipe(ids, past_key_values=DynamicCache())
    with pytest.raises(ConfigError, match="cache is given"):
        pipe.forward_backward(input_kwargs={"input_ids": ids, "labels": ids, "cache": object()})
    with torch.no_grad():
        assert pipe(ids, use_cache=True, cache=None).get("past_key_values") is None


def test_a_table_that_a_block_grows_stays_grown_while_weights_pass_by():
    class Growing(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.register_buffer("table", torch.arange(8.0))

        def forward(self, x):
            if x.shape[1] > len(self.table):
                self.table = torch.arange(float(x.shape[1]))
            return self.inner(x) * self.table.mean()

    def growing():
        model = made("Llama").eval()
        for layer in model.model.layers:
            layer.mlp = Growing(layer.mlp)
        return model

    given = {**prompts(length=12), "do_sample": False, **NEW}
    expected, model = growing().generate(**given), growing()
    with RoundPipe(model, devices="cpu") as pipe:
        for room in (None, 0):
            assert torch.equal(within(pipe, room, **given), expected)
    assert all(len(layer.mlp.table) == 8 for layer in model.model.layers)
