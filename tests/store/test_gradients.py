import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.store.gradients import Gradients, GradientState, runs, widened
from roundpipe.store.segment import Layout

LAYOUT = Layout.of([("a", (4,), torch.bfloat16), ("b", (3,), torch.bfloat16)])


def test_256_tiny_bf16_contributions_do_not_vanish():
    gradients = Gradients(LAYOUT)
    gradients.add_("a", [torch.ones(4)])
    tiny = torch.full((4,), 2.0**-10, dtype=torch.bfloat16)  # 1 + 2**-10 rounds to 1 in bf16
    for _ in range(256):
        gradients.add_("a", [tiny.float()])
    assert gradients.take()["a"].tolist() == [1.25] * 4


def test_the_first_contribution_of_a_step_replaces_what_the_last_step_left():
    gradients = Gradients(LAYOUT)
    for step in range(3):
        gradients.add_("a", [torch.full((4,), float(step))])
        assert gradients.take()["a"].tolist() == [float(step)] * 4
        gradients.clear()


def test_only_what_arrived_is_taken():
    gradients = Gradients(LAYOUT)
    assert gradients.take() == {}
    gradients.clear()
    gradients.allocate(partial_sums=False)
    gradients.mark_received(["b"])
    assert list(gradients.take()) == ["b"]


def test_nothing_arrives_between_take_and_clear():
    gradients = Gradients(LAYOUT)
    gradients.add_("a", [torch.ones(4)])
    assert gradients.state is GradientState.FILLING
    gradients.take()
    with pytest.raises(AssertionError, match="taken"):
        gradients.add_("a", [torch.ones(4)])
    with pytest.raises(AssertionError, match="taken"):
        gradients.mark_received(["b"])
    gradients.clear()
    assert gradients.state is GradientState.EMPTY
    gradients.add_("a", [torch.ones(4)])


def test_memory_is_allocated_once_and_in_the_dtype_of_the_policy():
    gradients = Gradients(LAYOUT)
    assert gradients.segment is None
    working = gradients.allocate(partial_sums=False)
    assert working.views["a"].dtype == torch.bfloat16
    assert gradients.allocate(partial_sums=False) is working
    wide = gradients.allocate(partial_sums=True)
    assert wide.views["a"].dtype == torch.float32
    assert gradients.allocate(partial_sums=False).layout == LAYOUT


def test_a_second_call_widens_what_the_first_one_downloaded_and_never_narrows_it():
    gradients = Gradients(LAYOUT)
    gradients.allocate(partial_sums=False).views["a"].fill_(2.0)
    gradients.mark_received(["a"])
    gradients.add_("a", [torch.ones(4)])
    assert gradients.take()["a"].tolist() == [3.0] * 4
    assert gradients.allocate(partial_sums=False).views["a"].dtype == torch.float32


def test_fp64_adds_up_in_fp64():
    gradients = Gradients(Layout.of([("a", (1,), torch.float64)]))
    gradients.add_("a", [torch.tensor([1.0], dtype=torch.float64)])
    gradients.add_("a", [torch.tensor([2.0**-40], dtype=torch.float64)])
    assert gradients.take()["a"].item() == 1.0 + 2.0**-40


@given(
    st.lists(
        st.tuples(
            st.integers(1, 300),
            st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 5),
)
def test_partial_sums_are_cast_a_chunk_at_a_time_and_not_a_tensor_at_a_time(entries, chunks):
    dtypes = list(dict.fromkeys(dtype for _, dtype in entries))  # in whichever order they come
    named = sorted(
        ((f"p{at}", (size,), dtype) for at, (size, dtype) in enumerate(entries)),
        key=lambda entry: dtypes.index(entry[2]),
    )
    layout = Layout.of(named)
    wide, found = widened(layout), runs(layout)
    sums = torch.zeros(wide.num_bytes, dtype=torch.uint8)
    narrow = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for at, view in enumerate(wide.view(sums).values()):
        view.copy_(torch.arange(view.numel()) / 7 + at)
    copies = 0
    for chunk in range(chunks):
        low, high = (wide.num_bytes * at // chunks // 256 * 256 for at in (chunk, chunk + 1))
        for run in found:
            source, target = run.cut(sums, narrow, low, high if chunk < chunks - 1 else 1 << 30)
            target.copy_(source)
            copies += 1
    for name, view in layout.view(narrow).items():
        assert torch.equal(view, wide.view(sums)[name].to(view.dtype)), name
    assert len(found) == len({dtype for _, _, dtype in named})
    assert copies == chunks * len(found)
