"""Execs on the wire: their submission, state and end. Their output is `nemo_gym.sandbox.wire.frames`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from nemo_gym.sandbox.base import DEFAULT_MAX_OUTPUT_BYTES, ExecEnd, ExecOutcome, ExecRequest
from nemo_gym.sandbox.wire.fields import MAX_OUTPUT_BYTES, Identifier, Seconds, Text, WireModel, fields_of


class ExecSubmission(WireModel):
    """``PUT …/execs/{exec_id}``: exactly one of ``command`` (a shell's) and ``argv``."""

    command: str | None = None
    argv: tuple[str, ...] | None = Field(None, min_length=1)
    cwd: Text | None = None
    env: dict[str, str] = Field(default_factory=dict)
    timeout_s: Seconds | None = None
    user: Text | None = None
    merge_stderr: bool = False
    max_output_bytes: int = Field(DEFAULT_MAX_OUTPUT_BYTES, ge=0, le=MAX_OUTPUT_BYTES)
    """Kept per stream; the broker's own limit may be lower, and what is cut is told by the end."""
    stdin: Literal["none", "attached"] = "none"
    """``attached``: the command waits for ``PUT …/stdin`` before it starts."""

    @model_validator(mode="after")
    def _one_command(self) -> Self:
        if (self.command is None) == (self.argv is None):
            raise ValueError("an exec needs exactly one of 'command' (run by a shell) and 'argv' (run as it is)")
        return self

    @classmethod
    def of(cls, request: ExecRequest) -> Self:
        """The submission of ``request``, without the bytes of its standard input."""
        is_shell = isinstance(request.command, str)
        return cls(
            command=str(request.command) if is_shell else None,
            argv=None if is_shell else tuple(request.command),
            cwd=request.cwd,
            env=dict(request.env),
            timeout_s=request.timeout_s,
            user=request.user,
            merge_stderr=request.merge_stderr,
            max_output_bytes=request.max_output_bytes,
            stdin="none" if request.stdin is None else "attached",
        )

    def to_request(self, stdin: bytes | None = None) -> ExecRequest:
        return ExecRequest(
            command=self.command if self.command is not None else self.argv or (),
            cwd=self.cwd,
            env=dict(self.env),
            timeout_s=self.timeout_s,
            user=self.user,
            stdin=stdin,
            merge_stderr=self.merge_stderr,
            max_output_bytes=self.max_output_bytes,
        )


class ExecEndModel(WireModel):
    """The one end of an exec: payload of the exit frame, and part of the exec's view."""

    outcome: ExecOutcome
    return_code: int | None = None
    signal: int | None = None
    duration_s: float = 0.0
    output_bytes: int = Field(ge=0)
    """All that the stream held, of both outputs: whoever got fewer bytes has not got all."""
    truncated: tuple[Literal["stdout", "stderr"], ...] = ()

    @model_validator(mode="after")
    def _says_what_it_knows(self) -> Self:
        if (self.return_code is not None) != (self.outcome is ExecOutcome.EXITED):
            raise ValueError(f"'{self.outcome}' and return_code={self.return_code} contradict each other")
        return self

    @classmethod
    def of(cls, end: ExecEnd, *, output_bytes: int, truncated: tuple[Literal["stdout", "stderr"], ...] = ()) -> Self:
        return cls(**fields_of(end), output_bytes=output_bytes, truncated=truncated)

    def to_end(self) -> ExecEnd:
        return ExecEnd(self.outcome, self.return_code, self.signal, self.duration_s)


class ExecView(WireModel):
    """An exec's state. ``end`` is there exactly when it is over."""

    exec_id: Identifier
    state: Literal["awaiting_stdin", "running", "ended"]
    output_bytes: int = Field(0, ge=0)
    """In the spool so far."""
    submitted_at: float
    end: ExecEndModel | None = None

    @model_validator(mode="after")
    def _ended_has_an_end(self) -> Self:
        if (self.end is not None) != (self.state == "ended"):
            raise ValueError(f"an exec that is '{self.state}' has {'an' if self.end else 'no'} end")
        return self


class SignalExec(WireModel):
    """``POST …/signal``: to the command's whole process tree; 204, also when it has ended."""

    signal: int = Field(ge=1, le=64)
