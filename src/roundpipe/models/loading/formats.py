"""Forms in which files hold weights in fewer bits, and what each makes of a file's names.

A model's own names know nothing of scales and blocks: `as_weights` puts one `Stored` tensor in the
place of the two or six tensors of the files that make it, so that all behind it reads plain
weights.
"""

from __future__ import annotations

import json
from math import ceil, prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.errors import ConfigError
from roundpipe.models.loading.stored import BnbFourBit, Fp8, MxFp4, Stored
from roundpipe.store.packed import SCALES, Packed, has_usual_codes, packed_entries

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.models.loading.shards import FileTensor

_WAY_OUT = (
    "load the model in 16 bits, as its authors published it; quantization=nf4 packs it to 4 bits "
    "while it is loaded"
)
_SCALE_NAMES = (".weight_scale_inv", ".scale", ".qscale_weight")  # beside ``.weight``
_UNUSED = (".activation_scale", ".input_scale", ".qscale_act")
_STATE = ".quant_state.bitsandbytes__"
_STATE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def as_weights(config: Any, files: Mapping[str, FileTensor]) -> dict[str, Stored]:
    """The weights that ``files`` hold, by the names they would have in 16 bits.

    ``config``: the model's ``quantization_config``, a mapping or None. Raises ConfigError, naming
    the method and the way out, for one that is not read, and for parts that are missing.
    """
    method = _method(config)
    if method is None:
        return _plain(files)
    if method == "bitsandbytes":
        return _bitsandbytes(files)
    return _mxfp4(files) if method == "mxfp4" else _fp8(files, config)


def refuse_form(config: Any) -> None:
    """Raise ConfigError for a model whose files are in a form that is not read.

    ``config``: of transformers. Known before there is a file of weights.
    """
    for each in (config, config.get_text_config()):
        _method(getattr(each, "quantization_config", None))


def _method(config: Any) -> str | None:
    """The form that a ``quantization_config`` tells of; None: as it is. Raises ConfigError."""
    if not config:
        return None
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    method = config.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in config else None)
    is_8_bits = not (config.get("load_in_4bit") or config.get("_load_in_4bit"))
    if method in ("mxfp4", "fp8") or (method == "bitsandbytes" and not is_8_bits):
        return str(method)
    kind = "8 bits of bitsandbytes" if method == "bitsandbytes" else method
    raise ConfigError(f"weights in a form that is not read: {kind}\nhint: {_WAY_OUT}")


def _plain(files: Mapping[str, FileTensor]) -> dict[str, Stored]:
    for name, tensor in files.items():
        if _STATE in name:
            raise ConfigError(
                f"weights in 4 bits without a quantization_config: {tensor.path}: {name}\n"
                "hint: fetch config.json again"
            )
    return dict(files)


def _fp8(files: Mapping[str, FileTensor], config: Any) -> dict[str, Stored]:
    block = config.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise ConfigError(f"weight_block_size: not two numbers: {block!r}\nhint: {_WAY_OUT}")
    found: dict[str, Stored] = dict(files)
    for name, weight in files.items():
        if name.endswith(_UNUSED):
            del found[name]
        if weight.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            continue
        stem = name.removesuffix(".weight")
        scale = next((files[k] for s in _SCALE_NAMES if (k := stem + s) in files), None)
        scale = scale or files.get(f"{name}_scale_inv")
        if scale is None or len(weight.shape) < 2:
            raise ConfigError(f"weights of 8 bits without their scales: {name}\nhint: {_WAY_OUT}")
        found.pop(scale.name)
        parts = {"weight": weight, "scale": scale}
        found[name] = Fp8(name, weight.shape, parts, _block(weight, scale, block))
    return found


def _block(weight: FileTensor, scale: FileTensor, told: Sequence[int] | None) -> tuple[int, int]:
    """Rows and columns that share a scale: what the sizes say, else what the config says."""
    rows, columns = weight.shape[-2:]
    if prod(scale.shape) == 1:
        return prod(weight.shape[:-1]), columns
    if len(scale.shape) >= 2 and scale.shape[:-2] == weight.shape[:-2]:
        down, across = scale.shape[-2:]
        if down and across and rows % down == 0 and columns % across == 0:
            return rows // down, columns // across
        if told is not None and len(weight.shape) == 2:
            block = (told[0], told[1])
            if (down, across) == (ceil(rows / block[0]), ceil(columns / block[1])):
                return block
    raise ConfigError(
        f"scales do not fit their weights: {weight.name}: {scale.shape} for {weight.shape}\n"
        f"hint: {_WAY_OUT}"
    )


def _mxfp4(files: Mapping[str, FileTensor]) -> dict[str, Stored]:
    found: dict[str, Stored] = dict(files)
    for name, blocks in files.items():
        if not name.endswith("_blocks"):
            continue
        stem = name.removesuffix("_blocks")
        scales = files.get(f"{stem}_scales")
        sound = (
            scales is not None
            and len(blocks.shape) == 4
            and blocks.shape[:-1] == scales.shape
            and {blocks.dtype, scales.dtype} == {torch.uint8}
        )
        if scales is None or not sound:
            raise ConfigError(f"weights of 4 bits without their scales: {name}\nhint: {_WAY_OUT}")
        del found[name], found[scales.name]
        experts, rows, groups, width = blocks.shape
        shape = (experts, groups * width * 2, rows)
        found[stem] = MxFp4(stem, shape, {"blocks": blocks, "scales": scales})
    return found


def _bitsandbytes(files: Mapping[str, FileTensor]) -> dict[str, Stored]:
    found: dict[str, Stored] = dict(files)
    for name, state in files.items():
        stem, mark, kind = name.rpartition(_STATE)
        if not mark:
            continue
        found[stem] = _four_bit(stem, kind, state, files)
        for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map"):
            found.pop(f"{stem}.{part}", None)
        del found[name]
    return found


def _four_bit(
    name: str, kind: str, state: FileTensor, files: Mapping[str, FileTensor]
) -> BnbFourBit:
    try:
        packed, offset = _state(name, kind, state)
        parts = {"data": files[name], "scales": files[f"{name}.absmax"]}
        if offset is not None:
            parts["scales_of_scales"] = files[f"{name}.nested_absmax"]
        _require_usual_codes(name, kind, files, nested=offset is not None)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"weights in 4 bits that cannot be read: {name}: {type(error).__name__}: {error}\n"
            f"hint: {_WAY_OUT}"
        ) from error
    sizes = packed_entries(
        name, prod(packed.shape), double=offset is not None, block=packed.block
    )  # fmt: skip
    expected = {entry: (prod(shape), dtype) for entry, shape, dtype in sizes}
    for role, part in parts.items():
        if (prod(part.shape), part.dtype) != expected[packed.parts[role]]:
            raise ConfigError(
                f"weights in 4 bits whose {role} are not of their size: {name}: {part.shape}\n"
                f"hint: {_WAY_OUT}"
            )
    return BnbFourBit(name, packed.shape, parts, packed, offset)


def _require_usual_codes(
    name: str, kind: str, files: Mapping[str, FileTensor], *, nested: bool
) -> None:
    """Raise ValueError unless the files' tables of codes are those that every such file has."""
    tables = [
        files[f"{name}.{table}"].part(0, files[f"{name}.{table}"].num_bytes)
        for table in ("quant_map", *["nested_quant_map"] * nested)
    ]
    scales = SimpleNamespace(code=tables[-1])
    state = SimpleNamespace(quant_type=kind, code=tables[0], nested=nested, state2=scales)
    if not has_usual_codes(state):
        raise ValueError("codes of their own")


def _state(name: str, kind: str, state: FileTensor) -> tuple[Packed, float | None]:
    """Read how a matrix is packed, and the offset of its scales; raises for what makes no sense."""
    told = json.loads(bytes(state.part(0, state.num_bytes).to(torch.uint8).tolist()))
    shape, block = tuple(map(int, told["shape"])), int(told["blocksize"])
    double = "nested_blocksize" in told
    if double and (told["nested_blocksize"] != SCALES or told["nested_dtype"] != "float32"):
        raise ValueError(f"scales in blocks of {told['nested_blocksize']}")
    if kind not in ("nf4", "fp4") or block not in _BLOCKS or min(shape, default=0) < 1:
        raise ValueError(f"{kind} in blocks of {block}: {shape}")
    entries = [entry for entry, *_ in packed_entries(name, prod(shape), double=double, block=block)]
    roles = {entry[len(name) + 1 :] or "data": entry for entry in entries}
    packed = Packed(shape, _STATE_DTYPES[told["dtype"]], roles, kind, block)  # type: ignore[arg-type]
    return packed, float(told["nested_offset"]) if double else None
