"""The runs of one model, one after the other: which may follow which without a flush.

A training run follows the one before if it is of the same kind and just one step lies between; the
deal of stages to devices then goes on where it ended. Everything else begins on idle devices.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from roundpipe.engine.call import StepInMaking
from roundpipe.engine.drift import DriftWatch
from roundpipe.engine.forward_pass import ForwardPass
from roundpipe.engine.microbatch import rows_of
from roundpipe.engine.run import Continues
from roundpipe.engine.updates import Update
from roundpipe.plan.timeline import Timeline
from roundpipe.sim.chosen import Kind
from roundpipe.timer import ModelTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from roundpipe.config import RoundPipeRunConfig
    from roundpipe.engine.call import Asked
    from roundpipe.engine.engine import Engine
    from roundpipe.engine.program import Program
    from roundpipe.engine.run import Call, Run, Timings
    from roundpipe.engine.weigh import Sizes
    from roundpipe.optim.scaler import GradScaler
    from roundpipe.planner import Planner
    from roundpipe.sim.search import Plan
    from roundpipe.store.layer import HostLayer

_RUNS_BEFORE_MEASURED_PLAN = 2
_REMEMBERED_RUNS = 32  # whose spans the timeline shows


class Chain:
    """See the module docstring. ``making`` is the step that calls are adding to.

    ``is_eager``: layers are updated as soon as their own gradient is whole.
    """

    def __init__(self, engine: Engine, planner: Planner, *, is_eager: bool = False) -> None:
        self._engine, self._planner, self._is_eager = engine, planner, is_eager
        self._modules = list(engine.spec.module.modules())
        self._modes: list[bool] = []  # their training flags as the shells have them
        self.making = StepInMaking()
        self.num_versions = 0  # of the weights: what was updated or loaded so far
        self._num_rewrites = 0  # of the module's attributes
        self.staleness = 0
        self._late: list[tuple[HostLayer, dict[str, Tensor]]] = []  # what the next call reads
        self._kind: Kind | None = None
        self._last: Run | None = None  # the training run that the next one may follow
        self._measured: Run | None = None  # what the planner is to learn from
        self._sizes: Sizes | None = None  # weighed in the first run
        self._watch = DriftWatch()
        self._num_runs = 0  # since planning from sizes
        self._num_recovered = 0  # failures of the engine that are known here
        self._timings: deque[Timings] = deque(maxlen=_REMEMBERED_RUNS)
        self._timer = ModelTimer()

    @property
    def plan(self) -> Plan | None:
        """The plan of the last training run; None before the first."""
        return self._kind.plan if self._kind is not None else None

    def timeline(self) -> Timeline:
        """What ran when, of the last training runs."""
        return Timeline(
            tuple(timings.as_step() for timings in self._timings),
            devices=tuple(device.name for device in self._engine.pool.devices),
            layers=tuple(layer.name for layer in self._engine.spec.layers),
        )

    def start_training(self, call: Call, config: RoundPipeRunConfig) -> Run:
        """Begin a training run; a further one of the same step is added to what is on the host."""
        self._put_back()
        is_further = bool(self.making.runs)
        self.tell_times()
        if is_further:
            self._engine.drain()
        elif self._planner.learns:
            self._learn()
            call = replace(call, weighs=self._num_runs == 0)
        if self._engine.state.is_in_order:
            self._planner.keep_order()
        num_microbatches = len(call.microbatches)
        rows = max(map(rows_of, call.microbatches))
        plan = self._planner.plan(num_microbatches, config.execute_plan, rows=rows)
        kind = Kind(
            plan,
            num_microbatches,
            self.staleness,
            accumulate=is_further,
            eager=self._is_eager,
        )
        is_free = not is_further and not self._engine.state.is_in_order
        last = self._last if kind == self._kind and is_free else None
        start = last.program.schedule.next_start_device if last is not None else 0
        program = self._planner.training(kind, start)
        if last is None or self._modes != self._flags():
            self._begin_idle()
        run = self._engine.start(program, call, follows=last is not None)
        self._kind = kind
        self._num_runs += 1
        if self._num_runs == 1:
            self._sizes = run.sizes
        if self._num_runs <= _RUNS_BEFORE_MEASURED_PLAN:
            self._measured = run
        self.making.runs.append(run)
        self._timings.append(run.timings)
        self._timer.add(run)
        return run

    def start_forward(self, call: Call, config: RoundPipeRunConfig) -> Run:
        """Begin a pass without gradient on idle devices."""
        program = self._planner.forward(len(call.microbatches), config.execute_plan)
        self._last = None
        self._begin_idle()
        self.tell_times()
        run = self._engine.start(program, call, follows=False)
        self._timer.add(run)
        return run

    def run_differentiable(
        self, call: Call, config: RoundPipeRunConfig, wanted: tuple[bool, ...]
    ) -> ForwardPass:
        """A pass on idle devices that saves what its backward needs; blocks until it is over.

        ``wanted``: which leaves of the inputs' pytree the backward is to give a gradient of.
        """
        forward, backward = self._planner.differentiable(
            len(call.microbatches),
            config.execute_plan,
            to_inputs=any(wanted),
            staleness=self.staleness,
            rows=max(map(rows_of, call.microbatches)),
        )
        run = self._run_alone(forward, call)
        versions = self.num_versions, self._num_rewrites
        return ForwardPass(run, backward, wanted, *versions, self._modes)

    def run_backward(
        self,
        forward: ForwardPass,
        gradients: Sequence[Sequence[Tensor | None]],
        asked: Asked | None = None,
    ) -> list[Sequence[Tensor | None]]:
        """The backward of a pass; its gradients are part of the step in making.

        ``gradients``: for each microbatch those of its output's floating tensors; ``asked``: of
        what loss, where it is known. Returns for each
        those of the inputs that want one. Blocks until all is on the host. Raises ConfigError if
        weights or modes are not those of the pass any more.
        """
        forward.require_current(self.num_versions, self._num_rewrites, self._flags())
        top = forward.run.program.num_layers
        given = Continues(
            boundaries=forward.run.boundaries.held,
            gradients={(top, at): found for at, found in enumerate(gradients)},
            wanted=forward.wanted,
            kept=forward.run.kept,
        )
        program = forward.backward(bool(self.making.runs))
        run = self._run_alone(program, replace(forward.run.call, continues=given))
        self._kind = None  # nothing follows it without a flush
        self.making.runs.append(run)
        if asked is None:
            self.making.count_other()
        else:
            self.making.count(asked)
        return [run.gradients.held.get((0, at), ()) for at in range(len(gradients))]

    def _run_alone(self, program: Program, call: Call) -> Run:
        self._engine.drain()
        self._put_back()
        self._last = None
        self._begin_idle()
        run = self._engine.start(program, call, follows=False)
        self._engine.wait_results(run)
        self._engine.drain()
        self._timer.add(run)
        self.tell_times()
        return run

    def tell_times(self) -> None:
        """Write what layers took, if somebody looks; see `ModelTimer`."""
        self._timer.tell(self._planner.costs)

    def _learn(self) -> None:
        """Let the planner learn from the first runs, and again when times have drifted."""
        if self._num_runs == _RUNS_BEFORE_MEASURED_PLAN and self._measured is not None:
            self._engine.drain()
            reason = f"measured in step {self._measured.call.step + 1}"
            self._planner.learn(self._measured, self._sizes, reason)
            self._measured = self._sizes = None
        elif self._watch.has_drifted(self._kind, self._timings) and self._last is not None:
            run = self._last
            self._engine.drain()
            reason = f"times have drifted by step {run.call.step + 1}"
            self._planner.learn(run, None, reason)

    def step(self, update: Update, *, is_async: bool) -> None:
        """Begin the update of the step in making, which ends it."""
        self._late.clear()
        runs = self.making.runs
        self.num_versions += 1
        self._engine.step(runs[-1], update)
        self.staleness = int(is_async)
        self._last = runs[-1] if len(runs) == 1 else None
        self.making.end()

    def step_by_hand(
        self,
        function: Callable[[], object],
        *,
        max_norm: float | None,
        scaler: GradScaler | None = None,
        is_async: bool = False,
    ) -> Update:
        """End the step in making by a function that finds all gradients in masters' ``.grad``.

        ``is_async``: the next call reads the masters as they are before the function changes them.
        """
        self._engine.drain()
        self._late.clear()
        scale, layers = self.making.token_scale, self._engine.layers
        if is_async:
            for layer in layers:
                layer.publish()
                layer.split_masters()
        self.staleness, self._last = int(is_async), None
        self.num_versions += 1
        self.making.end()  # whatever the function does, these gradients are used
        self._engine.state.commit()
        try:
            return Update.by_hand(
                layers,
                function,
                max_norm=max_norm,
                scale=scale,
                scaler=scaler,
                publish=not is_async,
            )
        finally:
            for layer in layers:
                layer.clear_gradients()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Drop the step in making if the caller is interrupted (Ctrl-C) anywhere in here."""
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            self._engine.give_up(error)
            raise

    def notice_recovery(self) -> int | None:
        """After a failure nothing is left of the step that was being made.

        Returns the number of the first call that is to be made again, if there was one.
        """
        lost: int | None = None
        if self._num_recovered != self._engine.num_recovered:
            self._num_recovered = self._engine.num_recovered
            numbers = [run.call.step for run in self.making.runs if run.is_lost(None)]
            if self._engine.first_lost is not None:
                numbers.append(self._engine.first_lost)
            lost = min(numbers, default=None)
            self._late.clear()
            self.making.end()
            self._timings.clear()
            self._timer.forget()
            self._last = self._measured = None
        return lost

    def plan_again(self) -> None:
        """Plan from sizes, and weigh them: microbatches will be others. Nothing is under way."""
        self._planner.restart()
        self._num_runs = 0
        self._last = self._measured = self._sizes = None

    def notice_load(self) -> None:
        """The weights are others, all of one version, and buffers may be; nothing is under way."""
        self.num_versions += 1
        self._late.clear()
        self._renew_contexts()
        self._engine.is_mixed = False
        self._engine.state.commit()  # a failure does not take loaded buffers back

    @torch.no_grad()
    def show_newest(self) -> None:
        """Give the module the newest weights, whatever the next call reads; nothing is under way.

        After a late step what it reads is kept aside until then: 2 bytes of each 16-bit weight.
        """
        if self.staleness == 0 or self._late:
            return
        for layer in self._engine.layers:
            views = layer.weights.views
            self._late.append((layer, {name: views[name].clone() for name in layer.trainable}))
            layer.publish()

    @torch.no_grad()
    def _put_back(self) -> None:
        """Let the next run read what it would have, had nobody looked at the newest.

        A checkpoint that is being written reads what was kept aside, or has been waited for by
        `show_newest`.
        """
        for layer, values in self._late:
            for name, value in values.items():
                layer.weights.views[name].copy_(value)
        self._late.clear()

    def late_weights(self, layer: HostLayer) -> dict[str, Tensor]:
        """The working weights that the next call reads, where those are not the newest."""
        if self.staleness == 0:
            return {}
        aside = {each.index: values for each, values in self._late}
        views = layer.weights.views
        return aside.get(layer.index) or {name: views[name] for name in layer.trainable}

    def go_on_from(self, staleness: int) -> None:
        """Weights were loaded that are as after a step of such ``staleness``."""
        self.making.end()
        self.notice_load()
        self.staleness, self._last, self._kind = staleness, None, None

    def catch_up(self) -> None:
        """Let the next call read the newest weights, late steps or not; nothing is under way."""
        self._late.clear()
        if self.staleness == 0:
            return
        for layer in self._engine.layers:
            layer.publish()
        self.staleness, self._last = 0, None
        self.num_versions += 1

    def restart(self) -> None:
        """Begin anew: what is trained has changed."""
        for model in self._engine.models:
            model.forget_shells()
        self._planner.restart()
        self._num_runs = 0
        self.num_versions += 1
        self._last = self._measured = self._sizes = None

    def follow_attributes(self) -> None:
        """Let devices have the module's attributes as they are now; nothing is under way."""
        self._num_rewrites += 1
        self._engine.spec.accept_changes()
        self._engine.known.forget()
        for model in self._engine.models:
            model.forget_shells()
        self._renew_contexts()
        self._last = None

    def _renew_contexts(self) -> None:
        """Have contexts read the buffers as they are: each holds copies."""
        for model in self._engine.models:
            model.context = self._engine.spec.make_context(model.device.torch_device)

    def _begin_idle(self) -> None:
        """Let shells follow ``train()`` and ``eval()``, of submodules too, on idle devices."""
        self._engine.drain()
        for model in self._engine.models:
            model.sync_mode()
        if self._modes != self._flags():
            self._engine.known.forget()
            self._modes = self._flags()

    def _flags(self) -> list[bool]:
        return [module.training for module in self._modules]
