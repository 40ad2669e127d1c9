"""Runs trials on Ray: Ray Tune schedules them, Ray Train runs each trial's workers, on this host or in a cluster."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path

from orchestrator.config import SweepConfig
from orchestrator.environment import Environment
from orchestrator.guard.progress import Progress, find_progress_actor, start_progress_actor
from orchestrator.guard.scratch_folders import scratch_folder
from orchestrator.run.runner import Batch, new_trial_ids
from orchestrator.run.session import Interrupts, ray_session
from orchestrator.tracking import Tracking

_PROGRESS_TIMEOUT_S = 0.5  # seconds that the live view waits for the progress actor; it asks again soon


class RayRunner:
    """The runner on Ray. Imports Ray only in `session`, because Ray reads the environment on import."""

    def __init__(self, config: SweepConfig, environment: Environment, output: Path, tracking: Tracking) -> None:
        self._config, self._environment, self._output, self._tracking = config, environment, output, tracking
        self._trial_ids = new_trial_ids(output)
        self._scratch = Path()

    @contextmanager
    def session(self, say: Callable[[str], object], interrupts: Interrupts) -> Iterator[None]:
        """Connects to a cluster or starts Ray here, with the actors that trials need, while the block lasts."""
        with scratch_folder("compile-sweep-tune-") as self._scratch, ray_session(), ExitStack() as stack:
            stack.enter_context(interrupts.handled())  # after Ray has started, because it installs a SIGTERM handler itself
            from orchestrator.cluster.placement import in_cluster, start_placement_actor, wait_for_host
            from orchestrator.cluster.remote_logs import start_log_actor

            stack.enter_context(start_progress_actor())  # first: a second sweep must be refused before it takes hosts
            if in_cluster():
                wait_for_host(self._config, self._environment.cores, say, interrupts.asked)
                stack.enter_context(start_log_actor(self._output))
                stack.enter_context(start_placement_actor())
            yield

    def run(self, batches: Iterable[Batch]) -> None:
        """Runs batches in as few runs of Tune as it can, because each starts processes that import torch anew."""
        one_by_one = self._config.max_concurrent == 1
        for is_alone, group in groupby(batches, key=lambda batch: batch.alone or one_by_one):
            if is_alone:
                self._run_trials(group, max_concurrent=1)
                continue
            # Where trials run side by side, Tune asks for the next one while others run, which the next batch must not see.
            for batch in group:
                self._run_trials([batch], max_concurrent=self._config.max_concurrent)

    def _run_trials(self, batches: Iterable[Batch], max_concurrent: int) -> None:
        from orchestrator.run.tuning import run_trials

        run_trials(
            self._config,
            batches,
            environment=self._environment,
            output=self._output,
            scratch=self._scratch,
            new_trial_id=self._trial_ids.__next__,
            tracking=self._tracking,
            max_concurrent=max_concurrent,
        )

    def running(self) -> Sequence[Progress]:
        import ray

        found: list[Progress] = ray.get(find_progress_actor().running.remote(), timeout=_PROGRESS_TIMEOUT_S)
        return found
