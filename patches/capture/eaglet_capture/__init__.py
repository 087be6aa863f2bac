"""An SGLang plugin that writes the hidden states of each prefilled request to a folder, the spool.

Inert unless EAGLET_CAPTURE_SPOOL is set in the server's environment. See patches/README.md.
"""

import importlib.metadata
import os

SUPPORTED = ("0.5.17", "0.5.23")  # each release moves what hooks.py holds on to


def register() -> None:
    """What SGLang calls in each of its processes, before the server starts.

    Raises:
        SystemExit: this release of SGLang is not supported, or a variable is wrong. SGLang only logs a plugin's
            exceptions; a server that was asked to capture and does not must not start.
    """
    if not os.environ.get("EAGLET_CAPTURE_SPOOL"):
        return
    release = importlib.metadata.version("sglang").split("+")[0]
    if release not in SUPPORTED:
        raise SystemExit(
            f"eaglet-capture supports SGLang {' and '.join(SUPPORTED)}; this is {release}: install one of those, or "
            "unset EAGLET_CAPTURE_SPOOL"
        )
    from eaglet_capture import hooks

    try:
        settings = hooks.Settings.from_environment(os.environ)
    except ValueError as error:
        raise SystemExit(f"eaglet-capture: {error}") from None
    hooks.Capture(settings).install()
