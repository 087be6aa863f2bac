"""The command line: one command per stage, and those that look without computing."""

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
    from eaglet.stages import model as stage

    stage.run(params.load())


@main.command()
def generate() -> None:
    """Have the target answer new or changed prompts."""
    from eaglet.stages import generate as stage

    stage.run(params.load())


@main.command()
def tokenize() -> None:
    """Turn answers into rows of token ids and loss mask."""
    from eaglet.stages import tokenize as stage

    stage.run(params.load())


if __name__ == "__main__":
    main()
