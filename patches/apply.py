"""Applies the source patches of the installed SGLang's release, or reverts them (--revert).

Run it with the Python of the environment that SGLang is in. A patch is applied only to the very file it was made
for, by hash; a second run changes nothing.
"""

import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "source"


def main(revert: bool) -> None:
    """Bring every patched file to its state after (or before) its patch.

    Raises:
        SystemExit: no patches for this release, or a file that is neither.
    """
    try:
        found = importlib.metadata.distribution("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"{sys.executable} has no SGLang: run this with the Python that has it") from None
    folder = SOURCE / found.version
    if not folder.is_dir():
        known = ", ".join(sorted(path.name for path in SOURCE.iterdir()))
        raise SystemExit(f"SGLang {found.version} has no source patches here; there are some for {known}")
    site = Path(str(found.locate_file("")))
    wanted = [(patch, *plan(patch, site, revert)) for patch in sorted(folder.glob("*.patch"))]
    for patch, path, after in wanted:  # only once all are known to fit
        if after is None:
            print(f"{patch.stem}: {'not applied' if revert else 'already applied'}")
        else:
            change(patch, path, after, revert)
            print(f"{patch.stem}: {'reverted' if revert else 'applied'}")


def plan(patch: Path, site: Path, revert: bool) -> tuple[Path, str | None]:
    """The file of a patch, and the hash it will have; None where it has it already."""
    fields = dict(re.findall(r"^(File|Before|After): (\S+)$", patch.read_text(), re.MULTILINE))
    path = site / fields["File"]
    before, after = (fields["After"], fields["Before"]) if revert else (fields["Before"], fields["After"])
    seen = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
    if seen not in (before, after):
        raise SystemExit(f"{path} is not the file that {patch.name} is for (sha256 {seen[:12]}): install SGLang anew")
    return path, None if seen == after else after


def change(patch: Path, path: Path, after: str, revert: bool) -> None:
    """Patch a copy, check it, and put it in the file's place: never through an inode that others may share."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    scratch = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(path.read_bytes())
        command = ["patch", "--quiet", "--no-backup-if-mismatch", *(["--reverse"] if revert else [])]
        try:
            subprocess.run([*command, str(scratch), str(patch)], check=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            raise SystemExit(f"the program `patch` cannot apply {patch.name}: {error}") from None
        if hashlib.sha256(scratch.read_bytes()).hexdigest() != after:
            raise SystemExit(f"{patch.name} did not give the file that it names; {path} is as it was")
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        scratch.chmod(path.stat().st_mode)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


if __name__ == "__main__":
    main(revert="--revert" in sys.argv[1:])
