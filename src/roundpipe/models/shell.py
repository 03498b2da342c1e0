"""Shells: a layer's module tree, copied without its weights, once per device.

Several devices may run one layer at the same time, so none of them may run the user's module: a
shell is a deep copy of the module tree whose memo maps every tensor and every config object to
itself. Afterwards each parameter of the copy is replaced by a leaf of the shell's own, which
`TreeShell.bind` points at device memory by setting ``.data`` (the leaf stays the same object, so
whoever collects gradients may hold on to it). Three things a deep copy would get wrong:

1. ``copy.deepcopy`` loses ``grad_dtype``; it is set again (gradients of 16-bit parameters add up
   in float32).
2. A parameter that hangs in two places of one tree must stay one leaf.
3. An attribute that reaches a tensor outside the tree (``self.parent = [model]``) would copy half
   the model or train the user's own parameters; such a layer is refused.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from roundpipe.errors import ModelError
from roundpipe.models.buffers import ShellBuffers
from roundpipe.models.experts import run_grouped
from roundpipe.models.four_bit import compute_dtypes, is_linear4bit, run_plainly_, state_of
from roundpipe.models.unpacking import Unpacking
from roundpipe.store.four_bit import unpacked_form
from roundpipe.store.packed import PackedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from roundpipe.models.spec import Boundary, Inputs

    Run = Callable[[nn.Module, Boundary, Inputs, Any], Boundary]
    Fill = Literal["nan", "zero"]

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)
_TENSOR_DICTS = ("_parameters", "_buffers", "_modules")
_PLAIN = (bool, int, float, str)


class TensorNames:
    """The canonical full name of every tensor of a model: the first under which it hangs."""

    def __init__(self, root: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}  # ids stay unique: `tensors` keeps what they name alive
        for name, tensor in (
            *root.named_parameters(remove_duplicate=False),
            *root.named_buffers(remove_duplicate=False),
        ):
            if id(tensor) not in self._names:
                self._names[id(tensor)] = name
                self.tensors[name] = tensor

    def of(self, tensor: Tensor) -> str:
        """The canonical name of a parameter or buffer of the model."""
        return self._names[id(tensor)]

    def by_id(self, key: int) -> str | None:
        """The name of the tensor whose ``id`` is ``key``, if the model has it."""
        return self._names.get(key)


@dataclass(frozen=True, eq=False)
class Home:
    """One place in the user's tree where a tensor hangs; a tied tensor has several."""

    module: nn.Module
    local: str
    name: str  # canonical, full
    is_parameter: bool

    @property
    def tensor(self) -> Tensor:
        """What hangs there now."""
        held = self.module._parameters if self.is_parameter else self.module._buffers
        tensor = held[self.local]
        assert tensor is not None, self.name
        return tensor


def walk(module: nn.Module, left_out: Iterable[nn.Module] = ()) -> Iterator[nn.Module]:
    """Yield each module of the tree once, parents first, without going into ``left_out``."""
    seen = {id(m) for m in left_out}
    stack = [module]
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        stack.extend(m for m in reversed(current._modules.values()) if m is not None)


def find_homes(
    module: nn.Module, names: TensorNames, left_out: Iterable[nn.Module] = ()
) -> list[Home]:
    """List every place of the tree where a parameter or buffer hangs."""
    homes = []
    for owner in walk(module, left_out):
        for held, is_parameter in ((owner._parameters, True), (owner._buffers, False)):
            for local, tensor in held.items():
                if tensor is not None:
                    homes.append(Home(owner, local, names.of(tensor), is_parameter))
    return homes


class _Memo(dict[int, Any]):
    """A memo for deepcopy that refuses tensors of the model which the tree does not hold."""

    def __init__(self, names: TensorNames) -> None:
        super().__init__()
        self._names = names

    def get(self, key: int, default: Any = None) -> Any:
        if key not in self and (name := self._names.by_id(key)) is not None:
            raise ModelError(
                f"a layer reaches a tensor of another layer by an attribute: {name}\n"
                "hint: make it a submodule or a parameter of the layer that uses it"
            )
        return super().get(key, default)


def _is_config(value: object) -> bool:
    return type(value).__name__.lower().endswith("config")


def _share_attributes(module: nn.Module, memo: _Memo, device: torch.device) -> None:
    """Map tensors and configs among a module's plain attributes to themselves.

    A tensor that is neither parameter nor buffer goes to the device once, with the shell. A module
    has a dozen empty dicts of hooks, and deepcopy is slow with each: they get new ones here.
    """
    for key, value in module.__dict__.items():
        if value is None or key in _TENSOR_DICTS or type(value) in _PLAIN:
            continue
        if type(value) is OrderedDict and not value:
            memo[id(value)] = OrderedDict()
            continue
        entries: Iterable[Any] = (value,)
        if isinstance(value, dict):
            entries = value.values()
        elif isinstance(value, (list, tuple)):
            entries = value
        for entry in entries:
            if isinstance(entry, Tensor):
                memo.setdefault(id(entry), entry.to(device))
            elif _is_config(entry):
                memo[id(entry)] = entry


def placeholder(like: Tensor, device: torch.device, fill: Fill) -> Tensor:
    """A tensor of ``like``'s shape and dtype that takes no memory: one element, repeated.

    Shape and dtype of a packed parameter are those it has when unpacked.
    """
    shape, dtype = unpacked_form(like)
    value = float("nan") if fill == "nan" and dtype.is_floating_point else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


class TreeCopy:
    """A module tree copied for ``device`` with every tensor in it replaced by a leaf of its own.

    ``homes`` are the tensors to be bound, ``idle`` those that stay a placeholder, and of what;
    together they are every home of the tree. ``stand_ins`` maps modules of the user's tree to what
    hangs in their place.
    """

    def __init__(
        self,
        module: nn.Module,
        names: TensorNames,
        device: torch.device,
        *,
        homes: Sequence[Home],
        idle: Sequence[tuple[Home, Fill]] = (),
        stand_ins: Mapping[nn.Module, nn.Module] | None = None,
    ) -> None:
        memo = _Memo(names)
        originals = list(walk(module, stand_ins or ()))
        for original in originals:
            _share_attributes(original, memo, device)
            if (state := state_of(original)) is not None:
                memo[id(state)] = state
        for home in (*homes, *(home for home, _ in idle)):
            memo[id(home.tensor)] = home.tensor
        for original, stand_in in (stand_ins or {}).items():
            memo[id(original)] = stand_in
        self.module = _deepcopy(module, memo)
        self._pairs = [(memo[id(original)], original) for original in originals]
        self._copies: dict[nn.Module, nn.Module] = {o: copied for copied, o in self._pairs}
        for copied, _ in self._pairs:
            if copied.__dict__.get("gradient_checkpointing"):
                copied.gradient_checkpointing = False  # recomputing is the engine's
            if is_linear4bit(copied):
                run_plainly_(copied)
        self.packed_dtypes = compute_dtypes(homes)
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, list[tuple[dict[str, Tensor | None], str]]] = {}
        for home in homes:
            self._give_leaf(home, device)
        for home, fill in idle:
            self.hang(home, placeholder(home.tensor, device, fill))
        run_grouped(copied for copied, _ in self._pairs)
        self.sync_mode()

    def _give_leaf(self, home: Home, device: torch.device) -> None:
        copied = self._copies[home.module]
        tensor = home.tensor
        if not home.is_parameter:
            copied._buffers[home.local] = placeholder(tensor, device, "nan")
            self.buffers.setdefault(home.name, []).append((copied._buffers, home.local))
            return
        if home.name not in self.parameters:
            leaf = nn.Parameter(placeholder(tensor, device, "nan"), tensor.requires_grad)
            if tensor.requires_grad and tensor.dtype in _SIXTEEN_BIT:
                leaf.grad_dtype = torch.float32
            self.parameters[home.name] = leaf
        copied._parameters[home.local] = self.parameters[home.name]

    def hang(self, home: Home, tensor: Tensor, *, requires_grad: bool = False) -> Tensor:
        """Put ``tensor`` in one place of the copy, and return what hangs there now."""
        copied = self._copies[home.module]
        if not home.is_parameter:
            copied._buffers[home.local] = tensor
            return tensor
        leaf = nn.Parameter(tensor, requires_grad=requires_grad)
        copied._parameters[home.local] = leaf
        return leaf

    def modules(self) -> list[nn.Module]:
        """The modules of the copy, those of stand-ins left out."""
        return [copied for copied, _ in self._pairs]

    def copy_of(self, original: nn.Module) -> nn.Module:
        """The copy of one module of the user's tree."""
        return self._copies[original]

    def sync_mode(self) -> None:
        """Take over the ``training`` flags of the user's modules."""
        for copied, original in self._pairs:
            # past nn.Module.__setattr__, which costs a microsecond
            copied.__dict__["training"] = original.training


def _deepcopy(module: nn.Module, memo: _Memo) -> nn.Module:
    try:
        copied: nn.Module = copy.deepcopy(module, memo)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"a module cannot be copied: {type(module).__name__}: {error}\n"
            "hint: keep what cannot be copied (locks, files, tensors with a graph) out of its "
            "attributes, or give the class a __deepcopy__"
        ) from error
    return copied


class TreeShell:
    """A tree copy together with how it is called: the shell of `roundpipe.models.spec`."""

    def __init__(self, tree: TreeCopy, run: Run) -> None:
        self._tree = tree
        self._run = run
        self._buffers = ShellBuffers(tree.buffers, tree.modules())
        self._unpacking = Unpacking(tree.packed_dtypes)

    @property
    def module(self) -> nn.Module:
        """The shell's own module tree."""
        return self._tree.module

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The shell's leaves by full name; the same objects always."""
        return self._tree.parameters

    @property
    def work_bytes(self) -> int:
        """What ``run`` or a module says that its last call took for a moment; 0 if none does."""
        said = [getattr(self._run, "work_bytes", 0)]
        said += [module.__dict__.get("work_bytes", 0) for module in self.module.modules()]
        return int(max(said))

    def bind(self, tensors: Mapping[str, Tensor | PackedTensor]) -> None:
        """Point parameters and buffers at ``tensors``: full name -> tensor on the shell's device.

        ``tensors`` may hold more names than the layer has. Takes about half a microsecond each.
        """
        self._unpacking.clear()
        for name, leaf in self._tree.parameters.items():
            value = tensors[name]
            if isinstance(value, PackedTensor):
                self._unpacking.bind(name, leaf, value)
            else:
                leaf.data = value
        self._buffers.bind(tensors)  # type: ignore[arg-type]  # buffers are never packed

    def unpack_within(self, module: nn.Module) -> None:
        """Have packed weights below a module of the shell's tree there only while that runs."""
        self._unpacking.within(module)

    def sync_mode(self) -> None:
        """Take over the ``training`` flags of the user's modules."""
        self._tree.sync_mode()

    @property
    def buffers(self) -> dict[str, Tensor]:
        """What hangs in the places of the layer's buffers now, by full name."""
        return self._buffers.values

    @property
    def changing(self) -> set[str]:
        """The buffers that the layer's forward is known to write to in the mode it is in."""
        return self._buffers.changing

    def hang(self, tensors: Mapping[str, Tensor]) -> None:
        """Put other tensors in the places of some buffers, until they are bound again."""
        self._buffers.hang(tensors)

    def changed(self) -> list[str]:
        """The buffers that were written to or replaced since they were bound or hung."""
        return self._buffers.changed()

    def run(self, boundary: Boundary, inputs: Inputs, context: Any) -> Boundary:
        """Run the layer; what it does to its buffers `changed` tells."""
        with self._unpacking.unpacked():
            return self._run(self._tree.module, boundary, inputs, context)

    def __call__(self, boundary: Boundary, inputs: Inputs, context: Any) -> Boundary:
        """Run the layer where nobody keeps its buffers; raises ModelError if it changed one."""
        result = self.run(boundary, inputs, context)
        for name in self.changed():
            raise ModelError(
                f"a buffer changed in forward: {name}\n"
                "hint: here it is run for its result alone, and what it keeps in buffers would be "
                "lost; use a fixed one"
            )
        return result
