"""What must hold at every step: one result for each round, one answer for each draft, no word of a fenced owner in the
record. Reads what goes by; changes nothing.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.record import decode_tokens
from specdec.messages import Addressed, Commit, Draft, Dropped, OpenSession, Refused, Verdict
from specdec.params import AcceptanceRule
from tests.simulation.faults import Request
from tests.simulation.store import ScriptRun
from tests.simulation.target import undisturbed
from tests.simulation.virtual_time import Process

OWNERS_SCRIPTS = frozenset({"renew", "release", "commit", "restore", "bump"})
CALLS_IN_FLIGHT_S = 5.0
"""What an owner sent before it heard that it is fenced, or what the network held up, may still come for so long."""

RoundKey = tuple[str, int, bytes, int]


class Monitors:
    """One object for each world."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._requests: dict[str, Request] = {}
        self._rounds: dict[RoundKey, tuple[str, Commit]] = {}
        self._fenced_at: dict[tuple[str, bytes], float] = {}
        self._engines: list[tuple[Process, Any, Counter[Any], Counter[Any]]] = []
        self._record: dict[str, tuple[int, ...]] = {}
        self.was_opened: set[str] = set()
        """Sessions whose record was written whole at least once."""

    def expect(self, session_id: str, request: Request) -> None:
        self._requests[session_id] = request

    # --- Verifiers ---------------------------------------------------------------------------------------------------

    def watch_engine(self, process: Process, engine: Any, device: Any) -> None:
        commands: dict[Any, OpenSession] = {}
        open_session: Callable[..., None] = engine.open_session

        def opening(command: OpenSession, prompt_token_ids: Sequence[int], sink: Any) -> None:
            commands[sink] = command
            self._world.note(f"{process.name} is asked to open {command.session_id} at epoch {command.epoch}")
            open_session(command, prompt_token_ids, sink)

        def on_event(sink: Any, event: Any) -> None:
            if isinstance(event, Commit):
                self._committed(process, commands[sink], event)

        engine.open_session = opening
        device.on_event = on_event
        drafts: Counter[Any] = Counter()
        answers: Counter[Any] = Counter()
        streams: set[Any] = set()
        receive = engine.drafters.receive

        def receiving(stream: Any, addressed: Addressed, arrived_at: float | None = None) -> None:
            if stream not in streams:
                streams.add(stream)
                send = stream.send

                def sending(answer: Addressed) -> None:
                    if isinstance(answer.message, Verdict | Dropped | Refused):
                        key = (id(stream), answer.session_id, answer.attachment_id, answer.message.draft_sequence)
                        answers[key] += 1
                        if answers[key] > drafts[key]:
                            self._world.fail(f"{process.name} answers {key[1:]} once too often: {answer.message}")
                    send(answer)

                stream.send = sending
            if isinstance(addressed.message, Draft):
                sequence = addressed.message.draft_sequence
                drafts[id(stream), addressed.session_id, addressed.attachment_id, sequence] += 1
            receive(stream, addressed, arrived_at)

        engine.drafters.receive = receiving
        self._engines.append((process, engine, drafts, answers))

    def _committed(self, process: Process, command: OpenSession, commit: Commit) -> None:
        key = (str(command.session_id), int(command.epoch), command.owner_nonce, int(commit.round))
        if key in self._rounds:
            where, before = self._rounds[key]
            told = f"{list(before.token_ids)} at {where}, {list(commit.token_ids)} at {process.name}"
            self._world.fail(f"two results of {key[0]}, epoch {key[1]}, round {key[3]}: {told}")
        self._rounds[key] = (process.name, commit)

    # --- The store ---------------------------------------------------------------------------------------------------

    def on_script(self, run: ScriptRun) -> None:
        epoch_before, epoch_after = int(run.before.get(b"epoch", 0)), int(run.after.get(b"epoch", 0))
        is_changed = run.before != run.after or run.tokens_before != run.tokens_after
        if run.before and run.after and epoch_after < epoch_before:
            self._world.fail(f"{run.name} turned back the epoch of {run.session_id}: {epoch_before} to {epoch_after}")
        if run.name in OWNERS_SCRIPTS:
            self._check_owner(run, epoch_before, is_changed)
        if run.after.get(b"state") == b"OPEN":
            self.was_opened.add(run.session_id)
        if is_changed and run.after:
            self._check_tokens(run)

    def _check_owner(self, run: ScriptRun, epoch_before: int, is_changed: bool) -> None:
        epoch, nonce = int(run.arguments[1]), run.arguments[2]
        is_stale = epoch_before > epoch or (epoch_before == epoch and run.before.get(b"nonce") != nonce)
        if is_stale and run.before and is_changed:
            self._world.fail(f"{run.name} of a stale owner changed {run.session_id}: epoch {epoch} in {epoch_before}")
        key, now = (run.session_id, nonce), self._world.loop.now
        if run.name in ("commit", "restore", "bump") and now - self._fenced_at.get(key, now) > CALLS_IN_FLIGHT_S:
            self._world.fail(f"an owner of {run.session_id} that was fenced calls {run.name}")
        if isinstance(run.reply, list) and run.reply[0] == b"FENCED":
            self._fenced_at.setdefault(key, now)

    def _check_tokens(self, run: ScriptRun) -> None:
        token_ids = decode_tokens(run.tokens_after)
        self._record[run.session_id] = token_ids
        request = self._requests.get(run.session_id)
        if request is None or not token_ids:
            return
        if request.rule is not AcceptanceRule.ONE_HOT:
            expected = request.prompt + undisturbed(request)[0]
            if token_ids != expected[: len(token_ids)]:
                self._world.fail(f"{run.name} leaves {list(token_ids)} in the record of {run.session_id}")
        key = (
            run.session_id,
            int(run.after[b"epoch"]),
            bytes.fromhex(run.after[b"nonce"].decode()),
            int(run.after[b"round"]),
        )
        if key in self._rounds:
            _, commit = self._rounds[key]
            end_position = commit.base_position + len(commit.token_ids)
            if token_ids[commit.base_position : end_position] != tuple(commit.token_ids):
                self._world.fail(f"the record of {run.session_id} has another round {key[3]} of epoch {key[1]}")

    # --- Clients -----------------------------------------------------------------------------------------------------

    def delivered(self, session_id: str, token_ids: tuple[int, ...]) -> None:
        """Under `strict` the record has what a client is told, as long as it forgets nothing."""
        is_sure = self._world.schedule.strict and not self._world.schedule.disturbs_store
        if is_sure and not self._world.is_cancelling(session_id):
            recorded = self._record.get(session_id, ())
            if recorded[: len(token_ids)] != token_ids:
                self._world.fail(f"{session_id} was told more than its record has: {len(token_ids)}, {len(recorded)}")

    # --- At the end --------------------------------------------------------------------------------------------------

    def left(self) -> list[str]:
        """What is still open or owed; nothing in the end."""
        left = []
        for process, engine, drafts, answers in self._engines:
            if process.is_dead:
                continue
            load = engine.load()
            if load.num_active_sessions or load.num_waiting_sessions:
                left.append(f"{process.name} still has sessions: {load}")
            else:
                engine.check_cache()
            if owed := drafts - answers:
                left.append(f"{process.name} owes answers to drafts: {list(owed)}")
        return left
