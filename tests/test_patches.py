"""patches/apply.py on the real file of the installed SGLang."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

FILE = Path("sglang/srt/layers/rotary_embedding/base.py")


@pytest.fixture
def site(sglang_python: str, tmp_path: Path) -> Path:
    """A folder of packages that holds of SGLang its metadata and the file to be patched."""
    found = next(Path(sglang_python).parents[1].glob("lib/python3*/site-packages"), None)
    if found is None or not (found / FILE).is_file():
        pytest.skip("SGLang is not installed as `make sglang` does it")
    info = next(found.glob("sglang-*.dist-info"))
    (tmp_path / FILE).parent.mkdir(parents=True)
    shutil.copy(found / FILE, tmp_path / FILE)
    shutil.copytree(info, tmp_path / info.name)
    return tmp_path


def apply(site: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "patches/apply.py"), *options],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, (done.stdout + done.stderr).strip()


def digest(site: Path) -> str:
    return hashlib.sha256((site / FILE).read_bytes()).hexdigest()


def test_applied_twice_and_reverted_twice(site: Path) -> None:
    patched = digest(site)
    assert apply(site) == (0, "rotary_embedding: already applied")
    assert apply(site, "--revert") == (0, "rotary_embedding: reverted")
    text = (site / FILE).read_text()
    assert "from vllm._custom_ops import rotary_embedding" in text and digest(site) != patched
    assert apply(site, "--revert") == (0, "rotary_embedding: not applied")
    os.link(site / FILE, site / "shared.py")  # as a cache of packages may
    assert apply(site) == (0, "rotary_embedding: applied")
    assert digest(site) == patched
    assert (site / "shared.py").read_text() == text, "nobody else's copy is changed"


def test_a_changed_file_is_left_alone(site: Path) -> None:
    (site / FILE).write_text((site / FILE).read_text() + "# mine\n")
    before = digest(site)
    code, said = apply(site)
    assert code == 1 and "is not the file that rotary_embedding.patch is for" in said and "\n" not in said
    assert digest(site) == before


def test_an_unknown_release_is_named(site: Path) -> None:
    info = next(site.glob("sglang-*.dist-info"))
    text = (info / "METADATA").read_text()
    (info / "METADATA").write_text(text.replace(f"Version: {info.name[7:-10]}", "Version: 0.5.20", 1))
    info.rename(site / "sglang-0.5.20.dist-info")
    assert apply(site) == (1, "SGLang 0.5.20 has no source patches here; there are some for 0.5.17, 0.5.23")
