"""TRL's own SFT script, two lines changed, on SmolLM2-135M-Instruct and GSM8K, as a user runs it.

With the flags that the script's own text names, but for those of a hub; on the CPU in fp32. Without
packing its losses are those that it has before the change.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.accept, pytest.mark.timeout(3600)]

_CHANGES = {
    "from trl import SFTTrainer, get_dataset,": (
        "from roundpipe import RoundPipeTrainer; from trl import get_dataset,"
    ),
    "trainer = SFTTrainer(": "trainer = RoundPipeTrainer(",
}
_HERE = "--use_cpu --bf16 False --logging_steps 1 --max_steps 2"
_COMMON = (
    "--num_train_epochs 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 "
    "--eos_token '<|im_end|>' --eval_strategy steps --eval_steps 2 --max_length 256"
)
FULL = f"--learning_rate 2.0e-5 {_COMMON}"
LORA = f"--learning_rate 2.0e-4 {_COMMON} --use_peft --lora_r 32 --lora_alpha 16"
_IN_ORDER = "--train_sampling_strategy sequential"


@pytest.fixture(scope="module")
def work(smollm2, tmp_path_factory):
    """A folder with the model, a dataset of two splits, and both scripts."""
    from trl.scripts import sft

    smollm2.skip_if_absent()
    folder = tmp_path_factory.mktemp("work")
    model, tokenizer = smollm2.whole_model()
    model.save_pretrained(folder / "SmolLM2")
    tokenizer.save_pretrained(folder / "SmolLM2")
    del model
    rows = [json.loads(line) for line in smollm2.DATA.read_text().splitlines()]
    rows.sort(key=lambda row: len(row["question"]) + len(row["answer"]))
    (folder / "gsm8k").mkdir()
    for split, chosen in (("train", rows[:64]), ("test", rows[64:72])):
        lines = [
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": row["question"]},
                        {"role": "assistant", "content": row["answer"]},
                    ]
                }
            )
            for row in chosen
        ]
        (folder / "gsm8k" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    source = Path(sft.__file__).read_text(encoding="utf-8")
    (folder / "theirs.py").write_text(source, encoding="utf-8")
    for before, after in _CHANGES.items():
        assert source.count(before) == 1
        source = source.replace(before, after)
    (folder / "ours.py").write_text(source, encoding="utf-8")
    return folder


def run(work, script, flags, out):
    """Run a script in the folder; the records of its log."""
    named = f"--model_name_or_path SmolLM2 --dataset_name gsm8k --output_dir {out}"
    command = [sys.executable, script, *shlex.split(f"{named} {flags} {_HERE}")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Training completed." in done.stdout
    states = sorted((work / out).glob("checkpoint-*/trainer_state.json"))
    return json.loads(states[-1].read_text())["log_history"]


def losses_in(records):
    return [record[name] for record in records for name in ("loss", "eval_loss") if name in record]


@pytest.mark.parametrize("flags", [FULL, LORA], ids=["full", "lora"])
def test_the_script_trains_packed_as_its_text_says(work, flags, request):
    out = f"packed {request.node.callspec.id}".replace(" ", "-")
    records = run(work, "ours.py", f"{flags} --packing", out)
    losses = losses_in(records)
    print(f"\n{out}: {losses}")  # noqa: T201 - the figures
    assert len(losses) == 2 + 1
    assert (work / out / "tokenizer.json").is_file()


@pytest.mark.parametrize("flags", [FULL, LORA], ids=["full", "lora"])
def test_the_script_has_the_losses_that_it_has_unchanged(work, flags, request):
    name = request.node.callspec.id
    theirs = losses_in(run(work, "theirs.py", f"{flags} {_IN_ORDER}", f"theirs-{name}"))
    ours = losses_in(run(work, "ours.py", f"{flags} {_IN_ORDER}", f"ours-{name}"))
    print(f"\n{name}: {ours} and {theirs}")  # noqa: T201 - the figures
    assert len(ours) == 2 + 1
    # An adapter starts from other random numbers; its first loss is the base's in both.
    rest = slice(None) if name == "full" else slice(1)
    assert ours[rest] == pytest.approx(theirs[rest], rel=1e-4)
