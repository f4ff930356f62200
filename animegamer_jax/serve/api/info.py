"""What a server plays: its words, its sizes and its prepared first shots."""

from pathlib import Path
from typing import Literal

from animegamer_jax.media.video import enlarged_size
from animegamer_jax.serve.api import models
from animegamer_jax.serve.api.actions import Actions
from animegamer_jax.serve.api.answers import PREFIX


class Info:
    """What is played on a server.

    Args:
        actions: The actions on its games.
        model: Name of the model.
        accounts: Whether players log in.
    """

    def __init__(self, actions: Actions, *, model: str, accounts: bool):
        self.actions, self.model, self.accounts = actions, model, accounts
        self._games = list(actions.openings.games.items())

    def server(self) -> models.ServerModel:
        """Returns the description of the server."""
        actions, words, openings = self.actions, self.actions.vocabulary, self.actions.openings
        player = actions.engine.player
        height, width = enlarged_size(player.height, player.width)
        address, places = f"{PREFIX}/openings", list(openings.places)
        portraits = None
        if openings.portraits is not None:
            names = list(openings.characters)
            portraits = models.SheetModel(address=f"{address}/portraits/0.webp", names=names)
        return models.ServerModel(
            model=self.model,
            protocol=actions.store.model.protocol,
            status=actions.engine.health,
            compiled=actions.engine.compiled,
            width=width,
            height=height,
            window=player.window,
            steps=actions.steps,
            max_steps=actions.engine.max_steps,
            motion_levels=list(player.protocol.motion_levels),
            pictures=actions.takes_pictures(),
            accounts=self.accounts,
            words=models.WordsModel(
                **{name: list(getattr(words, name)) for name in models.WordsModel.model_fields}
            ),
            openings=[
                models.OpeningModel(
                    character=character, place=place, clip=f"{address}/clips/{number}.mp4"
                )
                for number, ((character, place), _) in enumerate(self._games)
            ],
            portraits=portraits,
            places={
                name: models.SheetModel(address=f"{address}/places/{number}.webp", names=places)
                for number, name in enumerate(openings.sheets)
            },
        )

    def opening_clip(self, number: int) -> Path | None:
        """Returns the path of a prepared first shot."""
        if not 0 <= number < len(self._games):
            return None
        game = self._games[number][1]
        return game.folder / game.turns[0].clip

    def sheet(self, kind: Literal["portraits", "places"], number: int) -> Path | None:
        """Returns the path of the pictures of all characters, or of one in all places."""
        openings = self.actions.openings
        if kind == "portraits":
            return openings.portraits
        sheets = list(openings.sheets.values())
        return sheets[number] if 0 <= number < len(sheets) else None
