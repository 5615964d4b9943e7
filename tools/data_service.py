"""Prepare training data on other machines: the dispatcher and the workers of TensorFlow's tf.data service.

    python data_service.py dispatcher --host 10.0.0.2 --port 5000 --journal journal/            # on one machine
    python data_service.py worker --dispatcher 10.0.0.2:5000 --host 10.0.0.3 --port 5001        # on each that prepares
    python data_service.py local --workers 2                                  # all on this machine (Linux), to try it

Each says in one line where it listens, and ends with Ctrl-C, SIGTERM, or with --until-eof when its standard input does.
One that ended can be started again with the same command: its port and the journal are how the others find it again.
Needs TensorFlow of the same version as the training (tensorflow-cpu will do), and nothing else of the kit: copy this
file. Explained in notebooks/10_scale_out.ipynb. The servers listen on all addresses of a machine, ask for no password,
and run whatever pipeline they are sent, which can read and write files: let nobody but the training reach their ports.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import os
import re
import select
import signal
import socket
import sys
import tempfile
import threading
import time

ENDS = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1  # of Linux' prctl: a signal for when the parent ends
REFUSED = 3  # the exit status of a server that could not start
HOST = r"[A-Za-z0-9_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*"
INSTALL = "pip install tensorflow-cpu, of the version of the training"
ANOTHER = "pass a name or an IPv4 address"


def refuse(sentence: str) -> None:
    sys.exit(f"data_service.py: {sentence}")


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def say(line: str) -> None:
    """In one piece: several processes write here. Nobody need read it."""
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def hold(port: int) -> tuple[int, socket.socket]:
    """`port`, or a free one for 0, and what holds it until gRPC takes it.

    gRPC would share a port that another server has, and each of them get some of the calls.
    """
    try:
        with socket.create_server(("", port)) as server:  # all addresses, as gRPC does
            port = server.getsockname()[1]
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", port))  # it does not listen, so it takes no calls
        if hasattr(socket, "SO_REUSEPORT"):
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        else:
            held.close()
    except OSError as error:
        refuse(f"--port {port} cannot be used ({os.strerror(error.errno)}): pass another, or 0 for any.")
    return port, held


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def end_with(file: int) -> None:
    """End this process when that file does, as a pipe does whose other side has ended, however."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(file, 4096):
                pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def service_of_tensorflow():
    """tf.data.experimental.service, without what TensorFlow writes while it starts."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's, which is not needed here
    os.environ["grpc_proxy"] = ""  # noqa: SIM112 - or servers would call each other through http_proxy
    os.environ.setdefault("TPU_LOAD_LIBRARY", "0")  # chips of this machine, if any, are the training's
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    with tempfile.TemporaryFile() as said:
        stderr = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            import tensorflow as tf
        except Exception as error:  # noqa: BLE001 - a package that it needs may raise anything
            refuse(f"TensorFlow cannot be imported ({first_line(error)}): {INSTALL}.")
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
    return tf.data.experimental.service


def dispatcher(given: argparse.Namespace):
    """Hands out work, and remembers in its journal what it has handed out."""
    if given.journal and not given.port:
        refuse("--journal needs --port: a dispatcher that is started again is found at its old address alone.")
    port, held = hold(given.port)
    service = service_of_tensorflow()
    config = service.DispatcherConfig(
        port=port,
        work_dir=given.journal,
        fault_tolerant_mode=given.journal is not None,
        worker_addresses=given.fixed_workers,
        job_gc_check_interval_ms=10_000,
        job_gc_timeout_ms=60_000,
    )
    return service.DispatchServer(config), held, f"dispatcher {given.host}:{port}"


def wait_for(address: str, patience: float) -> None:
    """Until a gRPC server answers there; TensorFlow would wait without an end and without a word."""
    host, port = address.rpartition(":")[0], port_of(address)
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # HTTP/2's, RFC 9113, 3.4
    began, said = time.monotonic(), False
    while True:
        try:
            with socket.create_connection((host, port), timeout=5) as link:
                link.sendall(hello)
                if link.recv(9)[3:4] == b"\x04":
                    return
            raise OSError("what listens there is no gRPC server")
        except OSError as error:
            if isinstance(error, socket.gaierror):
                refuse(f"--dispatcher {address}: no machine of that name is known here ({error.strerror}): {ANOTHER}.")
            if time.monotonic() > began + patience:
                refuse(f"--dispatcher {address} does not answer ({error}): start it first, or pass its address.")
            if not said and time.monotonic() > began + 2:
                print(f"waiting for --dispatcher {address}, up to {patience} s: {error}", file=sys.stderr, flush=True)
                said = True
            time.sleep(0.1)


def worker(given: argparse.Namespace):
    """Runs the pipeline that the training wrote; starting again at the same address, goes on with its work."""
    own = given.host or "localhost"
    if not given.host and given.dispatcher.rpartition(":")[0] not in ("localhost", "127.0.0.1"):
        refuse("--host is missing: pass what the training, on its machine, calls this one.")
    port, held = hold(given.port)
    wait_for(given.dispatcher, given.patience)
    service = service_of_tensorflow()
    config = service.WorkerConfig(
        dispatcher_address=given.dispatcher,
        worker_address=f"{own}:{port}",
        port=port,
        heartbeat_interval_ms=1_000,
    )
    return service.WorkerServer(config), held, f"worker {own}:{port}"


def serve(make, given: argparse.Namespace) -> None:
    """In this process, until it is killed."""
    try:
        server, held, what = make(given)
    except Exception as error:  # noqa: BLE001 - whatever TensorFlow says, in one line
        journal = f" (--journal {given.journal})" if getattr(given, "journal", None) else ""
        refuse(f"the {given.role} cannot start{journal}: {first_line(error)}")
    held.close()
    say(f"{what} {os.getpid()}")
    server.join()


def local(given: argparse.Namespace) -> None:
    """A dispatcher and workers as processes of this machine; what ends is started again at its address, and said.

    TensorFlow is imported once and the process divided then, as long as it has one thread: seconds less for each.
    """
    alone = "start dispatcher and workers one by one"
    if not os.path.isdir("/proc/self/task"):
        refuse(f"local needs Linux, to see whether it can divide its process: {alone}.")
    hold(given.port)[1].close()  # or says what is wrong with it, before the work begins
    for number in ENDS:
        signal.signal(number, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory() as journal:
        service_of_tensorflow()
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            refuse(f"TensorFlow has begun {threads} threads, with which a process cannot be divided: {alone}.")
        ports = []
        for wanted in (given.port, *[0] * given.workers):
            port, held = hold(wanted)
            ports.append(port)
            held.close()  # its server takes it in a moment
        one = {"role": "dispatcher", "host": "localhost", "port": ports[0], "fixed_workers": None}
        each = {"dispatcher": argparse.Namespace(**one, journal=given.journal or journal)}
        for number, port in enumerate(ports[1:]):
            other = {"role": "worker", "host": "localhost", "port": port, "patience": 60}
            each[f"worker {number}"] = argparse.Namespace(**other, dispatcher=f"localhost:{ports[0]}")
        look_after(each, given.until_eof)


def look_after(each: dict[str, argparse.Namespace], until_eof: bool) -> None:
    """Begin all of them, and again whichever ends, until this process is asked to end, or its input does."""
    running, ends = {}, dict.fromkeys(each, 0)
    kernel = ctypes.CDLL(None)
    parent = os.getpid()

    def start(name: str) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # not between the fork and the line that minds it
        if child := os.fork():
            running[child] = name
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
            return
        kernel.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))  # ends with its parent, however that ends
        if os.getppid() != parent:
            os._exit(0)
        for number in ENDS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        try:
            serve(ROLES[each[name].role], each[name])
        except BaseException as error:  # noqa: BLE001 - what the parent has begun is not this one's to end
            with contextlib.suppress(OSError):
                print(error, file=sys.stderr, flush=True)
        os._exit(REFUSED)

    try:
        for name in each:
            start(name)
        while not (until_eof and select.select([0], [], [], 0.05)[0] and not os.read(0, 4096)):
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                time.sleep(0.05)
                continue
            name = running.pop(child)
            how, ends[name] = os.waitstatus_to_exitcode(status), ends[name] + 1
            if how == REFUSED:
                refuse(f"the {name} did not start, for the reason above.")
            if ends[name] == 100:
                refuse(f"the {name} has ended 100 times, last with status {how}: start it alone, to see why.")
            say(f"{name} ended with status {how}: started again")
            start(name)
    finally:
        for number in ENDS:
            signal.signal(number, signal.SIG_IGN)
        for child in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        for child in running:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def host(text: str) -> str:
    if not re.fullmatch(HOST, text):
        raise argparse.ArgumentTypeError(f"{text!r} is no host: {ANOTHER}, without a port")
    return text


def address(text: str) -> str:
    name, _, port = text.rpartition(":")
    if not re.fullmatch(HOST, name) or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no address: pass host:port, the host {ANOTHER[5:]}")
    return text


def folder(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("'': pass a folder or a bucket, or leave it out")
    return text


def whole(lowest: int, highest: int):
    def number(text: str) -> int:
        if not text.isdecimal() or not lowest <= int(text) <= highest:
            raise argparse.ArgumentTypeError(f"{text!r}: pass a whole number from {lowest} to {highest}")
        return int(text)

    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    roles = parser.add_subparsers(dest="role", required=True)
    each = {name: roles.add_parser(name, help=make.__doc__) for name, make in ROLES.items()}
    for role in each.values():
        role.add_argument("--port", type=whole(0, 65535), default=0, help="0 (default): any that is free")
        role.add_argument("--until-eof", action="store_true", help="end when standard input ends")
    each["dispatcher"].add_argument("--host", type=host, default="localhost", help="this machine, in the line it says")
    each["worker"].add_argument("--host", type=host, help="this machine, as the training calls it")
    kept = "a folder or bucket: with it and --port, one that ended can go on"
    each["dispatcher"].add_argument("--journal", type=folder, help=kept)
    each["local"].add_argument("--journal", type=folder, help="a folder or bucket (default: one for the time it runs)")
    each["dispatcher"].add_argument(
        "--fixed-workers", nargs="+", metavar="HOST:PORT", type=address, help="all there will be, for static sharding"
    )
    each["worker"].add_argument("--dispatcher", required=True, metavar="HOST:PORT", type=address)
    each["worker"].add_argument("--patience", type=whole(0, 86400), default=60, help="seconds to wait for it")
    each["local"].add_argument("--workers", type=whole(1, 64), default=2)
    given = parser.parse_args()
    if given.until_eof:
        try:
            os.fstat(0)
        except OSError:
            refuse("--until-eof needs a standard input, and it is closed: pass one, or leave --until-eof out.")
    if not importlib.util.find_spec("tensorflow"):
        refuse(f"TensorFlow is not here: {INSTALL}.")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own would wait for TensorFlow, which never returns
    if given.role == "local":
        return local(given)
    if given.until_eof:
        end_with(0)
    serve(ROLES[given.role], given)


ROLES = {"dispatcher": dispatcher, "worker": worker, "local": local}

if __name__ == "__main__":
    main()
