"""When who was refused may come again, within bounds: a guess is never so short that all come back at once, nor so long
that a client takes it for never."""

_MIN_S, _MAX_S = 0.1, 60.0


def bounded_retry_after_s(wait_s: float) -> float:
    return min(_MAX_S, max(_MIN_S, wait_s))
