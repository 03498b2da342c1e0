"""Load tokenizer and base model through transformers, and say what to do when that fails.

Rules
1. No code of a checkpoint is run (``trust_remote_code=False``) and no pickle is opened
   (``use_safetensors=True``).
2. A weight that the files do not hold would be trained from random numbers: that is an error.
3. A GGUF file is unpacked into an ordinary model: nothing of its quantization stays behind, so
   that the result trains, saves and loads like any other model.
"""

from __future__ import annotations

import contextlib
import io
import logging
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from roundpipe.errors import ConfigError
from roundpipe.models.loading.own_class import class_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from roundpipe.finetune.model.source import ModelSource

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

logger = logging.getLogger(__name__)

_NO_TOKENIZER = (
    "copy tokenizer.json and tokenizer_config.json of the original model into the folder"
)
_NO_TOKENIZER_ON_HUB = (
    "hf download {} --local-dir FOLDER, copy tokenizer.json and tokenizer_config.json of the "
    "original model into it, then model_name_or_path=FOLDER"
)
_OFFLINE = (
    "the hub cannot be reached and the files are not in its cache; "
    "give a local folder or a .gguf file"
)
_NO_SUCH_ID = (
    "check the spelling of the id (and revision); for a private model log in with: hf auth login"
)
_WAYS_OUT_BY_TEXT = {
    "trust_remote_code": "its files bring code of their own, which is never run; use a model type "
    "that the installed transformers knows",
    "cannot be loaded with `safetensors`": "only safetensors files are opened, a pickle never; "
    "choose a repository that has them",
    "attn_implementation": "attn_implementation=eager",
    "scaled_dot_product_attention": "attn_implementation=eager",
}
_WAYS_OUT_BY_KIND = {  # class names, so that huggingface_hub need not be imported for them
    "GatedRepoError": "ask for access on the model's page, then log in with: hf auth login",
    "OfflineModeIsEnabled": _OFFLINE,
    "LocalEntryNotFoundError": _OFFLINE,
    "ConnectError": _OFFLINE,
    "ConnectionError": _OFFLINE,
    "RepositoryNotFoundError": _NO_SUCH_ID,
    "RevisionNotFoundError": _NO_SUCH_ID,
    "SafetensorError": "an interrupted download leaves such a file; fetch it again",
}


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Load the tokenizer with its chat template; reads or downloads files.

    Raises ConfigError where there is none.
    """
    with _explained(source, "tokenizer"), _quiet(source):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.location, trust_remote_code=False, **_place(source)
        )
    if tokenizer is None or len(tokenizer) == 0:
        raise ConfigError(
            f"model_name_or_path: no tokenizer in: {source.given}\n"
            f"hint: {_hint(source, 'tokenizer', OSError())}"
        )
    return tokenizer


def load_model(
    source: ModelSource, *, dtype: torch.dtype, attn_implementation: str = "sdpa"
) -> PreTrainedModel:
    """Load the base model onto the host in ``dtype``, in evaluation mode; reads or downloads files.

    Raises ConfigError where it is missing, unreachable, incomplete, or of a class transformers
    does not know.
    """
    arguments = _place(source)
    if source.gguf_file is not None and hasattr(transformers, "GgufConfig"):
        # Else newer versions keep the blocks packed wherever they find a matrix kernel for them.
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _explained(source, "model"), _quiet(source):
        answer: Any = _class_of(source).from_pretrained(
            source.location,
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **arguments,
        )
    model, loaded = answer
    _check_complete(source, model, loaded)
    if source.gguf_file is not None:
        _forget_quantization(model)
    loaded_model: PreTrainedModel = model.eval()
    return loaded_model


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the progress bars and advice of transformers for a while; errors still raise."""
    settings: Any = transformers_logging  # its functions carry no types
    verbosity, had_bars = settings.get_verbosity(), settings.is_progress_bar_enabled()
    settings.set_verbosity_error()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        settings.set_verbosity(verbosity)
        if had_bars:
            settings.enable_progress_bar()


@contextlib.contextmanager
def _quiet(source: ModelSource) -> Iterator[None]:
    """As ``quiet_transformers``, also for the bar of GGUF unpacking; the hub's bars stay."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet_transformers())
        if source.gguf_file is not None:  # its bar heeds no setting (transformers 5.24)
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


def _class_of(source: ModelSource) -> Any:
    """The class that wrote the files; of a GGUF file transformers knows best."""
    if source.gguf_file is None:
        config = AutoConfig.from_pretrained(
            source.location, trust_remote_code=False, **_place(source)
        )
        with contextlib.suppress(ConfigError):
            return class_for(config)
    return AutoModelForCausalLM


def _place(source: ModelSource) -> dict[str, Any]:
    revision = None if source.is_here else source.revision
    place = {"revision": revision, "gguf_file": source.gguf_file}
    return {key: value for key, value in place.items() if value is not None}


def _check_complete(source: ModelSource, model: PreTrainedModel, loaded: dict[str, Any]) -> None:
    missing = sorted(loaded.get("missing_keys") or ())
    mismatched = sorted(str(key) for key in loaded.get("mismatched_keys") or ())
    if missing or mismatched:
        some = ", ".join([*missing, *mismatched][:3])
        raise ConfigError(
            f"model_name_or_path: {len(missing) + len(mismatched)} weights of "
            f"{type(model).__name__} are not in the files of {source.given}: {some}\n"
            "hint: they would start from random numbers; give a causal language model "
            "whose files are complete"
        )
    unexpected = loaded.get("unexpected_keys") or ()
    if unexpected:
        logger.info("%d weights of the files are not used by the model", len(unexpected))


def _forget_quantization(model: Any) -> None:
    """Make a model unpacked from GGUF an ordinary one.

    transformers (5.24) goes on calling it quantized, and then refuses to save or train it.
    """
    model.hf_quantizer = None
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    for name in ("quantization_method", "is_quantized"):
        model.__dict__.pop(name, None)


@contextlib.contextmanager
def _explained(source: ModelSource, what: str) -> Iterator[None]:
    """Turn what transformers raises into one paragraph with a way out."""
    try:
        yield
    except ConfigError:
        raise
    except MemoryError:
        raise
    except Exception as error:  # whatever a reader of a torn file or one of 400 classes raises
        first_line = next((line for line in str(error).splitlines() if line.strip()), "no message")
        raise ConfigError(
            f"model_name_or_path: cannot load the {what} of {source.given}: {first_line.strip()}\n"
            f"hint: {_hint(source, what, error)}"
        ) from error


def _hint(source: ModelSource, what: str, error: BaseException) -> str:
    kinds, text = _kinds(error), str(error)
    if isinstance(error, ImportError):
        return f"pip install {'gguf' if source.gguf_file else 'the package named above'}"
    for words, way_out in _WAYS_OUT_BY_TEXT.items():
        if words in text:
            return way_out
    for kind, way_out in _WAYS_OUT_BY_KIND.items():
        if kind in kinds:
            return way_out
    if source.gguf_file is not None:
        return "an interrupted download leaves such a file: fetch it again; or update transformers"
    if what == "tokenizer" and source.is_here:
        return _NO_TOKENIZER if not source.is_hub else _NO_TOKENIZER_ON_HUB.format(source.hub_id)
    return "the same fails with transformers alone; check the files, or update transformers"


def _kinds(error: BaseException | None) -> set[str]:
    """Class names of an error, its bases, and all it came from."""
    names: set[str] = set()
    while error is not None:
        names.update(kind.__name__ for kind in type(error).__mro__)
        error = error.__cause__ or error.__context__
    return names
