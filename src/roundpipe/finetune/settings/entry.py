"""DatasetEntry: one part of a dataset, as the ``dataset`` key lists them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

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


class DatasetEntry(BaseModel):
    """One part of a dataset and how to read it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(
        min_length=1,
        description="a file (.jsonl, .json, .csv, .txt, .parquet, .arrow), a folder, or a hub id",
    )
    name: str | None = Field(None, description="configuration of a dataset of the hub")
    split: str | None = Field(
        None, description="split of a folder or hub id, also train[:1000]; train"
    )
    data_files: tuple[str, ...] | None = Field(None, description="only these files, may have *")
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")
    type: Shape | None = Field(None, description="shape of the rows; recognised from the columns")
    columns: dict[str, str] | None = Field(
        None,
        description="column of the shape: column of the file, e.g. {question: problem}; role and "
        "content: fields of messages",
    )
    roles: dict[Literal["system", "user", "assistant", "tool"], tuple[str, ...]] | None = Field(
        None, description="names of roles in the messages, e.g. {user: [asker], assistant: [bot]}"
    )
    max_samples: Positive | None = Field(None, description="read only the first so many rows")
    weight: Annotated[float, Field(gt=0)] = Field(
        1.0, description="how often an epoch sees each sample; 0.5: half of them, others each time"
    )

    @field_validator("data_files", mode="before")
    @classmethod
    def _one_is_a_list(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given

    @field_validator("roles", mode="before")
    @classmethod
    def _one_name_is_a_list(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {ours: [name] if isinstance(name, str) else name for ours, name in given.items()}
