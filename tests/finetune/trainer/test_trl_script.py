"""TRL's own SFT script trains here with two lines changed, to the losses that it had before."""

from __future__ import annotations

import json
import shlex
import warnings
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tqdm

trl = pytest.importorskip("trl")

from peft import PeftModel  # noqa: E402
from trl.scripts import sft  # noqa: E402 - not without trl

from roundpipe.finetune.trainer.trainer import RoundPipeTrainer  # noqa: E402

if TYPE_CHECKING:
    from types import ModuleType

_IMPORT = "from trl import SFTTrainer, get_dataset,"
_CLASS = "trainer = SFTTrainer("
_FLAGS = "--use_cpu --bf16 False --report_to none --disable_tqdm True --logging_steps 1"


@pytest.fixture(autouse=True)
def _quietly(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two splits as files."""
    folder = tmp_path_factory.mktemp("talks")
    for split, count in (("train", 11), ("test", 3)):
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"{'so ' * (i % 3)}what is {i}?"},
                    {"role": "assistant", "content": f"it is {i}" * (1 + i % 4)},
                ]
            }
            for i in range(count)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)
    return folder


def run_script(arguments: list[str], *, is_changed: bool) -> list[dict[str, Any]]:
    """Run the script, with its two lines changed or not; what it logged."""
    source = Path(sft.__file__).read_text(encoding="utf-8")
    assert source.count(_IMPORT) == source.count(_CLASS) == 1
    made: list[Any] = []
    kind: Any = trl.SFTTrainer
    if is_changed:
        kind = RoundPipeTrainer
        source = source.replace(
            _IMPORT, "from roundpipe import RoundPipeTrainer; from trl import get_dataset,"
        ).replace(_CLASS, "trainer = RoundPipeTrainer(")

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        first(self, *args, **kwargs)

    first = kind.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__init__", noting)
        names: dict[str, Any] = {"__name__": "changed script"}
        exec(compile(source, sft.__file__, "exec"), names)  # as a user would run it
        parsed = names["make_parser"](None).parse_args_and_config(arguments)
        names["main"](*parsed)
    (trainer,) = made
    with closing(trainer) if is_changed else nullcontext():
        return list(trainer.state.log_history)


def arguments_of(model: Path, data: Path, out: Path, flags: str) -> list[str]:
    named = ("--model_name_or_path", model, "--dataset_name", data, "--output_dir", out)
    return [*map(str, named), *shlex.split(f"{_FLAGS} {flags}")]


def losses_in(history: list[dict[str, Any]]) -> list[float]:
    return [record[name] for record in history for name in ("loss", "eval_loss") if name in record]


def test_the_script_has_its_losses_with_two_lines_changed(
    tiny_folder: Path, talks: Path, tmp_path: Path
) -> None:
    flags = (
        "--learning_rate 1e-2 --num_train_epochs 2 --per_device_train_batch_size 2 "
        "--gradient_accumulation_steps 2 --eval_strategy steps --eval_steps 2 "
        "--eos_token '<|im_end|>' --train_sampling_strategy sequential"
    )
    before, after = (
        run_script(arguments_of(tiny_folder, talks, tmp_path / name, flags), is_changed=is_changed)
        for name, is_changed in (("theirs", False), ("ours", True))
    )
    assert len(losses_in(before)) == 6 + 3
    assert losses_in(after) == pytest.approx(losses_in(before), rel=1e-5)  # sums round otherwise
    saved = {path.name for path in (tmp_path / "ours").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "checkpoint-6"} <= saved


def test_the_script_packs_and_trains_an_adapter(
    tiny: ModuleType, tiny_folder: Path, talks: Path, tmp_path: Path
) -> None:
    flags = (
        "--learning_rate 1e-3 --num_train_epochs 1 --packing --max_length 128 "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 "
        "--eval_strategy steps --eval_steps 100 --use_peft --lora_r 4 --lora_alpha 8 "
        "--lora_target_modules q_proj v_proj --eos_token '<|im_end|>'"
    )
    out = tmp_path / "out"
    history = run_script(arguments_of(tiny_folder, talks, out, flags), is_changed=True)
    assert losses_in(history)
    settings = json.loads((out / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
    assert sorted(settings["target_modules"]) == ["q_proj", "v_proj"]
    PeftModel.from_pretrained(tiny.tiny_model(), out)
