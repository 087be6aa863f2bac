"""The packaged target, converted once into the project's own store."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eaglet import target
from eaglet.params import TargetParams

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    with contextlib.chdir(ROOT):  # the store lies relative to the project's folder
        return target.resolve(TargetParams(model=target.PACKAGED, revision=None, dtype="float32")).absolute()


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Any:
    """SmolLM2's tokenizer with its chat template; copy it before changing it."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(smollm2, local_files_only=True)


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The Python that runs SGLang servers: `make sglang`'s, or EAGLET_SGLANG_PYTHON."""
    path = Path(os.environ.get("EAGLET_SGLANG_PYTHON", ROOT / ".venv-sglang/bin/python"))
    if not path.is_file():
        pytest.skip("no SGLang: run `make sglang`")
    return str(path)


@pytest.fixture(scope="session")
def smollm2_target(smollm2: Path) -> Callable[[str], target.Target]:
    """SmolLM2 as a target of a dtype."""
    with contextlib.chdir(ROOT):
        fingerprint = target.fingerprint(smollm2)
    return lambda dtype: target.Target(smollm2, fingerprint, dtype)
