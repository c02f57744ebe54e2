"""Processes that begin where another one has already imported everything.

Most of the time of a short training is imports. So a harness (`on_cpu.py`, `bridge_on_cpu.py`) is
started once with `SERVE`, prepares what it prepares for any script, and forks a process for each
rank that is asked for. A rank is a process of its own from then on: environment, folder, output,
exit status, and an end of the interpreter like any other's.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
SERVE = "--serve"
ANSWERS = "WARM_START_ANSWERS"
"""Names the pipe for answers: what is imported may print."""


class Server:
    """A harness that forks. command: starts it; environment: of the server itself."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        answers, to_answer = os.pipe()
        self._answers = os.fdopen(answers)
        self._process = subprocess.Popen(
            command,
            env={**environment, ANSWERS: str(to_answer)},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(to_answer,),
        )
        os.close(to_answer)

    def ask(self, **request: Any) -> int | None:
        """One request, one answer. RuntimeError if the harness has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answers.readline()
        if not answer:
            raise RuntimeError(f"{self._process.args} ended: {self._process.wait()}")
        return json.loads(answer)

    def end(self) -> None:
        """Ends the harness, as nothing can ask it any more."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Rank:
    """A forked process, as `subprocess.Popen` has it. meeting: what has to live as long as it."""

    def __init__(
        self,
        server: Server,
        argv: list[str],
        environment: dict[str, str],
        log: Path,
        meeting: object,
    ) -> None:
        self._server = server
        self._status = None
        self._meeting = meeting
        self.pid = server.ask(start=argv, environment=environment, log=str(log))

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self._status is None:
            self._status = self._server.ask(poll=self.pid)
        return self._status

    def kill(self) -> None:
        """Ends it, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Waits for its end."""
        while (status := self.poll()) is None:
            time.sleep(0.02)
        return status


def serve(run: Callable[[list[str]], Any]) -> Any:
    """Answers `Server` until it is closed; in a forked rank, what `run` returns."""
    answers = os.fdopen(int(os.environ[ANSWERS]), "w")
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = None if pid == 0 else os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                answers.close()
                return run(_become(request))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


def _become(request: dict[str, Any]) -> list[str]:
    """The command line of this process, which the request is about from now on. It ends with the
    one that forked it, which ends with the run of tests."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = Path(request["log"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(log.parent)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    return request["start"]
