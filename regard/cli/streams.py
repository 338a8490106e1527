"""Streams of the command line: the work goes on after the reader of a pipe has left."""

from __future__ import annotations

import io
from typing import Any, TextIO


class Pipe(io.FileIO):
    """The descriptor of a stream, which discards what is written to it once nobody reads the pipe.

    stream: the stream whose descriptor it is, kept because it closes the descriptor when it is deleted.
    left: whether the reader has left.
    """

    left = False

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(stream.fileno(), "wb", closefd=False)
        self.stream = stream

    def write(self, data: Any) -> int:
        """Write as a file does, and report everything as written where the pipe is broken."""
        try:
            return super().write(data)
        except BrokenPipeError:
            self.left = True
            return memoryview(data).nbytes


def lasting(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return the same stream on a Pipe; streams without a descriptor of their own are returned as they are.

    `regard audit | head` then ends with the status of the audit, and leaves what it leaves without a pipe.
    """
    raw = getattr(stream.buffer, "raw", stream.buffer)
    if type(raw) is not io.FileIO:
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(Pipe(stream)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def abandoned(stream: TextIO) -> bool:
    """Whether the reader of a stream has left: what only prints can stop."""
    return getattr(getattr(getattr(stream, "buffer", None), "raw", None), "left", False)
