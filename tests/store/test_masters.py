import pytest
import torch

from roundpipe.store.masters import Masters


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()


def test_16_bit_weights_have_fp32_masters_and_others_are_their_own():
    working = {
        "h": torch.ones(2, dtype=torch.float16),
        "b": torch.ones(2, dtype=torch.bfloat16),
        "f": torch.ones(2),
        "d": torch.ones(2, dtype=torch.float64),
    }
    masters = Masters(working, None)
    dtypes = {name: p.dtype for name, p in masters.parameters.items()}
    assert dtypes == {
        "h": torch.float32,
        "b": torch.float32,
        "f": torch.float32,
        "d": torch.float64,
    }
    for name, weight in working.items():
        assert masters.is_alias(name) is (name in "fd")
        assert same_memory(masters.parameters[name], weight) is masters.is_alias(name)
        assert torch.equal(masters.parameters[name], weight.to(dtypes[name]))


def test_optim_dtype_can_be_the_working_dtype():
    working = {"b": torch.ones(2, dtype=torch.bfloat16)}
    masters = Masters(working, torch.bfloat16)
    assert same_memory(masters.parameters["b"], working["b"])


def test_a_bf16_weight_of_one_moves_by_1e_4_in_its_master():
    working = {"b": torch.ones(3, dtype=torch.bfloat16)}
    masters = Masters(working, None)
    for _ in range(40):
        masters.parameters["b"].data.sub_(1e-4)
    masters.publish()
    assert (working["b"] < 1.0).all()  # 1 - 40e-4 is a bf16 away from 1; 1 - 1e-4 is not
    assert torch.equal(masters.newest("b"), working["b"])


def test_splitting_keeps_the_parameter_objects_and_separates_the_memory():
    working = {"f": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16)}
    masters = Masters(working, None)
    before = dict(masters.parameters)
    optimizer = torch.optim.SGD(masters.parameters.values(), lr=1.0)
    masters.split()
    assert all(masters.parameters[name] is p for name, p in before.items())
    masters.parameters["f"].grad = torch.ones(2)
    optimizer.step()
    assert working["f"].tolist() == [1.0, 1.0]
    assert masters.newest("f").tolist() == [0.0, 0.0]
    masters.publish()
    assert working["f"].tolist() == [0.0, 0.0]


def test_reload_takes_the_working_weights_as_the_truth():
    working = {"b": torch.ones(2, dtype=torch.bfloat16)}
    masters = Masters(working, None)
    working["b"].fill_(3.0)
    masters.reload()
    assert masters.parameters["b"].tolist() == [3.0, 3.0]


def test_rebinding_keeps_masters_that_stay_and_makes_those_that_are_new():
    working = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16)}
    masters = Masters(working, None)
    a, b = masters.parameters["a"], masters.parameters["b"]
    b.data.fill_(1.0001)
    moved = {"a": torch.full((2,), 5.0), "b": working["b"].clone(), "c": torch.ones(1)}
    masters.rebind(moved)
    assert list(masters.parameters) == ["a", "b", "c"]
    assert masters.parameters["a"] is a
    assert same_memory(a, moved["a"])
    assert masters.parameters["b"] is b
    assert torch.equal(b.detach(), torch.full((2,), 1.0001))
    masters.rebind({"c": moved["c"]})
    assert list(masters.parameters) == ["c"]
    assert masters.is_alias("c")
    assert not masters.is_alias("a")


def bf16_masters(**options):
    working = {"b": torch.tensor([1.0, 2.0]).bfloat16(), "h": torch.ones(2, 3).half()}
    return working, Masters(working, None, **options)


def moved(masters):
    for master in masters.parameters.values():
        master.data.add_(1e-4)
    masters.publish()
    return {name: master.clone() for name, master in masters.parameters.items()}


def test_masters_that_are_away_keep_shape_and_dtype_but_no_memory():
    _, masters = bf16_masters()
    objects, expected = dict(masters.parameters), moved(masters)
    taken = masters.take_away()
    assert taken.keys() == masters.away == {"b", "h"}
    for name, master in masters.parameters.items():
        assert master is objects[name]
        assert (master.shape, master.dtype) == (expected[name].shape, torch.float32)
        assert master.untyped_storage().nbytes() == 4
        assert master.isnan().all()
        with pytest.raises(RuntimeError, match="single memory location"):
            master.data.add_(1.0)
        assert torch.equal(taken[name], expected[name])
    assert masters.take_away() == {}
    masters.bring_back({name: value.clone() for name, value in taken.items()})
    assert not masters.away
    assert all(torch.equal(masters.parameters[name], value) for name, value in expected.items())


def test_the_working_weight_stands_for_a_master_that_is_away():
    working, masters = bf16_masters()
    moved(masters)
    masters.take_away()
    before = {name: weight.clone() for name, weight in working.items()}
    masters.publish()
    for name, weight in before.items():
        assert torch.equal(working[name], weight)
        assert torch.equal(masters.newest(name), weight)


def test_weights_loaded_while_a_master_is_away_are_its_value():
    working, masters = bf16_masters()
    moved(masters)
    taken = masters.take_away()
    working["b"].fill_(7.0)
    masters.reload(["b"])
    masters.bring_back(taken)
    assert masters.parameters["b"].tolist() == [7.0, 7.0]
    assert torch.equal(masters.parameters["h"], taken["h"])


def test_masters_may_start_away_and_come_from_the_working_weights():
    working, masters = bf16_masters(start_away=True)
    assert masters.away == {"b", "h"}
    working["b"].fill_(3.0)
    masters.bring_back({})
    for name, weight in working.items():
        assert torch.equal(masters.parameters[name], weight.float())


def test_a_master_frozen_while_away_starts_from_the_working_weight_again():
    working, masters = bf16_masters()
    moved(masters)
    taken = masters.take_away()
    masters.rebind({"h": working["h"]})
    assert masters.away == {"h"}
    assert masters.retired["b"].numel() == 0
    masters.rebind(working)
    assert masters.away == {"h"}
    assert torch.equal(masters.parameters["b"], working["b"].float())
    masters.bring_back(taken)
    assert torch.equal(masters.parameters["h"], taken["h"])
    assert torch.equal(masters.parameters["b"], working["b"].float())


def test_masters_that_are_working_weights_never_leave():
    masters = Masters({"f": torch.ones(2)}, None)
    assert masters.take_away() == {}
    masters.split()
    assert masters.take_away().keys() == {"f"}


def test_masters_come_back_only_if_there_is_memory_for_all(monkeypatch):
    _, masters = bf16_masters(start_away=True)

    def full(*_):
        raise MemoryError

    monkeypatch.setattr(masters, "_cast", full)
    with pytest.raises(MemoryError):
        masters.bring_back({})
    assert masters.away == {"b", "h"}
