"""Where things lie, relative to the project's folder. dvc.yaml names the same files."""

from pathlib import Path

STORE = Path(".store")  # local, key-addressed, never in Git; its shards are hard links into data/ and the DVC cache
DVC_LOCK = Path("dvc.lock")

MODEL = Path("data/model.json")
RESPONSES = Path("data/responses.jsonl")
ROWS = Path("data/rows.parquet")
STATES = Path("data/states")
CHOICES = Path("data/choices.safetensors")
VOCAB = Path("data/vocab.safetensors")
DRAFTER = Path("data/drafter")

METRICS = Path("metrics")
PLOTS = Path("plots")
LIVE = Path("plots/train")
