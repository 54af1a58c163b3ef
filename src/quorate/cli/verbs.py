"""All verbs as a group, as the parser of the command line sees them."""

from typing import Any

import typer
from typer.core import TyperGroup

WHOLE = 1000


class Verbs(TyperGroup):
    """The group of verbs. Its flags are false where they are not given.

    Typer leaves `--help` and the flags of the shell's completion without a value, and imports pydantic to learn that
    nothing is no boolean: that would be half the time that `quorate VERB --help` takes.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """The options of the command itself."""
        parameters = super().get_params(ctx)
        for parameter in parameters:
            if getattr(parameter, "is_flag", False) and parameter.default is None:
                parameter.default = False
        return parameters

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The verbs, each with its first sentence, which is broken where the line ends and never cut."""
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Verbs"):
            formatter.write_dl([(name, verb.get_short_help_str(WHOLE)) for name, verb in verbs if verb is not None])


def group_of_verbs(name: str, metavar: str = "VERB ...") -> typer.Typer:
    """A verb that has verbs of its own, shown as the others are."""
    return typer.Typer(
        name=name,
        cls=Verbs,
        subcommand_metavar=metavar,
        rich_markup_mode=None,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
