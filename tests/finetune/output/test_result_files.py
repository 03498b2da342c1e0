import errno
import json
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from roundpipe.finetune.model.adapters import add_adapter
from roundpipe.finetune.model.from_transformers import quiet_transformers
from roundpipe.finetune.model.source import locate_model
from roundpipe.finetune.output.result_files import save_result, save_tokenizer, tokenizer_bytes

# peft 0.21 asks transformers 5.24 for a name that is about to go
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.arange(40).reshape(2, 20)


def as_views_of_one_buffer(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values, changed a little, as 256-byte aligned views of one buffer; ties stay."""
    sizes = [-(-t.numel() * t.element_size() // 256) * 256 for t in state.values()]
    buffer, start = torch.zeros(sum(sizes), dtype=torch.uint8), 0
    views: dict[int, torch.Tensor] = {}
    result = {}
    for (name, tensor), size in zip(state.items(), sizes, strict=True):
        if tensor.data_ptr() not in views:
            end = start + tensor.numel() * tensor.element_size()
            view = buffer[start:end].view(tensor.dtype).view(tensor.shape)
            view.copy_(tensor).mul_(1.5)
            views[tensor.data_ptr()] = view
        result[name] = views[tensor.data_ptr()]
        start += size
    return result


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=IDS).logits
    return result


def load_whole(folder: Path) -> Any:
    with quiet_transformers():
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_of_one_buffer_save_and_reload_as_the_same_model(
    tiny: ModuleType, tmp_path: Path, tied: bool, dtype: torch.dtype
) -> None:
    model = tiny.tiny_model(tied=tied)
    for parameter in model.parameters():  # not .to(): the rotary table stays fp32, as when loaded
        parameter.data = parameter.data.to(dtype)
    newest = as_views_of_one_buffer(model.state_dict())
    save_result(tmp_path, model, newest, tiny.tiny_tokenizer())
    loaded = load_whole(tmp_path)
    model.load_state_dict(newest)
    assert loaded.dtype is dtype
    assert torch.equal(logits(loaded), logits(model))
    embedding, head = loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight
    assert (embedding is head) == tied
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
        size = sum(file.get_tensor(name).nbytes for name in names)
    assert size == sum(p.nbytes for p in model.parameters())
    assert ("lm_head.weight" in names) != tied


class AskedOnce(dict[str, torch.Tensor]):
    """Weights that are made when they are asked for, and say how many are alive at once."""

    alive = most = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        made = super().__getitem__(name).clone()
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(made.untyped_storage(), self._gone)
        return made

    def _gone(self) -> None:
        self.alive -= 1


def test_no_more_than_a_block_s_weights_are_in_memory_at_a_time(
    tiny: ModuleType, tmp_path: Path
) -> None:
    model = tiny.tiny_model()
    newest = AskedOnce(model.state_dict())
    save_result(tmp_path, model, newest, tiny.tiny_tokenizer())
    of_a_block = sum(1 for _ in model.model.layers[0].parameters())
    assert 1 < newest.most <= of_a_block + 1


def test_what_prepares_images_comes_along_with_a_whole_model(
    tiny: ModuleType, tmp_path: Path
) -> None:
    base, folder = tmp_path / "base", tmp_path / "out"
    base.mkdir()
    (base / "preprocessor_config.json").write_text('{"size": 8}')
    model = tiny.tiny_model()
    save_result(folder, model, model.state_dict(), tiny.tiny_tokenizer(), base_folder=base)
    assert (folder / "preprocessor_config.json").read_text() == '{"size": 8}'


def test_the_model_itself_is_not_changed_by_saving(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    newest = as_views_of_one_buffer(model.state_dict())
    save_result(tmp_path, model, newest, tiny.tiny_tokenizer())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert set(newest) == set(before)


def test_an_adapter_loads_with_stock_peft(
    tiny: ModuleType, tiny_folder: Path, tmp_path: Path, config_of: Any
) -> None:
    source = locate_model(str(tiny_folder))
    model = add_adapter(tiny.tiny_model(), config_of(), source, seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    newest = as_views_of_one_buffer(model.state_dict())
    save_result(tmp_path, model, newest, tiny.tiny_tokenizer())
    base = load_whole(tiny_folder)
    base.load_state_dict(
        {
            n.removeprefix("base_model.model.").replace(".base_layer", ""): t
            for n, t in newest.items()
            if "lora_" not in n
        }
    )
    loaded = PeftModel.from_pretrained(base, tmp_path)
    answer = loaded.load_adapter(tmp_path, "again")
    assert not answer.missing_keys
    assert not answer.unexpected_keys
    model.load_state_dict(newest)
    assert torch.equal(logits(loaded), logits(model))
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert all("lora_" in name for name in file.keys())  # noqa: SIM118, not a mapping
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tiny_folder)
    assert settings["inference_mode"] is True
    assert model.peft_config["default"].inference_mode is False


def test_modules_to_save_are_saved_with_the_adapter(
    tiny: ModuleType, tiny_folder: Path, tmp_path: Path, config_of: Any
) -> None:
    config = config_of(target_modules=["q_proj"], modules_to_save=["norm"])
    model = add_adapter(tiny.tiny_model(), config, locate_model(str(tiny_folder)), seed=1)
    newest = as_views_of_one_buffer(model.state_dict())
    save_result(tmp_path, model, newest, tiny.tiny_tokenizer())
    loaded = PeftModel.from_pretrained(load_whole(tiny_folder), tmp_path)
    name = "base_model.model.model.norm.modules_to_save.default.weight"
    assert torch.equal(loaded.state_dict()[name], newest[name])


def test_tokenizer_and_template_are_those_that_were_trained_with(
    tiny: ModuleType, tmp_path: Path
) -> None:
    tokenizer = tiny.tiny_tokenizer()
    model = tiny.tiny_model()
    save_result(tmp_path, model, model.state_dict(), tokenizer)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "ä?"}]
    assert (
        loaded.apply_chat_template(chat)["input_ids"]
        == tokenizer.apply_chat_template(chat)["input_ids"]
    )
    assert (loaded.eos_token, loaded.pad_token) == (tokenizer.eos_token, tokenizer.pad_token)
    assert (tmp_path / "chat_template.jinja").read_text() == tiny.TEMPLATE
    assert (tmp_path / "generation_config.json").exists()


def test_a_full_disk_is_an_oserror_although_tokenizers_has_none(tmp_path: Path) -> None:
    class Full:
        def save_pretrained(self, folder: Path) -> None:
            raise Exception("No space left on device (os error 28)")  # noqa: TRY002, as it does

    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            raise Exception("of another kind")  # noqa: TRY002

    with pytest.raises(OSError, match="No space left on device") as caught:
        save_tokenizer(Full(), tmp_path)  # type: ignore[arg-type]
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(Exception, match="of another kind"):
        save_tokenizer(Broken(), tmp_path)  # type: ignore[arg-type]


def test_the_room_of_a_tokenizer_is_known_before_it_is_written(
    tiny: ModuleType, tmp_path: Path
) -> None:
    tokenizer = tiny.tiny_tokenizer()
    save_tokenizer(tokenizer, tmp_path)
    size = (tmp_path / "tokenizer.json").stat().st_size
    assert tokenizer_bytes(tokenizer) == pytest.approx(size, rel=0.02)
