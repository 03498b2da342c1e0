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
