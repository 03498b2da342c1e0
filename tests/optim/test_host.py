import copy
import threading
import warnings

import pytest
import torch
from torch import nn

from roundpipe.errors import ConfigError
from roundpipe.optim import AdamW
from roundpipe.optim.clip import clip_coefficient, layer_norms, total_norm
from roundpipe.optim.host import HostOptimizer, LayeredUpdate
from roundpipe.optim.whole import WholeUpdate
from roundpipe.store.build import build_store
from roundpipe.store.layer import HostLayer

pytestmark = pytest.mark.usefixtures("bits_of_torch")


class Unknown(torch.optim.AdamW):
    """An optimizer that steps as a whole, as anything not known does."""


class Chunked(AdamW):
    """Ours as it has torch's bits; the compiled one may differ in the last."""

    def __init__(self, params, **options):
        super().__init__(params, implementation="chunks", **options)


OPTIMIZERS = [Chunked, torch.optim.AdamW, Unknown]


class Model:
    """A net of three layers in the store, and a plain fp32 copy of its masters beside it."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)).to(dtype)
        self.plain = copy.deepcopy(net).float()
        self.layers = build_store(
            [{f"{i}.{n}": p for n, p in child.named_parameters()} for i, child in enumerate(net)]
        )
        self.net = net

    @property
    def masters(self) -> list[nn.Parameter]:
        return [m for layer in self.layers for m in layer.masters.values()]

    def give_gradients(self, seed: int, skip: str = "") -> None:
        """The same gradients to the store and to the plain copy; none for ``skip``."""
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            segment = layer.gradients(partial_sums=False)
            for name in layer.trainable:
                view = segment.views[name]
                view.copy_(torch.randn(view.shape, generator=generator))
                plain = self.plain.get_parameter(name)
                plain.grad = None if name == skip else view.to(torch.float32, copy=True)
            layer.mark_received(n for n in layer.trainable if n != skip)

    def assert_equals_plain(self) -> None:
        for layer in self.layers:
            for name, master in layer.masters.items():
                plain = self.plain.get_parameter(name)
                assert torch.equal(master, plain)
                assert torch.equal(self.net.get_parameter(name), plain.to(master_of(self, name)))
                assert master.grad is None
            assert not layer.received


def master_of(model: Model, name: str) -> torch.dtype:
    return model.net.get_parameter(name).dtype


def run_update(host: HostOptimizer, update, **options) -> None:
    if host.is_layered:
        for layer in host.layers:
            update.update_layer(layer.index, **options)
    else:
        update.update_whole(**options)


def plain_optimizer(kind, parameters, **options):
    kind = torch.optim.AdamW if kind in OPTIMIZERS else kind
    return kind(parameters, foreach=False, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("kind", [*OPTIMIZERS, torch.optim.SGD])
def test_steps_equal_a_plain_optimizer_bit_for_bit(kind, max_norm, dtype):
    model = Model(dtype)
    options = {} if kind is Chunked else {"foreach": False}
    host = HostOptimizer(kind(model.masters, lr=1e-2, **options), model.layers)
    assert host.is_layered is (kind is not Unknown)
    plain = plain_optimizer(kind, model.plain.parameters(), lr=1e-2)
    for step in range(5):
        model.give_gradients(step, skip="1.weight" if step % 2 else "")
        scale = None
        if max_norm is not None:
            norms = [layer_norms(layer.take_gradients().values()) for layer in model.layers]
            total = total_norm(norms)
            scale = clip_coefficient(total, max_norm)
            expected = nn.utils.clip_grad_norm_(model.plain.parameters(), max_norm)
            assert torch.equal(total, expected)
        run_update(host, host.begin(), grad_scale=scale)
        plain.step()
        model.assert_equals_plain()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_masters_move_where_bf16_weights_of_one_would_not(kind):
    layers = build_store([{"w": nn.Parameter(torch.ones(4, dtype=torch.bfloat16))}])
    host = HostOptimizer(kind(layers[0].masters.values(), lr=1e-4, weight_decay=0.0), layers)
    for _ in range(30):
        layers[0].gradients(partial_sums=False).views["w"].fill_(1.0)
        layers[0].mark_received(["w"])
        run_update(host, host.begin())
    assert torch.allclose(layers[0].masters["w"], torch.tensor(1.0 - 30e-4))
    assert layers[0].weights.views["w"].float().max() < 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_without_publishing_working_weights_wait(kind, dtype):
    model = Model(dtype)
    host = HostOptimizer(kind(model.masters, lr=1e-2), model.layers)
    for layer in model.layers:
        layer.split_masters()
    before = copy.deepcopy(model.net.state_dict())
    model.give_gradients(0)
    run_update(host, host.begin(), publish=False)
    for layer in model.layers:
        for name in layer.trainable:
            weight = model.net.get_parameter(name)
            assert torch.equal(weight, before[name])
            assert not torch.equal(layer.newest(name), weight)
            newest = layer.newest(name).clone()
            layer.publish([name])
            assert torch.equal(weight, newest)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_update_that_may_not_publish_needs_split_masters(kind):
    model = Model(torch.float32)
    host = HostOptimizer(kind(model.masters), model.layers)
    model.give_gradients(0)
    with pytest.raises(AssertionError):
        run_update(host, host.begin(), publish=False)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_learning_rate_is_the_one_at_the_call(kind):
    model = Model(torch.float32)
    optimizer = kind(model.masters, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    host = HostOptimizer(optimizer, model.layers)
    plain = plain_optimizer(kind, model.plain.parameters(), lr=1e-2)
    plain_scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    for step in range(3):
        model.give_gradients(step)
        update = host.begin()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler.step()
        worker = threading.Thread(target=run_update, args=(host, update))
        worker.start()
        worker.join()
        plain.step()
        plain_scheduler.step()
        model.assert_equals_plain()
    assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**3


def test_an_update_that_failed_goes_on_with_the_parameter_it_failed_at(monkeypatch):
    model = Model(torch.bfloat16)
    optimizer = Chunked(model.masters, lr=1e-2)
    host = HostOptimizer(optimizer, model.layers)
    plain = plain_optimizer(Chunked, model.plain.parameters(), lr=1e-2)
    model.give_gradients(0)
    update = host.begin()
    update.update_layer(0)
    whole, calls = optimizer.update_, []

    def fails_at_the_second(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError
        whole(*args, **kwargs)

    monkeypatch.setattr(optimizer, "update_", fails_at_the_second)
    with pytest.raises(MemoryError):
        update.update_layer(1)
    update.update_layer(1)
    update.update_layer(2)
    assert len(calls) == 5
    plain.step()
    model.assert_equals_plain()


def test_a_layer_that_is_done_is_not_updated_again_nor_its_next_gradients_touched():
    model = Model(torch.float32)
    host = HostOptimizer(Chunked(model.masters, lr=1e-2), model.layers)
    model.give_gradients(0)
    update = host.begin()
    run_update(host, update)
    model.give_gradients(1)
    before = copy.deepcopy(model.net.state_dict())
    run_update(host, update)
    for name, value in model.net.state_dict().items():
        assert torch.equal(value, before[name])
    assert model.layers[0].received == set(model.layers[0].trainable)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_masters_the_optimizer_does_not_hold_stay_and_their_gradients_are_dropped(kind):
    model = Model(torch.float32)
    host = HostOptimizer(kind(model.layers[1].masters.values(), lr=1e-2), model.layers)
    before = copy.deepcopy(model.net.state_dict())
    model.give_gradients(0)
    run_update(host, host.begin())
    for name, value in model.net.state_dict().items():
        assert torch.equal(value, before[name]) is not name.startswith("1.")
    assert not any(layer.received for layer in model.layers)


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        (AdamW, "roundpipe.optim.AdamW(model.optim_parameters(), lr=0.01)"),
        (torch.optim.AdamW, "roundpipe.optim.AdamW(model.optim_parameters(), lr=0.01)"),
        (torch.optim.SGD, "roundpipe.optim.SGD(model.optim_parameters(), lr=0.01)"),
        (torch.optim.RMSprop, "torch.optim.RMSprop(model.optim_parameters(), lr=0.01)"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_over_working_weights_is_refused_with_the_line_to_write(kind, hint, dtype):
    model = Model(dtype)
    with pytest.raises(ConfigError) as error:
        HostOptimizer(kind(model.net.parameters(), lr=0.01), model.layers)
    assert str(error.value) == (
        "the optimizer does not hold master weights but working weights: 0.weight "
        f"(6 of its 6 parameters)\nhint: {hint}"
    )


def test_an_optimizer_of_another_model_is_refused_also_when_it_grows_later():
    model, other = Model(torch.float32), nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match=r"that are not the model's \(1 of its 1 parameters\)"):
        HostOptimizer(AdamW([other]), model.layers)
    optimizer = AdamW(model.masters)
    host = HostOptimizer(optimizer, model.layers)
    optimizer.add_param_group({"params": [other]})
    with pytest.raises(ConfigError, match="1 of its 7 parameters"):
        host.begin()


def begun(optimizer, model):
    return type(HostOptimizer(optimizer, model.layers).begin())


def test_begin_returns_the_kind_that_the_optimizer_allows():
    model = Model(torch.float32)
    for kind in (AdamW, torch.optim.SGD, torch.optim.Adafactor):
        assert begun(kind(model.masters), model) is LayeredUpdate
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam, Unknown):
        assert begun(kind(model.masters), model) is WholeUpdate


def test_a_tied_parameter_is_updated_once_with_both_gradients():
    table = nn.Parameter(torch.ones(4))
    layers = build_store([{"t": table}, {"t": table}])
    optimizer = torch.optim.SGD([m for x in layers for m in x.masters.values()], lr=1.0)
    for layer in layers:
        buffer = torch.empty(layer.slot_gradient_layout.num_bytes, dtype=torch.uint8)
        layer.slot_gradient_layout.view(buffer)["t"].fill_(0.25)
        for owner, name, view in layer.partials(["t"], buffer):
            layers[owner].add_partials_({name: [view]})
    host = HostOptimizer(optimizer, layers)
    run_update(host, host.begin())
    assert table.tolist() == [0.5] * 4


def layer_with_gradient() -> HostLayer:
    layer = build_store([{"w": nn.Parameter(torch.ones(3))}])[0]
    layer.gradients(partial_sums=False).views["w"].fill_(1.0)
    layer.mark_received(["w"])
    return layer


def test_what_an_optimizer_counts_in_its_groups_and_attributes_is_carried_back():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
            self.calls = getattr(self, "calls", 0) + 1
            return super().step(closure)

    layer = layer_with_gradient()
    optimizer = Counting(layer.masters.values(), lr=0.5)
    update = HostOptimizer(optimizer, [layer]).begin()
    optimizer.param_groups[0]["lr"] = 0.1
    update.update_whole()
    assert optimizer.param_groups[0]["k"] == 1
    assert optimizer.calls == 1
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert layer.weights.views["w"].tolist() == [0.5] * 3


def test_a_failing_optimizer_leaves_no_gradient_on_the_masters():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no")

    layer = layer_with_gradient()
    with pytest.raises(RuntimeError, match="no"):
        HostOptimizer(Failing(layer.masters.values()), [layer]).begin().update_whole()
    assert layer.masters["w"].grad is None
