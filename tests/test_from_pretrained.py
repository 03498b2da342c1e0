"""From files to training: ``RoundPipe.from_pretrained``."""

from __future__ import annotations

import pytest
import torch
from tests.models.loading_cases import config

import roundpipe
from roundpipe.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_bars():
    """They leave a thread behind."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture(params=["qwen3", "qwen3_moe"])
def folder(request, tmp_path):
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config(request.param), dtype=torch.float32)
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    return tmp_path / "model"


def adapters():
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def batch(step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 96, (5, 9), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def losses(ours, steps=3):
    optimizer = roundpipe.optim.AdamW(ours.optim_parameters(), lr=1e-2)
    found = []
    for step in range(steps):
        found.append(ours.forward_backward(input_kwargs=batch(step)).item())
        ours.step(optimizer, max_grad_norm=1.0)
    return found


def test_training_from_files_equals_training_what_transformers_loads(folder):
    from transformers import AutoModelForCausalLM

    with roundpipe.RoundPipe.from_pretrained(folder, devices="cpu*2") as ours:
        found, weights = losses(ours), ours.state_dict()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    with roundpipe.RoundPipe(plain, devices="cpu*2") as other:
        assert losses(other) == found
        assert all(torch.equal(weights[n], value) for n, value in other.state_dict().items())


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_adapters_train_over_mapped_and_over_loaded_weights_alike(folder, tmp_path, quantization):
    found = []
    for mapped in (False, True, True):  # the third finds the files that the second wrote
        torch.manual_seed(7)
        said = []
        with roundpipe.RoundPipe.from_pretrained(
            folder,
            quantization=quantization,
            peft_config=adapters(),
            mapped=mapped,
            cache_folder=tmp_path / "cache",
            progress=lambda done, total, said=said: said.append((done, total)),
            devices="cpu*2",
        ) as ours:
            found.append(losses(ours))
            with torch.no_grad():
                assert ours(**batch(9)).loss.isfinite()
            assert {n for n, p in ours.named_parameters() if p.requires_grad} == {
                name for name, _ in ours.optim_named_parameters()
            }
        assert said[-1][0] == said[-1][1]
    assert found[0] == found[1] == found[2]
    assert found[0][-1] < found[0][0] + 1


def test_weights_in_files_cannot_be_trained(folder):
    with pytest.raises(ConfigError, match="mapped weights cannot be trained"):
        roundpipe.RoundPipe.from_pretrained(folder, mapped=True, devices="cpu")
    with pytest.raises(ConfigError, match="quantization"):
        roundpipe.RoundPipe.from_pretrained(folder, quantization="gptq", devices="cpu")
    with pytest.raises(ConfigError):
        roundpipe.RoundPipe.from_pretrained(folder / "nowhere", devices="cpu")


def test_weights_and_adapters_lie_on_the_host_whatever_the_default_device_is(folder):
    with (
        torch.device("meta"),
        roundpipe.RoundPipe.from_pretrained(
            folder, quantization="nf4", peft_config=adapters(), devices="cpu"
        ) as ours,
    ):
        assert {tensor.device.type for tensor in ours.model.state_dict().values()} == {"cpu"}
    with pytest.raises(ConfigError, match="mapped must be"):
        roundpipe.RoundPipe.from_pretrained(folder, mapped="yes", devices="cpu")


@pytest.mark.parametrize("settings", [{"init_lora_weights": "pissa"}, {"use_dora": True}])
def test_adapters_that_read_the_base_are_refused_over_packed_weights(folder, settings):
    from peft import LoraConfig

    apart = LoraConfig(r=4, target_modules=["q_proj"], **settings)
    with pytest.raises(ConfigError, match="take the base weights apart"):
        roundpipe.RoundPipe.from_pretrained(
            folder, quantization="nf4", peft_config=apart, devices="cpu"
        )
