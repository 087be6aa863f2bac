"""model: find (or make) the target and write what it is."""

from eaglet import files, target
from eaglet.params import Params
from eaglet.paths import METRICS, MODEL


def run(params: Params) -> None:
    """Write data/model.json and metrics/model.json."""
    found = target.fingerprint(target.resolve(params.target))
    target.write_fingerprint(found)
    numbers = {
        "hidden_size": found.hidden_size,
        "layers": found.num_layers,
        "vocabulary": found.vocab_size,
        "bytes": found.parameters_bytes,
    }
    files.write_json(METRICS / "model.json", numbers)
    print(
        f"model: {found.architecture} {found.name}, {found.num_layers} layers × {found.hidden_size}, "
        f"vocabulary {found.vocab_size:,}, {files.human_bytes(found.parameters_bytes)} → {MODEL}"
    )
