"""A training run: what is trained, on what data, from which model, and where its results go."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any, Literal

from etils import epath
from jax.sharding import Mesh

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.data.datasets import INFO_FILE
from animegamer_jax.storage.paths import absolute, user_errors
from animegamer_jax.storage.serialization import to_json
from animegamer_jax.train.stages.base import DataSource, Stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A stage of training with everything that it is given.

    Attributes:
        stage: The stage with its recipe.
        bundle: The model to start from; None starts from new networks.
        sources: The datasets.
        out: The output folder, absolute or in a bucket: checkpoints/, events/, metrics.jsonl,
            model/.
        mesh: The devices.
        threads: Number of data-loading threads.
        peak_tflops: Peak bfloat16 TFLOP/s of one chip; None takes it from the table of chips.
        export_checkpoint: Whose weights model/ gets: the last step's or the best checkpoint's.
    """

    stage: Stage[Any]
    bundle: Bundle | None
    sources: tuple[DataSource, ...]
    out: epath.Path
    mesh: Mesh
    threads: int = 2
    peak_tflops: float | None = None
    export_checkpoint: Literal["last", "best"] = "last"

    def run_config(self) -> dict[str, Any]:
        """Returns as JSON what must not change when a run starts again, but for the data's digests.

        Datasets are identified by their folders' names, since a dataset may be moved.
        """
        model = None
        if self.bundle is not None:
            digest = hashlib.sha256((self.bundle.path / "config.json").read_bytes()).hexdigest()
            model = f"{self.bundle.name} {digest[:12]}"
        return {
            "stage": self.stage.name,
            "recipe": to_json(self.stage.recipe),
            "networks": to_json(self.stage.config),
            "protocol": to_json(self.stage.protocol),
            "model": model,
            "data": {
                f"{i}": {"name": Path(source.path).name, "weight": source.weight}
                for i, source in enumerate(self.sources)
            },
        }

    def data_digests(self) -> dict[str, str]:
        """Digests of the datasets' descriptions by number; empty for one without a description.

        Raises:
            UserError: A description cannot be read.
        """
        found = {}
        for number, source in enumerate(self.sources):
            file = absolute(source.path) / INFO_FILE
            with user_errors(file, "cannot be read", hint="copy or make the dataset again"):
                content = file.read_bytes() if file.exists() else b""
            found[f"{number}"] = hashlib.sha256(content).hexdigest()[:12] if content else ""
        return found
