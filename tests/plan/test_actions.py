import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.plan.actions import Action, Op

actions = st.builds(
    Action,
    st.sampled_from(Op),
    st.integers(0, 999),
    st.none() | st.integers(0, 99),
    st.none() | st.integers(0, 99),
    before=st.booleans(),
)


@given(actions)
def test_text_reads_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(actions)
def test_the_step_before_and_back_is_the_same_action(action: Action) -> None:
    assert action.of_step_before().before
    assert action.of_step_before().of_this_step() == action.of_this_step()


@given(actions, actions)
def test_equal_actions_have_equal_hashes_and_texts(one: Action, two: Action) -> None:
    assert (one == two) is (str(one) == str(two))
    assert one != two or hash(one) == hash(two)


@pytest.mark.parametrize("text", ["", "Q1", "F", "F1.", "F1.0 ", "--S1", "U1#", "F1#0.0", "f1.0"])
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an action"):
        Action.parse(text)


@pytest.mark.parametrize("text", ["F3.1", "U3#2", "-S12", "G0.0", "M7"])
def test_an_action_survives_pickling(text: str) -> None:
    action = Action.parse(text)
    assert pickle.loads(pickle.dumps(action)) == action


def test_a_set_of_actions_has_the_same_order_in_every_process() -> None:
    code = "from roundpipe.plan.actions import *; print(hash(Action(Op.UPLOAD, 3, None, 2)))"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "1"}
    found = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert found == f"{hash(Action(Op.UPLOAD, 3, None, 2))}\n"
