"""The command line: one command per stage, and those that look without computing."""

from pathlib import Path
from typing import Literal

import click

from eaglet import params
from eaglet.errors import EagletError


class _Group(click.Group):
    """Prints an EagletError as one line and exits with 1; anything else is a bug and shows its traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except EagletError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group)
@click.version_option(package_name="eaglet")
def main() -> None:
    """Raise an EAGLE-3 drafter from prompts. `dvc repro` runs the stages in order; each is a command here."""


@main.command()
def model() -> None:
    """Find (or convert once) the target and write its fingerprint."""
    from eaglet.stages.model import run

    run(params.load())


@main.command()
def generate() -> None:
    """Have the target answer new or changed prompts."""
    from eaglet.stages.generate import run

    run(params.load())


@main.command()
def tokenize() -> None:
    """Turn answers into rows of token ids and loss mask."""
    from eaglet.stages.tokenize import run

    run(params.load())


@main.command()
def extract() -> None:
    """Compute the hidden states that rows and layers lack, into shards."""
    from eaglet.stages.extract import run

    run(params.load())


@main.command()
def audit() -> None:
    """Check every stored row; compare a sample with plain Transformers."""
    from eaglet.stages.audit import run

    run(params.load())


@main.command()
def vocab() -> None:
    """Choose the draft vocabulary from the answers' tokens."""
    from eaglet.stages.vocab import run

    run(params.load())


@main.command()
def train() -> None:
    """Train the drafter on the stored hidden states."""
    from eaglet.stages.train import run

    run(params.load())


@main.command()
@click.option(
    "--server",
    "url",
    metavar="[URL]",
    is_flag=False,
    flag_value="",
    help="In SGLang instead, with the drafter and without: at URL, or in servers that are started.",
)
@click.option("--controls", is_flag=True, help="On states that are wrong on purpose instead, beside the right ones.")
def evaluate(url: str | None, controls: bool) -> None:
    """Decode held-out prompts with drafter and target together."""
    loaded = params.load()
    if controls:
        from eaglet.commands.controls import run as run_controls

        run_controls(loaded)
    if url is not None:
        from eaglet.commands.served import run as run_served

        run_served(loaded, url or None)
    if url is None and not controls:
        from eaglet.stages.evaluate import run

        run(loaded)


@main.group()
def export() -> None:
    """What was made, in the form of other programs."""


@export.command("drafter")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--to", "engine", type=click.Choice(["sglang", "vllm"]), required=True, help="The engine that loads it.")
@click.option("--push-to-hub", "repo", metavar="REPO", help="Upload it to this Hugging Face repository as well.")
def export_drafter(folder: Path, engine: Literal["sglang", "vllm"], repo: str | None) -> None:
    """The trained drafter into FOLDER, with a model card."""
    from eaglet.commands.export import run

    run(params.load(), engine, folder, repo)


@main.command()
def plan() -> None:
    """What `dvc repro` would compute and reuse, and the bytes it needs, before anything runs."""
    from eaglet.commands.plan import run

    run(params.load())


@main.command()
@click.argument("sample", required=False)
def show(sample: str | None) -> None:
    """The anatomy of a stored SAMPLE: a row's id or the start of its sample hash; the first row by default."""
    from eaglet.commands.show import run

    run(sample)


@main.command()
def verify() -> None:
    """Read every stored byte and compare its checksum; exit 1 and name what is bad."""
    from eaglet.commands.verify import run

    run()


@main.command()
def results() -> None:
    """The table of the last run."""
    from eaglet.commands.results import run

    run()


if __name__ == "__main__":
    main()
