"""The parent's end of a worker: it may be slow, crash or be killed, and is always cleaned up."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from benchmarks import process
from benchmarks.compare.variants import Variant
from benchmarks.compare.worker import MARK


class Failed(Exception):
    """A variant did not do what it was told; the message says why."""


class Child:
    """A worker in a process group of its own.

    Args:
        model: name of the model.
        variant: what to put on it.
        device: "cpu" or "cuda".
        folder: where its files go.
        env: added to the environment.
        timeout: seconds for each action.
    """

    def __init__(
        self,
        model: str,
        variant: Variant,
        device: str,
        folder: str,
        env: Mapping[str, str],
        timeout: float,
    ) -> None:
        given = {"model": model, "variant": variant.to_dict(), "device": device, "folder": folder}
        self._timeout = timeout
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed in __exit__
        self._process = process.start(
            "benchmarks.compare.worker",
            [json.dumps(given)],
            stdin=subprocess.PIPE,
            stderr=self._stderr,
            env=env,
            preexec_fn=_first_to_be_killed,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def do(self, action: str) -> Any:
        """Has the worker do something and returns its result.

        Raises:
            Failed: it crashed, was killed, or took too long; it has then ended.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(action + "\n")
            self._process.stdin.flush()
        try:
            line = self._lines.get(timeout=self._timeout)
        except queue.Empty:
            self.end()
            raise Failed(f"{action}: no answer in {self._timeout:g} s") from None
        if line is None:
            raise Failed(f"{action}: {self._last_words()}")
        return json.loads(line)

    def end(self) -> None:
        """Kills the worker with everything that it started."""
        process.end(self._process)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        self._stderr.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._lines.put(line.removeprefix(MARK))
        self._lines.put(None)

    def _last_words(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return "killed by the system, which is what happens where memory runs out"
        self._stderr.seek(0)
        lines = [x.strip() for x in self._stderr.read().splitlines() if x.strip()]
        said = [x for x in lines if _names_an_error(x)] or lines or [f"exit status {code}"]
        return said[-1][:300]


def _names_an_error(line: str) -> bool:
    head, colon, _ = line.partition(":")
    return bool(colon) and head.replace(".", "").isidentifier() and not head.endswith("Warning")


def _first_to_be_killed() -> None:
    """Where memory runs out, the system shall end this process and not the parent."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
