"""Twenty steps of loss equal those of TRL's SFTTrainer, on the same samples, masks and batches.

TRL tokenises prompt and completion itself, and what it trains is compared with ours first. It ends
an answer where the chat template ends the message, a line break after the end token included, which
ours leaves out (nothing is generated after the end token): that one label is taken out of TRL's.

Both in fp32 on the CPU, without dropout, in the order of the file: what differs is how sums are
rounded, and with packing also how samples are kept apart.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.accept,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore"),  # of other libraries; what they say is not ours to mend
]

STEPS = 20
LONGEST = 512  # no sample is cut
IGNORED = -100


@dataclass(frozen=True)
class Case:
    """One way of training; ``packing``: several samples share a row."""

    method: str
    rate: float
    packing: bool = False

    @property
    def batch(self):
        """Rows of a step; about as many tokens either way."""
        return 2 if self.packing else 4


FULL = Case("full", 1e-4)
LORA = Case("lora", 1e-3)
PACKED = Case("full", 1e-4, packing=True)
PACKED_LORA = Case("lora", 1e-3, packing=True)


@dataclass(frozen=True)
class Work:
    """What is trained on what; ``row``: tokens that two or three samples fit into."""

    model: Path
    data: Path
    row: int


def write_messages(path, rows):
    """Questions and answers as conversations, one a line."""
    with path.open("w") as file:
        for question, answer in rows:
            said = (("system", "Be brief."), ("user", question), ("assistant", answer))
            messages = [{"role": role, "content": content} for role, content in said]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def config_of(case, work, folder):
    from roundpipe.finetune.settings.config import make_config

    given = {
        "model_name_or_path": str(work.model),
        "dataset": str(work.data),
        "output_dir": str(folder / "ours"),
        "finetuning_type": case.method,
        "learning_rate": case.rate,
        "max_length": work.row if case.packing else LONGEST,
        "packing": case.packing,
        "batch_size": case.batch,
        "max_steps": STEPS,
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "dtype": "fp32",
        "devices": "cpu",
        "save_strategy": "no",
    }
    return make_config(given)[0]


def our_losses(config):
    from roundpipe.finetune.run.loop import train

    train(config)
    with open(f"{config.output_dir}/trainer_log.jsonl") as file:
        records = [json.loads(line) for line in file]
    return [record["loss"] for record in records if "loss" in record]


def our_samples(config):
    """The samples of the run, and of each step the rows of samples that it trains."""
    from transformers import AutoTokenizer

    from roundpipe.finetune.data.dataset import load_dataset
    from roundpipe.finetune.data.order import Order

    dataset = load_dataset(config, AutoTokenizer.from_pretrained(config.model_name_or_path))
    order = Order.of(config, dataset)
    return dataset.samples, [order.rows(step) for step in range(1, STEPS + 1)]


def trl_arguments(case, folder, **more):
    from trl import SFTConfig

    return SFTConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=case.batch,
        max_steps=STEPS,
        learning_rate=case.rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch",
        train_sampling_strategy="sequential",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=42,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **more,
    )


def trl_trainer(case, model, folder, dataset, **more):
    """An SFTTrainer that notes each step's loss in ``losses``."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTTrainer

    class Noting(SFTTrainer):
        losses: list[float]

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.losses.append(loss.item())
            return loss

    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = Noting(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        args=trl_arguments(case, folder, **more),
        train_dataset=dataset,
        peft_config=lora if case.method == "lora" else None,
    )
    trainer.losses = []
    return trainer


def prepared_by_trl(case, work, folder):
    """TRL's tokens and labels of the conversations, prompt and answer told apart by itself."""
    from datasets import Dataset

    rows = [json.loads(line)["messages"] for line in work.data.read_text().splitlines()]
    told_apart = [{"prompt": row[:-1], "completion": row[-1:]} for row in rows]
    dataset = Dataset.from_list(told_apart)
    trainer = trl_trainer(case, work.model, folder, dataset, max_length=LONGEST)
    return trainer.train_dataset, trainer.processing_class


def without_what_follows_the_end(labels, end):
    """Labels of an answer up to its end token."""
    last = max(i for i, label in enumerate(labels) if label == end)
    return [*labels[: last + 1], *[IGNORED] * (len(labels) - last - 1)]


def compare(case, work, folder):
    """Print and hold both runs' losses against each other."""
    from datasets import Dataset

    config = config_of(case, work, folder)
    samples, steps = our_samples(config)
    theirs, tokenizer = prepared_by_trl(case, work, folder)
    assert len(samples) == len(theirs)
    ready = []
    for ours, row in zip(samples, theirs, strict=True):
        labels = without_what_follows_the_end(row["labels"], tokenizer.eos_token_id)
        assert ours.input_ids.tolist() == row["input_ids"]
        assert ours.labels.tolist() == labels
        assert tokenizer.decode([t for t in row["labels"][len(labels) :] if t >= 0]).strip() == ""
        ready.append({"input_ids": row["input_ids"], "labels": labels})

    def joined(row):
        parts = [ready[number] for number in row]
        whole = {key: [t for part in parts for t in part[key]] for key in ("input_ids", "labels")}
        return {**whole, "seq_lengths": [len(part["input_ids"]) for part in parts]}

    rows = [joined(row) for step in steps for row in step]
    assert len(rows) == STEPS * case.batch
    if case.packing:  # as TRL's own packing gives them to its collator
        assert max(len(row["seq_lengths"]) for row in rows) > 1
        more = {"padding_free": True, "dataset_kwargs": {"skip_prepare_dataset": True}}
    else:
        rows = [{key: row[key] for key in ("input_ids", "labels")} for row in rows]
        more = {}
    dataset = Dataset.from_list(rows)
    trainer = trl_trainer(case, work.model, folder, dataset, max_length=None, **more)
    trainer.train()
    expected, found = trainer.losses, our_losses(config)
    assert len(found) == len(expected) == STEPS
    difference = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    tokens = sum(len(row["input_ids"]) for row in rows)
    print(  # noqa: T201 - the figures
        f"\n{work.model.name}, {case}: {tokens} tokens, loss {expected[0]:.5f} to "
        f"{expected[-1]:.5f}, ours {found[0]:.5f} to {found[-1]:.5f}; largest relative difference "
        f"{difference:.1e}"
    )
    assert difference <= 1e-4
    assert sum(found[-5:]) < sum(found[:5])  # it does learn


CASES = pytest.mark.parametrize(
    "case", [FULL, LORA, PACKED, PACKED_LORA], ids=["full", "lora", "packed", "packed lora"]
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random Llama of two layers with a tokenizer of bytes, and sums to learn."""
    place = Path(__file__).parents[1] / "finetune" / "tiny_model.py"
    spec = importlib.util.spec_from_file_location("tiny_model", place)
    functions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(functions)
    folder = functions.write_tiny_folder(tmp_path_factory.mktemp("models") / "tiny")
    rows = [
        (f"{'so ' * (i % 5)}what is {i} + {i}?", f"it is {2 * i}" + " or so" * (i % 7))
        for i in range(16 * STEPS)
    ]
    return Work(folder, write_messages(folder / "data.jsonl", rows), row=256)


@CASES
def test_a_tiny_model_has_the_losses_of_trl(tiny, tmp_path, case):
    compare(case, tiny, tmp_path)


@pytest.fixture(scope="module")
def whole(smollm2, tmp_path_factory):
    """SmolLM2-135M-Instruct as a folder, and the shortest questions of GSM8K."""
    smollm2.skip_if_absent()
    folder = tmp_path_factory.mktemp("models") / "SmolLM2-135M"
    model, tokenizer = smollm2.whole_model()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del model
    with smollm2.DATA.open() as lines:
        rows = [json.loads(line) for line in lines]
    rows.sort(key=lambda row: len(row["question"]) + len(row["answer"]))
    chosen = [(row["question"], row["answer"]) for row in rows[: 16 * STEPS]]
    return Work(folder, write_messages(folder / "data.jsonl", chosen), row=224)


@CASES
def test_smollm2_on_gsm8k_has_the_losses_of_trl(whole, tmp_path, case):
    compare(case, whole, tmp_path)
