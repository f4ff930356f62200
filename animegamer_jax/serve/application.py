"""The application: page, API and Gradio's end points on one port."""

from collections.abc import Sequence

import gradio as gr
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from gradio.route_utils import FnIndexInferError
from gradio.routes import App
from starlette.middleware import Middleware
from starlette.routing import Mount, Route

from animegamer_jax import __version__
from animegamer_jax.serve.api.actions import Actions
from animegamer_jax.serve.api.answers import PREFIX
from animegamer_jax.serve.api.gradio_api import GradioApi
from animegamer_jax.serve.api.info import Info
from animegamer_jax.serve.api.routes import LoginError, add_api
from animegamer_jax.serve.guard.limits import MAX_UPLOAD_MB, name_client
from animegamer_jax.serve.page.page import add_page

_SESSIONS = 256
_DESCRIPTION = (
    "Games of anime life: each turn an instruction is answered by a clip and by changes of the "
    "character's meters. Errors are one line, in `error`."
)


def make_application(
    actions: Actions,
    *,
    model: str,
    auth: tuple[tuple[str, str], ...] = (),
    guard: Middleware | None = None,
    routes: Sequence[Route] = (),
) -> FastAPI:
    """Makes the application.

    Args:
        actions: What clients can do.
        model: Name of the model.
        auth: Names and passwords; empty if everyone may play.
        guard: What stands before it.
        routes: Further routes.
    """
    app = FastAPI(
        title=f"AnimeGamer: {model}",
        version=__version__,
        description=_DESCRIPTION,
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,
        redoc_url=None,
        middleware=[guard] if guard else [],
        routes=[*routes],
    )
    mounted: list[App] = []

    def client_of(request: Request) -> str:
        """Returns the client of a request by its cookie, or its address.

        Raises:
            LoginError: Players log in here, and it has not.
        """
        account = _account_of(request, mounted[0]) if auth else None
        if auth and account is None:
            raise LoginError
        return name_client(account, request.client.host if request.client else None)

    app.state.client_of = client_of
    add_page(app)
    add_api(app, actions, Info(actions, model=model, accounts=bool(auth)))
    blocks = GradioApi(actions).build()
    blocks.queue(default_concurrency_limit=None, max_size=4 * actions.store.max_games)
    # Each call of its client is a session of its own, of a quarter MB, and Gradio keeps 10,000.
    blocks.state_session_capacity = max(_SESSIONS, 4 * actions.store.max_games)
    gr.mount_gradio_app(
        app,
        blocks,
        path="/",
        auth=list(auth) or None,
        footer_links=[],
        max_file_size=f"{MAX_UPLOAD_MB}mb",
        ssr_mode=False,
        run_history=False,
    )
    mounted += [
        route.app for route in app.routes if isinstance(route, Mount) and isinstance(route.app, App)
    ]
    for gradio_app in mounted:
        _answer_errors(gradio_app)
    return app


def _answer_errors(gradio_app: App) -> None:
    """Answers with one line where Gradio would end with a traceback in the log."""

    @gradio_app.exception_handler(FnIndexInferError)
    def unknown(request: Request, error: FnIndexInferError) -> JSONResponse:
        return JSONResponse({"error": "no such end point: see /gradio_api/info"}, 404)

    @gradio_app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        return JSONResponse({"error": f"{field}: {first['msg']}"[:300]}, 422)


def _account_of(request: Request, gradio_app: App) -> str | None:
    """Returns the account that a request proves by the cookie of /login."""
    for name in ("access-token", "access-token-unsecure"):
        token = request.cookies.get(f"{name}-{gradio_app.cookie_id}")
        if token and (account := gradio_app.tokens.get(token)):
            return account
    return None
