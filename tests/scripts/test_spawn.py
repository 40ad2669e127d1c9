"""Training processes that a script spawns run in the process that is measured."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from compile_sweep.script.spawn import SpawnInPlace


class Refused(Exception):
    pass


@pytest.fixture
def spawning(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SpawnInPlace]:
    def made(**environment: str) -> SpawnInPlace:
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

        def refuse(said: str, number: int, workers: int) -> None:
            assert said == f"the script starts {number} training processes by torch.multiprocessing.spawn"
            raise Refused(number, workers)

        return SpawnInPlace(refuse)

    return made


def test_each_worker_runs_the_function_of_its_rank_alone(spawning: Callable[..., SpawnInPlace]) -> None:
    calls: list[Any] = []
    kept = mp.start_processes
    with spawning(LOCAL_RANK="1", LOCAL_WORLD_SIZE="2").applied():
        assert mp.spawn(lambda rank, word: calls.append((rank, word)), args=("a",), nprocs=2) is None
        context = mp.spawn(lambda *words: calls.append(words), ("b",), 2, False)
        assert context.join(), "it has ended"
        mp.start_processes(lambda rank: calls.append(rank), nprocs=2, start_method="fork")
        mp.spawn(lambda rank: calls.append("no process"), nprocs=0)
    assert calls == [(1, "a"), (1, "b"), 1]
    assert mp.start_processes is kept


@pytest.mark.parametrize(("environment", "workers"), [({}, 1), ({"WORLD_SIZE": "4"}, 4)], ids=["alone", "four"])
def test_another_number_of_processes_is_refused(
    spawning: Callable[..., SpawnInPlace], environment: dict[str, str], workers: int
) -> None:
    with spawning(**environment).applied(), pytest.raises(Refused) as error:
        mp.spawn(print, nprocs=2)
    assert error.value.args == (2, workers)


def test_scripts_that_name_one_port_meet_at_ports_of_their_own(spawning: Callable[..., SpawnInPlace]) -> None:
    def connect(rank: int, port: int) -> None:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=1)
        dist.destroy_process_group()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with spawning().applied():
            with pytest.raises(dist.DistNetworkError):
                connect(0, port)
            mp.spawn(connect, (port,))
