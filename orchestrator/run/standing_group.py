"""A Ray Train worker group that persists from trial to trial, so that a trial on one host starts at once.

Background: for every run, Ray Train starts a controller and several helpers besides the workers, and each worker imports torch
anew. Together that takes most of the time of a short trial. Here one run of a trainer lasts as long as Tune reuses the trial's
process. Its workers measure nothing themselves: each has a fork server, which forks a fresh process for every attempt. A crash
then ends a child, and the group continues. If a worker itself ends, so does the group, and the next attempt starts another.

In a cluster every attempt has a group of its own, because hosts are chosen anew for every trial.
"""

import json
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.exceptions import WorkerGroupError

from orchestrator.cluster import head_actors
from orchestrator.run import trial
from orchestrator.run.forked_attempt import Servers, forked_attempt, prepare_log
from orchestrator.run.ray_worker_context import STOP_POLL_S, RayParent
from orchestrator.run.trial_spec import Assignment, TrialPlan
from orchestrator.run.worker import MeasurementFailed

_POLL_S = 0.2  # seconds between a worker's checks of its child, and between those of the group by the trial's process
_ORDER_POLL_S = 0.05  # seconds between an idle worker's checks for an order
_CLOSE_S = 10.0  # seconds that a group may take to end itself


class WorkerDied(Exception):
    """A worker's child ended without a result."""


class Mailbox:
    """Carries attempts from a trial's process to the workers of its group, and outcomes back, as files.

    Files appear atomically. The first failure stands, because failures that other workers report later follow from it.
    """

    def __init__(self, folder: Path, num_workers: int) -> None:
        self._folder, self._num_workers = folder, num_workers

    def post(self, number: int, order: Mapping[str, Any] | None) -> None:
        """Posts an order, the assignment and the attempt's marker, for every worker; None ends the group."""
        self._write(f"{number}.order", order)

    def order(self, number: int) -> Mapping[str, Any] | None:
        """Waits for an order."""
        while not (path := self._folder / f"{number}.order").exists():
            time.sleep(_ORDER_POLL_S)
        order: Mapping[str, Any] | None = json.loads(path.read_text(encoding="utf-8"))
        return order

    def finish(self, number: int, rank: int, outcome: Mapping[str, Any]) -> None:
        """Records a worker's outcome, which is a failure if it has no `figures`."""
        self._write(f"{number}.{rank}" if "figures" in outcome else f"{number}.failure", {"rank": rank, "outcome": outcome})

    def is_over(self, number: int) -> bool:
        """Tells whether the children of all workers may be killed: every worker has finished, or one has failed."""
        return (self._folder / f"{number}.failure").exists() or len(self._finished(number)) == self._num_workers

    def leave(self, number: int, rank: int) -> None:
        """Records that a worker's child is gone."""
        self._write(f"{number}.{rank}.gone", None)

    def are_gone(self, number: int) -> bool:
        """Tells whether all children are gone."""
        return all((self._folder / f"{number}.{rank}.gone").exists() for rank in range(self._num_workers))

    def outcomes(self, number: int) -> dict[int, Mapping[str, Any]]:
        """Returns outcomes by rank: all of them, or those up to and including the first failure."""
        failure = self._folder / f"{number}.failure"
        found = [json.loads(path.read_text(encoding="utf-8")) for path in [*self._finished(number), failure] if path.exists()]
        return {one["rank"]: one["outcome"] for one in found}

    def _finished(self, number: int) -> list[Path]:
        return [path for rank in range(self._num_workers) if (path := self._folder / f"{number}.{rank}").exists()]

    def _write(self, name: str, values: object) -> None:
        with tempfile.NamedTemporaryFile("w", dir=self._folder, encoding="utf-8") as file:
            json.dump(values, file)
            file.flush()
            with suppress(FileExistsError):
                os.link(file.name, self._folder / name)


class StandingGroup:
    """A group, seen from the trial's process. It ends with this process, or when it is closed."""

    def __init__(self, plan: TrialPlan, make_trainer: Callable[..., Any], storage: str) -> None:
        self._mailbox = Mailbox(Path(tempfile.mkdtemp(dir=storage)), plan.num_workers)
        self._numbers = count()
        self._error: Exception | None = None
        trainer = make_trainer(
            plan, serve_attempts, {"mailbox": self._mailbox}, ApartConfig(), name=uuid.uuid4().hex, storage=storage
        )
        self._thread = threading.Thread(target=self._fit, args=(trainer,), name="worker-group", daemon=True)
        self._thread.start()

    def _fit(self, trainer: Any) -> None:
        try:
            trainer.fit()
        except Exception as error:  # whatever ends a worker group is a result of the current attempt
            self._error = error

    @property
    def is_alive(self) -> bool:
        """Tells whether the group can make an attempt."""
        return self._thread.is_alive()

    def run(self, assignment: Assignment, marker: str) -> Mapping[str, Any]:
        """Makes an attempt and returns the figures of worker 0; raises WorkerGroupError, or the error that ended the group."""
        number = next(self._numbers)
        self._mailbox.post(number, {"assignment": assignment.to_dict(), "marker": marker})
        while not self._mailbox.are_gone(number):
            self._thread.join(_POLL_S)
            if not self._thread.is_alive():
                raise self._error or WorkerDied("its worker group ended")
        outcomes = self._mailbox.outcomes(number)
        failures = {rank: _failure(assignment, rank, outcome) for rank, outcome in outcomes.items() if "figures" not in outcome}
        if failures:
            raise WorkerGroupError("\n".join(map(str, failures.values())), failures)
        figures: Mapping[str, Any] = outcomes[0]["figures"]
        return figures

    def close(self) -> None:
        """Ends the group's processes."""
        self._mailbox.post(next(self._numbers), None)
        self._thread.join(_CLOSE_S)


def _failure(assignment: Assignment, rank: int, outcome: Mapping[str, Any]) -> Exception:
    if "error_type" not in outcome:
        return WorkerDied(outcome["ending"])
    log = str(assignment.log_file(rank))
    return MeasurementFailed(outcome["error_type"], outcome["error_text"], outcome["error_is_compilers"], log)


class ApartConfig(BackendConfig):
    """A back-end that connects nothing: the workers' children connect to each other."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _Apart


class _Apart(Backend):
    share_cuda_visible_devices = True


# Everything below runs in workers, which never load torch.


def serve_attempts(values: Mapping[str, Any]) -> None:
    """Serves attempts in a worker until the group is closed. Ray Train's `train_loop_per_worker`."""
    mailbox: Mailbox = values["mailbox"]
    rank = ray.train.get_context().get_world_rank()
    servers: Servers | None = None
    number = 0
    try:
        while (order := mailbox.order(number)) is not None:
            assignment = _with_credentials(Assignment.from_dict(order["assignment"]))
            parent = RayParent(assignment, rank)
            servers = servers or Servers(imports_workload=True, core_shares=parent.core_shares(assignment.plan))
            _serve(assignment, order["marker"], servers, parent, mailbox, number)
            mailbox.leave(number, rank)
            number += 1
    finally:
        if servers is not None:
            servers.close()


def _with_credentials(assignment: Assignment) -> Assignment:
    """Returns the assignment with the cache's credentials, which a child cannot look up in the cluster's memory."""
    plan = assignment.plan
    if plan.cache is None:
        return assignment
    return replace(assignment, plan=replace(plan, cache=head_actors.with_credentials(plan.cache)))


def _serve(assignment: Assignment, marker: str, servers: Servers, parent: RayParent, mailbox: Mailbox, number: int) -> None:
    """Makes an attempt and reports it to the progress actor and the mailbox."""
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
        has_own_work_folder=True,  # the worker's own folder, which Ray Train made, is kept from attempt to attempt
    ) as forked:
        has_finished, asks_again_at = False, 0.0
        while not mailbox.is_over(number):
            has_ended = forked.wait(_POLL_S)
            for method, *arguments in forked.reports():
                parent.pass_on(method, *arguments)
            if has_ended and not has_finished:
                forked.read_outcome()
                mailbox.finish(number, parent.rank, forked.outcome or {"ending": forked.ending})
                has_finished = True
            elif plan.prunes and parent.rank == 0 and time.monotonic() >= asks_again_at:
                asks_again_at = time.monotonic() + STOP_POLL_S
                if (stop := parent.stop_request()) is not None:
                    forked.log(stop.reason)
                    mailbox.finish(number, parent.rank, {"ending": "it was told to stop"})
