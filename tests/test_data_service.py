"""tools/data_service.py with real processes on free ports of this machine: started, killed, ended, none left over."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

TOOL = ROOT / "tools" / "data_service.py"
ROLES = ("local", "dispatcher", "worker")
linux = pytest.mark.skipif(sys.platform != "linux", reason="data_service.py local needs Linux")


@pytest.fixture
def begin(monkeypatch, tmp_path):
    """Begins the tool, behind a proxy that is none; what it began is ended after the test, whatever became of it."""
    monkeypatch.setenv("no_grpc_proxy", "localhost")  # for the test itself
    env = {key: value for key, value in os.environ.items() if key.lower() not in ("no_proxy", "no_grpc_proxy")}
    env |= {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    begun = []

    def begin(*arguments, **options):
        said = (tmp_path / f"{len(begun)}.txt").open("w+")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said, "env": env}
        process = subprocess.Popen([sys.executable, TOOL, *map(str, arguments)], text=True, **pipes | options)
        process.said = said
        begun.append(process)
        return process

    yield begin
    for process in begun:
        process.kill()
        process.wait()
        process.said.close()


def line_of(process):
    """What it says next: [role, address, process]."""
    watch = threading.Timer(120, process.kill)
    watch.start()
    line = process.stdout.readline().split()
    watch.cancel()
    assert line, process.said.seek(0) or process.said.read()
    return line


def is_gone(pid):
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True  # whoever inherits it may take its time
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


class Local:
    """`data_service.py local` with two workers."""

    def __init__(self, begin, *options):
        self.process = begin("local", "--workers", 2, "--until-eof", *options)
        self.servers = sorted(line_of(self.process) for _ in range(3))
        self.target = f"grpc://{self.servers[0][1]}"


@pytest.fixture
def local(begin):
    """Makes services, of which no process is left when their input ends."""
    services = []
    yield lambda *options: services.append(Local(begin, *options)) or services[-1]
    for each in services:
        each.process.stdin.close()
    for each in services:
        assert each.process.wait(timeout=30) in (0, -signal.SIGKILL)
        assert all(is_gone(pid) for _, _, pid in each.servers)


def one_pass(tf, target, mode="DYNAMIC", dataset=None):
    service = tf.data.experimental.service
    dataset = dataset or tf.data.Dataset.range(100).batch(5)
    prepared = dataset.apply(service.distribute(service.ShardingPolicy[mode], target, max_outstanding_requests=2))
    return prepared.as_numpy_iterator()


@linux
def test_what_is_killed_comes_back_at_its_address_and_no_example_twice(tf, local, tmp_path):
    service = local("--journal", str(tmp_path / "journal"))

    def slowly(number):
        return number + tf.cast(0 * tf.reduce_sum(tf.linalg.expm(tf.random.normal([60, 60]))), tf.int64)

    for number in (2, 0):  # a worker, the dispatcher
        batches = one_pass(tf, service.target, dataset=tf.data.Dataset.range(600).map(slowly).batch(10))
        arrived = list(next(batches))
        os.kill(int(service.servers[number][2]), signal.SIGKILL)
        role, address, _ = service.servers[number]
        said = line_of(service.process)
        assert (said[0], said[-3:]) == (role, ["-9:", "started", "again"])
        service.servers[number] = line_of(service.process)
        assert service.servers[number][:2] == [role, address]
        counts = np.bincount(np.concatenate([arrived, *batches]), minlength=600)
        assert counts.max() == 1
        assert counts.sum() >= (590 if role == "dispatcher" else 500)  # or a split is lost on its way


@linux
def test_services_at_once_do_not_meet_and_however_they_end_no_process_is_left(tf, local):
    services = [local() for _ in range(3)]
    assert len({address for each in services for _, address, _ in each.servers}) == 9
    for each in services[:2]:
        assert sorted(np.concatenate(list(one_pass(tf, each.target)))) == list(range(100))
        assert len(np.concatenate(list(one_pass(tf, each.target, "OFF")))) == 200  # of its two workers
    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
    for end, service in zip(ends, services, strict=True):
        service.process.send_signal(end)
    for end, service in zip(ends, services, strict=True):
        assert service.process.wait(timeout=30) in (0, -end)
        assert all(is_gone(pid) for _, _, pid in service.servers)


@linux
def test_asked_to_end_while_it_begins_and_with_nobody_to_read_it(begin):
    early = begin("local")
    at_once = begin("local", "--until-eof", stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    nobody = begin("local", "--until-eof")
    nobody.stdout.close()
    time.sleep(0.5)
    early.send_signal(signal.SIGTERM)
    nobody.stdin.close()
    for process in (early, at_once, nobody):
        assert process.wait(timeout=60) in (0, -signal.SIGTERM)
        process.said.seek(0)
        assert not process.said.read()


def test_each_role_alone_as_on_machines_of_their_own(tf, begin):
    dispatcher = begin("dispatcher", "--until-eof")
    address = line_of(dispatcher)[1]
    worker = begin("worker", "--dispatcher", address, "--until-eof")
    line_of(worker)
    assert sorted(np.concatenate(list(one_pass(tf, f"grpc://{address}")))) == list(range(100))
    second = begin("dispatcher", "--port", address.rpartition(":")[2])  # gRPC would share the port with it
    assert second.wait(timeout=60)
    for process in (worker, dispatcher):
        process.stdin.close()
        assert process.wait(timeout=20) == 0
        process.said.seek(0)
        assert not process.said.read()  # of a proxy, for one


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["local", "--workers", "0"], ["--workers", "'0'", "from 1 to 64"]),
        (["local", "--port", "taken"], ["--port", "cannot be used (Address already in use)", "pass another"]),
        (["worker", "--dispatcher", "192.0.2.1:5000"], ["--host is missing", "pass what the training"]),
        (["dispatcher", "--port", "taken"], ["--port", "cannot be used (Address already in use)", "pass another"]),
        (["dispatcher", "--fixed-workers", "a"], ["--fixed-workers", "'a' is no address", "host:port"]),
        (["dispatcher", "--journal", "here"], ["--journal needs --port", "its old address"]),
        (["dispatcher", "--journal", ""], ["--journal", "''", "pass a folder"]),
        (["dispatcher", "--port", "free", "--journal", "/dev/null"], ["cannot start (--journal /dev/null): "]),
        (["worker"], ["--dispatcher"]),
        (["worker", "--dispatcher", "here"], ["--dispatcher", "'here' is no address", "host:port"]),
        (["worker", "--dispatcher", "a..b:1"], ["--dispatcher", "'a..b:1' is no address", "IPv4"]),
        (["worker", "--dispatcher", "localhost:99999"], ["--dispatcher", "'localhost:99999' is no address"]),
        (["worker", "--dispatcher", "a:1", "--host", "b:2"], ["--host", "'b:2' is no host", "without a port"]),
        (["worker", "--dispatcher", "no.such.invalid:1", "--host", "b"], ["no machine of that name", "pass a name"]),
        (["worker", "--dispatcher", "localhost:1", "--patience", "0"], ["localhost:1 does not answer", "start it"]),
        (["worker", "--dispatcher", "localhost:taken", "--patience", "0"], ["does not answer (timed out)", "start it"]),
    ],
    ids=lambda value: "-".join(value).replace("/", "") if value[0] in ROLES else "",
)
def test_bad_arguments_are_one_sentence(arguments, parts, begin):
    with socket.create_server(("", 0)) as server, socket.create_server(("", 0)) as other:
        taken, free = (str(each.getsockname()[1]) for each in (server, other))
        other.close()
        filled = [each.replace("taken", taken).replace("free", free) for each in arguments]
        process = begin(*filled, stdin=subprocess.DEVNULL)
        assert process.wait(timeout=60)
    process.said.seek(0)
    said = process.said.read()
    assert "Traceback" not in said
    last = said.strip().splitlines()[-1]
    assert all(part in last for part in parts), said
