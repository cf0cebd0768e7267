"""What each tenant may ask of one orchestrator: requests and tokens per second, and streams at one time.

Pure: the time is passed in. Every replica counts for itself (docs/adr/0018). Tokens are known when they are delivered,
so they are charged then and may leave a debt, which keeps further requests out until it is paid off; what was admitted
runs to its end. Remembers a bounded number of tenants: one that owes nothing and runs nothing is forgotten, and where
nobody can be forgotten those who come new share one place.
"""

import dataclasses
import math
from collections.abc import Callable

from orchestrator.retry_after import bounded_retry_after_s
from specdec.errors import InvalidParameterError, RateLimitedError, TooManyStreamsError

MAX_TENANTS = 4096
_FIRST_GUESS_S = 1.0
"""How long a stream lasts, before one has ended."""
_LAST_STREAM_SHARE = 0.2
_SWEEP_INTERVAL_S = 1.0
_ROUNDING_S = 1e-6
"""Who comes when told is not sent away once more because sums of floats differ."""


@dataclasses.dataclass(frozen=True)
class TenantLimits:
    """None: no limit; of a burst: what comes in one second, one at least."""

    requests_per_s: float | None = None
    request_burst: int | None = None
    tokens_per_s: float | None = None
    """Of prompts and outputs together."""
    token_burst: int | None = None
    max_streams: int | None = None
    """Sessions at one time; each sample of a request is one."""


class _Bucket:
    """How far a bucket of tokens is from being full; what it holds and how fast it fills is told at each call."""

    def __init__(self) -> None:
        self._spent = 0.0
        self._at_s = 0.0

    def spent(self, rate_per_s: float, now_s: float) -> float:
        return max(0.0, self._spent - rate_per_s * max(0.0, now_s - self._at_s))

    def wait_s(self, amount: float, rate_per_s: float, burst: float, now_s: float) -> float:
        """Until the bucket holds that much, or all that it can hold; 0 where it does."""
        wait_s = (self.spent(rate_per_s, now_s) + min(amount, burst) - burst) / rate_per_s
        return wait_s if wait_s > _ROUNDING_S else 0.0

    def take(self, amount: float, rate_per_s: float, now_s: float) -> None:
        self._spent = self.spent(rate_per_s, now_s) + amount
        self._at_s = now_s


class StreamPace:
    """How long streams last, to tell when one of those that run will end. A guess, and never far from the last ones."""

    def __init__(self) -> None:
        self._mean_stream_s = _FIRST_GUESS_S

    def note(self, lasted_s: float) -> None:
        self._mean_stream_s += _LAST_STREAM_SHARE * (lasted_s - self._mean_stream_s)

    def until_ended(self, num_streams: int, num_running: int) -> float:
        """Seconds, a guess, until so many of those that run have ended."""
        return bounded_retry_after_s(self._mean_stream_s * num_streams / max(1, num_running))


class TenantUse:
    """What one tenant has used and is using."""

    def __init__(self, limits: Callable[[], TenantLimits]) -> None:
        self._limits = limits
        self._requests = _Bucket()
        self._resumes = _Bucket()
        self._tokens = _Bucket()
        self._pace = StreamPace()
        self.num_streams = 0

    def begin(self, num_streams: int, now_s: float, *, resumes: bool = False, num_ending: int = 0) -> None:
        """Takes one request and its streams, or nothing where it raises.

        Args:
            num_streams: sessions that the request opens.
            now_s: of a clock that never goes back.
            resumes: it continues a session. Such requests have a bucket of their own and twice the streams, so that
                those of a lost replica find room here and new requests never stand in their way.
            num_ending: streams that end because of this one.

        Raises:
            InvalidParameterError: more streams at once than the tenant ever has; waiting would not help.
            RateLimitedError, TooManyStreamsError: `retry_after_s` is when the same request is let in if nothing else of
                this tenant comes before; for streams, a guess from how long the last ones took.
        """
        limits = self._limits()
        if limits.max_streams is not None:
            if num_streams > limits.max_streams:
                told = f"num_samples: this tenant has at most {limits.max_streams} streams at one time"
                raise InvalidParameterError(told, field="num_samples")
            num_running = self.num_streams - num_ending
            num_too_many = num_running + num_streams - limits.max_streams * (2 if resumes else 1)
            if num_too_many > 0:
                raise TooManyStreamsError(
                    f"the tenant has {num_running} streams open, of {limits.max_streams}",
                    retry_after_s=self._pace.until_ended(num_too_many, num_running),
                    limit="streams",
                )
        if limits.tokens_per_s is not None:
            burst = _burst(limits.token_burst, limits.tokens_per_s)
            if (wait_s := self._tokens.wait_s(1, limits.tokens_per_s, burst, now_s)) > 0:
                raise RateLimitedError("the tenant is over its tokens per second", retry_after_s=wait_s, limit="tokens")
        if limits.requests_per_s is not None:
            burst, bucket = _burst(limits.request_burst, limits.requests_per_s), self._requests
            if resumes:
                burst, bucket = max(burst, limits.max_streams or 0), self._resumes
            if (wait_s := bucket.wait_s(1, limits.requests_per_s, burst, now_s)) > 0:
                told = "the tenant is over its requests per second"
                raise RateLimitedError(told, retry_after_s=wait_s, limit="requests")
            bucket.take(1, limits.requests_per_s, now_s)
        self.num_streams += num_streams

    def charge(self, num_tokens: int, now_s: float) -> None:
        """Tokens that were delivered."""
        rate_per_s = self._limits().tokens_per_s
        if rate_per_s is not None:
            self._tokens.take(num_tokens, rate_per_s, now_s)

    def end(self, num_streams: int, lasted_s: float) -> None:
        """Streams of one request are over."""
        self.num_streams -= num_streams
        self._pace.note(lasted_s)

    def is_at_rest(self, now_s: float) -> bool:
        """Whether a tenant that was never seen would be treated the same."""
        limits = self._limits()
        requests_per_s, tokens_per_s = limits.requests_per_s, limits.tokens_per_s
        return (
            self.num_streams == 0
            and (tokens_per_s is None or self._tokens.spent(tokens_per_s, now_s) == 0)
            and (requests_per_s is None or self._requests.spent(requests_per_s, now_s) == 0)
            and (requests_per_s is None or self._resumes.spent(requests_per_s, now_s) == 0)
        )


class TenantTable:
    """All tenants of one orchestrator. `limits_of` tells what a tenant may now; "" is whoever names no tenant."""

    def __init__(self, limits_of: Callable[[str], TenantLimits], max_tenants: int = MAX_TENANTS) -> None:
        self._limits_of = limits_of
        self._max_tenants = max_tenants
        self._uses: dict[str, TenantUse] = {}
        self._newcomers = TenantUse(lambda: limits_of(""))
        self._swept_at_s = -math.inf

    def __len__(self) -> int:
        return len(self._uses)

    def use_of(self, tenant: str, now_s: float) -> TenantUse:
        """Where this tenant's requests are counted."""
        use = self._uses.get(tenant)
        if use is None:
            if len(self._uses) >= self._max_tenants:
                self._forget_who_rests(now_s)
            if len(self._uses) >= self._max_tenants:
                return self._newcomers
            use = self._uses[tenant] = TenantUse(lambda: self._limits_of(tenant))
        return use

    def _forget_who_rests(self, now_s: float) -> None:
        """A flood of names is not to cost a look at all tenants for each."""
        if now_s - self._swept_at_s < _SWEEP_INTERVAL_S:
            return
        self._swept_at_s = now_s
        for tenant in [name for name, use in self._uses.items() if use.is_at_rest(now_s)]:
            del self._uses[tenant]


def _burst(burst: int | None, rate_per_s: float) -> float:
    return burst if burst is not None else max(1.0, rate_per_s)
