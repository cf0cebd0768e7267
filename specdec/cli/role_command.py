"""The help of `specdec verifier|drafter|orchestrator` with the defaults of specdec.config.

Options of a role are None where they are not given, so that the environment may speak; their defaults are looked up
when somebody asks for help, and not on every start of a command.
"""

from typing import Any

from typer.core import TyperCommand, TyperOption


class RoleCommand(TyperCommand):
    """A command whose options are the fields of its role's settings."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from specdec.cli.roles import settings_class

        fields = settings_class(str(self.name)).model_fields
        for parameter in self.params:
            field = fields.get(parameter.name)
            if isinstance(parameter, TyperOption) and field is not None and not field.is_required():
                default = field.get_default(call_default_factory=True)
                parameter.show_default = default not in (None, "", ())
                parameter.default = default if isinstance(default, bool) else _as_typed(default)
        super().format_help(ctx, formatter)


def _as_typed(default: Any) -> str:
    match default:
        case object(get_secret_value=reveal):  # a default is no secret
            return str(reveal())
        case tuple():
            return ",".join(map(str, default))
        case _:
            return str(default)
