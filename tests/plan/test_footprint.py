from roundpipe.plan.actions import Action
from roundpipe.plan.footprint import Accesses, Footprint, Footprints, Turns


def touched(prints: Footprints, text: str) -> tuple[set, set]:
    footprint = prints.of(Action.parse(text))
    return set(footprint.reads), set(footprint.writes)


def test_what_actions_touch(small_chain) -> None:
    prints = Footprints(small_chain()[-1], Turns(step=7))
    assert touched(prints, "U0#0") == ({("weights", 0)}, {("slot", 0, 0)})
    assert touched(prints, "A1.1") == ({("boundary", 7, 2, 1)}, {("in", 1, 1)})
    assert touched(prints, "F0.0") == ({("slot", 0, 0), ("in", 0, 0)}, {("out", 0, 0)})
    assert touched(prints, "G2.0") == ({("boundary_gradient", 7, 2, 0)}, {("grad_in", 0, 1)})
    assert touched(prints, "O2#0") == ({("sums", 0, 0)}, {("gradient", 1)})
    assert touched(prints, "N0") == ({("gradient", 0)}, {("norm", 0)})
    norms = {("norm", layer) for layer in range(3)}
    assert touched(prints, "S1") == (
        {("gradient", 1), *norms},
        {("master", 1), ("weights", 1)},
    )


def test_backward_may_still_read_the_input_of_its_recompute(small_chain) -> None:
    reads, writes = touched(Footprints(small_chain()[-1], Turns()), "B2.0")
    assert reads == {("slot", 0, 1), ("in", 0, 1), ("grad_in", 0, 1)}
    assert writes == {("sums", 0, 0), ("out", 0, 1)}


def test_at_staleness_1_updates_leave_the_working_weights_to_publishing(small_chain) -> None:
    prints = Footprints(small_chain(staleness=1)[-1], Turns())
    assert touched(prints, "S1")[1] == {("master", 1)}
    assert touched(prints, "P1") == ({("master", 1)}, {("weights", 1)})


def test_merged_gradients_come_as_partial_sums(small_chain) -> None:
    prints = Footprints(small_chain(microbatches=4, rounds=2)[-1], Turns())
    assert touched(prints, "O6#0")[1] == {("partial", 0)}
    assert touched(prints, "M6") == ({("partial", 0)}, {("gradient", 1)})


def test_partial_sums_are_brought_to_two_places_a_device_in_turn(small_chain) -> None:
    for devices in (1, 2, 3):
        schedule = small_chain(devices=devices, microbatches=4, rounds=2)[-1]
        prints = Footprints(schedule, Turns())
        places = [touched(prints, f"O{visit}#0")[1] for visit in (1, 2, 3, 5, 6, 7)]
        assert places == [{("partial", turn % (2 * devices))} for turn in range(6)]


def test_turns_go_on_from_step_to_step(small_chain) -> None:
    schedule = small_chain()[-1]
    first = Footprints(schedule, Turns())
    second = Footprints(schedule, first.turns_after)
    assert touched(first, "O2#0")[0] == {("sums", 0, 0)}
    assert touched(second, "O2#0")[0] == {("sums", 0, 1)}  # one visit with gradients a step
    assert touched(second, "U0#0")[1] == {("slot", 0, 0)}  # two visits
    assert first.turns_after == Turns().after(schedule)


def test_accesses_tell_what_must_be_over() -> None:
    accesses = Accesses()
    one, two, three, four = ((0, Action.parse(text)) for text in ("U0#0", "F0.0", "F0.1", "U1#0"))
    buffer = ("slot", 0, 0)
    assert accesses.before(one, Footprint(writes=(buffer,))) == {}
    assert accesses.before(two, Footprint(reads=(buffer,))) == {one: buffer}
    assert accesses.before(three, Footprint(reads=(buffer,))) == {one: buffer}
    assert set(accesses.before(four, Footprint(writes=(buffer,)))) == {one, two, three}
