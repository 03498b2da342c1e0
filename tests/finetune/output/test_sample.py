from types import ModuleType
from typing import Any

import pytest
import torch

from roundpipe.finetune.model.adapters import add_adapter
from roundpipe.finetune.model.source import ModelSource
from roundpipe.finetune.output.sample import answer_prompts, copy_around


def test_the_newest_weights_answer_not_those_in_the_model(tiny: ModuleType) -> None:
    model, tokenizer = tiny.tiny_model(), tiny.tiny_tokenizer()
    newest = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    letter = tokenizer.convert_tokens_to_ids("z")
    for name, tensor in newest.items():  # a model that says nothing but "z"
        tensor.zero_()
        if name == "model.norm.weight":
            tensor.fill_(1)
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            tensor[:, 0] = 0.1
            tensor[letter, 0] = 5
    assert answer_prompts(model, newest, tokenizer, ["a?", "b?"], max_new_tokens=5) == ["zzzzz"] * 2


def test_answering_ends_at_the_end_token(tiny: ModuleType) -> None:
    model, tokenizer = tiny.tiny_model(), tiny.tiny_tokenizer()
    newest = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    newest["model.norm.weight"] += 1
    newest["model.embed_tokens.weight"][:, 0] = 0.1
    newest["model.embed_tokens.weight"][tokenizer.eos_token_id, 0] = 5
    newest["lm_head.weight"] = newest["model.embed_tokens.weight"]
    assert answer_prompts(model, newest, tokenizer, ["a?"]) == [""]


def test_it_equals_greedy_generate_whatever_the_models_own_settings(tiny: ModuleType) -> None:
    model, tokenizer = tiny.tiny_model(), tiny.tiny_tokenizer()
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
    found = answer_prompts(model, model.state_dict(), tokenizer, ["hello"], max_new_tokens=9)
    assert found == [expected]
    assert model.generation_config.do_sample is True


def test_a_tokenizer_without_a_template_gets_the_plain_prompt(tiny: ModuleType) -> None:
    model, tokenizer = tiny.tiny_model(), tiny.tiny_tokenizer(template=None)
    assert len(answer_prompts(model, model.state_dict(), tokenizer, ["x"], max_new_tokens=2)) == 1


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_trained_model_is_disturbed(
    tiny: ModuleType, config_of: Any, training: bool
) -> None:
    model = add_adapter(tiny.tiny_model(), config_of(), ModelSource("./b", "./b"), seed=1).train(
        training
    )
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    answer_prompts(model, weights, tiny.tiny_tokenizer(), ["a", "b"], max_new_tokens=3)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads
    assert model.training is training
    assert all(module.training is training for module in model.modules())
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == pointers
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


def test_the_copy_shares_every_tensor_and_keeps_ties(tiny: ModuleType) -> None:
    model = tiny.tiny_model(tied=True)
    newest = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    newest["lm_head.weight"] = newest["model.embed_tokens.weight"]
    copied = copy_around(model, newest)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    for name, parameter in copied.named_parameters():
        assert parameter.data_ptr() == newest[name].data_ptr()
    for (_, ours), (_, theirs) in zip(copied.named_buffers(), model.named_buffers(), strict=True):
        assert ours is theirs


def test_no_prompts_cost_nothing(tiny: ModuleType) -> None:
    assert answer_prompts(torch.nn.Linear(1, 1), {}, tiny.tiny_tokenizer(), []) == []
