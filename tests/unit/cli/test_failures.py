import pytest
import typer

from specdec.cli.failures import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, UsageError, told_in_one_line
from specdec.cli.role_process import RoleFailedError
from specdec.errors import InvalidParameterError, PeerUnavailableError, RateLimitedError, UnknownModelError


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("no such rule"), EXIT_BAD_INPUT, "error: no such rule"),
        (InvalidParameterError("too hot"), EXIT_BAD_INPUT, "error: too hot (INVALID_PARAMETER)"),
        (UnknownModelError("not here"), EXIT_BAD_INPUT, "error: not here (UNKNOWN_MODEL)"),
        (PeerUnavailableError("nobody"), EXIT_FAILED, "error: nobody (PEER_UNAVAILABLE)"),
        (RateLimitedError("busy", retry_after_s=1.21), EXIT_FAILED, "error: busy (RATE_LIMITED, come again in 1.3 s)"),
        (FileNotFoundError(2, "No such file", "x.json"), EXIT_FAILED, "error: x.json: No such file"),
        (KeyboardInterrupt(), EXIT_INTERRUPTED, "error: interrupted"),
    ],
)
def test_a_foreseeable_fault_is_one_line_and_an_exit_code(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as left, told_in_one_line():
        raise error
    assert left.value.exit_code == code
    assert capsys.readouterr().err.strip() == line


def test_a_dead_role_is_told_with_its_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), told_in_one_line():
        raise RoleFailedError("verifier", "ended with exit code 1", ["error: no such model"])
    assert capsys.readouterr().err.splitlines() == [
        "  verifier | error: no such model",
        "error: verifier ended with exit code 1",
    ]


def test_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), told_in_one_line():
        raise ZeroDivisionError
