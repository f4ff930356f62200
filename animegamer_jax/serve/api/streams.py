"""Server-sent events: a turn until its end, and a game for as long as somebody follows it."""

from collections.abc import AsyncIterator, Callable, Iterator

from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from animegamer_jax.errors import UserError
from animegamer_jax.serve.api import answers, models
from animegamer_jax.serve.api.actions import Actions
from animegamer_jax.serve.engine.turn_request import TurnRequest

STREAM = "text/event-stream"
HEARTBEAT_SECONDS = 10.0


def stream(events: AsyncIterator[str]) -> StreamingResponse:
    """Returns the answer that sends events as they come."""
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(events, media_type=STREAM, headers=headers)


async def turn_events(
    actions: Actions,
    name: str,
    request: TurnRequest,
    *,
    finished: Callable[[], models.TurnModel],
) -> AsyncIterator[str]:
    """Yields the progress of a turn, its first picture, and the turn.

    Args:
        actions: What clients can do.
        name: The game.
        request: The turn that is played.
        finished: Returns the turn once it is played.
    """
    pictures = _Pictures()
    with actions.hub.follow(name) as follower:
        while True:
            ended = request.ended
            yield _event("progress", answers.progress(actions, request).model_dump_json())
            if ended:
                break
            for event in pictures.new(request):
                yield event
            if not await follower.wait(HEARTBEAT_SECONDS):
                yield ": wait\n\n"
    if request.turn is not None:
        turn = await run_in_threadpool(finished)
        yield _event("turn", turn.model_dump_json())


async def game_events(
    actions: Actions, name: str, *, state: Callable[[], models.GameModel]
) -> AsyncIterator[str]:
    """Yields the state of a game and the progress of its turn, whenever they change.

    Args:
        actions: What clients can do.
        name: The game.
        state: Returns the game as it is.
    """
    pictures, last_progress, version = _Pictures(), "", -1
    reported = actions.last_ended(name)
    with actions.hub.follow(name) as follower:
        while True:
            closed = actions.hub.closed  # what has changed before is sent once more
            now = actions.hub.version(name)
            if now != version:
                version = now
                try:
                    found = await run_in_threadpool(state)
                except UserError as error:
                    yield _event("error", actions.hide(error))
                    return
                yield _event("state", found.model_dump_json())
            if (ended := actions.last_ended(name)) is not reported:
                reported = ended
                yield _event("progress", answers.progress(actions, ended).model_dump_json())
            request = actions.engine.request_of(name)
            if (text := answers.progress(actions, request).model_dump_json()) != last_progress:
                last_progress = text
                yield _event("progress", text)
            for event in pictures.new(request):
                yield event
            if closed:
                break
            if not await follower.wait(HEARTBEAT_SECONDS):
                yield ": wait\n\n"
    yield _event("closing", "")


class _Pictures:
    """The events of first pictures, each once."""

    def __init__(self) -> None:
        self._sent = None

    def new(self, request: TurnRequest | None) -> Iterator[str]:
        """Yields the first picture of a turn if it has a new one."""
        if request is None or request.first_picture is self._sent:
            return
        self._sent = request.first_picture
        if picture := answers.first_picture(request):
            yield _event("picture", picture.model_dump_json())


def _event(kind: str, data: str) -> str:
    return f"event: {kind}\ndata: {data}\n\n"
