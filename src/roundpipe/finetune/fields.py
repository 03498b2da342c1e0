"""TrainConfig: every setting of one run, under one name each, checked before anything is loaded.

The class knows only our own names and finished values; names of other trainers become ours in
`translate.py`, text becomes values in `parse.py`. A default that hangs on another field (the
learning rate on the method, alpha on the rank) is filled in here, so a saved config says what was
really used and loads again. Importing this costs no torch.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

Shape = Literal[
    "messages",
    "conversations",
    "prompt/completion",
    "instruction/output",
    "question/answer",
    "query/response",
    "text",
    "input_ids",
]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]

Memory = int | float  # bytes; or a share, at most 1, of what is free

_DEVICE = re.compile(r"(auto|cpu|cuda|cuda:\d+|\d+)(\s*\*\s*[1-9]\d*)?")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)


class DatasetEntry(BaseModel):
    """One file of a dataset and how to read it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(min_length=1, description="a .jsonl or .json file, also gzipped")
    type: Shape | None = Field(None, description="shape of the rows; recognised from the columns")
    columns: dict[str, str] | None = Field(
        None, description="column of the shape: column of the file, e.g. {question: problem}"
    )
    max_samples: Positive | None = Field(None, description="read only the first so many rows")


def _learning_rate(known: dict[str, Any]) -> float:
    return 1e-5 if known.get("finetuning_type") == "full" else 2e-4


def _eval_strategy(known: dict[str, Any]) -> Literal["no", "steps", "epoch"]:
    if known.get("eval_steps"):
        return "steps"
    return "epoch" if known.get("eval_dataset") or known.get("val_size") else "no"


class TrainConfig(BaseModel):
    """Everything `roundpipe train` can be told. Frozen; equal settings compare equal."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    # model
    model_name_or_path: str = Field(
        min_length=1, description="folder, hub id, id@revision, GGUF file or package:NAME/FILE"
    )
    attn_implementation: Literal["sdpa", "eager"] = Field("sdpa", description="attention code")
    finetuning_type: Literal["lora", "full", "qlora"] = Field(
        "lora", description="what is trained; qlora: lora over base weights in 4 bits"
    )

    # data
    dataset: tuple[DatasetEntry, ...] = Field(
        min_length=1, description="a path, or a list of {path, type, columns, max_samples}"
    )
    max_length: Annotated[int, Field(ge=2)] = Field(2048, description="tokens of one sample")
    truncation: Literal["cut", "drop", "error"] = Field(
        "cut", description="what happens to samples that are longer"
    )
    train_on_prompt: bool = Field(False, description="train every token, not only answers")
    mask_history: bool = Field(False, description="train only the last answer of a conversation")
    chat_template: str = Field(
        "auto", min_length=1, description="auto (the model's own), chatml, a .jinja file, a model"
    )
    on_bad_line: Literal["stop", "skip"] = Field("stop", description="a line that is no sample")

    # how long, how much at once
    batch_size: Positive = Field(16, description="samples per optimizer step")
    micro_batch_size: Positive | None = Field(None, description="samples per microbatch")
    num_train_epochs: Annotated[float, Field(gt=0)] = Field(3.0, description="passes over the data")
    max_steps: Positive | None = Field(None, description="optimizer steps; overrides epochs")

    # optimizer
    optim: Literal["adamw_torch"] = Field("adamw_torch", description="the optimizer")
    optim_state_dtype: Literal["fp32", "bf16", "int8"] = Field(
        "fp32", description="of the optimizer's moments: 8, 4 or 2 bytes of each trained weight"
    )
    learning_rate: Annotated[float, Field(ge=0)] = Field(
        default_factory=_learning_rate, description="peak rate; 2e-4 for adapters, 1e-5 for full"
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="decoupled decay")
    adam_beta1: Share = Field(0.9, description="decay of the first moment")
    adam_beta2: Share = Field(0.999, description="decay of the second moment")
    adam_epsilon: Annotated[float, Field(gt=0)] = Field(1e-8, description="added to the root")
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="clip the global gradient norm; none: do not clip"
    )
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup"] = Field(
        "cosine", description="how the rate falls"
    )
    warmup_steps: Annotated[float, Field(ge=0)] = Field(
        0.03, description="optimizer steps; below 1 a share of all steps"
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="cosine ends at this share of the peak rate"
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto",
        description="of weights and arithmetic; auto: fp32 on CPU, bf16 on a GPU, fp16 on one "
        "that has no bf16",
    )

    # adapter
    lora_r: Positive = Field(16, description="rank")
    lora_alpha: Annotated[float, Field(gt=0)] = Field(
        default_factory=lambda known: 2 * known.get("lora_r", 16), description="scale; 2 x rank"
    )
    lora_dropout: Share = Field(0.0, description="dropout before the adapter")
    target_modules: str | tuple[str, ...] = Field(
        "all-linear", description="all-linear, a list of names, or a regular expression"
    )
    target_parameters: tuple[str, ...] | None = Field(
        None, description="stacked experts that get adapters too, e.g. mlp.experts.gate_up_proj"
    )
    modules_to_save: tuple[str, ...] | None = Field(
        None, description="modules trained whole and saved with the adapter"
    )
    use_dora: bool = Field(False, description="decompose weights into size and direction")
    use_rslora: bool = Field(False, description="scale by alpha / sqrt(rank)")
    peft: dict[str, Any] | None = Field(None, description="any other field of peft's LoraConfig")

    # evaluation
    eval_dataset: tuple[DatasetEntry, ...] | None = Field(
        None, description="like dataset, never trained on"
    )
    val_size: Annotated[float, Field(gt=0)] | None = Field(
        None, description="samples held out of dataset; below 1 a share"
    )
    eval_steps: Positive | None = Field(None, description="evaluate every so many steps")
    eval_strategy: Literal["no", "steps", "epoch"] = Field(
        default_factory=_eval_strategy, description="when to evaluate"
    )
    sample_prompts: tuple[str, ...] = Field(
        (), description="questions answered before and after training"
    )

    # output
    output_dir: str = Field("out", min_length=1, description="folder of the run")
    overwrite_output_dir: bool = Field(False, description="replace what is in output_dir")
    logging_steps: Positive = Field(1, description="log every so many steps")
    report_to: Literal["none"] = Field("none", description="loggers besides trainer_log.jsonl")

    # runtime
    devices: int | str | tuple[int | str, ...] = Field(
        "auto", description="auto, a number, cpu, cpu*3, cuda:0, or a list of these"
    )
    num_microbatch: Positive | None = Field(None, description="microbatches of a step")
    schedule: Literal["auto", "round_robin", "hybrid", "replicated", "gpipe"] = Field(
        "auto", description="how stages are dealt to devices; round_robin: bits depend on no device"
    )
    staleness: Literal[0, 1] = Field(0, description="0: exact; 1: weights one step old")
    recompute_grain: Literal["stage", "layer"] | None = Field(
        None, description="how much is recomputed at once in backward"
    )
    device_memory_limit: Positive | None = Field(
        None, description="bytes of each device that may be used, e.g. 20GB"
    )
    host_memory_limit: Memory | None = Field(
        None, description="memory that the run may take, e.g. 64GB, or 0.8 of what is free"
    )
    pinned_memory_limit: Memory | None = Field(
        None, description="memory that may be page-locked, e.g. 64GB, or 0.8 of what is free"
    )
    machine: str | dict[str, Any] | None = Field(
        None,
        description="what is planned for, e.g. 8x4090,512GB, or a machine file; none: this one",
    )

    # misc
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(42, description="of everything random")
    data_seed: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        None, description="of the order of the data; none: seed"
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_means_default(cls, given: Any) -> Any:
        """Drop nulls, save where none is itself a setting; a bare false asks for nothing either."""
        if not isinstance(given, dict):
            return given
        values: dict[str, Any] = {}
        for key, value in given.items():
            field = cls.model_fields.get(key)
            is_switch = field is None or field.annotation is bool or key == "eval_strategy"
            if field is not None and value is True and not is_switch:
                raise ValueError(f"{key}: true is no value\nhint: {key}: {field.description}")
            if key == "max_grad_norm" and (value is None or value is False):
                values[key] = None
            elif value is not None and (value is not False or is_switch):
                values[key] = value
        return values

    @field_validator("dataset", "eval_dataset", mode="before")
    @classmethod
    def _entries(cls, given: Any) -> Any:
        """A path stands for an entry, one entry for a list of one."""
        entries = given if isinstance(given, list | tuple) else [given]
        return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]

    @field_validator("modules_to_save", "target_parameters", "sample_prompts", mode="before")
    @classmethod
    def _one_is_a_list(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given

    @field_validator("max_steps", mode="before")
    @classmethod
    def _minus_one_is_none(cls, given: Any) -> Any:
        return None if given == -1 else given

    @field_validator("eval_strategy", mode="before")
    @classmethod
    def _no_is_a_word(cls, given: Any) -> Any:
        """YAML reads a bare no as false."""
        return "no" if given is False else given

    @field_validator("devices", mode="before")
    @classmethod
    def _devices_well_formed(cls, given: Any) -> Any:
        if isinstance(given, str) and "," in given:
            given = [part.strip() for part in given.split(",")]
        if isinstance(given, int) and given < 1:
            raise ValueError(f"not a number of devices: {given}\nhint: devices=auto")
        names = given if isinstance(given, list | tuple) else [given]
        if not names:
            raise ValueError("no device is named: []\nhint: devices=auto")
        for name in names:
            if not isinstance(name, int) and not _DEVICE.fullmatch(str(name)):
                raise ValueError(
                    f"not a device: {name}\nhint: devices=auto, devices=cpu, devices=cpu*2 "
                    "or devices=[cuda:0, cuda:1]"
                )
        return given

    @field_validator("machine", mode="before")
    @classmethod
    def _machine_as_text(cls, given: Any) -> Any:
        """A card's name may look like a number: 4090."""
        return str(given) if isinstance(given, int) and not isinstance(given, bool) else given

    @field_validator("device_memory_limit", mode="before")
    @classmethod
    def _memory_in_bytes(cls, given: Any) -> Any:
        if isinstance(given, list | tuple) or (isinstance(given, int | float) and 0 < given <= 1):
            raise ValueError(f"not yet as a share or a list: {given}\nhint: 20GB, for each device")
        return _bytes_of(given, "device_memory_limit=20GB")

    @field_validator("host_memory_limit", "pinned_memory_limit", mode="before")
    @classmethod
    def _memory_or_share(cls, given: Any, about: ValidationInfo) -> Any:
        if given is None or (isinstance(given, int | float) and 0 < given <= 1):
            return given if given is None else float(given)
        example = f"{about.field_name}=64GB, or 0.8"
        if (found := _bytes_of(given, example)) < 1:
            raise ValueError(f"not an amount of memory: {given}\nhint: {example}")
        return found

    @field_validator("warmup_steps", "val_size")
    @classmethod
    def _whole_from_one(cls, given: float | None) -> float | None:
        if given is not None and given >= 1 and given != int(given):
            raise ValueError(f"neither a share below 1 nor a whole number: {given}")
        return given

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        for problem in _contradictions(self):
            raise ValueError(problem)
        return self


def _bytes_of(given: Any, example: str) -> int:
    """An amount such as 20GB in bytes."""
    found = _MEMORY.fullmatch(str(given).strip())
    if not found:
        raise ValueError(f"not an amount of memory: {given}\nhint: {example}")
    number, prefix, binary = found.groups()
    factor: int = (1024 if binary else 1000) ** " kmgt".index((prefix or " ").lower())
    return round(float(number) * factor)


def _contradictions(config: TrainConfig) -> list[str]:
    """What two settings of one config say against each other, each with a way out."""
    has_eval = config.eval_dataset is not None or config.val_size is not None
    rules = (
        (
            config.eval_dataset is not None and config.val_size is not None,
            "eval_dataset and val_size are both given\nhint: leave one of them out",
        ),
        (
            config.eval_strategy != "no" and not has_eval,
            f"eval_strategy: {config.eval_strategy}, but there is no data to evaluate on"
            "\nhint: val_size=0.1, or eval_dataset=FILE.jsonl",
        ),
        (
            config.eval_strategy == "steps" and config.eval_steps is None,
            "eval_strategy: steps, but not how many\nhint: eval_steps=50",
        ),
        (
            config.min_lr_ratio is not None and config.lr_scheduler_type != "cosine",
            f"min_lr_ratio needs a cosine schedule, not: {config.lr_scheduler_type}"
            "\nhint: lr_scheduler_type=cosine",
        ),
        (
            config.finetuning_type == "qlora" and config.use_dora,
            "use_dora takes the size of the base weights apart, and qlora packs them"
            "\nhint: use_dora=false, or finetuning_type=lora",
        ),
        (
            config.finetuning_type == "qlora" and _reads_weights(config.peft or {}),
            "peft: init_lora_weights takes the base weights apart, and qlora packs them"
            "\nhint: leave it out, or finetuning_type=lora",
        ),
        (
            config.train_on_prompt and config.mask_history,
            "train_on_prompt and mask_history ask for opposite things\nhint: leave one of them out",
        ),
        (
            config.micro_batch_size is not None
            and config.num_microbatch is not None
            and -(-config.batch_size // config.micro_batch_size) != config.num_microbatch,
            f"batch_size: {config.batch_size} is not num_microbatch: {config.num_microbatch} "
            f"microbatches of micro_batch_size: {config.micro_batch_size}"
            "\nhint: leave one of them out",
        ),
    )
    return [problem for broken, problem in rules if broken]


def _reads_weights(peft: dict[str, Any]) -> bool:
    """Whether an adapter is to start from the weights that it is put on."""
    start = peft.get("init_lora_weights")
    return isinstance(start, str) and start not in ("gaussian", "orthogonal")
