"""Break one mechanism of training runs at a time, and have quick tests of the suite notice.

What a checkpoint, a packed row or a retention rule lacks, a run goes on without: to other bits, to
other samples, without its best weights. Each mechanism here is a piece of a function's source and
what stands in its place; the function gets the code of the changed source, so that everybody who
has imported it runs that. Its tests run in this process and must pass while nothing is broken.
"""

from __future__ import annotations

import inspect
import io
import textwrap
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe import RoundPipe
from roundpipe.chain import Chain
from roundpipe.checkpoint import find, manifest
from roundpipe.checkpointing import Checkpointing
from roundpipe.finetune.data.collate import collate
from roundpipe.finetune.data.order import Order, _Part
from roundpipe.finetune.output.sample import Answerer
from roundpipe.finetune.run.evaluate import evaluate
from roundpipe.finetune.run.own_loss import OwnLoss
from roundpipe.finetune.run.saving import Saver
from roundpipe.finetune.run.training import Training
from roundpipe.finetune.trainer.callbacks import CallbackEvents
from roundpipe.finetune.trainer.collating import CollatorBatches
from roundpipe.finetune.trainer.follow_up import FollowUp
from roundpipe.finetune.use import evaluating, merged_weights, opened, subject
from roundpipe.finetune.use.evaluating import Answered
from roundpipe.finetune.use.merge import _Merging
from roundpipe.finetune.use.merged_weights import MergedWeights
from roundpipe.finetune.use.questions import AnswerPattern
from roundpipe.models.generating import GeneratingTree
from roundpipe.report.finding import Case
from roundpipe.store.reading import Reading

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TESTS = Path(__file__).resolve().parent.parent / "tests"
BESIDE = "checkpoint/test_beside_training.py::test_"
GOING_ON = "checkpoint/test_going_on.py::test_"
SAME_BITS = GOING_ON + "a_run_that_was_stopped_ends_in_the_same_bits[adamw]"  # at staleness 1
FIND = "checkpoint/test_find.py::test_"
SAVING = "finetune/run/test_saving.py::test_"
PACKED = (
    "finetune/data/test_collate.py::"
    "test_packed_samples_count_from_zero_each_and_their_first_token_is_no_label"
)
MERGE = "finetune/use/test_merge.py::test_"
MERGED = MERGE + "a_merged_model_is_the_live_one_in_stock_libraries"
SAMPLE = "finetune/output/test_sample.py::test_"
GENERATION = "engine/test_generation.py::test_"
BASE_ALONE = (
    GENERATION + "the_base_generates_without_adapters_and_what_they_have_trained_whole[Llama]"
)
EVALUATING = "finetune/use/test_evaluating.py::test_"
CALLBACKS = (
    "finetune/trainer/test_callbacks.py::"
    "test_a_callback_sees_what_it_would_see_from_transformers_trainer"
)
PRICES = "report/test_doctor.py"
SUBJECT = "finetune/use/test_subject.py::test_"
HALF = "finetune/data/test_order.py::test_half_of_a_part_is_another_half_in_the_next_epoch"


@dataclass(frozen=True)
class Mechanism:
    """``old`` stands once in the function's source, and ``new`` breaks it; ``tests`` of `TESTS`."""

    function: Any
    old: str
    new: str
    tests: tuple[str, ...]


MECHANISMS = {
    "a layer changes while it is written": Mechanism(
        Reading.wait,
        "self._over.wait()",
        "pass",
        (
            BESIDE + "the_next_step_runs_forward_and_backward_while_the_writer_stands_still",
            BESIDE + "optimizers_that_are_not_ours_wait_too",
        ),
    ),
    "late weights are saved as the newest": Mechanism(
        Chain.late_weights,
        "name: views[name] for name",
        "name: layer.newest(name).detach() for name",
        (SAME_BITS,),
    ),
    "draws begin anew where a run goes on": Mechanism(
        Checkpointing._go_on_from,
        "self._num_calls.made, self._num_passes.made = progress.calls, progress.passes",
        "pass",
        (SAME_BITS,),
    ),
    "torch's own draws go on elsewhere": Mechanism(
        Checkpointing._go_on_from, "torch.set_rng_state(opened.random)", "pass", (SAME_BITS,)
    ),
    "the scheduler is not put back": Mechanism(
        Checkpointing.load_checkpoint,
        "thing.load_state_dict(opened.document[name])",
        "pass",
        (SAME_BITS,),
    ),
    "a corrupt file is taken": Mechanism(
        manifest._compared,
        "fingerprint(path, count) != said",
        "fingerprint(path, count).num_bytes != said.num_bytes",
        (FIND + "every_file_that_is_cut_flipped_or_missing_is_named",),
    ),
    "the last whole checkpoint is dropped": Mechanism(
        find.drop_old,
        "if not any(map(_looks_whole, kept)):",
        "if False:",
        (FIND + "the_oldest_go_and_the_last_good_one_never",),
    ),
    "the best checkpoint is dropped": Mechanism(
        Saver._done,
        "[self.path(best)] if",
        "[] if",
        (SAVING + "the_oldest_go_but_never_the_best_which_is_the_result",),
    ),
    "the best is forgotten where a run goes on": Mechanism(
        Training.restore,
        'self.best.restore(state["best"])',
        "pass",
        (SAVING + "the_best_may_lie_beside_the_checkpoint_that_was_named",),
    ),
    "smaller microbatches are forgotten": Mechanism(
        Training.restore,
        'self.splitting.restore(state["splitting"])',
        "pass",
        (
            "finetune/run/test_retry.py::"
            "test_a_run_goes_on_in_smaller_microbatches_and_is_gone_on_with_in_these",
        ),
    ),
    "positions run on in a packed row": Mechanism(
        collate, "np.arange(stop - start)", "np.arange(start, stop)", (PACKED,)
    ),
    "the first label of a sample is trained": Mechanism(
        collate, "labels[at, start : start + 1] = IGNORED", "pass", (PACKED,)
    ),
    "the weight of a part is ignored": Mechanism(
        _Part.of,
        "round(weight * count)",
        "count",
        (HALF,),
    ),
    "each epoch takes the same of a part": Mechanism(
        Order._at,
        "stream = epoch * part.taken + places[here] - start",
        "stream = places[here] - start",
        (HALF,),
    ),
    "an evaluation is a mean of means": Mechanism(
        evaluate,
        'count := count_trained_tokens(batch["labels"])',
        'count := min(1, count_trained_tokens(batch["labels"]))',
        (
            "finetune/run/test_evaluate.py::"
            "test_the_loss_is_the_mean_over_tokens_however_the_samples_are_cut",
        ),
    ),
    "an adapter is added up in 16 bits": Mechanism(
        MergedWeights._in_fp32,
        "_FP32 if value",
        "torch.bfloat16 if value",
        (MERGE + "sums_in_fp32_are_rounded_once",),
    ),
    "a head that was trained is saved as the embedding": Mechanism(
        merged_weights.untie_,
        "if torch.equal(first, weights.exact(name)):",
        "if True:",
        (MERGED + "[a tied head trained whole]",),
    ),
    "weights in 4 bits are merged as their stand-ins": Mechanism(
        MergedWeights._value,
        "self._packed.get(tensor)",
        "None",
        (MERGE + "what_was_trained_over_4_bits_is_merged_into_them_or_into_those_of_before",),
    ),
    "another model than the live one gets its name": Mechanism(
        _Merging._compared,
        "if not difference.share <= most",
        "if False",
        (MERGE + "what_is_not_the_live_model_gets_no_name",),
    ),
    "merged layers are not compared": Mechanism(
        MergedWeights._merged,
        "if before is not None:",
        "if False:",
        (MERGE + "a_layer_that_is_merged_wrongly_is_found_below_the_rounding_of_16_bits",),
    ),
    "an adapter opens over any base": Mechanism(
        opened._check_base,
        "if fingerprint(subject.source) == subject.base_mark:",
        "if True:",
        (SUBJECT + "another_base_than_it_was_trained_on_is_an_error",),
    ),
    "a checkpoint is opened unread": Mechanism(
        subject._verified,
        "if file_fingerprint(folder / name, tell) != said:",
        "if False:",
        (SUBJECT + "an_unfinished_run_is_its_newest_whole_checkpoint_and_that_is_said",),
    ),
    "padding before a prompt is attended to": Mechanism(
        Answerer._padded,
        "mask[row, width - len(tokens) :] = 1",
        "mask[row] = 1",
        (SAMPLE + "prompts_together_get_the_answers_of_prompts_one_by_one[Llama-dtype1]",),
    ),
    "answers are of weights one step old": Mechanism(
        RoundPipe.generate,
        "newest=self._chain.staleness == 1",
        "newest=False",
        (GENERATION + "generating_between_steps_uses_the_newest_weights_and_changes_no_step[1]",),
    ),
    "answers draw from the trainings random numbers": Mechanism(
        Answerer.answers,
        "with self._undisturbed(), quiet_transformers():",
        "with quiet_transformers():",
        (SAMPLE + "nothing_of_the_trained_model_is_disturbed",),
    ),
    "the base answers with its adapter": Mechanism(
        GeneratingTree.__init__, "if not use_adapter:", "if False:", (BASE_ALONE,)
    ),
    "the base answers with what its adapter trained whole": Mechanism(
        GeneratingTree.__init__, "set() if use_adapter", "set() if True", (BASE_ALONE,)
    ),
    "any number that is found is right": Mechanism(
        Answered.is_match,
        "is_same(self.found, self.asked.wanted)",
        "True",
        (EVALUATING + "answers_that_are_right_are_counted",),
    ),
    "the first match of an answer counts": Mechanism(
        AnswerPattern.find,
        "reversed(found)",
        "found",
        ("finetune/use/test_questions.py::test_the_last_match_that_holds_anything_counts",),
    ),
    "answers stand in the order they were asked in": Mechanism(
        evaluating.answers_of,
        "given.sort(key=lambda each: each.asked.row)",
        "pass",
        (EVALUATING + "answers_that_are_right_are_counted",),
    ),
    "callbacks cannot end a training": Mechanism(
        CallbackEvents._end_epoch, "control.should_training_stop or is_all", "is_all", (CALLBACKS,)
    ),
    "callbacks cannot end an epoch": Mechanism(
        CallbackEvents._is_broken_off, "control.should_epoch_stop or ", "", (CALLBACKS,)
    ),
    "callbacks cannot have a checkpoint saved": Mechanism(
        FollowUp.do, "if trainer.control.should_save:", "if False:", (CALLBACKS,)
    ),
    "callbacks cannot have the model evaluated": Mechanism(
        FollowUp._metrics, "if not trainer.control.should_evaluate:", "if True:", (CALLBACKS,)
    ),
    "the labels of a collator are ignored": Mechanism(
        CollatorBatches.batch,
        "    return batch",
        "    batch['labels'] = batch['input_ids'].clone()\n    return batch",
        ("finetune/trainer/test_collating.py::test_transformers_collators_make_the_labels",),
    ),
    "the loss function of the user is not called": Mechanism(
        OwnLoss.over,
        "return self.function(outputs, part, num_items_in_batch=count)",
        "return outputs.logits.mean()",
        (
            "finetune/trainer/test_trainer.py::"
            "test_a_loss_function_is_called_for_each_microbatch_and_summed",
        ),
    ),
    "doctor prices the cards of others": Mechanism(
        Case.with_cards,
        "cards[place] = change(device, cards[place])",
        "cards[place - 1] = change(device, cards[place - 1])",
        (PRICES,),
    ),
    "doctor prices the links of others": Mechanism(
        Case.with_links,
        "links[place] = change(device, before)",
        "links[place - 1] = change(device, before)",
        (PRICES,),
    ),
}


@contextmanager
def broken(mechanism: Mechanism) -> Iterator[None]:
    """Have the function run the changed source inside."""
    function = _plain(mechanism.function)
    assert isinstance(function, FunctionType), function
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mechanism.old) != 1:
        raise RuntimeError(f"not once in {function.__qualname__}: {mechanism.old}")
    changed = source.replace(mechanism.old, mechanism.new)
    made: dict[str, Any] = {}
    exec(compile(changed, "<broken>", "exec"), {**function.__globals__}, made)
    original = function.__code__
    function.__code__ = _plain(made[function.__name__]).__code__
    try:
        yield
    finally:
        function.__code__ = original


def _plain(thing: Any) -> Any:
    """The function of a class method or a property."""
    return thing.fget if isinstance(thing, property) else getattr(thing, "__func__", thing)


class Failed:
    """A plugin of pytest that notes which test failed."""

    name: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one."""
        if report.failed:
            self.name = self.name or report.nodeid


def failing(tests: Sequence[str], breaking: Any = None) -> str | None:
    """The first of these tests that fails. Raises RuntimeError if they cannot be run."""
    failed, said = Failed(), io.StringIO()
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={TESTS.parent}"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported already
    with breaking if breaking is not None else nullcontext(), redirect_stdout(said):
        code = pytest.main([*options, *(str(TESTS / test) for test in tests)], plugins=[failed])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"tests were not run: {', '.join(tests)}\n{said.getvalue()}")
    return failed.name


def break_each_of_runs(only: str = "") -> Iterator[tuple[str, str | None]]:
    """Yield each mechanism whose name contains ``only``, and whose tests noticed it broken.

    Raises RuntimeError if a test fails with nothing broken.
    """
    chosen = {name: each for name, each in MECHANISMS.items() if only in name}
    wrong = failing(list(dict.fromkeys(test for each in chosen.values() for test in each.tests)))
    if wrong is not None:
        raise RuntimeError(f"with nothing broken: {wrong}")
    for name, mechanism in chosen.items():
        noticed = failing(mechanism.tests, broken(mechanism))
        yield name, noticed and Path(noticed.partition("::")[0]).name
