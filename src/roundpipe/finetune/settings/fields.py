"""TrainConfig: every setting of one run, under one name each, checked before anything is loaded.

The class knows only our own names and finished values; names of other trainers become ours in
`translate.py`, text becomes values in `parse.py`. A default that hangs on another field (the
learning rate on the method, alpha on the rank) is filled in here, so a saved config says what was
really used and loads again. Importing this costs no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from roundpipe.finetune.settings.checks import DEVICE, bytes_of, contradictions
from roundpipe.finetune.settings.entry import DatasetEntry, Positive, Shape

__all__ = ["DatasetEntry", "Shape", "TrainConfig"]

StepsOrShare = Annotated[float, Field(gt=0)]

Share = Annotated[float, Field(ge=0, lt=1)]

_NONE_IS_SAID = ("max_grad_norm", "save_total_limit", "resume_from_checkpoint")
_SWITCHES = ("eval_strategy", "save_strategy", "save_total_limit", "resume_from_checkpoint")
Memory = int | float  # bytes; or a share, at most 1, of what is free


def _learning_rate(known: dict[str, Any]) -> float:
    return 1e-5 if known.get("finetuning_type") in ("full", "freeze") else 2e-4


def _eval_strategy(known: dict[str, Any]) -> Literal["no", "steps", "epoch"]:
    if known.get("eval_steps"):
        return "steps"
    return "epoch" if known.get("eval_dataset") or known.get("val_size") else "no"


def _save_strategy(known: dict[str, Any]) -> Literal["minutes", "steps", "epoch", "best", "no"]:
    return "steps" if known.get("save_steps") else "minutes"


class TrainConfig(BaseModel):
    """Everything `roundpipe train` can be told. Frozen; equal settings compare equal."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    # model
    model_name_or_path: str = Field(
        min_length=1, description="folder, hub id, id@revision, GGUF file or package:NAME/FILE"
    )
    attn_implementation: Literal["sdpa", "eager"] = Field("sdpa", description="attention code")
    adapter_name_or_path: str | None = Field(
        None, description="an adapter that training starts from: folder or hub id"
    )
    finetuning_type: Literal["lora", "full", "qlora", "freeze"] = Field(
        "lora",
        description="what is trained; qlora: lora over base weights in 4 bits; freeze: what "
        "unfrozen_parameters says",
    )
    unfrozen_parameters: tuple[str, ...] | None = Field(
        None,
        description="regular expressions; parameters they match are trained, no others; "
        "layers:-2 the last two layers, layers:2 the first two, layers:-2:mlp a part of them",
    )

    # data
    dataset: tuple[DatasetEntry, ...] = Field(
        min_length=1,
        description="a path, or a list of {path, split, type, columns, weight, …}",
    )
    max_length: Annotated[int, Field(ge=2)] = Field(2048, description="tokens of one sample")
    truncation: Literal["cut", "drop", "error"] = Field(
        "cut", description="what happens to samples that are longer"
    )
    train_on_prompt: bool = Field(False, description="train every token, not only answers")
    mask_history: bool = Field(False, description="train only the last answer of a conversation")
    chat_template: str = Field(
        "auto",
        min_length=1,
        description="auto (the model's own), chatml, a .jinja file, its text, a model",
    )
    special_tokens: dict[str, str | tuple[str, ...]] | None = Field(
        None,
        description="tokens that the tokenizer must have; eos_token, what ends a text: "
        "{eos_token: <|im_end|>}",
    )
    on_bad_line: Literal["stop", "skip"] = Field("stop", description="a line that is no sample")
    packing: bool = Field(False, description="several samples in one row of max_length tokens")
    train_sampling_strategy: Literal["random", "sequential", "group_by_length"] = Field(
        "random", description="order of the samples; group_by_length: less padding"
    )
    dataset_prepared_path: str | None = Field(
        None, description="folder where tokens are kept; none: below the home folder's cache"
    )

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
        default_factory=_learning_rate, description="peak rate; 2e-4 for adapters, else 1e-5"
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="decoupled decay")
    adam_beta1: Share = Field(0.9, description="decay of the first moment")
    adam_beta2: Share = Field(0.999, description="decay of the second moment")
    adam_epsilon: Annotated[float, Field(gt=0)] = Field(1e-8, description="added to the root")
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="clip the global gradient norm; none: do not clip"
    )
    lr_scheduler_type: Literal[
        "cosine",
        "linear",
        "constant",
        "constant_with_warmup",
        "cosine_with_min_lr",
        "warmup_stable_decay",
    ] = Field("cosine", description="how the rate falls")
    warmup_steps: Annotated[float, Field(ge=0)] = Field(
        0.03, description="optimizer steps; below 1 a share of all steps"
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="a cosine or a decay ends at this share of the peak rate"
    )
    lr_scheduler_kwargs: dict[str, Any] | None = Field(
        None,
        description="of warmup_stable_decay: num_decay_steps, num_stable_steps, decay_type, "
        "warmup_type; of a cosine: num_cycles",
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto",
        description="of weights and arithmetic; auto: fp32 on CPU, bf16 on a GPU, fp16 on one "
        "that has no bf16",
    )
    fp16_accumulation: bool = Field(
        False, description="sums of fp16 products in fp16: twice the rate of consumer cards"
    )
    neftune_noise_alpha: Annotated[float, Field(gt=0)] | None = Field(
        None, description="noise on embeddings while training, e.g. 5"
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
    eval_steps: StepsOrShare | None = Field(
        None, description="evaluate every so many steps; below 1 a share of all steps"
    )
    eval_strategy: Literal["no", "steps", "epoch"] = Field(
        default_factory=_eval_strategy, description="when to evaluate"
    )
    load_best_model_at_end: bool = Field(False, description="the best evaluation's weights win")
    metric_for_best_model: Literal["eval_loss"] = Field(
        "eval_loss", description="what the best is told by"
    )
    early_stopping_patience: Positive | None = Field(
        None, description="stop after so many evaluations that are no better"
    )
    sample_prompts: tuple[str, ...] = Field(
        (), description="questions answered before and after training"
    )

    # output
    output_dir: str = Field("out", min_length=1, description="folder of the run")
    overwrite_output_dir: bool = Field(False, description="replace what is in output_dir")
    logging_steps: Positive = Field(1, description="log every so many steps")
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = Field(
        (), description="loggers besides trainer_log.jsonl: tensorboard, wandb, mlflow, trackio"
    )
    run_name: str | None = Field(None, description="the run's name in loggers; none: output_dir's")
    project: str | None = Field(None, description="the project's name in loggers")

    # saving
    save_minutes: Annotated[float, Field(gt=0)] = Field(
        30.0, description="save a checkpoint every so many minutes"
    )
    save_steps: StepsOrShare | None = Field(
        None, description="save every so many steps instead; below 1 a share of all steps"
    )
    save_strategy: Literal["minutes", "steps", "epoch", "best", "no"] = Field(
        default_factory=_save_strategy, description="when to save; no: only when interrupted"
    )
    save_total_limit: Positive | None = Field(
        2, description="checkpoints that are kept; none: all of them"
    )
    save_only_model: bool = Field(
        False, description="checkpoints without optimizer state: nothing goes on from them"
    )
    resume_from_checkpoint: str = Field(
        "auto", description="auto: go on with an unfinished run; none; or a checkpoint's folder"
    )

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
            is_switch = field is None or field.annotation is bool or key in _SWITCHES
            if field is not None and value is True and not is_switch:
                raise ValueError(f"{key}: true is no value\nhint: {key}: {field.description}")
            if key in _NONE_IS_SAID and (value is None or value is False):
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

    @field_validator(
        "modules_to_save",
        "target_parameters",
        "sample_prompts",
        "unfrozen_parameters",
        mode="before",
    )
    @classmethod
    def _one_is_a_list(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given

    @field_validator("max_steps", mode="before")
    @classmethod
    def _minus_one_is_none(cls, given: Any) -> Any:
        return None if given == -1 else given

    @field_validator("resume_from_checkpoint", mode="before")
    @classmethod
    def _resume_is_a_word(cls, given: Any) -> Any:
        words = {None: "none", False: "none", True: "auto"}
        return words.get(given, given) if given is None or isinstance(given, bool) else given

    @field_validator("report_to", mode="before")
    @classmethod
    def _loggers_by_name(cls, given: Any) -> Any:
        names = given.replace(",", " ").split() if isinstance(given, str) else list(given)
        return [name for name in names if name not in ("none", "no")]

    @field_validator("eval_strategy", "save_strategy", mode="before")
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
            if not isinstance(name, int) and not DEVICE.fullmatch(str(name)):
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
        return bytes_of(given, "device_memory_limit=20GB")

    @field_validator("host_memory_limit", "pinned_memory_limit", mode="before")
    @classmethod
    def _memory_or_share(cls, given: Any, about: ValidationInfo) -> Any:
        if given is None or (isinstance(given, int | float) and 0 < given <= 1):
            return given if given is None else float(given)
        example = f"{about.field_name}=64GB, or 0.8"
        if (found := bytes_of(given, example)) < 1:
            raise ValueError(f"not an amount of memory: {given}\nhint: {example}")
        return found

    @field_validator("warmup_steps", "val_size", "eval_steps", "save_steps")
    @classmethod
    def _whole_from_one(cls, given: float | None) -> float | None:
        if given is not None and given >= 1 and given != int(given):
            raise ValueError(
                f"neither a share below 1 nor a whole number: {given}\nhint: 0.1, or a whole number"
            )
        return given

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        for problem in contradictions(self):
            raise ValueError(problem)
        return self
