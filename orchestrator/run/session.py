"""The Ray session of a sweep, and how it is interrupted."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from compile_sweep.schema.errors import SessionError
from orchestrator.environment import fingerprint
from orchestrator.guard.scratch_folders import scratch_folder
from orchestrator.guard.watchdog import SESSION_MARKER, find_marked, kill_marked

_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # otherwise a local session listens on this host's outside address
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",  # the default, 2 s, makes a trial's overhead 19 s instead of 7 s
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # what trials are logged to is ours; Tune's own loggers load tensorboardX
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # the sweep has its own
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # Tune's state is disposable
    "TUNE_FORCE_TRIAL_CLEANUP_S": "30",
    "RAY_AIR_NEW_OUTPUT": "0",
}

_OF_A_LOCAL_SESSION = {
    # Ray's agents wait this long, by default 60 s, for a control service that comes back; here it ends with the driver.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    # After this, by default 60 s, Ray starts a worker process anew that is not up yet: on a host that is busy enough, for ever.
    "RAY_worker_register_timeout_seconds": "600",
    # Ray's own guard against a host without memory ends whole trials and what waits for them, which ends Tune (ray 2.60); the
    # kernel's ends the process that takes the most, and of those Ray has told it to end workers first.
    "RAY_memory_monitor_refresh_ms": "0",
    # A process for each trial that waits for a cloud's notice of preemption, 1.4 s of CPU time to start; nobody gives it here.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}

_LEAVING_S = 5.0
"""How long Ray's processes have to end themselves once the session has."""

_SAME_S = 1.0
"""Within which a second signal is the first once more: `timeout` sends one to the command and one to its whole group."""


@contextmanager
def ray_session() -> Iterator[None]:
    """Connects to the cluster that `RAY_ADDRESS` names, or runs Ray here, on 127.0.0.1 alone, while the block lasts.

    Raises:
        SessionError: Ray does not start or answer, or the address is none of a cluster that this host is in.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address == "local" or address.startswith("ray://"):
        raise SessionError(
            f"RAY_ADDRESS={address} names no cluster that a sweep can run in; unset it to run on this host, or run the sweep on "
            "the cluster's head, as `ray job submit` does, where auto is an address"
        )
    environment = _ENVIRONMENT | ({} if address else _OF_A_LOCAL_SESSION)
    with _kept_environment(*environment):
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        import ray  # only here: Ray reads some of these when it is imported

        own = ExitStack()
        try:
            _connect(own)
            with _no_echo():
                yield
        finally:
            ray.shutdown()
            own.close()


@contextmanager
def _kept_environment(*names: str) -> Iterator[None]:
    """Puts these variables back as they were before the block."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, previous in before.items():
            if previous is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = previous


def _connect(own: ExitStack) -> None:
    """Connects to the cluster, or starts Ray with a folder that `own` removes.

    Raises:
        SessionError: it does not start, or does not answer.
    """
    import ray
    from ray._private import ray_constants

    address = os.environ.get("RAY_ADDRESS")
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            _refuse_elsewhere(address)
            return
        folder = own.enter_context(_own_folder())
        session = own.enter_context(_nothing_left())
        ray_constants.ENABLE_RAY_CLUSTER = False  # as the variable above, for a process that has imported Ray already
        with (
            _apart(),
            _kept_environment(SESSION_MARKER),
        ):  # Ray's processes inherit it, and not what a tracker's library starts later
            os.environ[SESSION_MARKER] = session
            ray.init(
                address="local",
                num_cpus=len(os.sched_getaffinity(0)),
                num_gpus=fingerprint().num_gpus,  # Ray takes the parts of a GPU for one, and counts what CUDA does not see
                resources={"host": 1.0},  # as each host of a cluster has, see placing.py
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
            )
    except SessionError:
        raise
    except Exception as error:  # Ray has no common class for these, and says in some of them only "Exception"
        what = f"no Ray cluster answers at RAY_ADDRESS={address}" if address else "Ray did not start on this host"
        advice = "start one or unset it" if address else "if the host is very busy, try again when it is less so"
        if not address and isinstance(error, OSError) and str(error.filename).startswith(str(Path.home())):
            advice = "set HOME to a folder that can be written: Ray keeps its token there"
        words = str(error).split(". ")[0] or type(error).__name__
        raise SessionError(f"{what} ({words}); {advice}") from None
    _keep_token()


@contextmanager
def _apart() -> Iterator[None]:
    """Has Ray start its processes out of this one's group, all of which `timeout` signals; only the sweep is to act on that.

    They end with this process all the same, by the kernel. A Ray that starts them otherwise than 2.60 loses only this.
    """
    from ray._private import services

    start = getattr(services, "ConsolePopen", None)
    if start is None:
        yield
        return
    services.ConsolePopen = partial(start, start_new_session=True)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        services.ConsolePopen = start  # type: ignore[misc]


def _refuse_elsewhere(address: str) -> None:
    """Refuses a host that is not the head, where trials write what the command reads, each in the sweep's folder.

    Raises:
        SessionError: this is another.
    """
    import ray

    from orchestrator.cluster.head_actors import HEAD_RESOURCE  # which imports Ray

    here = ray.get_runtime_context().get_node_id()
    heads = {
        node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"] and HEAD_RESOURCE in node["Resources"]
    }
    if heads and here not in heads:
        (head, *_) = heads.values()
        raise SessionError(
            f"the sweep has to run on the head of the cluster at {address}, {head}, and this is another of its hosts; submit it "
            "with `ray job submit`, which starts it there"
        )


@contextmanager
def _nothing_left() -> Iterator[str]:
    """Ends what Ray started in the block and left behind, by the marker it yields; what else this process started may go on.

    Ray's processes end when their session does. One that is just ending itself may wait for ever for a lock that it holds, where
    Ray's core gives up its publisher (ray 2.60), and nobody knows of it any more.
    """
    session = uuid.uuid4().hex
    try:
        yield session
    finally:
        ends_at = time.monotonic() + _LEAVING_S
        while find_marked(session, SESSION_MARKER) and time.monotonic() < ends_at:
            time.sleep(0.1)
        kill_marked(session, SESSION_MARKER)


@contextmanager
def _own_folder() -> Iterator[str]:
    """A folder for Ray's sockets, logs and state that is nobody else's to read or write, and goes with the session.

    Ray's own, /tmp/ray, anybody may write to, and it keeps every session for ever. A socket's path has 107 bytes at most, of
    which Ray needs 62 and what Ray calls a session's date may need more.
    """
    base = Path(tempfile.gettempdir())
    with scratch_folder("ray-", base if len(str(base)) <= 24 else Path("/tmp")) as made:
        yield str(made)


def _keep_token() -> None:
    """Takes from others the right to read the token that Ray made for this user: whoever has it may run code in the session."""
    with suppress(OSError):
        (Path.home() / ".ray" / "auth_token").chmod(0o600)


@contextmanager
def _no_echo() -> Iterator[None]:
    """Keeps Ray from writing a paragraph into the view for each worker that dies; records say it, and why, once."""
    from ray._private import worker

    echo = worker.print_to_stdstream
    worker.print_to_stdstream = lambda *arguments, **options: None
    try:
        yield
    finally:
        worker.print_to_stdstream = echo


class Interrupts:
    """Ctrl-C once asks for a clean finish; twice stops now, by `KeyboardInterrupt`. SIGTERM and SIGHUP count as Ctrl-C."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._asked_at = 0.0

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handles the signals while the block lasts; must be entered by the main thread."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        kept = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in kept.items():
                with suppress(TypeError):  # a handler that Python did not install cannot be put back
                    signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.asked.is_set():
            self._asked_at = time.monotonic()
            self.asked.set()
        elif time.monotonic() - self._asked_at > _SAME_S:
            raise KeyboardInterrupt
