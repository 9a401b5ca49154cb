"""Processes that tests start: with the usual signals, waited for as long as they get on, and ended in every case."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
_MARK = "DRIFTPROOF_TEST_PROCESS"
"""Environment variable by which a process and all that it has started are found again."""
_HAS_PROC = Path("/proc/self/environ").exists()
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
# Tests that are killed themselves cannot end what they have started.
_SET_PARENT_DEATH_SIGNAL = 1
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_started: list[Started] = []


class Started(subprocess.Popen):
    """A process in a session of its own, whose output and errors go to files, which do not fill up as pipes do.

    Args:
        command: What to start.
        ignored: Signals that are ignored, as SIGHUP is under ``nohup``. All others have their usual effect, whatever
            this process ignores or blocks: a new process inherits that.
        preexec: Called in the new process.
        options: Of ``Popen``.
    """

    def __init__(self, command, ignored=(), preexec=None, **options):
        self._files = {name: tempfile.TemporaryFile() for name in ("stdout", "stderr")}  # noqa: SIM115
        self._mark = uuid.uuid4().hex
        self._used: dict[int, float] = {}
        self.outlives_tests = False
        """Whether its fixture ends it."""

        def prepare():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            if _PRCTL is not None:
                _PRCTL(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            if preexec is not None:
                preexec()

        options = {"cwd": ROOT, "stdin": subprocess.DEVNULL, **self._files, "start_new_session": True, **options}
        environment = {**options.pop("env", ENVIRONMENT), _MARK: self._mark}
        super().__init__([str(part) for part in command], env=environment, preexec_fn=prepare, **options)
        _started.append(self)

    @property
    def stdout_text(self):
        """What it has written so far."""
        return self._read("stdout")

    @property
    def stderr_text(self):
        """What it has written to standard error so far."""
        return self._read("stderr")

    def _read(self, name):
        file = self._files[name]
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()

    @property
    def story(self):
        """What it has written, for messages."""
        return f"\n{self.stdout_text}\n{self.stderr_text}"

    def send_to_all(self, number):
        """Send a signal to it and all that it has started, as a terminal does."""
        os.killpg(self.pid, number)

    def wait_for(self, condition, cpu_seconds=120, idle_seconds=120):
        """Until something is so, while the process goes on.

        How long that takes depends on what else the machine does, so what is limited is the time that the process, and
        those that it has started, have computed; and how long they do nothing at all.
        """
        watch = _Watch(self, cpu_seconds, idle_seconds)
        while not condition():
            assert self.poll() is None or condition(), f"ended with {self.returncode}{self.story}"
            watch.look()

    def end_of(self, cpu_seconds=120, idle_seconds=120):
        """Wait for its end: exit code, output and errors."""
        watch = _Watch(self, cpu_seconds, idle_seconds)
        while self.poll() is None:
            watch.look()
        return self.returncode, self.stdout_text, self.stderr_text

    def wait_until_alone(self):
        """Until nothing is left of it and of what it has started, after it has ended."""
        assert self.poll() is not None
        # Whatever is to end by itself has hardly anything to compute, and may be waiting for ever.
        end = time.monotonic() + 120
        while left := self.left():
            assert time.monotonic() < end, f"processes {left} are left{self.story}"
            time.sleep(0.02)

    def left(self):
        """Processes that it has started, of those that still run; also itself."""
        return [pid for pid in self._pids() if _state(pid) not in (None, "Z")]

    def end(self):
        """End it, and everything that it has started."""
        while True:
            for pid in self.left():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.wait()
            if not self.left():
                break
            time.sleep(0.01)
        for file in (self.stdin, self.stdout, self.stderr, *self._files.values()):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        if self in _started:
            _started.remove(self)

    def __exit__(self, *_):
        self.end()

    def cpu_seconds(self):
        """That all of its processes have used, also those that have ended since."""
        if not _HAS_PROC:
            return time.monotonic()
        for pid in self._pids():
            fields = _stat(pid)
            if fields is not None:
                self._used[pid] = sum(map(int, fields[11:13])) / _TICKS
        return sum(self._used.values())

    def _pids(self):
        if not _HAS_PROC:
            return [self.pid] if self.poll() is None else []
        mark, found = f"{_MARK}={self._mark}".encode(), []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in Path(entry.path, "environ").read_bytes():
                        found.append(int(entry.name))
        return found


class _Watch:
    """Waits while a process computes, but not for ever."""

    def __init__(self, process, cpu_seconds, idle_seconds):
        self._process, self._cpu_seconds, self._idle_seconds = process, cpu_seconds, idle_seconds
        self._began = self._used = process.cpu_seconds()
        self._looked = self._progressed = time.monotonic()

    def look(self):
        time.sleep(0.02)
        now = time.monotonic()
        if now - self._looked < 1:
            return
        self._looked, used = now, self._process.cpu_seconds()
        if used > self._used:
            self._used, self._progressed = used, now
        computed, idle = used - self._began, now - self._progressed
        assert computed < self._cpu_seconds, f"computed for {computed:.0f} s{self._process.story}"
        assert idle < self._idle_seconds, f"did nothing for {idle:.0f} s{self._process.story}"


def _stat(pid):
    """What the system says of a process, from its state on; ``None`` if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _state(pid):
    if not _HAS_PROC:
        return "R"
    fields = _stat(pid)
    return None if fields is None else fields[0]


def run(command, **options):
    """Exit code, output and errors of a process that is waited for."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Started(command, **pipes, **options) as process:
        watch = _Watch(process, cpu_seconds=240, idle_seconds=120)
        while True:
            try:
                output, errors = process.communicate(timeout=1)
            except subprocess.TimeoutExpired:
                watch.look()
            else:
                return process.returncode, output, errors


def end_all():
    """End whatever a test has left."""
    for process in [process for process in _started if not process.outlives_tests]:
        process.end()
