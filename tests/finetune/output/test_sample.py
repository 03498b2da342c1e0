"""Answers of a model that is being trained, or that somebody talks with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.engine.generating_cases import made
from transformers import GenerationConfig

from roundpipe import RoundPipe
from roundpipe.errors import ConfigError, DataError, DeviceError
from roundpipe.finetune.model.adapters import add_adapter
from roundpipe.finetune.model.source import ModelSource
from roundpipe.finetune.output.sample import Answerer, answer, sampling_settings
from roundpipe.optim import AdamW

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

# What transformers says of tiny models, and of settings that a test gives on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]

PROMPTS = ["how many legs has a cat, and how many have three cats together?", "hm", "a b c", "why?"]


def talking(model: Any, letter: int) -> Any:
    """``model`` with weights of which it says nothing but one token."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
        model.model.norm.weight.fill_(1)
        for table in (model.model.embed_tokens.weight, model.lm_head.weight):
            table[:, 0] = 0.1
            table[letter, 0] = 5
    return model


def varied(model: Any) -> Any:
    """``model`` with weights of which it says many different things."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4, generator=generator)
    return model


@pytest.fixture
def pipe(tiny: ModuleType) -> Iterator[RoundPipe]:
    with RoundPipe(varied(tiny.tiny_model(tied=False)), devices="cpu*3") as made_pipe:
        yield made_pipe


def test_answering_ends_at_the_end_token_or_after_so_many_tokens(tiny: ModuleType) -> None:
    tokenizer = tiny.tiny_tokenizer()
    for letter, expected in (
        (tokenizer.convert_tokens_to_ids("z"), "zzzzz"),
        (tokenizer.eos_token_id, ""),
    ):
        with RoundPipe(talking(tiny.tiny_model(), letter), devices="cpu") as pipe:
            assert answer(pipe, tokenizer, ["a?", "b?"], max_new_tokens=5) == [expected] * 2


def test_an_answer_ends_where_the_template_ends_a_turn(tiny: ModuleType) -> None:
    tokenizer = tiny.tiny_tokenizer()
    letter = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.eos_token = "<|pad|>"  # as of models whose settings name another end
    model = talking(tiny.tiny_model(), letter)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    with RoundPipe(model, devices="cpu") as pipe:
        answerer = Answerer(pipe, tokenizer, max_new_tokens=9)
        assert answerer.answers(["a?"]) == [""]
        assert answerer.num_tokens == 1


def test_it_equals_greedy_generate_whatever_the_models_own_settings(tiny: ModuleType) -> None:
    model, tokenizer = varied(tiny.tiny_model(tied=False)), tiny.tiny_tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    plain = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9
    )
    expected = tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True).strip()
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.2
    model.generation_config.max_length = 3
    with RoundPipe(model, devices="cpu") as pipe:
        assert answer(pipe, tokenizer, ["hello"], max_new_tokens=9) == [expected]
        shown: list[str] = []
        streamed = Answerer(pipe, tokenizer, max_new_tokens=9).stream("hello", shown.append)
    assert streamed == expected == "".join(shown).strip()
    assert len(shown) > 1
    assert model.generation_config.do_sample is True


def test_questions_conversations_and_tokens_are_asked_alike(
    pipe: RoundPipe, tiny: ModuleType
) -> None:
    tokenizer = tiny.tiny_tokenizer()
    message = {"role": "user", "content": "how?"}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    same = ["how?", [message], [{"from": "human", "value": "how?"}], tokenizer(text)["input_ids"]]
    found = answer(pipe, tokenizer, same, max_new_tokens=6)
    assert found == found[:1] * 4
    plain = tiny.tiny_tokenizer(template=None)
    assert answer(pipe, plain, ["x"], max_new_tokens=2) == answer(
        pipe, plain, [plain("x")["input_ids"]], max_new_tokens=2
    )
    assert answer(pipe, tokenizer, []) == []


def test_a_template_without_system_prompt_gets_it_in_the_question(
    pipe: RoundPipe, tiny: ModuleType
) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = tiny.tiny_tokenizer(template=refusing + tiny.TEMPLATE)
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how?"}]
    found = answer(pipe, tokenizer, [asked, "be brief\n\nhow?"], max_new_tokens=6)
    assert found[0] == found[1]
    with pytest.raises(DataError, match="refuses the conversation"):
        answer(pipe, tokenizer, [asked[:1]])


CASES = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Gemma2": {"sliding_window": 5, "tie_word_embeddings": False},
    "GPT2": {"n_positions": 160},
    "Mamba2": {},
    "FalconH1": {},
}


QUICK = {("Llama", torch.float32), ("Llama", torch.bfloat16), ("Gemma2", torch.float32)}
QUICK |= {("Mamba2", torch.float32)}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[] if (name, dtype) in QUICK else [pytest.mark.accept])
        for name in CASES
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_prompts_together_get_the_answers_of_prompts_one_by_one(
    tiny: ModuleType, name: str, dtype: torch.dtype
) -> None:
    tokenizer = tiny.tiny_tokenizer()
    model = varied(made(name, vocab_size=260, max_position_embeddings=160, **CASES[name])).to(dtype)
    with RoundPipe(model, devices="cpu") as pipe:
        one_by_one = Answerer(pipe, tokenizer, max_new_tokens=6, batch_size=1).answers(PROMPTS)
        together = Answerer(pipe, tokenizer, max_new_tokens=6, batch_size=3).answers(PROMPTS)
        pipe.planner._ground = _limited(pipe, 0)  # all blocks are streamed
        assert not Answerer(pipe, tokenizer).outlook(PROMPTS).is_resident
        streamed = Answerer(pipe, tokenizer, max_new_tokens=6, batch_size=4).answers(PROMPTS)
    assert len(set(one_by_one)) > 1
    assert together == one_by_one
    assert streamed == one_by_one


def _limited(pipe: RoundPipe, num_bytes: int) -> Any:
    from dataclasses import replace

    return replace(pipe.planner._ground, memory_limit=None, soft_limit=num_bytes or 1)


def test_a_model_that_takes_padding_for_text_gets_prompts_of_one_length_together(
    tiny: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = varied(made("Mamba2", vocab_size=260))
    tokenizer = tiny.tiny_tokenizer()
    prompts = [*PROMPTS, "hm", "so?"]
    with RoundPipe(model, devices="cpu") as pipe:
        expected = Answerer(pipe, tokenizer, max_new_tokens=6, batch_size=1).answers(prompts)
        forward = type(model).forward

        def without_mask(self: Any, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(type(model), "forward", without_mask)
        sizes: list[int] = []
        answerer = Answerer(pipe, tokenizer, max_new_tokens=6)
        padded = answerer._padded
        monkeypatch.setattr(
            answerer,
            "_padded",
            lambda rows, width: (sizes.append(len(rows)), padded(rows, width))[1],
        )
        assert answerer.answers(prompts) == expected
    assert sizes == [1, 1, 1, 1, 1, 1, 2]  # the trial; then each length by itself


def test_a_tokenizer_without_pad_token_answers_several(pipe: RoundPipe, tiny: ModuleType) -> None:
    expected = answer(pipe, tiny.tiny_tokenizer(), PROMPTS, max_new_tokens=6)
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.pad_token = None
    assert answer(pipe, tokenizer, PROMPTS, max_new_tokens=6) == expected


def test_a_prompt_that_ends_the_positions_cuts_no_answer_but_its_own(tiny: ModuleType) -> None:
    tokenizer = tiny.tiny_tokenizer(template=None)
    model = varied(made("GPT2", vocab_size=260, eos_token_id=259))
    with RoundPipe(model, devices="cpu") as pipe:
        prompts = ["a" * 61, "why", "b" * 59]  # of 64 positions
        answerer = Answerer(pipe, tokenizer, max_new_tokens=6)
        found = answerer.answers(prompts)
        assert answerer.num_tokens == 3 + 6 + 5
        expected = [answer(pipe, tokenizer, [prompt], max_new_tokens=6) for prompt in prompts]
    assert [[text] for text in found] == expected


def test_padding_is_not_among_the_tokens_that_a_layer_picks(tiny: ModuleType) -> None:
    model = tiny.tiny_model()
    model.config.index_topk = 8
    tokenizer = tiny.tiny_tokenizer(template=None)
    with RoundPipe(model, devices="cpu") as pipe:
        answerer = Answerer(pipe, tokenizer, max_new_tokens=2)
        assert answerer._together([[5] * 6, [5] * 3, [5] * 3]) == [[0, 1, 2]]
        assert answerer._together([[5] * 7, [5] * 3, [5] * 3]) == [[0], [1, 2]]


def test_padding_does_not_count_as_said_before(tiny: ModuleType) -> None:
    tokenizer = tiny.tiny_tokenizer(template=None)
    tokenizer.pad_token = None  # so that it would be padded with what ends an answer
    model = talking(tiny.tiny_model(tied=False), tokenizer.eos_token_id)
    with RoundPipe(model, devices="cpu") as pipe:
        how = {"max_new_tokens": 4, "no_repeat_ngram_size": 1}
        answerer = Answerer(pipe, tokenizer, **how)
        assert answerer.answers(["a long one", "b"]) == ["", ""]
        assert answerer.num_tokens == 2


def test_what_fills_up_short_answers_is_no_part_of_them(
    tiny: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny.tiny_tokenizer()
    end, letter = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("z")
    with RoundPipe(tiny.tiny_model(), devices="cpu") as pipe:
        answerer = Answerer(pipe, tokenizer)
        output = torch.tensor([[letter, end, letter, letter], [letter, letter, letter, letter]])
        monkeypatch.setattr(
            pipe, "generate", lambda input_ids, **_: torch.cat([input_ids, output], dim=1)
        )
        assert answerer.answers(["a", "b"]) == ["z", "zzzz"]
    assert answerer.num_tokens == 6
    assert re.fullmatch(r"6 tokens in \d\.\d s: [\d.,]+ tokens/s", answerer.rate_line())


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_trained_model_is_disturbed(
    tiny: ModuleType, config_of: Any, training: bool
) -> None:
    model = add_adapter(tiny.tiny_model(), config_of(), ModelSource("./b", "./b"), seed=1).train(
        training
    )
    with RoundPipe(model, devices="cpu*2") as pipe:
        weights = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
        flags = {name: p.requires_grad for name, p in model.named_parameters()}
        random, threads = torch.get_rng_state(), torch.get_num_threads()
        answer(pipe, tiny.tiny_tokenizer(), ["a", "bc"], max_new_tokens=3, do_sample=True, seed=5)
        assert torch.equal(torch.get_rng_state(), random)
        assert torch.get_num_threads() == threads
        assert model.training is training
        assert all(module.training is training for module in model.modules())
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == pointers
        assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
        now = pipe.state_dict()
        assert all(torch.equal(weights[name], tensor) for name, tensor in now.items())


def test_answers_between_steps_are_of_the_newest_weights(tiny: ModuleType) -> None:
    tokenizer = tiny.tiny_tokenizer()
    ids = torch.tensor([tokenizer("say it: zzzzzzzzzzzzzzzzzzz")["input_ids"]])
    with RoundPipe(tiny.tiny_model(), devices="cpu*2") as pipe:
        optimizer = AdamW(pipe.optim_parameters(), lr=0.05)
        for _ in range(12):
            pipe.forward_backward(input_kwargs={"input_ids": ids, "labels": ids})
            pipe.step(optimizer, is_async=True)
        (found,) = answer(pipe, tokenizer, ["say it"], max_new_tokens=4)
    assert "zz" in found


def test_sampling_is_that_of_the_seed(pipe: RoundPipe, tiny: ModuleType) -> None:
    tokenizer = tiny.tiny_tokenizer()
    how = {"max_new_tokens": 12, "do_sample": True, "temperature": 3.0}
    found = [answer(pipe, tokenizer, ["x"], seed=seed, **how)[0] for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_a_temperature_alone_has_tokens_drawn_anew_each_time(
    pipe: RoundPipe, tiny: ModuleType
) -> None:
    answerer = Answerer(pipe, tiny.tiny_tokenizer(), max_new_tokens=12, temperature=3.0)
    before = torch.get_rng_state()
    assert len({answerer.answers(["x"])[0] for _ in range(4)}) > 1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"do_sample": False}),
        ({"top_p": 0.9, "top_k": None}, {"do_sample": True, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.5}, {"do_sample": False, "temperature": 0.5}),
        ({"do_sample": True, "temperature": 0.0, "top_k": 5}, {"do_sample": False}),
    ],
)
def test_what_is_said_of_sampling_is_what_is_done(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert sampling_settings(given) == expected


@pytest.mark.parametrize(
    ("given", "way_out"),
    [
        ({"temprature": 0.5}, "no setting of generate: temprature\nhint: temperature"),
        ({"num_return_sequences": 2}, "[prompt] * 4"),
    ],
)
def test_sampling_that_means_nothing_is_refused_not_ignored(
    given: dict[str, Any], way_out: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(way_out)):
        sampling_settings(given)


def test_answers_stop_when_asked_and_say_how_far_they_are(
    pipe: RoundPipe, tiny: ModuleType
) -> None:
    tokenizer, done = tiny.tiny_tokenizer(), []
    answerer = Answerer(pipe, tokenizer, max_new_tokens=3, batch_size=2)
    found = answerer.answers(PROMPTS, tell=done.append, should_stop=lambda: bool(done))
    assert done == [2]
    assert [bool(each) for each in found].count(True) <= 2
    shown: list[str] = []
    text = answerer.stream("x", shown.append, should_stop=lambda: bool(shown))
    assert len(text) <= 2


def test_where_no_room_is_for_so_many_fewer_are_answered_at_a_time(
    pipe: RoundPipe, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, sizes = tiny.tiny_tokenizer(), []
    expected = answer(pipe, tokenizer, PROMPTS, max_new_tokens=6)
    generate = pipe.generate

    def small(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        sizes.append(len(input_ids))
        if len(input_ids) > 1:
            raise DeviceError("no room") from torch.OutOfMemoryError()
        return generate(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(pipe, "generate", small)
    assert answer(pipe, tokenizer, PROMPTS, max_new_tokens=6) == expected
    assert sizes == [4, 2, 1, 1, 2, 1, 1]


def test_what_the_model_says_of_itself_holds_where_nothing_else_is_said(
    tiny: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.tiny_model()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_p=0.9, repetition_penalty=1.2, eos_token_id=257
    )
    seen: dict[str, Any] = {}
    sampled = type(model)._sample

    def watched(self: Any, *args: Any, generation_config: Any, **kwargs: Any) -> Any:
        seen.update(generation_config.to_dict())
        return sampled(self, *args, generation_config=generation_config, **kwargs)

    monkeypatch.setattr(type(model), "_sample", watched)
    with RoundPipe(model, devices="cpu") as pipe:
        answer(pipe, tiny.tiny_tokenizer(), ["x"], max_new_tokens=2, do_sample=True, top_p=0.5)
    assert (seen["temperature"], seen["top_p"], seen["repetition_penalty"]) == (0.7, 0.5, 1.2)
