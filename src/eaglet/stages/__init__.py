"""The stages of dvc.yaml, one short file each."""
