"""A worker group of Ray Train that stays from trial to trial, so that a trial on one host starts at once.

Background: for every run Ray Train starts a controller and several helpers besides the workers, and each worker imports torch
anew; together that takes most of the time that a short trial has. Here one run of a trainer lasts as long as Tune reuses the
trial's process. Its workers measure nothing themselves: each has a fork server, which forks a fresh process for every attempt.
A crash is then the end of a child, and the group goes on. What ends a worker itself ends the group, and the next attempt
starts another.

In a cluster every attempt has a group of its own, because hosts are chosen anew for every trial.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.exceptions import WorkerGroupError

from orchestrator.cluster import head_actors
from orchestrator.run import trial
from orchestrator.run.forked_attempt import Servers, forked_attempt, prepare_log
from orchestrator.run.ray_parent import STOP_POLL_S, RayParent
from orchestrator.run.trial_spec import Assignment, TrialPlan
from orchestrator.run.worker import MeasurementFailed

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_POLL_S = 0.2
"""How often a worker looks at its child, and the trial's process at the group."""

_CLOSE_S = 10.0
"""How long a group has to end itself."""


class WorkerDied(Exception):
    """The child of a worker ended without a result."""


class Mailbox:
    """Carries attempts from a trial's process to the workers of its group, and what became of them back. An async actor.

    Args:
        num_workers: Of the group.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._orders: list[Mapping[str, Any] | None] = []
        self._outcomes: dict[int, Mapping[str, Any]] = {}
        self._gone: set[int] = set()
        self._changed = asyncio.Condition()

    async def run(self, order: Mapping[str, Any] | None) -> dict[int, Mapping[str, Any]]:
        """Hands every worker an attempt and waits until all their children are gone.

        Args:
            order: The assignment and the attempt's marker; None to end the group.

        Returns:
            Outcomes by rank: all of them, or that of the first worker whose child failed.
        """
        async with self._changed:
            self._outcomes, self._gone = {}, set()
            self._orders.append(order)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: order is None or len(self._gone) == self._num_workers)
            return self._outcomes

    async def next_order(self, number: int) -> Mapping[str, Any] | None:
        """Waits for the order of this number, the first of which is 0."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._orders) > number)
            return self._orders[number]

    async def finish(self, rank: int, outcome: Mapping[str, Any]) -> None:
        """Notes a worker's outcome. What others say after the first failure is its consequence, and dropped."""
        if not self._has_failed:
            self._outcomes[rank] = outcome

    async def is_over(self) -> bool:
        """Whether all children may be killed: every worker has finished, or one has failed."""
        return self._has_failed or len(self._outcomes) == self._num_workers

    async def gone(self, rank: int) -> None:
        """Notes that a worker's child is gone."""
        async with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    @property
    def _has_failed(self) -> bool:
        return any("figures" not in outcome for outcome in self._outcomes.values())


class StandingGroup:
    """A group, from the trial's process. It ends with this process, or when it is closed.

    Args:
        plan: The plan of its trials.
        make_trainer: Makes its trainer; `worker_group.make_trainer`.
        storage: A folder for Ray Train's state, which is of no use afterwards.
    """

    def __init__(self, plan: TrialPlan, make_trainer: Callable[..., Any], storage: str) -> None:
        self.plan = plan
        self._mailbox = _start_mailbox(plan.num_workers)
        self._error: Exception | None = None
        trainer = make_trainer(
            plan, serve_attempts, {"mailbox": self._mailbox}, ApartConfig(), name=uuid.uuid4().hex, storage=storage
        )
        self._thread = threading.Thread(target=self._fit, args=(trainer,), name="worker-group", daemon=True)
        self._thread.start()

    def _fit(self, trainer: Any) -> None:
        try:
            trainer.fit()
        except Exception as error:  # whatever ends a worker group: a result of the attempt under way
            self._error = error

    @property
    def is_alive(self) -> bool:
        """Whether it can make an attempt."""
        return self._thread.is_alive()

    def run(self, assignment: Assignment, marker: str) -> Mapping[str, Any]:
        """Makes an attempt; returns the figures of worker 0.

        Raises:
            WorkerGroupError: A worker's child failed.
            Exception: What ended the group, as Ray Train raises it.
        """
        answer: Any = self._mailbox.run.remote({"assignment": assignment.to_dict(), "marker": marker})
        while not ray.wait([answer], timeout=_POLL_S)[0]:
            if not self._thread.is_alive():
                raise self._error or WorkerDied("its worker group ended")
        outcomes: dict[int, Mapping[str, Any]] = ray.get(answer)
        failures = {rank: _failure(assignment, rank, outcome) for rank, outcome in outcomes.items() if "figures" not in outcome}
        if failures:
            raise WorkerGroupError("\n".join(map(str, failures.values())), failures)
        figures: Mapping[str, Any] = outcomes[0]["figures"]
        return figures

    def close(self) -> None:
        """Ends the group's processes."""
        with suppress(ray.exceptions.RayError):
            self._mailbox.run.remote(None)
            self._thread.join(_CLOSE_S)
            ray.kill(self._mailbox)


def _start_mailbox(num_workers: int) -> ActorHandle[Mailbox]:
    # Outside of Tune's placement group, where there is room for the trial's process alone.
    options: Any = ray.remote(num_cpus=0, scheduling_strategy="DEFAULT")(Mailbox)
    mailbox: ActorHandle[Mailbox] = options.remote(num_workers)
    return mailbox


def _failure(assignment: Assignment, rank: int, outcome: Mapping[str, Any]) -> Exception:
    """The exception that a worker's outcome stands for."""
    if "error_type" not in outcome:
        return WorkerDied(outcome["ending"])
    log = str(assignment.log_file(rank))
    return MeasurementFailed(outcome["error_type"], outcome["error_text"], outcome["error_is_compilers"], log)


class ApartConfig(BackendConfig):
    """A back-end that connects nothing: the workers' children find each other."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _Apart


class _Apart(Backend):
    share_cuda_visible_devices = True


# What follows runs in workers, which never load torch.


def serve_attempts(values: Mapping[str, Any]) -> None:
    """What each worker does until the group is closed. Ray Train's `train_loop_per_worker`.

    Args:
        values: `mailbox`, the group's.
    """
    mailbox: Any = values["mailbox"]
    rank = ray.train.get_context().get_world_rank()
    servers: Servers | None = None
    number = 0
    try:
        while (order := ray.get(mailbox.next_order.remote(number))) is not None:
            assignment = _with_credentials(Assignment.from_dict(order["assignment"]))
            parent = RayParent(assignment, rank)
            servers = servers or Servers(imports_workload=True, core_shares=parent.core_shares(assignment.plan))
            _serve(assignment, order["marker"], servers, parent, mailbox)
            ray.get(mailbox.gone.remote(rank))
            number += 1
    finally:
        if servers is not None:
            servers.close()


def _with_credentials(assignment: Assignment) -> Assignment:
    """The assignment with the cache's full address, which a child cannot look up in the cluster's memory."""
    plan = assignment.plan
    if plan.cache is None:
        return assignment
    return replace(assignment, plan=replace(plan, cache=head_actors.with_credentials(plan.cache)))


def _serve(assignment: Assignment, marker: str, servers: Servers, parent: RayParent, mailbox: Any) -> None:
    """Makes an attempt, of which the progress actor and the mailbox hear."""
    plan = assignment.plan
    prepare_log(assignment, parent.rank)
    ranks = {"RANK": parent.rank, "LOCAL_RANK": parent.rank}  # all workers are on this host
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), plan.num_workers)
    with forked_attempt(
        servers.server_for(plan, trial.environment_at_import(assignment)),
        assignment,
        marker,
        rank=parent.rank,
        gpu=parent.gpu_index() if plan.use_gpu else None,
        environment={name: str(number) for name, number in {**ranks, **sizes}.items()},
    ) as forked:
        has_finished, asks_again_at = False, 0.0
        while not ((has_finished or plan.num_workers > 1) and ray.get(mailbox.is_over.remote())):
            has_ended = forked.wait(_POLL_S)
            for method, *arguments in forked.reports():
                parent.pass_on(method, *arguments)
            if has_ended and not has_finished:
                forked.read_outcome()
                ray.get(mailbox.finish.remote(parent.rank, forked.outcome or {"ending": forked.ending}))
                has_finished = True
            elif plan.prunes and parent.rank == 0 and time.monotonic() >= asks_again_at:
                asks_again_at = time.monotonic() + STOP_POLL_S
                if (stop := parent.stop_request()) is not None:
                    forked.log(stop.reason)
                    ray.get(mailbox.finish.remote(parent.rank, {"ending": "it was told to stop"}))
                    has_finished = True
