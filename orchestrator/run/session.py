"""The Ray session of a sweep, and the handling of interrupts."""

import logging
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from compile_sweep.own_packages import ROOT
from compile_sweep.schema.errors import SessionError
from compile_sweep.script.monkeypatch import replaced
from orchestrator.environment import fingerprint
from orchestrator.guard.scratch_folders import scratch_folder
from orchestrator.guard.session_reaper import session_reaper
from orchestrator.guard.watchdog import SESSION_MARKER

_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # otherwise a local session listens on this host's outside address
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",  # the default, 2 s, makes a trial's overhead 19 s instead of 7 s
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # Tune's own loggers load tensorboardX, and the sweep logs trials itself
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # the sweep has its own handler
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # Tune's state is disposable
    "TUNE_FORCE_TRIAL_CLEANUP_S": "30",
    "RAY_AIR_NEW_OUTPUT": "0",
}

_OF_A_LOCAL_SESSION = {
    # How long Ray's agents wait for a control service to come back, by default 60 s; here it ends with the driver.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    # How long Ray waits for a worker process before it starts another, by default 60 s; on a busy host this would never end.
    "RAY_worker_register_timeout_seconds": "600",
    # Ray's own guard against running out of memory ends whole trials and everything that waits for them, which ends Tune (ray
    # 2.60). The kernel's ends the process that takes the most memory, and Ray has told it to end workers first.
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray gives its workers the niceness 15, so that a trial on a busy host would be slower than the same training by itself.
    "RAY_worker_niceness": "0",
    # Starts a process per trial that waits for a cloud's preemption notice, which costs 1.4 s of CPU time; no cloud sends one
    # here.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}

_LEAVING_S = 5.0
"""Seconds that Ray's processes may take to end after the session. One that is exiting can wait forever for a lock that it holds
itself, where Ray's core gives up its publisher (ray 2.60), and nothing else ends it."""

_SAME_S = 1.0
"""Seconds within which a second signal counts as the first: `timeout` signals both the command and its process group."""

_SAME_PRESS_S = 0.1
"""The same for Ctrl-C, which a person who cannot wait presses several times a second."""


@contextmanager
def ray_session() -> Iterator[None]:
    """Connects to the cluster in `RAY_ADDRESS`, or runs Ray on this host, on 127.0.0.1 only, while the block lasts."""
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
        import ray  # only here: Ray reads some of these variables on import

        with ExitStack() as own:  # closed even if another Ctrl-C ends the shutdown
            try:
                _connect(own)
                with _no_echo():
                    yield
            finally:
                ray.shutdown()


@contextmanager
def _kept_environment(*names: str) -> Iterator[None]:
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
    """Connects to the cluster, or starts Ray with a folder that `own` removes."""
    import ray
    from ray._private import ray_constants
    from ray.job_config import JobConfig

    address = os.environ.get("RAY_ADDRESS")
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            _refuse_elsewhere(address)
            return
        folder = own.enter_context(_own_folder())
        session = uuid.uuid4().hex
        reaper = own.enter_context(session_reaper(session, Path(folder), _LEAVING_S))
        # The equivalent of the variable above, for a process that has imported Ray already.
        ray_constants.ENABLE_RAY_CLUSTER = False
        with (
            _apart(),
            _kept_environment(SESSION_MARKER),
        ):  # Ray's processes inherit these variables, but processes that a tracker's library starts later do not
            os.environ[SESSION_MARKER] = session
            ray.init(
                address="local",
                num_cpus=len(os.sched_getaffinity(0)),
                num_gpus=fingerprint().num_gpus,  # Ray counts each part of a divided GPU as one, and GPUs that CUDA does not see
                resources={"host": 1.0},  # like each host of a cluster, see placement.py
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                # Otherwise the current folder is first on the import path of Ray's workers, where a user's pandas.py ends them.
                job_config=JobConfig(_client_job=True, _py_driver_sys_path=[str(ROOT)]),
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
            )
        reaper.session_is_up()
    except SessionError:
        raise
    except Exception as error:  # Ray's errors have no common class, and the message of some is just "Exception"
        what = f"no Ray cluster answers at RAY_ADDRESS={address}" if address else "Ray did not start on this host"
        advice = "start one or unset it" if address else "if the host is very busy, try again when it is less so"
        if not address and isinstance(error, OSError) and str(error.filename).startswith(str(Path.home())):
            advice = "set HOME to a folder that can be written: Ray keeps its token there"
        words = str(error).split(". ")[0] or type(error).__name__
        raise SessionError(f"{what} ({words}); {advice}") from None
    _keep_token()


def _apart() -> AbstractContextManager[None]:
    """Makes Ray start its processes outside this process group: `timeout` signals the group, and only the sweep should react.

    The kernel still ends Ray's processes with this one. A version of Ray other than 2.60 that starts processes differently loses
    only this protection.
    """
    from ray._private import services

    if not hasattr(services, "ConsolePopen"):
        return nullcontext()
    return replaced(services, "ConsolePopen", lambda start: partial(start, start_new_session=True))


def _refuse_elsewhere(address: str) -> None:
    """Raises an error if this host is not the cluster's head, where trials write to the sweep's folder."""
    import ray

    from orchestrator.cluster.head_actors import HEAD_RESOURCE  # imports Ray

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
def _own_folder() -> Iterator[str]:
    """Creates a private folder for Ray's sockets, logs and state, and removes it with the session.

    Anybody can write to Ray's default, /tmp/ray, which also keeps every session forever. A socket's path has at most 107 bytes,
    of which Ray needs 62, or more for a longer session date.
    """
    base = Path(tempfile.gettempdir())
    with scratch_folder("ray-", base if len(str(base)) <= 24 else Path("/tmp")) as made:
        yield str(made)


def _keep_token() -> None:
    """Makes Ray's token for this user readable by its owner only, because anyone with the token can run code in the session."""
    with suppress(OSError):
        (Path.home() / ".ray" / "auth_token").chmod(0o600)


def _no_echo() -> AbstractContextManager[None]:
    """Keeps Ray from printing a paragraph into the view for each worker that dies; records say once that it died and why."""
    from ray._private import worker

    return replaced(worker, "print_to_stdstream", lambda echo: lambda *arguments, **options: None)


class Interrupts:
    """Ctrl-C once asks for a clean finish; twice stops now with `KeyboardInterrupt`. SIGTERM and SIGHUP count as Ctrl-C."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._asked_at = 0.0

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handles the signals while the block lasts; call it in the main thread."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
            numbers.append(signal.SIGHUP)
        kept = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in kept.items():
                with suppress(TypeError):  # a handler that was not installed from Python cannot be restored
                    signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.asked.is_set():
            self._asked_at = time.monotonic()
            self.asked.set()
        elif time.monotonic() - self._asked_at > (_SAME_PRESS_S if number == signal.SIGINT else _SAME_S):
            raise KeyboardInterrupt
